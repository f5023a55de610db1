"""Open files of SOURCE: one Backing for each path (so for each kernel inode of the mount) with a generation.

The mount's inodes belong to paths, not to inodes of SOURCE. A file that is replaced behind the mount therefore keeps its
kernel inode; once an open has noticed, the same Backing continues with the new file's descriptors and a higher
generation, and every handle of that path reads the new file, as if it had been rewritten in place. Nothing stale can
then be fetched again, at the price that an old handle does not go on reading the replaced file. If one of its holders
may not read the new file, nobody can open that (EBUSY) before they have closed the old one: the kernel's pages are the
same for all.

Locks: BackingTable's lock guards the two maps, references and the descriptors' exchange; Backing.lock serialises changes
of one file made through the mount with the bookkeeping of its identity. Reads take neither: descriptors are exchanged
by dup2, which is atomic for a pread that runs meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmcache.fs import syscalls
from llmcache.fs.caller import NOBODY_ELSE, Caller

BLOCK = 4096
_REMEMBERED = 65536
# Kernels before 6.13 stamp files with the tick's time: a change within the same tick does not show in ctime.
_TICK_NS = 50_000_000
_MOMENT_S = 10.0


@dataclass(frozen=True)
class Identity:
    """What tells one content of a file from another without reading it."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(status: os.stat_result) -> Identity:
        """The identity that a stat result shows."""
        return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def settled(self) -> bool:
        """True if the last change is old enough that another one would show."""
        return time.time_ns() - self.ctime_ns > _TICK_NS


