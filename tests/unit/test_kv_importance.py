"""Hits of tokens, column sums of attention, and moves of pages, also over the steps of a synthetic stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.kv.pipeline import KvEngine
from llmcache.kv.policies.base import TokenTable
from llmcache.kv.policies.h2o import column_sums
from llmcache.kv.policies.hillinfer import MOST, HillInfer, HillInferSettings, HitTable, moves
from llmcache.kv.tiers import KvStore, StoreConfig
from llmcache.kv.workload import StreamSpec, SyntheticStream

Array = NDArray[Any]


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# Hits


def chosen(*heads: list[int]) -> Array:
    """Return the tokens that the heads of one sequence chose, [1, heads, k]."""
    return np.array([heads], np.int64)


def test_hits_are_halved_before_an_overflow_and_keep_their_order() -> None:
    table = HitTable(layers=1, batch=1)
    counts = table.rows(0, 0, 2000)
    counts[[1, 2, 3, 1999]] = [MOST - 1, MOST // 2, 10, 9]
    table.record(0, chosen([1], [1], [2]))  # the second hit of token 1 would overflow
    assert table.rows(0, 0, 2000)[[1, 2, 3, 1999]].tolist() == [(MOST - 1) // 2 + 2, MOST // 4 + 1, 5, 4]
    for _ in range(3):
        counts = table.rows(0, 0, 2000)
        counts[5] = MOST
        table.record(0, chosen([5]))
        assert counts[5] == MOST // 2 + 1 and counts[1] < counts[5]


def test_a_table_grows_and_its_rows_follow_their_sequences() -> None:
    table = TokenTable(1, 2, (2,), np.float32)
    table.rows(0, 0, 3)[:] = 7
    grown = table.rows(0, 0, 5000)
    assert grown.shape == (5000, 2) and (grown[:3] == 7).all() and not grown[3:].any()
    table.reorder(np.array([1, 0, 0]))
    table.rows(0, 1, 2)[:] = 5
    table.crop(1)
    assert [table.rows(0, sequence, 3)[:, 0].tolist() for sequence in range(3)] == [[0, 0, 0], [5, 0, 0], [7, 0, 0]]


# Column sums


def plain_column_sums(queries: Array, keys: Array, start: int, first: int, scale: float) -> Array:
    """Compute the formula in float64, row by row."""
    sums = np.zeros(keys.shape[:2])
    group = len(queries) // len(keys)
    for head, rows in enumerate(queries.astype(np.float64)):
        for row, query in enumerate(rows):
            if start + row >= first:
                logits = keys[head // group, first : start + row + 1].astype(np.float64) @ query * scale
                weights = np.exp(logits - logits.max())
                sums[head // group, first : start + row + 1] += weights / weights.sum()
    return sums


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "start", "first"),
    [(4, 4, 40, 0, 0), (6, 2, 33, 290, 0), (2, 1, 64, 0, 17), (2, 1, 20, 30, 40), (1, 1, 1, 0, 0)],
)
def test_column_sums(heads: int, kv_heads: int, rows: int, start: int, first: int) -> None:
    queries, keys = numbers(heads, rows, 32), numbers(kv_heads, start + rows, 32, seed=1)
    found = column_sums(3 * queries, keys, start, first, 32**-0.5)
    np.testing.assert_allclose(found, plain_column_sums(3 * queries, keys, start, first, 32**-0.5), rtol=2e-5, atol=1e-6)
    asking = start + rows - max(start, first)
    np.testing.assert_allclose(found.sum(axis=1), np.full(kv_heads, asking * heads / kv_heads), rtol=1e-4)
    assert not found[:, :first].any()


# Moves


@pytest.mark.parametrize(
    ("in_cpu", "hits", "important", "room", "recent", "clearly", "up", "down"),
    [
        ("ccccss", [5, 1, 7, 2, 9, 8], 2, 4, 0, 1, [4, 5], [1, 3]),  # the most hit pages move up, the least hit move down
        ("ccss", [4, 2, 8, 5], 2, 2, 0, 2, [2], [1]),  # a page replaces only one with clearly fewer hits
        ("cccs", [3, 1, 2, 0], 1, 2, 0, 1, [], [1]),  # a page above the limit moves down without a replacement
        ("sscc", [9, 8, 0, 0], 2, 2, 1, 1, [0], [2]),  # recent pages stay up regardless of hits
        ("ccss", [3, 3, 3, 0], 2, 2, 0, 1, [], []),  # pages with equal hits do not move
        ("cssss", [1, 4, 3, 2, 0], 2, 3, 0, 1, [1, 2], []),  # free room is used without a move down
        ("sss", [1, 2, 3], 3, 0, 2, 1, [], []),  # a pool without room for the middle gets none of it
    ],
)
def test_pages_that_move(
    in_cpu: str, hits: list[int], important: int, room: int, recent: int, clearly: int, up: list[int], down: list[int]
) -> None:
    found = moves(np.array(list(in_cpu)) == "c", np.array(hits), important, room, recent, clearly)
    assert [side.tolist() for side in found] == [up, down]


# Pools over decode steps

STEPS = 60


def decoded(path: Path, settings: HillInferSettings, share: float, context: int = 2048, forks: int = 1) -> HillInfer:
    """Decode `STEPS` tokens with a pool of `share` of the pages, and return the policy; `forks` share the prompt's pages."""
    stream = SyntheticStream(spec := StreamSpec(layers=1, kv_heads=2, heads=4, head_dim=32, context=context))
    random, bound = np.random.default_rng(0), int(share * context / 16)
    path.mkdir(exist_ok=True)
    config = StoreConfig(spec.shape, 1, 16, 32, bound, path / "kv", threads=1)
    with KvStore(config) as store, KvEngine(store, policy := HillInfer(store, settings), app=False) as engine:
        engine.prefill(0, None, *stream.keys_values(0, range(context)))
        finish(engine, context)
        store.select(np.zeros(forks, np.int64))
        policy.reordered(np.zeros(forks, np.int64))
        for position in range(context, context + STEPS):
            queries = stream.queries(0, position - context).repeat(forks, axis=0)
            if forks > 1:  # the sequences choose different tokens
                queries = 3 * random.standard_normal(queries.shape, np.float32)
            rows = stream.keys_values(0, range(position, position + 1))
            engine.step(0, queries, *(side.repeat(forks, axis=0) for side in rows))
            engine.attended(0)
            finish(engine, position + 1)
            if forks == 1:
                assert store.in_cpu(0, 0).sum() <= bound
        return policy


