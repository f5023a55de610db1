"""The path of an inode that no process has open any more: open_by_handle_at, which some file systems grant to root."""

from __future__ import annotations

import contextlib
import ctypes
import os

from llmcache.trace.mounts import mounts

# Their handles are inode number and generation, and a generation of 0 stands for any.
_KINDS = ("ext2", "ext3", "ext4", "f2fs")
_INO32_GEN = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Handle(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_uint),
        ("kind", ctypes.c_int),
        ("inode", ctypes.c_uint32),
        ("generation", ctypes.c_uint32),
    )


def path_of(dev: int, inode: int) -> str | None:
    """Returns a path by which this process reaches the inode; None if there is none, or the file system does not tell."""
    if inode >= 1 << 32:
        return None
    for mount in mounts("self").values():
        if mount.dev != dev or mount.kind not in _KINDS:
            continue
        with contextlib.suppress(OSError):
            path = _opened(mount.point, inode)
            if (stat := os.stat(path)) and (stat.st_dev, stat.st_ino) == (dev, inode):
                return path
    return None


def _opened(point: str, inode: int) -> str:
    """Returns the path that the kernel knows for `inode` of the file system on `point`; OSError if none."""
    handle = _Handle(8, _INO32_GEN, inode, 0)
    base = os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = _libc.open_by_handle_at(base, ctypes.byref(handle), os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(base)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
