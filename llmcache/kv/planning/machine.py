"""The profile of this machine: measured once for each device that a directory lies on, kept in the user's cache.

A profile is valid for one processor model, number of processors, kernel and device; what differs in any of these is
another profile. Files are written to a temporary name and renamed, so several processes at once see one of them whole.
Storage that a profile was made of may have changed since (a fuller disk, a busier machine): its age is always told.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from llmcache.errors import UsageError
from llmcache.files import replacing
from llmcache.kv.kernels.threads import processors
from llmcache.kv.planning.hardware import ASSUMED, MEASURED, TYPICAL_PC, Hardware, Origin
from llmcache.kv.planning.probes import HostSpeeds, StorageSpeeds, measure_host, measure_storage

SCHEMA = "llmcache.kv-profile/1"


@dataclass(frozen=True)
class Key:
    """What a profile is valid for. `device`: major:minor of the file system's device; `filesystem`: its type."""

    processor: str
    processors: int
    kernel: str
    device: str
    filesystem: str

    @property
    def in_memory(self) -> bool:
        """True if there is no storage below: what is measured then is memory."""
        return self.filesystem in ("tmpfs", "ramfs")

    @property
    def name(self) -> str:
        """The name of the profile's file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:24] + ".json"


@dataclass(frozen=True)
class MachineProfile:
    """What was *measured* of a machine and, with the *emulated* device, of the storage below `directory`.

    `measured_at`: seconds since 1970; `seconds`: how long it took; `host_bytes`: memory of this machine.
    """

    key: Key
    directory: str
    measured_at: float
    seconds: float
    host_bytes: int
    host: HostSpeeds
    storage: StorageSpeeds

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, as it is kept."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> MachineProfile:
        """Returns the profile that `to_json` has told of. KeyError, TypeError, ValueError: it is not one."""
        if told["schema"] != SCHEMA:
            raise ValueError(f"schema: {told['schema']}")
        parts = {"key": Key, "host": HostSpeeds, "storage": StorageSpeeds}
        values = {one.name: told[one.name] for one in fields(cls)}
        made = cls(**values | {name: kind(**told[name]) for name, kind in parts.items()})
        speeds = [*asdict(made.host).values(), *asdict(made.storage).values(), made.measured_at, made.host_bytes]
        if not all(isinstance(speed, int | float) and speed >= 0 for speed in speeds):
            raise ValueError("a speed is not a number")
        return made


@dataclass(frozen=True)
class Found:
    """A profile; `cached`: it was there already, and is `age_s` old. `file`: where it is kept, None if it could not be."""

    profile: MachineProfile
    cached: bool
    age_s: float
    file: Path | None


def cache_directory() -> Path:
    """Where profiles are kept: below $XDG_CACHE_HOME, else ~/.cache."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(told) if told.startswith("/") else Path.home() / ".cache"
    return base / "llmcache" / "kv-profile"


def key_of(directory: str | Path) -> Key:
    """Returns what a profile of `directory` is valid for; UsageError if it is no directory."""
    where = Path(directory)
    if not where.is_dir():
        raise UsageError(f"DIR: {where} is not a directory", "give a directory on the storage to measure")
    number = where.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    return Key(_processor(), processors(), platform.release(), device, _filesystem(device))


def cached_profile(directory: str | Path) -> Found | None:
    """Returns the profile of the device of `directory` if there is one that can be read, None otherwise."""
    key = key_of(directory)
    file = cache_directory() / key.name
    try:
        profile = MachineProfile.from_json(json.loads(file.read_bytes()))
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return None  # not there or damaged: it is measured again
    return Found(profile, True, max(0.0, time.time() - profile.measured_at), file) if profile.key == key else None


