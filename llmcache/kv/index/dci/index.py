"""DciIndex: the DCI-tree of one key head, its knobs, and how keys become what it holds.

Source: icecache.txt, section 4.2, equations 2 and 3. With s a power of two, rows are k / s and lifts are
sqrt(c^2 - |k|^2) / s; products of such rows are those of the paper times (c / s)^2, so their order is the same, and keys
need not be written anew when c grows.

One thread at a time changes an index, and none asks it meanwhile; any number may ask it at a time when none changes it: the
rooms that queries need belong to threads (`_Rooms`). The policies keep to that with one job per head.
"""

from __future__ import annotations

import reprlib
import threading
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Doubles, Floats, Int64s
from llmcache.kv.index.dci.tree import (
    ALL,
    BASE,
    DIM,
    EVERY_LEVEL,
    KEYS,
    LEVEL,
    LEVELS,
    MAX_LEVELS,
    NONE,
    PAGES,
    ROOT,
    Ints,
    Tree,
    ask,
    attach,
    empty_tree,
    lay,
    rehang,
    slots_of,
    start_level,
    take_away,
    with_room,
)

CHUNK = 4096
"""Keys that a build turns into float32 at a time."""
HEADROOM = 1.125
"""By how much c exceeds the largest norm when it has to grow: lifts are computed anew, parents stay as they are."""
LARGEST = 2.0**15
"""Numbers of this size and more are not put into halves: the largest is 65504."""
LEAST = 1e-30
"""c of keys that are all zero."""
ROOM = 10
"""c / s is at most 2^ROOM at first: halves stay exact far below the largest, and c may grow by 2^5 before s has to."""


