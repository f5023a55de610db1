"""Tables and JSON of the mount benchmark, from the same results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .bars import Bar, figure, with_bars
from .bars import table as bar_table
from .mountbars import Result, bars, cpu_s_per_gb, kernel, memory, mode_of, mounts, seconds, steps, storage_bytes
from .results import rounded

SCHEMA = "llmcache-bench-mount/2"


def table(results: Sequence[Result]) -> Table:
    """Return the comparison: a row per experiment and side."""
    made = Table(
        title="kernel page cache and llmcachefs: same total memory, same storage limit",
        caption="s/step, min..max and MB read are measured (medians over all runs); "
        "bound is modelled: max(compute, (N-S)/BW); kernel is the better of the page cache's sides; "
        "memory is resident + daemon, and of resident what lies beyond the budget",
    )
    names = ("case", "side", "s/step", "min..max", "MB/step", "bound s", "/bound", "/kernel", "CPU s/GB", "memory MB")
    for name in names:
        made.add_column(name, justify="left" if name in ("case", "side") else "right")
    for result in results:
        for side in result["sides"]:
            name = f"({result['case']}) {result['name']}" if side == result["sides"][0] else ""
            made.add_row(name, *_row(result, side))
        made.add_section()
    return made


def _row(result: Result, side: str) -> list[str]:
    times, median = steps(result, side), seconds(result, side)
    spread = f"{min(times):.4f}..{max(times):.4f}" if times else "-"
    bound = result["bound_s"]
    # nothing is kept or computed in one cold pass, and what storage without a limit gives is not known: no bound
    bounds = ["-", "-"] if result["case"] in "cfg" else [f"{bound:.4f}", f"{median / bound:.2f}"]
    against = f"{median / seconds(result, kernel(result)):.2f}"
    mode = mode_of(result, side)
    label = side if mode == side else f"{side}: {mode}"
    row = [label, f"{median:.4f}", spread, f"{storage_bytes(result, side) / 1e6:.1f}", *bounds, against]
    if side not in mounts(result):
        return [*row, "", ""]
    resident, beyond, daemon = (figure(each / 1e6) for each in memory(result, side).values())
    return [*row, figure(cpu_s_per_gb(result, side)), f"{resident}+{daemon}, {beyond}"]


def problems(results: Sequence[Result]) -> list[str]:
    """Return what went wrong over the mounts, a line each."""
    found = [(one, side, text) for one in results for side in mounts(one) for text in one["problems"][side]]
    return [f"{one['name']}, {side}: {text}" for one, side, text in found]


def document(machine: dict[str, Any], results: Sequence[Result], complete: bool) -> dict[str, Any]:
    """Return every run with the bars; `complete`: all that was asked for is there."""
    told = rounded(results)
    return with_bars({"schema": SCHEMA, "machine": machine, "complete": complete, "results": told}, bars(told))


def show(results: Sequence[Result], judged: Sequence[Bar], console: Console) -> None:
    """Print both tables, and what went wrong."""
    console.print(table(results))
    console.print(bar_table(judged))
    for problem in problems(results):
        console.print(f"problem over the mount: {problem}", soft_wrap=True)
