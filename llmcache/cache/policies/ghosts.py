"""Policies that remember ids of evicted blocks (ghosts): 2Q, ARC, S3-FIFO, LIRS."""

from __future__ import annotations

import numpy as np

from llmcache.arrays import Bytes, Doubles, Flags, Int64s
from llmcache.cache.policies.base import Policy, lean_kernel, subroutine
from llmcache.cache.policies.structures import (
    ABSENT,
    Links,
    Queues,
    back,
    enter,
    is_empty,
    is_linked,
    leave,
    move_to_front,
    new_links,
    new_queues,
    oldest,
    pop,
    push_front,
    remove,
    shift,
)

IN, MAIN, OUT = 1, 2, 3  # 2Q's queues A1in, Am and A1out
IN_SHARE = 0.25
OUT_SHARE = 0.5


class TwoQ(Policy):
    """2Q, full version: A1in has 25 % of the capacity, A1out remembers ids for 50 % of it; 9 bytes per block.

        get(b): if b in Am: move b to the front of Am; hit
                if b in A1in: hit                             (second touch of one burst: no information)
                known = b in A1out; remove it from A1out
                if full: if |A1in| > Kin: evict the back of A1in, its id to the front of A1out (the back of A1out
                                          is forgotten if |A1out| > Kout)
                         else: evict the back of Am, without remembering its id
                insert b at the front of Am if known, else of A1in; miss

    Source: T. Johnson, D. Shasha, 2Q: a low overhead high performance buffer management replacement algorithm, VLDB 1994.
    Differs from the paper: b is removed from A1out before room is made for it, as in libCacheSim, which has the same hits.
    """

    name = "2q"
    title = "2Q"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._queues = new_queues(blocks, 3)
        self._limits = (capacity, int(capacity * IN_SHARE), int(capacity * OUT_SHARE))

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        _twoq(self._queues, self._limits, first, count, hits)

    def _resident(self) -> Flags:
        return np.isin(self._queues.where, (IN, MAIN))


@lean_kernel
def _twoq(queues: Queues, limits: tuple[int, int, int], first: Int64s, count: Int64s, hits: Int64s) -> None:
    capacity, in_limit, out_limit = limits
    _, where, sizes = queues
    for run in range(len(first)):
        for block in range(first[run], first[run] + count[run]):
            queue = where[block]
            if queue == MAIN:
                shift(queues, MAIN, block)
                hits[run] += 1
                continue
            if queue == IN:
                hits[run] += 1
                continue
            if queue == OUT:
                leave(queues, block)
            if sizes[IN] + sizes[MAIN] == capacity:
                if sizes[IN] > in_limit:
                    shift(queues, OUT, oldest(queues, IN))
                    if sizes[OUT] > out_limit:
                        pop(queues, OUT)
                else:
                    pop(queues, MAIN)
            enter(queues, MAIN if queue == OUT else IN, block)


T1, T2, B1, B2 = 1, 2, 3, 4
"""ARC's lists: cached after one reference, cached after several, evicted from T1, evicted from T2."""


class ARC(Policy):
    """Adaptive replacement cache; T1 and T2 contain blocks, B1 and B2 remember as many again; 9 bytes per id.

        get(b): if b in T1 or T2:  move b to the front of T2; hit
                if b in B1:        p = min(c, p + max(1, |B2|/|B1|)); replace(b); b to the front of T2; miss
                if b in B2:        p = max(0, p - max(1, |B1|/|B2|)); replace(b); b to the front of T2; miss
                if |T1|+|B1| = c:  if |T1| < c: forget the back of B1; replace(b)
                                   else:        evict the back of T1 without remembering it
                elif cache full:   if all four have 2c entries: forget the back of B2
                                   replace(b)
                b to the front of T1; miss
        replace(b): if |T1| > p, or |T1| = p and b in B2: the back of T1 to the front of B1
                    else:                                 the back of T2 to the front of B2

    p is a real number, as in the paper. If T2 is empty, replace evicts from T1 for any p (the paper leaves this open).

    Source: N. Megiddo, D. S. Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003, figure 4.
    """

    name = "arc"
    title = "ARC"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._queues = new_queues(blocks, 4)
        self._target = np.zeros(1)

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        _arc(self._queues, self._target, self.capacity, first, count, hits)

    def _resident(self) -> Flags:
        return np.isin(self._queues.where, (T1, T2))


