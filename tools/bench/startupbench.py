"""The start-up benchmark's command line: how long every command takes to show its help, and `llmcache size` to answer.

Each run is a process of its own, files in the page cache; commands take turns, so that other load falls on all of them.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from llmcache.cli import app

from . import machine, results
from .bars import Bar, exit_code, with_bars
from .bars import table as bar_table
from .signals import one_interrupt

SCHEMA = "llmcache-bench-startup/1"
COMMAND = "tools/bench/startup"
ROOT = Path(__file__).resolve().parents[2]
START_BAR_S = 0.3
SIZE = ("size", "--bw", "100", "--loop", "70M")


def commands(group: click.Command = app, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words after `llmcache` of every command and group, the program itself (none) first."""
    yield path
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            if found is not None and not found.hidden:
                yield from commands(found, (*path, name))


def run(words: tuple[str, ...]) -> float:
    """Return the seconds of one run; subprocess.CalledProcessError if it fails."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "llmcache", *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def measure(repeat: int, console: Console) -> list[dict[str, Any]]:
    """Return every run of every command, after one that fills the page cache."""
    asked = [*((*path, "--help") for path in commands()), SIZE]
    seconds: dict[tuple[str, ...], list[float]] = {words: [] for words in asked}
    for number in range(repeat + 1):
        for words, runs in seconds.items():
            runs.append(run(words))
            if number == 0:
                runs.clear()
        console.print(f"{len(asked)} commands: {'warm' if number == 0 else f'run {number} of {repeat}'}", soft_wrap=True)
    return [{"command": " ".join(("llmcache", *words)), "seconds": runs} for words, runs in seconds.items()]


def bars(told: dict[str, Any]) -> list[Bar]:
    """Return the bars: the slowest help of all commands, and `llmcache size`, by medians."""
    medians = {row["command"]: statistics.median(row["seconds"]) for row in told["commands"]}
    size = medians.pop(" ".join(("llmcache", *SIZE)))
    slowest = max(medians, key=lambda command: medians[command])
    what = f"start of the slowest of {len(medians)} commands: {slowest}"
    answer = f"llmcache {' '.join(SIZE)}"
    return [
        Bar(8, "help", what, medians[slowest], "<", START_BAR_S, COMMAND, unit="s"),
        Bar(3, "size", answer, size, "<", START_BAR_S, COMMAND, unit="s"),
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the times for people, slowest first."""
    made = Table(title="start of every command (measured)")
    for name in ("command", "ms", "min..max"):
        made.add_column(name, justify="left" if name == "command" else "right")
    for row in sorted(rows, key=lambda row: -statistics.median(row["seconds"])):
        runs = [1e3 * one for one in row["seconds"]]
        made.add_row(row["command"], f"{statistics.median(runs):.0f}", f"{min(runs):.0f}..{max(runs):.0f}")
    return made


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every bar is reached, 1 if not."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each command, in turns")
    parser.add_argument("--quick", action="store_true", help="one run of each: for a look, not for the bars")
    parser.add_argument("--json", type=Path, help="write every run here")
    args = parser.parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        with one_interrupt():
            rows = measure(1 if args.quick else args.repeat, console)
    except KeyboardInterrupt:
        console.print("interrupted: nothing is written")
        return 1
    told = results.rounded({"schema": SCHEMA, "machine": machine.describe(ROOT), "commands": rows})
    judged = bars(told)
    console.print(table(rows), bar_table(judged))
    if args.json:
        results.write(args.json, with_bars(told, judged))
    return exit_code(judged)
