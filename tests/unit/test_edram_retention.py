"""Retention curves: the log-normal through the paper's anchors, curves through points, and what cannot be one."""

from __future__ import annotations

import math

import pytest

from llmcache.edram.constants import KELLE_INTERVALS, TABLE4_INTERVALS, Intervals
from llmcache.edram.retention import LogNormal, Points, paper_curve, parse_curve, parse_intervals
from llmcache.errors import UsageError


def test_the_papers_anchors_give_a_width_of_2_38() -> None:
    curve = paper_curve()
    assert curve.sigma == pytest.approx(2.379, rel=0.02)
    assert curve.failure(45e3) == pytest.approx(1e-6, rel=1e-6)
    found = [curve.failure(interval) for interval in KELLE_INTERVALS.in_order()]
    assert found == pytest.approx([5.2e-5, 3.1e-3, 4.9e-4, 4.4e-3], rel=0.02)
    assert sum(found) / 4 == pytest.approx(2e-3, rel=1e-9)
    assert curve.failure(1.05e6) == pytest.approx(3.0e-4, rel=0.02)


@pytest.mark.parametrize(("printed_ns", "intervals"), TABLE4_INTERVALS.items())
def test_2drp_loses_more_bits_than_the_uniform_interval_beside_it(printed_ns: int, intervals: Intervals) -> None:
    """Table 4 compares at equal refresh power, not "the same average failure rate" (section 7.2)."""
    assert intervals.mean_ns == pytest.approx(printed_ns, rel=0.005)
    curve = paper_curve()
    mean = sum(curve.failure(interval) for interval in intervals.in_order()) / 4
    assert mean > 3 * curve.failure(printed_ns)


@pytest.mark.parametrize("curve", [paper_curve(), LogNormal(1e6, 0.5), Points(((1e3, 1e-7), (1e5, 1e-3), (1e6, 0.2)))])
def test_a_curve_rises_and_its_inverse_is_one(curve: LogNormal | Points) -> None:
    intervals = [10**power for power in range(3, 10)]
    found = [curve.failure(interval) for interval in intervals]
    assert found == sorted(found) and found[0] >= 0 and found[-1] <= 1
    for interval, failure in zip(intervals, found, strict=True):
        if 1e-12 < failure < 1 - 1e-12:
            assert curve.interval_ns(failure) == pytest.approx(interval, rel=1e-3)


def test_points_are_met_and_between_two_of_a_log_normal_lies_the_log_normal() -> None:
    curve = paper_curve()
    points = tuple((interval, curve.failure(interval)) for interval in (45e3, 1e6, 7e6))
    through = Points(points)
    for interval in (1e3, 45e3, 3e5, 1e6, 7e6, 1e9):
        assert through.failure(interval) == pytest.approx(curve.failure(interval), rel=1e-5)


def test_small_tails_keep_their_digits() -> None:
    assert LogNormal.through(45e3, 1e-15, 1.0).failure(45e3) == pytest.approx(1e-15, rel=1e-6)


@pytest.mark.parametrize("text", ["", "45us", "45us=x", "45us=1e-6", "1ms=1e-3,45us=1e-2", "45us=1e-3,1ms=1e-3", "1s=0"])
def test_what_is_no_curve_is_named(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_curve(text)
    assert caught.value.hint


def test_texts_of_curves_and_intervals() -> None:
    assert parse_curve("paper") is paper_curve()
    assert parse_curve("45us=1e-6, 1.05ms=3e-4").failure(1_050_000) == pytest.approx(3e-4)
    assert parse_intervals("1050us") == Intervals.uniform(1_050_000)
    assert parse_intervals("360us,5.4ms,1.44ms,7.2ms") == KELLE_INTERVALS
    for text in ("", "0s", "1ms,2ms", "1ms,2ms,3ms,0s"):
        with pytest.raises(UsageError):
            parse_intervals(text)


def test_curves_that_cannot_be() -> None:
    for median, sigma in ((0, 1), (-1, 1), (math.inf, 1), (1, 0), (1, math.nan)):
        with pytest.raises(ValueError, match=r"^(median_ns|sigma): "):
            LogNormal(median, sigma)
    with pytest.raises(ValueError, match=r"^failure: "):
        paper_curve().interval_ns(1.0)
    with pytest.raises(ValueError, match=r"^mean_failure: "):
        LogNormal.fitted(45e3, 1e-6, KELLE_INTERVALS, 0.9)
