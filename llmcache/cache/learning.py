"""What the passes over a loop space prove: that it loops, in which order, and with which period.

One implementation for all who watch extents being touched: the mount's groups (clock in nanoseconds, every touch of a
reader) and the deterministic core in `steering` (clock in references). The detector of traces has runs, not extents.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmcache.cache.intervals import Intervals
from llmcache.cache.order import LoopOrder, Pass, PassRecorder, disagreement

ORDER_TOLERANCE = 0.05  # share of backward steps above which a pass replaces the order


class Lesson(NamedTuple):
    """What a pass has taught. `old_ranks` gives the old rank of each new one where the order was replaced."""

    counts: bool  # as evidence; all else follows from it
    changed: bool = False  # class or order: the plan is due
    old_ranks: array[int] | None = None


class LoopLearner:
    """Order, class and period of `count` extents; `looping` by a header's guess or an observed second pass."""

    def __init__(self, count: int, first_guess: Iterable[int] | None = None) -> None:
        self.order = LoopOrder(count, first_guess)
        self.looping = False
        self.guessed = False
        self.guess = array("I")  # extents in the order a decoder computes, from the headers
        self.passes = 0
        self.period: int | None = None  # the usual one: a pause does not change it
        self._recorder = PassRecorder()
        self._intervals = Intervals()
        self._unproved: Sequence[int] = ()  # the last pass in another order than the present one

    def believe(self, guess: Iterable[int]) -> None:
        """Takes a header's word: it loops, and after the first pass in the order of `guess`, added to what is guessed."""
        self.guess.extend(guess)
        self.looping = self.guessed = True

    def note(self, extent: int, now: int) -> Pass | None:
        """Records a touch of `extent`; returns the pass that this ends, if any."""
        return self._recorder.note(extent, now)

    def learn(self, done: Pass, visible: int) -> Lesson:
        """Takes a completed pass as evidence, unless it is less than half of the `visible` extents."""
        if len(done.extents) < max(1, visible // 2):
            return Lesson(counts=False)
        self.passes += 1
        # What is pinned in the page cache is touched by nobody: by their share of the rest, passes are alike in any budget.
        self._intervals.add(done.duration, min(len(self.order), len(done.extents) * len(self.order) // max(1, visible)))
        usual = self._intervals.period()
        self.period = None if usual is None else usual.ns
        changed = not self.looping
        self.looping, self.guessed = True, False
        if len(done.extents) >= visible * 4 // 5 and self.order.disorder(done.extents) > ORDER_TOLERANCE:
            # Believed when it comes twice: readers apart from each other mix their touches anew in every pass.
            proved = bool(self._unproved) and disagreement(self._unproved, done.extents) <= ORDER_TOLERANCE
            self._unproved = done.extents
            if proved:
                return Lesson(True, True, self.order.adopt(done.extents))
        elif self.passes == 1 and self.order.disorder(self.guess) > ORDER_TOLERANCE:
            # Loading reads a file from front to back; what comes after it is the order of computation.
            return Lesson(True, True, self.order.adopt(self.guess))
        return Lesson(True, changed)
