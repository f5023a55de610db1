"""2Q: a block must be asked for again after it has left a short FIFO, then it is kept by LRU."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmcache.cache.policies.base import Ids, Policy, lean_kernel, subroutine
from llmcache.cache.policies.lists import Links, move_to_front, new_links, pop_back, push_front, remove

IN_SHARE = 0.25
OUT_SHARE = 0.5

ABSENT, IN, OUT, MAIN = 0, 1, 2, 3


class TwoQ(Policy):
    """2Q, full version: A1in holds 25 % of the capacity, A1out remembers as many ids as 50 % of it has blocks.

        get(b): if b in Am: move b to the front of Am; hit
                if b in A1in: hit                             (second touch of one burst: no news)
                known = b in A1out; forget it there
                if full: if |A1in| > Kin: the back of A1in goes, its id to the front of A1out (the back of A1out
                                          is forgotten when |A1out| > Kout)
                         else: the back of Am goes, its id is not kept
                put b at the front of Am if known, else of A1in; miss

    Kin and Kout are rounded down. 9 bytes per block.
    Source: T. Johnson, D. Shasha, 2Q: a low overhead high performance buffer management replacement algorithm, VLDB
    1994, the full version and the shares it recommends.
    Differs from the paper: b leaves A1out before room is made for it, so that A1out never drops a second id for an id
    that goes anyway (the paper does not say when b leaves). libCacheSim does the same and gives the same hits.
    """

    name = "2q"
    title = "2Q"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._links = new_links(blocks, 4)
        self._where = np.zeros(blocks, np.uint8)
        self._sizes = np.zeros(4, np.int64)
        self._in_limit = int(capacity * IN_SHARE)
        self._out_limit = int(capacity * OUT_SHARE)

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`."""
        hits = np.zeros(len(first), np.int64)
        limits = (self.capacity, self._in_limit, self._out_limit)
        self.evictions += _replay(self._links, self._where, self._sizes, limits, first, count, hits)
        return hits

    def resident(self) -> Ids:
        """See `Policy.resident`."""
        return np.flatnonzero((self._where == IN) | (self._where == MAIN)).astype(np.int64, copy=False)


# The loop's state: links of all queues; where, the queue of each block (an index of sizes; the head is `blocks` + this);
# sizes, the lengths of the queues.


@lean_kernel
def _replay(
    links: Links,
    where: Any,
    sizes: Any,
    limits: tuple[int, int, int],
    first: Ids,
    count: Ids,
    hits: Ids,
) -> int:
    capacity, in_limit, out_limit = limits
    evicted = 0
    for run in range(len(first)):
        found = 0
        for block in range(first[run], first[run] + count[run]):
            place = where[block]
            if place == MAIN:
                move_to_front(links, len(where) + MAIN, block)
                found += 1
                continue
            if place == IN:
                found += 1
                continue
            if place == OUT:
                remove(links, block)
                sizes[OUT] -= 1
            if sizes[IN] + sizes[MAIN] == capacity:
                _make_room(links, where, sizes, in_limit, out_limit)
                evicted += 1
            _put(links, where, sizes, MAIN if place == OUT else IN, block)
        hits[run] = found
    return evicted


@subroutine
def _make_room(links: Links, where: Any, sizes: Any, in_limit: int, out_limit: int) -> None:
    if sizes[IN] <= in_limit:
        _take(links, where, sizes, MAIN)
        return
    _put(links, where, sizes, OUT, _take(links, where, sizes, IN))
    if sizes[OUT] > out_limit:
        _take(links, where, sizes, OUT)


@subroutine
def _put(links: Links, where: Any, sizes: Any, queue: int, block: int) -> None:
    push_front(links, len(where) + queue, block)
    where[block] = queue
    sizes[queue] += 1


@subroutine
def _take(links: Links, where: Any, sizes: Any, queue: int) -> int:
    block = pop_back(links, len(where) + queue)
    where[block] = ABSENT
    sizes[queue] -= 1
    return block
