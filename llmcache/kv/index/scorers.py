"""Scorers find the tokens of one layer and sequence whose keys are most important for queries.

`SCORERS` lists them; `PageIndexes` manages those of a store. One thread at a time uses a scorer; scorers share no state.
"""

from __future__ import annotations

import copy
import functools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llmcache.arrays import Bytes, Floats, Int64s
from llmcache.errors import UsageError
from llmcache.kv.index.dci import DciIndex, DciSettings, Nearest
from llmcache.kv.index.dci.tree import BASE, COUNT
from llmcache.kv.kernels import packed_products, products, score_pages, top
from llmcache.kv.kernels.threads import run_all
from llmcache.kv.pipeline import widened
from llmcache.kv.spill import KvShape
from llmcache.kv.spill.layout import KEYS, VALUES
from llmcache.kv.tiers import KvStore, Selection

MEAN_TOKENS = 512
"""`PackedScorer` computes a new mean when this many tokens are added together; it then takes under a byte per key."""
STEPS = 127  # in `RoundedScorer`, steps from 0 to the largest number of a key
ROUNDED = 1 << 17  # numbers rounded at a time, so that they fit in the CPU cache as float32
QUERIES = 16  # sets of queries in a trial
WIDER = (1, 2, 4)  # factors by which a trial widens the search in a tree until it finds enough
MARGIN = 1.1  # factor by which the tree has to be faster, because times of few queries are inexact
SLOTS = 1.6  # slots of a tree per key, at most, with unused room (see `DciIndex`)
FEED_PAGES = 512  # pages read from the store at a time when many are missing
GROWTH = 17 / 16  # factor by which the memory of an index grows when it is full
SUM_TOKENS = 1024
"""Tokens per sum in `ValueSums`: sums take 1/1000 of the memory of values; a partly removed block is added again."""


@dataclass(frozen=True)
class ScorerSettings:
    """Settings of scorers.

    `combine`: "max" or "sum" over the query heads of a key head. `whole_pages`: the tree returns the pages of the best keys
    (algorithm 3), and not the best keys, which suit a file in the order of tokens better. `recall`: share of the best keys
    that `auto` requires of the tree, which it tries from `least` tokens on. `chunk_pages`: of `ChunkScorer`.
    """

    combine: str = "max"
    threads: int | None = None
    whole_pages: bool = False
    recall: float = 0.9
    least: int = 8192
    dci: DciSettings = field(default_factory=DciSettings)
    chunk_pages: int = 8


class PageIndex(ABC):
    """An index of the keys, or values, of consecutive whole pages of all heads, from token `first` on."""

    side: ClassVar[int] = KEYS

    def __init__(self, shape: KvShape, first: int = 0) -> None:
        self.shape, self.first, self.end = shape, first, first

    def __len__(self) -> int:
        return self.end - self.first

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        pass

    @property
    @abstractmethod
    def page_bytes(self) -> float: ...

    @property
    def step(self) -> int:
        return self.shape.page_tokens

    def add(self, rows: NDArray[Any]) -> None:
        """Add whole pages of rows [kv_heads, tokens, dim], in the shape's numpy type."""
        size, (form, dtype) = self.shape.page_tokens, self.shape.forms(self.shape.kv_heads)[self.side]
        if rows.ndim != 3 or rows.shape[::2] != form or rows.shape[1] % size or rows.dtype != dtype:
            wanted = f"{dtype} [{form[0]}, a multiple of {size}, {form[1]}]"
            raise ValueError(f"{('keys', 'values')[self.side]}: must be {wanted}, not {rows.dtype} {rows.shape}")
        if rows.shape[1]:
            self._add(rows)
            self.end += rows.shape[1]

    def crop(self, tokens: int) -> None:
        """Remove the tokens from number `tokens` on, rounded down to a multiple of `step`."""
        if tokens < self.end:
            end = max(self.first, tokens - (tokens - self.first) % self.step)
            self._crop(end)
            self.end = end

    @abstractmethod
    def _add(self, rows: NDArray[Any]) -> None: ...

    @abstractmethod
    def _crop(self, end: int) -> None: ...


