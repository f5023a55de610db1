"""What the mount does with open files: open, read, write, sync, close. Names are in `tree.py`, the cache in `engine.py`.

A file changed behind the mount is noticed here, at open: its Backing moves to the new content and the engine forgets
what it had before the open is answered. The kernel drops the pages of a file whose open says so, and until a background
thread has dropped them too, every open says so: a second opener could otherwise read an old page that the first one's
open is about to drop. The size needs no care: attributes expire at once (see libfuse.py), so the kernel has just asked.

A file written through one name is changed for its other names (hard links) in the same way: whoever opens one of them
after the write reads what was written; who has it open does so once its pages are dropped. The write does not wait for
that (see `state.py`: who may wait for whom).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from llmcache.fs import syscalls
from llmcache.fs.vfs.backing import Backing, BackingTable, Opened
from llmcache.fs.vfs.caller import NOBODY_ELSE, Caller, may_write
from llmcache.fs.vfs.handles import FileHandle, HandleTable, Listing
from llmcache.fs.vfs.source import SourceTree, WritePolicy
from llmcache.fs.vfs.tree import TreeOperations

if TYPE_CHECKING:
    from llmcache.fs.backends.fuse import Reader
    from llmcache.fs.engine.engine import Engine
    from llmcache.fs.vfs.libfuse import Notifier

log = logging.getLogger("llmcache.fs")


class LlmcacheOperations(TreeOperations):
    """The file system of one mount. Methods are called by libfuse's threads, many at a time, and raise OSError."""

    def __init__(self, tree: SourceTree, engine: Engine, reader: Reader, policy: WritePolicy) -> None:
        super().__init__(tree, BackingTable(), policy)
        self._engine, self._reader = engine, reader
        self._files: HandleTable[FileHandle] = HandleTable()
        self._listings: HandleTable[Listing] = HandleTable()
        self._in_progress: list[tuple[str, int, Caller]] = []  # of opens that have no handle yet
        self._notifier: Notifier | None = None
        self._to_drop: dict[Backing, int] = {}  # with the generation; each once, so that writes cannot fill it
        self._drops = threading.Condition()
        self._ended = False
        self._dropper = threading.Thread(target=self._drop_pages, name="drop-pages", daemon=True)
        self.on_init: Callable[[Notifier], None] = lambda _notifier: None

    # Life of the mount

    def init(self, notifier: Notifier) -> None:
        """The kernel has connected; returns when requests may be served."""
        self._notifier = notifier
        self._dropper.start()
        self.on_init(notifier)

    def destroy(self) -> None:
        """The mount is gone and no request is in progress."""
        with self._drops:
            self._ended = True
            self._drops.notify_all()
        self._dropper.join(timeout=5)
        self._engine.stop()

    def _drop_later(self, backing: Backing, generation: int) -> None:
        """Have the pages of what was before `generation` dropped, now that nothing of it is stored any more."""
        with self._drops:
            self._to_drop[backing] = max(generation, self._to_drop.get(backing, 0))
            self._drops.notify_all()

    def _drop_pages(self) -> None:
        """Background thread: drop the pages of changed paths, then let opens keep pages again."""
        while True:
            with self._drops:
                self._drops.wait_for(lambda: self._to_drop or self._ended)
                if self._ended:
                    return
                backing = next(iter(self._to_drop))
                generation = self._to_drop.pop(backing)
            self._engine.settle(backing, owes_reply=False)
            if self._drop(backing):
                backing.dropped = max(generation, backing.dropped)

    def _drop(self, backing: Backing) -> bool:
        """Drop all pages of a path; False at the end. Waits for those that are being read: from a thread that owes no reply.

        libfuse learns of a rename when its call has returned: until then it has the inode under the old name, and under
        the new one none, or another.
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
        """(handle, whether the kernel may keep its pages) of an existing regular file."""
        if path in self._hidden:
            return self._reopen_hidden(path, flags, caller)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            self._policy.check(path)
        return self._open(path, flags & ~(os.O_CREAT | os.O_EXCL), 0, caller)

    def _open(self, path: str, flags: int, mode: int, caller: Caller) -> tuple[int, bool]:
        rights = caller.remembered()
        with self._opening(path, flags, rights):
            with self._tree.parent(path, caller) as (dir_fd, name):
                opened = self._table.open(path, dir_fd, name, flags, mode, caller=caller, may_replace=self._may_replace)
            return self._register(opened, path, flags, caller.pid, rights)

    @contextlib.contextmanager
    def _opening(self, path: str, flags: int, rights: Caller | None) -> Iterator[None]:
        """While it lasts, these rights count for `path`: there is no handle yet that would tell."""
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
        """True if all who have a file open may so open what has taken its place: they will have it, see `backing.py`."""
        known = [(handle.flags, handle.rights) for handle in self._files.all() if handle.backing is backing]
        if any(flags & os.O_ACCMODE != os.O_RDONLY for flags, _ in known) and not may_write(fd):
            return False
        known += [(flags, rights) for path, flags, rights in list(self._in_progress) if path == backing.path]
        return all(rights is None or self._may_open(backing.path, fd, flags, rights) for flags, rights in known)

    def _may_open(self, path: str, fd: int, flags: int, caller: Caller) -> bool:
        """True if `path` leads that user to the file behind `fd`, and they may open it."""
        try:
            with self._tree.parent(path, caller) as (dir_fd, name):
                found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            caller.check(fd, flags & ~os.O_TRUNC)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(fd))

    def create(self, path: str, flags: int, mode: int, caller: Caller) -> tuple[int, bool]:
        """(handle, keep) of a file that did not exist a moment ago."""
        self._policy.check(path)
        return self._open(path, flags | os.O_CREAT, mode, caller)

    def _register(self, opened: Opened, path: str, flags: int, pid: int, rights: Caller | None) -> tuple[int, bool]:
        """The handle of an open, after everything it noticed has been passed on."""
        backing = opened.backing
        try:
            if opened.changed:
                log.info("inode %d was changed behind the mount", backing.ino)
                self._engine.changed(backing, 0, -1)
            if flags & os.O_TRUNC:
                self._resize(backing, 0, rights or NOBODY_ELSE)
            may_keep = self._engine.opened(backing, path, pid)
            if opened.drop is not None:
                self._drop_later(backing, opened.drop)
            handle = FileHandle(backing, flags, pid, rights)
            return self._files.add(handle), bool(may_keep and not backing.unsettled)
        except BaseException:
            self._table.release(backing)
            raise

    def _reopen_hidden(self, path: str, flags: int, caller: Caller) -> tuple[int, bool]:
        """A deleted file opened again through /proc/PID/fd (it may be written: it could be deleted)."""
        backing = self._table.acquire(path)
        if backing is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        try:
            caller.check(backing.fd, flags)
        except OSError:
            self._table.release(backing)
            raise
        if flags & os.O_ACCMODE != os.O_RDONLY and not backing.writable:
            fd = os.open(f"/proc/self/fd/{backing.fd}", os.O_RDWR | os.O_CLOEXEC)
            backing.make_writable(fd)
            os.close(fd)
        return self._register(Opened(backing, False, None), path, flags, caller.pid, caller.remembered())

    def release(self, number: int) -> None:
        """The last descriptor of one open was closed."""
        handle = self._files.pop(number)
        self._engine.closed(handle.backing, handle.pid)
        if not self._give_back(handle.backing):
            self._let_go(handle.backing)

    def _give_back(self, backing: Backing) -> bool:
        """Give a reference back; True if it was the last. Pages of a closed file are dropped once it is opened again."""
        if not self._table.release(backing):
            return False
        with self._drops:
            self._to_drop.pop(backing, None)
        return True

    # Data

    def read_into(self, number: int, address: int, size: int, offset: int, pid: int) -> int:
        """Bytes put at `address`; short only at the end of the file."""
        handle = self._files.get(number)
        if handle.direct:
            return self._reader.uncached(handle.backing, address, size, offset, pid)
        return self._reader.read(handle.backing, address, size, offset, pid)

    def write_from(self, number: int, address: int, size: int, offset: int, caller: Caller) -> int:
        """Bytes written through to SOURCE. The kernel has worked out the offset of O_APPEND."""
        handle = self._files.get(number)
        backing = handle.backing
        with handle.writer(caller).rights():
            done = backing.write_from(address, size, offset)
        self._note_change(backing, offset, done)
        return done

    def truncate(self, path: str | None, number: int | None, length: int, caller: Caller) -> None:
        """Set the size, of an open file by its handle or of a path."""
        backing = self._backing_of(path, number)
        if backing is not None:
            self._resize(backing, length, caller)
            return
        assert path is not None
        self._policy.check(path)
        with self._opening(path, os.O_WRONLY, caller.remembered()):  # nothing else takes its place before it is cut
            with self._tree.parent(path, caller) as (dir_fd, name):
                opened = self._table.open(path, dir_fd, name, os.O_WRONLY, caller=caller, may_replace=self._may_replace)
            try:
                self._resize(opened.backing, length, caller)
                self._engine.settle(opened.backing, owes_reply=True)
                if opened.drop is not None:
                    self._drop_later(opened.backing, opened.drop)
            finally:
                self._give_back(opened.backing)

    def _resize(self, backing: Backing, length: int, caller: Caller) -> None:
        with caller.rights(), backing.own_change():
            before = backing.size
            os.ftruncate(backing.fd, length)
        self._note_change(backing, min(before, length), -1)

    def _note_change(self, backing: Backing, offset: int, length: int) -> None:
        """Tell the engine; the kernel's pages of this path are right already, those of other hard links are not."""
        self._engine.changed(backing, offset, length)
        deleted = sum((other.dev, other.ino) == (backing.dev, backing.ino) for other in list(self._hidden.values()))
        if backing.links + deleted < 2:
            return
        with contextlib.ExitStack() as in_use:
            others = self._table.others(backing)
            for other in others:
                in_use.callback(self._give_back, other)
            for other in others:
                generation = other.outdate()
                self._engine.changed(other, 0, -1)
                self._drop_later(other, generation)

    def fsync(self, number: int, data_only: bool) -> None:
        """Force written data to SOURCE's storage."""
        self._files.get(number).backing.sync(data_only)

    def fallocate(self, number: int, mode: int, offset: int, length: int, caller: Caller) -> None:
        """Allocate, punch, collapse, … as SOURCE's file system can."""
        backing = self._files.get(number).backing
        with caller.rights(), backing.own_change():
            syscalls.fallocate(backing.fd, mode, offset, length)
        self._note_change(backing, offset, -1)

    def lseek(self, number: int, offset: int, whence: int) -> int:
        """Next data or hole at or after `offset`."""
        # Moves the descriptor's own position, which nothing uses: all I/O is pread and pwrite.
        return os.lseek(self._files.get(number).backing.fd, offset, whence)

    def _backing_of(self, path: str | None, number: int | None) -> Backing | None:
        """The Backing a call is about: that of its handle, or of a deleted file's path; None for any other path."""
        if number is not None:
            return self._files.get(number).backing
        return self._hidden.get(path) if path is not None else None

    # Directories

    def opendir(self, path: str) -> int:
        """A handle of a directory."""
        return self._listings.add(Listing(self._tree.open_directory(path)))

    def listing(self, number: int) -> Listing:
        """The open directory of a handle."""
        return self._listings.get(number)

    def releasedir(self, number: int) -> None:
        """Close a directory."""
        self._listings.pop(number).close()

    def fsyncdir(self, number: int, _data_only: bool) -> None:
        """Force a directory's entries to storage."""
        os.fsync(self._listings.get(number).fd)

    def statfs(self) -> os.statvfs_result:
        """Space on SOURCE's file system."""
        return os.fstatvfs(self._tree.fd)