@lean_kernel
def _arc(queues: Queues, target: Doubles, capacity: int, first: Int64s, count: Int64s, hits: Int64s) -> None:
    _, where, sizes = queues
    for run in range(len(first)):
        for block in range(first[run], first[run] + count[run]):
            place = where[block]
            if place == ABSENT:
                _arc_room(queues, target, capacity)
                enter(queues, T1, block)
                continue
            if place == B1:
                target[0] = min(float(capacity), target[0] + max(1.0, float(sizes[B2] / sizes[B1])))
                _replace(queues, target, False)
            elif place == B2:
                target[0] = max(0.0, target[0] - max(1.0, float(sizes[B1] / sizes[B2])))
                _replace(queues, target, True)
            else:
                hits[run] += 1
            shift(queues, T2, block)


@subroutine
def _arc_room(queues: Queues, target: Doubles, capacity: int) -> None:
    sizes = queues.sizes
    if sizes[T1] == capacity:
        pop(queues, T1)
        return
    if sizes[T1] + sizes[B1] == capacity:
        pop(queues, B1)
    elif sizes[T1] + sizes[T2] < capacity:
        return
    elif sizes.sum() >= 2 * capacity:
        pop(queues, B2)
    _replace(queues, target, False)


@subroutine
def _replace(queues: Queues, target: Doubles, from_b2: bool) -> None:
    recent = queues.sizes[T1]
    if queues.sizes[T2] == 0 or (recent > 0 and (recent > target[0] or (from_b2 and recent == target[0]))):
        shift(queues, B1, oldest(queues, T1))
    else:
        shift(queues, B2, oldest(queues, T2))


# MAIN, the queue of blocks that were used again, has the same number as in 2Q.
SMALL, GHOST = 1, 3
SMALL_PERCENT = 10  # the small queue's share of the capacity. Source: S3-FIFO, section 4.1.
# remembered ids, in percent of the capacity: as many as the main queue has blocks. Source: S3-FIFO, section 4.1.
GHOST_PERCENT = 90
PROMOTED_AT = 2
"""Hits in the small queue after which a block moves to the main one. Source: S3-FIFO, algorithm 1 (`freq > 1`)."""
MOST_HITS = 3  # hits are counted in two bits. Source: S3-FIFO, section 4.1.


