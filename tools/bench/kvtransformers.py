"""Compare SpillCache with DynamicCache in transformers: memory and time, measured on this machine.

The model has random weights and the shape of two layers of Llama-3.1-8B. The synthetic prompts are random keys and values.
This is the worst case for selection and fetches: the selected tokens are scattered over the whole context, and no tree finds
them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from llmcache.kv.bench.results import STOCK, KvMemory, Speed
from llmcache.kv.bench.synthetic import Progress, per_step
from llmcache.kv.bench.task import Candidate, in_turns

from .harness import common_options, workplace
from .results import Document

if TYPE_CHECKING:
    from llmcache.kv.bench.subject import Run

SCHEMA = "llmcache-bench-kvtransformers/2"
HEAD = "measured, in transformers"
BUDGET = 128
"""The same as in `kvmodels` for little memory."""
TARGETS = {"memory": ("<=", 0.05), "memory_with_index": ("<=", 0.05), "time": ("<=", 1.5), "faster": (">", 0.0)}
"""For `faster`, the figure is the shortest context at which a token is faster, 0 if there is none."""
TARGET_TOKENS = 32768
LENGTHS = (2048, 4096, 8192, 16384, TARGET_TOKENS, 2 * TARGET_TOKENS)
PACKED = "icecache-packed"
"""Uses an index of 2 bits per number. On random keys `icecache` uses no tree and keeps all keys, half of the cache, in
memory.
"""
TIMED = ("icecache", PACKED, "quest", "hillinfer")

SHAPE: dict[str, int] = {
    "vocab_size": 1024, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "num_hidden_layers": 2, "max_position_embeddings": 1 << 20,
}  # fmt: skip
"""Two layers of Llama-3.1-8B in float32: 1.8 GB."""
SMALL: dict[str, int] = {
    **SHAPE, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 2816,
    "num_hidden_layers": 4,
}  # fmt: skip
"""Four layers with the same number of query heads per key head, a quarter as wide: 0.2 GB."""


@dataclass(frozen=True)
class LengthRow:
    """One cache at one context length. `moved_bytes`: per step, by link. `whys`: the scorer of each layer, and why."""

    tokens: int
    policy: str
    title: str
    speed: Speed
    memory: KvMemory
    moved_bytes: Mapping[str, float]
    whys: Sequence[str] = ()

    def document(self, stock: LengthRow) -> dict[str, Any]:
        """Return plain data, with figures relative to `stock`, the cache of transformers."""
        return {
            **asdict(self), "times_stock": self.times(stock), "kv_share": self.kv_share(stock),
            "share_with_index": self.share_with_index(stock),
        }  # fmt: skip

    def times(self, stock: LengthRow) -> float:
        return self.speed.tpot_ns / stock.speed.tpot_ns

    def kv_share(self, stock: LengthRow) -> float:
        return self.memory.kv_bytes / stock.memory.kv_bytes

    def share_with_index(self, stock: LengthRow) -> float:
        """Return the memory of keys, values and the index of the policy relative to `stock`."""
        return (self.memory.kv_bytes + self.memory.index_bytes) / stock.memory.kv_bytes


def by_length(
    shape: Mapping[str, int], lengths: Sequence[int], everyone: Sequence[Candidate], directory: Path, steps: int,
    threads: int, progress: Progress = lambda _: None,
) -> list[LengthRow]:  # fmt: skip
    """Return a row for each cache and length. The caches take turns, step by step.

    MissingRequirement: torch or transformers is missing.
    """
    from llmcache.kv.transformers import check_versions

    check_versions()
    from llmcache.kv.bench.subject import Prompt, random_model, torch_threads

    model = random_model(shape)

    def rows(tokens: int) -> list[LengthRow]:
        def row(one: Candidate, run: Run) -> LengthRow:
            policy = None if one.policy == STOCK else run.cache.conversation.engine.policy
            moved, whys = per_step(run.moved(), run.steps), list(getattr(policy, "whys", []))
            return LengthRow(tokens, one.policy, one.title, run.speed(), run.memory(), moved, whys)

        progress(f"{tokens} tokens by chance")
        prompt = Prompt.by_chance(model, tokens)
        return in_turns(model, everyone, scratch, steps, threads, lambda run: run.take(prompt), row)

    with torch_threads(threads), workplace(directory) as scratch:
        return [row for tokens in lengths for row in rows(tokens)]


def stock_at(rows: Sequence[LengthRow], tokens: int) -> LengthRow:
    """Return the row of transformers' own cache at a length."""
    return next(row for row in rows if row.tokens == tokens and row.policy == STOCK)


