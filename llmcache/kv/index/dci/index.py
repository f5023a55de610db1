"""DciIndex: the DCI-tree of one key head, its settings, and the transformation of keys.

Source: icecache.txt, section 4.2, equations 2 and 3. Rows are k / s and lifts sqrt(c^2 - |k|^2) / s, where s is a power
of two. Their products have the order of the paper's, and keys are not rewritten when c grows.
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

CHUNK = 4096  # keys that a build converts to float32 at a time
HEADROOM = 1.125  # factor of c over the largest norm when c has to grow: lifts are recomputed, parents stay
LARGEST = 2.0**15  # limit of numbers stored as fp16, whose largest is 65504
LEAST = 1e-30  # c if all keys are zero
ROOM = 10
"""Initially, c / s is at most 2^ROOM: fp16 keeps its precision far below LARGEST, and c may grow by 2^5 before s must."""


@dataclass(frozen=True)
class DciSettings:
    """Settings for the construction and the queries of a tree.

    `promotion` is the paper's r; `first_promotion` is that of the lowest level, whose nodes should fill pages.
    `field_of_view`: nodes that a query opens per level; `visit`: limit of the visited keys per level as a share of all
    keys, plus `visit_each` for each requested key. `build_view`: field of view of the search for a parent; 0: all.
    `simple`, `composite`: indices of P-DCI; `retrieve`: share of a node's keys (at least k) that P-DCI passes on to exact
    products; 1: all, without random directions. `margin`: a query leaves a level if the points below the next node would
    have to exceed the visited ones by this many standard deviations; infinity: never.

    Differs from the paper: with `field_of_view` and `margin`, a query visits 1.5 % instead of 2.1 % of 256 Ki keys at the
    same recall. All keys of a node are visited: with one projection and 0.8, a query on 64 Ki clustered keys takes 1.9
    times as long, and recall falls from 0.94 to 0.88.

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
        return self.simple * self.composite if self.retrieve < 1 else 0

    def visited(self, keys: int, k: int) -> int:
        return max(1, int(self.visit * keys) + self.visit_each * k)


@dataclass
class Scale:
    """`unit` is s, `bound` is c; both are 0 until there are keys."""

    unit: float = 0.0
    bound: float = 0.0

    def grow(self, largest: float) -> None:
        """Increase c for keys of norm up to `largest`: exactly at first, later with headroom."""
        first = not self.bound
        self.bound = max(largest, LEAST) * (1 if first else HEADROOM)
        if first or self.bound / self.unit >= LARGEST:
            self.unit = float(2.0 ** (np.ceil(np.log2(self.bound)) - ROOM))

    def rows(self, keys: Floats) -> NDArray[np.uint16]:
        bits: NDArray[np.uint16] = (keys * np.float32(1 / self.unit)).astype(np.float16).view(np.uint16)
        return bits

    def stretch(self, norms: Floats) -> Floats:
        """Return the factors that give queries the length of transformed keys; 1 for zero queries."""
        return np.where(norms > 0, self.bound / self.unit / np.where(norms > 0, norms, 1), 1).astype(np.float32)

    def lifts(self, norms: Doubles) -> Floats:
        return (np.sqrt(np.maximum(self.bound**2 - norms**2, 0)) / self.unit).astype(np.float32)


class Nearest(NamedTuple):
    """The result of a query, best first: arrays [k], and the number of computed products."""

    tokens: Int64s
    scores: Floats
    slots: Ints
    touched: int


