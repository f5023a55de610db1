"""libfuse's callbacks: they convert C arguments to calls of LlmcacheOperations, and exceptions to errno.

Reads and writes pass memory addresses, without a copy. With `nullpath_ok`, libfuse passes no path to calls on an open file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from llmcache.mount.source.tree import Caller
from llmcache.mount.vfs.libfuse import Notifier, Pointer, request_context, request_number

if TYPE_CHECKING:
    from llmcache.mount.vfs.operations import LlmcacheOperations

    Buffer = ctypes._Pointer[ctypes.c_byte]
    Struct = ctypes._Pointer[ctypes.Structure]

log = logging.getLogger("llmcache.mount")

# Errors of the daemon's own system calls, which an application could not interpret.
_NEVER_LEAK = {errno.EINTR, errno.EAGAIN, errno.EBADF, errno.EFAULT}

_HIDDEN = "/.fuse_hidden"

_DIRECT = {"unlink", "rmdir", "symlink", "link", "removexattr"}  # names are their only arguments
_WITHOUT_NAMES = {"read", "write"}

# Operations that change or list directories, or change attributes, run with the caller's rights (see `source.py`).
_WITH_RIGHTS = {
    *("mknod", "mkdir", "unlink", "rmdir", "symlink", "rename", "link", "opendir"),
    *("chown", "utimens", "setxattr", "removexattr", "listxattr"),
}


class OpenInfo(Protocol):
    """fuse_file_info."""

    fh: int
    flags: int
    keep_cache: bool


class DirectoryFiller(Protocol):
    """fuse_fill_dir_t."""

    argtypes: Sequence[type[Struct]]

    def __call__(self, buffer: int, name: bytes, status: object, offset: int, flags: int, /) -> int:
        """Return 0 if the entry was added, not 0 if the buffer is full."""
        ...


def reply_errno(error: OSError) -> int:
    """Return the positive errno to report to the application."""
    number = error.errno
    if not number or number < 0 or number in _NEVER_LEAK:
        return errno.EIO
    return number


def _handle(info: Pointer[OpenInfo]) -> int | None:
    return info.contents.fh if info else None


# Registers a function to call when the thread ends, as for a C++ destructor: before thread-specific keys, such as Python's,
# are cleared. The last argument is an address in the library that contains the function.
_at_thread_end = getattr(ctypes.CDLL(None), "__cxa_thread_atexit_impl", None)  # glibc


def _release_thread(_nothing: int | None) -> None:
    """Release `_keep_thread`'s state, which ctypes acquired once more for this call."""
    ctypes.pythonapi.PyGILState_Release(0)  # PyGILState_LOCKED: ctypes keeps the GIL


_RELEASE_THREAD = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release_thread)


