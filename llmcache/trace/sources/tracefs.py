"""Numbers and fields of the kernel's tracepoints, from tracefs, which need not be mounted anywhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

_FIELD = re.compile(r"\s*field:(?:.*[\s*])?(\w+)(?:\[\d+\])?;\s*offset:(\d+);\s*size:(\d+);")
_PLACES = ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # the same on every processor
_CREATE = 6
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Tracepoint:
    """A tracepoint: its number, and (offset, size) of each field in what it records."""

    number: int
    fields: dict[str, tuple[int, int]]


def tracepoints(names: list[str]) -> dict[str, Tracepoint]:
    """Returns those of `names` ("filemap/mm_filemap_fault") that this kernel has; OSError if tracefs cannot be read."""
    found = {}
    with _directory() as root:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found[name] = _parsed(_text(root, f"events/{name}/id"), _text(root, f"events/{name}/format"))
    return found


def _parsed(number: str, format: str) -> Tracepoint:
    fields = {found[1]: (int(found[2]), int(found[3])) for found in map(_FIELD.match, format.splitlines()) if found}
    return Tracepoint(int(number), fields)


def _text(root: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=root)) as file:
        return file.read()


@contextlib.contextmanager
def _directory() -> Iterator[int]:
    mounted = next((place for place in _PLACES if os.path.isdir(f"{place}/events")), None)
    root = os.open(mounted, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if mounted else _mounted_nowhere()
    try:
        yield root
    finally:
        os.close(root)


def _mounted_nowhere() -> int:
    """Returns a descriptor of tracefs that nobody else sees and that is gone when it is closed."""
    context = _call(_FSOPEN, ctypes.c_char_p(b"tracefs"), 1)
    try:
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        return _call(_FSMOUNT, context, 1, 0)
    finally:
        os.close(context)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
