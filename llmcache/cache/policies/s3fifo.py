"""S3-FIFO: a small queue filters out blocks that are used once; a main queue gives second chances."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import Ids, Policy, lean_kernel, subroutine
from llmcache.cache.policies.lists import Links, new_links, pop_back, push_front, remove

SMALL, MAIN, GHOST, ABSENT = range(4)
"""Where a block is: in one of the two queues of cached blocks, remembered after it left the small one, or unknown."""
SMALL_PERCENT = 10
"""The small queue's share of the capacity. Source: the paper, section 4.1."""
GHOST_PERCENT = 90
"""Remembered blocks, of the capacity: as many as the main queue holds. Source: the paper, section 4.1."""
PROMOTED_AT = 2
"""Hits in the small queue after which a block moves to the main one. Source: the paper, algorithm 1 (`freq > 1`)."""
MOST_HITS = 3
"""Hits are counted in two bits. Source: the paper, section 4.1."""


class S3FIFO(Policy):
    """S3-FIFO with a 10 % small queue, two-bit counters and a ghost queue of 90 % of the capacity; 10 bytes per id.

        get(b): if b in small or main: freq[b] = min(freq[b] + 1, 3); hit
                remembered = b in ghost; forget b there
                while cache is full: if main holds more than 90 % or small is empty: evict_main()
                                     else:                                           evict_small()
                if remembered: b to the front of main, else b to the front of small; freq[b] = 0; miss
        evict_small(): from the back of small: freq >= 2: to the front of main with freq = 0, go on
                                               else: evict; to the front of ghost (the oldest there is forgotten); end
        evict_main():  from the back of main:  freq >= 1: to the front of main with freq - 1, go on
                                               else: evict; end

    The small queue holds at least one block, so that capacities below ten blocks work.

    Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, FIFO queues are all you need for cache eviction, SOSP 2023,
    algorithm 1.
    Differs from the paper: until the first eviction, a block that finds the small queue full goes to the main one, as in
    the authors' own simulator since 2024; blocks that came in first else live shorter than those that came in later.
    """

    name = "s3fifo"
    title = "S3-FIFO"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._links = new_links(blocks, 3)
        self._where = np.full(blocks, ABSENT, np.uint8)
        self._freq = np.zeros(blocks, np.uint8)
        self._sizes = np.zeros(3, np.int64)
        self._limits = np.zeros(3, np.int64)
        self._limits[SMALL] = max(1, capacity * SMALL_PERCENT // 100)
        self._limits[MAIN] = capacity - self._limits[SMALL]
        self._limits[GHOST] = capacity * GHOST_PERCENT // 100

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`."""
        hits = np.zeros(len(first), np.int64)
        state = (self._links, self._where, self._freq, self._sizes, self._limits)
        self.evictions += _replay(*state, self.evictions > 0, first, count, hits)
        return hits

    def resident(self) -> Ids:
        """See `Policy.resident`."""
        return np.flatnonzero(self._where <= MAIN).astype(np.int64, copy=False)


@lean_kernel
def _replay(
    links: Links,
    where: NDArray[np.uint8],
    freq: NDArray[np.uint8],
    sizes: Ids,
    limits: Ids,
    warm: bool,
    first: Ids,
    count: Ids,
    hits: Ids,
) -> int:
    evicted = 0
    capacity = limits[SMALL] + limits[MAIN]
    for run in range(len(first)):
        found = 0
        for block in range(first[run], first[run] + count[run]):
            place = int(where[block])
            if place <= MAIN:
                freq[block] = min(freq[block] + 1, MOST_HITS)
                found += 1
                continue
            target = SMALL
            if place == GHOST:
                remove(links, block)
                sizes[GHOST] -= 1
                target = MAIN
            # Nothing reads where[block] before it is set below: the block is in no list now.
            while sizes[SMALL] + sizes[MAIN] == capacity:
                evicted += _evict(links, where, freq, sizes, limits)
                warm = True
            if not warm and sizes[SMALL] >= limits[SMALL]:
                target = MAIN
            freq[block] = 0
            _push(links, where, sizes, target, block)
        hits[run] = found
    return evicted


@subroutine
def _evict(links: Links, where: NDArray[np.uint8], freq: NDArray[np.uint8], sizes: Ids, limits: Ids) -> int:
    """Goes through one queue until a block is evicted; returns 0 when the small queue ran empty without."""
    if sizes[MAIN] > limits[MAIN] or sizes[SMALL] == 0:
        return _evict_main(links, where, freq, sizes)
    return _evict_small(links, where, freq, sizes, limits)


@subroutine
def _evict_small(links: Links, where: NDArray[np.uint8], freq: NDArray[np.uint8], sizes: Ids, limits: Ids) -> int:
    while sizes[SMALL] > 0:
        block = _pop(links, where, sizes, SMALL)
        if freq[block] < PROMOTED_AT:
            if limits[GHOST] > 0:
                if sizes[GHOST] == limits[GHOST]:
                    where[_pop(links, where, sizes, GHOST)] = ABSENT
                _push(links, where, sizes, GHOST, block)
            else:
                where[block] = ABSENT
            return 1
        freq[block] = 0
        _push(links, where, sizes, MAIN, block)
    return 0


@subroutine
def _evict_main(links: Links, where: NDArray[np.uint8], freq: NDArray[np.uint8], sizes: Ids) -> int:
    while True:
        block = _pop(links, where, sizes, MAIN)
        if freq[block] == 0:
            where[block] = ABSENT
            return 1
        freq[block] -= 1
        _push(links, where, sizes, MAIN, block)


@subroutine
def _push(links: Links, where: NDArray[np.uint8], sizes: Ids, place: int, block: int) -> None:
    push_front(links, len(where) + place, block)
    where[block] = place
    sizes[place] += 1


@subroutine
def _pop(links: Links, where: NDArray[np.uint8], sizes: Ids, place: int) -> int:
    """Takes the oldest block out of a queue and returns it; the caller says where it is from then on."""
    sizes[place] -= 1
    return pop_back(links, len(where) + place)
