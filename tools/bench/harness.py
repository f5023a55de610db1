"""Runs a benchmark: a module of this package that measures, judges its measurements and shows them.

A benchmark `tools/bench NAME` writes the results file NAME.json. Its module has a docstring, which is its help, and

    SCHEMA                    name and version of the results
    options(parser)           adds options besides --json; the disk of `--dir` is recorded in the results
    measure(args, console)    yields all measurements, ready for JSON; partial ones have "complete": False
    targets(document)         returns the targets; or `TARGETS` has sense and limit for each of the "parts"
    table(document)           returns the results in Markdown, for the terminal and docs; by default a table of the targets,
                              headed `HEAD`
    figures(document)         returns further figures for the docs, by name: numbers or text (optional)

After an interrupt the benchmark cleans up, and keeps the results that it has written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import TypeVar

from platformdirs import user_cache_path
from rich.console import Console
from rich.markdown import Markdown

from llmcache.errors import LlmcacheError, UsageError

from . import machine
from .results import DIRECTORY, Document, Target, exit_code, part_targets, rounded, targets_table, write

ROOT = Path(__file__).resolve().parents[2]
Side = TypeVar("Side")
MODELS = user_cache_path("llmcache") / "models"
"""Generated and downloaded models are kept here between runs."""


def targets_of(bench: ModuleType, document: Document) -> list[Target]:
    """Return the targets of a benchmark, judged by its results."""
    return list(bench.targets(document)) if hasattr(bench, "targets") else part_targets(document, bench.TARGETS)


def shown(bench: ModuleType, document: Document) -> str:
    return str(bench.table(document)) if hasattr(bench, "table") else _table(bench, document)


def _table(bench: ModuleType, document: Document) -> str:
    return targets_table(targets_of(bench, document), getattr(bench, "HEAD", "figure"))


def run(bench: ModuleType, argv: Sequence[str] | None = None) -> int:
    """Return 0 if all targets are met, 1 if not, 2 on a usage error, 3 if the machine cannot run the benchmark."""
    name = f"tools/bench {bench.__name__.rpartition('.')[2]}"
    parser = argparse.ArgumentParser(prog=name, description=bench.__doc__)
    bench.options(parser)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--force", action="store_true", help="record results of a tree that differs from its commit")
    args = parser.parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    written: Document | None = None
    try:
        check_commit(args.json.parent if args.json else None, args.force)
        with one_interrupt():
            for measured in bench.measure(args, console):
                written = rounded(
                    {"schema": bench.SCHEMA, "machine": machine.describe(getattr(args, "dir", ROOT)), **measured}
                )
                if args.json:
                    write(args.json, written)
    except LlmcacheError as error:
        report(name, error)
        return error.exit_code
    except KeyboardInterrupt:
        console.print("interrupted" + (": nothing was written" if written is None else ""))
        if written is None:
            return 1
    assert written is not None
    for text in dict.fromkeys((shown(bench, written), _table(bench, written))):
        console.print(Markdown(text))
    return exit_code(targets_of(bench, written)) if written.get("complete", True) else 1


def check_commit(directory: Path | None, force: bool) -> None:
    """Raise a UsageError if results in `directory` would be recorded from a tree that differs from its commit."""
    if directory is None or directory.resolve() != DIRECTORY or force:
        return
    if (commit := machine.commit()) is None or commit.endswith("-dirty"):
        hint = "commit first; --force records them, and their commit ends in -dirty"
        raise UsageError(f"{DIRECTORY}: results are recorded from a commit, and this tree has changes", hint)


def report(name: str, error: LlmcacheError) -> None:
    """Print an error of the command `name` on stderr."""
    print(f"{name}: error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)


def measured_apart(module: str, *words: object, packages: Path | None = None) -> Document:
    """Run a module as a program in its own process, so that its memory can be measured; return the JSON that it prints.

    `packages`: a directory that precedes the environment's packages.
    """
    command = [sys.executable, "-m", f"tools.bench.{module}", *map(str, words)]
    paths = [str(one) for one in (packages, os.environ.get("PYTHONPATH")) if one]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    printed: Document = json.loads(done.stdout)
    return printed


def turns(sides: Sequence[Side], repeat: int) -> Iterator[tuple[int, Side]]:
    """Yield every side `repeat` times, with the number of the round, so that other load affects all sides alike.

    The order is reversed in every second round, so that no side always runs right after the same other one.
    """
    for number in range(repeat):
        for side in sides if number % 2 == 0 else sides[::-1]:
            yield number, side


def in_turns(runs: Mapping[str, Callable[[], float]], repeat: int, console: Console) -> dict[str, list[float]]:
    """Return the seconds of `repeat` calls of each function in turn, after one that compiles and fills the page cache."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number, name in turns([*runs], repeat + 1):
        took = runs[name]()
        seconds[name] += [took] if number else []
        console.print(f"{name}, run {number} of {repeat}" if number else f"{name}, warm-up", soft_wrap=True)
    return seconds


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Return a function that calls `run` and returns its seconds."""

    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds


def common_options(parser: argparse.ArgumentParser, files: str = "", quick: str = "", repeat: int = 0) -> None:
    """Add --dir for `files`, --quick with what it changes, and --repeat with its default; those that are given."""
    if files:
        about = f"directory for {files} [%(default)s]"
        parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help=about)
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick}; not comparable with the targets")
    if repeat:
        parser.add_argument("--repeat", type=int, default=repeat, help="runs of each case, interleaved [%(default)s]")


@contextmanager
def workplace(directory: Path) -> Iterator[Path]:
    """Yield a new directory below `directory`, and remove it at the end."""
    scratch = directory / f".llmcache-bench-{os.getpid()}"
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for the first SIGINT, SIGTERM or SIGHUP; on later ones only print that cleanup continues."""
    seen = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            print("still unmounting and removing cgroups ...", file=sys.stderr, flush=True)
            return
        seen = True
        raise KeyboardInterrupt

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, action in old.items():
            signal.signal(number, action)
