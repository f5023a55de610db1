"""System calls that Python's os module lacks, or offers only with a copy of the data.

Calls that can wait release the GIL. All raise OSError and retry EINTR.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import itertools
import os
from collections.abc import Sequence
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_quick = ctypes.PyDLL(None, use_errno=True)  # for calls that never wait, and take less time than acquiring the GIL again

_OFF = ctypes.c_int64
_libc.pread64.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, _OFF]
_libc.pread64.restype = ctypes.c_ssize_t
_libc.pwrite64.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, _OFF]
_libc.pwrite64.restype = ctypes.c_ssize_t
_libc.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, _OFF, _OFF]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.syscall.restype = _quick.syscall.restype = ctypes.c_long
_libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

MADV_RANDOM, MADV_DONTNEED, MADV_HUGEPAGE, MADV_COLD, MADV_PAGEOUT, MADV_POPULATE_READ = 1, 4, 14, 20, 21, 22
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
_PROCESS_MADVISE = 440  # on every architecture; Linux 5.10
_PAGEMAP_SCAN, _PAGE_IS_HUGE, _REGIONS = 0xC0606610, 1 << 6, 64  # Linux 6.7
_IOV_MAX = 1024
AT_FDCWD = -100
MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
_AT_EACCESS = 0x200
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # on every architecture; Linux 5.2, 5.2, 5.12
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MS_PRIVATE = 1, 4, 1 << 18
_FACCESSAT2 = 439  # on every architecture; Linux 5.8
_CALLS = ("setresuid", "setresgid", "setgroups")
_NUMBERS = {
    machine: dict(zip(_CALLS, numbers, strict=True))
    for machine, numbers in {
        "x86_64": (117, 119, 116),
        "aarch64": (147, 149, 159),
        "riscv64": (147, 149, 159),
        "ppc64le": (164, 169, 81),
        "s390x": (208, 210, 206),
    }.items()
}.get(os.uname().machine)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


def _failure() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def pread(fd: int, address: int, size: int, offset: int) -> int:
    """Return the bytes read, short at the end of the file."""
    while True:
        done = int(_libc.pread64(fd, address, size, offset))
        if done >= 0:
            return done
        if ctypes.get_errno() != errno.EINTR:
            raise _failure()


def pwrite(fd: int, address: int, size: int, offset: int) -> int:
    """Return the number of bytes written."""
    while True:
        done = int(_libc.pwrite64(fd, address, size, offset))
        if done >= 0:
            return done
        if ctypes.get_errno() != errno.EINTR:
            raise _failure()


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate with mode bits."""
    while _libc.fallocate64(fd, mode, offset, length) != 0:
        if ctypes.get_errno() != errno.EINTR:
            raise _failure()


def madvise(address: int, size: int, advice: int) -> None:
    """Give advice on this process' memory."""
    if _libc.madvise(address, size, advice) != 0:
        raise _failure()


def process_madvise(pidfd: int, parts: Sequence[tuple[int, int]], advice: int) -> int:
    """Advise on at most 1024 ranges, (address, bytes), of another process; return the bytes advised.

    OSError: the kernel refuses the first range.
    """
    count = min(len(parts), _IOV_MAX)
    packed = array.array("Q", itertools.chain.from_iterable(parts[:count]))  # struct iovec, filled fast
    call, flags, where = ctypes.c_long(_PROCESS_MADVISE), ctypes.c_uint(0), ctypes.c_void_p(packed.buffer_info()[0])
    done = _libc.syscall(call, ctypes.c_int(pidfd), where, ctypes.c_size_t(count), ctypes.c_int(advice), flags)
    if done < 0:
        raise _failure()
    return int(done)


def refusal() -> str | None:
    """Return the first call of in-place steering that fails, and its error, or None.

    A seccomp filter may refuse calls in containers.
    """
    call, page, own = "pidfd_open", os.sysconf("SC_PAGE_SIZE"), -1
    try:
        own = os.pidfd_open(os.getpid())
        call = "process_madvise"
        memory = ctypes.create_string_buffer(2 * page)
        start = -(-ctypes.addressof(memory) // page) * page
        for advice in (MADV_COLD, MADV_PAGEOUT):
            process_madvise(own, [(start, page)], advice)
    except OSError as error:
        return f"the kernel or a seccomp filter refuses the system call {call}: {error.strerror}"
    finally:
        if own >= 0:
            os.close(own)
    return None


def huge_bytes(address: int, size: int) -> int:
    """Return the bytes that huge pages map (PAGEMAP_SCAN), in at most _REGIONS regions."""
    regions = (ctypes.c_uint64 * (3 * _REGIONS))()
    span = (address, address + size, 0, ctypes.addressof(regions), _REGIONS, 0)
    scan = (ctypes.c_uint64 * 12)(96, 0, *span, 0, _PAGE_IS_HUGE, 0, _PAGE_IS_HUGE)  # struct pm_scan_arg
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, scan)
    return sum(regions[3 * at + 1] - regions[3 * at] for at in range(count))


