"""Handles of open files and directories: the small numbers that libfuse keeps for us."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from llmcache.fs.vfs.backing import Backing
from llmcache.fs.vfs.caller import NOBODY_ELSE, Caller

T = TypeVar("T")


@dataclass(frozen=True)
class FileHandle:
    """One open of a regular file."""

    backing: Backing
    flags: int
    pid: int
    rights: Caller | None = None  # of another user

    @property
    def direct(self) -> bool:
        """True for O_DIRECT: what it reads does not enter the page cache of the mount."""
        return bool(self.flags & os.O_DIRECT)

    @property
    def writable(self) -> bool:
        """True if the application may write through this handle."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    def writer(self, caller: Caller) -> Caller:
        """Whose rights a write has: the caller's, or of who opened the file, where the kernel writes what was mapped.

        Without a look at the caller's groups: those of who opened the file count, if that is the same user.
        """
        opener = self.rights or NOBODY_ELSE
        if not caller.is_other:
            return NOBODY_ELSE if caller.pid else opener
        return opener if (caller.uid, caller.gid) == (opener.uid, opener.gid) else replace(caller, known_groups=())


class Listing:
    """An open directory, read in the order of SOURCE with no copy of its entries: memory does not grow with its size.

    Offsets are counts of entries. The kernel normally goes on where it stopped; another offset (rewinddir, seekdir)
    reads the directory from its start again.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.lock = threading.Lock()
        self._position = 0
        self._pending: tuple[str, int] | None = None
        self._items: Iterator[tuple[str, int]] = iter(())
        self._started = False

    def entries(self, offset: int) -> Iterator[tuple[int, str, int]]:
        """(offset after it, name, mode bits of its type) from `offset` on; `taken` confirms each."""
        if not self._started or offset != self._position or offset == 0:
            self._restart(offset)
        while True:
            if self._pending is None:
                self._pending = next(self._items, None)
            if self._pending is None:
                return
            yield (self._position + 1, *self._pending)

    def taken(self, position: int) -> None:
        """The entry that ends at `position` went into the kernel's buffer."""
        self._position = position
        self._pending = None

    def _restart(self, offset: int) -> None:
        os.lseek(self.fd, 0, os.SEEK_SET)
        self._items = _scan(self.fd)
        self._pending = None
        self._started = True
        self._position = sum(1 for _ in itertools.islice(self._items, offset))

    def close(self) -> None:
        """Close the directory."""
        self._items = iter(())
        os.close(self.fd)


def _scan(fd: int) -> Iterator[tuple[str, int]]:
    yield ".", stat.S_IFDIR
    yield "..", stat.S_IFDIR
    with os.scandir(fd) as found:
        for entry in found:
            yield entry.name, _kind(entry)


def _kind(entry: os.DirEntry[str]) -> int:
    """Type bits of an entry; no stat for files, directories and links where the file system tells the type."""
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    try:
        return stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return 0


class HandleTable(Generic[T]):
    """Numbers for handles. A dict and a counter: both are atomic under the GIL."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._handles: dict[int, T] = {}

    def add(self, handle: T) -> int:
        """The number given to a new handle."""
        number = next(self._numbers)
        self._handles[number] = handle
        return number

    def get(self, number: int) -> T:
        """The handle of a number; EIO for one that is not open (a bug, not the application's)."""
        try:
            return self._handles[number]
        except KeyError:
            raise OSError(errno.EIO, f"no handle {number}") from None

    def all(self) -> list[T]:
        """Every handle there is now."""
        return list(self._handles.values())

    def pop(self, number: int) -> T:
        """Forget a number and return its handle."""
        handle = self.get(number)
        del self._handles[number]
        return handle
