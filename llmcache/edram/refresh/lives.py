"""Lives of rows: from the write to the eviction, with the steps in which a row changed between the score groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
NONE = -1
KINDS = ("kv", "x")


@dataclass(frozen=True)
class Life:
    """`count` equal rows of a `kind` ("kv": a pair of key and value of one head; "x") that live from step `begin` on.

    `path`: (high score?, the step at which that ends) of each stretch; the last one ends with the row.
    """

    kind: str
    begin: int
    path: tuple[tuple[bool, int], ...]
    count: int = 1


@dataclass(frozen=True)
class Flow:
    """Rows of one kind in one step: living with a high and a low score, new, gone, and raised from low to high."""

    high: int = 0
    low: int = 0
    appended: int = 0
    evicted: int = 0
    promoted: int = 0

    def __add__(self, other: Flow) -> Flow:
        mine, theirs = vars(self), vars(other)
        return Flow(**{name: mine[name] + theirs[name] for name in mine})


@dataclass
class Tracker:
    """Follows the rows of one array of places (a layer's slots, or its x rows) from step to step."""

    kind: str
    lives: Counter[Life] | None = None
    _ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _high: Flags = field(default_factory=lambda: np.empty(0, np.bool_))
    _begins: dict[int, tuple[int, list[tuple[bool, int]]]] = field(default_factory=dict)

    def observe(self, step: int, ids: Ints, high: Flags) -> Flow:
        """Returns what `step` changed: `ids` tell the rows in the places apart (-1: free), `high` has their groups."""
        ids, high = ids.reshape(-1).copy(), high.reshape(-1).copy()
        grown = len(ids) - len(self._ids)
        if grown < 0:
            raise ValueError(f"ids: {len(ids)} places, there were {len(self._ids)}: free ones are -1")
        before = np.pad(self._ids, (0, grown), constant_values=NONE)
        was_high = np.pad(self._high, (0, grown))
        new, gone = (ids != before) & (ids != NONE), (ids != before) & (before != NONE)
        moved = (ids == before) & (ids != NONE) & (high != was_high)
        if self.lives is not None:
            self._note(step, gone, new, moved, was_high)
        self._ids, self._high = ids, high
        living = ids != NONE
        counts = (living & high, living & ~high, new, gone, moved & high)
        return Flow(*(int(flags.sum()) for flags in counts))

    def _note(self, step: int, gone: Flags, new: Flags, moved: Flags, was_high: Flags) -> None:
        for place in np.nonzero(gone)[0].tolist():
            self._end(place, step, bool(was_high[place]))
        for place in np.nonzero(new)[0].tolist():
            self._begins[place] = (step, [])
        for place in np.nonzero(moved)[0].tolist():
            self._begins[place][1].append((bool(was_high[place]), step))

    def _end(self, place: int, step: int, high: bool) -> None:
        assert self.lives is not None
        begin, path = self._begins.pop(place)
        self.lives[Life(self.kind, begin, (*path, (high, step)))] += 1

    def close(self, step: int) -> None:
        """Ends all lives: the run ends before `step`."""
        if self.lives is not None:
            for place in list(self._begins):
                self._end(place, step, bool(self._high[place]))
