"""Policies by recency: LRU, and CLOCK and SIEVE, which approximate it with a bit instead of a move."""

from __future__ import annotations

import numpy as np

from llmcache.arrays import Bytes, Flags, Int64s
from llmcache.cache.policies.base import Policy, lean_kernel, subroutine
from llmcache.cache.policies.structures import (
    NEXT,
    NONE,
    PREV,
    Links,
    is_linked,
    move_to_front,
    new_links,
    push_front,
    remove,
)


class LRU(Policy):
    """Least recently used, one list; 8 bytes per block.

        get(b): if b in list: move b to the front; hit
                if list is full: evict the back
                insert b at the front; miss

    Source: R. L. Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970: the
    stack policy whose hits at all sizes follow from one pass (`llmcache.cache.curves`).
    """

    name = "lru"
    title = "LRU"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._links = new_links(blocks, 1)
        self._used = np.zeros(1, np.int64)

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        _lru(self._links, self._used, self.capacity, first, count, hits)

    def _resident(self) -> Flags:
        return self._links[:-1, NEXT] != NONE


@lean_kernel
def _lru(links: Links, numbers: Int64s, capacity: int, first: Int64s, count: Int64s, hits: Int64s) -> None:
    head, used = len(links) - 1, numbers[0]
    for run in range(len(first)):
        block, end = first[run], first[run] + count[run]
        missed = 0
        while block < end:
            if is_linked(links, block):
                move_to_front(links, head, block)
                block += 1
            else:
                stop = _insert_missed(links, head, capacity, used, block, end)
                used = min(capacity, used + stop - block)
                missed += stop - block
                block = stop
        hits[run] = count[run] - missed
    numbers[0] = used


@subroutine
def _insert_missed(links: Links, head: int, capacity: int, used: int, block: int, end: int) -> int:
    """Insert `block` and its successors until `end` or a hit, and return that position.

    Both ends of the list stay in registers, which is twice as fast on a long miss as separate insertions.
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


FREE = -1  # the slot of a block that is not in the cache
USED, HAND = 0, 1  # indices into the numbers: blocks in the cache, position of the hand


class Clock(Policy):
    """CLOCK with one bit per block, which is set by the first reference after the insertion.

        get(b): if b in cache: used[b] = 1; hit
                if cache is full: while used[block at hand]: used[block at hand] = 0, advance the hand
                                  evict the block at the hand
                insert b at the hand with used[b] = 0, advance the hand; miss

    5 bytes per id and 8 per block of capacity.

    Source: F. J. Corbató, A paging experiment with the Multics system, MIT Project MAC, 1968. Differs from the paper:
    the reference that inserts a block does not set its bit, as in FIFO with second chance; otherwise a scan would clear
    the bits of the whole cache before it evicts its own blocks.
    """

    name = "clock"
    title = "CLOCK"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._slot = np.full(blocks, FREE, np.int32 if capacity <= np.iinfo(np.int32).max else np.int64)
        self._block = np.zeros(min(capacity, blocks), np.int64)
        self._was_used = np.zeros(blocks, np.uint8)
        self._numbers = np.zeros(2, np.int64)

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        _clock(self._slot, self._block, self._was_used, self._numbers, first, count, hits)

    def _resident(self) -> Flags:
        return self._slot != FREE


@lean_kernel
def _clock(
    slot: Links, block_at: Int64s, was_used: Bytes, numbers: Int64s, first: Int64s, count: Int64s, hits: Int64s
) -> None:
    used, hand, slots = numbers[USED], numbers[HAND], len(block_at)
    for run in range(len(first)):
        for block in range(first[run], first[run] + count[run]):
            if slot[block] != FREE:
                was_used[block] = 1
                hits[run] += 1
                continue
            if used == slots:
                while was_used[block_at[hand]]:
                    was_used[block_at[hand]] = 0
                    hand = hand + 1 if hand + 1 < slots else 0
                slot[block_at[hand]] = FREE
            else:
                used += 1
            slot[block] = hand
            block_at[hand] = block
            hand = hand + 1 if hand + 1 < slots else 0
    numbers[USED], numbers[HAND] = used, hand


class Sieve(Policy):
    """SIEVE: CLOCK that leaves surviving blocks in place, so that new blocks are evicted first; 9 bytes per id.

        get(b): if b in queue: visited[b] = 1; hit
                if queue is full: start at the hand, or at the oldest block if there is none
                                  while visited[block at hand]: clear it, move to the next newer (past the newest: oldest)
                                  evict the block at the hand; the hand stays on its newer neighbor
                insert b at the newest end with visited[b] = 0; miss

    There are no parameters.

    Source: Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, SIEVE is simpler than LRU, NSDI 2024, algorithm 1.
    """

    name = "sieve"
    title = "SIEVE"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._links = new_links(blocks, 1)
        self._visited = np.zeros(blocks, np.uint8)
        self._numbers = np.array([0, blocks], np.int64)  # the hand at the head of the ring: none yet

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        _sieve(self._links, self._visited, self._numbers, self.capacity, first, count, hits)

    def _resident(self) -> Flags:
        return self._links[:-1, NEXT] != NONE


@lean_kernel
def _sieve(links: Links, visited: Bytes, numbers: Int64s, capacity: int, first: Int64s, count: Int64s, hits: Int64s) -> None:
    used, hand, head = numbers[USED], numbers[HAND], len(visited)
    for run in range(len(first)):
        for block in range(first[run], first[run] + count[run]):
            if is_linked(links, block):
                visited[block] = 1
                hits[run] += 1
                continue
            if used == capacity:
                while hand == head or visited[hand]:
                    if hand != head:
                        visited[hand] = 0
                    hand = np.int64(links[hand, PREV])
                victim, hand = hand, np.int64(links[hand, PREV])
                remove(links, victim)
            else:
                used += 1
            push_front(links, head, block)
    numbers[USED], numbers[HAND] = used, hand
