"""What this machine does, *measured*: memory, scoring, computing; and with a file in a directory, disk and device.

Each probe runs for a bounded time. The file is a spill file that an *emulated* computational SSD has written: random
keys and values, so that storage which compresses finds nothing to compress. It lies in a directory of its own, which is
removed however the probe ends (a killed process leaves it, as it leaves any temporary directory).
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import EnvironmentProblem, LlmcacheError, UsageError
from llmcache.kv.csd import EmulatedCsd
from llmcache.kv.csd.wire import SCORE_KEYS
from llmcache.kv.kernels import score
from llmcache.kv.kernels.threads import run_all
from llmcache.kv.spill import KvShape
from llmcache.units import format_size

SHAPE = KvShape("llmcache kv profile", layers=1, kv_heads=8, head_dim=128)
"""Keys as most models of 7 to 70 billion parameters have them: a page is 32 KiB."""
FILE_BYTES = 128 << 20
LEAST_TOKENS = 4096  # 16 MiB of keys and values: what slow storage takes within the time
WRITE_S = 5.0
READ_S = 1.5
PROBE_S = 0.4
SLOW_S = 2.0
READERS = 4
SEQUENTIAL_BYTES = 1 << 20
MEMORY_BYTES = 256 << 20  # far beyond any cache of a processor
COMMANDS = 30
_SIDE = 1024  # of the matrices that are multiplied


@dataclass(frozen=True)
class HostSpeeds:
    """Bytes/s and operations/s that all processors reach together: reading memory, scoring half-precision keys, products."""

    memory_bytes_per_s: float
    score_bytes_per_s: float
    flops: float


@dataclass(frozen=True)
class StorageSpeeds:
    """Bytes/s (ns for `command_ns`) of the file. `direct`: past the page cache, else memory may have answered.

    `device` (keys that the *emulated* device scores), `link` (pages that cross from its process to this one) and
    `command` are of the emulation; `sequential` and `random` (whole pages of keys, `page_bytes`) are of the disk.
    """

    device_bytes_per_s: float
    link_bytes_per_s: float
    command_ns: float
    sequential_bytes_per_s: float
    random_bytes_per_s: float
    page_bytes: int
    file_bytes: int
    direct: bool


def measure_host() -> HostSpeeds:
    """Returns what memory and processors do, in about 1.5 s."""
    keys = _keys(MEMORY_BYTES)
    words = keys.reshape(-1).view(np.uint64)
    parts = np.array_split(words, 64)
    reading = _rate(partial(run_all, [partial(_read_words, part) for part in parts]), keys.nbytes)
    queries = np.random.default_rng(1).standard_normal((1, SHAPE.kv_heads, SHAPE.head_dim)).astype(np.float32)
    by_head = keys.reshape(1, SHAPE.kv_heads, -1, SHAPE.head_dim)
    scoring = _rate(lambda: score(queries, by_head), keys.nbytes)
    matrix = np.random.default_rng(2).standard_normal((_SIDE, _SIDE)).astype(np.float32)
    return HostSpeeds(reading, scoring, _rate(lambda: matrix @ matrix, 2 * _SIDE**3))


def _keys(size_bytes: int) -> NDArray[np.float16]:
    """Random keys; a tile of 4 MiB again and again, since numbers are slow to draw."""
    tile = np.random.default_rng(0).standard_normal(2 << 20, np.float32).astype(np.float16)
    return np.tile(tile, size_bytes // tile.nbytes)


def _read_words(words: NDArray[np.uint64]) -> None:
    np.bitwise_or.reduce(words)  # the cheapest thing that must see all of them


def _rate(run: Callable[[], object], amount: float) -> float:
    """`amount` per second: the median of what fits PROBE_S, after a run that compiles and maps memory."""
    begin = time.perf_counter()
    run()
    first = time.perf_counter() - begin
    if first > SLOW_S:  # of storage so slow that compiling does not count, and that more runs would take too long
        return amount / first
    taken: list[float] = []
    until = time.perf_counter() + PROBE_S
    while len(taken) < 3 or time.perf_counter() < until:
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return amount / statistics.median(taken)


def measure_storage(directory: str | Path) -> StorageSpeeds:
    """Returns what disk and emulated device do with a file in `directory`, within about 15 s.

    UsageError: it is no directory. EnvironmentProblem: it cannot be written to, or has no room.
    """
    where = Path(directory)
    if not where.is_dir():
        raise UsageError(f"DIR: {where} is not a directory", "give a directory on the storage to measure")
    _check_space(where)
    try:
        with tempfile.TemporaryDirectory(prefix=".llmcache-profile-", dir=where) as made:
            return _measure_file(Path(made) / "profile.kv")
    except OSError as error:
        raise _problem(where, error) from error
    except EnvironmentProblem as error:
        raise EnvironmentProblem(f"DIR: {error.message}", _hint(where)) from error


def _check_space(where: Path) -> None:
    space = os.statvfs(where)
    if space.f_bavail * space.f_frsize < 2 * FILE_BYTES:
        raise _problem(where, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _problem(where: Path, error: OSError) -> LlmcacheError:
    return EnvironmentProblem(f"DIR: cannot measure in {where}: {error.strerror}", _hint(where))


def _hint(where: Path) -> str:
    return f"give a directory that you may write to, with {format_size(2 * FILE_BYTES)} free"


def _measure_file(path: Path) -> StorageSpeeds:
    with EmulatedCsd(path, SHAPE, create=True) as device:
        direct = device.direct
        _fill(device)
        device.flush()
        scoring = _device_rate(device)
        tokens = device.pages(0, 0) * SHAPE.page_tokens
    sequential = _disk_rate(path, SEQUENTIAL_BYTES, scattered=False, direct=direct)
    random = _disk_rate(path, SHAPE.key_slot_bytes, scattered=True, direct=direct)
    # Without O_DIRECT the page cache answers, and what is left to time is the way between the processes.
    with EmulatedCsd(path, SHAPE, direct=False) as device:
        pages = list(range(min(512, tokens // SHAPE.page_tokens)))
        size = len(pages) * (SHAPE.key_slot_bytes + SHAPE.value_slot_bytes)
        link = _rate(lambda: device.read(0, 0, pages), size)
        command_s = _median_s(lambda: device.read(0, 0, [0]))
    return StorageSpeeds(
        device_bytes_per_s=scoring,
        link_bytes_per_s=link,
        command_ns=command_s * 1e9,
        sequential_bytes_per_s=sequential,
        random_bytes_per_s=random,
        page_bytes=SHAPE.key_slot_bytes,
        file_bytes=path.stat().st_size,
        direct=direct,
    )


def _fill(device: EmulatedCsd) -> None:
    """Writes FILE_BYTES of keys and values, or fewer when the time is up."""
    generator, begin, written = np.random.default_rng(), time.monotonic(), 0
    size = SHAPE.kv_heads * LEAST_TOKENS * SHAPE.head_dim * SHAPE.numpy_dtype.itemsize
    while not written or (written < FILE_BYTES and time.monotonic() - begin < WRITE_S):
        # Exponents of 0x3c00 and below: random bits would be infinities and NaN too.
        bits: Any = np.frombuffer(generator.bytes(size), np.uint16) & np.uint16(0xBBFF)
        rows = bits.view(np.float16).reshape(SHAPE.kv_heads, LEAST_TOKENS, SHAPE.head_dim)
        device.append(0, 0, rows, rows)
        ids = np.arange(LEAST_TOKENS, dtype=np.int64)
        device.append_tokens(0, ids, ids)  # without them the pages are not found again
        written += 2 * size


def _device_rate(device: EmulatedCsd) -> float:
    program = device.load(SCORE_KEYS)
    device.activate(program)
    queries = np.random.default_rng(3).standard_normal((SHAPE.kv_heads, SHAPE.head_dim)).astype(np.float32)
    size = device.pages(0, 0) * SHAPE.key_slot_bytes
    return _rate(lambda: device.execute(program, queries, 0, 0).drain(), size)


def _median_s(run: Callable[[], object]) -> float:
    taken = []
    for _ in range(COMMANDS):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _disk_rate(path: Path, request_bytes: int, *, scattered: bool, direct: bool) -> float:
    """Bytes/s of READERS readers of `request_bytes` at a time for READ_S, in sequence or `scattered` over the file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        requests = os.fstat(fd).st_size // request_bytes
        order = np.random.default_rng(4).permutation(requests) if scattered else np.arange(requests)
        places, done = itertools.count(), [0] * READERS
        failures: list[OSError] = []
        begin = time.monotonic()

        def reader(number: int) -> None:
            with mmap.mmap(-1, request_bytes) as buffer:  # aligned, as O_DIRECT needs it
                while not failures:
                    place = int(order[next(places) % requests])
                    try:
                        done[number] += os.preadv(fd, [buffer], place * request_bytes)
                    except OSError as error:
                        failures.append(error)
                    if time.monotonic() - begin > READ_S:  # after a read: a machine that pauses is no storage of 0 B/s
                        return

        threads = [threading.Thread(target=reader, args=(number,)) for number in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return sum(done) / (time.monotonic() - begin)
    finally:
        os.close(fd)
