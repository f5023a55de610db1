"""LeCaR: at each eviction LRU or LFU decides, drawn by weights that are learnt from the misses each has caused."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmcache.cache.policies.base import Ids, Policy, lean_kernel, subroutine
from llmcache.cache.policies.heaps import ITEM, MAJOR, Places, Rows, grow, new_heap, push, take_out
from llmcache.cache.policies.lists import Links, back, move_to_front, new_links, pop_back, push_front, remove

LEARNING_RATE = 0.45
DISCOUNT_BASE = 0.005
LEAST_WEIGHT = 0.01
SEED = 123

ABSENT, CACHED, LRU_HISTORY, LFU_HISTORY = 0, 1, 2, 3


class LeCaR(Policy):
    """Learning cache replacement as its authors' program has it: LRU and LFU, weights by regret.

        get(b): the clock advances
                if b is cached: to the front of the LRU list, frequency + 1; hit
                if b is in the history of LRU (of LFU): take it out; frequency + 1, else the frequency is 1;
                    the weight of LRU (of LFU) is multiplied by exp(-0.45 * d ** (clock - time of its eviction)),
                    d = 0.005 ** (1 / capacity); the weights are scaled to sum 1 and kept within 0.01 .. 0.99
                if full: p, q = the back of the LRU list, the least (frequency, block number)
                    draw LRU or LFU by weight; if p is q it goes and enters no history
                    else LRU: p goes to the LRU history, LFU: q goes to the LFU history (its oldest entry is dropped
                    when it has `capacity` entries); the frequency is kept there
                put b at the front of the LRU list; miss

    LFU's ties go by block number, lowest first: on a loop LFU so gives up the lowest numbers, which is what makes the
    authors' results on loops. The draws are those of the authors' program (MT19937, seed 123), so the hits are the same,
    block by block, up to the last bit of numpy's single-precision exp. The frequency heap is corrected only when its
    top is wanted: O(log n) per eviction, O(1) per hit. 33 bytes per block and 24 per place.

    Source: G. Vietri et al., Driving cache replacement with ML-based LeCaR, HotStorage 2018, algorithms 1 and 2, and
    the authors' program, github.com/sylab/LeCaR. Their later program (github.com/sylab/cacheus) halves the histories.
    Differs from libCacheSim, which breaks LFU's ties by age: it has no hit on a loop, and fewer on skewed references.
    """

    name = "lecar"
    title = "LeCaR"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._links = new_links(blocks, 4)
        self._where = np.zeros(blocks, np.uint8)
        self._past = np.zeros((blocks, 2), np.int64)
        self._heap = new_heap(capacity, blocks)
        self._numbers = np.zeros(5, np.int64)
        self._weights = np.array([0.5, 0.5], np.float32)
        source = np.random.MT19937()
        # The authors' program calls numpy.random.seed: an older way of seeding than MT19937(seed).
        seeded: Any = np.random.RandomState(SEED).get_state(legacy=False)
        source.state = seeded
        self._draws = np.random.Generator(source)
        self._discount = DISCOUNT_BASE ** (1 / capacity)

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`."""
        hits = np.zeros(len(first), np.int64)
        state = (self._links, self._where, self._past, *self._heap, self._numbers, self._weights, self._draws)
        self.evictions += _replay(*state, self.capacity, self._discount, first, count, hits)
        return hits

    def resident(self) -> Ids:
        """See `Policy.resident`."""
        return np.flatnonzero(self._where == CACHED).astype(np.int64, copy=False)

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of LRU and LFU now; they sum to 1."""
        return float(self._weights[0]), float(self._weights[1])


# The loop's state: links (front: latest); where each block is (an index of numbers; the list's head is `blocks` + this);
# past[block], its frequency and the time of its eviction; LFU's heap, rows and at; numbers, the lengths of the lists and
# at CLOCK the time; the weights of LRU and LFU.
FREQUENCY, GONE = 0, 1
CLOCK = 4


@lean_kernel
def _replay(
    links: Links,
    where: Any,
    past: Any,
    rows: Rows,
    at: Places,
    numbers: Any,
    weights: Any,
    draws: Any,
    capacity: int,
    discount: float,
    first: Ids,
    count: Ids,
    hits: Ids,
) -> int:
    blocks = len(where)
    evicted = 0
    for run in range(len(first)):
        found = 0
        for block in range(first[run], first[run] + count[run]):
            numbers[CLOCK] += 1
            if where[block] == CACHED:
                move_to_front(links, blocks + CACHED, block)
                past[block, FREQUENCY] += 1
                found += 1
                continue
            if where[block] == ABSENT:
                past[block, FREQUENCY] = 1
            else:
                _regret(links, where, past, numbers, weights, discount, block)
            if numbers[CACHED] == capacity:
                history = LRU_HISTORY if draws.random() < weights[0] else LFU_HISTORY
                _evict(links, where, past, rows, at, numbers, history, capacity)
                evicted += 1
            push_front(links, blocks + CACHED, block)
            where[block] = CACHED
            push(rows, at, numbers[CACHED], past[block, FREQUENCY], block, block)
            numbers[CACHED] += 1
        hits[run] = found
    return evicted


@subroutine
def _regret(links: Links, where: Any, past: Any, numbers: Any, weights: Any, discount: float, block: int) -> None:
    """Takes a missed block out of its history and makes the policy that gave it up less likely."""
    history = where[block]
    remove(links, block)
    where[block] = ABSENT
    numbers[history] -= 1
    past[block, FREQUENCY] += 1
    loss = np.float32(discount ** (numbers[CLOCK] - past[block, GONE]))
    # Single precision throughout, as in the authors' program: a weight decides draws only to the last bit of itself.
    weights[history - LRU_HISTORY] *= np.exp(np.float32(-LEARNING_RATE) * loss)
    total = weights[0] + weights[1]
    weights[0] /= total
    weights[1] /= total
    for policy in range(2):
        if weights[policy] >= np.float32(1 - LEAST_WEIGHT):
            weights[policy] = 1 - LEAST_WEIGHT
            weights[1 - policy] = LEAST_WEIGHT
            break


@subroutine
def _evict(links: Links, where: Any, past: Any, rows: Rows, at: Places, numbers: Any, history: int, capacity: int) -> None:
    oldest = back(links, len(where) + CACHED)
    rarest = _rarest(past, rows, at, numbers[CACHED])
    victim = oldest if history == LRU_HISTORY else rarest
    remove(links, victim)
    numbers[CACHED] = take_out(rows, at, numbers[CACHED], victim)
    where[victim] = ABSENT
    if oldest == rarest:
        return
    if numbers[history] == capacity:
        where[pop_back(links, len(where) + history)] = ABSENT
        numbers[history] -= 1
    push_front(links, len(where) + history, victim)
    where[victim] = history
    past[victim, GONE] = numbers[CLOCK]
    numbers[history] += 1


@subroutine
def _rarest(past: Any, rows: Rows, at: Places, size: int) -> int:
    """Returns the cached block of the least (frequency, number), after bringing the heap's top up to date."""
    block = rows[0, ITEM]
    while rows[0, MAJOR] != past[block, FREQUENCY]:
        grow(rows, at, size, block, past[block, FREQUENCY])
        block = rows[0, ITEM]
    return int(block)
