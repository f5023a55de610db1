"""AERP: each key-value head keeps the tokens with the most attention, and popular tokens are stored as x and recomputed.

Source: kelle.txt, sections 4.1 and 4.2, figures 6 and 7. A new token takes over the slot of the token that it evicts,
because attention does not depend on the order of slots (equations 1 and 2). Heads that retain a token share its x row, which
remains until the last of them drops the token. Losses of bits are modelled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numba import njit

from llmcache.arrays import Doubles, Flags, Floats, Int64s
from llmcache.papers.edram.constants import AERP
from llmcache.papers.edram.flips import Cells, CellSettings, Names, name_rows

RECOMPUTE = ("none", "prefill", "decode")


@dataclass(frozen=True)
class AerpSettings:
    """Settings of eviction and recomputation, with the names of the paper in brackets.

    `budget` [N']: tokens that each key-value head keeps: the first `sinks`, the last `window`, and those with the largest
    sums of attention weights. `recompute`: the tokens that may be stored as x, the input of their projections: "none", those
    of the "prefill", or also those of "decode".

    Differs from the paper: equation 3 as printed sums a row of weights, which is 1 for every token; column sums are meant,
    as in section 4.1.1. Tokens within sinks or window are never replaced by x, because all heads retain them. In "decode", x
    is stored in addition to keys and values until the token leaves the window.
    """

    budget: int
    sinks: int = AERP.sinks
    window: int = 64
    recompute: Literal["none", "prefill", "decode"] = "none"

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 0:
            raise ValueError(f"sinks, window: must be at least 0, not {self.sinks} and {self.window}")
        if self.budget <= self.sinks:
            raise ValueError(f"budget: must be more than the {self.sinks} sinks, not {self.budget} tokens")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute: must be one of {', '.join(RECOMPUTE)}, not '{self.recompute}'")

    @property
    def recent(self) -> int:
        """Return the window, or less if the budget is smaller; the policy then equals StreamingLLM."""
        return min(self.window, self.budget - self.sinks)


@dataclass(frozen=True)
class LayerShape:
    """One attention layer: query heads [H], key-value heads, and the sizes of a head [d_h] and of x [C] (0: no x)."""

    heads: int
    kv_heads: int
    head_dim: int
    channels: int = 0

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: must be a multiple of the {self.kv_heads} key-value heads, not {self.heads}")

    def x_pays(self, retaining: int) -> bool:
        """Return whether x is smaller than the keys and values of `retaining` key-value heads.

        Source: kelle.txt, section 4.1.2 (for MHA, with both "at least 50%" and "> 50%").
        """
        return 0 < self.channels < 2 * self.head_dim * retaining


NONE = -1


@dataclass(frozen=True)
class Placed:
    """The `slots` [heads] of a new token (-1: not kept), and the `evicted` positions (-1: none)."""

    slots: Int64s
    evicted: Int64s


class Slots:
    """Positions and scores of the cached tokens [kv_heads, budget]; the first `count` of each head are in use."""

    def __init__(self, settings: AerpSettings, kv_heads: int) -> None:
        self.settings = settings
        self.positions: Int64s = np.full((kv_heads, settings.budget), NONE, np.int64)
        self.scores: Doubles = np.zeros((kv_heads, settings.budget))
        self.count = 0
        self.newest = NONE

    def fill(self, sums: Doubles) -> Int64s:
        """Take column sums [kv_heads, n]; return the kept positions [kv_heads, count]. Of equal sums, the newer is kept."""
        if self.newest != NONE:
            raise ValueError("sums: the layer already has tokens, but a prompt must come first")
        tokens = sums.shape[1]
        rank = sums.copy()
        rank[:, : self.settings.sinks] = np.inf
        rank[:, max(0, tokens - self.settings.recent) :] = np.inf
        self.newest, self.count = tokens - 1, min(tokens, self.settings.budget)
        newer_first = np.argsort(-rank[:, ::-1], axis=1, kind="stable")[:, : self.count]
        kept = np.sort(tokens - 1 - newer_first, axis=1)
        self.positions[:, : self.count] = kept
        self.scores[:, : self.count] = np.take_along_axis(sums, kept, axis=1)
        return kept

    def add(self, gains: Doubles) -> Placed:
        """Add the next token and `gains` [kv_heads, count + 1] to the scores; of equal scores, evict the oldest."""
        heads = len(self.positions)
        self.newest += 1
        self.scores[:, : self.count] += gains[:, :-1]
        if self.count < self.settings.budget:
            slots, evicted = np.full(heads, self.count), np.full(heads, NONE)
            self.count += 1
        else:
            slots, evicted = self._victims(gains[:, -1])
        taken = np.nonzero(slots != NONE)[0]
        self.positions[taken, slots[taken]] = self.newest
        self.scores[taken, slots[taken]] = gains[taken, -1]
        return Placed(slots, evicted)

    def _victims(self, newest_scores: Doubles) -> tuple[Int64s, Int64s]:
        scores = np.column_stack([self.scores, newest_scores])
        positions = np.column_stack([self.positions, np.full(len(newest_scores), self.newest)])
        scores[self.protected_at(self.newest, positions)] = np.inf
        lowest = scores.min(axis=1, keepdims=True)
        oldest = np.where(scores == lowest, positions, np.iinfo(np.int64).max).argmin(axis=1)
        evicted = positions[np.arange(len(newest_scores)), oldest]
        slots: Int64s = np.where(oldest == self.settings.budget, NONE, oldest)
        return slots, evicted

    def protected_at(self, newest: int, positions: Int64s | None = None) -> Flags:
        at = self.positions if positions is None else positions
        kept: Flags = (at != NONE) & ((at > newest - self.settings.recent) | (at < self.settings.sinks))
        return kept

    @property
    def used(self) -> Flags:
        used: Flags = self.positions != NONE
        return used


def attend(queries: Floats, keys: Floats, values: Floats, count: int) -> tuple[Floats, Doubles]:
    """Return the outputs [heads, dim] and weights [heads, count] of one token.

    `queries` [heads, dim]; `keys` and `values` [kv_heads, slots, dim], float32. Sums are float64 in the order of the slots,
    so that equal slots give equal bits. Source: kelle.txt, equations 1 and 2 (which omit the scale 1/sqrt(dim)).
    """
    heads, dim = queries.shape
    out, weights = np.empty((heads, values.shape[2]), np.float32), np.empty((heads, count))
    _attend(queries, keys, values, 1 / math.sqrt(dim), out, weights)
    return out, weights


_QUERIES = 256
"""Queries of a prompt per block; their products with all tokens are in memory."""


def attend_prompt(queries: Floats, keys: Floats, values: Floats) -> tuple[Floats, Doubles]:
    """Return causal attention of a prompt [n, heads, dim], and column sums of weights [kv_heads, n].

    Fused kernels do not return weights.
    """
    tokens, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    out = np.empty((tokens, heads, values.shape[2]), np.float32)
    weights = np.zeros((kv_heads, tokens))
    for head, begin in itertools.product(range(heads), range(0, tokens, _QUERIES)):
        end, kv_head = min(begin + _QUERIES, tokens), head * kv_heads // heads
        rows = queries[begin:end, head] @ keys[:end, kv_head].T * np.float32(1 / math.sqrt(dim))
        later = np.arange(end) > np.arange(begin, end)[:, None]
        rows[later] = -np.inf
        rows = np.exp(rows - rows.max(axis=1, keepdims=True))
        rows /= rows.sum(axis=1, keepdims=True)
        weights[kv_head, :end] += rows.sum(axis=0, dtype=np.float64)
        out[begin:end, head] = rows @ values[:end, kv_head]
    return out, weights


@njit(cache=True, nogil=True)
def _attend(queries, keys, values, scale, out, weights):  # type: ignore[no-untyped-def]
    group = queries.shape[0] // keys.shape[0]
    count = weights.shape[1]
    total = np.empty(values.shape[2])
    for head in range(queries.shape[0]):
        kv_head = head // group
        largest = -np.inf
        for slot in range(count):
            product = 0.0
            for i in range(queries.shape[1]):
                product += np.float64(queries[head, i]) * np.float64(keys[kv_head, slot, i])
            weights[head, slot] = product * scale
            largest = max(largest, weights[head, slot])
        below = 0.0
        for slot in range(count):
            weights[head, slot] = np.exp(weights[head, slot] - largest)
            below += weights[head, slot]
        total[:] = 0
        for slot in range(count):
            weights[head, slot] /= below
            for i in range(values.shape[2]):
                total[i] += weights[head, slot] * values[kv_head, slot, i]
        for i in range(values.shape[2]):  # assigning the array takes seconds to compile
            out[head, i] = total[i]


Recompute = Callable[[Floats, Int64s], tuple[Floats, Floats]]
"""A function from x [n, channels] and positions [n] to keys and values [n, kv_heads, head_dim], float32."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions as in Llama and Qwen: number i of a head rotates with number i + dim/2."""

    theta: float = 10_000.0

    def turn(self, rows: Floats, positions: Int64s) -> Floats:
        half = rows.shape[2] // 2
        speeds = self.theta ** (-np.arange(half, dtype=np.float64) / half)
        angles = positions[:, None] * speeds
        cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))
        first, second = rows[..., :half], rows[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


@dataclass(frozen=True)
class Projections:
    """W_K and W_V [channels, kv_heads * head_dim], biases, and rotation."""

    key_weight: Floats
    value_weight: Floats
    kv_heads: int
    rope: Rope | None = None
    key_bias: Floats | None = None
    value_bias: Floats | None = None

    def __call__(self, x: Floats, positions: Int64s) -> tuple[Floats, Floats]:
        keys = _projected(x, self.key_weight, self.key_bias).reshape(len(x), self.kv_heads, -1)
        values = _projected(x, self.value_weight, self.value_bias).reshape(len(x), self.kv_heads, -1)
        return (keys if self.rope is None else self.rope.turn(keys, positions)), values


def _projected(x: Floats, weight: Floats, bias: Floats | None) -> Floats:
    return x @ weight if bias is None else x @ weight + bias


class InputRows:
    """The x rows: `positions` (-1: free), the number of `retaining` heads, and their `keys` and `values`."""

    def __init__(self, shape: LayerShape, cells: CellSettings, recompute: Recompute | None) -> None:
        self._recompute = recompute
        self._cells = Cells((0,), shape.channels, cells)
        self.positions: Int64s = np.empty(0, np.int64)
        self.retaining: Int64s = np.empty(0, np.int64)
        self.waiting: Flags = np.empty(0, np.bool_)
        self.keys: Floats = np.empty((0, shape.kv_heads, shape.head_dim), np.float32)
        self.values: Floats = self.keys.copy()

    @property
    def used(self) -> Flags:
        used: Flags = self.positions != NONE
        return used

    @property
    def lost_bits(self) -> int:
        return self._cells.lost_bits(self.used)

    def put(self, positions: Int64s, rows: Floats, names: Names, retaining: Int64s, waiting: Flags) -> Int64s:
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

    def _project(self, at: Int64s) -> None:
        if len(at):
            assert self._recompute is not None
            self.keys[at], self.values[at] = self._recompute(self._cells.readings[at], self.positions[at])

    def release(self, indices: Int64s) -> None:
        """Release one reference per entry of `indices` (which may repeat)."""
        np.subtract.at(self.retaining, indices, 1)
        self.positions[indices[self.retaining[indices] <= 0]] = NONE

    def settle(self, hst: Flags) -> Int64s:
        """Set the groups of the rows for a step; return the rows whose keys and values changed."""
        (changed,) = self._cells.settle(hst, self.used)
        self._project(changed)
        return changed


_KEY, _VALUE, _INPUT = range(3)


class AerpLayer:
    """Keys and values of a layer of one sequence, some stored as x.

    `layer` makes the losses of layers with one seed differ.
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
        # One place more than slots, because the current token is attended to before its slot is known.
        places = (shape.kv_heads, settings.budget + 1)
        self.keys = Cells(places, shape.head_dim, self.cells)
        self.values = Cells(places, shape.head_dim, self.cells)
        self.x_index: Int64s = np.full(places, NONE)
        if settings.recompute != "none" and (recompute is None or not shape.channels):
            raise ValueError(f"recompute: '{settings.recompute}' needs projections, and a shape with channels")
        self.inputs = InputRows(shape, self.cells, recompute)

    def prefill(self, keys: Floats, values: Floats, sums: Doubles, x: Floats | None = None) -> None:
        """Store `keys`, `values` [n, kv_heads, head_dim], column `sums` [kv_heads, n], and `x` [n, channels]."""
        wanted = (len(keys), self.shape.kv_heads, self.shape.head_dim)
        if keys.shape != wanted or values.shape != wanted:
            raise ValueError(f"keys, values: shapes must be {wanted}, not {keys.shape} and {values.shape}")
        inputs = _given(x) if self.settings.recompute != "none" else None
        kept = self.slots.fill(sums)
        heads, slots = np.indices(kept.shape).reshape(2, -1)
        self._write(heads, slots, kept.reshape(-1), keys[kept.reshape(-1), heads], values[kept.reshape(-1), heads])
        if inputs is not None:
            self._store_inputs(inputs)

    def step(self, queries: Floats, key: Floats, value: Floats, x: Floats | None = None) -> Floats:
        """Return the attention outputs [heads, head_dim] of the next token, which attends also to itself.

        `queries` [heads, head_dim], `key` and `value` [kv_heads, head_dim], after rotation; `x` [channels].
        """
        inputs = _given(x) if self.settings.recompute == "decode" else None
        count, group = self.slots.count, self.shape.heads // self.shape.kv_heads
        self._settle()
        for cells, current in ((self.keys, key), (self.values, value)):
            cells.readings[:, count] = current
        out, weights = attend(queries, self.keys.readings, self.values.readings, count + 1)
        placed = self.slots.add(weights.reshape(self.shape.kv_heads, group, count + 1).sum(axis=1))
        self._place(placed, key, value)
        if inputs is not None:
            self._await(inputs)
        return out

    def _place(self, placed: Placed, key: Floats, value: Floats) -> None:
        heads = np.nonzero(placed.slots != NONE)[0]
        slots = placed.slots[heads]
        dropped = self.x_index[heads, slots]
        self.inputs.release(dropped[dropped != NONE])
        self.x_index[heads, slots] = NONE
        self._write(heads, slots, np.full(len(heads), self.slots.newest), key[heads], value[heads])

    def _write(self, heads: Int64s, slots: Int64s, positions: Int64s, keys: Floats, values: Floats) -> None:
        for kind, cells, rows in ((_KEY, self.keys, keys), (_VALUE, self.values, values)):
            cells.write((heads, slots), rows, name_rows(self.cells.seed, self.layer, kind, heads, positions))

    def _store_inputs(self, x: Floats) -> None:
        positions, scores, protected = self.slots.positions, self.slots.scores, self.slots.protected_at(self.slots.newest)
        retaining, total = np.zeros(len(x), np.int64), np.zeros(len(x))
        np.add.at(retaining, positions[self.slots.used], 1)
        np.add.at(total, positions[self.slots.used], scores[self.slots.used])
        free = np.unique(positions[self.slots.used & ~protected])
        pays = np.array([p for p in free if self.shape.x_pays(int(retaining[p]))], np.int64)
        chosen = pays[np.lexsort((pays, -total[pays]))]
        self._convert(self._put(chosen, x[chosen], retaining[chosen], waiting=False))
        if self.settings.recompute == "decode":
            recent = np.arange(max(self.settings.sinks, len(x) - self.settings.recent), len(x))
            self._put(recent, x[recent], retaining[recent], waiting=True)

    def _put(self, positions: Int64s, x: Floats, retaining: Int64s, waiting: bool) -> Int64s:
        names = name_rows(self.cells.seed, self.layer, _INPUT, 0, positions)
        return self.inputs.put(positions, x, names, retaining, np.full(len(x), waiting))

    def _convert(self, indices: Int64s) -> None:
        for index in indices:
            heads, slots = np.nonzero(self.slots.positions == self.inputs.positions[index])
            self.x_index[heads, slots] = index
            self.inputs.waiting[index], self.inputs.retaining[index] = False, len(heads)
            self._read_back(heads, slots)

    def _read_back(self, heads: Int64s, slots: Int64s) -> None:
        indices = self.x_index[heads, slots]
        self.keys.readings[heads, slots] = self.inputs.keys[indices, heads]
        self.values.readings[heads, slots] = self.inputs.values[indices, heads]

    def _await(self, x: Floats) -> None:
        newest, positions = self.slots.newest, self.slots.positions
        if newest >= self.settings.sinks:
            self._put(np.array([newest]), x[None], np.array([self.shape.kv_heads]), waiting=True)
        leaving = newest - self.settings.recent
        (row,) = np.nonzero(self.inputs.used & self.inputs.waiting & (self.inputs.positions == leaving))
        if self.shape.x_pays(int((positions == leaving).sum())):
            self._convert(row)
        else:
            self.inputs.positions[row] = NONE

    def _settle(self) -> None:
        if not self.cells.rates.any:
            return
        hst, in_kv = self.high_scores(), self.in_kv
        for cells in (self.keys, self.values):
            cells.settle(hst, in_kv)
        changed = self.inputs.settle(self.x_high_scores(hst))
        self._read_back(*np.nonzero(np.isin(self.x_index, changed)))

    def high_scores(self) -> Flags:
        """Return which slots are high-score tokens in the next step [kv_heads, budget].

        Their score is at least the median, or they are protected. Differs from the paper: section 4.2 names no threshold.
        """
        slots, count = self.slots, self.slots.count
        high: Flags = np.zeros(slots.positions.shape, np.bool_)
        if count:
            high[:, :count] = slots.scores[:, :count] >= np.median(slots.scores[:, :count], axis=1, keepdims=True)
        return high | slots.protected_at(slots.newest + 1)

    def x_high_scores(self, hst: Flags) -> Flags:
        """Return which x rows are high-score tokens, by the vote of at least half of the heads, or waiting."""
        index = self.x_index[:, :-1]
        votes = np.bincount(index[(index != NONE) & hst], minlength=len(self.inputs.positions))
        high: Flags = self.inputs.waiting | (2 * votes >= self.inputs.retaining)
        return high

    @property
    def in_kv(self) -> Flags:
        as_kv: Flags = self.slots.used & (self.x_index[:, :-1] == NONE)
        return as_kv

    @property
    def stored_bytes(self) -> int:
        return 2 * (2 * self.shape.head_dim * int(self.in_kv.sum()) + self.shape.channels * int(self.inputs.used.sum()))

    @property
    def lost_bits(self) -> int:
        return self.keys.lost_bits(self.in_kv) + self.values.lost_bits(self.in_kv) + self.inputs.lost_bits


def _given(x: Floats | None) -> Floats:
    if x is None:
        raise ValueError("x: must be given if something is recomputed")
    return x
