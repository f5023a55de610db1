"""Tables and JSON of the mount benchmark, from the same outcomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .bars import judge
from .experiment import Outcome

SCHEMA = "llmcache-bench-mount/1"


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


def verdicts(outcomes: list[Outcome]) -> Table:
    """Return every bar with pass or FAIL."""
    made = Table(title="bars")
    for name in ("case", "bar", "value", "limit", ""):
        made.add_column(name, justify="left" if name in ("case", "bar", "") else "right")
    for outcome in outcomes:
        for bar in judge(outcome):
            result = "[green]pass[/green]" if bar.passed else "[red]FAIL[/red]"
            made.add_row(outcome.experiment.name, bar.what, f"{bar.value:.3f}", f"{bar.sense} {bar.limit}", result)
        for problem in outcome.problems("mount"):
            made.add_row(outcome.experiment.name, f"mount: {problem}", "", "", "")
    return made


def write_json(path: Path, machine: dict[str, Any], outcomes: list[Outcome]) -> None:
    """Write every run; replaces the file as a whole, so that an interrupted benchmark leaves what it has."""
    results = [{**one.to_json(), "bars": [bar.to_json() for bar in judge(one)]} for one in outcomes]
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"schema": SCHEMA, "machine": machine, "results": results}, indent=1) + "\n")
    part.replace(path)


def show(outcomes: list[Outcome], console: Console) -> None:
    """Print both tables."""
    console.print(table(outcomes))
    console.print(verdicts(outcomes))


def all_passed(outcomes: list[Outcome]) -> bool:
    """Return whether every bar is reached."""
    return all(bar.passed for outcome in outcomes for bar in judge(outcome))
