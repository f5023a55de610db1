"""Measure the answers of the recall model at several KV budgets: passkey and recall tasks.

Nothing is timed, so both tasks run at the same time, each in its own process.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from llmcache.kv.bench.results import TaskBench
from llmcache.kv.bench.task import TaskSetup, run
from llmcache.kv.tasks import RECALL_MODEL

from .harness import ROOT, common_options, workplace
from .results import Document

SCHEMA = "llmcache-bench-kvanswers/1"
HEAD = "measured, recall model"
BUDGETS = (64, 128, 256)
CONTEXTS = (1024, 2048, 4096)
RIVALS = ("quest", "h2o", "window")
TARGETS = {"passkey": (">=", 1.0), "recall": (">=", 0.99), "rivals": (">", 0.0)}


def setups(quick: bool, directory: Path) -> list[TaskSetup]:
    """Return the tasks of a full or quick run. They use one thread, because the model is too small to gain from more."""
    contexts = CONTEXTS[:1] if quick else CONTEXTS
    tasks = (("passkey", ("icecache",), 1 if quick else 5), ("recall", ("icecache", *RIVALS), 2 if quick else 16))
    return [
        TaskSetup(name, RECALL_MODEL, contexts, policies, BUDGETS, directory, cases=cases, steps=4, threads=1)
        for name, policies, cases in tasks
    ]


def document(bench: TaskBench) -> dict[str, Any]:
    """Return the results without times and without paths of this machine."""
    whole = bench.document()
    kept = {key: value for key, value in whole["conditions"].items() if key != "spill files"}
    wanted = ("policy", "context", "budget", "answers", "attention")
    rows = [{key: row[key] for key in wanted} for row in whole["rows"]]
    return {**whole, "conditions": {**kept, "model": str(RECALL_MODEL.relative_to(ROOT))}, "rows": rows}


def passkey(bench: TaskBench) -> dict[str, Any]:
    """Return the smallest share of passkeys that IceCache finds, over all budgets, contexts and depths."""
    rows = [row for row in bench.rows if row.policy == "icecache"]
    least = min(share for row in rows for share in row.answers.by_depth().values())
    questions = sum(row.answers.questions for row in rows)
    what = f"smallest share of passkeys found at any depth, budget and context ({questions} questions)"
    return {"what": what, "figure": least, "run": document(bench)}


def recall(bench: TaskBench) -> dict[str, Any]:
    """Return IceCache's correct answers at the largest budget, relative to the full cache, in the worst context."""
    own = [row for row in bench.rows if row.policy == "icecache" and row.budget == BUDGETS[-1]]
    least = min(row.answers.share / bench.stock(row.context).answers.share for row in own)
    what = "correct answers at a budget of 256 / with the full cache, worst context"
    return {"what": what, "figure": least, "run": document(bench)}


def rivals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the smallest lead of IceCache over the best of `RIVALS`, over all budgets and contexts."""
    shares: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        shares.setdefault((row["context"], row["budget"]), {})[row["policy"]] = row["answers"]["share"]
    leads = [one["icecache"] - max(one[rival] for rival in RIVALS) for one in shares.values() if "icecache" in one]
    what = f"share of correct answers above the best of {', '.join(RIVALS)}, smallest over budgets and contexts"
    return {"what": what, "figure": min(leads)}


def options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "the spill files", "one context, few questions")


def measure(args: argparse.Namespace, _console: Console) -> Iterator[Document]:
    # spawn, because torch's threads do not survive a fork
    with workplace(args.dir) as scratch, ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        passkeys, recalls = pool.map(run, setups(args.quick, scratch))
    parts = {"passkey": passkey(passkeys), "recall": recall(recalls)}
    yield {"quick": args.quick, "parts": {**parts, "rivals": rivals(parts["recall"]["run"]["rows"])}}
