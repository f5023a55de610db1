"""Disks, timed reads of storage, and how much of a file is in the page cache."""

from __future__ import annotations

import ctypes
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
_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the GIL: cachestat never waits
_libc.syscall.restype = ctypes.c_long


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
    """Return how many 4 KiB blocks of a range of a file are in the page cache. OSError. cachestat counts pages."""
    part, found = _Range(offset, size), (ctypes.c_uint64 * 5)()
    if _libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_int(fd), ctypes.byref(part), found, ctypes.c_uint(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    blocks = -(-(offset + size) // BLOCK_BYTES) - offset // BLOCK_BYTES
    return min(blocks, int(found[0]) * (PAGE_BYTES // BLOCK_BYTES))
