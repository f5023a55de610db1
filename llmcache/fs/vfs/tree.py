"""Names and attributes of the mount: what concerns SOURCE's tree and not the data of open files.

Deleted while open: libfuse renames such a file to `.fuse_hidden` + 16 hex digits in its directory and deletes it when it
is closed. Here that rename (`hide`, and not a user's `rename` to such a name) deletes the file at once; its open Backing
goes on under the hidden name, which lives only in `_hidden`. The directory can then be removed, and nothing is left behind
if the daemon is killed. With libfuse's `hard_remove` there would be no hidden name, but such a file could neither be
given another mode nor be opened by its descriptor (ESTALE).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcache import files
from llmcache.fs import syscalls
from llmcache.fs.vfs.backing import Backing, BackingTable
from llmcache.fs.vfs.caller import Caller
from llmcache.fs.vfs.source import SourceTree, WritePolicy, read_only

if TYPE_CHECKING:
    from llmcache.fs.engine.engine import Engine


def _fail(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _chmod(file: int | str, bits: int, caller: Caller) -> None:
    """With the caller's rights, but for set-id bits: the kernel takes them away when somebody writes, who may not own it."""
    before = stat.S_IMODE(os.stat(file).st_mode)
    less = before & ~bits
    by_kernel = less and before ^ less == bits and not less & ~(stat.S_ISUID | stat.S_ISGID)
    with contextlib.nullcontext() if by_kernel else caller.rights():
        os.chmod(file, bits)


