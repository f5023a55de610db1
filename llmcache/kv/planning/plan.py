"""What fits where and how long a token takes, for one model on one machine: the answer of `llmcache kv plan`.

From options as typed to an answer; every error names its option. Times are *modelled*, with speeds of a named machine:
those of this machine are *measured*, those of its device *emulated*.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmcache.errors import UsageError
from llmcache.kv.planning.config import read_config
from llmcache.kv.planning.hardware import MACHINES, Hardware
from llmcache.kv.planning.latency import Latency, latency
from llmcache.kv.planning.machine import Found, hardware_of, profile_of, with_gpu
from llmcache.kv.planning.memory import MemoryUse, largest_context, memory_use
from llmcache.kv.planning.models import KV_BYTES, ModelShape
from llmcache.kv.planning.placement import Placement, Room, room, rule_share
from llmcache.kv.planning.work import SYSTEMS, place
from llmcache.kv.planning.workload import Workload
from llmcache.units import format_size, parse_size

MEASURED = "measured"
PROFILES = (*MACHINES, MEASURED)
BATCHES = (1, 2, 4, 8)
_MOST_TOKENS = 1 << 31
_CONTEXT = re.compile(r"([0-9]{1,10}(?:\.[0-9]{1,6})?)\s*(k|m|)i?", re.IGNORECASE)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """The options as typed; None where one was not given."""

    model: str
    context: str
    batch: str = "1"
    gpu: str | None = None
    ram: str | None = None
    ssd: str | None = None
    alpha: str = "0.2"
    profile: str | None = None
    kv_dtype: str | None = None


@dataclass(frozen=True)
class Limit:
    """The largest contexts (tokens) of `batch` sequences that fit: 0 if not even the weights do; None: not asked for."""

    batch: int
    gpu: int | None
    gpu_and_ram: int
    with_ssd: int | None


@dataclass(frozen=True)
class Plan:
    """The answer. `m0_bytes`: memory of the host for KV; `beta_rule`: fc / fs; `m0_binds`: it is less than the rule asks.

    `places`: HillInfer's pools. `latencies`: *modelled*, by system; empty if it does not fit (`lacking_bytes` > 0).
    `ssd_bytes`: free space below `ssd`, None without a directory. `profile`: what was measured, None for a named machine.
    """

    model: ModelShape
    machine: Hardware
    workload: Workload
    use: MemoryUse
    found: Room
    places: Placement
    beta_rule: float
    m0_binds: bool
    lacking_bytes: float
    latencies: tuple[Latency, ...]
    limits: tuple[Limit, ...]
    ssd: str | None
    ssd_bytes: int | None
    profile: Found | None

    @property
    def m0_bytes(self) -> float:
        """Memory of the host that the weights leave for KV."""
        return self.found.host_kv

    def speedup(self, policy: str) -> float:
        """How many times longer a token of `policy` takes than one of HillInfer. Modelled."""
        by_name = {one.system.name: one.token_ns for one in self.latencies}
        return by_name[policy] / by_name["hillinfer"]


def plan(options: Options, progress: Progress = lambda _: None) -> Plan:
    """Returns the plan that `options` ask for. UsageError names the option that is wrong, or that asks the impossible."""
    context = parse_context(options.context)
    workload = Workload(context, batch=_count("--batch", options.batch), alpha=_alpha(options.alpha))
    model = _model(options)
    machine, found_profile = _machine(options, progress)
    return _answer(model, machine, workload, options.ssd, found_profile)


def _answer(model: ModelShape, machine: Hardware, workload: Workload, ssd: str | None, profile: Found | None) -> Plan:
    found = room(machine, model, workload, workload.alpha)
    _check_weights(model, machine, found)
    use = memory_use(model, workload.context, workload.batch)
    places = place(SYSTEMS["hillinfer"], found, use.kv, machine)
    free = None if ssd is None else _free_bytes(ssd)
    lacking = 0.0 if free is None else max(0.0, places.ssd - free)
    fits = lacking == 0
    share = rule_share(machine)
    return Plan(
        model=model,
        machine=machine,
        workload=workload,
        use=use,
        found=found,
        places=places,
        beta_rule=machine.score_bytes_per_s / machine.device_bytes_per_s,
        m0_binds=not found.gpu_kv and found.host_kv < share * use.kv,
        lacking_bytes=lacking,
        latencies=tuple(latency(name, machine, model, workload) for name in SYSTEMS) if fits else (),
        limits=tuple(_limit(model, machine, batch, free) for batch in sorted({*BATCHES, workload.batch})),
        ssd=ssd,
        ssd_bytes=free,
        profile=profile,
    )


def _check_weights(model: ModelShape, machine: Hardware, found: Room) -> None:
    if found.lacking:
        there = machine.gpu_bytes + machine.host_bytes - machine.gpu_reserved_bytes - machine.host_reserved_bytes
        raise UsageError(
            f"--gpu, --ram: the weights of {model.name} alone take {format_size(model.weight_bytes)}, "
            f"{format_size(max(0, there))} are there ({format_size(machine.host_reserved_bytes)} stay with the system)",
            "give more memory, or a model with fewer or smaller weights",
        )


def _limit(model: ModelShape, machine: Hardware, batch: int, free: int | None) -> Limit:
    gpu = machine.gpu_bytes - machine.gpu_reserved_bytes if machine.has_gpu else 0
    both = gpu + machine.host_bytes - machine.host_reserved_bytes
    # What a runtime takes is reserved already, on the GPU; memory_use counts it once more, so it is given back.
    runtime = memory_use(model, 0, batch).runtime if machine.has_gpu else 0

    def most(size: float) -> int:
        return largest_context(model, batch, size + runtime)

    # The SSD holds KV only: weights and activations have to fit before it.
    with_ssd = None if free is None else (most(both + free) if most(both) else 0)
    return Limit(batch, most(gpu) if machine.has_gpu else None, most(both), with_ssd)


def _model(options: Options) -> ModelShape:
    model = read_config(options.model)
    if options.kv_dtype is None:
        return model
    if options.kv_dtype not in KV_BYTES:
        raise UsageError(f"--kv-dtype: '{options.kv_dtype}' is not a type of KV data", f"one of: {', '.join(KV_BYTES)}")
    return replace(model, kv_dtype=options.kv_dtype)


def _machine(options: Options, progress: Progress) -> tuple[Hardware, Found | None]:
    """The machine to plan for: a named one or this one, with memory of the sizes that are given."""
    name = options.profile or (MEASURED if options.ssd is not None else "typical")
    if name not in PROFILES:
        raise UsageError(f"--profile: there is no profile '{name}'", f"one of: {', '.join(PROFILES)}")
    gpu_bytes, host_bytes = _size("--gpu", options.gpu, 0), _size("--ram", options.ram, 1)
    if options.ssd is not None and not os.path.isdir(options.ssd):
        raise UsageError(f"--ssd: {options.ssd} is not a directory", "give the directory that the spill file goes to")
    if name != MEASURED:
        return MACHINES[name].with_sizes(gpu_bytes, host_bytes), None
    if options.ssd is None:
        raise UsageError("--profile: measured needs the storage that is meant", "give --ssd DIR")
    found = profile_of(options.ssd, progress=progress)
    machine = hardware_of(found.profile).with_sizes(host_bytes=host_bytes)
    return (with_gpu(machine, gpu_bytes) if gpu_bytes else machine), found


def _free_bytes(directory: str) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def parse_context(text: str) -> int:
    """Returns the tokens that `text` means: "131072", "128k" (k is 1024, as contexts are named), "1M"."""
    match = _CONTEXT.fullmatch(text.strip())
    tokens = float(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0
    if tokens < 1 or tokens != int(tokens) or tokens > _MOST_TOKENS:
        raise UsageError(f"--context: '{text}' is not a number of tokens", "write tokens: 8192, 128k (131,072) or 1M")
    return int(tokens)


def _count(option: str, text: str) -> int:
    if not text.strip().isascii() or not text.strip().isdigit() or not 1 <= int(text.strip()[:9]) <= 1 << 20:
        raise UsageError(f"{option}: '{text}' is not a number of sequences", "write a whole number of at least 1")
    return int(text.strip()[:9])


def _alpha(text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = 0.0
    if not 0 < alpha <= 1:
        raise UsageError(f"--alpha: '{text}' is not in (0, 1]", "write the share of the tokens that is attended: 0.2")
    return alpha


def _size(option: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    try:
        size = parse_size(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", error.hint) from error
    if size < least:
        raise UsageError(f"{option}: '{text}' must be above 0", "write a size with its unit: 32G")
    return size
