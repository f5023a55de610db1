"""Compares formula (1) with the simulator and with a real mount: where do stalls begin?"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import machine, results
from .bars import Bar, exit_code, of_document, verdict, with_bars
from .bars import table as bar_table
from .errors import BenchError
from .signals import one_interrupt
from .size_mounted import Sweep, Sweeper, Swept
from .size_simulated import Begin, simulated

SCHEMA = "llmcache-bench-size/2"
COMMAND = "tools/bench/size"
AGREE = 0.05
POLICIES = ("belady", "llmcache")
MIB = 1 << 20


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="tools/bench/size", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where loop files and mount points go")
    parser.add_argument("--policies", default=",".join(POLICIES), help="policies of the simulator, or '' for none")
    parser.add_argument("--modes", default="steer,arena", help="modes of the mount, or '' for none")
    parser.add_argument("--quick", action="store_true", help="a smaller loop, fewer passes")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each budget, in turns")
    parser.add_argument("--json", type=Path, help="write every pass here")
    return parser.parse_args(argv)


def sweeps_of(args: argparse.Namespace) -> Iterator[Sweep]:
    """Yield the sweeps of each mode: about two thirds of the loop must be kept."""
    for mode in (name for name in args.modes.split(",") if name):
        if args.quick:
            yield Sweep("quick", 96 * MIB, 100 * 10**6, 0.25, mode, 6, 3, 1, (0.7, 0.8, 0.9, 1.15, 1.3))
            continue
        yield Sweep("100 MB/s", 256 * MIB, 100 * 10**6, 0.9, mode, steps=8, warmup=3, repeat=args.repeat)
        yield Sweep("200 MB/s", 256 * MIB, 200 * 10**6, 0.45, mode, steps=9, warmup=3, repeat=args.repeat)


@contextmanager
def workplace(directory: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (source, scratch): fresh directories, removed at the end."""
    base = directory / f".llmcache-bench-{os.getpid()}"
    source, scratch = base / "source", base / "scratch"
    try:
        source.mkdir(parents=True)
        scratch.mkdir()
        yield source, scratch
    finally:
        shutil.rmtree(base)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run what was asked for, print and record it; returns 0 if everything agrees."""
    begins = simulated([name for name in args.policies.split(",") if name])
    sweeps: list[Swept] = []
    host = machine.describe(args.dir)
    with workplace(args.dir) as (source, scratch):
        sweeper = Sweeper(source, scratch, lambda line: console.print(line, soft_wrap=True))
        for sweep in sweeps_of(args):
            sweeps.append(sweeper.run(sweep))
            if args.json:
                results.write(args.json, document(host, begins, sweeps, complete=False))
    told = document(host, begins, sweeps, complete=True)
    if args.json:
        results.write(args.json, told)
    for table in (simulated_table(begins), mounted_table(sweeps)):
        if table.row_count:
            console.print(table)
    judged = of_document(told)
    console.print(bar_table(judged))
    return exit_code(judged)


def document(host: dict[str, Any], begins: Sequence[Begin], sweeps: Sequence[Swept], complete: bool) -> dict[str, Any]:
    """Return everything as plain data; `complete`: all that was asked for is there."""
    told: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": host,
        "complete": complete,
        "simulator": [one.to_json() for one in begins],
        "mount": [one.to_json() for one in sweeps],
    }
    return with_bars(results.rounded(told), bars(told))


def bars(told: dict[str, Any]) -> list[Bar]:
    """Return the bars: how far simulator and mount are from formula (1), as a share of its S, whichever side."""
    what = "where stalls begin, off formula (1) by"
    found = []
    for one in told["simulator"]:
        name = f"{one['case']['name']}, {one['policy']}"
        text, value = f"{name}: {what}", abs(one["difference"])
        found.append(Bar(3, name, text, value, "<=", AGREE, COMMAND, kind="modelled"))
    for one in told["mount"]:
        name = f"{one['sweep']['mode']}, {one['sweep']['name']}"
        found.append(Bar(3, name, f"mount, {name}: {what}", abs(one["difference"]), "<=", AGREE, COMMAND))
    return found


def simulated_table(begins: Sequence[Begin]) -> Table:
    """Return formula against simulator, a row per case and policy."""
    made = Table(
        title="where stalls begin: formula (1) and simulator (modelled), blocks of 4 KiB",
        caption="expected: the formula's S; for llmcache the --cache that `llmcache size` advises, window included",
    )
    for name in ("case", "policy", "loop N", "formula S", "expected", "simulator", "difference", ""):
        made.add_column(name, justify="left" if name in ("case", "policy", "") else "right")
    for one in begins:
        cells = (one.case.loop_blocks, one.case.formula_blocks, one.expected_blocks, one.simulated_blocks)
        made.add_row(one.case.name, one.policy, *map(str, cells), f"{one.difference:+.2%}", _verdict(one.difference))
    return made


def mounted_table(sweeps: Sequence[Swept]) -> Table:
    """Return formula against mount, a row per mode."""
    made = Table(
        title="where stalls begin: formula (1) (modelled) and a real mount (measured)",
        caption="BW and T are measured, T without a throttle; the mount's S is where passes stop getting shorter",
    )
    for name in (
        "loop",
        "mode",
        "loop MB",
        "BW MB/s",
        "T s",
        "formula S MB",
        "advised --cache MB",
        "mount S MB",
        "difference",
        "",
    ):
        made.add_column(name, justify="left" if name in ("loop", "mode", "") else "right")
    for one in sweeps:
        sizes = (one.formula_bytes, one.advised_bytes, one.knee.cache_bytes)
        made.add_row(
            one.sweep.name,
            one.sweep.mode,
            f"{one.sweep.loop_bytes / 1e6:.1f}",
            f"{one.bandwidth / 1e6:.1f}",
            f"{one.period_s:.4f}",
            *(f"{size / 1e6:.1f}" for size in sizes),
            f"{one.difference:+.2%}",
            _verdict(one.difference),
        )
    return made


def _verdict(difference: float) -> str:
    return verdict(abs(difference) <= AGREE)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if formula, simulator and mount agree, 1 if not, 3 if the machine cannot run it."""
    args = arguments(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        with one_interrupt():
            return run(args, console)
    except BenchError as error:
        print(f"tools/bench/size: error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("tools/bench/size: interrupted", file=sys.stderr)
        return 3
