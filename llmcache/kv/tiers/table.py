"""Pages and tokens of sequences: which physical page each page of each sequence is, and where it lies in the spill file.

All sequences of a batch have equally many pages, and two of them share a page only at the same place of both: copy on
write, by counting. A page is known by its number, which all layers share; numbers are used again once no sequence refers
to them. A stream is a sequence of the spill file: pages are only ever added to its end, so a sequence goes on in the
stream that its last whole page ends, if nobody else has, and in a stream of its own otherwise. So whatever a sequence has
of a stream is a beginning of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from llmcache.kv.spill import KvShape
from llmcache.kv.tiers.config import Numbers, StoreConfig, Traffic, Victims
from llmcache.kv.tiers.pool import Pool

NOWHERE = -1


class PageTable:
    """Pages of `batch` sequences. `stream`, `place` [numbers]: where a page lies in the file, NOWHERE before it is full."""

    def __init__(self, batch: int) -> None:
        self.pages = 0
        self._table = np.empty((batch, 16), np.int64)
        self._used = np.empty(0, np.int32)
        self._free: list[int] = []
        self.stream = np.empty(0, np.int32)
        self.place = np.empty(0, np.int32)
        self.ends: dict[int, int] = {}

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self._table)

    @property
    def numbers(self) -> int:
        """Page numbers are below it."""
        return len(self._used)

    @property
    def table(self) -> Numbers:
        """Numbers of the pages of all sequences, [batch, pages]."""
        return self._table[:, : self.pages]

    def extend(self, pages: int) -> None:
        """Gives every sequence fresh pages until it has `pages`."""
        if pages > self._table.shape[1]:
            wider = np.empty((self.batch, max(pages, 2 * self._table.shape[1])), np.int64)
            wider[:, : self.pages] = self.table
            self._table = wider
        for page in range(self.pages, pages):
            self._table[:, page] = self._fresh(self.batch)
        self.pages = max(self.pages, pages)

    def _fresh(self, count: int) -> list[int]:
        if len(self._free) < count:
            more = max(64, count, self.numbers)
            # Popped from the end: the lowest first, so that neighbours get neighbouring slots.
            self._free = [*range(self.numbers + more - 1, self.numbers - 1, -1), *self._free]
            self._used = np.concatenate([self._used, np.zeros(more, np.int32)])
            nowhere = np.full(more, NOWHERE, np.int32)
            self.stream, self.place = (np.concatenate([old, nowhere]) for old in (self.stream, self.place))
        found = [self._free.pop() for _ in range(count)]
        self._used[found] = 1
        self.stream[found] = self.place[found] = NOWHERE
        return found

    def settle(self, first: int, end: int) -> None:
        """Gives the pages `first` .. `end` - 1 of every sequence, which are full now, their places in the file."""
        for page in range(first, end):
            for row in self._table:
                number = row[page]
                if self.stream[number] == NOWHERE:
                    self._settle_one(number, int(row[page - 1]) if page else None)

    def _settle_one(self, number: int, before: int | None) -> None:
        stream = NOWHERE if before is None else int(self.stream[before])
        if before is None or self.ends.get(stream) != self.place[before] + 1:
            stream = next(free for free in range(len(self.ends) + 1) if free not in self.ends)
            self.ends[stream] = 0
        self.stream[number], self.place[number] = stream, self.ends[stream]
        self.ends[stream] += 1

    def unsettle(self, page: int) -> None:
        """Takes the places of the last page of every sequence back, as if it were not full."""
        self.stream[self._table[:, page]] = self.place[self._table[:, page]] = NOWHERE
        self._shorten()

    def cut(self, pages: int) -> Numbers:
        """Takes all pages from `pages` on from every sequence; returns the numbers that nobody uses any more."""
        self.pages = min(self.pages, pages)
        return self._recount()

    def choose(self, index: Numbers, partial: bool) -> tuple[Numbers, list[tuple[int, int]]]:
        """Makes sequence i what sequence `index[i]` was. Returns the numbers nobody uses any more, and pages to copy.

        `partial`: the last page is not full, so each sequence needs its own: (from, to) must be copied in every layer.
        """
        chosen = np.empty((len(index), self._table.shape[1]), np.int64)
        chosen[:, : self.pages] = self.table[index]
        self._table = chosen
        copies: list[tuple[int, int]] = []
        if partial:
            seen: set[int] = set()
            for row in chosen:
                number = int(row[self.pages - 1])
                if number in seen:
                    row[self.pages - 1] = self._fresh(1)[0]
                    copies.append((number, int(row[self.pages - 1])))
                seen.add(number)
        return self._recount(), copies

    def _recount(self) -> Numbers:
        used = np.bincount(self.table.reshape(-1), minlength=self.numbers).astype(np.int32)
        gone = np.flatnonzero((used == 0) & (self._used > 0))
        self._used = used
        self._free += gone[::-1].tolist()
        self._shorten()
        return gone

    def _shorten(self) -> None:
        """Lets each stream end behind the last of its pages that is in use; one without any is free."""
        alive = np.flatnonzero((self._used > 0) & (self.stream != NOWHERE))
        ends: dict[int, int] = {}
        for stream in np.unique(self.stream[alive]).tolist():
            ends[stream] = int(self.place[alive[self.stream[alive] == stream]].max()) + 1
        self.ends = ends

    def runs(self, sequence: int, pages: int) -> list[tuple[int, int]]:
        """Returns where the first `pages` pages of a sequence lie, as (stream, pages from its beginning on)."""
        streams = self.stream[self._table[sequence, :pages]]
        bounds = [0, *(np.flatnonzero(np.diff(streams)) + 1).tolist(), pages] if pages else []
        return [(int(streams[a]), b - a) for a, b in itertools.pairwise(bounds)]

    def by_stream(self, numbers: Numbers) -> Iterator[tuple[int, Numbers]]:
        """Yields the pages `numbers` by the stream that they lie in, in the order of their places there."""
        order = numbers[np.lexsort((self.place[numbers], self.stream[numbers]))]
        streams = self.stream[order]
        for stream in np.unique(streams).tolist():
            yield stream, order[streams == stream]

    def places(self, numbers: Numbers) -> Numbers:
        """Returns the places of pages in their streams."""
        return self.place[numbers].astype(np.int64)

    def adopt(self, sequences: list[list[tuple[int, int]]]) -> None:
        """Makes the table of sequences as `runs` has told them, all equally long."""
        shared: dict[tuple[int, int], int] = {}
        for b, runs in enumerate(sequences):
            places = [(stream, place) for stream, pages in runs for place in range(pages)]
            self.extend(len(places))
            for page, (stream, place) in enumerate(places):
                fresh = int(self._table[b, page])
                number = shared.setdefault((stream, place), fresh)
                self._table[b, page] = number
                self.stream[number], self.place[number] = stream, place
        self._recount()


class Tokens:
    """Ids and positions of all tokens of all sequences, [batch, tokens]; room doubles."""

    def __init__(self, batch: int) -> None:
        self.length = 0
        self._sides = np.empty((2, batch, 64), np.int64)

    @property
    def ids(self) -> Numbers:
        """Ids as they were given."""
        found: Numbers = self._sides[0, :, : self.length]
        return found

    @property
    def positions(self) -> Numbers:
        """Positions as they were given."""
        found: Numbers = self._sides[1, :, : self.length]
        return found

    def add(self, ids: Numbers, positions: Numbers) -> None:
        """Takes tokens [batch, n] at the end."""
        end = self.length + ids.shape[1]
        if end > self._sides.shape[2]:
            wider = np.empty((*self._sides.shape[:2], max(end, 2 * self._sides.shape[2])), np.int64)
            wider[:, :, : self.length] = self._sides[:, :, : self.length]
            self._sides = wider
        self._sides[0, :, self.length : end], self._sides[1, :, self.length : end] = ids, positions
        self.length = end

    def choose(self, index: Numbers) -> None:
        """Makes sequence i what sequence `index[i]` was."""
        self._sides = self._sides[:, index]


class State:
    """What its parts share of a store. `lengths` [layers]: tokens each layer has; `tokens.length`: whose step is over."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.shape: KvShape = config.shape
        self.table = PageTable(config.batch)
        self.tokens = Tokens(config.batch)
        self.traffic = Traffic()
        self.lengths = np.zeros(config.shape.layers, np.int64)
        self.pools = [Pool(config.shape) for _ in range(config.shape.layers)]
        self.bound_pools()
        self.victims: Victims | None = None
        self.step = 0

    def bound_pools(self) -> None:
        """Tells the pools how far to double: the bound, the page that is being filled, and one that is not written yet."""
        bound = self.config.cpu_pages
        for pool in self.pools:
            pool.most = None if bound is None else self.table.batch * (bound + 2)

    @property
    def middle(self) -> range:
        """Pages between sink and window, of the tokens whose step is over."""
        pages = self.tokens.length // self.shape.page_tokens
        first = min(pages, self.config.sink_pages)
        return range(first, max(first, pages - self.config.window_pages))

    def check_between_steps(self) -> None:
        """ValueError if layers have tokens whose step is not over."""
        if (self.lengths != self.tokens.length).any():
            raise ValueError("commit: a step is under way, end it first")

    def checked(self, layer: int, sequence: int = 0) -> Pool:
        """Returns the pool of a layer; ValueError if there is no such layer or sequence."""
        if not 0 <= layer < self.shape.layers:
            raise ValueError(f"layer: {layer}, the model has {self.shape.layers}")
        if not 0 <= sequence < self.table.batch:
            raise ValueError(f"sequence: {sequence}, the batch has {self.table.batch}")
        self.pools[layer].know(self.table.numbers)
        return self.pools[layer]

    def checked_pages(self, sequence: int, pages: Numbers | list[int], within: range) -> tuple[Numbers, Numbers]:
        """Returns `pages` as an array, and their numbers; ValueError if one is not `within`."""
        found = np.asarray(pages, np.int64).reshape(-1)
        if len(found) and not (within.start <= found.min() and found.max() < within.stop):
            raise ValueError(f"pages: {found.min()} to {found.max()}, {within.start} to {within.stop - 1} can be named")
        return found, self.table.table[sequence, found]
