"""LFU: the block that was used least often since it came in goes."""

from __future__ import annotations

import numpy as np

from llmcache.cache.policies.base import Ids, Policy, lean_kernel, subroutine
from llmcache.cache.policies.lists import (
    Links,
    back,
    front,
    insert_after,
    is_empty,
    is_linked,
    linked,
    move_to_front,
    new_links,
    pop_back,
    push_front,
    remove,
)


class LFU(Policy):
    """Least frequently used, ties broken by recency (the least recent goes); a dropped block's count is forgotten.

        get(b): if b in cache: freq[b] += 1; hit
                if cache is full: drop, among the blocks of the lowest freq, the one referenced longest ago
                freq[b] = 1; miss

    Constant time per reference: blocks of one frequency are a list, and the lists that are not empty are chained by
    frequency. 12 bytes per id and 28 per block of capacity.

    Source: K. Shah, A. Mitra, D. Matani, An O(1) algorithm for implementing the LFU cache eviction scheme, 2010.
    """

    name = "lfu"
    title = "LFU"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        levels = min(capacity, blocks)  # no more frequencies than blocks
        self._links = new_links(blocks, levels)
        self._level = np.zeros(blocks, self._links.dtype)
        self._chain = new_links(levels, 1)
        self._freq = np.zeros(levels, np.int64)
        self._free = np.arange(levels, dtype=self._links.dtype)
        self._used = 0
        self._taken = 0

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`."""
        hits = np.zeros(len(first), np.int64)
        state = (self._links, self._level, self._chain, self._freq, self._free, self.capacity)
        self._used, self._taken, evicted = _replay(*state, self._used, self._taken, first, count, hits)
        self.evictions += evicted
        return hits

    def resident(self) -> Ids:
        """See `Policy.resident`."""
        return linked(self._links, self.blocks)


@lean_kernel
def _replay(
    links: Links,
    level: Ids,
    chain: Links,
    freq: Ids,
    free: Ids,
    capacity: int,
    used: int,
    taken: int,
    first: Ids,
    count: Ids,
    hits: Ids,
) -> tuple[int, int, int]:
    evicted = 0
    for run in range(len(first)):
        found = 0
        for block in range(first[run], first[run] + count[run]):
            if is_linked(links, block):
                taken = _promote(links, level, chain, freq, free, taken, block)
                found += 1
                continue
            if used == capacity:
                taken = _evict(links, level, chain, free, taken)
                evicted += 1
            else:
                used += 1
            lowest = front(chain, len(freq))
            if lowest == len(freq) or freq[lowest] != 1:
                lowest = int(free[taken])
                taken += 1
                freq[lowest] = 1
                push_front(chain, len(freq), lowest)
            push_front(links, len(level) + lowest, block)
            level[block] = lowest
        hits[run] = found
    return used, taken, evicted


@subroutine
def _promote(links: Links, level: Ids, chain: Links, freq: Ids, free: Ids, taken: int, block: int) -> int:
    """Moves a block one frequency up; returns how many levels are in use now."""
    old = int(level[block])
    above = front(chain, old)
    alone = back(links, len(level) + old) == front(links, len(level) + old)
    if above == len(freq) or freq[above] != freq[old] + 1:
        if alone:
            freq[old] += 1
            return taken
        above = int(free[taken])
        taken += 1
        freq[above] = freq[old] + 1
        insert_after(chain, old, above)
    move_to_front(links, len(level) + above, block)
    level[block] = above
    return _give_back(chain, free, taken, old) if alone else taken


@subroutine
def _evict(links: Links, level: Ids, chain: Links, free: Ids, taken: int) -> int:
    """Drops a block; returns how many levels are in use now."""
    lowest = front(chain, len(free))
    pop_back(links, len(level) + lowest)
    return _give_back(chain, free, taken, lowest) if is_empty(links, len(level) + lowest) else taken


@subroutine
def _give_back(chain: Links, free: Ids, taken: int, level: int) -> int:
    remove(chain, level)
    free[taken - 1] = level
    return taken - 1
