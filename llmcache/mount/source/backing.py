"""Open files of SOURCE: one Backing, with a generation, for each open path (so for each kernel inode of the mount).

The next open of a replaced file switches the Backing to its descriptors and begins a generation; every handle then reads the
new file. The open fails with EBUSY while a user with the path open may not read the new file.

Locks: BackingTable's lock protects maps and references, without I/O under it. Backing.lock serializes changes through the
mount; no thread waits for it while it holds another lock. Reads take neither: dup2 is atomic with respect to pread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmcache.mount import syscalls
from llmcache.mount.source.tree import THE_DAEMON, Caller, is_at, no_read_ahead, open_again, open_for
from llmcache.units import BLOCK_BYTES

log = logging.getLogger(__name__)

_REMEMBERED = 65536
# Kernels before 6.13 take timestamps from the last timer tick: ctime does not show a second change within one tick.
_TICK_NS = 50_000_000
_TRIES = 100  # attempts to open a path while other processes keep replacing its file


@dataclass(frozen=True)
class Identity:
    """Attributes that distinguish two contents of a file."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(status: os.stat_result) -> Identity:
        return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def settled(self) -> bool:
        """True if a further change would alter ctime."""
        return time.time_ns() - self.ctime_ns > _TICK_NS


class Backing:
    """One open file of SOURCE, shared by all handles of its path."""

    def __init__(self, path: str, fd: int, status: os.stat_result, writable: bool) -> None:
        self.path = path
        self.old_path: str | None = None  # before its last rename
        self.renames = 0
        self.fd = fd
        self.direct_fd = open_again(fd, os.O_RDONLY | os.O_DIRECT)
        self.writable = writable
        self.generation = 0
        self.dropped = 0  # the kernel has no pages of generations before this one
        self.references = 0
        self.identity = Identity.of(status)
        self.lock = threading.RLock()
        self.links = status.st_nlink
        self.hidden = False  # deleted through the mount while open
        self.deleted = False  # behind the mount; reset when another file is at the path
        self.kept = False  # never closed, because a read of it has not ended
        self._changed_behind = False
        self._changes = 0  # incremented at the start and at the end of each change
        self._synced = 0  # value of `_changes` up to which changes are on storage
        no_read_ahead(fd)

    @property
    def unsettled(self) -> bool:
        """The kernel may have pages of an earlier generation."""
        return self.dropped < self.generation

    @property
    def _dirty(self) -> bool:
        return self._synced < self._changes

    @property
    def dev(self) -> int:
        return self.identity.dev

    @property
    def ino(self) -> int:
        return self.identity.ino

    @property
    def size(self) -> int:
        return self.identity.size

    @property
    def mtime_ns(self) -> int:
        return self.identity.mtime_ns

    def read_into(self, address: int, size: int, offset: int) -> int:
        """The result is short only at the end of the file. OSError."""
        done = 0
        direct = self.direct_fd
        if direct is not None and not self._dirty and (address | size | offset) % BLOCK_BYTES == 0:
            done = self._read_direct(direct, address, size, offset)
        if done < size:
            done += self._read_buffered(address + done, size - done, offset + done)
        return done

    def _read_direct(self, fd: int, address: int, size: int, offset: int) -> int:
        """A short read that ends within a block ends it."""
        done = 0
        while done < size:
            try:
                count = syscalls.pread(fd, address + done, size - done, offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL:  # the device has larger blocks: the caller reads it buffered
                    return done
                raise
            done += count
            if count == 0 or done % BLOCK_BYTES:
                break
        return done

    def _read_buffered(self, address: int, size: int, offset: int) -> int:
        done = 0
        while done < size:
            count = syscalls.pread(self.fd, address + done, size - done, offset + done)
            if count == 0:
                break
            done += count
        if done and not self._dirty:
            start = offset // BLOCK_BYTES * BLOCK_BYTES
            length = (offset + done + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES - start
            with contextlib.suppress(OSError):  # only advice, which some file systems do not support
                os.posix_fadvise(self.fd, start, length, os.POSIX_FADV_DONTNEED)
        return done

    def write_from(self, address: int, size: int, offset: int) -> int:
        """The result is short only after an error. OSError if nothing was written."""
        done = 0
        with self.own_change():
            while done < size:
                try:
                    done += syscalls.pwrite(self.fd, address + done, size - done, offset + done)
                except OSError:
                    if done == 0:
                        raise
                    break  # report the partial write; the next write meets the error
        return done

    @contextlib.contextmanager
    def own_change(self) -> Iterator[None]:
        """The change does not count as one behind the mount."""
        with self.lock:
            if Identity.of(os.fstat(self.fd)) != self.identity:
                self._changed_behind = True
            self._changes += 1
            try:
                yield
            finally:
                self._changes += 1
                self.record()

    def record(self) -> None:
        with self.lock:
            status = os.fstat(self.fd)
            self.identity = Identity.of(status)
            self.links = status.st_nlink

    def outdate(self) -> int:
        """Return a new generation: the kernel's pages are stale."""
        with self.lock:
            self.record()
            self.generation += 1
            return self.generation

    def sync(self, data_only: bool) -> None:
        changes = self._changes  # a write in progress increments it again at its end
        (os.fdatasync if data_only else os.fsync)(self.fd)
        self._synced = max(self._synced, changes)

    def notice(self, fd: int) -> bool:
        """Switch to the file of `fd`; return True if the content changed."""
        with self.lock:
            status = os.fstat(fd)  # under the lock: not between a write through the mount and its record()
            identity = Identity.of(status)
            if identity == self.identity and not self._changed_behind:
                return False
            if self.is_other(status):
                self._exchange(fd)
            self.identity, self.links = identity, status.st_nlink
            self._changed_behind = False
            self.generation += 1
            return True

    def settle(self, known: Identity | None, empty: bool) -> int | None:
        """Return the generation whose pages must be dropped, or None.

        `empty`: the kernel has no pages. `known`: their content, None if unknown.
        """
        with self.lock:
            self.record()  # a change through another hard link shows here, or it found this Backing in the table
            if not self.generation and (empty or known == self.identity):
                self.dropped = 0
            return self.generation if self.unsettled else None

    def is_other(self, status: os.stat_result) -> bool:
        return (status.st_dev, status.st_ino) != (self.dev, self.ino)

    def make_writable(self, fd: int) -> None:
        with self.lock:
            os.dup2(fd, self.fd, inheritable=False)
            no_read_ahead(self.fd)
            self.writable = True

    def _exchange(self, fd: int) -> None:
        writable = open_again(fd, os.O_RDWR) if self.writable else None  # open handles may write
        self.writable = writable is not None
        os.dup2(fd if writable is None else writable, self.fd, inheritable=False)
        if writable is not None:
            os.close(writable)
        self.deleted = False
        no_read_ahead(self.fd)
        fresh = open_again(fd, os.O_RDONLY | os.O_DIRECT)
        if fresh is not None and self.direct_fd is not None:
            os.dup2(fresh, self.direct_fd, inheritable=False)
            os.close(fresh)
        else:
            # A read may be using the descriptor, so it cannot be closed: redirect it to the new file, buffered.
            if self.direct_fd is not None:
                os.dup2(fd, self.direct_fd, inheritable=False)
            self.direct_fd = fresh

    def keep_open(self, reason: str) -> None:
        """Never close: a read in progress could read another file."""
        log.error("inode %d stays open: %s", self.identity.ino, reason)
        self.kept = True

    def close(self) -> None:
        if self.kept:
            return
        os.close(self.fd)
        if self.direct_fd is not None:
            os.close(self.direct_fd)
            self.direct_fd = None


@dataclass(frozen=True)
class Opened:
    """Result of BackingTable.open."""

    backing: Backing
    changed: bool  # the content differs from the one known before
    drop: int | None  # the generation before which the kernel must drop pages; None: it has no stale pages


class BackingTable:
    """All open Backings by path, and the identities of recently closed ones.

    `_closed`: the content of the kernel's pages of a path, None if unknown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Backing] = {}
        self._closed: OrderedDict[str, Identity | None] = OrderedDict()
        self._complete = True

    def open(
        self,
        path: str,
        dir_fd: int,
        name: str,
        flags: int,
        mode: int = 0o600,
        *,
        caller: Caller = THE_DAEMON,
        may_replace: Callable[[Backing, int], bool] = lambda _backing, _fd: True,
    ) -> Opened:
        """Open `name` in `dir_fd`, the mount's `path`. O_APPEND and O_TRUNC are ignored.

        PermissionError if `caller` may not open the file; EBUSY if `path` has another file now and `may_replace(backing,
        fd)` is false, because existing handles would read it.
        """
        for _ in range(_TRIES):
            fd = open_for(caller, dir_fd, name, flags, mode)
            try:
                backing = self._new(path, fd, flags)
                if backing is not None:
                    fd = -1  # now owned by the Backing
                    return self._begin(backing)
                backing = self.acquire(path)
                opened = None if backing is None else self._join(backing, dir_fd, name, fd, flags, may_replace)
            finally:
                if fd >= 0:
                    os.close(fd)
            if opened is not None:
                return opened
            flags &= ~os.O_EXCL  # the first attempt created the file
        raise _busy()

    def _new(self, path: str, fd: int, flags: int) -> Backing | None:
        """Return None if the path has a Backing."""
        with self._lock:
            if path in self._open:
                return None
        backing = Backing(path, fd, os.fstat(fd), flags & os.O_ACCMODE != os.O_RDONLY)
        backing.references, backing.dropped = 1, -1
        with self._lock:
            if self._open.setdefault(path, backing) is backing:
                return backing
        if backing.direct_fd is not None:  # a concurrent open was faster
            os.close(backing.direct_fd)
        return None

    def _begin(self, backing: Backing) -> Opened:
        """Until the end, `unsettled` prevents `keep_cache`."""
        try:
            with self._lock:
                empty = self._complete and backing.path not in self._closed
                known = self._closed.pop(backing.path, None)
            drop = backing.settle(known, empty)
            return Opened(backing, drop is not None and known is not None, drop)
        except BaseException:
            self.release(backing)
            raise

    def _join(
        self, backing: Backing, dir_fd: int, name: str, fd: int, flags: int, may_replace: Callable[[Backing, int], bool]
    ) -> Opened | None:
        """The caller has acquired the reference. None: the file was replaced again."""
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        try:
            with backing.lock:
                if backing.is_other(os.fstat(fd)):
                    if not is_at(dir_fd, name, fd):  # the Backing may already have the newer file
                        self.release(backing)
                        return None
                    if not may_replace(backing, fd):
                        raise _busy()
                changed = backing.notice(fd)
                if writable and not backing.writable:
                    backing.make_writable(fd)
                return Opened(backing, changed, backing.generation if changed else None)
        except BaseException:
            self.release(backing)
            raise

    def acquire(self, path: str) -> Backing | None:
        with self._lock:
            backing = self._open.get(path)
            if backing is not None:
                backing.references += 1
            return backing

    def release(self, backing: Backing) -> bool:
        """Return True if the Backing was closed."""
        with self._lock:
            backing.references -= 1
            if backing.references:
                return False
            if self._open.get(backing.path) is backing:
                del self._open[backing.path]
                if not backing.hidden:
                    known = not backing.unsettled and backing.identity.settled()
                    self._remember(backing.path, backing.identity if known else None)
        backing.close()
        return True

    def is_last(self, backing: Backing) -> bool:
        with self._lock:
            return backing.references == 1

    def _remember(self, path: str, identity: Identity | None) -> None:
        self._closed[path] = identity
        while len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)
            self._complete = False

    @contextlib.contextmanager
    def using(self, path: str) -> Iterator[Backing | None]:
        """Yield None if the path is not open."""
        backing = self.acquire(path)
        try:
            yield backing
        finally:
            if backing is not None:
                self.release(backing)

    def find_deleted(self) -> list[Backing]:
        """Return Backings deleted behind the mount, with another reference."""
        with self._lock:
            paths = [path for path, backing in self._open.items() if not (backing.hidden or backing.deleted)]
        found = []
        for path in paths:
            if (backing := self.acquire(path)) is None:
                continue
            # `links` is 0 on file systems that do not count links. If fstat fails, the next call tries again.
            with backing.lock, contextlib.suppress(OSError):
                backing.deleted = backing.links > 0 and not os.fstat(backing.fd).st_nlink and not backing.hidden
            if backing.deleted:
                found.append(backing)
            else:
                self.release(backing)
        return found

    def others(self, backing: Backing) -> list[Backing]:
        """Return Backings of other hard links, with another reference."""
        with self._lock:
            same = [b for b in self._open.values() if b is not backing and (b.dev, b.ino) == (backing.dev, backing.ino)]
            for other in same:
                other.references += 1
            return same

    def moved(self, old: str, new: str, *, exchanged: bool = False) -> None:
        """`new` replaces any previous file."""
        ways = [(old, new), (new, old)] if exchanged else [(old, new)]
        with self._lock:
            found = [
                (path, target + path[len(origin) :], self._open.pop(path, None), self._closed.pop(path, path) is not path)
                for origin, target in ways
                for path in [p for p in [*self._open, *self._closed] if p == origin or p.startswith(origin + "/")]
            ]
            for path, target, backing, was_closed in found:
                if was_closed:  # the kernel inode keeps its pages; the rename changes ctime, so the identity is unknown
                    self._remember(target, None)
                if backing is not None:
                    backing.old_path, backing.path = path, target
                    backing.renames += 1
                    self._open[target] = backing

    def forget(self, path: str) -> None:
        """The path was deleted through the mount."""
        with self._lock:
            self._closed.pop(path, None)


def _busy() -> OSError:
    return OSError(errno.EBUSY, os.strerror(errno.EBUSY))
