"""Counts of waits: classes, quantiles, differences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.fs.client.top import quantile_s, waits_between
from llmcache.fs.engine.state import BOUNDS_NS
from tests.unit.top_parts import waits

DURATIONS = st.lists(st.integers(0, 20_000_000_000), max_size=50)


def test_a_bound_belongs_to_its_class() -> None:
    found = waits(*BOUNDS_NS, BOUNDS_NS[-1] + 1)
    assert found["counts"] == [1] * (len(BOUNDS_NS) + 1)
    assert found["bounds_s"][0] == 0.0001 and found["bounds_s"][-1] == 3.0


@given(DURATIONS, DURATIONS)
def test_what_is_between_two_moments_is_what_came_in_between(before: list[int], later: list[int]) -> None:
    now = waits(*before, *later)
    found = waits_between(waits(*before), now)
    assert found["counts"] == waits(*later)["counts"]
    assert found["sum_s"] == pytest.approx(sum(later) / 1e9)
    assert waits_between(None, now) == now


@given(DURATIONS, st.sampled_from([0.1, 0.5, 0.99, 1.0]))
def test_a_quantile_is_the_least_bound_that_enough_do_not_exceed(durations: list[int], share: float) -> None:
    found = quantile_s(waits(*durations), share)
    if not durations:
        assert found is None
        return
    assert found is not None
    within = sum(each <= found * 1e9 for each in durations)
    assert within >= share * len(durations)
    lower = [bound / 1e9 for bound in BOUNDS_NS if bound / 1e9 < found]
    if lower:
        assert sum(each <= lower[-1] * 1e9 for each in durations) < share * len(durations)
