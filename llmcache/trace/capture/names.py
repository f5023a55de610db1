"""Names of files by device and inode, which is all that the kernel tells of an access.

A name is looked up when its inode is first seen, in what the process has open and mapped, while it most likely still
is; else the file system is asked; else (it was closed already, on a file system that cannot be asked) each time it is
seen again. It is the name at that time: a file that is renamed later keeps it unless the name is
gone at the end and a process still shows the new one; one that is deleted keeps the last it had.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llmcache.trace.capture import inodes
from llmcache.trace.openfiles import Key, Named, opened
from llmcache.trace.record import TraceFile


class Names:
    """The file table of a recording: numbers given in the order of appearance."""

    def __init__(self, pids: Iterable[int], told: Callable[[], Mapping[Key, str]] = dict) -> None:
        """Looks at what `pids` have open now. `told` gives the paths that the source of the records knows."""
        self._told = told
        self.files: list[TraceFile] = []
        self.unnamed = 0
        self.changes = 0  # how often a file that was in `files` already got its name
        self._ids: dict[Key, int] = {}
        self._known: dict[Key, Named] = {}
        self._nameless: set[Key] = set()
        self._pids = set(pids)
        self._look(self._pids)

    def numbers(self, dev: NDArray[np.uint64], inode: NDArray[np.uint64], pid: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Returns the id of each row's file; files without a name are looked up, new ones added to `files`."""
        if not len(dev):
            return np.zeros(0, np.uint32)
        first, index = _distinct(dev, inode)
        keys = [(int(dev[row]), int(inode[row])) for row in first]
        new = [(key, row) for key, row in zip(keys, first, strict=True) if key not in self._ids or key in self._nameless]
        if new:
            strange = {key for key, _ in new if key not in self._known}
            self._pids.update(np.unique(pid).tolist())
            if strange:
                # Another process may have passed the file on: all are looked at, those that touched it first.
                self._look(_first({int(pid[row]) for _, row in new}, self._pids), strange)
            for key, _ in new:
                if key in self._ids:
                    self._name(key)
                else:
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
        if named is None:
            self._nameless.add(key)
        self._ids[key] = len(self.files)
        self.files.append(TraceFile(len(self.files), path, *key, 0, named.size_bytes if named else 0))

    def _name(self, key: Key) -> None:
        """Give a file that had none its name, if a process shows it by now."""
        if named := self._known.get(key):
            number = self._ids[key]
            self.files[number] = dataclasses.replace(self.files[number], path=named.path, size_bytes=named.size_bytes)
            self._nameless.discard(key)
            self.changes += 1

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
