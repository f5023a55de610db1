"""DciHeads: one DCI-tree for each key head of a layer and sequence, and algorithm 3, which chooses pages by them.

A job for each head runs on the threads of the kernels; the trees share nothing, and compiled loops hold no GIL, so that an
index is built while another layer computes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.index.dci.index import DciIndex, Found
from llmcache.kv.index.dci.settings import DciSettings
from llmcache.kv.index.dci.tree import BASE, COUNT
from llmcache.kv.kernels.threads import run_all

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


Choice = Callable[[DciIndex, list[Found], int], Positions]


class Chosen(NamedTuple):
    """Tokens [kv_heads, k], ascending in each head, and how many products were computed for them in the mean head."""

    tokens: Positions
    touched: float


class DciHeads:
    """Trees for `kv_heads` heads of keys of `dim` numbers, of tokens from number `base` on."""

    def __init__(
        self, kv_heads: int, dim: int, settings: DciSettings | None = None, base: int = 0, threads: int | None = None
    ) -> None:
        knobs = settings or DciSettings()
        # Heads draw their levels apart, or a token would be promoted in all of them or in none.
        seeds = [knobs.seed * kv_heads + head for head in range(kv_heads)]
        self.indexes = [DciIndex(dim, replace(knobs, seed=seed), base) for seed in seeds]
        self._threads = threads

    def __len__(self) -> int:
        """Tokens in the trees."""
        return len(self.indexes[0])

    @property
    def size_bytes(self) -> int:
        """Memory of all trees."""
        return sum(index.size_bytes for index in self.indexes)

    def insert(self, keys: Floats, tokens: Positions) -> None:
        """Adds `keys` [kv_heads, n, dim] float32 of `tokens` [n]; errors as `DciIndex.insert`."""
        if len(keys) != len(self.indexes):
            raise ValueError(f"keys: {len(keys)} heads, there are {len(self.indexes)}")
        pairs = zip(self.indexes, keys, strict=True)
        run_all([functools.partial(index.insert, own, tokens) for index, own in pairs], self._threads)

    def crop(self, tokens: int) -> None:
        """Takes all tokens from number `tokens` on away."""
        run_all([functools.partial(_crop, index, tokens) for index in self.indexes], self._threads)

    def top(self, queries: Floats, k: int) -> Chosen:
        """Returns for each key head the `k` tokens (fewer if there are fewer) that come nearest to being some query's best.

        `queries` [heads, dim]; those of one key head follow each other (GQA).
        """
        return self._choose(queries, k, _best_tokens)

    def pages(self, queries: Floats, k: int) -> Chosen:
        """Returns for each key head `k` tokens of the pages of the tree that hold the best keys; algorithm 3.

        Differs from the paper: of the union over the queries of a key head (section 4.3) only as many pages are taken as
        hold `k` tokens, and of the last only the tokens that fit, so that all heads attend to as many; pages rank by how
        little the score of their best key falls short of the best of the same query.
        """
        return self._choose(queries, k, _best_pages)

    def _choose(self, queries: Floats, k: int, choice: Choice) -> Chosen:
        k = min(k, len(self))
        grouped = queries.reshape(len(self.indexes), -1, queries.shape[-1])
        out = np.empty((len(self.indexes), k), np.int64)
        touched = np.zeros(len(self.indexes))

        def job(head: int) -> None:
            index = self.indexes[head]
            found = asked(index, grouped[head], k)
            out[head] = np.sort(choice(index, found, k))
            touched[head] = sum(one.touched for one in found)

        if k:
            run_all([functools.partial(job, head) for head in range(len(self.indexes))], self._threads)
        return Chosen(out, float(touched.mean()))

    def copy(self) -> DciHeads:
        """Returns trees of their own, with the same points."""
        return copy.deepcopy(self)


def asked(index: DciIndex, queries: Floats, k: int) -> list[Found]:
    """Returns at least `k` keys for each query, as long as the tree has them: looks wider until it has found them."""
    knobs, size = index.settings, len(index)
    view, visit = knobs.field_of_view, knobs.visited(size, k)
    while True:
        found = index.query(queries, k, view, visit)
        if min(len(one.tokens) for one in found) >= min(k, size):
            return found
        view, visit = 2 * view, 2 * visit


def _ranked(found: list[Found]) -> tuple[NDArray[np.int32], Positions]:
    """Slots and tokens of all queries without repetition, best first by the shortfall from the best of a query."""
    short = np.concatenate([one.scores - one.scores[0] for one in found])
    order = np.argsort(-short, kind="stable")
    slots = np.concatenate([one.slots for one in found])[order]
    tokens = np.concatenate([one.tokens for one in found])[order]
    if len(found) > 1:
        first = np.sort(np.unique(slots, return_index=True)[1])
        slots, tokens = slots[first], tokens[first]
    return slots, tokens


def _best_tokens(index: DciIndex, found: list[Found], k: int) -> Positions:
    return _ranked(found)[1][:k]


def _best_pages(index: DciIndex, found: list[Found], k: int) -> Positions:
    """FIND-PAGE-INDEX: a slot tells its page. Tokens of whole pages, then of the last page those that were found first."""
    size = index.settings.page_slots
    slots, tokens = _ranked(found)
    of_slot = slots // size
    pages, first = np.unique(of_slot, return_index=True)
    pages = pages[np.argsort(first)]
    held = np.cumsum(index.tree.pages[pages, COUNT])
    whole = int(np.searchsorted(held, k, side="right"))
    inside = np.arange(size) < index.tree.pages[pages[:whole], COUNT][:, None]
    chosen = index.tree.tokens.reshape(-1, size)[pages[:whole]][inside].astype(np.int64)
    rest = k - len(chosen)
    if not rest:
        whole_pages: Positions = chosen
        return whole_pages
    last = pages[whole]
    own = index.tree.tokens[last * size : last * size + index.tree.pages[last, COUNT]]
    wanted = np.concatenate([tokens[of_slot == last], own])
    partly: Positions = wanted[np.sort(np.unique(wanted, return_index=True)[1])][:rest]
    return np.concatenate([chosen, partly])


def _crop(index: DciIndex, tokens: int) -> None:
    base = int(index.tree.state[BASE])
    place = max(0, tokens - base)
    gone = place + np.flatnonzero(index.tree.where[place:] >= 0)
    index.remove(gone[::-1] + base)
