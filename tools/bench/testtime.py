"""Run tools/test several times, for its run time and to find tests that fail occasionally.

The last --loaded runs share the machine with two busy processes. --log takes the times of earlier runs from the last line
that pytest printed; the last --loaded of these ran under load.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from llmcache.errors import DataError

from .demotime import Run, timed
from .results import Document, Target

SCHEMA = "llmcache-bench-testtime/1"
TEST_TARGET_MIN = 10.0
TEST_RUNS, LOADED_RUNS = 10, 5
BUSY = 2  # busy processors during a run under load
_SUMMARY = re.compile(r"^=* ?(?:.*, )?(\d+) passed.* in ([\d.]+)s", re.MULTILINE)
_FAILED = re.compile(r"\b(\d+) (?:failed|errors?)\b")


@contextlib.contextmanager
def load(processors: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep this number of processors busy during the with block; yield the processes that do so."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(processors)]
    try:
        yield busy
    finally:
        for process in busy:
            process.kill()
            process.wait()


def suite_run(busy: int) -> Run:
    """Run the tests while other processes keep `busy` processors busy."""
    with load(busy):
        return {**timed(["tools/test"]), "busy": busy}


def of_log(path: Path) -> Run:
    """Return the run whose output is in a file; DataError without pytest's summary line."""
    found = list(_SUMMARY.finditer(path.read_text(errors="replace")))
    if not found:
        raise DataError(f"--log: {path} has no summary line of pytest", "it must hold the output of tools/test")
    last = found[-1]
    failed = _FAILED.search(last[0])
    return {"seconds": float(last[2]), "exit_code": 1 if failed else 0, "said": last[0].strip("= "), "log": path.name}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=TEST_RUNS, help="number of runs [%(default)s]")
    parser.add_argument("--loaded", type=int, default=LOADED_RUNS, help="number of runs under load [%(default)s]")
    parser.add_argument("--log", type=Path, nargs="+", help="output of finished runs to take the times from")


def measure(args: argparse.Namespace, _console: Console) -> Iterator[Document]:
    count = len(args.log) if args.log else args.runs
    loads = [BUSY if number >= count - args.loaded else 0 for number in range(count)]
    if args.log:
        yield {"runs": [{**of_log(path), "busy": busy} for path, busy in zip(args.log, loads, strict=True)]}
    else:
        yield {"runs": [suite_run(busy) for busy in loads]}


def targets(document: Document) -> list[Target]:
    runs = document["runs"]
    free = [run["seconds"] for run in runs if not run.get("busy")]
    longest = max(free, default=math.nan) / 60
    good = sum(run["exit_code"] == 0 for run in runs)
    wanted = max(TEST_RUNS, len(runs))
    return [
        Target(
            "suite", f"longest of {len(free)} runs of tools/test without load", longest, "<", TEST_TARGET_MIN, unit="min"
        ),
        Target("flakes", f"runs of tools/test without a failure, of {len(runs)}", good, ">=", wanted),
    ]
