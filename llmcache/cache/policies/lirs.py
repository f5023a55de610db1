"""LIRS: keeps the blocks whose last two references lay close together, whatever their recency."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmcache.cache.policies.base import Ids, Policy, lean_kernel, subroutine
from llmcache.cache.policies.lists import (
    Links,
    back,
    is_empty,
    is_linked,
    move_to_front,
    new_links,
    pop_front,
    push_back,
    push_front,
    remove,
)

HIR_SHARE = 0.01
STACK_FACTOR = 2

ABSENT, LIR, HIR, GONE = 0, 1, 2, 3
STACK = 0  # its length shares an array with the numbers of LIR and HIR blocks


class LIRS(Policy):
    """Low inter-reference recency set: 99 % of the capacity for LIR blocks, 1 % (at least one) for resident HIR blocks.

    Stack S has the LIR blocks and the HIR blocks that were referenced after the lowest of them, resident or gone;
    queue Q has the resident HIR blocks.

        get(b): if b is LIR: move b to the top of S; hit
                hit = b is resident
                if not hit and full: the front of Q goes (if it is in S, it stays there as gone)
                if b in S, or fewer LIR blocks than allowed: b becomes LIR, on top of S, out of Q; if that is one LIR
                    block too many, the one at the bottom of S becomes HIR, at the end of Q
                else: b is HIR, on top of S and at the end of Q
                prune: HIR blocks below the lowest LIR block leave S
                while |S| > 2 * capacity: the block that has been gone longest leaves S

    17 bytes per block.
    Source: S. Jiang, X. Zhang, LIRS: an efficient low inter-reference recency set replacement policy, SIGMETRICS 2002,
    with the share of HIR blocks of its experiments.
    Differs from the paper: S is bounded by twice the capacity, so that at most capacity + the HIR share of gone blocks
    are remembered (the paper leaves S unbounded and notes that it can be limited). libCacheSim has the same bound.
    Differs from libCacheSim: there a hit on a block that has left S also takes a block out of the LIR set; hits differ by
    less than 1 % of the references, and not at all on a loop larger than the cache.
    """

    name = "lirs"
    title = "LIRS"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._stack = new_links(blocks, 1)
        self._queues = new_links(blocks, 2)
        self._status = np.zeros(blocks, np.uint8)
        self._sizes = np.zeros(3, np.int64)
        self._lir_limit = capacity - max(1, int(capacity * HIR_SHARE))

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`."""
        hits = np.zeros(len(first), np.int64)
        limits = (self.capacity, self._lir_limit)
        self.evictions += _replay(self._stack, self._queues, self._status, self._sizes, limits, first, count, hits)
        return hits

    def resident(self) -> Ids:
        """See `Policy.resident`."""
        return np.flatnonzero((self._status == LIR) | (self._status == HIR)).astype(np.int64, copy=False)


# The loop's state: stack S (front: top); queues, Q and the gone blocks of S (front: oldest; a block is in one of them at
# most); status of each block; sizes, the numbers of STACK, LIR and HIR blocks.


@lean_kernel
def _replay(
    stack: Links,
    queues: Links,
    status: Any,
    sizes: Any,
    limits: tuple[int, int],
    first: Ids,
    count: Ids,
    hits: Ids,
) -> int:
    capacity, lir_limit = limits
    evicted = 0
    for run in range(len(first)):
        found = 0
        for block in range(first[run], first[run] + count[run]):
            if status[block] == LIR:
                found += 1
                move_to_front(stack, len(status), block)
            elif status[block] == HIR:
                found += 1
                _refer(stack, queues, status, sizes, lir_limit, block)
            else:
                if sizes[LIR] + sizes[HIR] == capacity:
                    _evict(stack, queues, status, sizes)
                    evicted += 1
                _refer(stack, queues, status, sizes, lir_limit, block)
            _prune(stack, queues, status, sizes)
            while sizes[STACK] > STACK_FACTOR * capacity:
                _forget_oldest(stack, queues, status, sizes)
        hits[run] = found
    return evicted


@subroutine
def _refer(stack: Links, queues: Links, status: Any, sizes: Any, lir_limit: int, block: int) -> None:
    """Gives its new place to a referenced block that is not LIR."""
    blocks = len(status)
    known = is_linked(stack, block)
    if is_linked(queues, block):
        remove(queues, block)
    if status[block] == HIR:
        sizes[HIR] -= 1
    if known:
        move_to_front(stack, blocks, block)
    else:
        push_front(stack, blocks, block)
        sizes[STACK] += 1
    if (known and lir_limit > 0) or sizes[LIR] < lir_limit:
        status[block] = LIR
        sizes[LIR] += 1
        if sizes[LIR] > lir_limit:
            _demote(stack, queues, status, sizes)
    else:
        _queue(stack, queues, status, sizes, block)


@subroutine
def _demote(stack: Links, queues: Links, status: Any, sizes: Any) -> None:
    """Makes the LIR block at the bottom of S an HIR block."""
    block = back(stack, len(status))
    remove(stack, block)
    sizes[STACK] -= 1
    sizes[LIR] -= 1
    _queue(stack, queues, status, sizes, block)


@subroutine
def _queue(stack: Links, queues: Links, status: Any, sizes: Any, block: int) -> None:
    push_back(queues, len(status), block)
    status[block] = HIR
    sizes[HIR] += 1


@subroutine
def _evict(stack: Links, queues: Links, status: Any, sizes: Any) -> None:
    block = pop_front(queues, len(status))
    sizes[HIR] -= 1
    if is_linked(stack, block):
        status[block] = GONE
        push_back(queues, len(status) + 1, block)
    else:
        status[block] = ABSENT


@subroutine
def _prune(stack: Links, queues: Links, status: Any, sizes: Any) -> None:
    bottom: Any = back(stack, len(status))
    while not is_empty(stack, len(status)) and status[bottom] != LIR:
        remove(stack, bottom)
        sizes[STACK] -= 1
        if status[bottom] == GONE:
            remove(queues, bottom)
            status[bottom] = ABSENT
        bottom = back(stack, len(status))


@subroutine
def _forget_oldest(stack: Links, queues: Links, status: Any, sizes: Any) -> None:
    block = pop_front(queues, len(status) + 1)
    remove(stack, block)
    sizes[STACK] -= 1
    status[block] = ABSENT
