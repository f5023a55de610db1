"""The files of a recording: paths by device and inode, which are all that the kernel reports.

A path is looked up when its inode first appears: in the open and mapped files of the process, then by file handle. If both
fail, the lookup is repeated each time the inode appears again. A renamed file keeps its first path, unless that path no
longer exists at the end.

A mount in mode inplace or steer locks the pinned part of a loop in memory. After the first touch no tier sees accesses to
it. The trace stores the smaller number of locked bytes of its first appearance and the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llmcache.arrays import Uint32s, Uint64s
from llmcache.errors import LlmcacheError
from llmcache.procfs import FileMapping, Mount, mappings, mounts
from llmcache.trace.record import TraceFile
from llmcache.trace.records import Key, distinct_files
from llmcache.units import format_size

DELETED = " (deleted)"
LockedQuery = Callable[[TraceFile], int]
# A file handle of these file systems is an inode number and a generation; generation 0 matches any.
_BY_INODE = ("ext2", "ext3", "ext4", "f2fs")
_INO32_GEN = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class OpenFile:
    """A file that a process has open or mapped."""

    path: str
    size_bytes: int


class FileTable:
    """The files of a recording, numbered as they appear. `source_paths` may grow."""

    def __init__(self, pids: Iterable[int], source_paths: Mapping[Key, str] = {}) -> None:
        self._source_paths = source_paths
        self.files: list[TraceFile] = []
        self.unnamed = 0
        self.changes = 0  # how often an unnamed file in `files` got its path
        self._ids: dict[Key, int] = {}
        self._known: dict[Key, OpenFile] = {}
        self._nameless: set[Key] = set()
        self._pids = set(pids)
        self._look(self._pids)

    def numbers(self, dev: Uint64s, inode: Uint64s, pid: Uint32s) -> Uint32s:
        """Return the id of each row's file. Look up unnamed files, and add new ones to `files`."""
        if not len(dev):
            return np.zeros(0, np.uint32)
        rows, index = distinct_files(dev, inode)
        keys = list(zip(dev[rows].tolist(), inode[rows].tolist(), strict=True))
        seen = dict(zip(keys, pid[rows].tolist(), strict=True))
        new = [key for key in keys if key not in self._ids or key in self._nameless]
        if new:
            to_find = {key for key in new if key not in self._known}
            self._pids.update(np.unique(pid).tolist())
            if to_find:
                # Start with the processes that accessed the files; another one may have passed on the descriptor.
                first = {seen[key] for key in new}
                self._look([*sorted(first), *sorted(self._pids - first)], to_find)
            for key in new:
                if key in self._ids:
                    self._name(key)
                else:
                    self._add(key)
        found: Uint32s = np.array([self._ids[key] for key in keys], np.uint32)[index]
        return found

    def finish(self) -> None:
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
        named = self._known.get(key)
        if named is None and (found := self._source_paths.get(key) or path_of(*key)):
            named = OpenFile(found, _size(found, key))
        path = named.path if named else unnamed(key)
        if named is None:
            self._nameless.add(key)
        self._ids[key] = len(self.files)
        self.files.append(TraceFile(len(self.files), path, *key, 0, named.size_bytes if named else 0))

    def _name(self, key: Key) -> None:
        if named := self._known.get(key):
            number = self._ids[key]
            self.files[number] = dataclasses.replace(self.files[number], path=named.path, size_bytes=named.size_bytes)
            self._nameless.discard(key)
            self.changes += 1

    def _look(self, pids: Iterable[int], wanted: set[Key] | None = None) -> None:
        for pid in list(pids):
            if wanted is not None and wanted <= self._known.keys():
                return
            try:
                self._known.update(open_files(pid))
            except OSError:
                self._pids.discard(pid)  # it has ended


def unnamed(key: Key) -> str:
    """Return the placeholder for an unknown path."""
    dev, inode = key
    return f"[{os.major(dev)}:{os.minor(dev)} inode {inode}]"


def _is_unnamed(file: TraceFile) -> bool:
    return file.path == unnamed((file.dev, file.inode))


def _is(path: str, key: Key) -> bool:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return False
    return stat.st_ino == key[1]  # not st_dev: it differs on subvolumes and overlays


def _size(path: str, key: Key) -> int:
    return os.stat(path).st_size if _is(path, key) else 0


