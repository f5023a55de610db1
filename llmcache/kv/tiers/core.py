"""What all parts of a store share: the page table, the pools, the counters, and how far each layer is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.spill import KvShape
from llmcache.kv.tiers.config import StoreConfig, Victims
from llmcache.kv.tiers.pool import Pool
from llmcache.kv.tiers.table import PageTable
from llmcache.kv.tiers.traffic import Traffic

Numbers = NDArray[np.int64]


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


class Core:
    """State of a store. `lengths` [layers]: tokens each layer has; `tokens.length`: those whose step is over."""

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