class TreeOperations:
    """Lookup, attributes, and changes of names; those that change something are called with the caller's rights."""

    _engine: Engine

    def __init__(self, tree: SourceTree, table: BackingTable, policy: WritePolicy) -> None:
        self._tree = tree
        self._table = table
        self._policy = policy
        self._hidden: dict[str, Backing] = {}  # each with a reference
        self._vanished: set[str] = set()  # hidden names of files that were closed when libfuse hid them

    def _backing_of(self, path: str | None, number: int | None) -> Backing | None:
        raise NotImplementedError  # a file handle's table is its owner's

    # Attributes

    def getattr(self, path: str | None, number: int | None) -> os.stat_result:
        """lstat of a path, fstat of an open file."""
        backing = self._backing_of(path, number)
        if backing is not None:
            return os.fstat(backing.fd)
        assert path is not None
        return self._tree.stat(path)

    def readlink(self, path: str) -> str:
        """A link as it is: the kernel resolves it, in the mount or outside of it."""
        with self._tree.parent(path) as (dir_fd, name):
            return os.readlink(name, dir_fd=dir_fd)

    def chmod(self, path: str | None, number: int | None, mode: int, caller: Caller) -> None:
        """Change permission bits."""
        backing = self._backing_of(path, number)
        if backing is not None:
            self._check_open(backing)
            _chmod(backing.fd, stat.S_IMODE(mode), caller)
            backing.record()
            return
        assert path is not None
        self._check_file(path)
        with self._tree.item(path, caller) as item:
            _chmod(item, stat.S_IMODE(mode), caller)
        self._touched(path)

    def chown(self, path: str | None, number: int | None, uid: int, gid: int) -> None:
        """Change owner or group; -1 keeps one."""
        backing = self._backing_of(path, number)
        if backing is not None:
            self._check_open(backing)
            os.fchown(backing.fd, uid, gid)
            backing.record()
            return
        assert path is not None
        self._check_file(path)
        with self._tree.parent(path) as (dir_fd, name):
            os.chown(name, uid, gid, dir_fd=dir_fd, follow_symlinks=False)
        self._touched(path)

    def utimens(self, path: str | None, number: int | None, times: Sequence[tuple[int, int]] | None) -> None:
        """Change times, in (seconds, nanoseconds) with UTIME_NOW and UTIME_OMIT."""
        backing = self._backing_of(path, number)
        if backing is not None:
            self._check_open(backing)
            syscalls.futimens(backing.fd, times)
            backing.record()
            return
        assert path is not None
        self._check_file(path)
        with self._tree.parent(path) as (dir_fd, name):
            syscalls.utimensat(dir_fd, name, times)
        self._touched(path)

    def getxattr(self, path: str, name: str) -> bytes:
        """Value of an extended attribute."""
        backing = self._hidden.get(path)
        if backing is not None:
            return os.getxattr(backing.fd, name)
        with self._tree.item(path) as item:
            return os.getxattr(item, name)

    def listxattr(self, path: str) -> list[str]:
        """Names of the extended attributes."""
        backing = self._hidden.get(path)
        if backing is not None:
            return os.listxattr(backing.fd)
        with self._tree.item(path) as item:
            return os.listxattr(item)

    def setxattr(self, path: str, name: str, value: bytes, flags: int) -> None:
        """Set an extended attribute; XATTR_CREATE and XATTR_REPLACE are honoured."""
        backing = self._hidden.get(path)
        if backing is not None:
            os.setxattr(backing.fd, name, value, flags)
            return
        self._check_file(path)
        with self._tree.item(path) as item:
            os.setxattr(item, name, value, flags)
        self._touched(path)

    def removexattr(self, path: str, name: str) -> None:
        """Remove an extended attribute."""
        backing = self._hidden.get(path)
        if backing is not None:
            os.removexattr(backing.fd, name)
            return
        self._check_file(path)
        with self._tree.item(path) as item:
            os.removexattr(item, name)
        self._touched(path)

    # Names

    def unlink(self, path: str) -> None:
        """Delete a name."""
        backing = self._hidden.pop(path, None)
        if backing is not None:  # deleted when it was hidden
            self._table.release(backing)
            return
        if path in self._vanished and not self._exists(path):
            self._vanished.discard(path)
            return
        self._check_file(path)
        with self._tree.parent(path) as (dir_fd, name):
            os.unlink(name, dir_fd=dir_fd)
        self._gone(path)

    def rename(self, old: str, new: str, flags: int) -> None:
        """Rename, with RENAME_NOREPLACE and RENAME_EXCHANGE."""
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
        """libfuse wants to delete an open file: delete it, and keep its Backing under the hidden name.

        libfuse counts a file as open until the release has returned, so it may have no Backing any more."""
        backing = self._table.acquire(old)
        try:
            self._check_file(old)
            with self._tree.parent(old) as (dir_fd, name):
                os.unlink(name, dir_fd=dir_fd)
        except BaseException:
            if backing is not None:
                self._table.release(backing)
            raise
        if backing is None:
            self._vanished.add(new)
            self._gone(old)
            return
        self._engine.removed(old)
        self._engine.renamed(old, new)
        self._hidden[new] = backing
        self._table.moved(old, new)
        backing.record()
        backing.hidden = True  # from here on it may be let go by who closes it
        self._let_go(backing)

    def _let_go(self, backing: Backing) -> None:
        """Gives a deleted file up, and its space free, once nobody has it open any more.

        libfuse says so with an unlink of the hidden name, but not if the last release came while it hid the file: the pin
        helper closes what is deleted at once.
        """
        if backing.hidden and self._table.is_last(backing) and self._hidden.pop(backing.path, None) is not None:
            self._vanished.add(backing.path)
            self._table.release(backing)

    def _moved(self, old: str, new: str, exchanged: bool) -> None:
        self._table.moved(old, new, exchanged=exchanged)
        if exchanged:
            between = old + "\0"
            self._engine.renamed(old, between)
            self._engine.renamed(new, old)
            self._engine.renamed(between, new)
        else:
            self._engine.renamed(old, new)
        self._touched(new)

    def link(self, old: str, new: str) -> None:
        """Make a hard link."""
        self._check_file(old)
        self._policy.check(new)
        with self._tree.parent(old) as (old_fd, old_name), self._tree.parent(new) as (new_fd, new_name):
            os.link(old_name, new_name, src_dir_fd=old_fd, dst_dir_fd=new_fd, follow_symlinks=False)
        self._touched(old)

    def mknod(self, path: str, mode: int, caller: Caller) -> None:
        """Make an empty regular file; EPERM for devices, FIFOs and sockets."""
        self._policy.check(path)
        if not stat.S_ISREG(mode):
            raise _fail(errno.EPERM)
        with self._tree.parent(path) as (dir_fd, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(name, flags, caller.new_mode(dir_fd, stat.S_IMODE(mode)), dir_fd=dir_fd))

    def mkdir(self, path: str, mode: int, caller: Caller) -> None:
        """Make a directory."""
        self._policy.check_tree()
        with self._tree.parent(path) as (dir_fd, name):
            os.mkdir(name, caller.new_mode(dir_fd, mode), dir_fd=dir_fd)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        self._policy.check_tree()
        with self._tree.parent(path) as (dir_fd, name):
            os.rmdir(name, dir_fd=dir_fd)

    def symlink(self, target: str, path: str) -> None:
        """Make a symbolic link with any target."""
        self._policy.check_tree()
        with self._tree.parent(path) as (dir_fd, name):
            os.symlink(target, name, dir_fd=dir_fd)

    # Shared

    def _check_file(self, path: str) -> None:
        """EROFS unless what is at `path` may be changed; without --rw that is only a regular file that matches."""
        if self._policy.everything:
            return
        self._policy.check(path)
        if not stat.S_ISREG(self._tree.stat(path).st_mode):
            raise read_only()

    def _check_open(self, backing: Backing) -> None:
        if not backing.hidden:
            self._policy.check(backing.path)

    def _exists(self, path: str) -> bool:
        try:
            self._tree.stat(path)
        except FileNotFoundError:
            return False
        return True

    def _touched(self, path: str) -> None:
        """The change time moved by our own doing: not a change of content."""
        with self._table.using(path) as backing:
            if backing is not None:
                backing.record()

    def _gone(self, path: str) -> None:
        self._table.forget(path)
        self._engine.removed(path)
