"""AERP: each key-value head keeps the tokens it attends to most, and popular tokens are kept as x and recomputed.

Source: kelle.txt, sections 4.1 and 4.2, figures 6 and 7. `AerpLayer` is one attention layer of one sequence, in eDRAM that
may lose bits: a prompt, then a token at a time. Its `Slots` say which tokens each head keeps and who must go when a slot is
needed: all heads hold equally many, each its own, and a slot is used again by the token that pushes its token out, as the
order of slots does not matter to attention (equations 1 and 2). Its `InputRows` hold x, the normed inputs of the layer, in
place of keys and values: a row is shared by all heads that retain its token, and stays whole until the last of them
drops it, so it may end up larger than what it stands for; it is never turned back. Evicted tokens are gone. Losses are
modelled, not measured.
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
from llmcache.edram.constants import AERP
from llmcache.edram.flips import Cells, CellSettings, Names, name_rows

RECOMPUTE = ("none", "prefill", "decode")


@dataclass(frozen=True)
class AerpSettings:
    """Settings of eviction and recomputation; the names of the paper in brackets.

    `budget` [N']: tokens that each key-value head keeps, of them the first `sinks` and the last `window` always; of the
    others those with the largest sums of attention weights over all queries.
    `recompute`: which tokens may be stored as x, the input of their projections: "none", those of the "prefill", or also
    those of "decode".

    Differs from the paper: equation 3 as printed sums a row of weights, which is 1 for every token; column sums are meant
    (section 4.1.1 has them for the prefill). A token within sinks or window is never stored as x, as all heads retain it
    there and every x would seem to pay; in "decode" its x lies beside its keys and values until it leaves the window, and
    those bytes are counted.
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
        """The window, or what sinks leave of the budget; with all of it the policy is StreamingLLM."""
        return min(self.window, self.budget - self.sinks)


@dataclass(frozen=True)
class LayerShape:
    """One attention layer: query heads [H], key-value heads, numbers of a head [d_h] and of the input x [C].

    `channels` 0: there is no x, nothing can be recomputed.
    """

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
        """Whether x is smaller than keys and values of the `retaining` key-value heads: strictly, or nothing is saved.

        With MHA that is more than half of the heads; with GQA often never, as all keys and values of a token together
        are not larger than x. Source: kelle.txt, section 4.1.2 (there for MHA, and "at least 50%" beside "> 50%").
        """
        return 0 < self.channels < 2 * self.head_dim * retaining


NONE = -1


@dataclass(frozen=True)
class Placed:
    """What one new token did: `slots` [heads] it lies in (-1: it was dropped itself), `evicted` positions (-1: none)."""

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
        """Takes a prompt with the column sums [kv_heads, n] of its tokens; returns the positions kept [kv_heads, count].

        Sinks, the last tokens of the window, and of the rest those with the highest sums; of equal ones the newer.
        """
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
        """Takes the next token: `gains` [kv_heads, count + 1] are added to the scores, its own last.

        If all slots are in use, the token of the lowest score behind the sinks and before the window goes; of equal ones
        the oldest. There always is one: protected are at most `budget`, and one more is there.
        """
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

    def _victims(self, own: Doubles) -> tuple[Int64s, Int64s]:
        scores = np.column_stack([self.scores, own])
        positions = np.column_stack([self.positions, np.full(len(own), self.newest)])
        scores[self.protected_at(self.newest, positions)] = np.inf
        lowest = scores.min(axis=1, keepdims=True)
        oldest = np.where(scores == lowest, positions, np.iinfo(np.int64).max).argmin(axis=1)
        evicted = positions[np.arange(len(own)), oldest]
        slots: Int64s = np.where(oldest == self.settings.budget, NONE, oldest)
        return slots, evicted

    def protected_at(self, newest: int, positions: Int64s | None = None) -> Flags:
        """Which slots (or tokens at `positions`) are sinks or of the window if `newest` is the last token [kv_heads, n]."""
        at = self.positions if positions is None else positions
        kept: Flags = (at != NONE) & ((at > newest - self.settings.recent) | (at < self.settings.sinks))
        return kept

    @property
    def used(self) -> Flags:
        """Which slots hold a token [kv_heads, budget]."""
        used: Flags = self.positions != NONE
        return used


def attend(queries: Floats, keys: Floats, values: Floats, count: int) -> tuple[Floats, Doubles]:
    """Returns the attention of one token over `count` slots: outputs [heads, dim] and weights [heads, count].

    `queries` [heads, dim], `keys` and `values` [kv_heads, slots, dim], float32, of which the first `count` slots count;
    heads of one key-value head follow each other. Products are scaled by 1/sqrt(dim); sums are float64 in the order of
    the slots, so equal slots give equal bits.
    Source: kelle.txt, equations 1 and 2 (which omit the scale).
    """
    heads, dim = queries.shape
    out, weights = np.empty((heads, values.shape[2]), np.float32), np.empty((heads, count))
    _attend(queries, keys, values, 1 / math.sqrt(dim), out, weights)
    return out, weights


_QUERIES = 256
"""Queries of a prompt that are attended at a time: their products with all tokens are in memory."""


def attend_prompt(queries: Floats, keys: Floats, values: Floats) -> tuple[Floats, Doubles]:
    """Returns causal attention of a prompt [n, heads, dim], and its column sums of weights [kv_heads, n].

    Fused kernels do not hand their weights out, which is why this one is here. Arguments as of `attend`, [n, heads, dim].
    """
    tokens, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    out = np.empty((tokens, heads, values.shape[2]), np.float32)
    weights = np.zeros((kv_heads, tokens))
    for head, begin in itertools.product(range(heads), range(0, tokens, _QUERIES)):
        end, own = min(begin + _QUERIES, tokens), head * kv_heads // heads
        rows = queries[begin:end, head] @ keys[:end, own].T * np.float32(1 / math.sqrt(dim))
        later = np.arange(end) > np.arange(begin, end)[:, None]
        rows[later] = -np.inf
        rows = np.exp(rows - rows.max(axis=1, keepdims=True))
        rows /= rows.sum(axis=1, keepdims=True)
        weights[own, :end] += rows.sum(axis=0, dtype=np.float64)
        out[begin:end, head] = rows @ values[:end, own]
    return out, weights


@njit(cache=True, nogil=True)
def _attend(queries, keys, values, scale, out, weights):  # type: ignore[no-untyped-def]
    group = queries.shape[0] // keys.shape[0]
    count = weights.shape[1]
    total = np.empty(values.shape[2])
    for head in range(queries.shape[0]):
        own = head // group
        largest = -np.inf
        for slot in range(count):
            product = 0.0
            for i in range(queries.shape[1]):
                product += np.float64(queries[head, i]) * np.float64(keys[own, slot, i])
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
                total[i] += weights[head, slot] * values[own, slot, i]
        for i in range(values.shape[2]):  # assigning the array takes seconds to compile
            out[head, i] = total[i]


Recompute = Callable[[Floats, Int64s], tuple[Floats, Floats]]
"""From x [n, channels] and positions [n] to keys and values [n, kv_heads, head_dim], float32."""


@dataclass(frozen=True)
class Rope:
    """Rotary positions as Llama and Qwen have them: number i of a head turns with number i + dim/2. `theta`: their base."""

    theta: float = 10_000.0

    def turn(self, rows: Floats, positions: Int64s) -> Floats:
        """Returns `rows` [n, heads, dim] turned by their `positions` [n]."""
        half = rows.shape[2] // 2
        speeds = self.theta ** (-np.arange(half, dtype=np.float64) / half)
        angles = positions[:, None] * speeds
        cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))
        first, second = rows[..., :half], rows[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


@dataclass(frozen=True)
class Projections:
    """W_K and W_V [channels, kv_heads * head_dim] of a layer, their biases, and its rotation. Callable as `Recompute`."""

    key_weight: Floats
    value_weight: Floats
    kv_heads: int
    rope: Rope | None = None
    key_bias: Floats | None = None
    value_bias: Floats | None = None

    def __call__(self, x: Floats, positions: Int64s) -> tuple[Floats, Floats]:
        """Returns keys and values [n, kv_heads, head_dim] of the tokens `x` [n, channels] at `positions` [n]."""
        keys = _projected(x, self.key_weight, self.key_bias).reshape(len(x), self.kv_heads, -1)
        values = _projected(x, self.value_weight, self.value_bias).reshape(len(x), self.kv_heads, -1)
        return (keys if self.rope is None else self.rope.turn(keys, positions)), values


def _projected(x: Floats, weight: Floats, bias: Floats | None) -> Floats:
    return x @ weight if bias is None else x @ weight + bias


class InputRows:
    """x rows by index: `positions` of their tokens (-1: free), `retaining` heads, and the `keys` and `values` they give.

    `waiting`: beside its keys and values, until its token leaves the recent window (see `AerpSettings.recompute`).
    """

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
        """Which rows hold an x."""
        used: Flags = self.positions != NONE
        return used

    @property
    def lost_bits(self) -> int:
        """Bits of the x rows that read wrongly by now, modelled."""
        return self._cells.lost_bits(self.used)

    def put(self, positions: Int64s, rows: Floats, names: Names, retaining: Int64s, waiting: Flags) -> Int64s:
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

    def _project(self, at: Int64s) -> None:
        if len(at):
            assert self._recompute is not None
            self.keys[at], self.values[at] = self._recompute(self._cells.readings[at], self.positions[at])

    def release(self, indices: Int64s) -> None:
        """One head each drops the tokens of `indices` (an index may occur several times); rows no head retains are freed."""
        np.subtract.at(self.retaining, indices, 1)
        self.positions[indices[self.retaining[indices] <= 0]] = NONE

    def settle(self, hst: Flags) -> Int64s:
        """Puts the rows in their groups for a step and returns those whose keys and values changed.

        The array recomputes every row that stands in for keys and values at every step; here it is done where the result
        can differ from the last.
        """
        (changed,) = self._cells.settle(hst, self.used)
        self._project(changed)
        return changed


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
        self.x_index: Int64s = np.full(places, NONE)
        if settings.recompute != "none" and (recompute is None or not shape.channels):
            raise ValueError(f"recompute: '{settings.recompute}' needs projections, and a shape with channels")
        self.inputs = InputRows(shape, self.cells, recompute)

    def prefill(self, keys: Floats, values: Floats, sums: Doubles, x: Floats | None = None) -> None:
        """Takes a prompt: `keys`, `values` [n, kv_heads, head_dim], its column `sums` [kv_heads, n], its `x` [n, channels].

        The prompt itself is attended densely, by the caller.
        """
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
        """Returns the attention outputs [heads, head_dim] of the next token, which attends to what is cached and itself.

        `queries` [heads, head_dim], `key` and `value` [kv_heads, head_dim], after their rotation; `x` [channels]. Its
        weights then score the cached tokens, and if there is no room for it one token of each head goes.
        """
        inputs = _given(x) if self.settings.recompute == "decode" else None
        count, group = self.slots.count, self.shape.heads // self.shape.kv_heads
        self._settle()
        for cells, own in ((self.keys, key), (self.values, value)):
            cells.readings[:, count] = own
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
        """Stores x for the tokens of the prompt that pay, those of the highest scores first."""
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
        """Frees the keys and values of the tokens of these x rows: from now on they are recomputed."""
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
        """Keeps the new token's x, and decides about the token that leaves the window."""
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
        """Reads everything as the groups of this step have it."""
        if not self.cells.rates.any:
            return
        hst, in_kv = self.high_scores(), self.in_kv
        for cells in (self.keys, self.values):
            cells.settle(hst, in_kv)
        changed = self.inputs.settle(self.x_high_scores(hst))
        self._read_back(*np.nonzero(np.isin(self.x_index, changed)))

    def high_scores(self) -> Flags:
        """Which slots count as high-score tokens for the step to come [kv_heads, budget].

        At least the median of the head's cached scores, or protected (sink or window): by score alone every new token would
        be a low one. Differs from the paper: section 4.2 names no threshold.
        """
        slots, count = self.slots, self.slots.count
        high: Flags = np.zeros(slots.positions.shape, np.bool_)
        if count:
            high[:, :count] = slots.scores[:, :count] >= np.median(slots.scores[:, :count], axis=1, keepdims=True)
        return high | slots.protected_at(slots.newest + 1)

    def x_high_scores(self, hst: Flags) -> Flags:
        """Which x rows count as high-score tokens: at least half of the heads that retain it say so; waiting ones do."""
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
        return 2 * (2 * self.shape.head_dim * int(self.in_kv.sum()) + self.shape.channels * int(self.inputs.used.sum()))

    @property
    def lost_bits(self) -> int:
        """Bits in eDRAM that read wrongly by now, modelled."""
        return self.keys.lost_bits(self.in_kv) + self.values.lost_bits(self.in_kv) + self.inputs.lost_bits


def _given(x: Floats | None) -> Floats:
    if x is None:
        raise ValueError("x: must be given if something is recomputed")
    return x
