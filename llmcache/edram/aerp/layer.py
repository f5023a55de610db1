"""One attention layer of one sequence under AERP, in eDRAM that may lose bits: prefill, then a token at a time.

Source: kelle.txt, sections 4.1 and 4.2, figures 6 and 7. Evicted tokens are gone. Losses are modelled, not measured.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.aerp.attention import attend
from llmcache.edram.aerp.inputs import Inputs
from llmcache.edram.aerp.projections import Recompute
from llmcache.edram.aerp.settings import AerpSettings, LayerShape
from llmcache.edram.aerp.slots import NONE, Flags, Ints, Placed, Scores, Slots
from llmcache.edram.flips import Cells, CellSettings, name_rows

Floats = NDArray[np.float32]
_KEY, _VALUE, _INPUT = range(3)


class AerpLayer:
    """Keys and values of a layer: at most `settings.budget` tokens per key-value head, some of them kept as x.

    `cells`: how vectors are stored and what is lost; `layer` tells layers of one seed apart. `recompute` is needed if
    `settings.recompute` is not "none". ValueError names an argument that does not fit.
    """

    def __init__(
        self,
        settings: AerpSettings,
        shape: LayerShape,
        recompute: Recompute | None = None,
        cells: CellSettings | None = None,
        layer: int = 0,
    ) -> None:
        self.settings, self.shape, self.layer = settings, shape, layer
        self.cells = cells or CellSettings()
        self.slots = Slots(settings, shape.kv_heads)
        # One place more than slots: the token being computed is attended before it is known whose slot it gets.
        places = (shape.kv_heads, settings.budget + 1)
        self.keys = Cells(places, shape.head_dim, self.cells)
        self.values = Cells(places, shape.head_dim, self.cells)
        self.x_index: Ints = np.full(places, NONE)
        self.inputs = self._inputs(recompute)

    def _inputs(self, recompute: Recompute | None) -> Inputs | None:
        if self.settings.recompute == "none":
            return None
        if recompute is None or not self.shape.channels:
            raise ValueError(f"recompute: '{self.settings.recompute}' needs projections and the layer's channels")
        return Inputs(self.shape, self.cells, recompute)

    def prefill(self, keys: Floats, values: Floats, sums: Scores, x: Floats | None = None) -> None:
        """Takes a prompt: `keys`, `values` [n, kv_heads, head_dim], its column `sums` [kv_heads, n], its `x` [n, channels].

        The prompt itself is attended densely, by the caller.
        """
        wanted = (len(keys), self.shape.kv_heads, self.shape.head_dim)
        if keys.shape != wanted or values.shape != wanted:
            raise ValueError(f"keys: shapes {keys.shape} and {values.shape}, {wanted} is needed")
        kept = self.slots.fill(sums)
        heads, slots = np.indices(kept.shape).reshape(2, -1)
        self._write(heads, slots, kept.reshape(-1), keys[kept.reshape(-1), heads], values[kept.reshape(-1), heads])
        if self.inputs is not None:
            self._store_inputs(_given(x, "x"))

    def step(self, queries: Floats, key: Floats, value: Floats, x: Floats | None = None) -> Floats:
        """Returns the attention outputs [heads, head_dim] of the next token, which attends to what is cached and itself.

        `queries` [heads, head_dim], `key` and `value` [kv_heads, head_dim], after their rotation; `x` [channels]. Its
        weights then score the cached tokens, and if there is no room for it one token of each head goes.
        """
        count, group = self.slots.count, self.shape.heads // self.shape.kv_heads
        self._settle()
        for cells, own in ((self.keys, key), (self.values, value)):
            cells.readings[:, count] = own
        out, weights, products = attend(queries, self.keys.readings, self.values.readings, count + 1)
        scores = weights if self.settings.score == "softmax" else products
        placed = self.slots.add(scores.reshape(self.shape.kv_heads, group, count + 1).sum(axis=1))
        self._place(placed, key, value)
        if self.settings.recompute == "decode":
            self._await(_given(x, "x"))
        return out

    def _place(self, placed: Placed, key: Floats, value: Floats) -> None:
        heads = np.nonzero(placed.slots != NONE)[0]
        slots = placed.slots[heads]
        dropped = self.x_index[heads, slots]
        if self.inputs is not None:
            self.inputs.release(dropped[dropped != NONE])
        self.x_index[heads, slots] = NONE
        self._write(heads, slots, np.full(len(heads), self.slots.newest), key[heads], value[heads])

    def _write(self, heads: Ints, slots: Ints, positions: Ints, keys: Floats, values: Floats) -> None:
        for kind, cells, rows in ((_KEY, self.keys, keys), (_VALUE, self.values, values)):
            cells.write((heads, slots), rows, name_rows(self.cells.seed, self.layer, kind, heads, positions))

    def _store_inputs(self, x: Floats) -> None:
        """Stores x for the tokens of the prompt that pay, those of the highest scores first."""
        positions, scores, protected = self.slots.positions, self.slots.scores, self.slots.protected_at(self.slots.newest)
        retaining, total = np.zeros(len(x), np.int64), np.zeros(len(x))
        np.add.at(retaining, positions[self.slots.used], 1)
        np.add.at(total, positions[self.slots.used], scores[self.slots.used])
        free = np.unique(positions[self.slots.used & ~protected])
        pays = np.array([p for p in free if self.shape.x_pays(int(retaining[p]))], np.int64)
        chosen = pays[np.lexsort((pays, -total[pays]))][: self.settings.max_x]
        self._convert(self._put(chosen, x[chosen], retaining[chosen], waiting=False))
        if self.settings.recompute == "decode":
            recent = np.arange(max(self.settings.sinks, len(x) - self.settings.recent), len(x))
            self._put(recent, x[recent], retaining[recent], waiting=True)

    def _put(self, positions: Ints, x: Floats, retaining: Ints, waiting: bool) -> Ints:
        assert self.inputs is not None
        names = name_rows(self.cells.seed, self.layer, _INPUT, 0, positions)
        return self.inputs.put(positions, x, names, retaining, np.full(len(x), waiting))

    def _convert(self, indices: Ints) -> None:
        """Frees the keys and values of the tokens of these x rows: from now on they are recomputed."""
        assert self.inputs is not None
        for index in indices:
            heads, slots = np.nonzero(self.slots.positions == self.inputs.positions[index])
            self.x_index[heads, slots] = index
            self.inputs.waiting[index], self.inputs.retaining[index] = False, len(heads)
            self._read_back(heads, slots)

    def _read_back(self, heads: Ints, slots: Ints) -> None:
        assert self.inputs is not None
        indices = self.x_index[heads, slots]
        self.keys.readings[heads, slots] = self.inputs.keys[indices, heads]
        self.values.readings[heads, slots] = self.inputs.values[indices, heads]

    def _await(self, x: Floats) -> None:
        """Keeps the new token's x, and decides about the token that leaves the window."""
        assert self.inputs is not None
        newest, positions = self.slots.newest, self.slots.positions
        if newest >= self.settings.sinks:
            self._put(np.array([newest]), x[None], np.array([self.shape.kv_heads]), waiting=True)
        index = self.inputs.find(newest - self.settings.recent)
        if index == NONE or not self.inputs.waiting[index]:
            return
        retaining = int((positions == newest - self.settings.recent).sum())
        room = self.settings.max_x is None or int(self.inputs.standing_in.sum()) < self.settings.max_x
        if room and self.shape.x_pays(retaining):
            self._convert(np.array([index]))
        else:
            self.inputs.free(index)

    def _settle(self) -> None:
        """Reads everything as the groups of this step have it."""
        if not self.cells.rates.any:
            if self.inputs is not None:
                self.inputs.recomputed += int(self.inputs.standing_in.sum())
            return
        hst, in_kv = self.high_scores(), self.in_kv
        for cells in (self.keys, self.values):
            cells.settle(hst, in_kv)
        if self.inputs is not None:
            changed = self.inputs.settle(self.x_high_scores(hst))
            self._read_back(*np.nonzero(np.isin(self.x_index, changed)))

    def high_scores(self) -> Flags:
        """Which slots count as high-score tokens for the step to come [kv_heads, budget].

        At least the median of the head's cached scores, or protected (sink or window) unless the cells say otherwise.
        Differs from the paper: section 4.2 names no threshold.
        """
        slots, count = self.slots, self.slots.count
        high: Flags = np.zeros(slots.positions.shape, np.bool_)
        if count:
            high[:, :count] = slots.scores[:, :count] >= np.median(slots.scores[:, :count], axis=1, keepdims=True)
        if self.cells.protect:
            high |= slots.protected_at(slots.newest + 1)
        return high

    def x_high_scores(self, hst: Flags) -> Flags:
        """Which x rows count as high-score tokens: at least half of the heads that retain it say so; waiting ones do."""
        assert self.inputs is not None
        index = self.x_index[:, :-1]
        votes = np.bincount(index[(index != NONE) & hst], minlength=len(self.inputs.positions))
        high: Flags = self.inputs.waiting | (2 * votes >= self.inputs.retaining)
        return high

    @property
    def in_kv(self) -> Flags:
        """Which slots hold keys and values of their own [kv_heads, budget]."""
        own: Flags = self.slots.used & (self.x_index[:, :-1] == NONE)
        return own

    @property
    def stored_bytes(self) -> int:
        """Bytes in eDRAM: keys, values and x rows of 16 bits (scales of int16 vectors lie elsewhere)."""
        rows = 0 if self.inputs is None else int(self.inputs.used.sum())
        return 2 * (2 * self.shape.head_dim * int(self.in_kv.sum()) + self.shape.channels * rows)

    @property
    def lost_bits(self) -> int:
        """Bits in eDRAM that read wrongly by now, modelled."""
        lost = sum(cells.lost_bits(self.in_kv) for cells in (self.keys, self.values))
        return lost if self.inputs is None else lost + self.inputs.lost_bits


def _given(x: Floats | None, name: str) -> Floats:
    if x is None:
        raise ValueError(f"{name}: it is needed to recompute")
    return x
