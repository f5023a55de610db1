"""The probability that a bit is lost, as a curve over the refresh interval.

Source: kelle.txt, sections 3.2 and 7.1, figure 4, whose text gives only two points: at 45 us almost nothing is lost, and the
intervals of section 7.1 lose 2e-3 on average. Log-normal is the form measured on silicon (Edri et al., TCAS-I 63(2), 2016).
Its width is uncertain: 1.7 to 3.1 for failure rates of 1e-8 to 1e-5 at 45 us.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from llmcache.errors import UsageError
from llmcache.papers.edram.constants import FAILURE_RATE, GROUPS, KELLE_INTERVALS, RETENTION_NS, RefreshIntervals
from llmcache.units import parse_duration


@dataclass(frozen=True)
class LogNormal:
    """Log-normal retention times: half of the bits hold for `median_ns`."""

    median_ns: float
    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.median_ns < math.inf:
            raise ValueError(f"median_ns: must be more than 0 and finite, not {self.median_ns}")
        if not 0 < self.sigma < math.inf:
            raise ValueError(f"sigma: must be more than 0 and finite, not {self.sigma}")

    def failure(self, interval_ns: float) -> float:
        return _cumulative(math.log(interval_ns / self.median_ns) / self.sigma)

    @classmethod
    def through(cls, interval_ns: float, failure: float, sigma: float) -> LogNormal:
        return cls(interval_ns * math.exp(-sigma * _quantile(failure)), sigma)


@dataclass(frozen=True)
class Points:
    """A curve through measured points (interval in ns, failure), both ascending; log-normal between and beyond them."""

    points: Sequence[tuple[float, float]]

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise UsageError(f"points: a curve needs at least 2, not {len(self.points)}", _POINTS_HINT)
        for interval, failure in self.points:
            if not 0 < interval < math.inf or not 0 < failure < 1:
                raise UsageError(
                    f"points: {interval:g} ns={failure:g} is not an interval and a failure between 0 and 1", _POINTS_HINT
                )
        for (early, low), (late, high) in zip(self.points, self.points[1:], strict=False):
            if early >= late or low >= high:
                raise UsageError(f"points: must both rise, not {early:g} ns={low:g}, {late:g} ns={high:g}", _POINTS_HINT)

    def failure(self, interval_ns: float) -> float:
        places = [(math.log(interval), _quantile(failure)) for interval, failure in self.points]
        return _cumulative(_along(places, math.log(interval_ns)))


RetentionCurve = LogNormal | Points
"""The probability that a bit fails, by refresh interval; it never falls as the interval grows."""
_POINTS_HINT = "write intervals and failure rates, both rising: 45us=1e-6,1.05ms=3e-4,7.2ms=4e-3"


@functools.cache
def paper_curve() -> LogNormal:
    """Return the curve through 1e-6 at 45 us and 2e-3 as the mean of section 7.1 (sigma 2.38).

    Differs from the paper: it prints neither the value at 45 us nor the curve.
    """
    narrow, wide = 0.75, 8.0
    for _ in range(80):  # bisection: through a point below one half, wider curves lose less in this range
        curve = LogNormal.through(RETENTION_NS, 1e-6, (narrow + wide) / 2)
        if sum(map(curve.failure, KELLE_INTERVALS.in_order())) / len(GROUPS) > FAILURE_RATE:
            narrow = curve.sigma
        else:
            wide = curve.sigma
    return LogNormal.through(RETENTION_NS, 1e-6, (narrow + wide) / 2)


def parse_curve(text: str) -> RetentionCurve:
    """Parse "paper", or points such as "45us=1e-6,1.05ms=3e-4"; UsageError if invalid."""
    if text.strip() == "paper":
        return paper_curve()
    points = []
    for part in text.split(","):
        interval, _, failure = part.partition("=")
        try:
            points.append((float(parse_duration(interval)), float(failure)))
        except ValueError:
            raise UsageError(f"points: '{part.strip()}' is not an interval and its failure rate", _POINTS_HINT) from None
    return Points(tuple(points))


def parse_intervals(text: str) -> RefreshIntervals:
    """Parse one interval ("1050us") or four, in the order of `GROUPS`."""
    parts = [float(parse_duration(part)) for part in text.split(",")]
    if len(parts) not in (1, 4) or min(parts) <= 0:
        raise UsageError(
            f"'{text}' is neither one interval nor four above 0", "write, for example: 360us,5.4ms,1.44ms,7.2ms"
        )
    return RefreshIntervals.uniform(parts[0]) if len(parts) == 1 else RefreshIntervals(*parts)


def _cumulative(z: float) -> float:
    # erfc keeps the digits of a small tail, which 1 + erf would lose.
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _quantile(probability: float) -> float:
    if not 0 < probability < 1:
        raise ValueError(f"failure: must be between 0 and 1, not {probability}")
    return NormalDist().inv_cdf(probability)


def _along(places: Sequence[tuple[float, float]], x: float) -> float:
    last = max(1, min(sum(place[0] <= x for place in places), len(places) - 1))
    (left, low), (right, high) = places[last - 1 : last + 1]
    return low + (high - low) * (x - left) / (right - left)
