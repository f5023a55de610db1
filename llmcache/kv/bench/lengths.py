"""Time and memory of caches by length of the context: a model with random weights behind a *synthetic* prompt. *Measured*.

Keys and values of the prompt are drawn by chance: nothing of them is alike, so what is chosen lies scattered over the
whole context, and no tree finds it. For choosing and fetching that is the worst case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcache.kv.bench.results import STOCK, KvMemory, Speed
from llmcache.kv.bench.synthetic import Progress, per_step, workplace
from llmcache.kv.bench.task import Candidate, TaskSetup, in_turns

if TYPE_CHECKING:
    from llmcache.kv.bench.subject import Run

SHAPE: dict[str, int] = {
    "vocab_size": 1024, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "num_hidden_layers": 2, "max_position_embeddings": 1 << 20,
}  # fmt: skip
"""Two layers of Llama-3.1-8B, as float32: 1.8 GB."""
SMALL: dict[str, int] = {
    **SHAPE, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 2816,
    "num_hidden_layers": 4,
}  # fmt: skip
"""Layers with as many query heads to a key head, a quarter as wide: 0.2 GB."""


@dataclass(frozen=True)
class LengthRow:
    """One cache at one length; `moved_bytes` of a step, by link; `whys`: which scorer each layer uses, and why."""

    tokens: int
    policy: str
    title: str
    speed: Speed
    memory: KvMemory
    moved_bytes: Mapping[str, float]
    whys: Sequence[str] = ()

    def document(self, stock: LengthRow) -> dict[str, Any]:
        """Returns it as JSON-ready values, beside transformers' own cache."""
        return {
            **asdict(self), "times_stock": self.times(stock), "kv_share": self.kv_share(stock),
            "share_with_index": self.share_with_index(stock),
        }  # fmt: skip

    def times(self, stock: LengthRow) -> float:
        """Time of a token, of transformers' own cache's."""
        return self.speed.tpot_ns / stock.speed.tpot_ns

    def kv_share(self, stock: LengthRow) -> float:
        """Pages of keys and values in memory, of transformers' own cache's."""
        return self.memory.kv_bytes / stock.memory.kv_bytes

    def share_with_index(self, stock: LengthRow) -> float:
        """The same with what the policy keeps in memory to choose by."""
        return (self.memory.kv_bytes + self.memory.index_bytes) / stock.memory.kv_bytes


def measure(
    shape: Mapping[str, int],
    lengths: Sequence[int],
    everyone: Sequence[Candidate],
    directory: Path,
    steps: int = 12,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> list[LengthRow]:
    """Returns a row for each cache at each of `lengths`; caches take turns, step by step.

    EnvironmentProblem: torch or transformers are missing.
    """
    from llmcache.kv.transformers import check_versions

    check_versions()
    from llmcache.kv.bench.subject import random_model, torch_threads

    model = random_model(shape)
    setup = TaskSetup("recall", directory, (), (), (), directory, steps=steps, threads=threads)
    found: list[LengthRow] = []
    with torch_threads(threads), workplace(directory) as scratch:
        for tokens in lengths:
            progress(f"{tokens} tokens by chance")
            found += _at(tokens, model, setup, everyone, scratch)
    return found


def _at(tokens: int, model: Any, setup: TaskSetup, everyone: Sequence[Candidate], directory: Path) -> list[LengthRow]:
    from llmcache.kv.bench.subject import Prompt

    prompt = Prompt.by_chance(model, tokens)

    def row(one: Candidate, run: Run) -> LengthRow:
        policy = None if one.policy == STOCK else run.cache.conversation.engine.policy
        moved, whys = per_step(run.moved(), run.steps), list(getattr(policy, "whys", []))
        return LengthRow(tokens, one.policy, one.title, run.speed(), run.memory(), moved, whys)

    return in_turns(model, setup, directory, everyone, lambda run: run.take(prompt), row)


def stock_at(rows: Sequence[LengthRow], tokens: int) -> LengthRow:
    """Returns the row of transformers' own cache at a length."""
    return next(row for row in rows if row.tokens == tokens and row.policy == STOCK)


def faster_from(rows: Sequence[LengthRow], policy: str) -> int | None:
    """Returns the least length from which on, as far as was measured, `policy` takes less time than transformers' cache."""
    found = None
    for row in sorted((row for row in rows if row.policy == policy), key=lambda row: -row.tokens):
        if row.times(stock_at(rows, row.tokens)) >= 1:
            break
        found = row.tokens
    return found
