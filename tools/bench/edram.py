"""Measure how long the accelerator model takes on this machine. Its results are modelled."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator

from rich.console import Console

from llmcache.papers.edram.accelerator import Axes, evaluate
from llmcache.papers.edram.systems import MODELS, SYSTEMS, WORKLOADS
from llmcache.papers.edram.tables import swept
from llmcache.papers.reproduce import reproduce

from .harness import ROOT, common_options, in_turns, timed
from .results import Document, Target, markdown

SCHEMA = "llmcache-bench-edram/2"
CONFIGURATIONS = 10_000
SWEEP_TARGET_S = 5.0


def axes() -> Axes:
    """Return a sweep of 10,000 configurations: two models, the paper's workloads and systems, and five varied parameters."""
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
    """Return the measured functions by name; only "sweep" has a target."""
    made = axes()
    configurations = made.configurations()
    return {
        "sweep": lambda: swept(made, SYSTEMS["Original+SRAM"]),
        "evaluate": lambda: evaluate(configurations),
        "evaluate 100 of them, each step separately": lambda: evaluate(
            configurations[:: len(configurations) // 100], groups=None
        ),
        "command": _command,
        "reproduce kelle": lambda: reproduce("kelle", False, lambda _: None).page(),
    }


def _command() -> None:
    """Run a sweep of the same size from the command line, including imports and JSON."""
    numbers = ["--batch", "1,2,4,8,16", "--budget", "128,256,512,1024,2048", "--interval-scale", "0.1,0.25,0.5,1,2"]
    names = ["--model", "llama2-7b,llama3-8b", "--workload", "all", "--system", "all", "--dram-bw", "32GB/s,64GB/s"]
    command = [sys.executable, "-m", "llmcache", "edram", "sweep", *names, *numbers, "--json"]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, repeat=7)


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    """Yield the durations of all cases, run in turn."""
    seconds = in_turns({name: timed(run) for name, run in cases().items()}, args.repeat, console)
    rows = [{"case": name, "seconds": runs, "median_s": statistics.median(runs)} for name, runs in seconds.items()]
    yield {"configurations": CONFIGURATIONS, "cases": rows}


def targets(document: Document) -> list[Target]:
    (median,) = (one["median_s"] for one in document["cases"] if one["case"] == "sweep")
    what = f"sweep of the accelerator model over {document['configurations']:,} configurations"
    return [Target("sweep", what, median, "<", SWEEP_TARGET_S, unit="s")]


def table(document: Document) -> str:
    head = [f"accelerator model, {document['configurations']:,} configurations", "time s"]
    return markdown(head, [[one["case"], f"{one['median_s']:.2f}"] for one in document["cases"]])
