"""The eDRAM benchmark's command line: how long the accelerator model takes on this machine. What it computes is modelled."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmcache.edram.accelerator import Axes, evaluate
from llmcache.edram.systems import MODELS, SYSTEMS, WORKLOADS
from llmcache.report.edram_model import swept
from llmcache.report.reproduce import reproduce

from . import machine, results
from .bars import Bar, exit_code, of_document, with_bars
from .bars import table as bar_table
from .signals import one_interrupt

SCHEMA = "llmcache-bench-edram/2"
CONFIGURATIONS = 10_000
SWEEP_BAR_S = 5.0
ROOT = Path(__file__).resolve().parents[2]


def axes() -> Axes:
    """Return a sweep of 10,000 configurations: two models, the paper's workloads and systems, other numbers varied."""
    return Axes(
        [MODELS["llama2-7b"], MODELS["llama3-8b"]],
        list(WORKLOADS.values()),
        list(SYSTEMS.values()),
        batches=(1, 2, 4, 8, 16),
        budgets=(128, 256, 512, 1024, 2048),
        interval_factors=(0.1, 0.25, 0.5, 1.0, 2.0),
        dram_rates=(32e9, 64e9),
    )


def cases() -> dict[str, Callable[[], object]]:
    """Return what is measured, by name; "sweep" has the bar."""
    made = axes()
    configurations = made.configurations()
    return {
        "sweep": lambda: swept(made, SYSTEMS["Original+SRAM"]),
        "evaluate": lambda: evaluate(configurations),
        "every step by itself": lambda: evaluate(configurations[:: len(configurations) // 100], groups=None),
        "command": _command,
        "reproduce kelle": lambda: reproduce("kelle", False, lambda _: None).page(),
    }


def _command() -> None:
    """Run a sweep as large from the command line, imports and JSON included."""
    numbers = ["--batch", "1,2,4,8,16", "--budget", "128,256,512,1024,2048", "--interval-scale", "0.1,0.25,0.5,1,2"]
    names = ["--model", "llama2-7b,llama3-8b", "--workload", "all", "--system", "all", "--dram-bw", "32GB/s,64GB/s"]
    command = [sys.executable, "-m", "llmcache", "edram", "sweep", *names, *numbers, "--json"]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def measure(repeat: int, console: Console) -> dict[str, list[float]]:
    """Return the seconds of every run of every case, run in turns."""
    found: dict[str, list[float]] = {}
    made = cases()
    for number in range(repeat):
        for name, run in made.items():
            start = time.perf_counter()
            run()
            found.setdefault(name, []).append(time.perf_counter() - start)
        console.print(f"run {number + 1} of {repeat}", soft_wrap=True)
    return found


def document(seconds: dict[str, list[float]], host: dict[str, Any]) -> dict[str, Any]:
    """Return everything as JSON-ready values, with the bar."""
    rows = []
    for name, runs in seconds.items():
        rows.append({"case": name, "seconds": runs, "median_s": statistics.median(runs)})
    told = {"schema": SCHEMA, "machine": host, "configurations": CONFIGURATIONS, "cases": rows}
    return with_bars(results.rounded(told), bars(told))


def bars(told: dict[str, Any]) -> list[Bar]:
    """Return the bar: the median of the sweep."""
    (median,) = (one["median_s"] for one in told["cases"] if one["case"] == "sweep")
    what = f"a sweep of the accelerator model over {told['configurations']:,} configurations"
    return [Bar(7, "sweep", what, median, "<", SWEEP_BAR_S, "tools/bench/edram", unit="s")]


def table(told: dict[str, Any]) -> Table:
    """Return the times."""
    made = Table(title=f"accelerator model: {told['configurations']:,} configurations (times measured)")
    for name in ("case", "s", "min..max"):
        made.add_column(name, justify="left" if name == "case" else "right")
    for row in told["cases"]:
        spread = f"{min(row['seconds']):.2f}..{max(row['seconds']):.2f}"
        made.add_row(row["case"], f"{row['median_s']:.2f}", spread)
    return made


def main(argv: list[str] | None = None) -> int:
    """Return 0 if the bar is reached, 1 if not."""
    parser = argparse.ArgumentParser(prog="tools/bench/edram", description=__doc__)
    parser.add_argument("--repeat", type=int, default=7, help="runs of each case, in turns")
    parser.add_argument("--json", type=Path, help="write every run here")
    args = parser.parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        with one_interrupt():
            seconds = measure(args.repeat, console)
    except KeyboardInterrupt:
        console.print("interrupted: nothing is written")
        return 1
    told = document(seconds, machine.describe(ROOT))
    judged = of_document(told)
    console.print(table(told), bar_table(judged))
    if args.json:
        results.write(args.json, told)
    return exit_code(judged)
