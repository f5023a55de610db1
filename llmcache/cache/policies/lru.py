"""LRU: the block that was used least recently goes."""

from __future__ import annotations

import numpy as np

from llmcache.cache.policies.base import Ids, Policy, kernel
from llmcache.cache.policies.lists import (
    Links,
    insert_after,
    is_linked,
    linked,
    move_to_front,
    new_links,
    pop_back,
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


@kernel
def _replay(links: Links, head: int, capacity: int, used: int, first: Ids, count: Ids, hits: Ids) -> tuple[int, int]:
    evicted = 0
    for run in range(len(first)):
        found = 0
        for block in range(first[run], first[run] + count[run]):
            if is_linked(links, block):
                move_to_front(links, head, block)
                found += 1
                continue
            if used == capacity:
                pop_back(links, head)
                evicted += 1
            else:
                used += 1
            insert_after(links, head, block)
        hits[run] = found
    return used, evicted
