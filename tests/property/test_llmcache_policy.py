"""llmcache's policy over runs agrees with the plain one block by block, however the trace is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.cache.policies.llmcache import LLMCache
from llmcache.cache.policies.lru import LRU
from tests.conftest import examples
from tests.property.plain_llmcache import PlainLLMCache

BLOCKS = 400
Runs = list[tuple[int, int]]

run = st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, 80)).map(lambda r: (r[0], min(r[1], BLOCKS - r[0])))
passage = st.tuples(st.lists(run, min_size=1, max_size=6), st.integers(1, 12)).map(lambda p: p[0] * p[1])
traces = st.lists(passage, min_size=1, max_size=5).map(lambda parts: [r for part in parts for r in part])


def replay(policy: LLMCache, runs: Runs) -> list[int]:
    first, count = np.array(runs, np.int64).reshape(-1, 2).T
    return [int(hits) for hits in policy.replay(np.ascontiguousarray(first), np.ascontiguousarray(count))]


def blockwise(runs: Runs) -> Runs:
    return [(first + offset, 1) for first, count in runs for offset in range(count)]


def compare(runs: Runs, capacity: int, blocks: int) -> None:
    plain, compiled = PlainLLMCache(capacity), LLMCache(capacity, blocks)
    expected = [sum(plain.access(first + offset) for offset in range(count)) for first, count in runs]
    assert replay(compiled, runs) == expected
    assert compiled.evictions == plain.evictions
    assert compiled.resident().tolist() == sorted(plain.held)


@settings(max_examples=examples(200), deadline=None)
@given(traces, st.integers(1, BLOCKS + 10))
def test_runs_hit_as_single_blocks_do(runs: Runs, capacity: int) -> None:
    compare(runs, capacity, BLOCKS)


@settings(max_examples=examples(100), deadline=None)
@given(traces, st.integers(1, BLOCKS))
def test_a_trace_may_be_cut_anywhere(runs: Runs, capacity: int) -> None:
    whole, cut = LLMCache(capacity, BLOCKS), LLMCache(capacity, BLOCKS)
    assert sum(replay(whole, runs)) == sum(replay(cut, blockwise(runs)))
    assert whole.resident().tolist() == cut.resident().tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [40, 700, 5000, 9000])
def test_long_mixed_traces_agree(seed: int, capacity: int) -> None:
    """Long enough for the statistics to be looked at, and for choices that serve several evictions."""
    rng = np.random.default_rng(seed)
    blocks = 12_000
    runs: Runs = [(0, 3000)]
    for _ in range(int(rng.integers(4, 9))):
        base, length = int(rng.integers(0, 6000)), int(rng.integers(500, 6000))
        for _ in range(int(rng.integers(1, 4))):
            for start in range(base, base + length, 600):
                runs.append((start, min(600, base + length - start)))
                runs += [(int(block), 1) for block in 11_000 + (1000 * rng.random(5) ** 2).astype(int)]
    compare(runs, capacity, blocks)


def test_a_forgotten_block_is_new_again() -> None:
    """More blocks than the policy remembers pass by, some of them while LRU leads."""
    rng = np.random.default_rng(7)
    runs: Runs = [(int(block), 1) for block in rng.integers(0, 60_000, 40_000)]
    runs += [(0, 60_000), (100, 300), (100, 300), (30_000, 20_000), (0, 60_000)]
    compare(runs, 100, 60_000)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_loop_hits_as_far_as_it_fits(share: float) -> None:
    """Without bypass one place is taken by the block that passes: (S - 1) / N of a pass, and nothing in the first."""
    size, passes = 10_000, 20
    capacity = int(size * share)
    hits = sum(replay(LLMCache(capacity, size), [(0, size)] * passes))
    assert hits >= (passes - 2) * (capacity - 1) * 0.97


def test_a_back_and_forth_scan_costs_little_more_than_lru() -> None:
    """Its intervals say nothing about the next one, and LRU is optimal: the shadow takes over."""
    size, capacity = 1000, 300
    there = [(block, 1) for block in range(size)]
    trace = (there + there[::-1]) * 25
    lru = sum(LRU(capacity, size).replay(*np.ascontiguousarray(np.array(trace, np.int64).T)).tolist())
    assert sum(replay(LLMCache(capacity, size), trace)) > 0.85 * lru


def test_loops_of_a_model_that_is_gone_drain() -> None:
    old, new, capacity = 4000, 6000, 6500
    runs = [(0, old)] * 10 + [(5000, new)] * 6
    hits = replay(LLMCache(capacity, 12_000), runs)
    assert hits[-1] == new
