"""Invented task results for the tests of tables, plots and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmcache.kv.bench.results import STOCK, Answers, Attention, KvMemory, Speed, TaskBench, TaskRow

MS = 1_000_000
TITLES = {STOCK: "DynamicCache", "icecache": "IceCache", "quest": "Quest", "h2o": "H2O-like", "window": "Window"}


def answers(right: Sequence[int], asked: int = 10, depths: Sequence[float] | None = None) -> Answers:
    return Answers(tuple(right), (asked,) * len(right), None if depths is None else tuple(depths))


def speed(token_ms: float, loading: float = 0.0, query: float = 0.0) -> Speed:
    parts = {"loading": loading * MS, "query": query * MS, "update": 0.0, "decoding": (token_ms - loading - query) * MS}
    return Speed(8, 50 * MS, 60 * MS, token_ms * MS, parts)


def row(policy: str, budget: int | None, right: Sequence[int], context: int = 1024, token_ms: float = 4.0) -> TaskRow:
    depths = [place / 20 for place in range(len(right))]
    memory = KvMemory(1 << 20, 0) if policy == STOCK else KvMemory(40_000, 10_000)
    attention = None if policy == STOCK else Attention(0.8, 0.9)
    moved: Mapping[str, float] = {} if policy == STOCK else {"ssd to cpu, fetch": 5e5}
    title = TITLES.get(policy, policy)
    found = answers(right, depths=depths)
    return TaskRow(policy, title, context, budget, found, speed(token_ms), memory, moved, 1 << 20, 0.9, attention)


def bench(shares: Mapping[tuple[str, int | None], Sequence[int]], contexts: Sequence[int] = (1024,)) -> TaskBench:
    """Return results in which each (policy, budget) answered `shares` of 10 questions in each context."""
    rows = [row(*name, right, context) for context in contexts for name, right in shares.items()]
    return TaskBench("passkey", {"model": "made up", "budgets": [64, 256]}, tuple(rows))


def of_policies(own: int = 10, rival: int = 5, names: Sequence[str] = ("icecache",)) -> TaskBench:
    """Return results at all budgets: `names` answer `own` of 10, their rivals `rival`, the full cache all."""
    everyone = {**dict.fromkeys(names, own), "quest": rival, "h2o": rival, "window": rival}
    shares: dict[tuple[str, int | None], Sequence[int]] = {(STOCK, None): [10] * 4}
    shares |= {(policy, budget): [right] * 4 for policy, right in everyone.items() for budget in (64, 128, 256)}
    return bench(shares)
