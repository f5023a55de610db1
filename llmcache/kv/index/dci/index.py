"""DciIndex: the DCI-tree of one key head.

One thread at a time changes an index, and none asks it meanwhile; any number may ask it at a time when none changes it: the
rooms that queries need belong to threads (`_Scratch`). The policies keep to that with one job per head.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.index.dci import building, changing, querying
from llmcache.kv.index.dci.querying import ALL, EVERY_LEVEL
from llmcache.kv.index.dci.settings import DciSettings
from llmcache.kv.index.dci.transforms import Scale, norms_of, random_directions, random_levels
from llmcache.kv.index.dci.tree import (
    BASE,
    DIM,
    KEYS,
    LEVEL,
    LEVELS,
    NONE,
    PAGES,
    ROOT,
    Floats,
    Ints,
    Tree,
    empty_tree,
    tree_bytes,
    with_room,
)

CHUNK = 4096
"""Keys that a build turns into float32 at a time."""


class Found(NamedTuple):
    """What a query found, best first: `tokens` and `slots` [k], `scores` [k] (products of query and key), and how many
    keys it computed a product with."""

    tokens: NDArray[np.int64]
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
        return tree_bytes(self.tree)

    def levels_of(self, tokens: NDArray[np.int64]) -> Ints:
        """Returns the levels that tokens are promoted to: line 4 of algorithm 2."""
        knobs = self.settings
        return random_levels(tokens, knobs.seed, knobs.first_promotion, knobs.promotion)

    def insert(self, keys: Floats, tokens: NDArray[np.int64]) -> None:
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
            self._build(bits, lifts, tokens.astype(np.int32), levels)

    def _check(self, keys: Floats, tokens: NDArray[np.int64]) -> None:
        if keys.ndim != 2 or keys.shape[1] != self.dim or keys.dtype != np.float32:
            raise ValueError(f"keys: {keys.dtype} {keys.shape}, float32 [n, {self.dim}] is needed")
        if tokens.shape != keys.shape[:1] or (np.diff(tokens) <= 0).any():
            raise ValueError(f"tokens: {len(tokens)} numbers, {len(keys)} in ascending order are needed")
        base = int(self.tree.state[BASE])
        if len(tokens) and (tokens[0] < base or tokens[-1] >= 1 << 31):
            raise ValueError(f"tokens: {tokens[0]} to {tokens[-1]}, the first may be {base}, the last {(1 << 31) - 1}")
        known = tokens[tokens - base < len(self.tree.where)]
        if (self.tree.where[known - base] >= 0).any():
            raise ValueError("tokens: some are in the index already")

    def _fit(self, largest: float) -> None:
        """Makes c at least `largest`; what depends on it is computed anew."""
        if self.scale.fits(largest):
            return
        old = self.scale.unit
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

    def _build(self, bits: NDArray[np.uint16], lifts: Floats, tokens: Ints, levels: Ints) -> None:
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
            building.lay(self.tree, level, members, np.cumsum(sizes), nodes, flat, lifts, tokens)

    def _add(self, bits: NDArray[np.uint16], lifts: Floats, tokens: Ints, levels: Ints) -> None:
        """Adds to a tree that has keys: new levels first, then level by level from the top; algorithm 1, lines 27 to 37."""
        for index in np.flatnonzero(levels > self.tree.state[LEVELS]):
            levels[index] = min(int(levels[index]), int(self.tree.state[LEVELS]) + 1)
            if levels[index] > self.tree.state[LEVELS]:
                changing.start_level(self.tree, bits[index], lifts[index], tokens[index])
                levels[index] = 0  # done
        for level in range(int(levels.max()), 0, -1):
            mine = np.flatnonzero(levels == level)
            if len(mine):
                nodes = self._nodes_for(bits[mine], lifts[mine], level)
                changing.attach(self.tree, bits[mine].reshape(-1), lifts[mine], tokens[mine], level, nodes)

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
        nodes: Ints = self.tree.children[slots[:, 0]]
        return nodes

    def _ask(
        self, keys: Floats, lifts: Floats, target: int, k: int, limits: tuple[int, int, float], share: float
    ) -> tuple[Floats, Ints, Ints, NDArray[np.int64]]:
        """Algorithm 4 for each of `keys`: scores and slots [n, k], how many there are, how many products were computed."""
        count = len(keys)
        found = (
            np.empty((count, k), np.float32),
            np.empty((count, k), np.int32),
            np.empty(count, np.int32),
            np.empty(count, np.int64),
        )
        scratch = _scratch.fit(len(self), k)
        view, visit, margin = limits
        bounds = (view, visit, self.settings.simple, margin)
        querying.ask(self.tree, keys, lifts, target, bounds, share, scratch, found)
        return found

    def query(
        self,
        queries: Floats,
        k: int,
        view: int | None = None,
        visit: int | None = None,
        margin: float | None = None,
    ) -> list[Found]:
        """Returns the (about) `k` keys that have the largest products with each of `queries` [n, dim]; algorithm 4.

        `view`, `visit`: nodes a level and keys a level to look at; `margin`: when to stop before (None: as the settings
        say). Fewer than k are found only if there are no more within these bounds. Any number of threads may ask.
        """
        if queries.ndim != 2 or queries.shape[1] != self.dim or queries.dtype != np.float32:
            raise ValueError(f"queries: {queries.dtype} {queries.shape}, float32 [n, {self.dim}] is needed")
        if k < 1:
            raise ValueError(f"k: {k}, at least 1 is needed")
        knobs = self.settings
        stop = float(knobs.margin if margin is None else margin)
        limits = (view or knobs.field_of_view, visit or knobs.visited(len(self), k), stop)
        factor, asked = np.ones(len(queries), np.float32), np.ascontiguousarray(queries)
        if knobs.retrieve < 1:  # T_Q makes queries as long as keys are, which the bounds of P-DCI need
            factor = self.scale.stretch(np.linalg.norm(queries, axis=1).astype(np.float32))
            asked = asked * factor[:, None]
        lifts = np.zeros(len(queries), np.float32)
        scores, slots, counts, touched = self._ask(asked, lifts, EVERY_LEVEL, k, limits, knobs.retrieve)
        units = np.float32(self.scale.unit) / factor
        return [
            Found(
                self.tree.tokens[slots[index, :count]].astype(np.int64),
                scores[index, :count] * units[index],
                slots[index, :count],
                int(touched[index]),
            )
            for index, count in enumerate(counts)
        ]

    def remove(self, tokens: NDArray[np.int64]) -> None:
        """Takes tokens away: what hung under them gets the nearest of the other parents; empty levels go.

        ValueError: one is not in the index; then nothing has changed.
        """
        base = int(self.tree.state[BASE])
        inside = (tokens >= base) & (tokens - base < len(self.tree.where))
        if not inside.all() or (self.tree.where[tokens - base] < 0).any() or len(np.unique(tokens)) < len(tokens):
            raise ValueError("tokens: some are not in the index, or twice among these")
        for token in tokens:
            below = changing.take_away(self.tree, int(token))
            if below != NONE:
                self._rehang(int(below))

    def _rehang(self, node: int) -> None:
        slots = changing.slots_of(self.tree, node)
        bits = self.tree.rows.reshape(-1, self.dim)[slots]
        level = int(self.tree.nodes[node, LEVEL])
        parents = self._nodes_for(bits, self.tree.lifts[slots], level)
        self.tree = with_room(self.tree, len(slots), 0, 0)
        changing.rehang(self.tree, node, bits.reshape(-1), parents)

    def keys(self, tokens: NDArray[np.int64]) -> Floats:
        """Returns the keys [n, dim] of tokens that are in the index, as precise as it holds them."""
        rows = self.tree.rows.reshape(-1, self.dim)[self.tree.where[tokens - int(self.tree.state[BASE])]]
        found: Floats = rows.view(np.float16).astype(np.float32) * np.float32(self.scale.unit)
        return found

    @property
    def pages(self) -> int:
        """Pages that have been used: numbers of pages are below this."""
        return int(self.tree.state[PAGES])


class _Scratch(threading.local):
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


_scratch = _Scratch()
