"""The answer of `llmcache kv plan`, as text for people and as JSON; both from the same dataclass."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from llmcache.kv.planning.plan import KvPlan, Limit
from llmcache.report.kv_profile import age_text
from llmcache.report.output import titled_table
from llmcache.units import format_duration, format_rate, format_size

SCHEMA = "llmcache.kv-plan/1"


def show(plan: KvPlan, as_json: bool) -> None:
    """Prints `plan` on stdout."""
    if as_json:
        print(json.dumps(document(plan), indent=1))
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in lines(plan):
        console.print(line)
    console.print(tiers(plan))
    for line in pools(plan):
        console.print(line)
    if plan.latencies:
        console.print(latencies(plan))
    console.print(limits(plan))


def lines(plan: KvPlan) -> Iterator[str]:
    """What was understood."""
    model, workload, machine = plan.model, plan.workload, plan.machine
    yield (
        f"model       {model.name}: {model.parameters / 1e9:.2f} billion weights of {model.weight_bits:g} bits, "
        f"{model.layers} layers, {model.kv_heads} of {model.heads} heads keep KV in {model.kv_dtype}"
    )
    if (mixture := model.mixture) is not None:
        yield (
            f"            a mixture: a token uses {mixture.used} of {mixture.experts} experts in {mixture.layers} layers, "
            f"{model.token_parameters / 1e9:.2f} billion weights"
        )
    for note in model.notes:
        yield f"            {note}"
    if model.context_limit and workload.context > model.context_limit:
        yield f"            made for {model.context_limit:,} tokens: a longer context may answer badly"
    yield f"workload    {workload.context:,} tokens x {workload.batch}, alpha {workload.alpha:g}"
    memory = f"GPU {format_size(machine.gpu_bytes)}, " if machine.has_gpu else "no GPU, "
    yield f"machine     {machine.title}: {memory}RAM {format_size(machine.host_bytes)}"
    if plan.profile is not None:
        yield f"            its speeds were measured {age_text(plan.profile)}; its device is emulated"
        if plan.profile.profile.key.in_memory:
            yield f"            {plan.ssd} is in memory ({plan.profile.profile.key.filesystem}): no speeds of storage"
        if machine.has_gpu:
            yield f"            the GPU's speeds are {machine.origins['gpu_bytes_per_s']}"
    if plan.ssd is not None and plan.ssd_bytes is not None:
        yield f"ssd         {plan.ssd}: {format_size(plan.ssd_bytes)} free"


def tiers(plan: KvPlan) -> Table:
    """What lies where: one row for the weights, the KV cache, and what is left."""
    found, places, machine = plan.found, plan.places, plan.machine
    reserved = (machine.gpu_reserved_bytes if machine.has_gpu else 0, machine.host_reserved_bytes)
    free = plan.ssd_bytes
    made = titled_table("What fits where (modelled)", "", "GPU", "RAM", "SSD")
    made.add_row("weights", _size(found.weights_on_gpu), _size(found.weights_on_host), _size(0))
    made.add_row("KV cache", _size(places.gpu), _size(places.host), _size(places.ssd))
    made.add_row("system and runtime", _size(reserved[0]), _size(reserved[1]), _size(0))
    made.add_row(
        "there is",
        _size(machine.gpu_bytes),
        _size(machine.host_bytes),
        "not given" if free is None else _size(free),
    )
    return made


def _size(size_bytes: float) -> str:
    return format_size(size_bytes) if size_bytes >= 1 else "-"


def pools(plan: KvPlan) -> Iterator[str]:
    """The sizes of the pools and why."""
    yield f"KV cache    {format_size(plan.use.kv)}, {format_size(plan.model.token_bytes)} a token"
    if plan.places.gpu:
        yield "pools       none: weights and KV cache fit on the GPU"
        return
    machine = plan.machine
    host, device = format_rate(machine.score_bytes_per_s), format_rate(machine.device_bytes_per_s)
    rule = f"{plan.beta_rule:.3g} (f_c {host} / f_s {device})"
    yield f"M0          {format_size(plan.m0_bytes)} of RAM are left for KV"
    yield f"beta        {rule} by the rule Mc/fc = Ms/fs; {_binding(plan)}"
    if plan.lacking_bytes:
        yield f"            it does NOT fit: {format_size(plan.lacking_bytes)} of space are missing on the SSD"


def _binding(plan: KvPlan) -> str:
    share = f"Mc {format_size(plan.places.host)}, Ms {format_size(plan.places.ssd)}"
    if plan.m0_binds:
        return f"M0 binds: beta {plan.places.beta:.3g}, {share}"
    return f"M0 leaves room for it: {share}"


def latencies(plan: KvPlan) -> Table:
    """Modelled times by system and stage; HillInfer's speed-up over each."""
    title = f"Time per token, and HillInfer's speed-up (modelled, speeds of {plan.machine.title})"
    made = Table(title=title, title_justify="left")
    for heading in ("system", "evaluate", "fetch", "compute", "hidden", "token", "speed-up"):
        made.add_column(heading, justify="left" if heading == "system" else "right", no_wrap=True)
    for one in plan.latencies:
        stages = [one.stages[name] for name in ("evaluate", "fetch", "compute")]
        hidden = max(0.0, sum(stages) - one.token_ns)
        name = one.system.name
        faster = "" if name == "hillinfer" else f"{plan.speedup(name):.2f}x"
        made.add_row(one.system.title, *map(format_duration, (*stages, hidden, one.token_ns)), faster)
    return made


def limits(plan: KvPlan) -> Table:
    """The largest context by tiers and batch."""
    made = Table(title="Largest context that fits (modelled), tokens", title_justify="left")
    for heading in ("batch", "GPU only", "GPU and RAM", "and SSD"):
        made.add_column(heading, justify="right")
    for one in plan.limits:
        made.add_row(str(one.batch), *map(_tokens, (one.gpu, one.gpu_and_ram, one.with_ssd)))
    return made


def _tokens(count: int | None) -> str:
    return "-" if count is None else f"{count:,}" if count else "none"


def document(plan: KvPlan) -> dict[str, Any]:
    """`plan` as JSON-ready values: bytes, ns, tokens; null where nothing was asked or a ratio is infinite."""
    places = plan.places.to_json()
    return {
        "schema": SCHEMA,
        "kind": "modelled",
        "model": plan.model.to_json(),
        "workload": asdict(plan.workload),
        "machine": plan.machine.to_json(),
        "profile": None if plan.profile is None else {"age_s": plan.profile.age_s, "cached": plan.profile.cached},
        "memory": plan.use.to_json(),
        "room": asdict(plan.found),
        "placement": places,
        "m0_bytes": plan.m0_bytes,
        "beta_rule": plan.beta_rule,
        "beta": plan.places.beta if math.isfinite(plan.places.beta) else None,
        "m0_binds": plan.m0_binds,
        "fits": plan.lacking_bytes == 0,
        "lacking_bytes": plan.lacking_bytes,
        "ssd": {"directory": plan.ssd, "free_bytes": plan.ssd_bytes},
        "latencies": [one.to_json() for one in plan.latencies],
        "speedups": {one.system.name: plan.speedup(one.system.name) for one in plan.latencies},
        "largest_context_tokens": [_limit(one) for one in plan.limits],
    }


def _limit(one: Limit) -> dict[str, int | None]:
    return {"batch": one.batch, "gpu": one.gpu, "gpu_and_ram": one.gpu_and_ram, "with_ssd": one.with_ssd}