class Callbacks:
    """Callbacks for fuse_operations: `_op_<name>`, or one of `_DIRECT`, serves the member `<name>`."""

    def __init__(self, operations: LlmcacheOperations, on_init: Callable[[Notifier], None]) -> None:
        """Requests are served once `on_init` returns."""
        self._ops = operations
        self._on_init = on_init
        self._thread = threading.local()  # `looked`: (request, path) of the last lookup of a hidden name

    def init(self, notifier: Notifier) -> None:
        self._ops.init(notifier)
        self._on_init(notifier)

    def destroy(self) -> None:
        self._ops.destroy()

    def function(self, name: str) -> Callable[..., int] | None:
        """The callback returns OSErrors as -errno; it logs others and returns -EIO."""
        method = getattr(self._ops, name) if name in _DIRECT else getattr(self, "_op_" + name, None)
        if method is None:
            return None
        has_names = name not in _WITHOUT_NAMES

        rights: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        if name in _WITH_RIGHTS:
            rights = self._rights

        def call(*arguments: object) -> int:
            self._keep_thread()
            try:
                if has_names:
                    arguments = tuple(os.fsdecode(each) if isinstance(each, bytes) else each for each in arguments)
                with rights():
                    return method(*arguments) or 0
            except OSError as error:
                return -reply_errno(error)
            except BaseException:  # no exception may reach C
                log.exception("unexpected error in FUSE operation %s", name)
                return -errno.EIO

        return call

    def _keep_thread(self) -> None:
        """Keep the Python state of this libfuse thread until the thread ends.

        Creating one takes as long as a small request. libfuse before 3.12 ends surplus workers after a burst.
        """
        if not hasattr(self._thread, "looked"):
            self._thread.looked = None
            ctypes.pythonapi.PyGILState_Ensure()
            if _at_thread_end is not None:
                _at_thread_end(_RELEASE_THREAD, None, ctypes.cast(_at_thread_end, ctypes.c_void_p))

    # Open files

    def _op_open(self, path: str, info: Pointer[OpenInfo]) -> None:
        file = info.contents
        file.fh, file.keep_cache = self._ops.open(path, file.flags, self._caller())

    def _op_create(self, path: str, mode: int, info: Pointer[OpenInfo]) -> None:
        file = info.contents
        file.fh, file.keep_cache = self._ops.create(path, file.flags, mode, self._caller())

    def _op_read(self, _path: str | None, buffer: Buffer, size: int, offset: int, info: Pointer[OpenInfo]) -> int:
        address = ctypes.addressof(buffer.contents)
        return self._ops.read_into(info.contents.fh, address, size, offset, request_context().pid)

    def _op_write(self, _path: str | None, buffer: Buffer, size: int, offset: int, info: Pointer[OpenInfo]) -> int:
        address = ctypes.addressof(buffer.contents)
        return self._ops.write_from(info.contents.fh, address, size, offset, self._caller())

    def _op_release(self, _path: str | None, info: Pointer[OpenInfo]) -> None:
        self._ops.release(info.contents.fh)

    def _op_fsync(self, _path: str | None, data_only: int, info: Pointer[OpenInfo]) -> None:
        self._ops.fsync(info.contents.fh, bool(data_only))

    def _op_fallocate(self, _path: str | None, mode: int, offset: int, length: int, info: Pointer[OpenInfo]) -> None:
        self._ops.fallocate(info.contents.fh, mode, offset, length, self._caller())

    def _op_lseek(self, _path: str | None, offset: int, whence: int, info: Pointer[OpenInfo]) -> int:
        """The kernel handles all but SEEK_DATA and SEEK_HOLE."""
        return self._ops.lseek(info.contents.fh, offset, whence)

    # Attributes

    def _op_getattr(self, path: str | None, buffer: Struct, info: Pointer[OpenInfo]) -> None:
        """FUSE_GETATTR and FUSE_LOOKUP."""
        if path is not None and _HIDDEN in path and not info:
            self._thread.looked = request_number(), path
        status = self._ops.getattr(path, _handle(info))
        target = buffer.contents
        for field in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size", "st_blksize", "st_blocks"):
            setattr(target, field, getattr(status, field))
        for field in ("atime", "mtime", "ctime"):
            spec = getattr(target, f"st_{field}spec")
            spec.tv_sec, spec.tv_nsec = divmod(getattr(status, f"st_{field}_ns"), 10**9)

    def _op_truncate(self, path: str | None, length: int, info: Pointer[OpenInfo]) -> None:
        self._ops.truncate(path, _handle(info), length, self._caller())

    def _op_chmod(self, path: str | None, mode: int, info: Pointer[OpenInfo]) -> None:
        self._ops.chmod(path, _handle(info), mode, self._caller())

    def _op_chown(self, path: str | None, uid: int, gid: int, info: Pointer[OpenInfo]) -> None:
        """-1 keeps a value."""
        none = 2**32 - 1
        self._ops.chown(path, _handle(info), -1 if uid == none else uid, -1 if gid == none else gid)

    def _op_utimens(self, path: str | None, times: Struct, info: Pointer[OpenInfo]) -> None:
        """UTIME_NOW and UTIME_OMIT are passed on as nanoseconds."""
        pairs = None
        if times:
            both = times.contents
            pairs = [(both.actime.tv_sec, both.actime.tv_nsec), (both.modtime.tv_sec, both.modtime.tv_nsec)]
        self._ops.utimens(path, _handle(info), pairs)

    def _op_setxattr(self, path: str, name: str, value: Buffer, size: int, flags: int) -> None:
        self._ops.setxattr(path, name, ctypes.string_at(value, size), flags)

    def _op_getxattr(self, path: str, name: str, buffer: Buffer, size: int) -> int:
        """FUSE_GETXATTR; size 0 requests the length."""
        # The kernel itself requests system and security attributes (access lists, capabilities at writes): not secret.
        with self._rights() if name.startswith(("user.", "trusted.")) else contextlib.nullcontext():
            return _put(self._ops.getxattr(path, name), buffer, size)

    def _op_listxattr(self, path: str, buffer: Buffer, size: int) -> int:
        """FUSE_LISTXATTR; size 0 requests the length."""
        names = self._ops.listxattr(path)
        return _put(b"".join(os.fsencode(name) + b"\0" for name in names), buffer, size)

    # Names

    def _op_readlink(self, path: str, buffer: Buffer, size: int) -> None:
        target = os.fsencode(self._ops.readlink(path))[: size - 1] + b"\0"
        ctypes.memmove(buffer, target, len(target))

    def _op_mknod(self, path: str, mode: int, _device: int) -> None:
        self._ops.mknod(path, mode, self._caller())

    def _op_mkdir(self, path: str, mode: int) -> None:
        self._ops.mkdir(path, mode, self._caller())

    def _op_rename(self, old: str, new: str, flags: int) -> None:
        """FUSE_RENAME2, and FUSE_UNLINK of an open file, which libfuse renames to a free hidden name."""
        looked, self._thread.looked = self._thread.looked, None
        if _HIDDEN in new and looked == (request_number(), new):
            self._ops.hide(old, new)
        else:
            self._ops.rename(old, new, flags)

    # Directories and the file system

    def _op_opendir(self, path: str, info: Pointer[OpenInfo]) -> None:
        info.contents.fh = self._ops.opendir(path)

    def _op_readdir(
        self, _path: str | None, buffer: int, fill: DirectoryFiller, offset: int, info: Pointer[OpenInfo], _flags: int
    ) -> None:
        status = fill.argtypes[2]._type_()
        reference = ctypes.byref(status)
        listing = self._ops.listing(info.contents.fh)
        with listing.lock:
            for position, name, mode in listing.entries(offset):
                status.st_mode = mode
                if fill(buffer, os.fsencode(name), reference, position, 0):
                    return

    def _op_releasedir(self, _path: str | None, info: Pointer[OpenInfo]) -> None:
        self._ops.releasedir(info.contents.fh)

    def _op_fsyncdir(self, _path: str | None, data_only: int, info: Pointer[OpenInfo]) -> None:
        self._ops.fsyncdir(info.contents.fh, bool(data_only))

    def _op_statfs(self, _path: str, buffer: Struct) -> None:
        status = self._ops.statfs()
        target = buffer.contents
        for field in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"):
            setattr(target, field, getattr(status, field))
        target.f_namemax = status.f_namemax

    def _caller(self) -> Caller:
        context = request_context()
        return Caller(context.uid, context.gid, context.pid, context.umask)

    def _rights(self) -> AbstractContextManager[None]:
        return self._caller().rights()


def _put(value: bytes, buffer: Buffer, size: int) -> int:
    """Copy the value if the caller passed a buffer; return its length. ERANGE: the buffer is too small."""
    if size and buffer:
        if len(value) > size:
            return -errno.ERANGE
        ctypes.memmove(buffer, value, len(value))
    return len(value)