class Backing:
    """One open file of SOURCE, shared by all handles of its path."""

    def __init__(self, path: str, fd: int, status: os.stat_result, writable: bool) -> None:
        self.path = path
        self.fd = fd
        self.direct_fd = _open_direct(fd)
        self.writable = writable
        self.generation = 0
        self.references = 0
        self.identity = Identity.of(status)
        self.lock = threading.RLock()
        self.links = status.st_nlink
        self.unsettled = False  # kernel pages of an earlier generation may still be there
        self.hidden = False  # deleted while open
        self._changed_behind = False
        self._dirty = False
        _no_read_ahead(fd)

    @property
    def dev(self) -> int:
        """Device of the file in SOURCE."""
        return self.identity.dev

    @property
    def ino(self) -> int:
        """Inode number of the file in SOURCE."""
        return self.identity.ino

    @property
    def size(self) -> int:
        """Size in bytes when it was last looked at."""
        return self.identity.size

    @property
    def mtime_ns(self) -> int:
        """Modification time when it was last looked at."""
        return self.identity.mtime_ns

    def read_into(self, address: int, size: int, offset: int) -> int:
        """Fill memory at `address`; returns the bytes read, short only at the end of the file. Raises OSError."""
        done = 0
        direct = self.direct_fd
        if direct is not None and not self._dirty and (address | size | offset) % BLOCK == 0:
            done = self._read_direct(direct, address, size, offset)
        if done < size:
            done += self._read_buffered(address + done, size - done, offset + done)
        return done

    def _read_direct(self, fd: int, address: int, size: int, offset: int) -> int:
        """Bytes read without the page cache of SOURCE; stops at the first short read that ends between blocks."""
        done = 0
        while done < size:
            try:
                count = syscalls.pread(fd, address + done, size - done, offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL:  # a device with larger blocks: the buffered descriptor reads it
                    return done
                raise
            done += count
            if count == 0 or done % BLOCK:
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
            start = offset // BLOCK * BLOCK
            length = (offset + done + BLOCK - 1) // BLOCK * BLOCK - start
            with contextlib.suppress(OSError):  # advice only: some file systems know none
                os.posix_fadvise(self.fd, start, length, os.POSIX_FADV_DONTNEED)
        return done

    def write_from(self, address: int, size: int, offset: int) -> int:
        """Write memory at `address` through to SOURCE; returns the bytes written (all, or OSError)."""
        done = 0
        with self.own_change():
            while done < size:
                try:
                    done += syscalls.pwrite(self.fd, address + done, size - done, offset + done)
                except OSError:
                    if done == 0:
                        raise
                    break  # a partial write is reported as such; the next one meets the error
        return done

    @contextlib.contextmanager
    def own_change(self) -> Iterator[None]:
        """Around a change made through the mount: it is not taken for one made behind it."""
        with self.lock:
            if Identity.of(os.fstat(self.fd)) != self.identity:
                self._changed_behind = True
            self._dirty = True
            try:
                yield
            finally:
                self.record()

    def record(self) -> None:
        """Take the file's present state as known."""
        with self.lock:
            status = os.fstat(self.fd)
            self.identity = Identity.of(status)
            self.links = status.st_nlink

    def outdate(self) -> None:
        """The content changed through another name: pages the kernel holds for this one are wrong."""
        with self.lock:
            self.record()
            self.generation += 1
            self.unsettled = True

    def sync(self, data_only: bool) -> None:
        """fsync or fdatasync of SOURCE's file."""
        with self.lock:  # a write that comes meanwhile must not be marked clean
            (os.fdatasync if data_only else os.fsync)(self.fd)
            self._dirty = False

    def notice(self, fd: int) -> bool:
        """At an open that brought `fd`: continue with the file now at this path; True if the content changed."""
        with self.lock:
            status = os.fstat(fd)  # under the lock: a write through the mount and its record() come before or after
            identity = Identity.of(status)
            if identity == self.identity and not self._changed_behind:
                return False
            if self.is_other(status):
                self._exchange(fd)
            self.identity, self.links = identity, status.st_nlink
            self._changed_behind = False
            self.generation += 1
            self.unsettled = True
            return True

    def is_other(self, status: os.stat_result) -> bool:
        """True if `status` is of another file than this one, whatever its path."""
        return (status.st_dev, status.st_ino) != (self.dev, self.ino)

    def make_writable(self, fd: int) -> None:
        """Replace a read-only descriptor by a writable one of the same file."""
        with self.lock:
            os.dup2(fd, self.fd, inheritable=False)
            _no_read_ahead(self.fd)
            self.writable = True

    def _exchange(self, fd: int) -> None:
        os.dup2(fd, self.fd, inheritable=False)
        _no_read_ahead(self.fd)
        fresh = _open_direct(fd)
        if fresh is not None and self.direct_fd is not None:
            os.dup2(fresh, self.direct_fd, inheritable=False)
            os.close(fresh)
        else:
            # The number may not be closed while a read uses it: point it at the new file, buffered, and forget it.
            if self.direct_fd is not None:
                os.dup2(fd, self.direct_fd, inheritable=False)
            self.direct_fd = fresh

    def close(self) -> None:
        """Close the descriptors; the Backing is not used after this."""
        os.close(self.fd)
        if self.direct_fd is not None:
            os.close(self.direct_fd)
            self.direct_fd = None


def _open_direct(fd: int) -> int | None:
    """A second descriptor of the same file with O_DIRECT, or None where the file system refuses that."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def _no_read_ahead(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


@dataclass(frozen=True)
class Closed:
    """What is known of a path since its last release."""

    identity: Identity | None  # of the content whose pages the kernel may still hold
    at: float  # time.monotonic()


@dataclass(frozen=True)
class Opened:
    """Result of BackingTable.open."""

    backing: Backing
    changed: bool  # the content is not the one known before
    drop: bool  # the kernel may hold pages of another content: they must be dropped, then `unsettled` cleared
    keep_cache: bool  # pages the kernel holds for this path are of this content


class BackingTable:
    """All open Backings by path, and the identities of recently closed ones.

    A closed path may have left pages in the kernel; identity None says that it is not known of which content. A path
    without an entry was never open, so there are none, unless entries had to be given up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Backing] = {}
        self._closed: OrderedDict[str, Closed] = OrderedDict()
        self._complete = True

    def open(
        self,
        path: str,
        dir_fd: int,
        name: str,
        flags: int,
        mode: int = 0o600,
        *,
        caller: Caller = NOBODY_ELSE,
        may_replace: Callable[[Backing, int], bool] = lambda _backing, _fd: True,
    ) -> Opened:
        """Open `name` in `dir_fd`, known as `path`; O_CREAT and O_EXCL are honoured, O_APPEND and O_TRUNC are not.

        PermissionError if `caller` may not open it. EBUSY if another file is at `path` now and `may_replace(backing, fd)`
        is false: those who have the one before open would read it.
        """
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        fd = _open_for(caller, dir_fd, name, flags, mode)
        keep = False
        try:
            status = os.fstat(fd)
            with self._lock:
                backing = self._open.get(path)
                if backing is None:
                    opened = self._add(path, fd, status, writable)
                    keep = True
                    return opened
                if backing.is_other(status) and not may_replace(backing, fd):
                    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
                changed = backing.notice(fd)
                if writable and not backing.writable:
                    backing.make_writable(fd)
                backing.references += 1
                return Opened(backing, changed, changed, not backing.unsettled)
        finally:
            if not keep:
                os.close(fd)

    def _add(self, path: str, fd: int, status: os.stat_result, writable: bool) -> Opened:
        backing = Backing(path, fd, status, writable)
        fresh = path not in self._closed and self._complete
        closed = self._closed.pop(path, None)
        known = closed.identity if closed is not None else None
        backing.unsettled = not fresh and known != backing.identity
        backing.references = 1
        self._open[path] = backing
        return Opened(backing, backing.unsettled and known is not None, backing.unsettled, not backing.unsettled)

    def acquire(self, path: str) -> Backing | None:
        """The open Backing of a path with another reference, or None."""
        with self._lock:
            backing = self._open.get(path)
            if backing is not None:
                backing.references += 1
            return backing

    def release(self, backing: Backing) -> bool:
        """Give one reference back; True if it was the last one (the Backing is closed then)."""
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
        """True if there is one reference left."""
        with self._lock:
            return backing.references == 1

    def _remember(self, path: str, identity: Identity | None) -> None:
        self._closed[path] = Closed(identity, time.monotonic())
        while len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)
            self._complete = False

    @contextlib.contextmanager
    def using(self, path: str) -> Iterator[Backing | None]:
        """A with block in which the open Backing of a path, if there is one, stays open whoever closes it meanwhile."""
        backing = self.acquire(path)
        try:
            yield backing
        finally:
            if backing is not None:
                self.release(backing)

    def others(self, backing: Backing) -> list[Backing]:
        """Open Backings of the same file under other names (hard links), each with another reference."""
        if backing.links < 2:
            return []
        with self._lock:
            same = [b for b in self._open.values() if b is not backing and (b.dev, b.ino) == (backing.dev, backing.ino)]
            for other in same:
                other.references += 1
            return same

    def moved(self, old: str, new: str) -> None:
        """A path, or a directory with all below it, was renamed through the mount; `new` no longer names what it did."""
        with self._lock:
            for table in (self._open, self._closed):
                for path in [p for p in table if p == old or p.startswith(old + "/")]:
                    self._move(path, new + path[len(old) :])

    def _move(self, path: str, target: str) -> None:
        if path in self._closed:  # its kernel inode goes along, pages and all; the change time moves
            del self._closed[path]
            self._remember(target, None)
        backing = self._open.pop(path, None)
        if backing is not None:
            backing.path = target
            self._open[target] = backing

    def just_closed(self, path: str) -> bool:
        """True if the last reference was given back a moment ago: libfuse may still count the file as open."""
        with self._lock:
            closed = self._closed.get(path)
            return closed is not None and time.monotonic() - closed.at < _MOMENT_S

    def forget(self, path: str) -> None:
        """A path was deleted through the mount."""
        with self._lock:
            self._closed.pop(path, None)


def _open_for(caller: Caller, dir_fd: int, name: str, flags: int, mode: int) -> int:
    """A descriptor of a regular file that `caller` may open so. What is made is made by them, and so is theirs."""
    if flags & os.O_CREAT:
        with caller.rights():
            return _open_regular(dir_fd, name, flags, caller.new_mode(dir_fd, mode))
    fd = _open_regular(dir_fd, name, flags, mode)  # readable for the cache, also for one who may only write
    try:
        caller.check(fd, flags)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_regular(dir_fd: int, name: str, flags: int, mode: int) -> int:
    """A descriptor of a regular file; links are not followed and nothing else is opened (a FIFO would block)."""
    wanted = flags & (os.O_CREAT | os.O_EXCL)
    writable = flags & os.O_ACCMODE != os.O_RDONLY
    common = wanted | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(name, common | (os.O_RDWR if writable else os.O_RDONLY), mode, dir_fd=dir_fd)
    except PermissionError:
        if not writable:
            raise
        # Write permission only: as much as the application may have itself.
        fd = os.open(name, common | os.O_WRONLY, mode, dir_fd=dir_fd)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    number = errno.EISDIR if stat.S_ISDIR(kind) else errno.ENXIO
    raise OSError(number, os.strerror(number))
