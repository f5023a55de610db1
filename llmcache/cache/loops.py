"""What the passes over a loop space prove: that it loops, in which order, and with which period.

A file is cut into extents; an order maps a *rank* (place in the loop) to an extent. It starts as file order or as a
model header's guess. A `PassRecorder` writes down the extents in the order in which they are touched; when an extent
comes round again the pass is over, and `LoopOrder.adopt` turns it into the new order. Extents that were not seen
(pinned ones cause no request) stay behind the extent that preceded them before.

One finder for all who watch extents being touched: the mount's groups (clock in nanoseconds, every touch of a reader) and
the deterministic core in `steering` (clock in references). The classifier of traces (`detector`) has runs, and tells more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from llmcache.cache.intervals import Intervals

ORDER_TOLERANCE = 0.05  # share of backward steps above which a pass replaces the order
CHANCE_DISORDER = 0.25  # that of references without order, of which many may miss each other by chance, is about a half
LEAST_APART = 16  # extents: threads of one reader are nearer to each other
PROOF = 8  # so much of a pass has to be made again, inverted, before what was read looks like a loop


@dataclass(frozen=True)
class Pass:
    """One completed pass: extents in the order of their first touch, and when it ran, by the clock of its recorder."""

    extents: Sequence[int]
    started: int
    ended: int

    @property
    def duration(self) -> int:
        """From the first touch to the touch that began the next pass."""
        return self.ended - self.started


class PassRecorder:
    """Cuts a sequence of touched extents into passes.

    A repeat ends the pass only if at least half of the pass, and `least` extents, lie between the two touches: threads
    that work on neighbouring stripes touch an extent twice in short order, and that is no new pass. The clock is the
    caller's: any unit that never goes back (nanoseconds, references).
    """

    def __init__(self, least: int = 2) -> None:
        self._least = least
        self._extents = array("I")  # in the order of their first touch
        self._places = array("I")  # by extent: its place in this pass, counted from 1; 0 for none
        self._started = 0

    def __len__(self) -> int:
        return len(self._extents)

    def note(self, extent: int, now: int) -> Pass | None:
        """Returns the pass that this touch of `extent` at `now` ends, or None."""
        if extent >= len(self._places):
            self._places.frombytes(bytes(self._places.itemsize * (extent + 1 - len(self._places))))
        place = self._places[extent]
        if not place:
            if not self._extents:
                self._started = now
            self._extents.append(extent)
            self._places[extent] = len(self._extents)
            return None
        if len(self._extents) - (place - 1) < max(self._least, len(self._extents) // 2):
            return None
        done = Pass(self._extents, self._started, now)
        self._extents = array("I", (extent,))
        self._places = array("I", bytes(self._places.itemsize * len(self._places)))
        self._places[extent] = 1
        self._started = now
        return done


class LoopOrder:
    """A permutation of the extents 0..count-1: `rank_of[extent]` and `extent_at[rank]`."""

    def __init__(self, count: int, first_guess: Iterable[int] | None = None) -> None:
        self.extent_at = array("I", range(count) if first_guess is None else first_guess)
        if first_guess is not None and sorted(self.extent_at) != list(range(count)):
            raise ValueError(f"first_guess is not a permutation of {count} extents")
        self.rank_of = self.extent_at[:]
        self._index()

    def __len__(self) -> int:
        return len(self.extent_at)

    def _index(self) -> None:
        for rank, extent in enumerate(self.extent_at):
            self.rank_of[extent] = rank

    def extend(self, count: int) -> None:
        """Adds extents at the end, so that there are `count`."""
        more = array("I", range(len(self), count))
        self.extent_at.extend(more)
        self.rank_of.extend(more)

    def adopt(self, seen: Sequence[int]) -> array[int]:
        """Makes `seen` (distinct extents, in touch order) the order; returns the old rank of each new rank."""
        places = array("i", [-1]) * len(self)
        for index, extent in enumerate(seen):
            places[extent] = index
        # A seen extent leads its group: the unseen ones that followed it keep their distance to it.
        leaders = array("i", accumulate((places[extent] for extent in self.extent_at), _latest))
        old_ranks = array("I", sorted(range(len(self)), key=leaders.__getitem__))
        old = self.extent_at[:]
        for rank, old_rank in enumerate(old_ranks):
            self.extent_at[rank] = old[old_rank]
        self._index()
        return old_ranks

    def disorder(self, seen: Sequence[int]) -> float:
        """Share (0..1) of the steps in `seen` that do not go forward in this order (a wrap counts as one step)."""
        return _backward_share([self.rank_of[extent] for extent in seen])


def disagreement(first: Sequence[int], second: Sequence[int]) -> float:
    """Share (0..1) of the steps of the pass `second` that do not go forward in the pass `first`.

    Extents that only one of them has seen do not count.
    """
    place = {extent: index for index, extent in enumerate(first)}
    return _backward_share([place[extent] for extent in second if extent in place])


def _latest(before: int, place: int) -> int:
    return before if place < 0 else place


def _backward_share(ranks: Sequence[int]) -> float:
    if len(ranks) < 2:
        return 0.0
    back = sum(later < earlier for earlier, later in pairwise(ranks))
    return max(0, back - 1) / (len(ranks) - 1)


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
        self._recorder = PassRecorder(max(2, min(LEAST_APART, count // 4)))
        self._intervals = Intervals()
        self._unproved: Sequence[int] = ()  # the last pass in another order than the present one
        self._scan: Pass | None = None  # of what does not loop yet: one page of it that is read again makes no loop

    def believe(self, guess: Iterable[int]) -> None:
        """Takes a header's word: it loops, and after the first pass in the order of `guess`, added to what is guessed."""
        self.guess.extend(guess)
        self.looping = self.guessed = True

    def note(self, extent: int, now: int) -> Pass | None:
        """Records a touch of `extent`; returns the pass that this ends, or proves to have been one, if any."""
        done = self._recorder.note(extent, now)
        if self.looping:
            return done
        if done is not None and (self._scan is None or len(done.extents) >= len(self._scan.extents)):
            self._scan = done
        if self._scan is None or len(self._recorder) < max(2, len(self._scan.extents) // PROOF):
            return None
        done, self._scan = self._scan, None
        return done

    def learn(self, done: Pass, visible: int) -> Lesson:
        """Takes a completed pass as evidence, unless it is less than half of the `visible` extents, or looks like chance."""
        whole = len(done.extents) >= visible * 4 // 5
        if len(done.extents) < max(1, visible // 2):
            return Lesson(counts=False)
        if not (self.looping or whole) and self.order.disorder(done.extents) > CHANCE_DISORDER:
            return Lesson(counts=False)
        self.passes += 1
        # What is pinned in the page cache is touched by nobody: by their share of the rest, passes are alike in any budget.
        self._intervals.add(done.duration, min(len(self.order), len(done.extents) * len(self.order) // max(1, visible)))
        usual = self._intervals.period()
        self.period = None if usual is None else usual.ns
        changed = not self.looping
        self.looping, self.guessed = True, False
        if whole and self.order.disorder(done.extents) > ORDER_TOLERANCE:
            # Believed when it comes twice: readers apart from each other mix their touches anew in every pass.
            proved = bool(self._unproved) and disagreement(self._unproved, done.extents) <= ORDER_TOLERANCE
            self._unproved = done.extents
            if proved:
                return Lesson(True, True, self.order.adopt(done.extents))
        elif self.passes == 1 and self.order.disorder(self.guess) > ORDER_TOLERANCE:
            # Loading reads a file from front to back; what comes after it is the order of computation.
            return Lesson(True, True, self.order.adopt(self.guess))
        return Lesson(True, changed)
