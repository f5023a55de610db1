"""ARC: two LRU lists, once and more than once, whose share of the cache follows the hits on what was dropped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import Ids, Policy, lean_kernel, subroutine
from llmcache.cache.policies.lists import Links, move_to_front, new_links, pop_back, push_front

T1, T2, B1, B2, ABSENT = range(5)
"""Where a block is: cached after one reference, cached after several, dropped from T1, dropped from T2, unknown."""


class ARC(Policy):
    """Adaptive replacement cache; T1 and T2 hold blocks, B1 and B2 remember as many again; 9 bytes per id.

        get(b): if b in T1 or T2:  move b to the front of T2; hit
                if b in B1:        p = min(c, p + max(1, |B2|/|B1|)); replace(b); b to the front of T2; miss
                if b in B2:        p = max(0, p - max(1, |B1|/|B2|)); replace(b); b to the front of T2; miss
                if |T1|+|B1| = c:  if |T1| < c: forget the back of B1; replace(b)
                                   else:        drop the back of T1 without remembering it
                elif cache full:   if all four hold 2c: forget the back of B2
                                   replace(b)
                b to the front of T1; miss
        replace(b): if |T1| > p, or |T1| = p and b in B2: the back of T1 to the front of B1
                    else:                                 the back of T2 to the front of B2

    p is a real number, as in the paper. When T2 is empty, replace takes from T1 whatever p says (the paper leaves this
    open).

    Source: N. Megiddo, D. S. Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003, figure 4.
    """

    name = "arc"
    title = "ARC"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._links = new_links(blocks, 4)
        self._where = np.full(blocks, ABSENT, np.uint8)
        self._sizes = np.zeros(4, np.int64)
        self._target = 0.0

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`."""
        hits = np.zeros(len(first), np.int64)
        state = (self._links, self._where, self._sizes, self.capacity)
        self._target, evicted = _replay(*state, self._target, first, count, hits)
        self.evictions += evicted
        return hits

    def resident(self) -> Ids:
        """See `Policy.resident`."""
        return np.flatnonzero(self._where <= T2).astype(np.int64, copy=False)


@lean_kernel
def _replay(
    links: Links, where: NDArray[np.uint8], sizes: Ids, capacity: int, target: float, first: Ids, count: Ids, hits: Ids
) -> tuple[float, int]:
    evicted = 0
    frequent = len(where) + T2
    for run in range(len(first)):
        found = 0
        for block in range(first[run], first[run] + count[run]):
            place = int(where[block])
            if place == ABSENT:
                evicted += _make_room(links, where, sizes, capacity, target)
                push_front(links, len(where) + T1, block)
                where[block] = T1
                sizes[T1] += 1
                continue
            sizes[place] -= 1
            if place <= T2:
                found += 1
            else:
                target = _adapted(sizes, place, target, capacity)
                _replace(links, where, sizes, target, place == B2)
                evicted += 1
            move_to_front(links, frequent, block)
            where[block] = T2
            sizes[T2] += 1
        hits[run] = found
    return target, evicted


@subroutine
def _adapted(sizes: Ids, place: int, target: float, capacity: int) -> float:
    """Returns the new target size of T1 after a hit in `place` (B1 or B2), which is already one smaller."""
    own = sizes[place] + 1
    if place == B1:
        return min(float(capacity), target + max(1.0, float(sizes[B2] / own)))
    return max(0.0, target - max(1.0, float(sizes[B1] / own)))


@subroutine
def _make_room(links: Links, where: NDArray[np.uint8], sizes: Ids, capacity: int, target: float) -> int:
    """Makes room for a block that no list knows; returns how many blocks (0 or 1) were evicted."""
    if sizes[T1] == capacity:
        _forget(links, where, sizes, T1)
        return 1
    if sizes[T1] + sizes[B1] == capacity:
        _forget(links, where, sizes, B1)
    elif sizes[T1] + sizes[T2] < capacity:
        return 0
    elif sizes.sum() >= 2 * capacity:
        _forget(links, where, sizes, B2)
    _replace(links, where, sizes, target, False)
    return 1


@subroutine
def _replace(links: Links, where: NDArray[np.uint8], sizes: Ids, target: float, from_b2: bool) -> None:
    recent = sizes[T1]
    if sizes[T2] == 0 or (recent > 0 and (recent > target or (from_b2 and recent == target))):
        _demote(links, where, sizes, T1, B1)
    else:
        _demote(links, where, sizes, T2, B2)


@subroutine
def _demote(links: Links, where: NDArray[np.uint8], sizes: Ids, cached: int, dropped: int) -> None:
    """Moves the back of a list of cached blocks to the front of a list of dropped ones."""
    block = pop_back(links, len(where) + cached)
    push_front(links, len(where) + dropped, block)
    where[block] = dropped
    sizes[cached] -= 1
    sizes[dropped] += 1


@subroutine
def _forget(links: Links, where: NDArray[np.uint8], sizes: Ids, place: int) -> None:
    where[pop_back(links, len(where) + place)] = ABSENT
    sizes[place] -= 1
