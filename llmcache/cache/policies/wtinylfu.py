"""W-TinyLFU: a new block enters the main cache only if it is referenced more often than the block it would replace."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmcache.cache.policies.base import Ids, Policy, lean_kernel, subroutine
from llmcache.cache.policies.lists import (
    Links,
    back,
    move_to_front,
    new_links,
    pop_back,
    push_front,
    remove,
)
from llmcache.cache.policies.sketch import Counters, Door, Sample, estimate, new_sketch, note

WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8

ABSENT, WINDOW, PROBATION, PROTECTED = 0, 1, 2, 3


class WTinyLFU(Policy):
    """Window TinyLFU: an LRU window of 1 % (at least one block) before an SLRU of 20 % probation and 80 % protected.

        get(b): note b in the sketch
                if b in window or protected: move b to the front of it; hit
                if b in probation: move b to the front of protected; if that is one block too many, its back goes to
                    the front of probation; hit
                put b at the front of the window; if that is one block too many:
                    candidate, victim = the backs of window and probation
                    if the cache was full: if the sketch knows more references of the candidate: the victim goes
                                           else: the candidate goes
                    the candidate, if it stays, moves to the front of probation
                miss

    9 bytes per block; the sketch has 26 to 52 bytes per place (module `sketch`).
    Source: G. Einziger, R. Friedman, B. Manes, TinyLFU: a highly efficient cache admission policy, ACM Transactions on
    Storage 13(4), 2017, section 4.
    Differs from Caffeine: the window stays at 1 % (no hill climbing), a tie always goes to the victim (Caffeine lets a
    few warm candidates in at random against hash flooding), and there is the paper's doorkeeper.
    Differs from libCacheSim: there every counter of a Bloom filter is incremented without limit, also when the window
    gives up a block but not when a block of the window is hit, no doorkeeper, ageing after 32 hits per place, and
    blocks enter protected directly while it has room.
    """

    name = "wtinylfu"
    title = "W-TinyLFU"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._links = new_links(blocks, 4)
        self._where = np.zeros(blocks, np.uint8)
        self._sizes = np.zeros(4, np.int64)
        self._sketch = new_sketch(capacity)
        self._window = max(1, int(capacity * WINDOW_SHARE))
        self._protected = int((capacity - self._window) * PROTECTED_SHARE)

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`."""
        hits = np.zeros(len(first), np.int64)
        limits = (self.capacity, self._window, self._protected)
        lists = (self._links, self._where, self._sizes)
        self.evictions += _replay(*lists, *self._sketch, limits, first, count, hits)
        return hits

    def resident(self) -> Ids:
        """See `Policy.resident`."""
        return np.flatnonzero(self._where).astype(np.int64, copy=False)


# The loop's state: links of all lists; where, the list of each block (an index of sizes; the head is `blocks` + this);
# sizes, the lengths of the lists; limits, the blocks of the whole cache, of the window and of protected.


@lean_kernel
def _replay(
    links: Links,
    where: Any,
    sizes: Any,
    counters: Counters,
    door: Door,
    sample: Sample,
    limits: tuple[int, int, int],
    first: Ids,
    count: Ids,
    hits: Ids,
) -> int:
    evicted = 0
    for run in range(len(first)):
        found = 0
        for block in range(first[run], first[run] + count[run]):
            note(counters, door, sample, block)
            place = where[block]
            if place == ABSENT:
                full = sizes[WINDOW] + sizes[PROBATION] + sizes[PROTECTED] == limits[0]
                _put(links, where, sizes, WINDOW, block)
                if sizes[WINDOW] > limits[1]:
                    _admit(links, where, sizes, counters, door, full)
                evicted += full
                continue
            found += 1
            if place == PROBATION:
                _promote(links, where, sizes, limits[2], block)
            else:
                move_to_front(links, len(where) + place, block)
        hits[run] = found
    return evicted


@subroutine
def _admit(links: Links, where: Any, sizes: Any, counters: Counters, door: Door, full: bool) -> None:
    """Moves the back of the window to probation; if the cache was full, it or the back of probation goes."""
    candidate = pop_back(links, len(where) + WINDOW)
    sizes[WINDOW] -= 1
    if full:
        victim = back(links, len(where) + PROBATION)
        if sizes[PROBATION] == 0 or estimate(counters, door, candidate) <= estimate(counters, door, victim):
            where[candidate] = ABSENT
            return
        remove(links, victim)
        where[victim] = ABSENT
        sizes[PROBATION] -= 1
    _put(links, where, sizes, PROBATION, candidate)


@subroutine
def _promote(links: Links, where: Any, sizes: Any, limit: int, block: int) -> None:
    remove(links, block)
    sizes[PROBATION] -= 1
    _put(links, where, sizes, PROTECTED, block)
    if sizes[PROTECTED] > limit:
        demoted = pop_back(links, len(where) + PROTECTED)
        sizes[PROTECTED] -= 1
        _put(links, where, sizes, PROBATION, demoted)


@subroutine
def _put(links: Links, where: Any, sizes: Any, queue: Any, block: int) -> None:
    push_front(links, len(where) + queue, block)
    where[block] = queue
    sizes[queue] += 1