class S3FIFO(Policy):
    """S3-FIFO with a 10 % small queue, two-bit counters and a ghost queue of 90 % of the capacity; 10 bytes per id.

        get(b): if b in small or main: freq[b] = min(freq[b] + 1, 3); hit
                remembered = b in ghost; remove b from ghost
                while cache is full: if main has more than 90 % or small is empty: evict_main()
                                     else:                                         evict_small()
                if remembered: b to the front of main, else b to the front of small; freq[b] = 0; miss
        evict_small(): from the back of small: freq >= 2: to the front of main with freq = 0, continue
                                               else: evict; to the front of ghost (if full, its oldest is forgotten); end
        evict_main():  from the back of main:  freq >= 1: to the front of main with freq - 1, continue
                                               else: evict; end

    Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, FIFO queues are all you need for cache eviction, SOSP 2023,
    algorithm 1. Differs from the paper: until the first eviction, a block that finds the small queue full is inserted into
    the main one, as in the authors' simulator since 2024. The small queue has at least one block.
    """

    name = "s3fifo"
    title = "S3-FIFO"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        small = max(1, capacity * SMALL_PERCENT // 100)
        self._queues = new_queues(blocks, 3)
        self._freq = np.zeros(blocks, np.uint8)
        self._limits = np.array([0, small, capacity - small, capacity * GHOST_PERCENT // 100], np.int64)
        self._warm = np.zeros(1, np.bool_)

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        _s3fifo(self._queues, self._freq, self._limits, self._warm, first, count, hits)

    def _resident(self) -> Flags:
        return np.isin(self._queues.where, (SMALL, MAIN))


@lean_kernel
def _s3fifo(queues: Queues, freq: Bytes, limits: Int64s, warm: Flags, first: Int64s, count: Int64s, hits: Int64s) -> None:
    _, where, sizes = queues
    capacity = limits[SMALL] + limits[MAIN]
    for run in range(len(first)):
        for block in range(first[run], first[run] + count[run]):
            place = where[block]
            if place in (SMALL, MAIN):
                freq[block] = min(freq[block] + 1, MOST_HITS)
                hits[run] += 1
                continue
            target = SMALL
            if place == GHOST:
                leave(queues, block)
                target = MAIN
            while sizes[SMALL] + sizes[MAIN] == capacity:
                _s3fifo_evict(queues, freq, limits)
                warm[0] = True
            if not warm[0] and sizes[SMALL] >= limits[SMALL]:
                target = MAIN
            freq[block] = 0
            enter(queues, target, block)


@subroutine
def _s3fifo_evict(queues: Queues, freq: Bytes, limits: Int64s) -> None:
    sizes = queues.sizes
    queue = MAIN if sizes[MAIN] > limits[MAIN] or sizes[SMALL] == 0 else SMALL
    promoted_at = 1 if queue == MAIN else PROMOTED_AT
    while sizes[queue] > 0:
        block = oldest(queues, queue)
        if freq[block] < promoted_at:
            leave(queues, block)
            if queue == SMALL and limits[GHOST] > 0:
                if sizes[GHOST] == limits[GHOST]:
                    pop(queues, GHOST)
                enter(queues, GHOST, block)
            return
        freq[block] = freq[block] - 1 if queue == MAIN else 0
        shift(queues, MAIN, block)


STACK, HIR, GONE, LIR = 0, 1, 2, 3
"""Resident HIR blocks (queue Q); evicted HIR blocks that are still in S; LIR blocks, which are counted but in no queue.

The length of stack S is at index 0.
"""
HIR_SHARE = 0.01
STACK_FACTOR = 2


class LIRS(Policy):
    """Low inter-reference recency set: 99 % of the capacity for LIR blocks, at least one place for HIR blocks.

    The cache keeps blocks whose last two references were close together. Stack S has the LIR blocks and the HIR blocks that
    were referenced after the lowest of them, resident or evicted; queue Q has the resident HIR blocks.

        get(b): if b is LIR: move b to the top of S; hit
                hit = b is resident
                if not hit and full: evict the front of Q (if it is in S, it stays there, marked GONE)
                if b in S, or fewer LIR blocks than allowed: b becomes LIR, on top of S, out of Q; if that is one LIR
                    block too many, the one at the bottom of S becomes HIR, at the end of Q
                else: b is HIR, on top of S and at the end of Q
                prune: remove HIR blocks below the lowest LIR block from S
                while |S| > 2 * capacity: remove from S the block that was evicted first

    Source: S. Jiang, X. Zhang, LIRS: an efficient low inter-reference recency set replacement policy, SIGMETRICS 2002.
    Differs from the paper: S is limited to twice the capacity, as in libCacheSim. Differs from libCacheSim: there a hit on a
    block that is no longer in S also removes a block from the LIR set (less than 1 % of the references differ).
    """

    name = "lirs"
    title = "LIRS"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._stack = new_links(blocks, 1)
        self._queues = new_queues(blocks, 3)
        self._limits = (capacity, capacity - max(1, int(capacity * HIR_SHARE)))

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        _lirs(self._stack, self._queues, self._limits, first, count, hits)

    def _resident(self) -> Flags:
        return np.isin(self._queues.where, (LIR, HIR))


@lean_kernel
def _lirs(stack: Links, queues: Queues, limits: tuple[int, int], first: Int64s, count: Int64s, hits: Int64s) -> None:
    capacity, lir_limit = limits
    _, where, sizes = queues
    for run in range(len(first)):
        for block in range(first[run], first[run] + count[run]):
            if where[block] == LIR:
                hits[run] += 1
                move_to_front(stack, len(where), block)
            else:
                if where[block] == HIR:
                    hits[run] += 1
                elif sizes[LIR] + sizes[HIR] == capacity:
                    gone = pop(queues, HIR)
                    if is_linked(stack, gone):
                        enter(queues, GONE, gone)
                _refer(stack, queues, lir_limit, block)
            _prune(stack, queues)
            while sizes[STACK] > STACK_FACTOR * capacity:
                _off_stack(stack, queues, pop(queues, GONE))


@subroutine
def _refer(stack: Links, queues: Queues, lir_limit: int, block: int) -> None:
    _, where, sizes = queues
    known = is_linked(stack, block)
    if where[block] != ABSENT:
        leave(queues, block)
    if known:
        move_to_front(stack, len(where), block)
    else:
        push_front(stack, len(where), block)
        sizes[STACK] += 1
    if (known and lir_limit > 0) or sizes[LIR] < lir_limit:
        where[block] = LIR
        sizes[LIR] += 1
        if sizes[LIR] > lir_limit:
            bottom = back(stack, len(where))
            _off_stack(stack, queues, bottom)
            sizes[LIR] -= 1
            enter(queues, HIR, bottom)
    else:
        enter(queues, HIR, block)


@subroutine
def _prune(stack: Links, queues: Queues) -> None:
    where = queues.where
    bottom = back(stack, len(where))
    while not is_empty(stack, len(where)) and where[bottom] != LIR:
        _off_stack(stack, queues, bottom)
        if where[bottom] == GONE:
            leave(queues, bottom)
        bottom = back(stack, len(where))


@subroutine
def _off_stack(stack: Links, queues: Queues, block: int) -> None:
    remove(stack, block)
    queues.sizes[STACK] -= 1
