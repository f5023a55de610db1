"""The answer of `llmcache edram model`, as tables for people and as JSON; all of it is modelled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from llmcache import __version__
from llmcache.edram.accelerator import LATENCIES, Compared, Roofline, compared, roofline_of
from llmcache.edram.chip import Area, EvictorCost, Lifetimes, area_of, evictor_cost, lifetimes_of
from llmcache.edram.energy import KINDS
from llmcache.edram.latency import RESOURCES
from llmcache.edram.question import Question
from llmcache.report.edram_text import MODELLED, WIDTH, joules, percent, times, watts, workload_text
from llmcache.report.tables import titled_table
from llmcache.units import format_duration, format_size

SCHEMA = "llmcache.edram-model/1"


@dataclass(frozen=True)
class Answer:
    """The systems that were asked for, by profile, with areas and with the rooflines of those that recompute.

    `lifetimes`: of activations in eDRAM in the last step, of systems that have it; `evictors`: of a step with a full cache,
    of systems that evict with one.
    """

    question: Question
    rows: tuple[Compared, ...]
    areas: dict[str, Area]
    rooflines: dict[str, Roofline]
    lifetimes: dict[str, Lifetimes]
    evictors: dict[str, EvictorCost]


def answer(question: Question) -> Answer:
    """Returns the modelled answer to `question`."""
    rows = tuple(compared(question.configurations(), question.baseline))
    one_profile = {row.configuration.system.name: row for row in rows[: len(question.systems)]}
    asked = {name: row.configuration for name, row in one_profile.items()}
    return Answer(
        question,
        rows,
        {name: area_of(one.system) for name, one in asked.items()},
        {name: roofline_of(one) for name, one in asked.items() if one.policy.recomputes},
        {name: lifetimes_of(one) for name, one in asked.items() if one.hardware.edram},
        {
            name: evictor_cost(row.configuration, 1e9 * _decode_s(row) / question.workload.decode)
            for name, row in one_profile.items()
            if row.configuration.policy.evict and row.configuration.hardware.systolic_evictor
        },
    )


def _decode_s(row: Compared) -> float:
    return sum(row.outcome.latencies_s[name] for name in RESOURCES)


def show(found: Answer, as_json: bool) -> None:
    """Prints `found` on stdout."""
    if as_json:
        print(json.dumps(document(found), indent=1))
        return
    console = Console(highlight=False, markup=False, width=WIDTH)
    console.print(f"{found.question.model.name}, {workload_text(found.question.workload)} ({MODELLED})")
    for table in tables(found):
        console.print()
        console.print(table)


def tables(found: Answer) -> Iterator[Table]:
    """Yields the tables: costs by profile, then the energy by component, then what time is spent on, then areas."""
    for profile in found.question.profiles:
        rows = [row for row in found.rows if row.configuration.profile is profile]
        yield _costs(f"Profile {profile.name}: {profile.title} ({MODELLED})", rows)
        yield _energies(f"Energy by component, profile {profile.name} ({MODELLED})", rows)
    one_profile = found.rows[: len(found.question.systems)]
    yield _waits(one_profile)
    yield _areas(found.areas)
    if found.lifetimes:
        yield _lifetimes(found.lifetimes)
    if found.evictors:
        yield _evictors(found.evictors)


def _costs(title: str, rows: Sequence[Compared]) -> Table:
    columns = ["latency", "speed-up", "energy", "efficiency", "refresh", "power", "recomputed", "weights and KV", "fits"]
    table = titled_table(title, "system", *columns)
    for row in rows:
        table.add_row(
            row.configuration.system.name,
            format_duration(1e9 * row.outcome.latency_s),
            times(row.speedup),
            joules(row.outcome.energy_j),
            times(row.efficiency),
            percent(row.refresh_share),
            watts(row.power_w),
            f"{row.outcome.recompute_share:.2%}",
            format_size(row.outcome.peak_bytes),
            "yes" if row.outcome.fits else "NO",
        )
    return table


def _energies(title: str, rows: Sequence[Compared]) -> Table:
    table = titled_table(title, "component", *(row.configuration.system.name for row in rows))
    kinds = [row.outcome.by_kind() for row in rows]
    for kind in KINDS:
        table.add_row(kind, *(f"{joules(of[kind])} {of[kind] / sum(of.values()):6.1%}" for of in kinds))
    return table


def _waits(rows: Sequence[Compared]) -> Table:
    systems = [row.configuration.system.name for row in rows]
    table = titled_table(f"What the time is spent waiting for ({MODELLED})", "resource", *systems)
    for name in LATENCIES:
        waited = [row.outcome.latencies_s[name] for row in rows]
        if any(waited):
            table.add_row(name.replace("_", " "), *(format_duration(1e9 * time_s) if time_s else "-" for time_s in waited))
    return table


def _areas(areas: dict[str, Area]) -> Table:
    table = titled_table(f"Area, mm² ({MODELLED}; table 1: for comparing only)", "part", *areas)
    for name in ("array_mm2", "sram_mm2", "edram_mm2", "sfu_mm2", "evictor_mm2", "chip_mm2"):
        table.add_row(name.removesuffix("_mm2"), *(f"{getattr(area, name):.2f}" for area in areas.values()))
    return table


def _lifetimes(lifetimes: dict[str, Lifetimes]) -> Table:
    table = titled_table(f"Lifetimes in eDRAM ({MODELLED})", "last step, equations 4-8", *lifetimes)
    for name in ("x_ns", "q_ns", "k_ns", "v_ns", "total_ns"):
        title = name.removesuffix("_ns").upper() if name != "total_ns" else "sum"
        table.add_row(title, *(format_duration(getattr(one, name)) for one in lifetimes.values()))
    return table


def _evictors(evictors: dict[str, EvictorCost]) -> Table:
    table = titled_table(f"Systolic evictor, a step with a full cache ({MODELLED})", "", *evictors)
    table.add_row("stall", *(format_duration(one.stall_ns) for one in evictors.values()))
    table.add_row("a scan of the scores instead", *(format_duration(one.search_ns) for one in evictors.values()))
    table.add_row("scores of all heads and layers", *(format_size(one.register_bytes) for one in evictors.values()))
    table.add_row("energy (28 mW, section 8.1.4)", *(joules(one.joules) for one in evictors.values()))
    return table


def document(found: Answer) -> dict[str, Any]:
    """`found` as JSON-ready values: seconds, joules, bytes, mm²; speed-up and efficiency against Original+SRAM."""
    question = found.question
    return {
        "schema": SCHEMA,
        "kind": MODELLED,
        "source": "Kelle (MICRO 2025), doi:10.1145/3725843.3756071; nothing is fitted to its results",
        "llmcache_version": __version__,
        "model": asdict(question.model),
        "workload": {**asdict(question.workload), "eviction_bound": question.workload.eviction_bound},
        "baseline": question.baseline.name,
        "profiles": {profile.name: asdict(profile) for profile in question.profiles},
        "systems": {
            system.name: {**asdict(system), "area": {**asdict(area), "chip_mm2": area.chip_mm2}}
            for system, area in zip(question.systems, found.areas.values(), strict=True)
        },
        "energy_kinds": {kind: list(names) for kind, names in KINDS.items()},
        "results": [{**row_values(row), **_components(row)} for row in found.rows],
        "rooflines": {name: {**asdict(roof), "ridge": roof.ridge} for name, roof in found.rooflines.items()},
        "lifetimes": {name: {**asdict(one), "total_ns": one.total_ns} for name, one in found.lifetimes.items()},
        "evictors": {name: asdict(one) for name, one in found.evictors.items()},
    }


def row_values(row: Compared) -> dict[str, Any]:
    """Returns what a result says of itself and its totals, as JSON-ready values."""
    one, outcome = row.configuration, row.outcome
    return {
        "model": one.model.name,
        "workload": one.workload.name,
        "context": one.workload.context,
        "decode": one.workload.decode,
        "batch": one.workload.batch,
        "budget": one.workload.budget,
        "system": one.system.name,
        "profile": one.profile.name,
        "mean_interval_ns": one.policy.intervals.mean_ns if one.hardware.edram else None,
        "dram_bytes_per_s": one.hardware.dram_bytes_per_s,
        "kv_capacity_bytes": one.hardware.kv_capacity_bytes,
        "latency_s": outcome.latency_s,
        "energy_j": outcome.energy_j,
        "refresh_j": outcome.refresh_j,
        "speedup": row.speedup,
        "efficiency": row.efficiency,
        "refresh_share": row.refresh_share,
        "power_w": row.power_w,
        "dram_bytes": outcome.dram_bytes,
        "peak_bytes": outcome.peak_bytes,
        "fits": outcome.fits,
        "recompute_share": outcome.recompute_share,
    }


def _components(row: Compared) -> dict[str, Any]:
    return {"latencies_s": row.outcome.latencies_s, "energies_j": row.outcome.energies_j}
