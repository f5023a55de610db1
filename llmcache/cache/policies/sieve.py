"""SIEVE: a queue whose hand moves from the oldest block to the newest and takes the first that was not visited."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import Ids, Policy, lean_kernel, subroutine
from llmcache.cache.policies.lists import PREV, Links, is_linked, linked, new_links, push_front, remove


class Sieve(Policy):
    """SIEVE: CLOCK that leaves surviving blocks where they are, so that new blocks go first; 9 bytes per id.

        get(b): if b in queue: visited[b] = 1; hit
                if queue is full: start at the hand, or at the oldest block when there is none
                                  while visited[block at hand]: clear it, move to the next newer (past the newest: oldest)
                                  drop the block at the hand; the hand stays on its newer neighbour
                put b at the newest end with visited[b] = 0; miss

    There are no parameters.

    Source: Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, SIEVE is simpler than LRU, NSDI 2024, algorithm 1.
    """

    name = "sieve"
    title = "SIEVE"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._links = new_links(blocks, 1)
        self._visited = np.zeros(blocks, np.uint8)
        self._used = 0
        self._hand = blocks  # the head of the ring: no hand yet

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`."""
        hits = np.zeros(len(first), np.int64)
        state = (self._links, self._visited, self.blocks, self.capacity)
        self._used, self._hand, evicted = _replay(*state, self._used, self._hand, first, count, hits)
        self.evictions += evicted
        return hits

    def resident(self) -> Ids:
        """See `Policy.resident`."""
        return linked(self._links, self.blocks)


@lean_kernel
def _replay(
    links: Links,
    visited: NDArray[np.uint8],
    head: int,
    capacity: int,
    used: int,
    hand: int,
    first: Ids,
    count: Ids,
    hits: Ids,
) -> tuple[int, int, int]:
    evicted = 0
    for run in range(len(first)):
        found = 0
        for block in range(first[run], first[run] + count[run]):
            if is_linked(links, block):
                visited[block] = 1
                found += 1
                continue
            if used == capacity:
                victim = _victim(links, visited, head, hand)
                hand = int(links[victim, PREV])
                remove(links, victim)
                evicted += 1
            else:
                used += 1
            push_front(links, head, block)
        hits[run] = found
    return used, hand, evicted


@subroutine
def _victim(links: Links, visited: NDArray[np.uint8], head: int, hand: int) -> int:
    """Returns the first block from the hand on that was not visited; visited ones on the way lose their mark."""
    while hand == head or visited[hand]:
        if hand != head:
            visited[hand] = 0
        hand = int(links[hand, PREV])
    return hand
