"""Sequential read bandwidth of the storage of a directory, *measured* with O_DIRECT, which bypasses the page cache.

Number and size of concurrent reads are those of the mount's loaders. The measurement reads an existing large file, or writes
one without a name (O_TMPFILE).
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from llmcache.cache.sizing import Storage
from llmcache.errors import MissingRequirement, UsageError
from llmcache.mount.client.mountpoint import FSTYPE
from llmcache.procfs import IN_MEMORY, fstype_at
from llmcache.storage import timed_reads
from llmcache.units import format_size

REQUEST_BYTES = 1 << 20
READERS = 4
LEAST_BYTES = 64 << 20  # less is read too quickly, or comes from the device's own cache
WRITTEN_BYTES = 256 << 20
WRITE_S = 5.0
READ_S = 2.0
SETTLING_SHARE = 0.25  # the first part of the time, which is not counted
SLOWEST_S = 15.0  # on slow storage, the reads end after this time, even before LEAST_BYTES
_HINTS = {
    errno.EROFS: f"put a file of at least {format_size(LEAST_BYTES)} there, or give --bw",
    errno.EACCES: f"give a directory that you may write to, or that contains a file of at least {format_size(LEAST_BYTES)}",
    errno.ENOSPC: f"free {format_size(2 * LEAST_BYTES)}, or give a directory with a large file, which is read instead",
    errno.EINVAL: "this file system has no O_DIRECT, so the page cache would be measured: give --bw",
    errno.EOPNOTSUPP: "this file system cannot create unnamed files: put a large file there, or give --bw",
}


@dataclass(frozen=True)
class Measured:
    """`bytes_read` in `seconds` with `readers` concurrent requests; `bandwidth` (bytes/s) is the sustained rate."""

    directory: str
    file: str
    bytes_read: int
    seconds: float
    bandwidth: int
    request_bytes: int = REQUEST_BYTES
    readers: int = READERS


def measured_storage(directory: str) -> Storage:
    """Measure the storage of `directory`, for sizing."""
    result = measure(directory)
    return Storage(result.bandwidth, "measured", asdict(result))


def measure(directory: str) -> Measured:
    """Measure the sequential read bandwidth of a directory's storage, in about ten seconds.

    UsageError: not a directory; MissingRequirement: no storage (tmpfs), no O_DIRECT, no right to write, or no space.
    """
    if not os.path.isdir(directory):
        raise UsageError(f"--measure: {directory} is not a directory", "give a directory on the storage to measure")
    refuse_memory(directory)
    with _storage_errors(directory, "open a file"):
        name = _largest_file(directory)
        fd = None if name is None else os.open(name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    if fd is None:
        with _storage_errors(directory, "write"):
            fd = _temporary(directory)
    try:
        with _storage_errors(directory, "read"):
            return _read(directory, name or "temporary", fd, os.fstat(fd).st_size // REQUEST_BYTES)
    finally:
        os.close(fd)


def refuse_memory(directory: str) -> None:
    """Raise MissingRequirement if the file system is in memory, or a mount of llmcachefs."""
    kind = fstype_at(directory)
    if kind in IN_MEMORY:
        raise MissingRequirement(
            f"--measure: {directory} is in memory ({kind}): there is no storage to measure",
            "give a directory on a disk",
        )
    if kind == FSTYPE:
        raise MissingRequirement(
            f"--measure: {directory} is a mount of llmcachefs, which answers from its cache", "give its source directory"
        )


def _largest_file(directory: str) -> str | None:
    best: tuple[int, str] | None = None
    with os.scandir(directory) as found:
        for entry in found:
            if not entry.is_file(follow_symlinks=False) or not os.access(entry.path, os.R_OK):
                continue
            status = entry.stat(follow_symlinks=False)
            # No sparse files: holes are not read from storage.
            if status.st_size >= LEAST_BYTES and status.st_blocks * 512 >= 0.98 * status.st_size:
                best = max(best or (0, ""), (status.st_size, entry.path))
    return best[1] if best else None


def _temporary(directory: str) -> int:
    space = os.statvfs(directory)
    if space.f_bavail * space.f_frsize < 2 * LEAST_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        _fill(fd, min(WRITTEN_BYTES, space.f_bavail * space.f_frsize // 2))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _fill(fd: int, wanted_bytes: int) -> None:
    begin, size = time.monotonic(), 0
    with mmap.mmap(-1, REQUEST_BYTES) as page_aligned:
        while size + REQUEST_BYTES <= wanted_bytes:
            if size >= LEAST_BYTES and time.monotonic() - begin > WRITE_S:
                break
            page_aligned[:] = os.urandom(REQUEST_BYTES)  # incompressible, for storage that compresses
            size += os.pwrite(fd, page_aligned, size)
    os.fsync(fd)


def _read(directory: str, name: str, fd: int, requests: int) -> Measured:
    def enough(begun: int, seconds: float) -> bool:
        return seconds > SLOWEST_S or (seconds > READ_S and begun >= min(requests, LEAST_BYTES // REQUEST_BYTES))

    completed = timed_reads(fd, REQUEST_BYTES, range(requests), READERS, enough)
    return Measured(directory, name, *sustained(completed))


def sustained(completed: list[tuple[float, int]]) -> tuple[int, float, int]:
    """Return (bytes, seconds, bytes/s) after the settling time.

    The rate is the slope of the least-squares line through (time, bytes done), because throttles deliver in bursts.
    """
    last_s = completed[-1][0]
    counted = [item for item in completed if item[0] >= SETTLING_SHARE * last_s]
    if counted[0][0] == last_s:
        counted = completed  # the last request took most of the time: count all requests
    if counted[0][0] == last_s:
        raise MissingRequirement(f"--measure: fewer than two reads of 1 MiB in {last_s:.0f} s", "give --bw instead")
    times = [time_s for time_s, _ in counted]
    done = list(itertools.accumulate(size for _, size in counted))
    slope = statistics.linear_regression(times, done).slope
    return done[-1] - done[0], last_s - counted[0][0], max(1, round(slope))


@contextmanager
def _storage_errors(directory: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "give --bw instead")
        raise MissingRequirement(f"--measure: cannot {what} in {directory}: {error.strerror}", hint) from error
