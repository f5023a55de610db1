"""Runs every benchmark, one after the other, and puts every bar of every issue into all.json and all.html.

A benchmark that fails stops no other. Exit code: 0 if every bar is reached, 1 if one is not, 2 usage, 3 if a benchmark
failed or has no results. All that is printed goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from . import results, suitereport
from .bars import exit_code
from .bars import table as bar_table
from .demo import make_model
from .errors import BenchError
from .signals import one_interrupt
from .suite import BUSY_SHARE, MODEL, NAMES, ROOT, Benchmark, chosen, now, run
from .suitereport import Suite

MODELS = Path.home() / ".cache" / "llmcache" / "models"
MODEL_SIZE = "700M"
FAILED = 3


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="tools/bench/all", description=__doc__)
    every = f"run these: {', '.join(NAMES)} (testtime only if named here)"
    parser.add_argument("--only", type=_names, default=[], metavar="NAME,…", help=every)
    parser.add_argument("--skip", type=_names, default=[], metavar="NAME,…", help="run all but these")
    parser.add_argument("--quick", action="store_true", help="small and short: for a look, not for the bars")
    parser.add_argument("-o", dest="out", type=Path, help="where the JSON and the page go [build/bench; with --from, there]")
    parser.add_argument("--force", action="store_true", help="replace results that are there")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was cut off: keep what it has done")
    again = "run nothing: make the page from the JSON in DIR"
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help=again)
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    return text.split(",")


def model_for(benchmarks: Sequence[Benchmark], say: Console) -> Path | None:
    """Return the demo's model if a benchmark needs it; it is generated once and then kept."""
    if not any(MODEL in one.words for one in benchmarks):
        return None
    say.print(f"model: {MODELS}", soft_wrap=True)
    return make_model(MODELS, MODEL_SIZE)


def done_since(directory: Path, started: str) -> list[str]:
    """Return the benchmarks with whole results that were begun after `started`."""
    documents = suitereport.read(directory).documents
    about = {name: document.get("run", {}) for name, document in documents.items()}
    return [name for name, told in about.items() if told.get("started", "") >= started and not told.get("quick")]


def run_all(args: argparse.Namespace, out: Path, say: Console) -> tuple[Suite, bool]:
    """Run what was asked for; all.json and all.html are written after each. Returns all results, and if any failed."""
    benchmarks = chosen(args.only, args.skip, args.quick)
    started = now()
    if args.resume:
        if not (out / "all.json").exists():
            raise BenchError(f"--resume: there is no run to go on with in {out}", "leave --resume out")
        started = str(results.read(out / "all.json")["started"])
        benchmarks = [one for one in benchmarks if one.name not in done_since(out, started)]
    there = [one.name for one in benchmarks if (out / f"{one.name}.json").exists()]
    if there and not (args.force or args.resume):
        raise BenchError(f"{out} has results of {', '.join(there)}", "--force replaces them, -o DIR writes elsewhere")
    out.mkdir(parents=True, exist_ok=True)
    errors: dict[str, str] = {}
    model = model_for(benchmarks, say)
    suitereport.write(suitereport.read(out, errors, started), out)
    for number, one in enumerate(benchmarks, 1):
        say.rule(f"{number} of {len(benchmarks)}: {one.name}", align="left")
        try:
            told = run(one, out, args.quick, model)["run"]
        except (BenchError, OSError, ValueError) as error:
            errors[one.name] = str(error)
            say.print(f"{one.name} FAILED: {error}", soft_wrap=True)
        else:
            busy = ", on a machine that was BUSY before" if told["busy_share"] > BUSY_SHARE else ""
            before, after = told["load"]
            say.print(f"{one.name}: {told['seconds']:.0f} s, load {before:.1f} to {after:.1f}{busy}", soft_wrap=True)
        suitereport.write(suitereport.read(out, errors, started), out)
    return suitereport.read(out, errors, started), bool(errors)


def recorded(args: argparse.Namespace) -> tuple[Suite, bool]:
    """Return the results in a directory, and if a benchmark that is run without being asked for has none."""
    before = args.source / "all.json"
    suite = suitereport.read(args.source, started=results.read(before)["started"] if before.exists() else "")
    if not suite.documents:
        raise BenchError(f"--from: {args.source} holds no results", f"files are named {NAMES[0]}.json and so on")
    return suite, any(not one.asked for one in suite.missing)


def check(args: argparse.Namespace) -> Path:
    """Return where to write; BenchError for what does not go together."""
    if args.source and (args.only or args.skip or args.resume or args.quick):
        raise BenchError("--from runs nothing", "leave --only, --skip, --quick and --resume out")
    if args.only and args.skip:
        raise BenchError("--only and --skip exclude each other", "name with --only what is to run")
    if args.resume and args.quick:
        raise BenchError("--quick and --resume exclude each other", "a quick look is run again")
    out: Path = args.out or args.source or ROOT / "build" / "bench"
    if args.quick and out.resolve() == results.DIRECTORY:
        raise BenchError("-o: a quick look is nothing to record", "leave --quick out")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, 1, 2 or 3: see above."""
    args = arguments(argv)
    say = Console(highlight=False, stderr=True, width=None if sys.stderr.isatty() else 120)
    try:
        with one_interrupt():
            out = check(args)
            suite, failed = recorded(args) if args.source else run_all(args, out, say)
    except BenchError as error:
        print(f"tools/bench/all: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tools/bench/all: interrupted; --resume goes on", file=sys.stderr)
        return FAILED
    out.mkdir(parents=True, exist_ok=True)
    suitereport.write(suite, out)
    missed = [bar for _, bar in suite.bars if not bar.passed]
    if missed:
        say.print(bar_table(missed))
    say.print(f"{len(suite.bars) - len(missed)} of {len(suite.bars)} bars reached: {out / 'all.html'}", soft_wrap=True)
    return FAILED if failed else exit_code(missed)
