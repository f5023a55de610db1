"""The benchmark of SpillCache in transformers: the recall model's answers, then memory and time against DynamicCache.

Answers: the model of tests/fixtures/recall, asked by `llmcache.kv.bench.task`. Times: a model with random weights, of the
shape of two layers of Llama-3.1-8B, behind prompts of keys and values drawn by chance; nothing of them is alike, so what
is chosen lies scattered over the whole context, and no tree finds it: the worst case. All *measured* on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmcache.kv.bench import lengths
from llmcache.kv.bench.lengths import LengthRow
from llmcache.kv.bench.task import Candidate, TaskSetup, run
from llmcache.kv.bench.task_question import recall_model
from llmcache.kv.bench.task_results import STOCK, TaskBench

from . import machine
from .signals import one_interrupt
from .simulatebench import workplace

SCHEMA = "llmcache-bench-kvtransformers/1"
BUDGETS = (64, 128, 256)
RECALL_BAR, MEMORY_BAR, TIME_BAR = 0.99, 0.05, 1.5
RIVALS = ("quest", "h2o", "window")
BAR_TOKENS = 32768
TIMED = ("icecache", "quest", "hillinfer")
def _task(name: str, directory: Path, contexts: Sequence[int], policies: Sequence[str], cases: int) -> TaskBench:
    # One thread: products of so small a model take longer to share out than to do.
    return run(TaskSetup(name, recall_model(), contexts, policies, BUDGETS, directory, cases=cases, steps=4, threads=1))


def passkey(directory: Path, quick: bool) -> dict[str, Any]:
    """The least share of passkeys that IceCache finds, over all budgets, contexts and depths."""
    bench = _task("passkey", directory, (1024,) if quick else (1024, 2048, 4096), ("icecache",), 1 if quick else 5)
    rows = [row for row in bench.rows if row.policy == "icecache"]
    least = min(share for row in rows for share in row.answers.by_depth().values())
    questions = sum(row.answers.questions for row in rows)
    return {
        "what": f"least share of passkeys found at any depth, budget and context ({questions} questions)",
        "figure": least, "sense": ">=", "bar": 1.0, "passed": least >= 1, "run": bench.document(),
    }  # fmt: skip


def recall(directory: Path, quick: bool) -> dict[str, Any]:
    """IceCache's answers at a budget of 256 beside the full cache's; and whether it beats its rivals at equal budgets."""
    contexts, policies = (1024,) if quick else (1024, 2048, 4096), ("icecache", *RIVALS)
    bench = _task("recall", directory, contexts, policies, 2 if quick else 16)
    own = [row for row in bench.rows if row.policy == "icecache" and row.budget == BUDGETS[-1]]
    least = min(row.answers.share / bench.stock(row.context).answers.share for row in own)
    return {
        "what": "right answers at a budget of 256, of those with the full cache; least of all contexts",
        "figure": least, "sense": ">=", "bar": RECALL_BAR, "passed": least >= RECALL_BAR, "run": bench.document(),
    }  # fmt: skip


def rivals(of_recall: dict[str, Any]) -> dict[str, Any]:
    """By how much IceCache is better than the best of its rivals, least of all budgets and contexts."""
    shares: dict[tuple[int, int], dict[str, float]] = {}
    for row in of_recall["run"]["rows"]:
        shares.setdefault((row["context"], row["budget"]), {})[row["policy"]] = row["answers"]["share"]
    leads = [one["icecache"] - max(one[rival] for rival in RIVALS) for one in shares.values() if "icecache" in one]
    return {
        "what": f"right answers more than the best of {', '.join(RIVALS)}, least of all budgets and contexts",
        "figure": min(leads), "sense": ">", "bar": 0.0, "passed": min(leads) > 0,
    }  # fmt: skip


def by_length(directory: Path, quick: bool, threads: int) -> list[LengthRow]:
    """Time of a token and memory of each cache by length."""
    everyone = [Candidate(STOCK, None), *(Candidate(policy, BUDGETS[-1]) for policy in TIMED)]
    if quick:
        return lengths.measure(lengths.SMALL, (1024, 2048), everyone, directory, 4, threads)
    at = (2048, 4096, 8192, 16384, BAR_TOKENS, 2 * BAR_TOKENS)
    return lengths.measure(lengths.SHAPE, at, everyone, directory, 12, threads)


def _told(row: LengthRow, stock: LengthRow) -> dict[str, Any]:
    return {
        "tokens": row.tokens, "policy": row.policy, **asdict(row.memory), "tpot_ns": row.speed.tpot_ns,
        "parts_ns": dict(row.speed.parts_ns), "kv_share": row.kv_share(stock), "times_stock": row.times(stock),
        "share_with_index": row.share_with_index(stock), "why": list(row.whys), "moved_bytes": dict(row.moved_bytes),
    }  # fmt: skip


def against_stock(rows: list[LengthRow]) -> dict[str, dict[str, Any]]:
    """The bars of memory and time, by policy, and from which length on a policy is faster than DynamicCache."""
    at = BAR_TOKENS if any(row.tokens == BAR_TOKENS for row in rows) else max(row.tokens for row in rows)
    stock = lengths.stock_at(rows, at)
    there = {row.policy: row for row in rows if row.tokens == at}
    share, times = there["icecache"].kv_share(stock), there["icecache"].times(stock)
    with_index = ", ".join(f"{policy} {there[policy].share_with_index(stock):.1%}" for policy in TIMED)
    faster = {policy: lengths.faster_from(rows, policy) for policy in TIMED}
    told = ", ".join(f"{policy} from {'none measured' if none is None else f'{none:,}'}" for policy, none in faster.items())
    each = ", ".join(f"{policy} {there[policy].times(stock):.2f}" for policy in TIMED)
    return {
        "memory": {
            "what": f"pages of keys and values in memory, of DynamicCache's, at {at:,} tokens; with index: {with_index}",
            "figure": share, "sense": "<=", "bar": MEMORY_BAR, "passed": share <= MEMORY_BAR,
        },
        "time": {
            "what": f"time of a token, of DynamicCache's, at {at:,} tokens: {each}",
            "figure": times, "sense": "<=", "bar": TIME_BAR, "passed": times <= TIME_BAR,
        },
        "faster": {
            "what": f"tokens from which on a token is faster than with DynamicCache: {told}",
            "figure": faster["icecache"] or 0, "sense": ">", "bar": 0, "passed": faster["icecache"] is not None,
            "by_policy": faster, "rows": [_told(row, lengths.stock_at(rows, row.tokens)) for row in rows],
        },
    }  # fmt: skip


def measure(directory: Path, quick: bool, threads: int, console: Console) -> dict[str, Any]:
    """Return the figures of all parts."""
    begin = time.monotonic()
    with workplace(directory) as scratch:
        parts: dict[str, Any] = {"passkey": passkey(scratch, quick), "recall": recall(scratch, quick)}
        parts["rivals"] = rivals(parts["recall"])
        console.print(f"answers: {time.monotonic() - begin:.0f} s", soft_wrap=True)
        parts |= against_stock(by_length(scratch, quick, threads))
    console.print(f"all: {time.monotonic() - begin:.0f} s", soft_wrap=True)
    return parts


def table(parts: dict[str, Any]) -> Table:
    """Return the figures and their bars."""
    made = Table(title="SpillCache in transformers (measured)")
    for name in ("part", "figure", "bar", "", "what"):
        made.add_column(name, justify="left" if name in ("part", "", "what") else "right")
    for name, one in parts.items():
        verdict = "[green]pass[/green]" if one["passed"] else "[red]FAIL[/red]"
        made.add_row(name, f"{one['figure']:.4g}", f"{one['sense']} {one['bar']:g}", verdict, one["what"])
    return made


def lengths_table(parts: dict[str, Any]) -> Table:
    """Return memory and time by length."""
    made = Table(title="Against DynamicCache by length")
    for name in ("tokens", "cache", "ms a token", "times stock", "KV in memory", "with index"):
        made.add_column(name, justify="left" if name == "cache" else "right")
    for row in parts["faster"]["rows"]:
        shares = (f"{row[name]:.1%}" for name in ("kv_share", "share_with_index"))
        made.add_row(
            f"{row['tokens']:,}", row["policy"], f"{row['tpot_ns'] / 1e6:.1f}", f"{row['times_stock']:.2f}", *shares
        )
    return made


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every bar is reached, 1 if not."""
    parser = argparse.ArgumentParser(prog="tools/bench/kvtransformers", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the spill files go (3 GB)")
    parser.add_argument("--threads", type=int, default=2, help="of torch and of each kernel, where times are compared")
    parser.add_argument("--quick", action="store_true", help="small and short: for a look, not for the bars")
    parser.add_argument("--json", type=Path, help="write everything here")
    args = parser.parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    import torch

    torch.set_num_threads(args.threads)
    try:
        with one_interrupt():
            parts = measure(args.dir, args.quick, args.threads, console)
    except KeyboardInterrupt:
        console.print("interrupted: nothing is written")
        return 1
    about = {"schema": SCHEMA, "machine": machine.describe(args.dir), "quick": args.quick, "threads": args.threads}
    told = {**about, "torch": torch.__version__, "shape": lengths.SMALL if args.quick else lengths.SHAPE, "parts": parts}
    console.print(table(parts), lengths_table(parts))
    if args.json:
        part = args.json.with_name(args.json.name + ".part")
        part.write_text(json.dumps(told, indent=1) + "\n")
        part.replace(args.json)
    return 0 if all(one["passed"] for one in parts.values()) else 1
