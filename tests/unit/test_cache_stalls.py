"""The fetch model of section 4.1, the numbers of figure 5, and the stall meter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.plan import Plan
from llmcache.cache.simulate import simulate, simulate_all
from llmcache.cache.sizing import FetchModel
from llmcache.cache.stalls import StallMeter
from tests.unit.simulation_parts import trace_of

MB = 10**6


def test_fetch_times_match_the_paper() -> None:
    """A block takes four requests of 1 KiB to the GPU, and from storage 50 us plus 4096 bytes at the bandwidth."""
    model = FetchModel()
    assert model.gpu_s(1) == pytest.approx(4 * (2e-6 + 1024 / 20e9))
    for bandwidth, expected in ((100, 90.96e-6), (200, 70.48e-6), (500, 58.192e-6), (1000, 54.096e-6)):
        assert model.storage_s(1, bandwidth * MB) == pytest.approx(expected)
    assert model.latency_s(10, 3, 100 * MB) == pytest.approx(10 * model.gpu_s(1) + 3 * 90.96e-6)
    times = [model.latency_s(1000, 1000, bandwidth) for bandwidth in FetchModel.storage_bandwidths]
    gains = [1 - later / earlier for earlier, later in itertools.pairwise(times)]
    assert gains[0] > 0.2 and gains[2] < 0.07, "figure 5: gains beyond 500 MB/s are negligible"


def test_writes_cost_no_fetch_time() -> None:
    reads = simulate(trace_of([(0, 0, 8, 0)]), ["lru"], [8 * 4096])[0]
    writes = simulate(trace_of([(0, 0, 8, 1)]), ["lru"], [8 * 4096])[0]
    both = simulate(trace_of([(0, 0, 8, 1), (0, 0, 8, 2)]), ["lru"], [8 * 4096])[0]
    model = FetchModel()
    assert reads.latency_s == pytest.approx(model.latency_s(8, 8, 100 * MB))
    assert (writes.latency_s, writes.storage_read_bytes, writes.byte_hit_ratio) == (0, 0, None)
    assert both.latency_s == pytest.approx(model.gpu_s(8))
    assert [latency.bw for latency in reads.latencies] == list(FetchModel.storage_bandwidths)
    assert (reads.bw, reads.latency_s) == (reads.latencies[0].bw, reads.latencies[0].latency_s)


@pytest.mark.parametrize(("missed", "stalls"), [(250, 0), (251, 20)])
def test_stalls_begin_at_the_bound_of_formula_1(missed: int, stalls: int) -> None:
    """Formula 1: each period T may read at most BW x T from storage, here 250 blocks."""
    bandwidth, period_ns = 4096 * 2500, 100_000_000
    meter = StallMeter(period_ns, (bandwidth,))
    for number in range(20):
        meter.add(np.array([number * period_ns], np.uint64), np.array([missed], np.int64))
    (found,) = meter.stalls()
    assert (found.slices, found.stalled_slices, found.worst_bytes) == (20, stalls, missed * 4096)
    assert found.stall_s == pytest.approx(stalls * (missed * 4096 / bandwidth - 0.1))
    trace = trace_of([(0, 0, 8, 0)] * 5, step_ns=1000)  # eight blocks per T, all from storage in the first
    model = FetchModel(storage_bandwidths=(4096 * 10**9 // 500,))  # two blocks in T
    large, small = simulate_all([trace], Plan(("lru",), (8 * 4096, 4096), model, period_ns=1000)).results
    assert (large.stalls[0].stalled_slices, small.stalls[0].stalled_slices) == (1, 5)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=50),
    st.integers(1, 30),
    st.integers(1, 10),
)
def test_batch_size_does_not_change_the_time_slices(steps: list[tuple[int, int]], period_ns: int, rows: int) -> None:
    t_ns = np.cumsum([step for step, _ in steps]).astype(np.uint64) + np.uint64(7)
    missed = np.array([blocks for _, blocks in steps], np.int64)
    bandwidth = 4096 * 10**9 // 4  # a quarter of a block per ns
    meter = StallMeter(period_ns, (bandwidth,))
    for start in range(0, len(t_ns), rows):
        meter.add(t_ns[start : start + rows], missed[start : start + rows])
    sums: dict[int, int] = {}
    for at, blocks in zip(t_ns.tolist(), missed.tolist(), strict=True):
        number = (at - int(t_ns[0])) // period_ns
        sums[number] = sums.get(number, 0) + blocks
    late = [4 * blocks - period_ns for blocks in sums.values() if 4 * blocks > period_ns]
    (found,) = meter.stalls()
    assert (found.slices, found.worst_bytes) == (len(sums), max(sums.values()) * 4096)
    assert found.stall_s == pytest.approx(sum(late) / 1e9)
    assert found.stalled_slices == len([one for one in late if one > 1e-6])
