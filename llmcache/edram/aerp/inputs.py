"""The x rows of a layer: inputs kept in place of keys and values, and what is recomputed from them.

An x row is shared by all heads that retain its token, and stays whole until the last of them drops it: heads evict
independently, so it may end up larger than the keys and values it stands for. It is never turned back into them.
Source: kelle.txt, section 4.1.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.aerp.projections import Recompute
from llmcache.edram.aerp.settings import LayerShape
from llmcache.edram.aerp.slots import NONE, Flags, Ints
from llmcache.edram.flips import Cells, CellSettings
from llmcache.edram.flips.draws import Names

Floats = NDArray[np.float32]


class Inputs:
    """x rows by index: `positions` of their tokens (-1: free), `retaining` heads, and the `keys` and `values` they give.

    `waiting`: beside its keys and values, until its token leaves the recent window (see `AerpSettings.recompute`).
    """

    def __init__(self, shape: LayerShape, cells: CellSettings, recompute: Recompute) -> None:
        self._recompute = recompute
        self._cells = Cells((0,), shape.channels, cells)
        self.positions: Ints = np.empty(0, np.int64)
        self.retaining: Ints = np.empty(0, np.int64)
        self.waiting: Flags = np.empty(0, np.bool_)
        self.keys: Floats = np.empty((0, shape.kv_heads, shape.head_dim), np.float32)
        self.values: Floats = self.keys.copy()
        self.recomputed = 0

    @property
    def used(self) -> Flags:
        """Which rows hold an x."""
        used: Flags = self.positions != NONE
        return used

    @property
    def standing_in(self) -> Flags:
        """Which rows are there in place of keys and values."""
        return self.used & ~self.waiting

    @property
    def lost_bits(self) -> int:
        """Bits of the x rows that read wrongly by now, modelled."""
        return self._cells.lost_bits(self.used)

    def put(self, positions: Ints, rows: Floats, names: Names, retaining: Ints, waiting: Flags) -> Ints:
        """Stores `rows` [n, channels] of the tokens at `positions` and returns their indices [n]."""
        free = np.nonzero(~self.used)[0]
        if len(free) < len(rows):
            self._grow(max(len(rows) - len(free), len(self.positions)))
            free = np.nonzero(~self.used)[0]
        at = free[: len(rows)]
        self._cells.write((at,), rows, names)
        self.positions[at], self.retaining[at], self.waiting[at] = positions, retaining, waiting
        self._project(at)
        return at

    def _grow(self, more: int) -> None:
        self._cells.grow(more)
        self.positions = np.concatenate([self.positions, np.full(more, NONE)])
        self.retaining = np.concatenate([self.retaining, np.zeros(more, np.int64)])
        self.waiting = np.concatenate([self.waiting, np.zeros(more, np.bool_)])
        for name in ("keys", "values"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((more, *array.shape[1:]), np.float32)]))

    def _project(self, at: Ints) -> None:
        if len(at):
            self.keys[at], self.values[at] = self._recompute(self._cells.readings[at], self.positions[at])

    def release(self, indices: Ints) -> None:
        """One head each drops the tokens of `indices` (an index may occur several times); rows no head retains are freed."""
        np.subtract.at(self.retaining, indices, 1)
        self.positions[indices[self.retaining[indices] <= 0]] = NONE

    def free(self, index: int) -> None:
        """Frees one row."""
        self.positions[index] = NONE

    def find(self, position: int) -> int:
        """Returns the index of the x of the token at `position`, -1 if there is none."""
        found = np.nonzero(self.positions == position)[0]
        return int(found[0]) if len(found) else NONE

    def settle(self, hst: Flags) -> Ints:
        """Puts the rows in their groups for a step and returns those whose keys and values changed.

        The array recomputes every row that stands in for keys and values at every step, which `recomputed` counts; here
        it is done where the result can differ from the last.
        """
        self.recomputed += int(self.standing_in.sum())
        (changed,) = self._cells.settle(hst, self.used)
        self._project(changed)
        return changed
