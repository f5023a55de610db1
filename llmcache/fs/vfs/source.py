"""SOURCE, as each user may have it: paths below it, the rights of who asks, and descriptors of its files.

Paths of the mount resolved below SOURCE, one component at a time, without ever following a symbolic link.

The kernel follows links itself (it asks readlink and walks the mount), so a path that reaches the daemon has none. A
component that is one was put there in between, and is refused: nothing outside SOURCE can be reached through a race.

`WritePolicy` says which of them may be changed through it.

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
import pwd
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from llmcache.fs import syscalls
from llmcache.fs.layout.names import ModelNames, open_below
from llmcache.procfs import status_of

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
            fields = status_of(self.pid)
            ids = int(fields["Uid"].split()[3]), int(fields["Gid"].split()[3])
            if ids == (self.uid, self.gid):  # not one that has its number by now
                return tuple(map(int, fields["Groups"].split()))
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


def relative(path: str) -> str:
    """`a/b` for the mount's `/a/b`, and `.` for its root."""
    return path.lstrip("/") or "."


class LinkTarget(NamedTuple):
    """The regular file that a symbolic link leads to: its real path, which holds no link, and its device and inode."""

    path: str
    dev: int
    ino: int


class SourceTree:
    """SOURCE by a directory descriptor opened before the mount may cover it.

    `targets`: by path, the symbolic links that stand for files outside SOURCE. Over FUSE there are none.
    `names`: the names of the files, by links to them and what else names them.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.targets: dict[str, LinkTarget] = {}
        self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.names = ModelNames(directory, self.fd)

    def matches(self, path: str, globs: Iterable[str]) -> bool:
        """Return True if a name of a file matches one of `globs`, whole or by its base name."""
        return any(matches(name, globs) for name in self.names.all_of(path))

    @contextlib.contextmanager
    def parent(self, path: str, caller: Caller = NOBODY_ELSE) -> Iterator[tuple[int, str]]:
        """(descriptor of the parent directory, last component) of a path that `caller` may walk."""
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
    def item(self, path: str, caller: Caller = NOBODY_ELSE) -> Iterator[str]:
        """A name in /proc that stands for exactly the file, directory or link at `path` (for calls without dir_fd)."""
        with self.parent(path, caller) as (dir_fd, name):
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def stat(self, path: str) -> os.stat_result:
        """lstat of a path; of a link in `targets` that of the target."""
        with self.parent(path) as (dir_fd, name):
            status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        target = self.targets.get(path) if stat.S_ISLNK(status.st_mode) else None
        return status if target is None else os.lstat(target.path)

    def find_target(self, dir_fd: int, name: str) -> tuple[LinkTarget, os.stat_result]:
        """Return the file that the link `name` in a directory leads to, and its status. OSError.

        PermissionError if the link's owner may not read the file: a link must not lead the daemon to what its maker may
        not have.
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
        """A readable descriptor of a directory."""
        with self.parent(path) as (dir_fd, name):
            return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)

    def close(self) -> None:
        """Close SOURCE."""
        self.names.close()
        os.close(self.fd)


def _groups_of(uid: int, gid: int) -> tuple[int, ...]:
    """Return the supplementary groups of a user; none of one that the system does not know."""
    try:
        return tuple(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except KeyError:
        return ()


def links_outside(source: str, mount: str, *, in_place: bool) -> list[str]:
    """Return the symbolic links below SOURCE, relative to it, whose targets a mount of it does not serve.

    Over FUSE: those that lead out of MOUNT, where they are resolved. In place, where links to files are followed: those to
    files on other file systems, and to directories outside SOURCE. Looks for SCAN_S at most.
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
    """Return True for a link to a file on a file system, or to none."""
    try:
        status = os.stat(path)
    except OSError:
        return True
    return not stat.S_ISDIR(status.st_mode) and (not stat.S_ISREG(status.st_mode) or status.st_dev == device)


DEFAULT_SPILL = ("*.kv",)


def matches(path: str, globs: Iterable[str]) -> bool:
    """True if the relative path or the base name of a mount's `path` (`/a/b`) matches one of `globs`."""
    short = relative(path)
    base = os.path.basename(short)
    return any(fnmatchcase(short, glob) or fnmatchcase(base, glob) for glob in globs)


@dataclass(frozen=True)
class WritePolicy:
    """`everything` is --rw; else only regular files whose relative path or base name matches one of `spill`."""

    everything: bool = False
    spill: tuple[str, ...] = DEFAULT_SPILL

    def allows(self, path: str) -> bool:
        """True if a regular file at `path` may be changed."""
        return self.everything or matches(path, self.spill)

    def check(self, *paths: str) -> None:
        """EROFS unless every path may be changed."""
        for path in paths:
            if not self.allows(path):
                raise read_only()

    def check_tree(self) -> None:
        """EROFS unless directories, links and the like may be changed."""
        if not self.everything:
            raise read_only()


def read_only() -> OSError:
    """The error of every change that a mount does not allow."""
    return OSError(errno.EROFS, os.strerror(errno.EROFS))
