"""LeCaR as its authors publish it, where Belady would not be exact, and what policies are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numba
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from llmcache.cache.policies import structures
from llmcache.cache.policies.base import kernel, told_compiling
from llmcache.cache.policies.belady import GAPS, Belady, why_not_exact
from llmcache.cache.policies.lfu import LeCaR
from llmcache.cache.policies.structures import MOST, SAMPLE, estimate, new_sketch, note
from llmcache.errors import EnvironmentProblem
from llmcache.trace.record import Provenance


@pytest.mark.parametrize(("passes", "expected"), [(20, 0.85035), (50, 0.8788), (100, 0.88834)])
def test_a_loop_has_the_hit_ratio_of_the_authors_program(passes: int, expected: float) -> None:
    """N = 1000, S = 900: .879 is that of 50 passes; it rises towards the 0.9 of a cache that keeps S blocks for good."""
    cache, ids = LeCaR(900, 1000), np.tile(np.arange(1000), passes)
    assert cache.replay(ids, np.ones_like(ids)).mean() == pytest.approx(expected, abs=1e-9)
    assert cache.weights.sum() == pytest.approx(1, abs=1e-6) and cache.weights[1] > 0.9, "it trusts LFU"


def test_a_moving_working_set_teaches_it_to_trust_lru() -> None:
    """Old blocks with high frequencies never come back: LFU gives up blocks that are still wanted."""
    source = np.random.default_rng(1)
    ids = np.concatenate([source.integers(start, start + 150, 3000) for start in range(0, 3000, 150)])
    cache = LeCaR(100, 3150)
    cache.replay(ids, np.ones_like(ids))
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


# What policies are made of


def test_links_take_eight_bytes_a_block_and_a_set_of_times_a_bit_a_time() -> None:
    assert structures.new_links(1000, 1).nbytes == 8 * 1001
    assert structures.new_timeset(1_000_000).words.nbytes < 1.04 * 1_000_000 / 8


def test_the_sketch_counts_up_to_sixteen() -> None:
    sketch = new_sketch(100)
    for times in range(1, 30):
        note(sketch, 5)
        assert estimate(sketch, 5) == min(times, MOST + 1)  # the doorkeeper knows one more
    assert estimate(sketch, 6) == 0


def test_the_sketch_is_never_too_low_and_seldom_too_high() -> None:
    sketch = new_sketch(1000)
    ids = (3000 * np.random.default_rng(3).random(SAMPLE * 1000 - 1) ** 2).astype(np.int64)
    for block in ids.tolist():
        note(sketch, block)
    true = Counter(ids.tolist())
    above = [estimate(sketch, block) - min(true[block], MOST + 1) for block in range(3000)]
    assert min(above) >= 0
    assert sum(value > 0 for value in above) < 0.05 * len(above)


def test_a_full_sample_halves_the_counts_and_empties_the_doorkeeper() -> None:
    sketch = new_sketch(10)
    for _ in range(9):
        note(sketch, 1)
    for _ in range(SAMPLE * 10 - 10):
        note(sketch, 2)
    assert (estimate(sketch, 1), estimate(sketch, 2)) == (9, 16)
    note(sketch, 2)
    assert sketch.sample[0] == 0
    assert not sketch.door.any()
    assert (estimate(sketch, 1), estimate(sketch, 2)) == (4, 7)


def test_parts_are_compiled_only_within_the_policies_that_call_them() -> None:
    compiled = [name for name, value in vars(structures).items() if isinstance(value, Dispatcher)]
    assert compiled == ["note", "estimate"]


def test_it_is_told_when_something_is_compiled_and_when_that_is_done() -> None:
    part: Callable[[float], float] = numba.njit(lambda value: value + 1)
    whole: Callable[[int], int] = numba.njit(lambda value: 2 * part(value))
    told: list[bool] = []
    with told_compiling(told.append):
        assert whole(1) == whole(2) - 2 == 4
    part(1.0)
    assert told == [True, False]


def test_a_kernel_that_can_be_kept_nowhere_names_the_cure() -> None:
    known: dict[str, Callable[[], None]] = {}
    exec("def loop():\n    return", known)  # has no file to be kept beside, nor one to be found again by
    with pytest.raises(EnvironmentProblem) as raised:
        kernel(known["loop"])
    assert "NUMBA_CACHE_DIR" in str(raised.value.hint)
