"""Where a falling line turns into a plateau: passes get shorter with the cache until storage keeps up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import BenchError

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Knee:
    """A line (seconds = `at_zero_s` + `slope` * cache bytes) that ends at a plateau of `plateau_s`, at `cache_bytes`."""

    cache_bytes: float
    plateau_s: float
    at_zero_s: float
    slope: float

    def seconds(self, cache_bytes: float) -> float:
        """Return the fitted pass at a cache of `cache_bytes`."""
        return max(self.plateau_s, self.at_zero_s + self.slope * cache_bytes)


def find_knee(points: Points) -> Knee:
    """Return the knee that fits `points` (cache bytes, seconds) with the least absolute error.

    At least two points are taken for the line and two for the plateau; the line is that of Theil and Sen (median of all
    slopes), the plateau a median, so that one disturbed point moves neither. BenchError where nothing falls.
    """
    ordered = sorted(points)
    fits = [_fit(ordered[:split], ordered[split:]) for split in range(2, len(ordered) - 1)]
    falling = [fit for fit in fits if fit is not None]
    if not falling:
        raise BenchError(
            "passes do not get shorter with a larger cache", "the machine is too busy, or all budgets are on one side"
        )
    return min(falling, key=lambda knee: sum(abs(seconds - knee.seconds(size)) for size, seconds in ordered))


def _fit(line: Points, plateau: Points) -> Knee | None:
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(line) for b in line[i + 1 :] if a[0] != b[0]]
    slope = statistics.median(slopes) if slopes else 0.0
    if slope >= 0:
        return None
    at_zero_s = statistics.median(seconds - slope * size for size, seconds in line)
    level_s = statistics.median(seconds for _, seconds in plateau)
    return Knee((level_s - at_zero_s) / slope, level_s, at_zero_s, slope)
