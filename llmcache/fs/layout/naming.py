"""Names for what a trace's files hold: the tensors of model files that are still on this disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcache.errors import DataError, EnvironmentProblem, UsageError
from llmcache.fs.layout.model import read_layout
from llmcache.fs.layout.tensors import ModelLayout, Tensor

if TYPE_CHECKING:
    from llmcache.trace.record import TraceFile

log = logging.getLogger(__name__)

OPTION = "--model"


class TensorNames:
    """Gives the tensors of a file of a trace, called with it: header first, then in the order of their bytes.

    A file of the trace is looked at if it is where it was, with the size (and the inode, if the trace has it) that it
    had. `models` are taken for the files of the trace with their name, or else their size, wherever they are now.
    """

    def __init__(self, models: Sequence[str], files: Sequence[TraceFile]) -> None:
        """Reads the headers of `models`. UsageError for one that none of `files` can be; DataError for no model."""
        self._given: dict[int, tuple[Tensor, ...]] = {}
        for path in models:
            layout, size = _given_layout(path)
            matches = _matches(path, size, files)
            if not matches:
                raise UsageError(
                    f"{OPTION}: no file of the trace has the name or the size ({size} bytes) of {path}",
                    "llmcache info TRACE lists the files of a trace",
                )
            self._given.update((file.id, _named(layout)) for file in matches)
        self._read: dict[int, tuple[Tensor, ...]] = {}

    def __call__(self, file: TraceFile) -> tuple[Tensor, ...]:
        """Returns the tensors of `file`; nothing if it is no model, or not on this disk as it was."""
        if file.id in self._given:
            return self._given[file.id]
        if file.id not in self._read:
            self._read[file.id] = _found_tensors(file)
        return self._read[file.id]


def _matches(path: str, size: int, files: Sequence[TraceFile]) -> list[TraceFile]:
    name = os.path.basename(path)
    named = [file for file in files if os.path.basename(file.path) == name]
    return named or [file for file in files if file.size_bytes == size]


def _given_layout(path: str) -> tuple[ModelLayout, int]:
    try:
        layout, size = _layout_of(path)
    except OSError as error:
        kind = UsageError if isinstance(error, FileNotFoundError | IsADirectoryError) else EnvironmentProblem
        raise kind(f"{OPTION}: {path}: {error.strerror}", "give a .gguf or .safetensors file of the trace") from error
    except DataError as error:
        raise DataError(f"{OPTION}: {path}: {error.message}", error.hint) from error
    if layout is None:
        raise DataError(f"{OPTION}: {path} is neither a GGUF nor a safetensors file")
    return layout, size


def _found_tensors(file: TraceFile) -> tuple[Tensor, ...]:
    try:
        status = os.stat(file.path)
        if not file.size_bytes or status.st_size != file.size_bytes or file.inode not in (0, status.st_ino):
            return ()
        layout, _ = _layout_of(file.path)
    except OSError:  # a trace outlives its files, and travels
        return ()
    except DataError as error:
        log.warning("%s: no tensor names: %s", file.path, error.message)
        return ()
    return () if layout is None else _named(layout)


def _layout_of(path: str) -> tuple[ModelLayout | None, int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a fifo of that name must not block
    try:
        size = os.fstat(descriptor).st_size
        layout = read_layout(lambda offset, count: os.pread(descriptor, count, offset), size, os.path.basename(path))
    finally:
        os.close(descriptor)
    return layout, size


def _named(layout: ModelLayout) -> tuple[Tensor, ...]:
    return (Tensor("header", 0, layout.header_bytes, ""), *layout.tensors)
