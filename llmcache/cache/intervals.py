"""Times between the passes over one place, and the period that they show.

Intervals are counted by octave, in blocks accessed meanwhile: that measure does not know whether the user paused or the
storage was slow. The most frequent octave gives the period, so that a pause between two prompts, or the first short pass,
does not move it. Time is the median of what was seen in that octave last.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

OCTAVES = 64  # clocks are 64-bit
TOLERANCE = 0.25  # half the spread of an octave (1 : 2) around its middle, 1.5
RARE = 8  # an octave with less than this part of all intervals is an accident, not a rhythm
RECENT = 9  # intervals of an octave whose time is remembered: an odd number has a middle


@dataclass
class _Octave:
    count: int = 0
    blocks: int = 0
    times_ns: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def mean(self) -> float:
        return self.blocks / self.count


@dataclass(frozen=True)
class Period:
    """How often a loop comes round: time (ns) and blocks accessed from one pass to the next."""

    ns: int
    blocks: int


class Intervals:
    """Counts intervals; bounded by `OCTAVES` entries, whatever is added."""

    def __init__(self) -> None:
        self._octaves: dict[int, _Octave] = {}

    def __len__(self) -> int:
        return sum(octave.count for octave in self._octaves.values())

    def add(self, ns: int, blocks: int) -> None:
        """Counts one interval of `ns` nanoseconds in which `blocks` blocks were accessed (at least 1)."""
        blocks, ns = max(1, blocks), max(0, ns)
        octave = self._octaves.setdefault(min(OCTAVES - 1, blocks.bit_length()), _Octave())
        octave.count += 1
        octave.blocks += blocks
        octave.times_ns.append(ns)

    def copy(self) -> Intervals:
        """Returns an independent copy: a place was cut in two."""
        twin = Intervals()
        for key, octave in self._octaves.items():
            twin._octaves[key] = _Octave(octave.count, octave.blocks, deque(octave.times_ns, RECENT))
        return twin

    def period(self) -> Period | None:
        """Returns the most frequent interval, the longer one of two that are equally frequent; None without any."""
        if not self._octaves:
            return None
        chosen = self._commonest()
        times = [time for octave in chosen for time in octave.times_ns]
        return Period(round(median(times)), sum(octave.blocks for octave in chosen) // _count(chosen))

    def regularity(self) -> float:
        """Returns which part (0..1) of the intervals was about the period; 0 without any."""
        return _count(self._commonest()) / len(self) if self._octaves else 0.0

    def _commonest(self) -> list[_Octave]:
        return max((self._alike(key) for key in sorted(self._octaves, reverse=True)), key=_count)

    def _alike(self, key: int) -> list[_Octave]:
        """The octave `key`, with a neighbour whose mean is about the same: a period at the border falls into both."""
        mine = self._octaves[key]
        near = (self._octaves[other] for other in (key - 1, key + 1) if other in self._octaves)
        return [mine, *(octave for octave in near if is_about(octave.mean, mine.mean))]

    def rhythms(self) -> tuple[Period, ...]:
        """Returns all intervals that keep coming, shortest first: a layer read twice a pass has two. Empty without any.

        The longest is what to wait for before giving up.
        """
        least = max(1, len(self) // RARE)
        shown = [octave for _, octave in sorted(self._octaves.items()) if octave.count >= least]
        return tuple(Period(round(median(octave.times_ns)), octave.blocks // octave.count) for octave in shown)


def is_about(value: float, other: float) -> bool:
    """Whether two intervals can be the same period: they differ by less than TOLERANCE of the longer one."""
    return abs(value - other) < TOLERANCE * max(value, other)


def _count(octaves: list[_Octave]) -> int:
    return sum(octave.count for octave in octaves)
