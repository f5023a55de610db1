"""Simulations are exact and do not depend on the split into batches, threads, groups of cells or traces."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcache.cache import simulate as module
from llmcache.cache.curves import BUCKET, MOMENTS_PER_BLOCK, Curve, StackDistances
from llmcache.cache.plan import AUTO, Plan
from llmcache.cache.policies import policy_class
from llmcache.cache.simulate import simulate, simulate_all
from llmcache.trace.record import WRITE, Trace
from tests.conftest import examples
from tests.unit.simulation_parts import Row, loop, plain_lru, rows, saved, trace_of

BLOCK = 4096
# The setting replaces the profile's suppressions, so it has to repeat them.
SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(deadline=None, max_examples=examples(60))
@given(rows(), st.integers(1, 80), st.integers(0, BLOCK - 1))
def test_lru_results_equal_those_of_a_plain_lru(trace_rows: list[Row], capacity: int, odd_bytes: int) -> None:
    (row,) = simulate(trace_of(trace_rows), ["lru"], [capacity * BLOCK + odd_bytes])
    expected = plain_lru(trace_rows, capacity)
    reads = [(count, hits) for (_, _, count, op), (hits, _) in zip(trace_rows, expected, strict=True) if op != WRITE]
    assert (row.cache_bytes, row.cache_blocks) == (capacity * BLOCK + odd_bytes, capacity)
    assert row.accesses == sum(count for _, _, count, _ in trace_rows)
    assert row.hits == sum(hits for hits, _ in expected)
    assert row.evictions == expected[-1][1]
    assert (row.reads, row.read_hits) == (sum(count for count, _ in reads), sum(hits for _, hits in reads))
    assert (row.writes, row.write_hits) == (row.accesses - row.reads, row.hits - row.read_hits)
    assert (row.read_bytes, row.write_bytes) == (row.reads * BLOCK, row.writes * BLOCK)
    assert row.storage_read_bytes == (row.reads - row.read_hits) * BLOCK
    assert row.hit_ratio == row.hits / row.accesses
    if row.reads:
        assert row.byte_hit_ratio == pytest.approx(1 - row.storage_read_bytes / row.read_bytes)
    else:
        assert row.byte_hit_ratio is None


@settings(deadline=None, suppress_health_check=SUPPRESSED, max_examples=examples(25))
@given(trace_rows=rows(most=120), batch=st.integers(1, 50))
def test_batches_and_groups_of_cells_change_nothing(
    trace_rows: list[Row], batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trace_of(trace_rows)
    plan = Plan(("lru", "belady", "sieve"), AUTO, period_ns=7_000_000, curves=True)
    whole = simulate_all([trace], plan, jobs=1)
    with monkeypatch.context() as patched:
        patched.setattr(module, "BATCH_ROWS", batch)
        patched.setattr(module, "MEMORY_SHARE", 0.0)  # each cell reads the trace by itself
        path = tmp_path / "t.parquet"
        trace.save(path, force=True)
        cut = simulate_all([path], plan, jobs=3)
    assert [dataclasses.replace(row, trace="trace") for row in cut.results] == list(whole.results)
    assert cut.traces == tuple(dataclasses.replace(one, trace=str(path)) for one in whole.traces)
    assert cut.curves[0].curve.hits.tolist() == whole.curves[0].curve.hits.tolist()


def test_traces_together_give_the_results_of_each_alone(tmp_path: Path) -> None:
    """Progress is reported up to the end."""
    one = saved(trace_of(loop(50, 4, 7)), tmp_path, "one.parquet")
    two = saved(trace_of(loop(90, 2, 1)), tmp_path, "two.parquet")
    plan = Plan(("lru", "lfu", "belady"), AUTO, curves=True)
    reports: list[tuple[str, int, int]] = []
    both = simulate_all([one, two, one], plan, jobs=2)
    separate = [simulate_all([one], plan, progress=lambda *report: reports.append(report)), simulate_all([two], plan)]
    assert both.results == separate[0].results + separate[1].results
    assert both.traces == separate[0].traces + separate[1].traces
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)
    assert reports[-1][1] == reports[-1][2] > 0


def test_an_unfinished_thread_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator may be collected while another thread starts; joining would then deadlock."""
    items = module.ahead(iter(range(1, 100)))
    assert next(items) == 1
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda *_: pytest.fail("joined"))
        items.close()
    assert list(module.ahead(iter(range(1, 9)))) == list(range(1, 9))


# The LRU curve equals replays of LRU at each size

ROWS = 30_000


def curve_of(trace: Trace) -> Curve:
    return simulate_all([trace], Plan((), (), curves=True)).curves[0].curve


@settings(deadline=None, max_examples=examples(60))
@given(rows())
def test_the_curve_has_the_hits_of_a_replay_at_every_size(trace_rows: list[Row]) -> None:
    curve = curve_of(trace_of(trace_rows))
    assert list(curve.sizes) == list(range(len(curve.sizes)))
    distinct = {(file, block) for file, first, count, _ in trace_rows for block in range(first, first + count)}
    assert curve.sizes[-1] == len(distinct)
    assert curve.hits[0] == 0
    for capacity in range(1, len(distinct) + 1):
        hits = [hit for hit, _ in plain_lru(trace_rows, capacity)]
        assert curve.hits[capacity] == sum(hits)
        assert curve.read_hits[capacity] == sum(
            hit for hit, (_, _, _, op) in zip(hits, trace_rows, strict=True) if op != WRITE
        )
    assert curve.accesses == sum(count for _, _, count, _ in trace_rows)
    assert curve.reads == sum(count for _, _, count, op in trace_rows if op != WRITE)


@pytest.mark.parametrize("blocks", [1, BUCKET, 5 * BUCKET + 3])
@pytest.mark.parametrize("longest", [1, 700])
def test_moments_are_renumbered_without_a_trace(blocks: int, longest: int) -> None:
    """Feed uneven parts, long enough for the moments to run out many times."""
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


def test_a_thinned_curve_keeps_exact_points_and_both_ends() -> None:
    curve = curve_of(trace_of(loop(50, 3, 1) + loop(1000, 2, 10)))
    assert curve.miss_ratio()[-1] == pytest.approx(1000 / 2150)
    thin = curve.thinned(20)
    assert len(thin.sizes) <= 20
    assert (thin.sizes[0], thin.sizes[-1]) == (0, 1000)
    assert list(thin.hits) == list(curve.hits[thin.sizes])
