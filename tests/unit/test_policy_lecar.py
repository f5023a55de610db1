"""LeCaR: what its authors publish and what its weights learn. Belady: on which traces it would not be exact."""

from __future__ import annotations

import numpy as np
import pytest

from llmcache.arrays import Int64s
from llmcache.cache.policies.belady import GAPS, Belady, why_not_exact
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


@pytest.mark.parametrize(
    ("provenance", "reason"),
    [
        *((Provenance(tier), None) for tier in ("synthetic", "csv", "oracleGeneral", "mount", "strace")),
        (Provenance("mount", lost_events=3), "lost_events is 3: accesses are missing from the trace"),
        (Provenance("faults", extra={"unseen": "touches of mapped pages"}), "unseen: touches of mapped pages"),
        *((Provenance("strace", extra={gap: "12"}), f"{gap} is 12: {meaning}") for gap, meaning in GAPS.items()),
    ],
)
def test_on_which_traces_belady_would_not_be_exact(provenance: Provenance, reason: str | None) -> None:
    assert why_not_exact(provenance) == reason


def test_hits_of_a_large_loop() -> None:
    first = np.tile(np.arange(0, 100_000, 1000), 5)
    policy = Belady(50_001, 100_000)
    hits = policy.replay(first, np.full_like(first, 1000))
    assert int(hits.sum()) / 400_000 == pytest.approx(50_000 / 99_999, abs=1e-4)  # (S - 1) / (N - 1): no bypass
    assert len(policy.resident()) == 50_001
