"""Open files of SOURCE: one Backing for each path (so for each kernel inode of the mount) with a generation.

The mount's inodes belong to paths, not to inodes of SOURCE. A file that is replaced behind the mount therefore keeps its
kernel inode; once an open has noticed, the same Backing continues with the new file's descriptors and a higher
generation, and every handle of that path reads the new file, as if it had been rewritten in place. Nothing stale can
then be fetched again, at the price that an old handle does not go on reading the replaced file. If one of its holders
may not read the new file, nobody can open that (EBUSY) before they have closed the old one: the kernel's pages are the
same for all.

Locks: BackingTable's lock guards the two maps and the references; it is held for computing only, so that a file whose
storage is slow keeps nobody from opening another one. Backing.lock serialises changes of one file made through the mount,
and the exchange of its descriptors, with the bookkeeping of its identity; it is held during such a change, but not while
the file is synced, and nobody waits for it who holds another lock. Reads take neither: descriptors are exchanged by dup2,
which is atomic for a pread that runs meanwhile.
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

from llmcache.fs import syscalls
from llmcache.fs.vfs.source import NOBODY_ELSE, Caller, is_at, no_read_ahead, open_again, open_for
from llmcache.units import BLOCK_BYTES

log = logging.getLogger(__name__)

_REMEMBERED = 65536
# Kernels before 6.13 stamp files with the tick's time: a change within the same tick does not show in ctime.
_TICK_NS = 50_000_000
_TRIES = 100  # to open what is at a path while others keep replacing it


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
        self.old_path: str | None = None  # before its last rename
        self.renames = 0
        self.fd = fd
        self.direct_fd = open_again(fd, os.O_RDONLY | os.O_DIRECT)
        self.writable = writable
        self.generation = 0
        self.dropped = 0  # the kernel has no pages of an earlier generation than this
        self.references = 0
        self.identity = Identity.of(status)
        self.lock = threading.RLock()
        self.links = status.st_nlink
        self.hidden = False  # deleted through the mount while open
        self.deleted = False  # behind the mount; until another file takes its path
        self.kept = False  # never closed: a read of it has not ended
        self._changed_behind = False
        self._changes = 0  # counted when one begins, and when it ends
        self._synced = 0  # changes that are on storage
        no_read_ahead(fd)

    @property
    def unsettled(self) -> bool:
        """True if the kernel may still have pages of an earlier generation."""
        return self.dropped < self.generation

    @property
    def _dirty(self) -> bool:
        return self._synced < self._changes

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
        if direct is not None and not self._dirty and (address | size | offset) % BLOCK_BYTES == 0:
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
            self._changes += 1
            try:
                yield
            finally:
                self._changes += 1
                self.record()

    def record(self) -> None:
        """Take the file's present state as known."""
        with self.lock:
            status = os.fstat(self.fd)
            self.identity = Identity.of(status)
            self.links = status.st_nlink

    def outdate(self) -> int:
        """The content changed through another name: pages the kernel holds for this one are wrong. Its new generation."""
        with self.lock:
            self.record()
            self.generation += 1
            return self.generation

    def sync(self, data_only: bool) -> None:
        """fsync or fdatasync of SOURCE's file."""
        changes = self._changes  # a write that is under way counts once more when it ends
        (os.fdatasync if data_only else os.fsync)(self.fd)
        self._synced = max(self._synced, changes)

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
            return True

    def settle(self, known: Identity | None, empty: bool) -> int | None:
        """At the first open: the generation whose pages have to be dropped, if the kernel may have some of another content.

        It has none if it is `empty`, and those of the content `known`, where that is known.
        """
        with self.lock:
            self.record()  # a change through another name either shows here or has met this Backing in the table
            if not self.generation and (empty or known == self.identity):
                self.dropped = 0
            return self.generation if self.unsettled else None

    def is_other(self, status: os.stat_result) -> bool:
        """True if `status` is of another file than this one, whatever its path."""
        return (status.st_dev, status.st_ino) != (self.dev, self.ino)

    def make_writable(self, fd: int) -> None:
        """Replace a read-only descriptor by a writable one of the same file."""
        with self.lock:
            os.dup2(fd, self.fd, inheritable=False)
            no_read_ahead(self.fd)
            self.writable = True

    def _exchange(self, fd: int) -> None:
        writable = open_again(fd, os.O_RDWR) if self.writable else None  # those who write go on writing
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
            # The number may not be closed while a read uses it: point it at the new file, buffered, and forget it.
            if self.direct_fd is not None:
                os.dup2(fd, self.direct_fd, inheritable=False)
            self.direct_fd = fresh

    def keep_open(self, reason: str) -> None:
        """Never close the descriptors: a read that is still under way would read the file that got their numbers."""
        log.error("inode %d stays open: %s", self.identity.ino, reason)
        self.kept = True

    def close(self) -> None:
        """Close the descriptors; the Backing is not used after this."""
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
    changed: bool  # the content is not the one known before
    drop: int | None  # the generation whose pages the kernel has to drop, if it may have others'