def bind(source: str, target: str, attributes: int = 0) -> int:
    """Bind-mount a directory on `target`, with MOUNT_ATTR_ flags; return the id of the mount (root only).

    Copies in other mount namespaces have the flags, too; later mounts are not propagated. ENOSYS before Linux 5.12.
    """
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC)
    tree = _mount_call("open_tree", _OPEN_TREE, ctypes.c_int(AT_FDCWD), os.fsencode(source), flags)
    try:
        settings = (ctypes.c_uint64 * 4)(attributes, 0, _MS_PRIVATE, 0)  # struct mount_attr: set, clear, propagation, userns
        size = ctypes.c_size_t(ctypes.sizeof(settings))
        flags = ctypes.c_uint(_AT_EMPTY_PATH)
        _mount_call("mount_setattr", _MOUNT_SETATTR, ctypes.c_int(tree), b"", flags, ctypes.byref(settings), size)
        where = (ctypes.c_int(AT_FDCWD), os.fsencode(target), ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH))
        _mount_call("move_mount", _MOVE_MOUNT, ctypes.c_int(tree), b"", *where)
        with open(f"/proc/self/fdinfo/{tree}", encoding="ascii") as info:
            return next(int(line.partition(":")[2]) for line in info if line.startswith("mnt_id:"))
    finally:
        os.close(tree)


def _mount_call(name: str, number: int, *arguments: Any) -> int:
    done = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return done


def utimens(file: int | str, times: Sequence[tuple[int, int]] | None) -> None:
    """Set (atime, mtime), each (seconds, nanoseconds), UTIME_NOW or UTIME_OMIT; None: now."""
    block = (_Timespec * 2)(*[_Timespec(*pair) for pair in times]) if times is not None else None
    done = _libc.futimens(file, block) if isinstance(file, int) else _libc.utimensat(AT_FDCWD, os.fsencode(file), block, 0)
    if done != 0:
        raise _failure()


def inotify_init(flags: int) -> int:
    """Return a new inotify descriptor."""
    fd = int(_libc.inotify_init1(flags))
    if fd < 0:
        raise _failure()
    return fd


def inotify_add_watch(fd: int, path: str, mask: int) -> int:
    """Return the number of a watch."""
    watch = int(_libc.inotify_add_watch(fd, os.fsencode(path), ctypes.c_uint32(mask)))
    if watch < 0:
        raise _failure()
    return watch


def inotify_rm_watch(fd: int, watch: int) -> None:
    """End a watch, unless it has ended already."""
    _libc.inotify_rm_watch(fd, watch)


def umount2(target: str, flags: int) -> None:
    """Unmount by system call (root only)."""
    if _libc.umount2(os.fsencode(target), flags) != 0:
        raise _failure()


def set_thread_user(uid: int) -> None:
    """Set this thread's effective user; any but root has no capabilities."""
    _set_thread("setresuid", ctypes.c_long(-1), ctypes.c_long(uid), ctypes.c_long(-1))


def set_thread_group(gid: int) -> None:
    """Set this thread's effective group."""
    _set_thread("setresgid", ctypes.c_long(-1), ctypes.c_long(gid), ctypes.c_long(-1))


def set_thread_groups(groups: Sequence[int]) -> None:
    """Set this thread's supplementary groups."""
    _set_thread("setgroups", ctypes.c_size_t(len(groups)), (ctypes.c_uint * max(1, len(groups)))(*groups))


def _set_thread(call: str, *arguments: Any) -> None:
    if _NUMBERS is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _quick.syscall(ctypes.c_long(_NUMBERS[call]), *arguments) != 0:
        raise _failure()


def check_access(fd: int, mode: int) -> None:
    """Raise OSError unless this thread's effective user may access a file with `mode` (os.R_OK, …)."""
    flags = ctypes.c_int(_AT_EACCESS | _AT_EMPTY_PATH)
    if _libc.syscall(ctypes.c_long(_FACCESSAT2), ctypes.c_int(fd), b"", ctypes.c_int(mode), flags) != 0:
        raise _failure()


def keep_heap_small() -> None:
    """Limit malloc to two arenas and use mmap for large blocks.

    glibc would keep a block for each libfuse thread's 1 MiB replies forever.
    """
    _libc.mallopt(_M_ARENA_MAX, 2)
    _libc.mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
    _libc.mallopt(_M_TRIM_THRESHOLD, 1024 * 1024)
