"""LeCaR: what its authors publish and what its weights learn. Belady: on which traces it would not be exact."""

from __future__ import annotations

import numpy as np
import pytest

from llmcache.arrays import Int64s
from llmcache.cache.policies.belady import Belady, why_not_exact
from llmcache.cache.policies.lfu import LeCaR
from llmcache.trace.record import Provenance


def hit_ratio(cache: LeCaR, ids: Int64s) -> float:
    return float(cache.replay(ids, np.ones_like(ids)).mean())


@pytest.mark.parametrize(("passes", "expected"), [(20, 0.85035), (50, 0.8788), (100, 0.88834)])
def test_a_loop_has_the_hit_ratio_of_the_authors_program(passes: int, expected: float) -> None:
    """N = 1000, S = 900: .879 is that of 50 passes; it rises towards the 0.9 of a cache that keeps S blocks for good."""
    assert hit_ratio(LeCaR(900, 1000), np.tile(np.arange(1000), passes)) == pytest.approx(expected, abs=1e-9)


def test_a_loop_teaches_it_to_trust_lfu() -> None:
    cache = LeCaR(900, 1000)
    hit_ratio(cache, np.tile(np.arange(1000), 50))
    of_lru, of_lfu = cache.weights
    assert of_lfu > 0.95
    assert of_lru + of_lfu == pytest.approx(1, abs=1e-6)


def test_a_moving_working_set_teaches_it_to_trust_lru() -> None:
    """Old blocks with high frequencies never come back: LFU gives up blocks that are still wanted."""
    source = np.random.default_rng(1)
    phases = [source.integers(start, start + 150, 3000) for start in range(0, 3000, 150)]
    cache = LeCaR(100, 3150)
    hit_ratio(cache, np.concatenate(phases))
    assert cache.weights[0] > cache.weights[1]


def test_of_equal_frequencies_lfu_gives_up_the_lowest_block() -> None:
    cache = LeCaR(3, 10)
    cache.weights[:] = [0, 1]
    cache.replay(np.array([7, 2, 5, 9]), np.ones(4, np.int64))
    assert cache.resident().tolist() == [5, 7, 9]


def test_a_block_comes_back_from_its_history_with_its_frequency() -> None:
    cache = LeCaR(2, 10)
    cache.weights[:] = [1, 0]
    ids = np.array([1, 1, 1, 2, 3, 1])  # 1 leaves by recency with frequency 3 and comes back with 4
    cache.replay(ids, np.ones_like(ids))
    cache.weights[:] = [0, 1]
    cache.replay(np.array([3, 3, 4]), np.ones(3, np.int64))  # 3 has reached 3: the least of 4 and 3
    assert cache.resident().tolist() == [1, 4]


def test_two_caches_draw_the_same() -> None:
    ids = np.random.default_rng(2).integers(0, 500, 5000)
    one, other = LeCaR(50, 500), LeCaR(50, 500)
    assert np.array_equal(one.replay(ids, np.ones_like(ids)), other.replay(ids, np.ones_like(ids)))
    assert one.weights.tolist() == other.weights.tolist()


@pytest.mark.parametrize("tier", ["synthetic", "csv", "oracleGeneral", "mount", "strace"])
def test_complete_traces_are_exact(tier: str) -> None:
    assert why_not_exact(Provenance(tier=tier)) is None


def test_lost_events_are_a_reason() -> None:
    assert why_not_exact(Provenance(tier="mount", lost_events=3)) == "lost_events is 3: accesses are missing from the trace"


def test_what_the_source_could_not_see_is_a_reason() -> None:
    reason = why_not_exact(Provenance(tier="faults", extra={"unseen": "touches of pages that are mapped already"}))
    assert reason == "unseen: touches of pages that are mapped already"


@pytest.mark.parametrize("gap", ["mapped_ranges", "accesses_of_unknown_files", "guessed_offsets"])
def test_gaps_that_an_importer_counts_are_a_reason(gap: str) -> None:
    reason = why_not_exact(Provenance(tier="strace", extra={gap: "12"}))
    assert reason is not None
    assert reason.startswith(f"{gap} is 12: ")


def test_hits_of_a_large_loop() -> None:
    first = np.tile(np.arange(0, 100_000, 1000), 5)
    policy = Belady(50_001, 100_000)
    hits = policy.replay(first, np.full_like(first, 1000))
    assert int(hits.sum()) / 400_000 == pytest.approx(50_000 / 99_999, abs=1e-4)  # (S - 1) / (N - 1): no bypass
    assert len(policy.resident()) == 50_001
