"""SpillCache in transformers: memory and time against DynamicCache, *measured* on this machine.

The model has random weights and the shape of two layers of Llama-3.1-8B; prompts are keys and values drawn by chance.
Nothing of them is alike, so what is chosen lies scattered over the whole context, and no tree finds it: the worst case.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from llmcache.kv.bench import lengths
from llmcache.kv.bench.lengths import LengthRow
from llmcache.kv.bench.results import STOCK
from llmcache.kv.bench.task import Candidate

from .harness import workplace
from .results import Document

SCHEMA = "llmcache-bench-kvtransformers/2"
HEAD = "measured, in transformers"
BUDGET = 128
"""As where `kvmodels` asks for little memory."""
BARS = {"memory": ("<=", 0.05), "memory_with_index": ("<=", 0.05), "time": ("<=", 1.5), "faster": (">", 0.0)}
"""Of faster, tokens: there is such a length."""
BAR_TOKENS = 32768
LENGTHS = (2048, 4096, 8192, 16384, BAR_TOKENS, 2 * BAR_TOKENS)
PACKED = "icecache-packed"
"""Its index in little memory: where no tree finds anything, `icecache` keeps all keys, which is half of everything."""
TIMED = ("icecache", PACKED, "quest", "hillinfer")


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
        "memory": {"what": f"pages of keys and values in memory, of DynamicCache's, at {at:,} tokens", "figure": share},
        "memory_with_index": {
            "what": f"pages and index in memory, of DynamicCache's, at {at:,} tokens: {with_index}; {PACKED}'s",
            "figure": there[PACKED].share_with_index(stock),
        },
        "time": {"what": f"time of a token, of DynamicCache's, at {at:,} tokens: {each}", "figure": times},
        "faster": {
            "what": f"tokens from which on a token is faster than with DynamicCache: {told}",
            "figure": faster["icecache"] or 0, "by_policy": faster,
            "rows": [_told(row, lengths.stock_at(rows, row.tokens)) for row in rows],
        },
    }  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the spill files go (3 GB)")
    parser.add_argument("--threads", type=int, default=2, help="of torch and of each kernel, where times are compared")
    parser.add_argument("--quick", action="store_true", help="small and short: for a look, not for the bars")


def measure(args: argparse.Namespace, _console: Console) -> Iterator[Document]:
    import torch

    torch.set_num_threads(args.threads)
    with workplace(args.dir) as scratch:
        everyone = [Candidate(STOCK, None), *(Candidate(policy, BUDGET) for policy in TIMED)]
        shape, at, steps = (lengths.SMALL, (1024, 2048), 4) if args.quick else (lengths.SHAPE, LENGTHS, 12)
        parts = against_stock(lengths.measure(shape, at, everyone, scratch, steps, args.threads))
    about = {"quick": args.quick, "threads": args.threads, "torch": torch.__version__}
    yield {**about, "shape": shape, "parts": parts}
