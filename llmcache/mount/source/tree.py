"""Access to SOURCE: paths below it, the rights of callers, and descriptors of its files.

Paths are resolved without following symbolic links, which the kernel resolves itself: no race leads out of SOURCE.

The kernel checks rights (default_permissions) against attributes that may be outdated. So a root daemon that serves other
users changes and lists directories with the caller's rights, and opens a file only if the caller may open the file of the
descriptor. It writes with these rights, too, because of quotas. They are set for one thread by raw system calls.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from llmcache.model.names import ModelNames, open_below
from llmcache.mount import syscalls
from llmcache.procfs import status_of

_DEFAULT_LIST = "system.posix_acl_default"
_EXEC = 0x20  # __FMODE_EXEC: an open for execution, which does not need the right to read


@dataclass(frozen=True)
class Caller:
    """The client of a request, as the kernel passes it."""

    uid: int
    gid: int
    pid: int
    umask: int = 0
    known_groups: tuple[int, ...] | None = None  # saved, because the thread may have ended later

    @property
    def is_other(self) -> bool:
        """True if the daemon is root, and the caller is not."""
        return (self.uid, self.gid) != (0, 0) and os.geteuid() == 0

    def groups(self) -> tuple[int, ...]:
        """Empty if the thread has ended or its pid namespace hides it."""
        if self.known_groups is not None:
            return self.known_groups
        try:
            fields = status_of(self.pid)
            ids = int(fields["Uid"].split()[3]), int(fields["Gid"].split()[3])
            if ids == (self.uid, self.gid):  # else another thread has the number by now
                return tuple(map(int, fields["Groups"].split()))
        except (OSError, KeyError):
            pass
        return ()

    def remembered(self) -> Caller | None:
        """Return None if the daemon keeps its own rights."""
        return replace(self, known_groups=self.groups()) if self.is_other else None

    @contextlib.contextmanager
    def rights(self) -> Iterator[None]:
        """This thread has the caller's rights, and creates files that the caller owns."""
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
            syscalls.set_thread_user(0)  # first: the others need the capabilities of root
            syscalls.set_thread_group(group)
            syscalls.set_thread_groups(groups)

    def check(self, fd: int, flags: int) -> None:
        """PermissionError unless the caller may open the file."""
        if self.is_other:
            both = os.R_OK | os.W_OK  # also for access mode 3, which opens a file only for ioctl
            access = {os.O_RDONLY: os.R_OK, os.O_WRONLY: os.W_OK}.get(flags & os.O_ACCMODE, both)
            wanted = os.X_OK if flags & _EXEC else access | (os.W_OK if flags & os.O_TRUNC else 0)
            with self.rights():
                syscalls.check_access(fd, wanted)

    def check_search(self, fd: int) -> None:
        self.check(fd, _EXEC)

    def new_mode(self, dir_fd: int, mode: int) -> int:
        """Apply the umask, unless the directory has a default access list."""
        if not mode & self.umask:
            return mode
        try:
            os.getxattr(f"/proc/self/fd/{dir_fd}", _DEFAULT_LIST)
        except OSError:  # no list, or the file system does not support them
            return mode & ~self.umask
        return mode


THE_DAEMON = Caller(0, 0, 0)
"""The daemon itself."""


def open_for(caller: Caller, dir_fd: int, name: str, flags: int, mode: int) -> int:
    """Open a regular file if `caller` may. A new file belongs to `caller`."""
    if flags & os.O_CREAT:
        with caller.rights():
            return _open_regular(dir_fd, name, flags, caller.new_mode(dir_fd, mode))
    fd = _open_regular(dir_fd, name, flags, mode)  # readable for the cache, even if the caller may only write
    try:
        caller.check(fd, flags)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_regular(dir_fd: int, name: str, flags: int, mode: int) -> int:
    """Refuse links and other kinds of files (a FIFO would block)."""
    wanted = flags & (os.O_CREAT | os.O_EXCL)
    writable = flags & os.O_ACCMODE != os.O_RDONLY
    common = wanted | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(name, common | (os.O_RDWR if writable else os.O_RDONLY), mode, dir_fd=dir_fd)
    except PermissionError:
        if not writable:
            raise
        # The daemon, like the application, has only write permission.
        fd = os.open(name, common | os.O_WRONLY, mode, dir_fd=dir_fd)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    number = errno.EISDIR if stat.S_ISDIR(kind) else errno.ENXIO
    raise OSError(number, os.strerror(number))


def open_again(fd: int, flags: int) -> int | None:
    """Return another descriptor of the file; None if `flags` are not allowed."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    except OSError:
        return None


def no_read_ahead(fd: int) -> None:
    """Disable readahead for a descriptor."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def is_at(dir_fd: int, name: str, fd: int) -> bool:
    """Return False if another file is at `name` in `dir_fd`."""
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return True
    return os.path.samestat(found, os.fstat(fd))


