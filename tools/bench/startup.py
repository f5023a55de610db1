"""Measure how long each command takes to print its help, and how long `llmcache size` takes.

Each run is a new process whose files are in the page cache. Runs are interleaved, so that other load affects all commands
alike.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

from rich.console import Console

from llmcache.cli import app
from tools.make_man import walk

from .harness import ROOT, in_turns
from .results import Document, Target

SCHEMA = "llmcache-bench-startup/1"
START_TARGET_S = 0.3
SIZE = ("size", "--bw", "100", "--loop", "70M")


def run(words: tuple[str, ...]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "llmcache", *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=5, help="runs of each command, interleaved [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="one run of each command; not comparable with the targets")


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    commands = ["llmcache", *(words for words, _ in walk(app, "llmcache"))]
    arguments = [*((*words.split()[1:], "--help") for words in commands), SIZE]
    runs = {" ".join(("llmcache", *words)): partial(run, words) for words in arguments}
    seconds = in_turns(runs, 1 if args.quick else args.repeat, console)
    yield {"commands": [{"command": command, "seconds": times} for command, times in seconds.items()]}


def targets(document: Document) -> list[Target]:
    medians = {row["command"]: statistics.median(row["seconds"]) for row in document["commands"]}
    size = medians.pop(" ".join(("llmcache", *SIZE)))
    slowest = max(medians, key=lambda command: medians[command])
    what = f"start-up of the slowest of {len(medians)} commands: {slowest}"
    answer = f"run time of llmcache {' '.join(SIZE)}"
    return [
        Target("help", what, medians[slowest], "<", START_TARGET_S, unit="s"),
        Target("size", answer, size, "<", START_TARGET_S, unit="s"),
    ]
