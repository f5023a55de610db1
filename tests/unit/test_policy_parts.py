"""LeCaR as its authors publish it, where Belady would not be exact, and what policies are made of."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import pytest

from llmcache.cache.policies.base import kernel, told_compiling
from llmcache.cache.policies.belady import GAPS, why_not_exact
from llmcache.cache.policies.lfu import LeCaR
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


def test_on_which_traces_belady_would_not_be_exact() -> None:
    assert why_not_exact(Provenance("synthetic")) is None
    assert why_not_exact(Provenance("mount", lost_events=3)) == "lost_events is 3: accesses are missing from the trace"
    unseen = Provenance("filemap", extra={"unseen": "touches of mapped pages"})
    assert why_not_exact(unseen) == "unseen: touches of mapped pages"
    for gap, meaning in GAPS.items():
        assert why_not_exact(Provenance("strace", extra={gap: "12"})) == f"{gap} is 12: {meaning}"


# What policies are made of


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