class DciIndex:
    """An index of keys of `dim` numbers, of tokens from number `base` on. Threads may query it while no thread changes it.

    Memory: 2 dim + 13 bytes per slot, 4 more for each random direction, and 4 bytes per token, plus up to a quarter for
    growth. Measured: 340 bytes per key of 128 numbers.

    Differs from the paper: the parent of a key is searched one level above its own, as section 4.2 says (algorithms 1 and
    2: on its own level). A key promoted above all levels starts a single new level. A key is on its own level only, so a
    query returns the best of all levels.
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
        return int(self.tree.state[DIM])

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.tree)

    def levels_of(self, tokens: Int64s) -> Ints:
        """Return the levels of tokens (line 4 of algorithm 2), which depend only on the seed and the token."""
        chance, levels = _uniform(tokens, self.settings.seed), np.ones(len(tokens), np.int32)
        threshold = self.settings.first_promotion
        for level in range(2, MAX_LEVELS):
            promoted = chance < threshold
            if not promoted.any():
                break
            levels[promoted] = level
            threshold *= self.settings.promotion
        return levels

    def insert(self, keys: Floats, tokens: Int64s) -> None:
        """Add `keys` [n, dim], float32, of `tokens` [n], ascending.

        ValueError: a key is not finite, or a token is in the index or before `base`.
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
        """Build the tree by algorithm 2."""
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
        """Add keys to a non-empty tree; algorithm 1, lines 27 to 37."""
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
        if level == self.tree.state[LEVELS]:
            return np.zeros(len(lifts), np.int32)
        keys = bits.view(np.float16).astype(np.float32)
        view = self.settings.build_view or ALL
        slots, counts = self._ask(keys, lifts, level + 1, 1, (view, ALL, np.inf), 1.0)[1:3]
        unplaced = np.flatnonzero(counts == 0)  # no node in view has points
        if len(unplaced):
            slots[unplaced] = self._ask(keys[unplaced], lifts[unplaced], level + 1, 1, (ALL, ALL, np.inf), 1.0)[1]
        return self.tree.children[slots[:, 0]]

    def _ask(
        self, keys: Floats, lifts: Floats, target: int, k: int, limits: tuple[int, int, float], share: float
    ) -> tuple[Floats, Ints, Ints, Int64s]:
        count = len(keys)
        scores, slots = np.empty((count, k), np.float32), np.empty((count, k), np.int32)
        found = scores, slots, np.empty(count, np.int32), np.empty(count, np.int64)
        view, visit, margin = limits
        bounds = (view, visit, self.settings.simple, margin)
        ask(self.tree, keys, lifts, target, bounds, share, _rooms.fit(len(self), k), found)
        return found

    def query(self, queries: Floats, k: int) -> list[Nearest]:
        """Return about the `k` keys with the largest products for each of `queries` [n, dim]; algorithm 4."""
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
        knobs = self.settings
        limits = (view, visit, float(knobs.margin))
        factor, scaled = np.ones(len(queries), np.float32), np.ascontiguousarray(queries)
        if knobs.retrieve < 1:  # T_Q gives queries the length of keys, as the bounds of P-DCI require
            factor = self.scale.stretch(np.linalg.norm(queries, axis=1).astype(np.float32))
            scaled = scaled * factor[:, None]
        lifts = np.zeros(len(queries), np.float32)
        scores, slots, counts, touched = self._ask(scaled, lifts, EVERY_LEVEL, k, limits, knobs.retrieve)
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
        """Remove tokens. ValueError, without an effect: a token is not in the index."""
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
    def __init__(self) -> None:
        self._arrays: tuple[NDArray[np.generic], ...] = ()

    def fit(self, points: int, k: int) -> tuple[NDArray[np.generic], ...]:
        """Return buffers for scores, slots, nodes, their parents' scores, keys, rest, places and the k best."""
        if not self._arrays or len(self._arrays[2]) < points + 1 or len(self._arrays[-1]) < k:
            size = points + points // 4 + 1
            types = (np.float32, np.int32, np.int32, np.float32, np.uint32, np.uint32, np.int32)
            self._arrays = tuple(np.empty(2 * size if at < 2 else size, kind) for at, kind in enumerate(types))
            self._arrays += (np.empty(max(k, 1024), np.int64),)
        return self._arrays


_rooms = _Rooms()


def norms_of(keys: Floats) -> Doubles:
    """Return the norms of keys [n, dim]; ValueError if one is not finite."""
    norms: Doubles = np.sqrt(np.einsum("ij,ij->i", keys, keys, dtype=np.float64))
    if not np.isfinite(norms).all():
        raise ValueError(f"keys: must be finite, but key {int(np.argmin(np.isfinite(norms)))} is not")
    return norms


def random_directions(count: int, dim: int, seed: int) -> Floats:
    """Return `count` random unit vectors of `dim` numbers and the lift."""
    drawn = np.random.default_rng(seed).standard_normal((count, dim + 1), dtype=np.float32)
    unit: Floats = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return unit


def _uniform(tokens: Int64s, seed: int) -> Doubles:
    """Return numbers in [0, 1) by SplitMix64 (Steele, Lea and Flood, 2014), one per token."""
    start = np.uint64((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)
    z = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    drawn: Doubles = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn
