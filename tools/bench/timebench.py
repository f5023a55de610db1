"""How long the project's two commands take: a second `tools/demo` (set up by the first one), and `tools/test`.

`tools/bench/demotime` and `tools/bench/testtime`. The tests take minutes a run, and as many runs are wanted as tell a test
that fails now and then; `--loaded` of them are beside a load of two busy processors. `testtime --log FILE…` takes the times
of runs that were made before from what pytest printed at their end.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from . import machine, results
from .bars import Bar, exit_code, with_bars
from .bars import table as bar_table
from .errors import BenchError
from .signals import one_interrupt

DEMO_SCHEMA, TEST_SCHEMA = "llmcache-bench-demotime/1", "llmcache-bench-testtime/1"
ROOT = Path(__file__).resolve().parents[2]
DEMO_BAR_S = 120.0
TEST_BAR_MIN = 10.0
TEST_RUNS, LOADED_RUNS = 10, 5
BUSY = 2  # processors, beside a run under load
_SUMMARY = re.compile(r"^=* ?(?:.*, )?(\d+) passed.* in ([\d.]+)s", re.MULTILINE)
_FAILED = re.compile(r"\b(\d+) (?:failed|errors?)\b")

Run = dict[str, Any]


def timed(command: Sequence[str]) -> Run:
    """Run a command; returns its seconds and exit code, and what it said last. What it prints goes to stderr."""
    begin = time.perf_counter()
    # a group of its own: an interrupt has to reach what the script has started, and only that
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        said = ""
        try:
            for line in process.stdout:
                said = line.strip() or said
                print(line, end="", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    return {"seconds": time.perf_counter() - begin, "exit_code": process.returncode, "said": said}


@contextlib.contextmanager
def load(processors: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep so many processors busy meanwhile, by the processes that are yielded."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(processors)]
    try:
        yield busy
    finally:
        for process in busy:
            process.kill()
            process.wait()


def suite_run(busy: int) -> Run:
    """Run the tests beside a load of `busy` processors."""
    with load(busy):
        return {**timed(["tools/test"]), "busy": busy}


def of_log(path: Path) -> Run:
    """Return the run whose output a file holds; BenchError without pytest's last line."""
    found = _SUMMARY.findall(path.read_text(errors="replace"))
    if not found:
        raise BenchError(f"--log: {path} does not hold the end of a run of pytest")
    last = [one for one in _SUMMARY.finditer(path.read_text(errors="replace"))][-1]
    failed = _FAILED.search(last[0])
    return {"seconds": float(last[2]), "exit_code": 1 if failed else 0, "said": last[0].strip("= "), "log": path.name}


def demo_bars(told: dict[str, Any]) -> list[Bar]:
    """Return the bars: the time of the second demo, and that it ended well."""
    last = told["runs"][-1]
    command = "tools/bench/demotime"
    return [
        Bar(8, "demo", "a second tools/demo", last["seconds"], "<", DEMO_BAR_S, command, unit="s"),
        Bar(8, "exit", "exit code of tools/demo", last["exit_code"], "<=", 0, command),
    ]


def suite_bars(told: dict[str, Any]) -> list[Bar]:
    """Return the bars: the longest run of the tests, and how many ended without a failure."""
    runs, command = told["runs"], "tools/bench/testtime"
    free = [run["seconds"] for run in runs if not run.get("busy")]
    longest = max(free, default=math.nan) / 60
    good = sum(run["exit_code"] == 0 for run in runs)
    wanted = max(TEST_RUNS, len(runs))
    return [
        Bar(8, "suite", f"longest of {len(free)} runs without load", longest, "<", TEST_BAR_MIN, command, unit="min"),
        Bar(8, "flakes", f"runs of tools/test without a failure, of {len(runs)}", good, ">=", wanted, command),
    ]


def finish(schema: str, runs: list[Run], path: Path | None) -> int:
    """Show and write the runs; returns the exit code."""
    host = machine.describe(ROOT)
    if any("log" in run for run in runs):
        host["commit"] = None  # of another tree, perhaps
    about = {"schema": schema, "machine": host, "runs": runs}
    told = results.rounded(about)
    judged = demo_bars(told) if schema == DEMO_SCHEMA else suite_bars(told)
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(bar_table(judged))
    if path:
        results.write(path, with_bars(told, judged))
    return exit_code(judged)


def demo_main(argv: list[str] | None = None) -> int:
    """Return 0 if every bar is reached, 1 if not."""
    parser = argparse.ArgumentParser(prog="tools/bench/demotime", description="Times a second tools/demo.")
    parser.add_argument("--fresh", action="store_true", help="run it once before, where it has not run yet")
    parser.add_argument("--json", type=Path, help="write it here")
    args = parser.parse_args(argv)
    with one_interrupt():
        runs = [timed(["tools/demo"]) for _ in range(2 if args.fresh else 1)]
    return finish(DEMO_SCHEMA, runs, args.json)


def suite_main(argv: list[str] | None = None) -> int:
    """Return 0 if every bar is reached, 1 if not, 3 if a log is of no use."""
    parser = argparse.ArgumentParser(prog="tools/bench/testtime", description="Times tools/test.")
    parser.add_argument("--runs", type=int, default=TEST_RUNS, help="how often to run it")
    parser.add_argument("--loaded", type=int, default=LOADED_RUNS, help="how many of them beside two busy processors")
    parser.add_argument("--log", type=Path, nargs="+", help="take the times of finished runs from their output")
    parser.add_argument("--json", type=Path, help="write it here")
    args = parser.parse_args(argv)
    try:
        with one_interrupt():
            loads = [BUSY if number >= args.runs - args.loaded else 0 for number in range(args.runs)]
            runs = [of_log(path) for path in args.log] if args.log else [suite_run(busy) for busy in loads]
    except (BenchError, OSError) as error:
        print(f"tools/bench/testtime: error: {error}", file=sys.stderr)
        return 3
    return finish(TEST_SCHEMA, runs, args.json)