class ValueSums(PageIndex):
    """The mean of the values of each head."""

    side = VALUES

    def __init__(self, shape: KvShape, first: int = 0) -> None:
        super().__init__(shape, first)
        self._sums: list[NDArray[np.float64]] = []  # for each `step` tokens, [kv_heads, value_dim]
        self._all = np.zeros((shape.kv_heads, shape.value_dim))
        self._mean: Floats | None = None

    @property
    def size_bytes(self) -> int:
        return (len(self._sums) + 1) * self._all.nbytes

    @property
    def page_bytes(self) -> float:
        return self._all.nbytes * self.shape.page_tokens / SUM_TOKENS

    @property
    def step(self) -> int:
        return SUM_TOKENS

    @property
    def mean(self) -> Floats:
        if self._mean is None:
            self._mean = (self._all / max(1, len(self))).astype(np.float32)
        return self._mean

    def _add(self, rows: NDArray[Any]) -> None:
        wide, at, start = widened(rows), len(self), 0
        while start < rows.shape[1]:
            stop = min(rows.shape[1], start + SUM_TOKENS - (at + start) % SUM_TOKENS)
            some = wide[:, start:stop].sum(axis=1, dtype=np.float64)
            if (at + start) % SUM_TOKENS:
                self._sums[-1] += some
            else:
                self._sums.append(some)
            self._all += some
            start = stop
        self._mean = None

    def _crop(self, end: int) -> None:
        self._mean = None
        del self._sums[(end - self.first) // SUM_TOKENS :]
        self._all = sum(self._sums, np.zeros_like(self._all))


class Scorer(PageIndex):
    """An index that finds tokens by their keys."""

    name: ClassVar[str]

    def __init__(self, shape: KvShape, first: int = 0, settings: ScorerSettings | None = None) -> None:
        super().__init__(shape, first)
        self.settings = settings or ScorerSettings()
        self._begin()

    @property
    def why(self) -> str:
        return f"{self.name}: as requested"

    def top(self, queries: Floats, k: int) -> Int64s:
        """Return the at most `k` best tokens [kv_heads, k], ascending, for `queries` [heads, dim] float32."""
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        if queries.ndim != 2 or queries.shape[1] != dim or queries.shape[0] % heads or queries.dtype != np.float32:
            raise ValueError(f"queries: must be float32 [a multiple of {heads}, {dim}], not {queries.dtype} {queries.shape}")
        if k < 1:
            raise ValueError(f"k: must be at least 1, not {k}")
        k = min(k, len(self))
        return self._top(queries, k) if k else np.empty((heads, 0), np.int64)

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _top(self, queries: Floats, k: int) -> Int64s: ...


class Grown:
    """An array that grows along its first axis by `GROWTH`."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self._array: NDArray[Any] = np.empty((0, *shape), dtype)
        self._used = 0

    @property
    def rows(self) -> NDArray[Any]:
        return self._array[: self._used]

    @property
    def size_bytes(self) -> int:
        return self._array.nbytes

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self._array.shape[1:])) * self._array.itemsize

    def append(self, rows: NDArray[Any]) -> None:
        end = self._used + len(rows)
        if end > len(self._array):
            longer = np.empty((max(end, int(len(self._array) * GROWTH)), *self._array.shape[1:]), self._array.dtype)
            longer[: self._used] = self.rows
            self._array = longer
        self._array[self._used : end] = rows
        self._used = end

    def cut(self, rows: int) -> None:
        self._used = rows


class GrownScorer(Scorer):
    """A scorer that keeps one row for each page in arrays."""

    _kept: list[Grown]

    @property
    def size_bytes(self) -> int:
        return sum(stored.size_bytes for stored in self._kept)

    @property
    def page_bytes(self) -> float:
        return sum(stored.row_bytes for stored in self._kept)

    def _crop(self, end: int) -> None:
        for stored in self._kept:
            stored.cut((end - self.first) // self.shape.page_tokens)


class ExactScorer(GrownScorer):
    """Scores all keys, which it keeps as they are."""

    name = "exact"

    def _begin(self) -> None:
        self._keep(self.shape.head_dim, self.shape.numpy_dtype)

    def _keep(self, dim: int, dtype: DTypeLike, *scales: DTypeLike) -> None:
        size = (self.shape.kv_heads, self.shape.page_tokens)
        self._kept = [Grown((*size, dim), dtype), *(Grown(size, kind) for kind in scales)]

    @property
    def _pages(self) -> list[NDArray[Any]]:
        return [stored.rows for stored in self._kept]

    def _add(self, keys: NDArray[Any]) -> None:
        self._append(keys)

    def _append(self, *sides: NDArray[Any]) -> None:
        for stored, rows in zip(self._kept, sides, strict=True):
            stored.append(as_pages(rows, self.shape.page_tokens))

    def _top(self, queries: Floats, k: int) -> Int64s:
        found: Int64s = top(self._combined(queries), k, self.settings.threads)
        return found + self.first

    def _combined(self, queries: Floats) -> Floats:
        return score_pages(queries, *self._pages, combine=self.settings.combine, threads=self.settings.threads)

    def products(self, queries: Floats) -> Floats:
        """Return the products [kv_heads, heads of each, tokens] of `queries` [heads, dim] float32 and all keys."""
        return products(queries, *self._pages, threads=self.settings.threads)

    def keys(self) -> NDArray[Any]:
        return _joined(self._kept[0].rows)


class RoundedScorer(ExactScorer):
    """Keeps keys rounded to int8, with a scale for each key.

    Measured recall of the 64 or 256 best of 32 Ki normally distributed keys of 128 fp16 numbers: 0.99.
    """

    name = "rounded"

    def _begin(self) -> None:
        self._keep(self.shape.head_dim, np.int8, np.float32)

    def _add(self, keys: NDArray[Any]) -> None:
        self._append(*rounded(keys, self.settings.threads))


class PackedScorer(ExactScorer):
    """Keeps two bits for each number of a key, after centering and rotation, and a scale for each key.

    Measured with SmolLM2: the chosen 112 of 4,096 tokens have 0.975 of the attention of the best 112 on average. Source:
    Zandieh et al., TurboQuant, 2025, section 3.1. Differs from it: levels are equidistant, the mean of at least
    `MEAN_TOKENS` tokens is subtracted first, and a key's scale minimizes its error.
    """

    name = "packed"

    def _begin(self) -> None:
        if self.shape.head_dim % 4:
            raise UsageError(
                f"scorer: '{self.name}' needs keys of a multiple of 4 numbers, not {self.shape.head_dim}", "use 'rounded'"
            )
        self._keep(self.shape.head_dim // 4, np.uint8, np.uint16)
        self._turn = rotation(self.shape.head_dim)
        self._means: list[tuple[int, Floats]] = []

    @property
    def size_bytes(self) -> int:
        return super().size_bytes + sum(mean.nbytes for _, mean in self._means)

    @property
    def page_bytes(self) -> float:
        means = 4 * self.shape.kv_heads * self.shape.head_dim * self.shape.page_tokens / MEAN_TOKENS
        return super().page_bytes + means

    def _add(self, keys: NDArray[Any]) -> None:
        wide = widened(keys)
        if not self._means or wide.shape[1] >= MEAN_TOKENS:
            self._means.append((len(self), wide.mean(axis=1, keepdims=True, dtype=np.float32)))
        centred: Floats = wide - self._means[-1][1]
        self._append(*packed(centred @ self._turn))

    def _crop(self, end: int) -> None:
        super()._crop(end)
        self._means = [(first, mean) for first, mean in self._means if first < end - self.first]

    def _combined(self, queries: Floats) -> Floats:
        found = self.products(queries)
        combined: Floats = found.max(axis=1) if self.settings.combine == "max" else found.sum(axis=1)
        return combined

    def products(self, queries: Floats) -> Floats:
        grouped = queries.reshape(self.shape.kv_heads, -1, self.shape.head_dim)
        turned = np.ascontiguousarray(grouped @ self._turn)
        found = packed_products(turned, *self._pages, threads=self.settings.threads)
        ends = [*(first for first, _ in self._means[1:]), len(self)]
        for (first, mean), end in zip(self._means, ends, strict=True):
            found[:, :, first:end] += grouped @ mean.swapaxes(1, 2)
        return found


class QuestScorer(GrownScorer):
    """Keeps the largest and smallest numbers of a page (2 of its 16 rows); returns the pages with the largest bounds.

    The bound for query q is one product: [max(q, 0), min(q, 0)] with [largest, smallest]. Source: Tang et al., Quest, ICML
    2024, section 3; baseline of icecache.txt, section 2.2.
    """

    name = "quest"

    def _begin(self) -> None:
        self._boxes = Grown((self.shape.kv_heads, 2 * self.shape.head_dim), np.float32)
        self._kept = [self._boxes]

    def _add(self, keys: NDArray[Any]) -> None:
        pages = as_pages(widened(keys), self.shape.page_tokens)
        self._boxes.append(np.concatenate([pages.max(axis=2), pages.min(axis=2)], axis=-1))

    def bounds(self, queries: Floats, boxes: Floats | None = None) -> Floats:
        """Return the combined bounds [kv_heads, n] of `boxes` [n, kv_heads, 2 * dim]; None for all pages."""
        split = np.concatenate([np.maximum(queries, 0), np.minimum(queries, 0)], axis=1)
        rows = (self._boxes.rows if boxes is None else boxes)[:, :, None]  # pages of one token for the kernels
        return score_pages(split, rows, combine=self.settings.combine, threads=self.settings.threads)

    def _top(self, queries: Floats, k: int) -> Int64s:
        size = self.shape.page_tokens
        bounds = self.bounds(queries)
        count, rest = -(-k // size), -k % size
        pages = top(bounds, count, self.settings.threads)
        tokens: Int64s = (pages[..., None] * size + np.arange(size)).reshape(len(pages), -1)
        if rest:  # only the first tokens of the page with the smallest bound fit
            least = np.take_along_axis(bounds, pages, 1).argmin(axis=1)
            kept = np.ones(tokens.shape, bool)
            for head, page in enumerate(least):
                kept[head, (page + 1) * size - rest : (page + 1) * size] = False
            tokens = tokens[kept].reshape(len(pages), k)
        return tokens + self.first


class ChunkScorer(QuestScorer):
    """Also keeps the boxes of chunks of `chunk_pages` pages. Source: Sun et al., LeoAM, 2025 (KV abstracts of chunks)."""

    name = "chunks"

    def _begin(self) -> None:
        super()._begin()
        self._chunks = Grown((self.shape.kv_heads, 2 * self.shape.head_dim), np.float32)

    @property
    def size_bytes(self) -> int:
        return super().size_bytes + self._chunks.size_bytes

    @property
    def page_bytes(self) -> float:
        return super().page_bytes * (1 + 1 / self.settings.chunk_pages)

    def _add(self, keys: NDArray[Any]) -> None:
        page = len(self._boxes.rows)
        super()._add(keys)
        self._join(page)

    def _crop(self, end: int) -> None:
        super()._crop(end)
        self._join(len(self._boxes.rows))

    def _join(self, page: int) -> None:
        size, dim = self.settings.chunk_pages, self.shape.head_dim
        self._chunks.cut(page // size)
        rows = self._boxes.rows[page // size * size :]
        if len(rows):
            starts = np.arange(0, len(rows), size)
            largest, smallest = np.maximum.reduceat(rows[..., :dim], starts), np.minimum.reduceat(rows[..., dim:], starts)
            self._chunks.append(np.concatenate([largest, smallest], axis=-1))

    def best_pages(self, queries: Floats, pages: range, count: int) -> Int64s:
        """Return the `count` of `pages` with the largest bounds, [kv_heads, count], ascending, as without chunks."""
        coarse = self.bounds(queries, self._chunks.rows)
        inside = np.arange(pages.start, pages.stop)
        chunks = inside // self.settings.chunk_pages
        sizes, matter = np.bincount(chunks, minlength=coarse.shape[1]), np.zeros(coarse.shape[1], bool)
        for bounds in coarse:
            order = np.argsort(-bounds, kind="stable")
            matter[order[: int(np.searchsorted(np.cumsum(sizes[order]), count)) + 1]] = True
        fine = self.bounds(queries, self._boxes.rows[inside[matter[chunks]]])
        least = np.partition(fine, -count, axis=1)[:, -count]
        matter |= (coarse > least[:, None]).any(axis=0)
        found = inside[matter[chunks]]
        return found[top(self.bounds(queries, self._boxes.rows[found]), count, self.settings.threads)]


class DciScorer(Scorer):
    """Keeps the keys as fp16 in a DCI-tree for each head; its results are approximate."""

    name = "dci"

    def _begin(self) -> None:
        knobs, heads = self.settings.dci, range(self.shape.kv_heads)
        # A separate seed for each head; otherwise, a token would be promoted in all heads or in none.
        seeds = [knobs.seed * self.shape.kv_heads + head for head in heads]
        self.indexes = [DciIndex(self.shape.head_dim, replace(knobs, seed=seed), self.first) for seed in seeds]

    @property
    def size_bytes(self) -> int:
        return sum(index.size_bytes for index in self.indexes)

    @property
    def page_bytes(self) -> float:
        per_slot = 2 * self.shape.head_dim + 13 + 4 * self.settings.dci.directions
        return self.shape.kv_heads * self.shape.page_tokens * (SLOTS * per_slot + 4)

    def _add(self, keys: NDArray[Any]) -> None:
        pairs, tokens = zip(self.indexes, widened(keys), strict=True), np.arange(self.end, self.end + keys.shape[1])
        run_all([partial(index.insert, own, tokens) for index, own in pairs], self.settings.threads)

    def _crop(self, end: int) -> None:
        def crop(index: DciIndex) -> None:
            base = int(index.tree.state[BASE])
            place = max(0, end - base)
            removed = place + np.flatnonzero(index.tree.where[place:] >= 0)
            index.remove(removed[::-1] + base)

        run_all([partial(crop, index) for index in self.indexes], self.settings.threads)

    def _top(self, queries: Floats, k: int) -> Int64s:
        return (self.pages if self.settings.whole_pages else self.best)(queries, k)

    def best(self, queries: Floats, k: int) -> Int64s:
        """Like `top`: return the tokens whose scores are closest to the best of a query."""
        return self._chosen(queries, k, lambda index, found: _ranked(found)[1][:k])

    def pages(self, queries: Floats, k: int) -> Int64s:
        """Return the tokens [kv_heads, k], ascending, of the tree's pages with the best keys; algorithm 3.

        Pages are ranked by the difference between the score of their best key and the best score for the same query. Differs
        from the paper: of the union over the queries of a key head (section 4.3), only the pages for `k` tokens are taken.
        """
        return self._chosen(queries, k, lambda index, found: _best_pages(index, found, k))

    def _chosen(self, queries: Floats, k: int, choice: Callable[[DciIndex, list[Nearest]], Int64s]) -> Int64s:
        grouped = queries.reshape(len(self.indexes), -1, queries.shape[-1])
        out = np.empty((len(self.indexes), k), np.int64)

        def choose(head: int) -> None:
            out[head] = np.sort(choice(self.indexes[head], self.indexes[head].query(grouped[head], k)))

        run_all([partial(choose, head) for head in range(len(self.indexes))], self.settings.threads)
        return out


@dataclass(frozen=True)
class Trial:
    """*Measured* medians of times in seconds, and the mean recall."""

    tokens: int
    exact_s: float
    dci_s: float
    recall: float
    enough: bool

    @property
    def chosen(self) -> str:
        return "dci" if self.enough and self.dci_s * MARGIN < self.exact_s else "exact"


class AutoScorer(Scorer):
    """Scores exactly, and by a tree once a trial has shown that it is faster with enough recall.

    A trial builds the tree and runs the last queries with both, at `least` tokens and whenever their number has doubled. Two
    runs may select differently, because the times are measured.
    """

    name = "auto"

    def _begin(self) -> None:
        self.used: ExactScorer | DciScorer = ExactScorer(self.shape, self.first, self.settings)
        self.trial: Trial | None = None
        self._queries: deque[tuple[Floats, int]] = deque(maxlen=QUERIES)
        self._next = self.settings.least

    @property
    def size_bytes(self) -> int:
        return self.used.size_bytes

    @property
    def page_bytes(self) -> float:
        tree = DciScorer(self.shape, self.first, self.settings)
        return max(tree.page_bytes, ExactScorer(self.shape, self.first, self.settings).page_bytes)

    @property
    def why(self) -> str:
        if self.trial is None:
            return f"exact: {len(self)} keys of {self.shape.head_dim} numbers; a tree is tried from {self._next} keys on"
        times = f"{1e6 * self.trial.exact_s:.0f} us exact, {1e6 * self.trial.dci_s:.0f} us dci"
        return f"{self.used.name}: {times} with recall {self.trial.recall:.2f}, measured at {self.trial.tokens} keys"

    def _add(self, keys: NDArray[Any]) -> None:
        self.used.add(keys)

    def _crop(self, end: int) -> None:
        self.used.crop(end)

    def _top(self, queries: Floats, k: int) -> Int64s:
        if isinstance(self.used, ExactScorer) and len(self) >= self._next:
            self._queries.append((queries.copy(), k))
            if len(self._queries) == QUERIES:
                self._try(self.used)
                self._queries.clear()
        return self.used.top(queries, k)

    def _try(self, exact: ExactScorer) -> None:
        tree = DciScorer(self.shape, self.first, self.settings)
        tree.add(exact.keys())
        knobs = self.settings.dci
        for wider in WIDER:
            view, visit, each = knobs.field_of_view * wider, min(1.0, knobs.visit * wider), knobs.visit_each * wider
            for index in tree.indexes:
                index.settings = replace(index.settings, field_of_view=view, visit=visit, visit_each=each)
            self.trial = trial = self._measured(exact, tree)
            if trial.enough or trial.dci_s > trial.exact_s:
                break
        self._next = 2 * len(self)
        if trial.chosen == "dci":
            self.used = tree

    def _measured(self, exact: ExactScorer, tree: DciScorer) -> Trial:
        times: dict[str, list[float]] = {"exact": [], "dci": []}
        recalls = []
        for queries, k in [self._queries[0], *self._queries]:  # the first one twice, as a warm-up
            found = []
            for scorer in (exact, tree):
                begin = time.perf_counter()
                found.append(scorer.top(queries, k) if scorer is exact else tree.best(queries, k))
                times[scorer.name].append(time.perf_counter() - begin)
            recalls.append(recall_of(found[1], found[0]))
        recall = float(np.mean(recalls[1:]))
        # One standard error of tolerance, because there are few queries.
        enough = recall + float(np.std(recalls[1:])) / len(self._queries) ** 0.5 >= self.settings.recall
        exact_s, dci_s = (float(np.median(times[name][1:])) for name in ("exact", "dci"))
        return Trial(len(self), exact_s, dci_s, recall, enough)


SCORERS: dict[str, type[Scorer]] = {
    scorer.name: scorer for scorer in (ExactScorer, RoundedScorer, PackedScorer, DciScorer, QuestScorer, AutoScorer)
}


Index = TypeVar("Index", bound=PageIndex)


class PageIndexes(Generic[Index]):
    """The indexes of a store's middle, by layer and sequence; `make` returns an empty index from a token number on.

    Forked sequences share an index until one of them adds a page of its own.
    """

    def __init__(self, store: KvStore, make: Callable[[int], Index]) -> None:
        self.store, self._make = store, make
        self.found: list[list[Index | None]] = [[None] * store.batch for _ in range(store.shape.layers)]

    @property
    def size_bytes(self) -> int:
        found = {id(own): own.size_bytes for layer in self.found for own in layer if own is not None}
        return sum(found.values())

    def bytes_at(self, tokens: int) -> int:
        pages = self.store.shape.pages_of(tokens)
        return int(GROWTH * pages * self._page_bytes)

    @functools.cached_property
    def _page_bytes(self) -> float:
        return self._make(0).page_bytes

    def feed(self, layer: int, starts: Int64s) -> None:
        """Add the pages of a layer that have left the window; `starts` [batch]: the first token of each sequence."""
        size, config = self.store.shape.page_tokens, self.store.config
        stop = (self.store.layer_length(layer) // size - config.window_pages) * size
        for sequence, start in enumerate(starts):
            own = self.found[layer][sequence]
            known = int(start) if own is None else own.end
            if known < stop:
                self._feed_old(self._own(layer, sequence, known), layer, sequence, stop)
        if self.store.layer_length(layer) > self.store.length:
            self._feed_new(layer, stop)

    def _feed_old(self, own: Index, layer: int, sequence: int, stop: int) -> None:
        size = self.store.shape.page_tokens
        end = min(stop, self.store.length // size * size) // size
        for page in range(own.end // size, end, FEED_PAGES):
            pages = np.arange(page, min(end, page + FEED_PAGES))
            own.add(_joined(self.store.read_side(layer, sequence, pages, own.side)))

    def _feed_new(self, layer: int, stop: int) -> None:
        waiting = [own for own in self.found[layer] if own is not None and own.end < stop]
        if not waiting:
            return
        with_tail = self.store.gather(layer, Selection.none(self.store.batch, self.store.shape.kv_heads))
        for sequence, own in enumerate(self.found[layer]):
            if own is not None and own.end < stop:
                at = int(np.searchsorted(with_tail.positions[sequence, 0], own.end))
                side = with_tail.keys if own.side == KEYS else with_tail.values
                own.add(side[sequence, :, at : at + stop - own.end])
        with_tail.release()

    def _own(self, layer: int, sequence: int, start: int) -> Index:
        row = self.found[layer]
        found = row[sequence]
        if found is None:
            found = self._make(start)
        elif sum(other is found for other in row) > 1:
            found = copy.deepcopy(found)
        row[sequence] = found
        return found

    def forget(self, sequence: int) -> None:
        for row in self.found:
            row[sequence] = None

    def crop(self, tokens: int) -> None:
        """Remove the tokens from number `tokens` on, and those that are in the window now."""
        size = self.store.shape.page_tokens
        stop = (tokens // size - self.store.config.window_pages) * size
        for row in self.found:
            for own in {id(own): own for own in row if own is not None}.values():
                own.crop(stop)

    def reorder(self, index: Int64s) -> None:
        self.found = [[row[old] for old in index] for row in self.found]


def as_pages(rows: NDArray[Any], page_tokens: int) -> NDArray[Any]:
    """Return [kv_heads, tokens, ...] as [pages, kv_heads, page_tokens, ...]."""
    pages: NDArray[Any] = rows.reshape(len(rows), -1, page_tokens, *rows.shape[2:]).swapaxes(0, 1)
    return pages


def _joined(pages: NDArray[Any]) -> NDArray[Any]:
    rows = np.ascontiguousarray(pages.swapaxes(0, 1))
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])


def rounded(keys: NDArray[Any], threads: int | None = None) -> tuple[NDArray[np.int8], Floats]:
    """Return finite keys [heads, tokens, dim] (float32, float16, bits of bfloat16) as int8, and scales above 0."""
    numbers, scales = np.empty(keys.shape, np.int8), np.empty(keys.shape[:2], np.float32)
    least = np.finfo(np.float32).tiny * STEPS

    def round_some(head: int, some: slice) -> None:
        wide = widened(keys[head, some])
        scales[head, some] = np.maximum(np.abs(wide).max(axis=-1), least) / np.float32(STEPS)
        numbers[head, some] = np.rint(wide / scales[head, some, None])

    size = max(1, ROUNDED // keys.shape[2])
    starts = range(0, keys.shape[1], size)
    run_all([partial(round_some, head, slice(at, at + size)) for head in range(len(keys)) for at in starts], threads)
    return numbers, scales


@functools.cache
def rotation(dim: int) -> Floats:
    """Return a random rotation [dim, dim], always the same."""
    return np.linalg.qr(np.random.default_rng(0).standard_normal((dim, dim)))[0].astype(np.float32)


def packed(rows: Floats) -> tuple[Bytes, NDArray[np.uint16]]:
    """Return levels [..., dim // 4] and scales [...] of rows [..., dim], as `packed_products` takes them.

    The best distance of four levels is 0.9957 standard deviations for normally distributed numbers (Max, 1960).
    """
    spread = np.sqrt(np.square(rows).mean(axis=-1, keepdims=True)) + np.finfo(np.float32).tiny
    levels = np.clip(np.floor(rows / (np.float32(0.9957) * spread) + 2), 0, 3)
    middle = levels - np.float32(1.5)
    scales = (rows * middle).sum(axis=-1) / np.square(middle).sum(axis=-1)
    parts = levels.astype(np.uint8).reshape(*rows.shape[:-1], 4, -1)
    joined: Bytes = parts[..., 0, :] | parts[..., 1, :] << 2 | parts[..., 2, :] << 4 | parts[..., 3, :] << 6
    return joined, scales.astype(np.float16).view(np.uint16)


def recall_of(found: Int64s, wanted: Int64s) -> float:
    """Return the share of `wanted` [kv_heads, k] that is in `found` [kv_heads, n]."""
    hits = sum(len(np.intersect1d(*pair)) for pair in zip(found, wanted, strict=True))
    return hits / max(1, wanted.size)


def _ranked(found: list[Nearest]) -> tuple[NDArray[np.int32], Int64s]:
    short = np.concatenate([nearest.scores - nearest.scores[0] for nearest in found])
    order = np.argsort(-short, kind="stable")
    slots = np.concatenate([nearest.slots for nearest in found])[order]
    tokens = np.concatenate([nearest.tokens for nearest in found])[order]
    if len(found) > 1:
        first = np.sort(np.unique(slots, return_index=True)[1])
        slots, tokens = slots[first], tokens[first]
    return slots, tokens


def _best_pages(index: DciIndex, found: list[Nearest], k: int) -> Int64s:
    size = index.settings.page_slots
    slots, tokens = _ranked(found)
    of_slot = slots // size
    pages, first = np.unique(of_slot, return_index=True)
    pages = pages[np.argsort(first)]
    counts = np.cumsum(index.tree.pages[pages, COUNT])
    whole = int(np.searchsorted(counts, k, side="right"))
    inside = np.arange(size) < index.tree.pages[pages[:whole], COUNT][:, None]
    chosen: Int64s = index.tree.tokens.reshape(-1, size)[pages[:whole]][inside].astype(np.int64)
    rest = k - len(chosen)
    if not rest:
        return chosen
    last = pages[whole]
    own = index.tree.tokens[last * size : last * size + index.tree.pages[last, COUNT]]
    wanted = np.concatenate([tokens[of_slot == last], own])
    partly: Int64s = wanted[np.sort(np.unique(wanted, return_index=True)[1])][:rest]
    return np.concatenate([chosen, partly])
