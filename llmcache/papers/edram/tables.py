"""Output of `llmcache edram model` and `sweep`; all values are modelled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rich.table import Table

from llmcache import __version__
from llmcache.errors import UsageError
from llmcache.papers.edram.accelerator import LATENCIES, Axes, Compared, compared, roofline_of
from llmcache.papers.edram.catalogue import Catalogue, listed, named, read_constants
from llmcache.papers.edram.chip import Area, EvictorCost, area_of, evictor_cost, lifetimes_of
from llmcache.papers.edram.energy import KINDS
from llmcache.papers.edram.latency import RESOURCES
from llmcache.papers.edram.systems import BASELINE, RECOMPUTE_MODES, AcceleratorSystem, Configuration, GenerationWorkload
from llmcache.report import output
from llmcache.report.output import plain_table
from llmcache.units import format_duration, format_size

SCHEMA = "llmcache.edram-model/1"
SWEEP_SCHEMA = "llmcache.edram-sweep/1"
SHOWN = 40
"""Rows that the table of a sweep shows; JSON has all of them."""
MODELLED = "modelled"
_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"), (1e-12, "p"))


def joules(value: float) -> str:
    """Return text such as "1.14 mJ"."""
    return _with_prefix(value, "J")


def watts(value: float) -> str:
    return _with_prefix(value, "W")


def _with_prefix(value: float, unit: str) -> str:
    if not value:
        return f"0 {unit}"
    for factor, prefix in _PREFIXES:
        # 999.6 would be formatted as 1.0e+03: it belongs to the next prefix.
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:#.3g} {prefix}{unit}".replace(". ", " ")
    return f"{value:.2e} {unit}"


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def times(value: float) -> str:
    return f"{value:.2f}×"


def compare(
    model: str = "llama2-7b",
    workload: str = "PG19",
    system: str = "all",
    profile: str = "paper,silicon",
    recompute: str | None = None,
    constants: str | None = None,
    **changes: int | None,
) -> list[Compared]:
    """Return all systems for each profile in turn; UsageError names an invalid option."""
    known = read_constants(constants)
    work = _changed(named("workload", known.workloads, workload), {k: v for k, v in changes.items() if v is not None})
    shape, systems = named("model", known.models, model), _systems(known, system, recompute)
    profiles = listed("profile", known.profiles, profile)
    configurations = [Configuration(shape, work, one, energies) for energies in profiles for one in systems]
    return compared(configurations, known.baseline)


def _changed(workload: GenerationWorkload, changes: dict[str, int]) -> GenerationWorkload:
    if not changes:
        return workload
    if "budget" in changes and "window" not in changes:
        changes["window"] = min(workload.window, max(0, changes["budget"] - workload.sinks))
    try:
        return replace(workload, name=f"{workload.name}, changed", **changes)
    except ValueError as error:  # the message begins with the name of the field, which is also that of the option
        raise UsageError(f"--{error}") from error


def _systems(known: Catalogue, text: str, recompute: str | None) -> list[AcceleratorSystem]:
    systems = listed("system", known.systems, text)
    if recompute is None:
        return systems
    if recompute not in RECOMPUTE_MODES:
        raise UsageError(f"--recompute: there is no mode '{recompute}'", f"one of: {', '.join(RECOMPUTE_MODES)}")
    return [system.with_recompute(recompute) for system in systems]


def show(rows: Sequence[Compared], as_json: bool) -> None:
    output.show(as_json, lambda: document(rows), _parts(rows))


def _parts(rows: Sequence[Compared]) -> Iterator[str | Table]:
    model, work = rows[0].configuration.model, rows[0].configuration.workload
    lengths = f"context {work.context:,}, decode {work.decode:,} tokens, batch {work.batch}, budget N' {work.budget:,}"
    yield f"{model.name}, {work.name}: {lengths} ({MODELLED})"
    for table in _tables(rows):
        yield ""
        yield table


def _by_profile(rows: Sequence[Compared]) -> dict[str, list[Compared]]:
    found: dict[str, list[Compared]] = {}
    for row in rows:
        found.setdefault(row.configuration.profile.name, []).append(row)
    return found


def _tables(every: Sequence[Compared]) -> Iterator[Table]:
    for name, rows in _by_profile(every).items():
        headings, title = ("system", *COSTS), f"Profile {name}, {MODELLED}: {rows[0].configuration.profile.title}"
        yield plain_table(*headings, rows=([CELLS[heading](row) for heading in headings] for row in rows), title=title)
        kinds = {row.configuration.system.name: row.outcome.by_kind() for row in rows}
        title = f"Energy by component, profile {name} ({MODELLED})"
        shares = {
            kind: lambda values, k=kind: f"{joules(values[k])} {values[k] / sum(values.values()):6.1%}" for kind in KINDS
        }
        yield _by_system(title, "component", kinds, shares)
    configurations = {row.configuration.system.name: row.configuration for row in rows}
    waited = {row.configuration.system.name: row.outcome.latencies_s for row in rows}
    waits = {
        RESOURCE_NAMES.get(name, name): lambda values, n=name: format_duration(1e9 * values[n]) if values[n] else "-"
        for name in LATENCIES
        if any(values[name] for values in waited.values())
    }
    yield _by_system(f"Time by the resource that is waited for ({MODELLED})", "resource", waited, waits)
    parts = [*(field.name for field in fields(Area)), "chip_mm2"]
    areas = {
        AREA_NAMES.get(name, name.removesuffix("_mm2")): lambda area, n=name: f"{getattr(area, n):.2f}" for name in parts
    }
    on_chip = {name: area_of(one.system) for name, one in configurations.items()}
    yield _by_system(f"Area in mm² ({MODELLED} from table 1, for comparison only)", "part", on_chip, areas)
    if lifetimes := {name: lifetimes_of(one) for name, one in configurations.items() if one.hardware.edram}:
        names = {name.upper(): f"{name}_ns" for name in "xqkv"} | {"sum": "total_ns"}
        lasts = {title: lambda values, n=name: format_duration(getattr(values, n)) for title, name in names.items()}
        yield _by_system(f"Lifetimes in eDRAM, last step ({MODELLED}, equations 4-8)", "data", lifetimes, lasts)
    if evictors := _evictors(rows):
        cells: Mapping[str, Callable[[EvictorCost], str]] = {
            "stall time": lambda one: format_duration(one.stall_ns),
            "time to scan the scores instead": lambda one: format_duration(one.search_ns),
            "scores of all heads and layers": lambda one: format_size(one.register_bytes),
            "energy (28 mW, section 8.1.4)": lambda one: joules(one.joules),
        }
        yield _by_system(f"Systolic evictor, one step with a full cache ({MODELLED})", "cost", evictors, cells)


RESOURCE_NAMES = {
    "prefill_array": "array, prefill",
    "prefill_dram": "DRAM, prefill",
    "dram_weights": "DRAM, weights",
    "dram_kv": "DRAM, KV",
    "sram": "SRAM",
    "kv_memory": "KV memory",
}
AREA_NAMES = {"sram_mm2": "SRAM", "edram_mm2": "eDRAM", "sfu_mm2": "SFU"}


def _evictors(rows: Sequence[Compared]) -> dict[str, EvictorCost]:
    found: dict[str, EvictorCost] = {}
    for row in rows:
        one = row.configuration
        if one.policy.evict and one.hardware.systolic_evictor and one.system.name not in found:
            decode_s = sum(row.outcome.latencies_s[name] for name in RESOURCES)
            found[one.system.name] = evictor_cost(one, 1e9 * decode_s / one.workload.decode)
    return found


def _by_system(title: str, first: str, systems: Mapping[str, Any], cells: Mapping[str, Callable[[Any], str]]) -> Table:
    rows = ([name, *map(cell, systems.values())] for name, cell in cells.items())
    return plain_table(first, *systems, rows=rows, title=title)


CELLS: dict[str, Callable[[Compared], str]] = {
    "model": lambda row: row.configuration.model.name,
    "workload": lambda row: row.configuration.workload.name,
    "system": lambda row: row.configuration.system.name,
    "profile": lambda row: row.configuration.profile.name,
    "context": lambda row: f"{row.configuration.workload.context:,}",
    "decode": lambda row: f"{row.configuration.workload.decode:,}",
    "batch": lambda row: f"{row.configuration.workload.batch:,}",
    "N'": lambda row: f"{row.configuration.workload.budget:,}" if row.configuration.policy.evict else "-",
    "interval": lambda row: (
        format_duration(row.configuration.policy.intervals.mean_ns) if row.configuration.hardware.edram else "-"
    ),
    "latency": lambda row: format_duration(1e9 * row.outcome.latency_s),
    "speed-up": lambda row: times(row.speedup),
    "energy": lambda row: joules(row.outcome.energy_j),
    "efficiency": lambda row: times(row.efficiency),
    "refresh": lambda row: percent(row.refresh_share),
    "power": lambda row: watts(row.power_w),
    "recomputed": lambda row: f"{row.outcome.recompute_share:.2%}",
    "weights and KV": lambda row: format_size(row.outcome.peak_bytes),
    "fits": lambda row: "yes" if row.outcome.fits else "NO",
}
"""Functions that return the cells of tables, by heading."""
COSTS = ("latency", "speed-up", "energy", "efficiency", "refresh", "power", "recomputed", "weights and KV", "fits")
NAMED = ("model", "workload", "system", "profile")
SWEPT = (*NAMED, "context", "decode", "batch", "N'", "interval")
SWEPT_COSTS = ("latency", "speed-up", "energy", "efficiency", "refresh", "fits")


def document(rows: Sequence[Compared]) -> dict[str, Any]:
    by_profile = _by_profile(rows)
    configurations = {row.configuration.system.name: row.configuration for row in next(iter(by_profile.values()))}
    first = rows[0].configuration
    areas = {name: area_of(one.system) for name, one in configurations.items()}
    roofs = {name: roofline_of(one) for name, one in configurations.items() if one.policy.recomputes}
    lifetimes = {name: lifetimes_of(one) for name, one in configurations.items() if one.hardware.edram}
    return {
        "schema": SCHEMA,
        "kind": MODELLED,
        "source": "Kelle (MICRO 2025), doi:10.1145/3725843.3756071; nothing is fitted to its results",
        "llmcache_version": __version__,
        "model": asdict(first.model),
        "workload": {**asdict(first.workload), "eviction_bound": first.workload.eviction_bound},
        "baseline": BASELINE,
        "profiles": {name: asdict(results[0].configuration.profile) for name, results in by_profile.items()},
        "systems": {
            name: {**asdict(one.system), "area": {**asdict(areas[name]), "chip_mm2": areas[name].chip_mm2}}
            for name, one in configurations.items()
        },
        "energy_kinds": {kind: list(names) for kind, names in KINDS.items()},
        "results": [
            {**row_values(row), "latencies_s": row.outcome.latencies_s, "energies_j": row.outcome.energies_j} for row in rows
        ],
        "rooflines": {name: {**asdict(roof), "ridge": roof.ridge} for name, roof in roofs.items()},
        "lifetimes": {name: {**asdict(one), "total_ns": one.total_ns} for name, one in lifetimes.items()},
        "evictors": {name: asdict(one) for name, one in _evictors(rows).items()},
    }


def row_values(row: Compared) -> dict[str, Any]:
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


@dataclass(frozen=True)
class SweptSystems:
    """Configurations with their costs; `seconds` is the computing time."""

    rows: tuple[Compared, ...]
    baseline: str
    seconds: float


def swept(axes: Axes, baseline: AcceleratorSystem) -> SweptSystems:
    """Return all configurations; UsageError if there are too many."""
    start = time.perf_counter()
    rows = tuple(compared(axes.configurations(), baseline))
    return SweptSystems(rows, baseline.name, time.perf_counter() - start)


def axes_of(
    model: str,
    workload: str,
    system: str,
    profile: str,
    recompute: str | None,
    constants: str | None,
    **numbers: Sequence[float],
) -> tuple[Axes, AcceleratorSystem]:
    """Return the axes and the baseline system; UsageError names an invalid option."""
    known = read_constants(constants)
    models, workloads = listed("model", known.models, model), listed("workload", known.workloads, workload)
    profiles, systems = listed("profile", known.profiles, profile), _systems(known, system, recompute)
    return Axes(models, workloads, systems, profiles, **numbers), known.baseline  # type: ignore[arg-type]


def show_sweep(sweep: SweptSystems, as_json: bool) -> None:
    output.show(as_json, lambda: sweep_document(sweep), _sweep_parts(sweep))


def _sweep_parts(sweep: SweptSystems) -> Iterator[str | Table]:
    many = len(sweep.rows)
    shown = sorted(sweep.rows, key=lambda row: -row.efficiency)[:SHOWN] if many > SHOWN else sweep.rows
    rows = [{name: CELLS[name](row) for name in (*SWEPT, *SWEPT_COSTS)} for row in shown]
    for cells, row in zip(rows, shown, strict=True):
        if not row.configuration.hardware.edram:
            cells["refresh"] = "-"
    varied = [name for name in SWEPT if len({cells[name] for cells in rows}) > 1] or ["system"]
    yield ", ".join(f"{name} {rows[0][name]}" for name in SWEPT if name not in varied)
    title, headings = f"Latency and energy against {sweep.baseline} ({MODELLED})", (*varied, *SWEPT_COSTS)
    table = plain_table(
        *headings, rows=([cells[name] for name in headings] for cells in rows), title=title, left=NAMED, keys=len(varied)
    )
    if varied[0] not in NAMED:
        table.columns[0].justify = "right"
    yield table
    if many > SHOWN:
        yield f"shown: the {SHOWN} most efficient of {many:,} (--json has all)"
    yield f"{many:,} configuration{'s' if many > 1 else ''} in {sweep.seconds:.2f} s"


def sweep_document(sweep: SweptSystems) -> dict[str, Any]:
    return {
        "schema": SWEEP_SCHEMA,
        "kind": MODELLED,
        "llmcache_version": __version__,
        "baseline": sweep.baseline,
        "configurations": len(sweep.rows),
        "results": [row_values(row) for row in sweep.rows],
    }
