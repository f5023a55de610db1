"""Operations of the mount on files, directories and names. The cache itself is in `engine.py`.

Opens detect changes behind the mount: the Backing switches to the new content, and the engine drops the old, before the open
returns. Opens clear `keep_cache` until the maintenance thread has dropped the old pages, too; otherwise a second open could
read a stale page. Opens of other hard links read the data of a write at once; existing handles later.

libfuse renames a file that is deleted while open to `.fuse_hidden` + 16 hex digits. `hide` deletes it at once, and keeps its
Backing under the hidden name in `hidden`, so no file remains if the daemon is killed. With libfuse's `hard_remove`, chmod
and open of /proc/PID/fd would fail (ESTALE).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from llmcache import files
from llmcache.mount import syscalls
from llmcache.mount.source.backing import Backing, BackingTable, Opened
from llmcache.mount.source.tree import THE_DAEMON, Caller, SourceTree, WritePolicy, open_again, read_only

if TYPE_CHECKING:
    from llmcache.mount.backends.fuse import Reader
    from llmcache.mount.engine.engine import Engine

log = logging.getLogger("llmcache.mount")


class Notifier(Protocol):
    """The call of the session that operations need."""

    def invalidate_path(self, path: str) -> int:
        """Return 0 or -errno."""


LOOK_S = 0.5  # interval of the checks for open files that were deleted behind the mount


@dataclass(frozen=True)
class FileHandle:
    """One open of a regular file."""

    backing: Backing
    flags: int
    pid: int
    rights: Caller | None = None  # of another user

    def writer(self, caller: Caller) -> Caller:
        """Return the caller's rights, or the opener's for mapped pages (pid 0).

        The groups are the opener's if it is the same user, else none.
        """
        opener = self.rights or THE_DAEMON
        if not caller.is_other:
            return THE_DAEMON if caller.pid else opener
        return opener if (caller.uid, caller.gid) == (opener.uid, opener.gid) else replace(caller, known_groups=())


class Listing:
    """An open directory. Offsets count entries; offset 0 reads the directory again."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.lock = threading.Lock()
        self._entries: list[tuple[str, int]] = []

    def entries(self, offset: int) -> Iterator[tuple[int, str, int]]:
        """Yield (offset after the entry, name, file type bits)."""
        if offset == 0 or not self._entries:
            os.lseek(self.fd, 0, os.SEEK_SET)
            self._entries = list(_scan(self.fd))
        for position in range(offset, len(self._entries)):
            yield (position + 1, *self._entries[position])


def _scan(fd: int) -> Iterator[tuple[str, int]]:
    yield ".", stat.S_IFDIR
    yield "..", stat.S_IFDIR
    with os.scandir(fd) as found:
        for entry in found:
            yield entry.name, _kind(entry)


def _kind(entry: os.DirEntry[str]) -> int:
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


def _chmod(file: int | str, bits: int, caller: Caller) -> None:
    """Use the caller's rights.

    The kernel clears set-id bits at a write by any user, so that alone uses the daemon's.
    """
    before = stat.S_IMODE(os.stat(file).st_mode)
    less = before & ~bits
    by_kernel = less and before ^ less == bits and not less & ~(stat.S_ISUID | stat.S_ISGID)
    with contextlib.nullcontext() if by_kernel else caller.rights():
        os.chmod(file, bits)


