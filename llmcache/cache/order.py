"""Visiting order of a loop's extents, learned from the passes that were really made.

A file is cut into extents; an order maps a *rank* (place in the loop) to an extent. It starts as file order or as a
model header's guess. A `PassRecorder` writes down the extents in the order in which they are touched; when an extent
comes round again the pass is over, and `LoopOrder.adopt` turns it into the new order. Extents that were not seen
(pinned ones cause no request) stay behind the extent that preceded them before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


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

    A repeat ends the pass only if at least half of the pass lies between the two touches: threads that work on
    neighbouring stripes touch an extent twice in short order, and that is no new pass. The clock is the caller's: any
    unit that never goes back (nanoseconds, references).
    """

    def __init__(self) -> None:
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
        if len(self._extents) - (place - 1) < max(2, len(self._extents) // 2):
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
