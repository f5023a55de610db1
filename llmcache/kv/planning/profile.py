"""The profile of this machine, *measured*: memory, scoring, computing, and the disk and a device for a given directory.

Profiles are cached, one for each processor model, number of processors, kernel and device. Storage may have changed
since, so the age is always reported. The measurement uses a spill file of an *emulated* computational SSD, with random
data that storage cannot compress.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from platformdirs import user_cache_path

from llmcache.arrays import Uint64s
from llmcache.documents import check_schema, from_json
from llmcache.errors import MissingRequirement, UsageError
from llmcache.files import replacing
from llmcache.kv.kernels import score
from llmcache.kv.kernels.threads import processors, run_all
from llmcache.kv.planning.hardware import ASSUMED, MEASURED, TYPICAL_PC, Hardware
from llmcache.kv.spill import KvShape
from llmcache.memory import machine_memory
from llmcache.papers.csd import EmulatedCsd
from llmcache.procfs import IN_MEMORY, fstype_at
from llmcache.storage import timed_reads
from llmcache.units import format_size

SCHEMA = "llmcache.kv-profile/1"
SHAPE = KvShape("llmcache kv profile", layers=1, kv_heads=8, head_dim=128)
"""Keys of most models of 7 to 70 billion parameters: a page is 32 KiB."""
FILE_BYTES = 128 << 20
LEAST_TOKENS = 4096  # 16 MiB of keys and values: slow storage can write them within the time limit
WRITE_S = 5.0
READ_S = 1.5
PROBE_S = 0.4
SLOW_S = 2.0
READERS = 4
SEQUENTIAL_BYTES = 1 << 20
MEMORY_BYTES = 256 << 20  # much larger than any CPU cache
_SIDE = 1024  # of the multiplied matrices


@dataclass(frozen=True)
class HostSpeeds:
    """Bytes/s and operations/s of all processors: reading memory, scoring half-precision keys, matrix products."""

    memory_bytes_per_s: float
    score_bytes_per_s: float
    flops: float


@dataclass(frozen=True)
class StorageSpeeds:
    """Speeds of a file. `direct`: the reads bypass the page cache.

    `device` (keys that the *emulated* device scores), `link` (pages that cross from its process to this one) and `command`
    belong to the emulation; `sequential` and `random` (whole pages of keys) to the disk.
    """

    device_bytes_per_s: float
    link_bytes_per_s: float
    command_ns: float
    sequential_bytes_per_s: float
    random_bytes_per_s: float
    page_bytes: int
    file_bytes: int
    direct: bool


@dataclass(frozen=True)
class ProfileKey:
    """The conditions of a profile. `device`: major:minor of the file system's device."""

    processor: str
    processors: int
    kernel: str
    device: str
    filesystem: str

    @property
    def in_memory(self) -> bool:
        return self.filesystem in IN_MEMORY


@dataclass(frozen=True)
class MachineProfile:
    """*Measured* speeds of a machine and, with the *emulated* device, of the storage below `directory`.

    `measured_at`: seconds since 1970; `seconds`: duration; `host_bytes`: memory of this machine.
    """

    key: ProfileKey
    directory: str
    measured_at: float
    seconds: float
    host_bytes: int
    host: HostSpeeds
    storage: StorageSpeeds

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> MachineProfile:
        check_schema(data, SCHEMA)
        made: MachineProfile = from_json(cls, data)
        if min(*asdict(made.host).values(), *asdict(made.storage).values(), made.measured_at, made.host_bytes) < 0:
            raise ValueError("a speed is below 0")
        return made


@dataclass(frozen=True)
class KnownProfile:
    """A profile; `cached`: it was read from its file, and is `age_s` old. `file`: None if it could not be written."""

    profile: MachineProfile
    cached: bool
    age_s: float
    file: Path | None


def key_of(directory: str | Path) -> ProfileKey:
    """Return the conditions of a profile of `directory`; UsageError if it is no directory."""
    where = Path(directory)
    if not where.is_dir():
        raise UsageError(f"DIR: {where} is not a directory", "name a directory on the storage to measure")
    dev = where.stat().st_dev
    device = f"{os.major(dev)}:{os.minor(dev)}"
    return ProfileKey(processor(), processors(), platform.release(), device, fstype_at(where))


