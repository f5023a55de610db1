"""Measure the run time of tools/demo when everything that it needs is installed."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from .harness import ROOT
from .results import Document, Target

SCHEMA = "llmcache-bench-demotime/1"
DEMO_TARGET_S = 120.0

Run = dict[str, Any]


def timed(command: Sequence[str]) -> Run:
    """Run a command, copying its output to stderr; return its duration, exit code and last line of output."""
    begin = time.perf_counter()
    # its own process group: an interrupt must reach everything that the script has started, and nothing else
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


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fresh", action="store_true", help="run it once before, to install what it needs")


def measure(args: argparse.Namespace, _console: Console) -> Iterator[Document]:
    yield {"runs": [timed(["tools/demo"]) for _ in range(2 if args.fresh else 1)]}


def targets(document: Document) -> list[Target]:
    last = document["runs"][-1]
    return [
        Target("demo", "run time of a second tools/demo", last["seconds"], "<", DEMO_TARGET_S, unit="s"),
        Target("exit", "exit code of tools/demo", last["exit_code"], "<=", 0),
    ]
