"""A simulation is exact, and the same however it is cut: into batches, threads, groups of cells, or traces."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcache.cache import simulate as module
from llmcache.cache.plan import AUTO, Plan
from llmcache.cache.simulate import simulate, simulate_all
from llmcache.trace.record import WRITE, TraceReader
from tests.conftest import examples
from tests.unit.simulation_parts import Row, loop, plain_lru, rows, saved, trace_of

BLOCK = 4096
# In place of what the profile suppresses, which goes with it.
SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(deadline=None)
@given(rows(), st.integers(1, 80), st.integers(0, BLOCK - 1))
def test_lru_rows_are_those_of_a_plain_lru(made: list[Row], capacity: int, odd_bytes: int) -> None:
    (row,) = simulate(trace_of(made), ["lru"], [capacity * BLOCK + odd_bytes])
    told = plain_lru(made, capacity)
    reads = [(count, hits) for (_, _, count, op), (hits, _) in zip(made, told, strict=True) if op != WRITE]
    assert (row.cache_bytes, row.cache_blocks) == (capacity * BLOCK + odd_bytes, capacity)
    assert row.accesses == sum(count for _, _, count, _ in made)
    assert row.hits == sum(hits for hits, _ in told)
    assert row.evictions == told[-1][1]
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
@given(made=rows(most=120), batch=st.integers(1, 50))
def test_batches_and_groups_of_cells_change_nothing(
    made: list[Row], batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trace_of(made)
    plan = Plan(("lru", "belady", "sieve"), AUTO, period_ns=7_000_000, curves=True)
    whole = simulate_all([trace], plan, jobs=1)
    with monkeypatch.context() as patched:
        patched.setattr(module, "BATCH_ROWS", batch)
        patched.setattr(module, "MEMORY_SHARE", 0.0)  # every cell has a reading of its own
        path = tmp_path / "t.parquet"
        trace.save(path, force=True)
        with TraceReader(path) as reader:
            cut = simulate_all([reader], plan, jobs=3)
    assert [dataclasses.replace(row, trace="trace") for row in cut.results] == list(whole.results)
    assert cut.traces == tuple(dataclasses.replace(one, trace=str(path)) for one in whole.traces)
    assert cut.curves[0].curve.hits.tolist() == whole.curves[0].curve.hits.tolist()


def test_traces_together_are_traces_apart(tmp_path: Path) -> None:
    one = saved(trace_of(loop(50, 4, 7)), tmp_path, "one.parquet")
    two = saved(trace_of(loop(90, 2, 1)), tmp_path, "two.parquet")
    plan = Plan(("lru", "lfu"), AUTO)
    both = simulate_all([one, two, one], plan, jobs=2)
    apart = [simulate_all([path], plan) for path in (one, two)]
    assert both.results == apart[0].results + apart[1].results
    assert both.traces == apart[0].traces + apart[1].traces


@settings(deadline=None, max_examples=examples(40))
@given(rows(), st.integers(1, 100))
def test_belady_sees_the_whole_trace(made: list[Row], capacity: int) -> None:
    found = {row.policy: row.hits for row in simulate(trace_of(made), ["lru", "belady"], [capacity * BLOCK])}
    assert found["belady"] >= found["lru"]
    loops = simulate(trace_of(loop(100, 5, 100)), ["belady"], [50 * BLOCK])
    assert loops[0].hits == pytest.approx(400 * 49 / 99, abs=4)


def test_progress_is_told_up_to_the_end() -> None:
    told: list[tuple[str, int, int]] = []
    plan = Plan(("lru", "belady"), (4 * BLOCK, 8 * BLOCK), curves=True)
    simulate_all([trace_of(loop(50, 4, 7))], plan, progress=lambda *what: told.append(what))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1] == told[-1][2] > 0