def profile_of(
    directory: str | Path, *, force: bool = False, progress: Callable[[str], None] = lambda _: None
) -> KnownProfile:
    """Return the profile of this machine with the storage of `directory`; measure it if there is none, or if `force`."""
    key, begin = key_of(directory), time.monotonic()
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()
    file = user_cache_path("llmcache") / "kv-profile" / f"{digest[:24]}.json"
    # If the file is missing or damaged, the profile is measured again.
    with contextlib.suppress(OSError, KeyError, ValueError, RecursionError):
        profile = MachineProfile.from_json(json.loads(file.read_bytes()))
        if profile.key == key and not force:
            return KnownProfile(profile, True, max(0.0, time.time() - profile.measured_at), file)
    progress("measuring the storage, with an emulated device")
    storage = measure_storage(directory)
    progress("measuring memory and processors")
    host = measure_host()
    path, memory = str(Path(directory).absolute()), machine_memory().total_bytes
    profile = MachineProfile(key, path, time.time(), time.monotonic() - begin, memory, host, storage)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            stream.write(json.dumps(profile.to_json(), indent=1).encode())
    except OSError:
        return KnownProfile(profile, False, 0.0, None)  # the only cost is another measurement
    return KnownProfile(profile, False, 0.0, file)


def processor() -> str:
    """Return the name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware", "CPU part")))
    return next(named, "") or platform.machine()


def hardware_of(profile: MachineProfile, gpu_bytes: int = 0) -> Hardware:
    """Return this machine for the latency model; a GPU is assumed to be as fast as that of the typical PC."""
    host, storage = profile.host, profile.storage
    measured = f"on this machine, with the storage of {profile.directory}"
    emulated = f"with an emulated device on the storage of {profile.directory}"
    machine = Hardware.of(
        "measured",
        "this machine",
        gpu_bytes=(0, MEASURED, measured),
        gpu_bytes_per_s=(host.memory_bytes_per_s, MEASURED, measured),
        gpu_flops=(host.flops, MEASURED, measured),
        gpu_link_bytes_per_s=(host.memory_bytes_per_s, MEASURED, measured),
        gpu_reserved_bytes=(0, MEASURED, measured),
        host_bytes=(profile.host_bytes, MEASURED, measured),
        host_bytes_per_s=(host.memory_bytes_per_s, MEASURED, measured),
        host_reserved_bytes=(TYPICAL_PC.host_reserved_bytes, *TYPICAL_PC.origins["host_reserved_bytes"]),
        score_bytes_per_s=(host.score_bytes_per_s, MEASURED, measured),
        ssd_bytes_per_s=(storage.sequential_bytes_per_s, MEASURED, measured),
        ssd_requests_per_s=(storage.random_bytes_per_s / storage.page_bytes, MEASURED, measured),
        device_bytes_per_s=(storage.device_bytes_per_s, MEASURED, emulated),
        device_memory_bytes=(0, ASSUMED, "the emulated device reads its file every time"),
        device_memory_bytes_per_s=(storage.device_bytes_per_s, MEASURED, emulated),
        device_link_bytes_per_s=(storage.link_bytes_per_s, MEASURED, emulated),
        device_latency_ns=(storage.command_ns, MEASURED, emulated),
    )
    return machine.with_gpu(gpu_bytes, TYPICAL_PC) if gpu_bytes else machine


# Measurements


def measure_host() -> HostSpeeds:
    """Return the speeds of memory and processors, in about 1.5 s."""
    # Repeat a tile of 4 MiB, because random numbers are slow to generate.
    tile = np.random.default_rng(0).standard_normal(2 << 20, np.float32).astype(np.float16)
    keys = np.tile(tile, MEMORY_BYTES // tile.nbytes)

    def read(words: Uint64s) -> None:
        np.bitwise_or.reduce(words)  # the cheapest operation that reads every word

    parts = np.array_split(keys.view(np.uint64), 64)
    reading = _rate(partial(run_all, [partial(read, part) for part in parts]), keys.nbytes)
    queries = np.random.default_rng(1).standard_normal((1, SHAPE.kv_heads, SHAPE.head_dim)).astype(np.float32)
    by_head = keys.reshape(1, SHAPE.kv_heads, -1, SHAPE.head_dim)
    scoring = _rate(lambda: score(queries, by_head), keys.nbytes)
    matrix = np.random.default_rng(2).standard_normal((_SIDE, _SIDE)).astype(np.float32)
    return HostSpeeds(reading, scoring, _rate(lambda: matrix @ matrix, 2 * _SIDE**3))


def _rate(run: Callable[[], object], amount: float) -> float:
    """Return `amount` per second: the median of the runs within PROBE_S, after one that compiles and maps memory."""
    begin = time.perf_counter()
    run()
    first = time.perf_counter() - begin
    if first > SLOW_S:  # storage so slow that compilation is negligible, and more runs would take too long
        return amount / first
    taken: list[float] = []
    until = time.perf_counter() + PROBE_S
    while len(taken) < 3 or time.perf_counter() < until:
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return amount / statistics.median(taken)


def measure_storage(where: str | Path) -> StorageSpeeds:
    """Return the speeds of disk and emulated device with a file in the directory `where`, within about 15 s.

    MissingRequirement: it is not writable, or has too little space.
    """
    hint = f"name a writable directory with {format_size(2 * FILE_BYTES)} of free space"
    try:
        if shutil.disk_usage(where).free < 2 * FILE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.TemporaryDirectory(prefix=".llmcache-profile-", dir=where) as made:
            return _measure_file(Path(made) / "profile.kv")
    except OSError as error:
        raise MissingRequirement(f"DIR: cannot measure in {where}: {error.strerror}", hint) from error
    except MissingRequirement as error:
        raise MissingRequirement(f"DIR: {error.message}", hint) from error


def _measure_file(path: Path) -> StorageSpeeds:
    with EmulatedCsd(path, SHAPE, create=True) as device:
        direct = device.direct
        _fill(device)
        device.flush()
        scoring = device_rate(device)
        pages = list(range(min(512, device.pages(0, 0))))
    sequential = _disk_rate(path, SEQUENTIAL_BYTES, scattered=False, direct=direct)
    random = _disk_rate(path, SHAPE.key_slot_bytes, scattered=True, direct=direct)
    # Without O_DIRECT the page cache serves the reads, so that only the transfer between the processes is timed.
    with EmulatedCsd(path, SHAPE, direct=False) as device:
        size = len(pages) * sum(SHAPE.slot_sizes)
        link = _rate(lambda: device.read(0, 0, pages), size)
        commands_per_s = _rate(lambda: device.read(0, 0, [0]), 1)
    return StorageSpeeds(
        device_bytes_per_s=scoring,
        link_bytes_per_s=link,
        command_ns=1e9 / commands_per_s,
        sequential_bytes_per_s=sequential,
        random_bytes_per_s=random,
        page_bytes=SHAPE.key_slot_bytes,
        file_bytes=path.stat().st_size,
        direct=direct,
    )


def _fill(device: EmulatedCsd) -> None:
    generator, begin, written = np.random.default_rng(), time.monotonic(), 0
    size = SHAPE.kv_heads * LEAST_TOKENS * SHAPE.head_dim * SHAPE.numpy_dtype.itemsize
    while not written or (written < FILE_BYTES and time.monotonic() - begin < WRITE_S):
        # Exponents of 0x3c00 and below: random bits would include infinities and NaN.
        bits: Any = np.frombuffer(generator.bytes(size), np.uint16) & np.uint16(0xBBFF)
        rows = bits.view(np.float16).reshape(SHAPE.kv_heads, LEAST_TOKENS, SHAPE.head_dim)
        device.append(0, 0, rows, rows)
        ids = np.arange(LEAST_TOKENS, dtype=np.int64)
        device.append_tokens(0, ids, ids)  # without tokens the pages are not found again
        written += 2 * size


def device_rate(device: EmulatedCsd) -> float:
    """Return the bytes of keys that `device` scores per second."""
    queries = np.random.default_rng(3).standard_normal((SHAPE.kv_heads, SHAPE.head_dim)).astype(np.float32)
    size = device.pages(0, 0) * SHAPE.key_slot_bytes
    return _rate(lambda: list(device.execute(queries, 0, 0)), size)


def _disk_rate(path: Path, request_bytes: int, *, scattered: bool, direct: bool) -> float:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        requests = os.fstat(fd).st_size // request_bytes
        order = np.random.default_rng(4).permutation(requests) if scattered else np.arange(requests)
        # At least one read each, so that a pause of the machine does not give 0 B/s.
        done = timed_reads(fd, request_bytes, order.tolist(), READERS, lambda begun, s: s > READ_S and begun >= READERS)
        return sum(size for _, size in done) / done[-1][0]
    finally:
        os.close(fd)
