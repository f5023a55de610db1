"""The answer of `llmcache edram sweep`, as a table for people and as JSON; all of it is modelled."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from llmcache import __version__
from llmcache.edram.accelerator import Axes, Compared, compared
from llmcache.edram.systems import System
from llmcache.report.edram_model import row_values
from llmcache.report.edram_text import MODELLED, WIDTH, joules, percent, times
from llmcache.units import format_duration

SCHEMA = "llmcache.edram-sweep/1"
NUMBERS = ("context", "decode", "batch", "N'", "interval", "latency", "speed-up", "energy", "efficiency", "refresh", "fits")
SHOWN = 40
"""Rows that a table shows; JSON has all of them."""


@dataclass(frozen=True)
class Sweep:
    """Every configuration of some axes with its modelled cost; `seconds` is how long this machine took."""

    rows: tuple[Compared, ...]
    baseline: str
    seconds: float


def swept(axes: Axes, baseline: System) -> Sweep:
    """Returns all configurations of `axes`, compared with `baseline`; UsageError if they are too many."""
    start = time.perf_counter()
    rows = tuple(compared(axes.configurations(), baseline))
    return Sweep(rows, baseline.name, time.perf_counter() - start)


def show(sweep: Sweep, as_json: bool) -> None:
    """Prints `sweep` on stdout."""
    if as_json:
        print(json.dumps(document(sweep), indent=1))
        return
    console = Console(highlight=False, markup=False, width=WIDTH)
    most = sorted(sweep.rows, key=lambda row: -row.efficiency)[:SHOWN] if len(sweep.rows) > SHOWN else sweep.rows
    console.print(table(most, sweep.baseline))
    if len(sweep.rows) > SHOWN:
        console.print(f"the {SHOWN} most efficient of {len(sweep.rows):,}; --json has all")
    console.print(f"{len(sweep.rows):,} configurations in {sweep.seconds:.2f} s")


def table(rows: Sequence[Compared], baseline: str) -> Table:
    """Returns `rows` as a table."""
    made = Table(title=f"Latency and energy ({MODELLED}), against {baseline}", title_justify="left")
    for name in ("model", "workload", "system", "profile"):
        made.add_column(name)
    for name in NUMBERS:
        made.add_column(name, justify="right")
    for row in rows:
        one, outcome = row.configuration, row.outcome
        work = one.workload
        made.add_row(
            one.model.name,
            work.name,
            one.system.name,
            one.profile.name,
            *(f"{number:,}" for number in (work.context, work.decode, work.batch)),
            f"{work.budget:,}" if one.policy.evict else "-",
            format_duration(one.policy.intervals.mean_ns) if one.hardware.edram else "-",
            format_duration(1e9 * outcome.latency_s),
            times(row.speedup),
            joules(outcome.energy_j),
            times(row.efficiency),
            percent(row.refresh_share) if one.hardware.edram else "-",
            "yes" if outcome.fits else "NO",
        )
    return made


def document(sweep: Sweep) -> dict[str, Any]:
    """`sweep` as JSON-ready values: every configuration, in seconds, joules and bytes."""
    return {
        "schema": SCHEMA,
        "kind": MODELLED,
        "llmcache_version": __version__,
        "baseline": sweep.baseline,
        "configurations": len(sweep.rows),
        "results": [row_values(row) for row in sweep.rows],
    }