def open_files(pid: int) -> Iterator[tuple[Key, OpenFile]]:
    """Yield the files that a process has open or mapped; OSError if it has ended or is not accessible.

    A file on an overlay is also yielded with device and inode of its layer.
    """
    seen = mounts(pid)
    by_dev = {mount.dev: mount for mount in seen.values()}
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError, ValueError):
            yield from _of_descriptor(pid, number, seen)
    for mapping in mappings(pid):
        if mapping.inode and mapping.path:
            yield from _of_mapping(pid, mapping, by_dev.get(mapping.dev))


def _of_descriptor(pid: int, number: str, seen: dict[int, Mount]) -> Iterator[tuple[Key, OpenFile]]:
    link = f"/proc/{pid}/fd/{number}"
    path = os.readlink(link)
    if not path.startswith("/"):
        return  # a pipe, a socket
    stat = os.stat(link)
    with open(f"/proc/{pid}/fdinfo/{number}") as lines:
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
    mount = seen.get(int(facts["mnt_id"]))
    # Not st_dev: btrfs has another one for each subvolume, but page-cache events carry the device of the mount.
    dev = mount.dev if mount else stat.st_dev
    yield from _named((dev, stat.st_ino), _without_mark(path, stat.st_nlink), stat.st_size, mount)


def _of_mapping(pid: int, mapping: FileMapping, mount: Mount | None) -> Iterator[tuple[Key, OpenFile]]:
    try:
        stat = os.stat(f"/proc/{pid}/map_files/{mapping.low:x}-{mapping.high:x}")
        size, links = stat.st_size, stat.st_nlink
    except OSError:  # map_files requires a privilege
        size, links = 0, 0 if mapping.path.endswith(DELETED) else 1
    yield from _named((mapping.dev, mapping.inode), _without_mark(mapping.path, links), size, mount)


def _named(key: Key, path: str, size: int, mount: Mount | None) -> Iterator[tuple[Key, OpenFile]]:
    file = OpenFile(path, size)
    yield key, file
    for layer in mount.layers(path) if mount else ():
        with contextlib.suppress(OSError):
            stat = os.stat(layer)
            yield (stat.st_dev, stat.st_ino), file


def _without_mark(path: str, links: int) -> str:
    return path.removesuffix(DELETED) if links == 0 else path


class LockedBytes:
    """The locked bytes of the files of a recording."""

    def __init__(self, query: LockedQuery) -> None:
        self.by_file: dict[int, int] = {}
        self.remarks: list[str] = []
        self._query = query
        self._before: dict[int, int] = {}

    def begin(self, files: Iterable[TraceFile]) -> None:
        for file in files:
            if file.id not in self._before:
                self._before[file.id] = self._bytes(file)

    def finish(self, files: Iterable[TraceFile]) -> None:
        for file in files:
            before = self._before.get(file.id, 0)
            if before and (size_bytes := min(before, self._bytes(file))):
                self.by_file[file.id] = size_bytes
                self.remarks.append(
                    f"{file.path}: its mount (llmcachefs) has pinned {format_size(size_bytes)} of the loop; reads of them "
                    "through mmap are not in the trace, and llmcache classify adds them to the loop"
                )

    def _bytes(self, file: TraceFile) -> int:
        try:
            return self._query(file)
        except LlmcacheError as error:
            self.remarks.append(f"{file.path}: the bytes that its mount has pinned are unknown: {error.message}")
            return 0


class _Handle(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_uint),
        ("kind", ctypes.c_int),
        ("inode", ctypes.c_uint32),
        ("generation", ctypes.c_uint32),
    )


def path_of(dev: int, inode: int) -> str | None:
    """Return a path of the inode; None if it has none or the file system cannot look it up."""
    if inode >= 1 << 32:
        return None
    for mount in mounts("self").values():
        if mount.dev != dev or mount.fstype not in _BY_INODE:
            continue
        with contextlib.suppress(OSError):
            path = _opened(mount.point, inode)
            if (stat := os.stat(path)) and (stat.st_dev, stat.st_ino) == (dev, inode):
                return path
    return None


def _opened(point: str, inode: int) -> str:
    """Return the path of the inode; OSError if it has none."""
    handle = _Handle(8, _INO32_GEN, inode, 0)
    base = os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = _libc.open_by_handle_at(base, ctypes.byref(handle), os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(base)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
