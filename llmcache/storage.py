"""Disks, timed reads of storage, and how much of a file is in the page cache."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from llmcache.errors import MissingRequirement
from llmcache.procfs import mounts
from llmcache.units import BLOCK_BYTES, PAGE_BYTES

PROC, SYSFS = Path("/proc"), Path("/sys")
_CACHESTAT = 451  # on every architecture; Linux 6.5
_MAP_SHARED, _PROT_READ, _MAP_FAILED = 1, 1, ctypes.c_void_p(-1).value
_quick = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the GIL: cachestat never waits
_quick.syscall.restype = ctypes.c_long
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


@dataclass(frozen=True)
class Disk:
    """A whole disk: `major:minor` for cgroup files, and its kernel name."""

    number: str
    name: str

    @property
    def read_ahead_file(self) -> Path:
        return SYSFS / "dev" / "block" / self.number / "queue" / "read_ahead_kb"


def disk_of(path: Path) -> Disk:
    """Return the disk with `path`, a partition's whole disk. MissingRequirement if there is none."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = SYSFS / "dev" / "block" / number
    if not entry.exists():  # btrfs and others have anonymous device numbers
        mount = next((one for one in mounts(proc=str(PROC)).values() if one.dev == device), None)
        if mount is None:
            said = f"the device of {path} ({number}) is not in {SYSFS}/dev/block"
            raise MissingRequirement(said, "use a directory on a local disk")
        entry = SYSFS / "class" / "block" / Path(mount.source).name
        if not (mount.source.startswith("/dev/") and entry.exists()):
            raise MissingRequirement(
                f"{path} is on {mount.fstype} ({mount.source}), which has no block device to throttle",
                "use a directory on a disk file system (ext4, xfs, btrfs), for example --dir /var/tmp/llmcache",
            )
    real = entry.resolve()
    if (real / "partition").exists():
        real = real.parent
    return Disk(number=(real / "dev").read_text().strip(), name=real.name)


def timed_reads(
    fd: int, request_bytes: int, order: Sequence[int], readers: int, enough: Callable[[int, float], bool]
) -> list[tuple[float, int]]:
    """Read the requests numbered `order` from an open file, repeatedly, until `enough` returns true; OSError.

    Return completion time (seconds since the start) and size of each read, sorted by time. `enough` gets the number of
    requests begun and the elapsed seconds. `fd` may have O_DIRECT.
    """
    numbers, stop = itertools.count(), threading.Event()
    completed: list[tuple[float, int]] = []
    begin = time.monotonic()

    def reader() -> None:
        with mmap.mmap(-1, request_bytes) as buffer:  # O_DIRECT needs aligned memory
            while not stop.is_set():
                number = next(numbers)
                if enough(number, time.monotonic() - begin):
                    return
                size = os.preadv(fd, [buffer], order[number % len(order)] * request_bytes)
                completed.append((time.monotonic() - begin, size))

    with ThreadPoolExecutor(readers) as pool:
        try:
            reading = [pool.submit(reader) for _ in range(readers)]
            wait(reading, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()  # after Ctrl-C, the readers must end before the caller closes the descriptor
    for each in reading:
        each.result()
    return sorted(completed)


def cached_blocks(fd: int, offset: int, size: int) -> int:
    """Return how many 4 KiB blocks of a range of a file are in the page cache. OSError.

    Without cachestat, pages that are being read do not count, and the caller must be root, or be allowed to write the file.
    """
    if size <= 0:
        return 0
    pages = _cachestat(fd, offset, size)
    if pages is None:
        pages = _mincore(fd, offset, size)
    blocks = -(-(offset + size) // BLOCK_BYTES) - offset // BLOCK_BYTES
    return min(blocks, pages * (PAGE_BYTES // BLOCK_BYTES))


def has_cachestat() -> bool:
    """Return whether `cached_blocks` uses cachestat, and not mincore."""
    with open("/proc/self/exe", "rb") as file:
        return _cachestat(file.fileno(), 0, 1) is not None


def _cachestat(fd: int, offset: int, size: int) -> int | None:
    """Return the number of cached pages; None if an older kernel or a seccomp filter refuses the call. OSError."""
    part, found = _Range(offset, size), (ctypes.c_uint64 * 5)()
    if _quick.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_int(fd), ctypes.byref(part), found, ctypes.c_uint(0)) == 0:
        return int(found[0])
    if ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
        return None
    raise _failure()


def _mincore(fd: int, offset: int, size: int) -> int:
    status = os.fstat(fd)
    if os.geteuid() not in (0, status.st_uid) and not os.access(f"/proc/self/fd/{fd}", os.W_OK):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))  # the kernel would report all pages as resident
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = min(offset + size, status.st_size) - start
    if length <= 0:
        return 0
    vector = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
    address = map_file(fd, length, start)
    try:
        if _libc.mincore(address, length, vector) != 0:
            raise _failure()
    finally:
        unmap(address, length)
    return vector.raw.count(b"\1")


def map_file(fd: int, size: int, offset: int = 0) -> int:
    """Map `size` bytes of a file, shared and read-only; return the address. OSError."""
    address = _libc.mmap(None, size, _PROT_READ, _MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
        raise _failure()
    return int(address)


def unmap(address: int, size: int) -> None:
    """End a mapping."""
    if _libc.munmap(address, size) != 0:
        raise _failure()


def _failure() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
