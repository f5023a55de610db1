"""The user on whose behalf the daemon acts, their rights, and descriptors of SOURCE's files opened with them.

With default_permissions the kernel checks rights before it asks, by the attributes that it was told last. A daemon that is
root and serves others (allow_other) must not rely on that alone: what is at a path may have been exchanged since, behind
the mount, for something that this user may not have. So what changes or lists a directory is done with the user's own
rights, and an opened file is shown to them only if they may open that very file. What takes space is done with their
rights as well: root may take the blocks that a file system reserves, and is held by no quota.

Rights are a thread's: the raw system calls change this thread alone (glibc's setgroups would change all), so threads that
serve others meanwhile are not concerned.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmcache.fs import syscalls

_DEFAULT_LIST = "system.posix_acl_default"
_EXEC = 0x20  # __FMODE_EXEC: the file is opened to be run, which needs no right to read it


@dataclass(frozen=True)
class Caller:
    """Who asks: user, group, thread and umask, as the kernel tells them with each request."""

    uid: int
    gid: int
    pid: int
    umask: int = 0
    known_groups: tuple[int, ...] | None = None  # for later, when the thread may have ended

    @property
    def is_other(self) -> bool:
        """True if the daemon may more than they may. An ordinary user's daemon has no other's rights to take on."""
        return (self.uid, self.gid) != (0, 0) and os.geteuid() == 0

    def groups(self) -> tuple[int, ...]:
        """Their supplementary groups; none once the thread has ended, or where it cannot be seen (another pid namespace)."""
        if self.known_groups is not None:
            return self.known_groups
        try:
            with open(f"/proc/{self.pid}/status", "rb") as status:
                lines = {name: numbers.split() for name, _, numbers in (line.partition(b":") for line in status)}
            if (int(lines[b"Uid"][3]), int(lines[b"Gid"][3])) == (self.uid, self.gid):  # not one that has its number by now
                return tuple(map(int, lines[b"Groups"]))
        except (OSError, KeyError):
            pass
        return ()

    def remembered(self) -> Caller | None:
        """The same with the groups of now; None for one who may whatever the daemon may."""
        return replace(self, known_groups=self.groups()) if self.is_other else None

    @contextlib.contextmanager
    def rights(self) -> Iterator[None]:
        """While it lasts, this thread may do on file systems what they may, and makes files that are theirs."""
        if not self.is_other:
            yield
            return
        group, groups = os.getegid(), os.getgroups()
        try:
            syscalls.set_thread_groups(self.groups())
            syscalls.set_thread_group(self.gid)
            syscalls.set_thread_user(self.uid)
            yield
        finally:
            syscalls.set_thread_user(0)  # first: the others need its capabilities
            syscalls.set_thread_group(group)
            syscalls.set_thread_groups(groups)

    def check(self, fd: int, flags: int) -> None:
        """PermissionError unless they may open the file behind `fd` with `flags`."""
        if self.is_other:
            both = os.R_OK | os.W_OK  # also for O_ACCMODE itself, which opens a file for ioctl alone
            access = {os.O_RDONLY: os.R_OK, os.O_WRONLY: os.W_OK}.get(flags & os.O_ACCMODE, both)
            wanted = os.X_OK if flags & _EXEC else access | (os.W_OK if flags & os.O_TRUNC else 0)
            with self.rights():
                syscalls.check_access(fd, wanted)

    def check_search(self, fd: int) -> None:
        """PermissionError unless they may search the directory behind `fd`."""
        self.check(fd, _EXEC)

    def new_mode(self, dir_fd: int, mode: int) -> int:
        """The mode of what they make with `mode` in a directory: less their umask, unless it has a default access list."""
        if not mode & self.umask:
            return mode
        try:
            os.getxattr(f"/proc/self/fd/{dir_fd}", _DEFAULT_LIST)
        except OSError:  # none, or not known on that file system
            return mode & ~self.umask
        return mode


NOBODY_ELSE = Caller(0, 0, 0)
"""The daemon itself."""


def open_for(caller: Caller, dir_fd: int, name: str, flags: int, mode: int) -> int:
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


def open_again(fd: int, flags: int) -> int | None:
    """Another descriptor of the same file, or None where the file system, or the daemon's rights, refuse `flags`."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    except OSError:
        return None


def no_read_ahead(fd: int) -> None:
    """Let SOURCE's file system read no more than it is asked for."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def is_at(dir_fd: int, name: str, fd: int) -> bool:
    """True unless another file than the one behind `fd` is at `name` in `dir_fd` now."""
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return True
    return os.path.samestat(found, os.fstat(fd))
