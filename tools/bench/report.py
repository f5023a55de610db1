"""Tables and JSON of the mount benchmark, from the same outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from . import results
from .bars import Bar, with_bars
from .bars import table as bar_table
from .experiment import Outcome
from .mountbars import bars

SCHEMA = "llmcache-bench-mount/2"


def table(outcomes: list[Outcome]) -> Table:
    """Return the comparison: a row per experiment and side."""
    made = Table(
        title="kernel page cache and llmcachefs: same total memory, same storage limit",
        caption="s/step, min..max and MB read are measured (medians over all runs); "
        "bound is modelled: max(compute, (N-S)/BW)",
    )
    for name in ("case", "side", "s/step", "min..max", "MB read/step", "bound s", "/bound", "/kernel"):
        made.add_column(name, justify="left" if name in ("case", "side") else "right")
    for outcome in outcomes:
        for side in outcome.experiment.sides:
            made.add_row(*_row(outcome, side))
        made.add_section()
    return made


def _row(outcome: Outcome, side: str) -> list[str]:
    times, median = outcome.seconds(side), outcome.median_s(side)
    spread = f"{min(times):.4f}..{max(times):.4f}" if times else "-"
    name = f"({outcome.experiment.case}) {outcome.experiment.name}"
    bound, against = outcome.bound_s(), outcome.median_s("kernel")
    row = [name, side, f"{median:.4f}", spread, f"{outcome.storage_bytes(side) / 1e6:.1f}"]
    if outcome.experiment.case == "c":  # nothing is kept or computed in one cold pass: no bound
        return [*row, "-", "-", f"{median / against:.2f}"]
    return [*row, f"{bound:.4f}", f"{median / bound:.2f}", f"{median / against:.2f}"]


def problems(outcomes: list[Outcome]) -> list[str]:
    """Return what went wrong over the mount, a line each."""
    return [f"{one.experiment.name}: {problem}" for one in outcomes for problem in one.problems("mount")]


def document(machine: dict[str, Any], outcomes: list[Outcome], complete: bool) -> dict[str, Any]:
    """Return every run with the bars; `complete`: all that was asked for is there."""
    told = results.rounded([one.to_json() for one in outcomes])
    return with_bars({"schema": SCHEMA, "machine": machine, "complete": complete, "results": told}, bars(told))


def show(outcomes: list[Outcome], judged: Sequence[Bar], console: Console) -> None:
    """Print both tables, and what went wrong."""
    console.print(table(outcomes))
    console.print(bar_table(judged))
    for problem in problems(outcomes):
        console.print(f"problem over the mount: {problem}", soft_wrap=True)
