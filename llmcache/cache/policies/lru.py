"""LRU: the block that was used least recently goes."""

from __future__ import annotations

import numpy as np

from llmcache.cache.policies.base import Ids, Policy, lean_kernel, subroutine
from llmcache.cache.policies.lists import (
    NEXT,
    NONE,
    PREV,
    Links,
    is_linked,
    linked,
    move_to_front,
    new_links,
)


class LRU(Policy):
    """Least recently used, one list; 8 bytes per block.

        get(b): if b in list: move b to the front; hit
                if list is full: drop the back
                put b at the front; miss

    Source: R. L. Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970: the
    stack policy whose hits at all sizes follow from one pass (`llmcache.cache.curves`).
    """

    name = "lru"
    title = "LRU"
    stack = True

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._links = new_links(blocks, 1)
        self._used = 0

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`."""
        hits = np.zeros(len(first), np.int64)
        self._used, evicted = _replay(self._links, self.blocks, self.capacity, self._used, first, count, hits)
        self.evictions += evicted
        return hits

    def resident(self) -> Ids:
        """See `Policy.resident`."""
        return linked(self._links, self.blocks)


@lean_kernel
def _replay(links: Links, head: int, capacity: int, used: int, first: Ids, count: Ids, hits: Ids) -> tuple[int, int]:
    before = used
    missed = 0
    for run in range(len(first)):
        block, end = first[run], first[run] + count[run]
        missed_before = missed
        while block < end:
            if is_linked(links, block):
                move_to_front(links, head, block)
                block += 1
            else:
                stop = _bring_in(links, head, capacity, used, block, end)
                used = min(capacity, used + stop - block)
                missed += stop - block
                block = stop
        hits[run] = count[run] - (missed - missed_before)
    return used, missed - (used - before)


@subroutine
def _bring_in(links: Links, head: int, capacity: int, used: int, block: int, end: int) -> int:
    """Brings in `block` and what follows until `end` or a hit, which it returns; both ends of the list stay in registers.

    On a long miss this is twice as fast as one insertion after the other, each of which waits for the last one's links.
    """
    newest = links[head, NEXT]
    oldest = links[head, PREV]
    while block < end and links[block, NEXT] == NONE:
        if used == capacity:
            victim = oldest
            oldest = links[victim, PREV]
            links[victim, NEXT] = NONE
            if oldest == head:
                newest = oldest
        else:
            used += 1
        if newest == head:
            oldest = block
        links[block, PREV] = head
        links[block, NEXT] = newest
        links[newest, PREV] = block
        newest = block
        block += 1
    links[head, NEXT] = newest
    links[head, PREV] = oldest
    links[oldest, NEXT] = head
    return block