def relative(path: str) -> str:
    """Return `a/b` for `/a/b`, and `.` for the root."""
    return path.lstrip("/") or "."


class LinkTarget(NamedTuple):
    """The file that a symbolic link leads to; its path has no links."""

    path: str
    dev: int
    ino: int


class SourceTree:
    """SOURCE, by a directory descriptor that is opened before the mount may cover the path.

    `targets`: the file outside SOURCE for each symbolic link to one; empty with FUSE.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.targets: dict[str, LinkTarget] = {}
        self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.names = ModelNames(directory, self.fd)

    def matches(self, path: str, globs: Iterable[str]) -> bool:
        return any(matches(name, globs) for name in self.names.all_of(path))

    @contextlib.contextmanager
    def parent(self, path: str, caller: Caller = THE_DAEMON) -> Iterator[tuple[int, str]]:
        """Yield (descriptor of the parent directory, last component)."""
        *above, name = relative(path).split("/")
        if not above:
            yield self.fd, name
            return
        with caller.rights():
            fd = open_below(self.fd, above)
        try:
            caller.check_search(fd)
            yield fd, name
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def item(self, path: str, caller: Caller = THE_DAEMON) -> Iterator[str]:
        """Yield a name in /proc, for calls without `dir_fd`."""
        with self.parent(path, caller) as (dir_fd, name):
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def stat(self, path: str) -> os.stat_result:
        """A link in `targets` has its target's status."""
        with self.parent(path) as (dir_fd, name):
            status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        target = self.targets.get(path) if stat.S_ISLNK(status.st_mode) else None
        return status if target is None else os.lstat(target.path)

    def find_target(self, dir_fd: int, name: str) -> tuple[LinkTarget, os.stat_result]:
        """Return the file that a link leads to, and its status. OSError.

        PermissionError: the link's owner may not read it.
        """
        link = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        fd = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            status = os.fstat(fd)
            Caller(link.st_uid, link.st_gid, 0, known_groups=_groups_of(link.st_uid, link.st_gid)).check(fd, os.O_RDONLY)
            return LinkTarget(os.readlink(f"/proc/self/fd/{fd}"), status.st_dev, status.st_ino), status
        finally:
            os.close(fd)

    def open_directory(self, path: str) -> int:
        with self.parent(path) as (dir_fd, name):
            return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)

    def close(self) -> None:
        self.names.close()
        os.close(self.fd)


def _groups_of(uid: int, gid: int) -> tuple[int, ...]:
    try:
        return tuple(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except KeyError:
        return ()


def links_outside(source: str, mount: str, *, in_place: bool) -> list[str]:
    """Return the symbolic links below SOURCE whose targets a mount of it does not serve.

    With FUSE, they lead out of MOUNT; in place, to other file systems or to directories outside SOURCE. The scan ends after
    SCAN_S.
    """
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    names = ModelNames(source if in_place else mount, fd, links_only=True)
    try:
        names.scan()
        found = [path.lstrip("/") for path in names.outside]
        device = os.fstat(fd).st_dev
        return [path for path in found if not in_place or not _is_followed(os.path.join(source, path), device)]
    finally:
        names.close()
        os.close(fd)


def _is_followed(path: str, device: int) -> bool:
    """True for dangling and special links, too."""
    try:
        status = os.stat(path)
    except OSError:
        return True
    return not stat.S_ISDIR(status.st_mode) and (not stat.S_ISREG(status.st_mode) or status.st_dev == device)


DEFAULT_SPILL = ("*.kv",)


def matches(path: str, globs: Iterable[str]) -> bool:
    """Return True if the relative path or the base name of `/a/b` matches."""
    short = relative(path)
    base = os.path.basename(short)
    return any(fnmatchcase(short, glob) or fnmatchcase(base, glob) for glob in globs)


@dataclass(frozen=True)
class WritePolicy:
    """What may be changed: with `everything`, all; else regular files that match `spill`."""

    everything: bool = False
    spill: tuple[str, ...] = DEFAULT_SPILL

    def allows(self, path: str) -> bool:
        return self.everything or matches(path, self.spill)

    def check(self, *paths: str) -> None:
        for path in paths:
            if not self.allows(path):
                raise read_only()

    def check_tree(self) -> None:
        """EROFS unless directories and links may be changed."""
        if not self.everything:
            raise read_only()


def read_only() -> OSError:
    """Return the error for a forbidden change."""
    return OSError(errno.EROFS, os.strerror(errno.EROFS))