class LlmcacheOperations:
    """The file system of one mount. Methods are thread-safe and raise OSError."""

    def __init__(self, tree: SourceTree, engine: Engine, reader: Reader, policy: WritePolicy) -> None:
        self._tree, self.table, self._policy = tree, BackingTable(), policy
        self._engine, self._reader = engine, reader
        # libfuse stores these numbers as handles. Operations on dicts and the counter are atomic under the GIL.
        self._numbers = itertools.count(1)
        self._files: dict[int, FileHandle] = {}
        self._listings: dict[int, Listing] = {}
        self.hidden: dict[str, Backing] = {}  # each with a reference
        self.vanished: set[str] = set()  # hidden names of files that were closed when libfuse hid them
        self._in_progress: list[tuple[str, int, Caller]] = []  # (path, flags, rights) of opens without a handle yet
        self._notifier: Notifier | None = None
        self._to_drop: dict[Backing, int] = {}  # Backing: generation; at most one entry for each
        self._drops = threading.Condition()
        self._ended = False
        self._is_idle = False  # the maintenance thread waits, because no file is open
        self._dropper = engine.state.services.thread("maintenance", self._maintain)

    # Life of the mount

    def init(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._dropper.start()

    def destroy(self) -> None:
        with self._drops:
            self._ended = True
            self._drops.notify_all()
        self._dropper.join(timeout=5)
        self._engine.stop()

    def _queue_drop(self, backing: Backing, generation: int) -> None:
        """The engine has dropped the content before `generation` already."""
        with self._drops:
            self._to_drop[backing] = max(generation, self._to_drop.get(backing, 0))
            self._drops.notify_all()

    def _maintain(self) -> None:
        next_look = 0.0
        while True:
            if time.monotonic() >= next_look:
                self._release_deleted()
                next_look = time.monotonic() + LOOK_S
            with self._drops:
                self._is_idle = True  # before `_files` is read: `_register` adds a file, and then reads `_is_idle`
                self._is_idle = not self._files
                if not self._to_drop and not self._ended:
                    self._drops.wait(None if self._is_idle else LOOK_S)
                if self._ended:
                    return
                if not self._to_drop:
                    continue
                backing = next(iter(self._to_drop))
                generation = self._to_drop.pop(backing)
            self._engine.settle(backing, owes_reply=False)
            if self._drop(backing):
                backing.dropped = max(generation, backing.dropped)

    def _release_deleted(self) -> None:
        for backing in self.table.find_deleted():
            self._engine.removed(backing.path)
            self._release(backing)

    def _drop(self, backing: Backing) -> bool:
        """Drop all pages of a path; return False if the mount has ended.

        It waits for pages being read, so the thread may have no pending request. libfuse learns a new name only after the
        callback of the rename, so both names are used.
        """
        assert self._notifier is not None
        renames = -1
        while renames != backing.renames:
            renames = backing.renames
            names = [backing.path] if backing.old_path is None else [backing.path, backing.old_path, backing.path]
            if any(self._notifier.invalidate_path(name) == -errno.ENOTCONN for name in names):
                return False
        return True

    # Open and close

    def open(self, path: str, flags: int, caller: Caller) -> tuple[int, bool]:
        if path in self.hidden:
            return self._reopen_hidden(path, flags, caller)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            self._policy.check(path)
        return self._open(path, flags & ~(os.O_CREAT | os.O_EXCL), 0, caller)

    def _open(self, path: str, flags: int, mode: int, caller: Caller) -> tuple[int, bool]:
        rights = caller.remembered()
        with self._opening(path, flags, rights):
            with self._tree.parent(path, caller) as (dir_fd, name):
                opened = self.table.open(path, dir_fd, name, flags, mode, caller=caller, may_replace=self._may_replace)
            return self._register(opened, path, flags, caller.pid, rights)

    @contextlib.contextmanager
    def _opening(self, path: str, flags: int, rights: Caller | None) -> Iterator[None]:
        """`_may_replace` considers the rights of the open."""
        if rights is None:
            yield
            return
        entry = (path, flags, rights)
        self._in_progress.append(entry)
        try:
            yield
        finally:
            self._in_progress.remove(entry)

    def _may_replace(self, backing: Backing, fd: int) -> bool:
        """True if all users of the path's handles may open the new file."""
        known = [(handle.flags, handle.rights) for handle in list(self._files.values()) if handle.backing is backing]
        if any(flags & os.O_ACCMODE != os.O_RDONLY for flags, _ in known):
            again = open_again(fd, os.O_RDWR)
            if again is None:
                return False
            os.close(again)
        known += [(flags, rights) for path, flags, rights in list(self._in_progress) if path == backing.path]
        return all(rights is None or self._may_open(backing.path, fd, flags, rights) for flags, rights in known)

    def _may_open(self, path: str, fd: int, flags: int, caller: Caller) -> bool:
        """True if `path` is the file of `fd`, and `caller` may open it."""
        try:
            with self._tree.parent(path, caller) as (dir_fd, name):
                found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            caller.check(fd, flags & ~os.O_TRUNC)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(fd))

    def create(self, path: str, flags: int, mode: int, caller: Caller) -> tuple[int, bool]:
        self._policy.check(path)
        return self._open(path, flags | os.O_CREAT, mode, caller)

    def _register(self, opened: Opened, path: str, flags: int, pid: int, rights: Caller | None) -> tuple[int, bool]:
        backing = opened.backing
        try:
            if opened.changed:
                log.info("inode %d was changed behind the mount", backing.ino)
                self._engine.changed(backing, 0, -1)
            if flags & os.O_TRUNC:
                self._resize(backing, 0, rights or THE_DAEMON)
            may_keep = self._engine.opened(backing, path, pid)
            if opened.drop is not None:
                self._queue_drop(backing, opened.drop)
            number = next(self._numbers)
            self._files[number] = FileHandle(backing, flags, pid, rights)
            if self._is_idle:
                with self._drops:
                    self._is_idle = False
                    self._drops.notify_all()
            return number, bool(may_keep and not backing.unsettled)
        except BaseException:
            self.table.release(backing)
            raise

    def _reopen_hidden(self, path: str, flags: int, caller: Caller) -> tuple[int, bool]:
        """Writing is allowed, because deleting was."""
        backing = self.table.acquire(path)
        if backing is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        try:
            caller.check(backing.fd, flags)
        except OSError:
            self.table.release(backing)
            raise
        if flags & os.O_ACCMODE != os.O_RDONLY and not backing.writable:
            fd = os.open(f"/proc/self/fd/{backing.fd}", os.O_RDWR | os.O_CLOEXEC)
            backing.make_writable(fd)
            os.close(fd)
        return self._register(Opened(backing, False, None), path, flags, caller.pid, caller.remembered())

    def release(self, number: int) -> None:
        handle = self._files.pop(number)
        self._engine.closed(handle.backing, handle.pid)
        if not self._release(handle.backing):
            self._release_hidden(handle.backing)

    def _release(self, backing: Backing) -> bool:
        """Return True if it was the last reference."""
        if not self.table.release(backing):
            return False
        with self._drops:
            self._to_drop.pop(backing, None)
        return True

    # Data

    def read_into(self, number: int, address: int, size: int, offset: int, pid: int) -> int:
        """The result is short only at the end of the file."""
        handle = self._files[number]
        if handle.flags & os.O_DIRECT:  # bypasses the page cache of the mount
            return self._reader.uncached(handle.backing, address, size, offset)
        return self._reader.read(handle.backing, address, size, offset, pid)

    def write_from(self, number: int, address: int, size: int, offset: int, caller: Caller) -> int:
        """For O_APPEND, the kernel has computed the offset."""
        handle = self._files[number]
        backing = handle.backing
        with handle.writer(caller).rights():
            done = backing.write_from(address, size, offset)
        self._note_change(backing, offset, done)
        return done

    def truncate(self, path: str | None, number: int | None, length: int, caller: Caller) -> None:
        backing = self._backing_of(path, number)
        if backing is not None:
            self._resize(backing, length, caller)
            return
        assert path is not None
        self._policy.check(path)
        with self._opening(path, os.O_WRONLY, caller.remembered()):  # prevents a replacement before the resize
            with self._tree.parent(path, caller) as (dir_fd, name):
                opened = self.table.open(path, dir_fd, name, os.O_WRONLY, caller=caller, may_replace=self._may_replace)
            try:
                self._resize(opened.backing, length, caller)
                self._engine.settle(opened.backing, owes_reply=True)
                if opened.drop is not None:
                    self._queue_drop(opened.backing, opened.drop)
            finally:
                self._release(opened.backing)

    def _resize(self, backing: Backing, length: int, caller: Caller) -> None:
        with caller.rights(), backing.own_change():
            before = backing.size
            os.ftruncate(backing.fd, length)
        self._note_change(backing, min(before, length), -1)

    def _note_change(self, backing: Backing, offset: int, length: int) -> None:
        """The kernel's pages of other hard links are stale."""
        self._engine.changed(backing, offset, length)
        deleted = sum((other.dev, other.ino) == (backing.dev, backing.ino) for other in list(self.hidden.values()))
        if backing.links + deleted < 2:
            return
        with contextlib.ExitStack() as in_use:
            others = self.table.others(backing)
            for other in others:
                in_use.callback(self._release, other)
            for other in others:
                generation = other.outdate()
                self._engine.changed(other, 0, -1)
                self._queue_drop(other, generation)

    def fsync(self, number: int, data_only: bool) -> None:
        self._files[number].backing.sync(data_only)

    def fallocate(self, number: int, mode: int, offset: int, length: int, caller: Caller) -> None:
        backing = self._files[number].backing
        with caller.rights(), backing.own_change():
            syscalls.fallocate(backing.fd, mode, offset, length)
        self._note_change(backing, offset, -1)

    def lseek(self, number: int, offset: int, whence: int) -> int:
        # This moves the descriptor's position, which is unused: all I/O is pread and pwrite.
        return os.lseek(self._files[number].backing.fd, offset, whence)

    # Attributes

    def _backing_of(self, path: str | None, number: int | None) -> Backing | None:
        if number is not None:
            return self._files[number].backing
        return self.hidden.get(path) if path is not None else None

    @contextlib.contextmanager
    def _change(self, path: str | None, number: int | None = None, caller: Caller = THE_DAEMON) -> Iterator[int | str]:
        """Yield a descriptor, or a name in /proc. EROFS."""
        backing = self._backing_of(path, number)
        if backing is not None:
            if not backing.hidden:
                self._policy.check(backing.path)
            yield backing.fd
            backing.record()
            return
        assert path is not None
        self._check_file(path)
        with self._tree.item(path, caller) as item:
            yield item
        self._touched(path)

    @contextlib.contextmanager
    def _lookup(self, path: str) -> Iterator[int | str]:
        backing = self.hidden.get(path)
        if backing is not None:
            yield backing.fd
            return
        with self._tree.item(path) as item:
            yield item

    def getattr(self, path: str | None, number: int | None) -> os.stat_result:
        backing = self._backing_of(path, number)
        if backing is not None:
            return os.fstat(backing.fd)
        assert path is not None
        return self._tree.stat(path)

    def readlink(self, path: str) -> str:
        """The kernel resolves the text."""
        with self._tree.parent(path) as (dir_fd, name):
            return os.readlink(name, dir_fd=dir_fd)

    def chmod(self, path: str | None, number: int | None, mode: int, caller: Caller) -> None:
        with self._change(path, number, caller) as file:
            _chmod(file, stat.S_IMODE(mode), caller)

    def chown(self, path: str | None, number: int | None, uid: int, gid: int) -> None:
        """-1 keeps a value."""
        with self._change(path, number) as file:
            os.chown(file, uid, gid)

    def utimens(self, path: str | None, number: int | None, times: Sequence[tuple[int, int]] | None) -> None:
        with self._change(path, number) as file:
            syscalls.utimens(file, times)

    def getxattr(self, path: str, name: str) -> bytes:
        with self._lookup(path) as file:
            return os.getxattr(file, name)

    def listxattr(self, path: str) -> list[str]:
        with self._lookup(path) as file:
            return os.listxattr(file)

    def setxattr(self, path: str, name: str, value: bytes, flags: int) -> None:
        with self._change(path) as file:
            os.setxattr(file, name, value, flags)

    def removexattr(self, path: str, name: str) -> None:
        with self._change(path) as file:
            os.removexattr(file, name)

    # Names

    def unlink(self, path: str) -> None:
        backing = self.hidden.pop(path, None)
        if backing is not None:  # `hide` has deleted the file
            self.table.release(backing)
            return
        if path in self.vanished and not self._exists(path):
            self.vanished.discard(path)
            return
        self._check_file(path)
        with self._tree.parent(path) as (dir_fd, name):
            os.unlink(name, dir_fd=dir_fd)
        self._gone(path)

    def rename(self, old: str, new: str, flags: int) -> None:
        self._check_file(old)
        if not self._policy.everything:
            self._policy.check(new)
            if self._exists(new):
                self._check_file(new)
        with self._tree.parent(old) as (old_fd, old_name), self._tree.parent(new) as (new_fd, new_name):
            if flags:
                files.renameat2(old_fd, old_name, new_fd, new_name, flags)
            else:
                os.rename(old_name, new_name, src_dir_fd=old_fd, dst_dir_fd=new_fd)
        self._moved(old, new, exchanged=bool(flags & files.RENAME_EXCHANGE))

    def hide(self, old: str, new: str) -> None:
        """Delete the open file `old`, and keep its Backing under the hidden name `new`.

        libfuse counts a file as open until `release` has returned, so the Backing may be closed.
        """
        backing = self.table.acquire(old)
        try:
            self._check_file(old)
            with self._tree.parent(old) as (dir_fd, name):
                os.unlink(name, dir_fd=dir_fd)
        except BaseException:
            if backing is not None:
                self.table.release(backing)
            raise
        if backing is None:
            self.vanished.add(new)
            self._gone(old)
            return
        self._engine.removed(old)
        self._engine.renamed(old, new)
        self.hidden[new] = backing
        self.table.moved(old, new)
        backing.record()
        backing.hidden = True  # from here on, a concurrent `release` may release it
        self._release_hidden(backing)

    def _release_hidden(self, backing: Backing) -> None:
        """Release a deleted file and its space.

        libfuse does not unlink the hidden name if the last release ran while it hid the file.
        """
        if backing.hidden and self.table.is_last(backing) and self.hidden.pop(backing.path, None) is not None:
            self.vanished.add(backing.path)
            self.table.release(backing)

    def _moved(self, old: str, new: str, exchanged: bool) -> None:
        self.table.moved(old, new, exchanged=exchanged)
        if exchanged:
            between = old + "\0"
            self._engine.renamed(old, between)
            self._engine.renamed(new, old)
            self._engine.renamed(between, new)
        else:
            self._engine.renamed(old, new)
        self._touched(new)

    def link(self, old: str, new: str) -> None:
        self._check_file(old)
        self._policy.check(new)
        with self._tree.parent(old) as (old_fd, old_name), self._tree.parent(new) as (new_fd, new_name):
            os.link(old_name, new_name, src_dir_fd=old_fd, dst_dir_fd=new_fd, follow_symlinks=False)
        self._touched(old)

    def mknod(self, path: str, mode: int, caller: Caller) -> None:
        """EPERM for devices, FIFOs and sockets."""
        self._policy.check(path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        with self._tree.parent(path) as (dir_fd, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(name, flags, caller.new_mode(dir_fd, stat.S_IMODE(mode)), dir_fd=dir_fd))

    def mkdir(self, path: str, mode: int, caller: Caller) -> None:
        self._policy.check_tree()
        with self._tree.parent(path) as (dir_fd, name):
            os.mkdir(name, caller.new_mode(dir_fd, mode), dir_fd=dir_fd)

    def rmdir(self, path: str) -> None:
        self._policy.check_tree()
        with self._tree.parent(path) as (dir_fd, name):
            os.rmdir(name, dir_fd=dir_fd)

    def symlink(self, target: str, path: str) -> None:
        self._policy.check_tree()
        with self._tree.parent(path) as (dir_fd, name):
            os.symlink(target, name, dir_fd=dir_fd)

    # Directories

    def opendir(self, path: str) -> int:
        number = next(self._numbers)
        self._listings[number] = Listing(self._tree.open_directory(path))
        return number

    def listing(self, number: int) -> Listing:
        return self._listings[number]

    def releasedir(self, number: int) -> None:
        os.close(self._listings.pop(number).fd)

    def fsyncdir(self, number: int, _data_only: bool) -> None:
        os.fsync(self._listings[number].fd)

    def statfs(self) -> os.statvfs_result:
        return os.fstatvfs(self._tree.fd)

    # Shared

    def _check_file(self, path: str) -> None:
        """EROFS; without --rw, files that match `--spill` may be changed."""
        if self._policy.everything:
            return
        self._policy.check(path)
        if not stat.S_ISREG(self._tree.stat(path).st_mode):
            raise read_only()

    def _exists(self, path: str) -> bool:
        try:
            self._tree.stat(path)
        except FileNotFoundError:
            return False
        return True

    def _touched(self, path: str) -> None:
        """The new ctime does not count as a change of content."""
        with self.table.using(path) as backing:
            if backing is not None:
                backing.record()

    def _gone(self, path: str) -> None:
        self.table.forget(path)
        self._engine.removed(path)
