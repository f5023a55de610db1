"""Descriptors of SOURCE's files: of regular ones only, opened for those who may, and opened again in another way."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from llmcache.fs.vfs.caller import Caller


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


def open_direct(fd: int) -> int | None:
    """A second descriptor of the same file with O_DIRECT, or None where the file system refuses that."""
    return _open_again(fd, os.O_RDONLY | os.O_DIRECT)


def open_writable(fd: int) -> int | None:
    """A descriptor of the same file that can be written, or None where the daemon may not."""
    return _open_again(fd, os.O_RDWR)


def may_write(fd: int) -> bool:
    """True if the daemon may open the file behind `fd` for writing."""
    again = open_writable(fd)
    if again is not None:
        os.close(again)
    return again is not None


def _open_again(fd: int, flags: int) -> int | None:
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