class BackingTable:
    """All open Backings by path, and the identities of recently closed ones.

    A closed path may have left pages in the kernel; identity None says that it is not known of which content. A path
    without an entry was never open, so there are none, unless entries had to be given up.
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
        caller: Caller = NOBODY_ELSE,
        may_replace: Callable[[Backing, int], bool] = lambda _backing, _fd: True,
    ) -> Opened:
        """Open `name` in `dir_fd`, known as `path`; O_CREAT and O_EXCL are honoured, O_APPEND and O_TRUNC are not.

        PermissionError if `caller` may not open it. EBUSY if another file is at `path` now and `may_replace(backing, fd)`
        is false: those who have the one before open would read it.
        """
        for _ in range(_TRIES):
            fd = open_for(caller, dir_fd, name, flags, mode)
            try:
                backing = self._new(path, fd, flags)
                if backing is not None:
                    fd = -1  # it is the Backing's
                    return self._begin(backing)
                backing = self.acquire(path)
                opened = None if backing is None else self._join(backing, dir_fd, name, fd, flags, may_replace)
            finally:
                if fd >= 0:
                    os.close(fd)
            if opened is not None:
                return opened
            flags &= ~os.O_EXCL  # it was made
        raise _busy()

    def _new(self, path: str, fd: int, flags: int) -> Backing | None:
        """A Backing of `fd` for a path that has none, with a reference; None if it has one."""
        with self._lock:
            if path in self._open:
                return None
        backing = Backing(path, fd, os.fstat(fd), flags & os.O_ACCMODE != os.O_RDONLY)
        backing.references, backing.dropped = 1, -1
        with self._lock:
            if self._open.setdefault(path, backing) is backing:
                return backing
        if backing.direct_fd is not None:  # another open was faster
            os.close(backing.direct_fd)
        return None

    def _begin(self, backing: Backing) -> Opened:
        """The first open of a path since its last close; until it is known what the kernel has, nobody may keep that."""
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
        """One more open of a Backing, with a reference already; None if `fd` is not what is at its path any more."""
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        try:
            with backing.lock:
                if backing.is_other(os.fstat(fd)):
                    if not is_at(dir_fd, name, fd):  # another open may have brought what is newer
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
        self._closed[path] = identity
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

    def find_deleted(self) -> list[Backing]:
        """Return the open Backings whose file has lost its last name behind the mount, each with another reference."""
        with self._lock:
            paths = [path for path, backing in self._open.items() if not (backing.hidden or backing.deleted)]
        found = []
        for path in paths:
            if (backing := self.acquire(path)) is None:
                continue
            # Some file systems report no links at all; where SOURCE fails, the next look finds out.
            with backing.lock, contextlib.suppress(OSError):
                backing.deleted = backing.links > 0 and not os.fstat(backing.fd).st_nlink and not backing.hidden
            if backing.deleted:
                found.append(backing)
            else:
                self.release(backing)
        return found

    def others(self, backing: Backing) -> list[Backing]:
        """Open Backings of the same file under other names (hard links), each with another reference."""
        with self._lock:
            same = [b for b in self._open.values() if b is not backing and (b.dev, b.ino) == (backing.dev, backing.ino)]
            for other in same:
                other.references += 1
            return same

    def moved(self, old: str, new: str, *, exchanged: bool = False) -> None:
        """A path, or a directory with all below it, was renamed through the mount; `new` no longer names what it did."""
        ways = [(old, new), (new, old)] if exchanged else [(old, new)]
        with self._lock:
            found = [
                (path, there + path[len(here) :], self._open.pop(path, None), self._closed.pop(path, path) is not path)
                for here, there in ways
                for path in [p for p in [*self._open, *self._closed] if p == here or p.startswith(here + "/")]
            ]
            for path, target, backing, was_closed in found:
                if was_closed:  # its kernel inode goes along, pages and all; the change time moves
                    self._remember(target, None)
                if backing is not None:
                    backing.old_path, backing.path = path, target
                    backing.renames += 1
                    self._open[target] = backing

    def forget(self, path: str) -> None:
        """A path was deleted through the mount."""
        with self._lock:
            self._closed.pop(path, None)


def _busy() -> OSError:
    return OSError(errno.EBUSY, os.strerror(errno.EBUSY))
