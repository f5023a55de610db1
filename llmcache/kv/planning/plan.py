"""The plan of `llmcache kv plan` for one model on one machine; every error names its option.

Times are *modelled*, with speeds of a named machine, or *measured* ones of this machine and its *emulated* device.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmcache.errors import UsageError
from llmcache.kv.planning.hardware import MACHINES, MEASURED, RUNTIME_BYTES, Hardware
from llmcache.kv.planning.latency import SYSTEMS, Latency, latency, place
from llmcache.kv.planning.placement import (
    MemoryUse,
    Placement,
    Room,
    Workload,
    largest_context,
    memory_use,
    room,
    rule_share,
)
from llmcache.kv.planning.profile import KnownProfile, hardware_of, profile_of
from llmcache.model.shapes import KV_BYTES, ModelShape, read_config
from llmcache.units import format_size

BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Limit:
    """The largest contexts (tokens) of `batch` sequences that fit: 0 if not even the weights do; None: not requested."""

    batch: int
    gpu: int | None
    gpu_and_ram: int
    with_ssd: int | None


@dataclass(frozen=True)
class KvPlan:
    """The plan. `found.host_kv` is M0; `beta_rule`: fc / fs; `m0_binds`: M0 is less than the rule's pool.

    `latencies`: by system; empty if the model does not fit. `ssd_bytes`: free space below `ssd`. `profile`: None for a named
    machine.
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
    profile: KnownProfile | None

    def speedup(self, policy: str) -> float:
        by_name = {one.system.name: one.token_ns for one in self.latencies}
        return by_name[policy] / by_name["hillinfer"]


def plan(
    model: str,
    context: int,
    *,
    batch: int = 1,
    gpu: int | None = None,
    ram: int | None = None,
    ssd: str | None = None,
    alpha: float = 0.2,
    profile: str | None = None,
    kv_dtype: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> KvPlan:
    """Return the plan for the model with the config.json `model`, or in the directory `model`.

    `ssd`: directory of the spill file; `profile`: source of speeds (None: measured with `ssd`, else a typical PC).
    """
    shape, workload = read_config(model), Workload(context, batch=batch, alpha=alpha)
    if kv_dtype is not None:
        if kv_dtype not in KV_BYTES:
            raise UsageError(f"--kv-dtype: '{kv_dtype}' is not a type of KV data", f"one of: {', '.join(KV_BYTES)}")
        shape = replace(shape, kv_dtype=kv_dtype)
    if ssd is not None and not os.path.isdir(ssd):
        raise UsageError(f"--ssd: {ssd} is not a directory", "name the directory for the spill file")
    name, known = profile or (MEASURED if ssd is not None else "typical"), None
    if name in MACHINES:
        machine = MACHINES[name].with_sizes(gpu, ram)
    elif name != MEASURED:
        raise UsageError(f"--profile: there is no profile '{name}'", f"one of: {', '.join((*MACHINES, MEASURED))}")
    elif ssd is None:
        raise UsageError("--profile: measured needs a directory on the storage to measure", "add --ssd DIR")
    else:
        known = profile_of(ssd, progress=progress)
        machine = hardware_of(known.profile, gpu or 0).with_sizes(host_bytes=ram)
    found = room(machine, shape, workload, alpha)
    if found.lacking:
        available = machine.gpu_bytes + machine.host_bytes - machine.gpu_reserved_bytes - machine.host_reserved_bytes
        raise UsageError(
            f"--gpu, --ram: the weights of {shape.name} alone take {format_size(shape.weight_bytes)}, "
            f"but only {format_size(max(0, available))} is available "
            f"(the system keeps {format_size(machine.host_reserved_bytes)})",
            "use more memory, or a smaller or more quantized model",
        )
    use = memory_use(shape, context, batch)
    places = place(SYSTEMS["hillinfer"], found, use.kv, machine)
    free = None if ssd is None else shutil.disk_usage(ssd).free
    lacking = 0.0 if free is None else max(0.0, places.ssd - free)
    return KvPlan(
        model=shape,
        machine=machine,
        workload=workload,
        use=use,
        found=found,
        places=places,
        beta_rule=machine.score_bytes_per_s / machine.device_bytes_per_s,
        m0_binds=not found.gpu_kv and found.host_kv < rule_share(machine) * use.kv,
        lacking_bytes=lacking,
        latencies=() if lacking else tuple(latency(name, machine, shape, workload) for name in SYSTEMS),
        limits=tuple(_limit(shape, machine, sequences, free) for sequences in sorted({*BATCHES, batch})),
        ssd=ssd,
        ssd_bytes=free,
        profile=known,
    )


def _limit(model: ModelShape, machine: Hardware, batch: int, free: int | None) -> Limit:
    gpu = machine.gpu_bytes - machine.gpu_reserved_bytes if machine.has_gpu else 0
    both = gpu + machine.host_bytes - machine.host_reserved_bytes

    # The runtime is already reserved on the GPU, or there is none; memory_use counts it again, so it is added back.
    def most(size: float) -> int:
        return largest_context(model, batch, size + RUNTIME_BYTES)

    # Only KV may be on the SSD: weights and activations have to fit before it.
    with_ssd = None if free is None else (most(both + free) if most(both) else 0)
    return Limit(batch, most(gpu) if machine.has_gpu else None, most(both), with_ssd)
