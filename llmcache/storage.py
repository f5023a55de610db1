"""Disks, with the numbers that cgroup files use, and timed reads with several requests in flight."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from llmcache.errors import EnvironmentProblem
from llmcache.procfs import mounts

PROC, SYSFS = Path("/proc"), Path("/sys")


@dataclass(frozen=True)
class Disk:
    """A whole disk: `major:minor` for cgroup files, and its kernel name."""

    number: str
    name: str

    @property
    def read_ahead_file(self) -> Path:
        """Return the file with the kernel's read-ahead in KiB."""
        return SYSFS / "dev" / "block" / self.number / "queue" / "read_ahead_kb"


def disk_of(path: Path) -> Disk:
    """Return the whole disk with `path`; a partition is resolved to its disk. EnvironmentProblem if there is none."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    entry = SYSFS / "dev" / "block" / number
    if not entry.exists():  # btrfs and others have anonymous device numbers
        mount = next((one for one in mounts(proc=str(PROC)).values() if one.dev == device), None)
        if mount is None:
            said = f"the device of {path} ({number}) is not in {SYSFS}/dev/block"
            raise EnvironmentProblem(said, "use a directory on a local disk")
        entry = SYSFS / "class" / "block" / Path(mount.source).name
        if not (mount.source.startswith("/dev/") and entry.exists()):
            raise EnvironmentProblem(
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
    """Read the requests numbered `order` from an open file, repeatedly, until `enough` returns true.

    Return completion time (seconds since the start) and size (bytes) of each read, sorted by time. `enough(begun, seconds)`
    gets the number of requests begun and the elapsed time. `fd` may have O_DIRECT. OSError if a read fails.
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