def faster_from(rows: Sequence[LengthRow], policy: str) -> int | None:
    """Return the shortest length from which on `policy` is faster than transformers' cache; None if it is not at the
    longest.
    """
    found = None
    for row in sorted((row for row in rows if row.policy == policy), key=lambda row: -row.tokens):
        if row.times(stock_at(rows, row.tokens)) >= 1:
            break
        found = row.tokens
    return found


def _row_json(row: LengthRow, stock: LengthRow) -> dict[str, Any]:
    return {
        "tokens": row.tokens, "policy": row.policy, **asdict(row.memory), "tpot_ns": row.speed.tpot_ns,
        "parts_ns": dict(row.speed.parts_ns), "kv_share": row.kv_share(stock), "times_stock": row.times(stock),
        "share_with_index": row.share_with_index(stock), "why": list(row.whys), "moved_bytes": dict(row.moved_bytes),
    }  # fmt: skip


def against_stock(rows: list[LengthRow]) -> dict[str, dict[str, Any]]:
    """Return the figures for memory and time, and the context from which on each policy is faster than DynamicCache."""
    at = TARGET_TOKENS if any(row.tokens == TARGET_TOKENS for row in rows) else max(row.tokens for row in rows)
    stock = stock_at(rows, at)
    row_of = {row.policy: row for row in rows if row.tokens == at}
    share, times = row_of["icecache"].kv_share(stock), row_of["icecache"].times(stock)
    with_index = ", ".join(f"{policy} {row_of[policy].share_with_index(stock):.1%}" for policy in TIMED if policy != PACKED)
    faster = {policy: faster_from(rows, policy) for policy in TIMED}
    others = [policy for policy in TIMED if policy != "icecache"]
    lengths = ", ".join(f"{one} {'none measured' if (none := faster[one]) is None else f'{none:,}'}" for one in others)
    each = ", ".join(f"{policy} {row_of[policy].times(stock):.2f}" for policy in others)
    return {
        "memory": {"what": f"keys and values in memory / DynamicCache's, {at:,} tokens, icecache", "figure": share},
        "memory_with_index": {
            "what": f"keys, values and index in memory / DynamicCache's, {at:,} tokens, {PACKED} ({with_index})",
            "figure": row_of[PACKED].share_with_index(stock),
        },
        "time": {"what": f"time per token / DynamicCache's, {at:,} tokens, icecache ({each})", "figure": times},
        "faster": {
            "what": f"context from which a token is faster than with DynamicCache, icecache ({lengths})",
            "figure": faster["icecache"] or 0, "by_policy": faster,
            "rows": [_row_json(row, stock_at(rows, row.tokens)) for row in rows],
        },
    }  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "the spill files, 3 GB", "small model, short contexts")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of each kernel [%(default)s]")


def measure(args: argparse.Namespace, _console: Console) -> Iterator[Document]:
    import torch

    everyone = [Candidate(STOCK, None), *(Candidate(policy, BUDGET) for policy in TIMED)]
    shape, at, steps = (SMALL, (1024, 2048), 4) if args.quick else (SHAPE, LENGTHS, 12)
    parts = against_stock(by_length(shape, at, everyone, args.dir, steps, args.threads))
    about = {"quick": args.quick, "threads": args.threads, "torch": torch.__version__}
    yield {**about, "shape": shape, "parts": parts}
