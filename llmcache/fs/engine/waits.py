"""How long readers waited for extents: counts by time, cheap enough to keep for every wait.

Only waits are counted, never hits: a wait takes as long as a request to storage, counting it a microsecond.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

BOUNDS_NS = tuple(number * 10**power for power in range(5, 10) for number in (1, 3))
"""Upper bounds of the classes, from 0.1 ms to 3 s, inclusive; what takes longer is in one class more."""


class Waits:
    """Waits for one reason, since the mount began. Every method expects the engine's lock."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_NS) + 1)
        self._total_ns = 0

    def add(self, waited_ns: int) -> None:
        """Counts one wait."""
        self._counts[bisect_left(BOUNDS_NS, waited_ns)] += 1
        self._total_ns += waited_ns

    def as_dict(self) -> dict[str, Any]:
        """Returns {"bounds_s", "counts" (by class, one more than bounds), "sum_s"}."""
        bounds = [bound / 1e9 for bound in BOUNDS_NS]
        return {"bounds_s": bounds, "counts": list(self._counts), "sum_s": self._total_ns / 1e9}


def between(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Returns the waits of `now` that `before` (of the same mount, earlier; None: nothing) does not have."""
    if before is None:
        return now
    counts = [count - old for count, old in zip(now["counts"], before["counts"], strict=True)]
    return {**now, "counts": counts, "sum_s": now["sum_s"] - before["sum_s"]}


def quantile_s(waits: dict[str, Any], share: float) -> float | None:
    """Returns seconds that at least `share` (0..1) of the waits did not exceed; None without any, infinity beyond 3 s.

    The upper bound of a class, not an estimate within it.
    """
    counts: Sequence[int] = waits["counts"]
    total, passed = sum(counts), 0
    for bound, count in zip([*waits["bounds_s"], float("inf")], counts, strict=True):
        passed += count
        if count and passed >= share * total:
            return float(bound)
    return None