def finish(engine: KvEngine, length: int) -> None:
    """End the step before the one whose token is at position `length`."""
    ids = np.tile(np.arange(engine.store.length, length), (engine.store.batch, 1))
    engine.finish_step(ids, ids)


def test_few_pages_move_in_vain(tmp_path: Path) -> None:
    """At most 1 % of the pages that move up had moved down within 16 steps; without BKP, more than 10 %."""
    kept, naive = (
        decoded(tmp_path / str(bkp), HillInferSettings(alpha=0.2, bkp=bkp), 0.3).store.traffic for bkp in (True, False)
    )
    assert kept.pages_up > 10 and kept.ping_pong_share <= 0.01
    assert naive.ping_pong_share > 0.1 and naive.pages_up > 1.5 * kept.pages_up


def test_moves_increase_hits_and_recent_pages_stay(tmp_path: Path) -> None:
    """The pool has more of the chosen tokens than a pool of the last pages only."""
    policy = decoded(tmp_path, HillInferSettings(alpha=0.2), 0.5)
    found, in_cpu = policy.hits.pages(0, 0, 128, 16), policy.store.in_cpu(0, 0)
    unchanged = np.arange(128) >= 128 - 64 + 1  # the pool after the prompt
    assert found[in_cpu[:128]].sum() > 1.2 * found[unchanged].sum()
    assert in_cpu[-int(0.2 * (2048 + STEPS) / 16) :].all()


def test_sequences_that_share_pages_return_to_the_limit(tmp_path: Path) -> None:
    """A shared page moves up for all its sequences; the others drop a page in their next step."""
    store = decoded(tmp_path, HillInferSettings(), 24 / 64, context=1024, forks=3).store
    assert store.traffic.pages_up > 0
    assert max(store.in_cpu(0, sequence).sum() for sequence in range(3)) <= 24 + 2