def profile_of(directory: str | Path, *, force: bool = False, progress: Callable[[str], None] = lambda _: None) -> Found:
    """Returns the profile of this machine with the storage of `directory`; measured now if `force` or if there is none.

    `progress` is told in words what begins. Errors as `measure_storage`.
    """
    found = None if force else cached_profile(directory)
    if found is not None:
        return found
    key, begin = key_of(directory), time.monotonic()
    progress("measuring the storage, with an emulated device")
    storage = measure_storage(directory)
    progress("measuring memory and processors")
    host = measure_host()
    told = str(Path(directory).absolute())
    profile = MachineProfile(key, told, time.time(), time.monotonic() - begin, _memory_bytes(), host, storage)
    return Found(profile, False, 0.0, _keep(profile))


def _keep(profile: MachineProfile) -> Path | None:
    """Writes the profile; None if the cache cannot be written to, which costs another measurement only."""
    file = cache_directory() / profile.key.name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            stream.write(json.dumps(profile.to_json(), indent=1).encode())
    except OSError:
        return None
    return file


def _filesystem(device: str) -> str:
    """Type of the file system of `device` (major:minor); "" if the kernel does not tell (btrfs has numbers of its own)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    found = (line.partition(" - ")[2].split(" ")[0] for line in lines if line.split(" ")[2:3] == [device])
    return next(found, "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware", "CPU part")))
    return next(named, "") or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def hardware_of(profile: MachineProfile) -> Hardware:
    """Returns this machine for the latency model: without a GPU, its storage with an emulated device as measured.

    A GPU can be given a size (`with_sizes`); its speeds are then those of the typical PC, see `with_gpu`.
    """
    host, storage = profile.host, profile.storage
    measured = Origin(MEASURED, f"on this machine, storage of {profile.directory}")
    emulated = Origin(MEASURED, f"with an emulated device on the storage of {profile.directory}")
    values: dict[str, tuple[float, Origin]] = {
        "gpu_bytes": (0, measured),
        "gpu_bytes_per_s": (host.memory_bytes_per_s, measured),
        "gpu_flops": (host.flops, measured),
        "gpu_link_bytes_per_s": (host.memory_bytes_per_s, measured),
        "gpu_reserved_bytes": (0, measured),
        "host_bytes": (profile.host_bytes, measured),
        "host_bytes_per_s": (host.memory_bytes_per_s, measured),
        "host_reserved_bytes": (TYPICAL_PC.host_reserved_bytes, TYPICAL_PC.origins["host_reserved_bytes"]),
        "score_bytes_per_s": (host.score_bytes_per_s, measured),
        "ssd_bytes_per_s": (storage.sequential_bytes_per_s, measured),
        "ssd_requests_per_s": (storage.random_bytes_per_s / storage.page_bytes, measured),
        "device_bytes_per_s": (storage.device_bytes_per_s, emulated),
        "device_memory_bytes": (0, Origin(ASSUMED, "the emulated device reads its file each time")),
        "device_memory_bytes_per_s": (storage.device_bytes_per_s, emulated),
        "device_link_bytes_per_s": (storage.link_bytes_per_s, emulated),
        "device_latency_ns": (storage.command_ns, emulated),
    }
    numbers: dict[str, Any] = {name: value for name, (value, _) in values.items()}
    origins = {name: origin for name, (_, origin) in values.items()}
    return Hardware("measured", "this machine", origins=origins, **numbers)


def with_gpu(machine: Hardware, gpu_bytes: int) -> Hardware:
    """Returns `machine` with a GPU of `gpu_bytes`, whose speeds are assumed: those of the typical PC (RTX 3080)."""
    names = ("gpu_bytes_per_s", "gpu_flops", "gpu_link_bytes_per_s", "gpu_reserved_bytes")
    assumed = {name: Origin(ASSUMED, f"as the typical PC: {TYPICAL_PC.origins[name].text}") for name in names}
    speeds: dict[str, Any] = {name: getattr(TYPICAL_PC, name) for name in names}
    sized = machine.with_sizes(gpu_bytes=gpu_bytes)
    return replace(sized, origins=dict(sized.origins) | assumed, **speeds)
