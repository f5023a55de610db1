"""The model files that a process maps, and the processes that belong together."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from llmcache.errors import DataError
from llmcache.files import open_regular
from llmcache.memory import stalled_us
from llmcache.model import read_layout
from llmcache.model.tensors import ModelLayout, shard_name
from llmcache.procfs import FileMapping, descendants, is_running, mappings, read_bytes_of
from llmcache.tokens.clock import Key, Place
from llmcache.units import BLOCK_BYTES

Find = Callable[[], Iterable[int]]
"""Returns the processes to observe, as of now."""
_LEAST_MAPPED_BYTES = 64 << 10
_NUMBER_OF_SHARD = re.compile(r"-[0-9]{5,6}-of-[0-9]{5,6}\.")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Model:
    """A model; `path` is that of its first file, `size_bytes` that of all tensors."""

    path: str
    layouts: dict[Key, ModelLayout]
    mappings: dict[Key, tuple[FileMapping, ...]]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for layout in self.layouts.values() for tensor in layout.tensors)

    def address_of(self, place: Place) -> int | None:
        for mapping in self.mappings.get(place.file, ()):
            first_byte = mapping.block * BLOCK_BYTES
            if first_byte <= place.offset < first_byte + mapping.high - mapping.low:
                return mapping.low + place.offset - first_byte
        return None


@dataclass
class ModelFinder:
    """Finds the models that processes map. Headers are read once."""

    _known: dict[tuple[Key, int], ModelLayout | None] = field(default_factory=dict)

    def models(self, pid: int) -> list[Model]:
        mapped: dict[Key, list[FileMapping]] = {}
        for mapping in mappings(pid):
            if mapping.inode and mapping.path.startswith("/") and ".so" not in os.path.basename(mapping.path):
                mapped.setdefault((mapping.dev, mapping.inode), []).append(mapping)
        groups: dict[str, list[tuple[str, Key, ModelLayout]]] = {}
        for key, places in mapped.items():
            if sum(place.high - place.low for place in places) >= _LEAST_MAPPED_BYTES:
                layout = self._layout(pid, key, places[0])
                if layout is not None and layout.tensors:
                    path = places[0].path.removesuffix(" (deleted)")
                    groups.setdefault(_name_of_all(path, layout), []).append((path, key, layout))
        found = []
        for files in groups.values():
            files.sort(key=lambda file: file[0])
            layouts = {key: layout for _, key, layout in files}
            found.append(Model(files[0][0], layouts, {key: tuple(mapped[key]) for key in layouts}))
        return sorted(found, key=lambda model: -model.size_bytes)

    def _layout(self, pid: int, key: Key, mapping: FileMapping) -> ModelLayout | None:
        try:
            fd = _opened(pid, key, mapping)
        except OSError:
            return None
        try:
            size = os.fstat(fd).st_size
            if (key, size) not in self._known:
                found = None
                with contextlib.suppress(DataError, OSError):
                    name = os.path.basename(mapping.path)
                    found = read_layout(lambda offset, count: os.pread(fd, count, offset), size, name)
                self._known[key, size] = found
            return self._known[key, size]
        finally:
            os.close(fd)


def _opened(pid: int, key: Key, mapping: FileMapping) -> int:
    """Raise OSError if it is no regular file, or another file has its path now."""
    try:
        return open_regular(f"/proc/{pid}/map_files/{mapping.low:x}-{mapping.high:x}")
    except OSError:
        path = f"/proc/{pid}/root{mapping.path}"
        return open_regular(path, lambda status: status.st_ino == key[1], os.O_NOFOLLOW)


def _name_of_all(path: str, layout: ModelLayout) -> str:
    if shard_name(path) is not None:
        return _NUMBER_OF_SHARD.sub("-*.", path)
    return f"{os.path.dirname(path)}/{layout.shard[1]} shards" if layout.shard is not None else path


class ProcessTree:
    """A process and its descendants, also those whose parent has ended."""

    def __init__(self, pid: int) -> None:
        self._pids = {pid}

    def __call__(self) -> set[int]:
        alive = {pid for pid in self._pids if is_running(pid)}
        self._pids = alive.union(*(descendants(pid) for pid in alive))
        return set(self._pids)


@dataclass(frozen=True)
class Counters:
    """Counters of a process in /proc, which other users can read."""

    cpu_ns: int = 0
    read_bytes: int = 0
    major_faults: int = 0


class CountersOfAll:
    """The growth of the counters of processes that come and go."""

    def __init__(self) -> None:
        self._last: dict[int, Counters] = {}

    def growth(self, pids: Iterable[int]) -> Counters:
        """Return the growth since the last call; new processes count from now on."""
        now = {pid: counters for pid in pids for counters in _counters(pid)}
        grown = [(counters, self._last[pid]) for pid, counters in now.items() if pid in self._last]
        self._last = now
        return Counters(
            sum(max(0, after.cpu_ns - before.cpu_ns) for after, before in grown),
            sum(max(0, after.read_bytes - before.read_bytes) for after, before in grown),
            sum(max(0, after.major_faults - before.major_faults) for after, before in grown),
        )


def _counters(pid: int) -> Iterator[Counters]:
    with contextlib.suppress(OSError, IndexError, ValueError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        read = 0
        with contextlib.suppress(OSError):  # of another user
            read = read_bytes_of(pid)
        yield Counters((int(fields[11]) + int(fields[12])) * 10**9 // _CLOCK_TICKS, read, int(fields[9]))


def pressure() -> dict[str, int]:
    """Return the microseconds that some task has waited for memory and for I/O; {} without PSI."""
    return {name: us for name in ("io", "memory") if (us := stalled_us(resource=name)) is not None}
