"""Models on disk: the bytes that a token reads (`model_bytes`), and the tensors in a trace's files (`ModelHeaders`)."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.model import read_layout
from llmcache.model.moe import EXPERTS_USED, ModelBytes
from llmcache.model.names import INDEX_SUFFIX, MANIFEST_BYTES, manifest_layers, manifest_place, scanned
from llmcache.model.safetensors import SUFFIX, index_shards
from llmcache.model.tensors import (
    Experts,
    ModelLayout,
    Region,
    Tensor,
    shard_name,
    shard_names,
)

if TYPE_CHECKING:
    from llmcache.trace.record import TraceFile

log = logging.getLogger(__name__)

OPTION = "--model"
_NAMED = "give a .gguf or .safetensors file, the first of its shards, or a directory with one model"
_LONGEST_INDEX = 64 << 20
_LONGEST_CONFIG = 4 << 20

# Files that programs load with safetensors: tokenizer and configuration. A GGUF has both in its header.
_COMPANIONS = ("*.json", "*.model", "*.txt", "*.jinja")


def model_bytes(path: str) -> ModelBytes:
    """Return the bytes that a token reads of the model at `path`; `loop_bytes` includes all experts.

    `path`: a GGUF or safetensors file, any shard or index; a directory with one model, such as a snapshot of a Hugging Face
    hub cache; a file in the `blobs` of a hub cache or of Ollama's store; or a manifest in Ollama's store. Raises UsageError
    (no such file), DataError (damaged, not a model, missing shard) or MissingRequirement (cannot be read).
    """
    files = _files(path)
    layouts = [_layout(file) for file in files]
    tied = not any(layout.has_output for layout in layouts)
    whole = [region for layout in layouts for region in layout.regions(tied)]
    companions: set[Path] = set()
    if layouts[0].kind == "safetensors":
        companions.update(*(Path(files[0]).parent.glob(pattern) for pattern in _COMPANIONS))
    sparse_bytes = sum(region.size_bytes for region in whole if region.sparse and region.role == "loop")
    experts, used = _experts(files[0], layouts) if sparse_bytes else (None, None)
    return ModelBytes(
        path=path,
        kind=layouts[0].kind,
        files=len(files),
        loop_bytes=_total(whole, "loop"),
        hot_bytes=_total(whole, "hot") + sum(file.stat().st_size for file in companions if file.is_file()),
        row_bytes=_total(whole, "rows"),
        sparse_bytes=sparse_bytes,
        experts=experts,
        used=used,
        repacked_bytes=sum(layout.repacked_bytes for layout in layouts),
    )


def _experts(path: str, layouts: Sequence[ModelLayout]) -> tuple[int | None, int | None]:
    """Return the largest number of experts in a layer, and how many of them a token uses; None where unknown."""
    counts = [count for layout in layouts for _, _, count in Experts(layout).layers]
    declared = [layout.experts_used for layout in layouts if layout.experts_used]
    used = declared[0] if declared else _configured_experts(path) if layouts[0].kind == "safetensors" else None
    if counts and used is not None and not 1 <= used <= max(counts):
        raise DataError(f"{OPTION}: {path}: a token cannot use {used} of {max(counts)} experts")
    return max(counts, default=None), used


def _configured_experts(path: str) -> int | None:
    file = Path(path).parent / "config.json"
    if not os.path.exists(file):
        return None
    try:
        with _errors(str(file)), file.open("rb") as stream:
            config = json.loads(stream.read(_LONGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{OPTION}: {file} is not JSON: {error}") from error
    for section in (config, config.get("text_config")) if isinstance(config, dict) else ():
        for name in EXPERTS_USED:
            if isinstance(section, dict) and type(used := section.get(name)) is int:
                return used
    return None


def _total(regions: Sequence[Region], role: str) -> int:
    return sum(region.size_bytes for region in regions if region.role == role)


def _files(path: str) -> list[str]:
    path = _named_file(path)
    if path.endswith(INDEX_SUFFIX):
        return _indexed(path)
    files = list(shard_names(path))
    missing = [file for file in files if file != path and not os.path.exists(file)]
    if missing and os.path.exists(path):
        found = f"{len(files) - len(missing)} of {len(files)} exist"
        raise DataError(f"{OPTION}: the shard {missing[0]} is missing ({found})")
    return files


def _named_file(path: str) -> str:
    if os.path.isdir(path):
        return _in_directory(path)
    absolute = os.path.abspath(path)
    if (place := manifest_place(absolute)) is not None and os.path.isdir(f"{place[0]}/blobs"):
        return _in_manifest(path, f"{place[0]}/blobs")
    blobs, _, _ = absolute.rpartition("/")
    repository = os.path.dirname(blobs)
    if os.path.basename(blobs) == "blobs" and os.path.isdir(f"{repository}/snapshots"):
        links = scanned(repository).links_to(f"/blobs/{os.path.basename(absolute)}")
        return f"{repository}{links[0]}" if links else path
    return path


def _in_directory(path: str) -> str:
    with _errors(path):
        if os.path.isdir(snapshots := os.path.join(path, "snapshots")):
            revisions = [os.path.join(snapshots, name) for name in os.listdir(snapshots)]
            path = max(revisions, key=lambda revision: (os.stat(revision).st_mtime_ns, revision), default=path)
        names = sorted(os.listdir(path))
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith((".gguf", SUFFIX)) and not name.startswith("mmproj")]
    first = [name for name in files if (shard := shard_name(name)) is None or shard.number == 0] or files[:1]
    found = indexes or first
    if not found:
        raise UsageError(f"{OPTION}: {path} is a directory without a model", _NAMED)
    if len(found) > 1:
        raise UsageError(f"{OPTION}: {path} contains {len(found)} models: {', '.join(found[:3])}, ...", _NAMED)
    return os.path.join(path, found[0])


def _in_manifest(path: str, blobs: str) -> str:
    with _errors(path), open(path, "rb") as file:
        layers = manifest_layers(file.read(MANIFEST_BYTES))
    found = [layer.blob for layer in layers if layer.kind == "model"]
    if not found:
        raise DataError(f"{OPTION}: {path} names no model layer")
    files = [os.path.join(blobs, name) for name in (found[0], found[0].replace("-", ":"))]
    return next(filter(os.path.exists, files), files[0])


def _numbered(path: str, number: str) -> str:
    return re.sub(r"-[0-9]+(?=-of-[0-9]+\.[a-z]+$)", f"-{number}", path)


def _indexed(path: str) -> list[str]:
    with _errors(path), open(path, "rb") as file:
        names = index_shards(file.read(_LONGEST_INDEX))
    files = [os.path.join(os.path.dirname(path), name) for name in names]
    missing = [name for name in files if not os.path.exists(name)]
    if missing:
        raise DataError(f"{OPTION}: {path} names the shard {missing[0]}, which is missing")
    if not files:
        raise DataError(f"{OPTION}: {path} names no shards")
    return files


def _layout(path: str) -> ModelLayout:
    layout, _ = _known(path)
    if not layout.tensors and layout.shard is None:
        raise DataError(f"{OPTION}: {path} has no tensors: it is not a model")
    if layout.shard is not None and shard_name(path) is None:
        number, count = layout.shard
        raise DataError(
            f"{OPTION}: {path} is shard {number + 1} of {count}, but its name does not say so",
            f"shards are named like model-00001-of-{count:05d}.gguf",
        )
    return layout


def _known(path: str, hint: str = _NAMED) -> tuple[ModelLayout, int]:
    with _errors(path, hint):
        layout, size = _read(path)
    if layout is None:
        raise DataError(f"{OPTION}: {path} is neither a GGUF nor a safetensors file")
    return layout, size


def _read(path: str) -> tuple[ModelLayout | None, int]:
    # O_NONBLOCK: opening a FIFO must not block.
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        size = os.fstat(file.fileno()).st_size
        return read_layout(lambda offset, count: os.pread(file.fileno(), count, offset), size, os.path.basename(path)), size


@contextmanager
def _errors(path: str, hint: str = _NAMED) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise UsageError(f"{OPTION}: {path}: {error.strerror}", hint) from error
    except OSError as error:
        raise MissingRequirement(f"{OPTION}: cannot read {path}: {error.strerror}") from error
    except DataError as error:
        raise DataError(f"{OPTION}: {path}: {error.message}", error.hint) from error


class Models:
    """The model files of a trace. This class finds none."""

    def __call__(self, file: TraceFile) -> tuple[Tensor, ...]:
        """Return the header (as a tensor) and the tensors of `file`; empty for no model, or a changed one."""
        return ()

    def header(self, file: TraceFile) -> ModelLayout | None:
        """Return the layout of `file`; None if it is not a model, or missing or changed."""
        return None

    def experts(self, file: TraceFile) -> tuple[str, Experts] | None:
        """Return the path of `file`, with `*` for its shard number, and its experts; None if it has none."""
        return None


UNKNOWN = Models()  # finds no models


class ModelHeaders(Models):
    """Layouts of the model files of a trace, read if the path still has the recorded size and inode.

    Each path in `models` stands for the files of the trace that have its name, or else its size. UsageError if one
    matches none of `files`, DataError if it is not a model.
    """

    def __init__(self, models: Sequence[str], files: Sequence[TraceFile]) -> None:
        self._given: dict[int, ModelLayout] = {}
        for path in (_named_file(path) for path in models):
            layout, size = _known(path, "give a .gguf or .safetensors file of the trace")
            names = {os.path.basename(path), os.path.basename(os.path.realpath(path))}  # a trace records real paths
            same_name = [file for file in files if os.path.basename(file.path) in names]
            matches = same_name or [file for file in files if file.size_bytes == size]
            if not matches:
                raise UsageError(
                    f"{OPTION}: no file of the trace has the name or the size ({size} bytes) of {path}",
                    "llmcache info TRACE lists the files of a trace",
                )
            self._given.update((file.id, layout) for file in matches)
        self._read: dict[int, ModelLayout | None] = {}
        self._experts: dict[int, Experts | None] = {}  # cached: each cell of a simulation needs them

    def __call__(self, file: TraceFile) -> tuple[Tensor, ...]:
        layout = self.header(file)
        return () if layout is None else (Tensor("header", 0, layout.header_bytes, ""), *layout.tensors)

    def experts(self, file: TraceFile) -> tuple[str, Experts] | None:
        if file.id not in self._experts:
            layout = self.header(file)
            self._experts[file.id] = None if layout is None else Experts(layout)
        experts = self._experts[file.id]
        if experts is None or not experts.count:
            return None
        return (file.path if shard_name(file.path) is None else _numbered(file.path, "*")), experts

    def header(self, file: TraceFile) -> ModelLayout | None:
        if file.id in self._given:
            return self._given[file.id]
        if file.id not in self._read:
            self._read[file.id] = _found_layout(file)
        return self._read[file.id]


def _found_layout(file: TraceFile) -> ModelLayout | None:
    try:
        status = os.stat(file.path)
        if not file.size_bytes or status.st_size != file.size_bytes or file.inode not in (0, status.st_ino):
            return None
        return _read(file.path)[0]
    except OSError:  # the trace may come from another machine, or its files may be deleted
        return None
    except DataError as error:
        log.warning("%s: no tensor names: %s", file.path, error.message)
        return None