@dataclass(frozen=True)
class DciSettings:
    """How a tree is built and asked.

    `promotion` is the paper's r; `first_promotion` that from the lowest level, which the authors' code sets apart: nodes of
    the lowest level are to fill pages. `field_of_view`: how many nodes a query opens on each level; `visit`: what share of
    all keys these may hold on a level, on top of `visit_each` for each key that is asked for. `build_view`: field of view
    of the search for a parent; 0: all, for a nearest parent without exception. `simple`, `composite`: indices of P-DCI;
    `retrieve`: the share of a node's keys (at least k) that P-DCI lets through to products of keys; 1: all of them, then no
    random directions are kept. `margin`: a level is left before its bounds are reached when the points below the next node
    would have to be so many standard deviations better than those seen so far, relative to the points above them, to be
    among the best; infinity: never.
    Differs from the paper: a query opens at most so many nodes (in algorithm 4, up to k for each node of the level above)
    and stops early by `margin`: 1.5 % of 256 k keys looked at instead of 2.1 %, at the same recall. And by default it looks
    at all keys of a node (the authors' code at .6 to .8 of them): at 64 k clustered keys, with one projection and .8, a
    query takes 1.9 times as long and finds .88 of the best instead of .94.
    Source: icecache.txt, sections 3.3 and 4.2, algorithms 2 and 4.
    """

    promotion: float = 0.1
    first_promotion: float = 0.03
    field_of_view: int = 112
    visit: float = 0.012
    visit_each: int = 3
    build_view: int = 6
    simple: int = 1
    composite: int = 1
    retrieve: float = 1.0
    margin: float = 2.4
    page_slots: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("promotion", "first_promotion"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}: must be between 0 and 1, not {getattr(self, name)}")
        for name in ("visit", "retrieve"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be above 0 and at most 1, not {getattr(self, name)}")
        if not self.margin >= 0:
            raise ValueError(f"margin: must be at least 0, not {self.margin}")
        for name, least in (("field_of_view", 1), ("visit_each", 0), ("build_view", 0), ("simple", 1), ("composite", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be at least {least}, not {getattr(self, name)}")
        if not 1 <= self.page_slots <= 4096:
            raise ValueError(f"page_slots: must be from 1 to 4096, not {self.page_slots}")

    @property
    def directions(self) -> int:
        """How many random directions each key is projected on."""
        return self.simple * self.composite if self.retrieve < 1 else 0

    def visited(self, keys: int, k: int) -> int:
        """Returns how many keys a query for `k` of `keys` may visit on each level."""
        return max(1, int(self.visit * keys) + self.visit_each * k)


@dataclass
class Scale:
    """`unit` is s, `bound` is c; both 0 until there are keys."""

    unit: float = 0.0
    bound: float = 0.0

    def grow(self, largest: float) -> None:
        """Makes keys of norm up to `largest` fit: exactly at first (the paper's c), with some headroom later."""
        first = not self.bound
        self.bound = max(largest, LEAST) * (1 if first else HEADROOM)
        if first or self.bound / self.unit >= LARGEST:
            self.unit = float(2.0 ** (np.ceil(np.log2(self.bound)) - ROOM))

    def rows(self, keys: Floats) -> NDArray[np.uint16]:
        """Returns the bits of keys [..., dim] as halves."""
        bits: NDArray[np.uint16] = (keys * np.float32(1 / self.unit)).astype(np.float16).view(np.uint16)
        return bits

    def stretch(self, norms: Floats) -> Floats:
        """Returns what makes queries of these norms as long as all transformed keys are; 1 for zeros."""
        return np.where(norms > 0, self.bound / self.unit / np.where(norms > 0, norms, 1), 1).astype(np.float32)

    def lifts(self, norms: Doubles) -> Floats:
        """Returns the last coordinates of keys with these norms."""
        return (np.sqrt(np.maximum(self.bound**2 - norms**2, 0)) / self.unit).astype(np.float32)


class Nearest(NamedTuple):
    """What a query found, best first: `tokens` and `slots` [k], `scores` [k] (products of query and key), and how many
    keys it computed a product with."""

    tokens: Int64s
    scores: Floats
    slots: Ints
    touched: int


class DciIndex:
    """An index of keys of `dim` numbers of tokens from number `base` on.

    Memory: 2 dim + 13 bytes a slot and 4 a token, 4 more a slot for each random direction, and up to a quarter more for
    growth; `size_bytes` tells. Pages are about four fifths full after a build, and half full at least after splits, but for
    one of each node: 340 bytes a key of 128 numbers, measured.

    Differs from the paper: a key is looked for a parent one level above its own, as section 4.2 says; algorithms 1 and 2
    ask for its own level. A key promoted above all levels starts one new level, not several, which would be empty; all
    that hung under the root then hangs under it. A key lies on its own level only, so a query's best are those of all
    levels it has come through, as algorithm 4 has it. c may grow: what is in the tree stays where it is.
    """

    def __init__(self, dim: int, settings: DciSettings | None = None, base: int = 0) -> None:
        self.settings = settings or DciSettings()
        self.scale = Scale()
        directions = random_directions(self.settings.directions, dim, self.settings.seed)
        self.tree: Tree = empty_tree(dim, self.settings.page_slots, base, directions)

    def __len__(self) -> int:
        return int(self.tree.state[KEYS])

    @property
    def dim(self) -> int:
        """Numbers of a key."""
        return int(self.tree.state[DIM])

    @property
    def size_bytes(self) -> int:
        """Memory of all arrays, room that is not in use included."""
        return sum(array.nbytes for array in self.tree)

    def levels_of(self, tokens: Int64s) -> Ints:
        """Returns the levels that tokens are promoted to by chance: line 4 of algorithm 2.

        They depend on the seed and the token, not on what came before.
        """
        chance, levels = _uniform(tokens, self.settings.seed), np.ones(len(tokens), np.int32)
        bar = self.settings.first_promotion
        for level in range(2, MAX_LEVELS):
            promoted = chance < bar
            if not promoted.any():
                break
            levels[promoted] = level
            bar *= self.settings.promotion
        return levels

    def insert(self, keys: Floats, tokens: Int64s) -> None:
        """Adds `keys` [n, dim], float32, of `tokens` [n], ascending and not in the index.

        ValueError: a key is not finite, a token is there or lies before the first. An empty index is built in one go.
        """
        self._check(keys, tokens)
        if not len(tokens):
            return
        norms = norms_of(keys)
        self._fit(float(norms.max()))
        bits, lifts = self.scale.rows(keys), self.scale.lifts(norms)
        levels = self.levels_of(tokens)
        promoted = int((levels > 1).sum())
        last = int(tokens[-1]) + 1
        if len(self):
            self.tree = with_room(self.tree, len(tokens), promoted + 1, last)
            self._add(bits, lifts, tokens.astype(np.int32), levels)
        else:
            self.tree = with_room(self.tree, 0, promoted + 1, last)
            self.build(bits, lifts, tokens.astype(np.int32), levels)

    def _check(self, keys: Floats, tokens: Int64s) -> None:
        if keys.ndim != 2 or keys.shape[1] != self.dim or keys.dtype != np.float32:
            raise ValueError(f"keys: must be float32 [n, {self.dim}], not {keys.dtype} {keys.shape}")
        if tokens.shape != keys.shape[:1] or (np.diff(tokens) <= 0).any():
            raise ValueError(f"tokens: must be {len(keys)} ascending numbers, not {reprlib.repr(tokens.tolist())}")
        base = int(self.tree.state[BASE])
        if len(tokens) and (tokens[0] < base or tokens[-1] >= 1 << 31):
            raise ValueError(f"tokens: must be from {base} to {(1 << 31) - 1}, not {tokens[0]} to {tokens[-1]}")
        known = tokens[tokens - base < len(self.tree.where)]
        if (self.tree.where[known - base] >= 0).any():
            raise ValueError("tokens: some are already in the index")

    def _fit(self, largest: float) -> None:
        """Makes c at least `largest`; what depends on it is computed anew."""
        old, bound = self.scale.unit, self.scale.bound
        if bound and largest <= bound:
            return
        self.scale.grow(largest)
        slots = int(self.tree.state[PAGES]) * self.settings.page_slots if len(self) else 0
        rows = self.tree.rows.reshape(-1, self.dim)
        for first in range(0, slots, CHUNK):
            part = slice(first, min(slots, first + CHUNK))
            keys = rows[part].view(np.float16).astype(np.float32) * np.float32(old)
            rows[part] = self.scale.rows(keys)
            self.tree.lifts[part] = lifts = self.scale.lifts(norms_of(keys))
            directions = self.tree.directions
            products = keys @ directions[:, :-1].T / np.float32(self.scale.unit) + lifts[:, None] * directions[:, -1]
            self.tree.projections.reshape(len(rows), len(directions))[part] = products

    def build(self, bits: NDArray[np.uint16], lifts: Floats, tokens: Ints, levels: Ints) -> None:
        """Builds the tree level by level from the top; algorithm 2."""
        levels = (np.unique(levels, return_inverse=True)[1] + 1).astype(np.int32)  # "Remove the empty levels"
        top = int(levels.max())
        self.tree.state[LEVELS] = self.tree.nodes[ROOT, LEVEL] = top
        flat = bits.reshape(-1)
        for level in range(top, 0, -1):
            members = np.flatnonzero(levels == level).astype(np.int32)
            parents = np.zeros(len(members), np.int32)
            for first in range(0, len(members) if level < top else 0, CHUNK):
                part = slice(first, first + CHUNK)
                parents[part] = self._nodes_for(bits[members[part]], lifts[members[part]], level)
            members = members[np.argsort(parents, kind="stable")]
            nodes, sizes = np.unique(parents, return_counts=True)
            self.tree = with_room(self.tree, int((-(-sizes // self.settings.page_slots)).sum()), 0, 0)
            lay(self.tree, level, members, np.cumsum(sizes), nodes, flat, lifts, tokens)

    def _add(self, bits: NDArray[np.uint16], lifts: Floats, tokens: Ints, levels: Ints) -> None:
        """Adds to a tree that has keys: new levels first, then level by level from the top; algorithm 1, lines 27 to 37."""
        for index in np.flatnonzero(levels > self.tree.state[LEVELS]):
            levels[index] = min(int(levels[index]), int(self.tree.state[LEVELS]) + 1)
            if levels[index] > self.tree.state[LEVELS]:
                start_level(self.tree, bits[index], lifts[index], tokens[index])
                levels[index] = 0  # done
        for level in range(int(levels.max()), 0, -1):
            mine = np.flatnonzero(levels == level)
            if len(mine):
                nodes = self._nodes_for(bits[mine], lifts[mine], level)
                attach(self.tree, bits[mine].reshape(-1), lifts[mine], tokens[mine], level, nodes)

    def _nodes_for(self, bits: NDArray[np.uint16], lifts: Floats, level: int) -> Ints:
        """The nodes that keys `bits` [n, dim] of a level belong to: those below their nearest points of the next."""
        if level == self.tree.state[LEVELS]:
            return np.zeros(len(lifts), np.int32)
        keys = bits.view(np.float16).astype(np.float32)
        view = self.settings.build_view or ALL
        slots, counts = self._ask(keys, lifts, level + 1, 1, (view, ALL, np.inf), 1.0)[1:3]
        lost = np.flatnonzero(counts == 0)  # all that was in view leads nowhere
        if len(lost):
            slots[lost] = self._ask(keys[lost], lifts[lost], level + 1, 1, (ALL, ALL, np.inf), 1.0)[1]
        return self.tree.children[slots[:, 0]]

    def _ask(
        self, keys: Floats, lifts: Floats, target: int, k: int, limits: tuple[int, int, float], share: float
    ) -> tuple[Floats, Ints, Ints, Int64s]:
        """Algorithm 4 for each of `keys`: scores and slots [n, k], how many there are, how many products were computed."""
        count = len(keys)
        scores, slots = np.empty((count, k), np.float32), np.empty((count, k), np.int32)
        found = scores, slots, np.empty(count, np.int32), np.empty(count, np.int64)
        view, visit, margin = limits
        bounds = (view, visit, self.settings.simple, margin)
        ask(self.tree, keys, lifts, target, bounds, share, _rooms.fit(len(self), k), found)
        return found

    def query(self, queries: Floats, k: int) -> list[Nearest]:
        """Returns (about) the `k` keys that have the largest products with each of `queries` [n, dim]; algorithm 4.

        Looks wider than the settings say until it has found as many. Any number of threads may ask.
        """
        if queries.ndim != 2 or queries.shape[1] != self.dim or queries.dtype != np.float32:
            raise ValueError(f"queries: must be float32 [n, {self.dim}], not {queries.dtype} {queries.shape}")
        if k < 1:
            raise ValueError(f"k: must be at least 1, not {k}")
        view, visit = self.settings.field_of_view, self.settings.visited(len(self), k)
        while True:
            found = self._within(queries, k, view, visit)
            if min(len(one.tokens) for one in found) >= min(k, len(self)):
                return found
            view, visit = 2 * view, 2 * visit

    def _within(self, queries: Floats, k: int, view: int, visit: int) -> list[Nearest]:
        """What is found in `view` nodes a level and `visit` keys a level."""
        knobs = self.settings
        limits = (view, visit, float(knobs.margin))
        factor, asked = np.ones(len(queries), np.float32), np.ascontiguousarray(queries)
        if knobs.retrieve < 1:  # T_Q makes queries as long as keys are, which the bounds of P-DCI need
            factor = self.scale.stretch(np.linalg.norm(queries, axis=1).astype(np.float32))
            asked = asked * factor[:, None]
        lifts = np.zeros(len(queries), np.float32)
        scores, slots, counts, touched = self._ask(asked, lifts, EVERY_LEVEL, k, limits, knobs.retrieve)
        units = np.float32(self.scale.unit) / factor
        return [
            Nearest(
                self.tree.tokens[slots[index, :count]].astype(np.int64),
                scores[index, :count] * units[index],
                slots[index, :count],
                int(touched[index]),
            )
            for index, count in enumerate(counts)
        ]

    def remove(self, tokens: Int64s) -> None:
        """Takes tokens away: what hung under them gets the nearest of the other parents; empty levels go.

        ValueError: one is not in the index; then nothing has changed.
        """
        base = int(self.tree.state[BASE])
        inside = (tokens >= base) & (tokens - base < len(self.tree.where))
        if not inside.all() or (self.tree.where[tokens - base] < 0).any() or len(np.unique(tokens)) < len(tokens):
            raise ValueError("tokens: some are not in the index, or given twice")
        for token in tokens:
            below = take_away(self.tree, int(token))
            if below != NONE:
                slots = slots_of(self.tree, below)
                bits = self.tree.rows.reshape(-1, self.dim)[slots]
                parents = self._nodes_for(bits, self.tree.lifts[slots], int(self.tree.nodes[below, LEVEL]))
                self.tree = with_room(self.tree, len(slots), 0, 0)
                rehang(self.tree, below, bits.reshape(-1), parents)


class _Rooms(threading.local):
    """Room for a query, kept by each thread: candidates twice (the heap of a level is a copy), nodes, the best."""

    def __init__(self) -> None:
        self._arrays: tuple[NDArray[np.generic], ...] = ()

    def fit(self, points: int, k: int) -> tuple[NDArray[np.generic], ...]:
        """Returns scores, slots, nodes and what is above them, keys, rest and places for a tree of `points`, and k best."""
        if not self._arrays or len(self._arrays[2]) < points + 1 or len(self._arrays[-1]) < k:
            size = points + points // 4 + 1
            types = (np.float32, np.int32, np.int32, np.float32, np.uint32, np.uint32, np.int32)
            self._arrays = tuple(np.empty(2 * size if at < 2 else size, kind) for at, kind in enumerate(types))
            self._arrays += (np.empty(max(k, 1024), np.int64),)
        return self._arrays


_rooms = _Rooms()


def norms_of(keys: Floats) -> Doubles:
    """Returns the norms of keys [n, dim]; ValueError if one is not finite."""
    norms: Doubles = np.sqrt(np.einsum("ij,ij->i", keys, keys, dtype=np.float64))
    if not np.isfinite(norms).all():
        raise ValueError(f"keys: must be finite, but key {int(np.argmin(np.isfinite(norms)))} is not")
    return norms


def random_directions(count: int, dim: int, seed: int) -> Floats:
    """Returns `count` random unit vectors of `dim` numbers and the lift."""
    drawn = np.random.default_rng(seed).standard_normal((count, dim + 1), dtype=np.float32)
    unit: Floats = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return unit


def _uniform(tokens: Int64s, seed: int) -> Doubles:
    """Numbers in [0, 1) by SplitMix64 (Steele, Lea and Flood, 2014): one draw of Random(0, 1) stands for the whole loop."""
    start = np.uint64((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)
    z = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    drawn: Doubles = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn
