"""Names of files by device and inode, which is all that the kernel tells of an access.

A name is looked up when its inode is first seen, in what the process has open and mapped, while it most likely still
is; else the file system is asked. It is the name at that time: a file that is renamed later keeps it unless the name is
gone at the end and a process still shows the new one; one that is deleted keeps the last it had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmcache.trace.capture import inodes
from llmcache.trace.capture.mounts import Mount, mounts
from llmcache.trace.record import TraceFile

DELETED = " (deleted)"
Key = tuple[int, int]  # device and inode


@dataclasses.dataclass(frozen=True)
class Named:
    """A file that a process has open or mapped."""

    path: str
    size_bytes: int


class Names:
    """The file table of a recording: numbers given in the order of appearance."""

    def __init__(self, pids: Iterable[int], told: Callable[[], Mapping[Key, str]] = dict) -> None:
        """Looks at what `pids` have open now. `told` gives the paths that the source of the records knows."""
        self._told = told
        self.files: list[TraceFile] = []
        self.unnamed = 0
        self._ids: dict[Key, int] = {}
        self._known: dict[Key, Named] = {}
        self._pids = set(pids)
        self._look(self._pids)

    def numbers(self, dev: NDArray[np.uint64], inode: NDArray[np.uint64], pid: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Returns the id of each row's file; files not seen before are looked up and added to `files`."""
        if not len(dev):
            return np.zeros(0, np.uint32)
        first, index = _distinct(dev, inode)
        keys = [(int(dev[row]), int(inode[row])) for row in first]
        new = [(key, row) for key, row in zip(keys, first, strict=True) if key not in self._ids]
        if new:
            strange = {key for key, _ in new if key not in self._known}
            self._pids.update(np.unique(pid).tolist())
            if strange:
                # Another process may have passed the file on: all are looked at, those that touched it first.
                self._look(_first({int(pid[row]) for _, row in new}, self._pids), strange)
            for key, _ in new:
                self._add(key)
        found: NDArray[np.uint32] = np.array([self._ids[key] for key in keys], np.uint32)[index]
        return found

    def finish(self) -> None:
        """Look again: at sizes, at names that have changed, and for those that were not found."""
        self._look(self._pids)
        for number, file in enumerate(self.files):
            key = (file.dev, file.inode)
            named = self._known.get(key)
            path = file.path
            if named and (_is_unnamed(file) or not _is(path, key)):
                path = named.path
            sizes = (file.size_bytes, named.size_bytes if named else 0, _size(path, key))
            self.files[number] = dataclasses.replace(file, path=path, size_bytes=max(sizes))
        self.unnamed = sum(map(_is_unnamed, self.files))

    def _add(self, key: Key) -> None:
        named = self._known.get(key) or _by_path(self._told().get(key), key) or _by_inode(key)
        path = named.path if named else unnamed(key)
        self._ids[key] = len(self.files)
        self.files.append(TraceFile(len(self.files), path, *key, 0, named.size_bytes if named else 0))

    def _look(self, pids: Iterable[int], wanted: set[Key] | None = None) -> None:
        """Look at `pids`, one after the other, until all that is `wanted` is known."""
        for pid in list(pids):
            if wanted is not None and wanted <= self._known.keys():
                return
            try:
                self._known.update(opened(pid))
            except OSError:
                self._pids.discard(pid)  # it is gone


def unnamed(key: Key) -> str:
    """Returns what stands for the path of a file that was closed and gone before it could be looked up."""
    dev, inode = key
    return f"[{os.major(dev)}:{os.minor(dev)} inode {inode}]"


def _is_unnamed(file: TraceFile) -> bool:
    return file.path == unnamed((file.dev, file.inode))


def opened(pid: int) -> Iterator[tuple[Key, Named]]:
    """Yields the files that process `pid` has open or mapped; OSError if it is gone or may not be looked at.

    Also by the device and inode of a layer, where they lie on an overlay.
    """
    seen = mounts(pid)
    by_dev = {mount.dev: mount for mount in seen.values()}
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError, ValueError):
            yield from _of_descriptor(pid, number, seen)
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            with contextlib.suppress(OSError):
                yield from _of_mapping(pid, line, by_dev)


def _of_descriptor(pid: int, number: str, seen: dict[int, Mount]) -> Iterator[tuple[Key, Named]]:
    link = f"/proc/{pid}/fd/{number}"
    path = os.readlink(link)
    if not path.startswith("/"):
        return  # a pipe, a socket
    stat = os.stat(link)
    with open(f"/proc/{pid}/fdinfo/{number}") as lines:
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
    mount = seen.get(int(facts["mnt_id"]))
    # The mount's device and not st_dev: btrfs shows another for each subvolume, which the page cache does not know.
    dev = mount.dev if mount else stat.st_dev
    yield from _named(pid, (dev, stat.st_ino), _without_mark(path, stat.st_nlink), stat.st_size, mount)


def _of_mapping(pid: int, line: str, by_dev: dict[int, Mount]) -> Iterator[tuple[Key, Named]]:
    fields = line.rstrip("\n").split(None, 5)
    if len(fields) < 6 or fields[4] == "0":
        return
    major, _, minor = fields[3].partition(":")
    dev, inode = os.makedev(int(major, 16), int(minor, 16)), int(fields[4])
    path = fields[5].replace("\\012", "\n")
    try:
        stat = os.stat(f"/proc/{pid}/map_files/{_range(fields[0])}")
        size, links = stat.st_size, stat.st_nlink
    except OSError:  # needs a privilege
        size, links = 0, 0 if path.endswith(DELETED) else 1
    yield from _named(pid, (dev, inode), _without_mark(path, links), size, by_dev.get(dev))


def _range(text: str) -> str:
    low, _, high = text.partition("-")
    return f"{int(low, 16):x}-{int(high, 16):x}"


def _named(pid: int, key: Key, path: str, size: int, mount: Mount | None) -> Iterator[tuple[Key, Named]]:
    named = Named(path, size)
    yield key, named
    for layer in mount.layers(path) if mount else ():
        with contextlib.suppress(OSError):
            stat = os.stat(layer)
            yield (stat.st_dev, stat.st_ino), named


def _without_mark(path: str, links: int) -> str:
    return path.removesuffix(DELETED) if links == 0 else path


def _by_path(path: str | None, key: Key) -> Named | None:
    return Named(path, _size(path, key)) if path else None


def _by_inode(key: Key) -> Named | None:
    path = inodes.path_of(*key)
    return Named(path, _size(path, key)) if path else None


def _is(path: str, key: Key) -> bool:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return False
    return stat.st_ino == key[1]  # the device of a subvolume or an overlay is another


def _size(path: str, key: Key) -> int:
    return os.stat(path).st_size if _is(path, key) else 0


def _first(some: set[int], everything: set[int]) -> Sequence[int]:
    return [*sorted(some), *sorted(everything - some)]


def _distinct(dev: NDArray[np.uint64], inode: NDArray[np.uint64]) -> tuple[list[int], NDArray[np.intp]]:
    """Returns a row of each distinct (dev, inode), and for all rows which of those it is."""
    if (inode == inode[0]).all() and (dev == dev[0]).all():
        return [0], np.zeros(len(dev), np.intp)
    order = np.lexsort((inode, dev))
    changes = (dev[order][1:] != dev[order][:-1]) | (inode[order][1:] != inode[order][:-1])
    group = np.concatenate(([0], np.cumsum(changes)))
    index = np.empty(len(dev), np.intp)
    index[order] = group
    first = order[np.concatenate(([0], np.flatnonzero(changes) + 1))]
    return first.tolist(), index
