"""Periods: the interval that comes most often, whatever else happens between passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.loops import OCTAVES, Intervals, Period


def of(*blocks: int) -> Intervals:
    intervals = Intervals()
    for each in blocks:
        intervals.add(each * 1000, each)
    return intervals


def test_without_intervals_there_is_no_period() -> None:
    assert Intervals().period() is None
    assert Intervals().rhythms() == ()
    assert Intervals().regularity() == 0


def test_a_pause_does_not_move_the_period() -> None:
    intervals = of(*[100] * 10)
    intervals.add(60_000_000_000, 100)  # the user went for coffee: time passes, nothing is accessed
    assert intervals.period() == Period(100_000, 100)
    intervals.add(100_000_000, 100_000)  # another model ran in between
    assert intervals.period() == Period(100_000, 100)
    assert intervals.regularity() == pytest.approx(11 / 12)


@pytest.mark.parametrize("border", [64, 1024, 1 << 20])
def test_a_period_at_the_border_of_octaves_is_one(border: int) -> None:
    period = of(border - 1, border + 1, border - 1, border + 1, border * 40, border * 40, border * 40).period()
    assert period is not None
    assert period.blocks == border


def test_a_layer_read_twice_a_pass_has_two_rhythms() -> None:
    intervals = of(*[200, 7800] * 10)
    assert [rhythm.blocks for rhythm in intervals.rhythms()] == [200, 7800]
    assert intervals.period() == Period(7_800_000, 7800)  # equally frequent: the longer one


def test_an_accident_is_no_rhythm() -> None:
    assert [rhythm.blocks for rhythm in of(*[100] * 20, 5000).rhythms()] == [100]


def test_copies_are_apart() -> None:
    intervals = of(10)
    twin = intervals.copy()
    twin.add(5, 4000)
    twin.add(5, 4000)
    assert len(intervals) == 1
    assert intervals.period() == Period(10_000, 10)
    assert twin.period() == Period(5, 4000)


@given(st.lists(st.tuples(st.integers(-5, 1 << 63), st.integers(-5, 1 << 63)), max_size=300))
def test_bounded_and_within_what_was_added(added: list[tuple[int, int]]) -> None:
    intervals = Intervals()
    for ns, blocks in added:
        intervals.add(ns, blocks)
    assert len(intervals) == len(added)
    assert len(intervals._octaves) <= OCTAVES
    period = intervals.period()
    if added:
        assert period is not None
        assert min(max(1, blocks) for _, blocks in added) <= period.blocks <= max(max(1, blocks) for _, blocks in added)
        assert 0 < intervals.regularity() <= 1
