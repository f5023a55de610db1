"""The mount benchmark's command line: plans the cases, runs them one after the other, reports as it goes."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from llmcache.fs.backends.files import SMALL_READ_AHEAD_KB

from . import machine, report, results
from .bars import exit_code
from .cases import CASES, Plan, experiments
from .errors import BenchError
from .experiment import Bench
from .mountbars import Result, bars
from .sides import Mounted, Plain, kernels
from .signals import one_interrupt


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="tools/bench/mount", description=__doc__)
    parser.add_argument("--model", type=Path, help="a Q8_0 GGUF (tools/make_model.py); without it no llama.cpp cases")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where loop files go (with --model: beside it)")
    parser.add_argument("--only", default="".join(CASES), help="cases to run, for example ac [%(default)s]")
    parser.add_argument("--match", default="", help="only experiments with this text in their name")
    parser.add_argument("--quick", action="store_true", help="smaller files, fewer steps")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each side, in turns")
    parser.add_argument("--fraction", type=float, default=0.75, help="S/N of the cases larger than memory")
    parser.add_argument("--threads", type=int, default=min(4, os.cpu_count() or 1), help="threads of llama.cpp")
    modes = "--mode of llmcachefs; given several times, each is a side of its own"
    parser.add_argument("--mode", choices=("auto", "inplace", "steer", "arena"), action="append", default=[], help=modes)
    parser.add_argument("--program", type=shlex.split, help="another program in place of llmcachefs, same arguments")
    parser.add_argument("--json", type=Path, help="write every run here, after every experiment")
    return parser.parse_args(argv)


@contextmanager
def workplace(args: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Yield (source, scratch): fresh directories on the disk of the model, removed at the end."""
    base = (args.model.resolve().parent if args.model else args.dir) / f".llmcache-bench-{os.getpid()}"
    source, scratch = base / "source", base / "scratch"
    try:
        source.mkdir(parents=True)
        scratch.mkdir()
        yield source, scratch
    finally:
        shutil.rmtree(base)


def sides(args: argparse.Namespace, source: Path) -> tuple[Plain | Mounted, ...]:
    """Return the page cache, and llmcachefs in each mode that was asked for."""
    command = tuple(args.program) if args.program else Mounted().command
    ahead = ("--read-ahead", f"{SMALL_READ_AHEAD_KB}Ki")  # as most machines have it: there it changes nothing
    options = {mode: ("--mode", mode, *(ahead if mode == "inplace" else ())) for mode in args.mode}
    modes = [Mounted(command, words, mode) for mode, words in options.items()]
    return (*kernels(source), *(modes or [Mounted(command)]))


def run(args: argparse.Namespace, console: Console) -> list[Result]:
    """Run what was asked for; returns what was measured, also after Ctrl-C."""
    measured: list[Result] = []
    with workplace(args) as (source, scratch):
        model = None
        if args.model is not None:
            model = source / args.model.name
            os.link(args.model.resolve(), model)
        host = machine.describe(source)
        bench = Bench(source, scratch, sides(args, source), args.repeat, console.print)
        plan = Plan(source, scratch, model, args.threads, args.fraction, args.quick)
        try:
            for experiment in experiments(plan, args.only):
                if args.match not in experiment.name:
                    continue
                console.print(f"({experiment.case}) {experiment.name}")
                measured.append(bench.measure(experiment).to_json())
                if args.json:
                    results.write(args.json, report.document(host, measured, complete=False))
            if args.json:
                results.write(args.json, report.document(host, measured, complete=True))
        except KeyboardInterrupt:
            console.print("interrupted: what follows is what was measured until then")
    return measured


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every bar is reached, 1 if not, 3 if the machine cannot run it."""
    args = arguments(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    try:
        with one_interrupt():
            measured = run(args, console)
    except BenchError as error:
        print(f"tools/bench/mount: error: {error}", file=sys.stderr)
        return 3
    judged = bars(measured)
    if measured:
        report.show(measured, judged, console)
    return exit_code(judged)
