"""Output of `llmcache kv plan` and `llmcache kv profile`, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from llmcache.kv.planning.plan import KvPlan
from llmcache.kv.planning.profile import SCHEMA as PROFILE_SCHEMA
from llmcache.kv.planning.profile import KnownProfile
from llmcache.report import output
from llmcache.report.output import plain_table
from llmcache.units import format_duration, format_rate, format_size

SCHEMA = "llmcache.kv-plan/1"


def show(plan: KvPlan, as_json: bool) -> None:
    output.show(as_json, lambda: document(plan), _parts(plan))


def _parts(plan: KvPlan) -> Iterator[str | Table]:
    yield from _inputs(plan)
    yield from ("", _tiers(plan), "")
    yield from _pools(plan)
    if plan.latencies:
        yield from ("", _latencies(plan))
    tiers = ("GPU only", "GPU and RAM", "GPU, RAM and SSD")
    rows = ((str(one.batch), *map(_tokens, (one.gpu, one.gpu_and_ram, one.with_ssd))) for one in plan.limits)
    yield ""
    yield plain_table("batch", *tiers, rows=rows, title="Largest context that fits, in tokens (modelled)")


def _tokens(count: int | None) -> str:
    return "-" if count is None else f"{count:,}" if count else "none"


def _inputs(plan: KvPlan) -> Iterator[str]:
    model, workload, machine = plan.model, plan.workload, plan.machine
    yield (
        f"model       {model.name}: {model.parameters / 1e9:.2f} billion weights of {model.weight_bits:g} bits, "
        f"{model.layers} layers, {model.heads} heads, {model.kv_heads} KV heads, KV cache of {model.kv_dtype}"
    )
    if (moe := model.moe) is not None:
        yield (
            f"            MoE: each token uses {moe.used} of {moe.experts} experts in {moe.layers} layers, "
            f"{model.token_parameters / 1e9:.2f} billion weights in total"
        )
    for note in model.notes:
        yield f"            {note}"
    if model.context_limit and workload.context > model.context_limit:
        yield f"            trained for {model.context_limit:,} tokens: answers may be poor with a longer context"
    yield f"workload    {workload.context:,} tokens x {workload.batch}, alpha {workload.alpha:g}"
    memory = f"GPU {format_size(machine.gpu_bytes)}, " if machine.has_gpu else "no GPU, "
    yield f"machine     {machine.title}: {memory}RAM {format_size(machine.host_bytes)}"
    if plan.profile is not None:
        yield f"            its speeds were measured {_age(plan.profile)}; its device is emulated"
        if (key := plan.profile.profile.key).in_memory:
            yield f"            {plan.ssd} is in memory ({key.filesystem}): these are not the speeds of an SSD"
        if machine.has_gpu:
            yield f"            the GPU's speeds are {machine.origins['gpu_bytes_per_s']}"
    if plan.ssd is not None and plan.ssd_bytes is not None:
        yield f"ssd         {plan.ssd}: {format_size(plan.ssd_bytes)} free"


def _tiers(plan: KvPlan) -> Table:
    found, places, machine = plan.found, plan.places, plan.machine
    rows = (
        ("weights", found.weights_on_gpu, found.weights_on_host, 0),
        ("KV cache", places.gpu, places.host, places.ssd),
        ("system and runtime", machine.gpu_reserved_bytes * machine.has_gpu, machine.host_reserved_bytes, 0),
        ("capacity", machine.gpu_bytes, machine.host_bytes, plan.ssd_bytes),
    )
    shown = ((name, *map(_size, sizes)) for name, *sizes in rows)
    return plain_table("", "GPU", "RAM", "SSD", rows=shown, title="What fits where (modelled)")


def _size(size_bytes: float | None) -> str:
    return "not given" if size_bytes is None else format_size(size_bytes) if size_bytes >= 1 else "-"


def _pools(plan: KvPlan) -> Iterator[str]:
    yield f"KV cache    {format_size(plan.use.kv)}, {format_size(plan.model.token_bytes)} per token"
    if plan.places.gpu:
        yield "pools       none: weights and KV cache fit on the GPU"
        return
    machine = plan.machine
    host, device = format_rate(machine.score_bytes_per_s), format_rate(machine.device_bytes_per_s)
    yield f"M0          {format_size(plan.found.host_kv)} of RAM is left for the KV cache"
    binds = f"M0 limits it to {plan.places.beta:.3g}: " if plan.m0_binds else "M0 has room for it: "
    shares = f"Mc {format_size(plan.places.host)}, Ms {format_size(plan.places.ssd)}"
    yield f"beta        {plan.beta_rule:.3g} by the rule Mc/fc = Ms/fs (f_c {host}, f_s {device}); {binds}{shares}"
    if plan.lacking_bytes:
        yield f"            it does NOT fit: the SSD needs {format_size(plan.lacking_bytes)} more free space"


def _latencies(plan: KvPlan) -> Table:
    title = f"Time per token, and HillInfer's speed-up (modelled, speeds of {plan.machine.title})"
    rows = []
    for one in plan.latencies:
        stages = [one.stages[name] for name in ("evaluate", "fetch", "compute")]
        hidden = max(0.0, sum(stages) - one.token_ns)
        faster = "" if one.system.name == "hillinfer" else f"{plan.speedup(one.system.name):.2f}x"
        rows.append((one.system.title, *map(format_duration, (*stages, hidden, one.token_ns)), faster))
    return plain_table("system", "evaluate", "fetch", "compute", "hidden", "token", "speed-up", rows=rows, title=title)


def document(plan: KvPlan) -> dict[str, Any]:
    """Return JSON-ready values: bytes, ns, tokens; null if not requested, or for an infinite ratio."""
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
        "m0_bytes": plan.found.host_kv,
        "beta_rule": plan.beta_rule,
        "beta": plan.places.beta if math.isfinite(plan.places.beta) else None,
        "m0_binds": plan.m0_binds,
        "fits": plan.lacking_bytes == 0,
        "lacking_bytes": plan.lacking_bytes,
        "ssd": {"directory": plan.ssd, "free_bytes": plan.ssd_bytes},
        "latencies": [one.to_json() for one in plan.latencies],
        "speedups": {one.system.name: plan.speedup(one.system.name) for one in plan.latencies},
        "largest_context_tokens": [asdict(one) for one in plan.limits],
    }


# The profile of a machine


def show_profile(found: KnownProfile, as_json: bool) -> None:
    output.show(as_json, lambda: profile_document(found), (*_profile_lines(found), "", _speeds(found)))


def _profile_lines(found: KnownProfile) -> Iterator[str]:
    profile = found.profile
    yield f"machine     {profile.key.processor}, {profile.key.processors} processors, Linux {profile.key.kernel}"
    yield f"storage     {profile.directory} (device {profile.key.device}, {profile.key.filesystem})"
    yield f"measured    {_age(found)}, in {profile.seconds:.1f} s"
    yield f"saved in    {found.file}" if found.file else "saved in    not saved: the cache directory is not writable"
    if profile.key.in_memory:
        yield f"note        {profile.key.filesystem} is in memory: these are not the speeds of an SSD"
    if not profile.storage.direct:
        yield "note        without O_DIRECT, which this file system lacks, reads may have come from the page cache"


def _age(found: KnownProfile) -> str:
    if not found.cached:
        return "now"
    return f"{format_duration(round(found.age_s) * 10**9)} ago (cached; --force measures again)"


def _speeds(found: KnownProfile) -> Table:
    host, storage = found.profile.host, found.profile.storage
    page = format_size(storage.page_bytes)
    rows = (
        ("f_c", "keys scored by the processors", format_rate(host.score_bytes_per_s), "measured"),
        ("f_s", "keys scored by the device", format_rate(storage.device_bytes_per_s), "emulated"),
        ("f_c / f_s", "beta by the rule", f"{_beta(found):.3g}", "computed"),
        ("link", "pages from device to host", format_rate(storage.link_bytes_per_s), "emulated"),
        ("command", "one page fetched", format_duration(storage.command_ns), "emulated"),
        ("disk, sequential", "reads of 1 MiB", format_rate(storage.sequential_bytes_per_s), "measured"),
        ("disk, random", f"reads of pages of {page}", format_rate(storage.random_bytes_per_s), "measured"),
        ("memory", "reads by all processors", format_rate(host.memory_bytes_per_s), "measured"),
        ("compute", "float32 matrix products", f"{host.flops / 1e9:.0f} GFLOP/s", "measured"),
    )
    return plain_table("", "what", "speed", "kind", rows=rows, left=("what", "kind"))


def profile_document(found: KnownProfile) -> dict[str, Any]:
    return {
        "schema": PROFILE_SCHEMA,
        "kind": "measured",
        "emulated": ["device_bytes_per_s", "link_bytes_per_s", "command_ns"],
        "cached": found.cached,
        "age_s": found.age_s,
        "file": str(found.file) if found.file else None,
        "beta": _beta(found),
        **{name: value for name, value in found.profile.to_json().items() if name != "schema"},
    }


def _beta(found: KnownProfile) -> float:
    """Return f_c / f_s. Source: hillinfer.txt, section 3.3, equation (1)."""
    return found.profile.host.score_bytes_per_s / found.profile.storage.device_bytes_per_s
