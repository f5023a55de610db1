"""Pages that move between the cpu pool and the ssd tier: on request, and when the window moves on and the pool is full.

Source: hillinfer.txt, section 3.3 (bidirectional KV cache pools). Differs from the paper: the ssd tier is inclusive, so a
page that goes down is not written again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.spill import KvPages
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.pool import NOT_HERE, Pool
from llmcache.kv.tiers.spilling import Spiller
from llmcache.kv.tiers.traffic import PING_PONG_STEPS

Numbers = NDArray[np.int64]


class Mover:
    """Moves pages of one store."""

    def __init__(self, core: Core, spiller: Spiller) -> None:
        self._core, self._spiller = core, spiller

    def up(self, layer: int, sequence: int, pages: Numbers) -> None:
        """Reads pages of the middle into the pool; ValueError if it has no room for them."""
        core = self._core
        pool = core.checked(layer, sequence)
        pages, numbers = core.checked_pages(sequence, pages, core.middle)
        with pool.lock:
            numbers = np.unique(numbers[pool.slot_of[numbers] == NOT_HERE])
            self._check_room(pool, sequence, len(numbers))
        for found, arrays in self.read(layer, numbers, "move"):
            with pool.lock:
                fresh = pool.slot_of[found] == NOT_HERE
                self._check_room(pool, sequence, int(fresh.sum()))
                pool.put(found[fresh], [array[fresh] for array in arrays])
                again = core.step - pool.down_at[found[fresh]] <= PING_PONG_STEPS
            core.traffic.add_moves(up=int(fresh.sum()), ping_pong=int(again.sum()))

    def _check_room(self, pool: Pool, sequence: int, more: int) -> None:
        bound = self._core.config.cpu_pages
        full = self._core.tokens.length // self._core.shape.page_tokens
        there = int((pool.slot_of[self._core.table.table[sequence, :full]] != NOT_HERE).sum())
        if bound is not None and there + more > bound:
            raise ValueError(f"pages: {more} more, the pool has {there} of {bound} pages of sequence {sequence}")

    def read(self, layer: int, numbers: Numbers, why: str) -> Iterator[tuple[Numbers, list[NDArray[np.generic]]]]:
        """Yields pages from the ssd tier with their numbers, stream by stream; arrays are valid until the next."""
        for stream, found in self.by_stream(numbers):
            with self._spiller.ssd.read(stream, layer, self._core.table.place[found].astype(np.int64), why) as pages:
                yield found, arrays_of(pages)

    def by_stream(self, numbers: Numbers) -> Iterator[tuple[int, Numbers]]:
        """Yields the pages `numbers` by the stream that they lie in, in the order of their places there."""
        table = self._core.table
        order = numbers[np.lexsort((table.place[numbers], table.stream[numbers]))]
        streams = table.stream[order]
        for stream in np.unique(streams).tolist():
            yield stream, order[streams == stream]

    def down(self, layer: int, sequence: int, pages: Numbers) -> None:
        """Drops pages of the middle from the pool; those that are not in it stay where they are."""
        core = self._core
        pool = core.checked(layer, sequence)
        pages, numbers = core.checked_pages(sequence, pages, core.middle)
        spilled = self._spiller.is_spilled(layer, numbers)
        with pool.lock:
            here = numbers[pool.slot_of[numbers] != NOT_HERE]
            if not spilled[pool.slot_of[numbers] != NOT_HERE].all():
                raise ValueError(f"pages: not all of {pages.tolist()} could be written to the ssd tier so far: spill first")
            self._drop(pool, np.unique(here))

    def _drop(self, pool: Pool, numbers: Numbers, placing: bool = False) -> None:
        pool.drop(numbers)
        if placing:
            return
        pool.down_at[numbers] = self._core.step
        self._core.traffic.add_moves(down=len(numbers))

    def trim(self, layer: int, tokens: int, more: int = 0, placing: bool = False) -> None:
        """Drops pages between sink and window, counted for `tokens` tokens, until each sequence has room for `more`.

        `placing`: they are those of a prompt, which finds its first places piece by piece; nothing has moved down then.
        """
        core, bound = self._core, self._core.config.cpu_pages
        if bound is None:
            return
        full = tokens // core.shape.page_tokens
        pool = core.checked(layer)
        for b in range(core.table.batch):
            numbers = core.table.table[b, :full]
            middle = range(core.config.sink_pages, full - core.config.window_pages)
            spilled = self._spiller.is_spilled(layer, numbers)
            with pool.lock:
                here = pool.slot_of[numbers] != NOT_HERE
                excess = int(here.sum()) + more - bound
                pages = np.flatnonzero(here & spilled)
                pages = pages[(pages >= middle.start) & (pages < middle.stop)]
                if excess > 0 and len(pages):
                    chosen = self._victims(pool, layer, b, pages, min(excess, len(pages)))
                    self._drop(pool, numbers[chosen], placing)

    def _victims(self, pool: Pool, layer: int, sequence: int, pages: Numbers, count: int) -> Numbers:
        if self._core.victims is not None:
            chosen = np.unique(self._core.victims(layer, sequence, pages, count))
            if len(chosen) != count or not np.isin(chosen, pages).all():
                raise ValueError(f"victims: {chosen.tolist()} were named, {count} of {pages.tolist()} are needed")
            return chosen
        since = pool.since[self._core.table.table[sequence, pages]]
        oldest: Numbers = pages[np.argsort(since, kind="stable")[:count]]
        return oldest

    def bring(self, layer: int, numbers: Numbers) -> None:
        """Has pages in the pool, whatever its bound is."""
        pool = self._core.checked(layer)
        with pool.lock:
            missing = np.unique(numbers[pool.slot_of[numbers] == NOT_HERE])
        for found, arrays in self.read(layer, missing, "restore"):
            with pool.lock:
                pool.put(found, arrays)


def arrays_of(pages: KvPages) -> list[NDArray[np.generic]]:
    """Returns keys, values and for int8 their scales, [pages, kv_heads, page_tokens, ..]."""
    found = (pages.keys, pages.values, pages.key_scales, pages.value_scales)
    return [array for array in found if array is not None]
