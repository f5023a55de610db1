"""The LRU curve of all sizes is what replaying LRU at each size counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from llmcache.cache.curves import BUCKET, MOMENTS_PER_BLOCK, Curve, StackDistances
from llmcache.cache.plan import Plan
from llmcache.cache.policies import policy_class
from llmcache.cache.simulate import simulate_all
from llmcache.trace.record import WRITE, Trace
from tests.unit.simulation_parts import Row, loop, plain_lru, rows, trace_of

ROWS = 30_000


def curve_of(trace: Trace) -> Curve:
    return simulate_all([trace], Plan((), (), curves=True)).curves[0].curve


@settings(deadline=None)
@given(rows())
def test_every_size_has_the_hits_of_a_replay(made: list[Row]) -> None:
    curve = curve_of(trace_of(made))
    assert list(curve.sizes) == list(range(len(curve.sizes)))
    distinct = {(file, block) for file, first, count, _ in made for block in range(first, first + count)}
    assert curve.sizes[-1] == len(distinct)
    assert curve.hits[0] == 0
    for capacity in range(1, len(distinct) + 1):
        hits = [hit for hit, _ in plain_lru(made, capacity)]
        assert curve.hits[capacity] == sum(hits)
        assert curve.read_hits[capacity] == sum(hit for hit, (_, _, _, op) in zip(hits, made, strict=True) if op != WRITE)
    assert curve.accesses == sum(count for _, _, count, _ in made)
    assert curve.reads == sum(count for _, _, count, op in made if op != WRITE)


@pytest.mark.parametrize("blocks", [1, 7, BUCKET, 5 * BUCKET + 3])
@pytest.mark.parametrize("longest", [1, 9, 700])
def test_moments_are_renumbered_without_a_trace(blocks: int, longest: int) -> None:
    """Long enough for the moments to run out many times, fed in uneven parts."""
    random = np.random.default_rng(blocks * 1000 + longest)
    first = random.integers(0, blocks, ROWS)
    count = np.minimum(random.integers(1, longest + 1, ROWS), blocks - first)
    assert count.sum() > 2 * MOMENTS_PER_BLOCK * (blocks + BUCKET)
    distances = StackDistances(blocks)
    for start in range(0, ROWS, 1777):
        part = slice(start, start + 1777)
        distances.feed(first[part], count[part], np.ones(len(first[part]), bool))
    curve = distances.curve()
    for capacity in {1, max(1, blocks // 3), max(1, len(curve.sizes) - 2)}:
        replayed = policy_class("lru")(capacity, blocks).replay(first, count)
        assert curve.hits[min(capacity, len(curve.sizes) - 1)] == replayed.sum()


def test_a_loop_hits_nothing_until_it_fits_whole() -> None:
    curve = curve_of(trace_of(loop(100, 5, 8)))
    assert list(curve.hits) == [0] * 100 + [400]
    assert curve.miss_ratio()[-1] == pytest.approx(0.2)


def test_a_thinned_curve_keeps_exact_points_and_both_ends() -> None:
    curve = curve_of(trace_of(loop(50, 3, 1) + loop(1000, 2, 10)))
    thin = curve.thinned(20)
    assert len(thin.sizes) <= 20
    assert (thin.sizes[0], thin.sizes[-1]) == (0, 1000)
    assert list(thin.hits) == list(curve.hits[thin.sizes])
    with pytest.raises(KeyError):
        thin.at(np.array([1], np.int64))


def test_no_blocks_are_no_space() -> None:
    with pytest.raises(ValueError, match="blocks"):
        StackDistances(0)
