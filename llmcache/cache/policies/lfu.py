"""Policies by frequency: LFU, W-TinyLFU, and LeCaR, which learns whether to use frequency or recency."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.cache.policies.base import Policy, lean_kernel, subroutine
from llmcache.cache.policies.structures import (
    ABSENT,
    ITEM,
    MAJOR,
    NEXT,
    NONE,
    Heap,
    Links,
    Queues,
    Sketch,
    back,
    enter,
    estimate,
    front,
    grow,
    is_empty,
    is_linked,
    leave,
    move_to_front,
    new_heap,
    new_links,
    new_queues,
    new_sketch,
    note,
    oldest,
    pop,
    push,
    push_front,
    remove,
    shift,
    take_out,
)


class LFU(Policy):
    """Least frequently used, ties broken by recency (the least recent is evicted); an evicted block's count is forgotten.

        get(b): if b in cache: freq[b] += 1; hit
                if cache is full: evict, among the blocks of the lowest freq, the least recently referenced one
                freq[b] = 1; miss

    Constant time per reference: blocks of one frequency form a list, and nonempty lists are chained by frequency. 12
    bytes per id and 28 per block of capacity.

    Source: K. Shah, A. Mitra, D. Matani, An O(1) algorithm for implementing the LFU cache eviction scheme, 2010.
    """

    name = "lfu"
    title = "LFU"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        levels = min(capacity, blocks)  # at most as many frequencies as blocks
        links = new_links(blocks, levels)
        self._levels = Levels(
            links=links,
            level=np.zeros(blocks, links.dtype),
            chain=new_links(levels, 1),
            freq=np.zeros(levels, np.int64),
            free=np.arange(levels, dtype=links.dtype),
            numbers=np.zeros(2, np.int64),
        )

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        _lfu(self._levels, self.capacity, first, count, hits)

    def _resident(self) -> Flags:
        return self._levels.links[: self.blocks, NEXT] != NONE


class Levels(NamedTuple):
    """LFU's state: the blocks of each level, latest first (head: `blocks` + the level), and the level of each block.

    `chain` has the nonempty levels, by their `freq`; free[numbers[TAKEN]:] are the others.
    """

    links: Links
    level: Links
    chain: Links
    freq: Int64s
    free: Links
    numbers: Int64s


USED, TAKEN = 0, 1


@lean_kernel
def _lfu(levels: Levels, capacity: int, first: Int64s, count: Int64s, hits: Int64s) -> None:
    links, level, chain, freq, _, numbers = levels
    for run in range(len(first)):
        for block in range(first[run], first[run] + count[run]):
            if is_linked(links, block):
                _promote(levels, block)
                hits[run] += 1
                continue
            if numbers[USED] == capacity:
                lowest = front(chain, len(freq))
                remove(links, back(links, len(level) + lowest))
                if is_empty(links, len(level) + lowest):
                    _free_level(levels, lowest)
            else:
                numbers[USED] += 1
            lowest = front(chain, len(freq))
            if lowest == len(freq) or freq[lowest] != 1:
                lowest = _new_level(levels, len(freq), 1)
            push_front(links, len(level) + lowest, block)
            level[block] = lowest


@subroutine
def _promote(levels: Levels, block: int) -> None:
    links, level, chain, freq, _, _ = levels
    old = int(level[block])
    above = front(chain, old)
    alone = back(links, len(level) + old) == front(links, len(level) + old)
    if above == len(freq) or freq[above] != freq[old] + 1:
        if alone:
            freq[old] += 1
            return
        above = _new_level(levels, old, freq[old] + 1)
    move_to_front(links, len(level) + above, block)
    level[block] = above
    if alone:
        _free_level(levels, old)


@subroutine
def _new_level(levels: Levels, below: int, freq: int) -> int:
    level = int(levels.free[levels.numbers[TAKEN]])
    levels.numbers[TAKEN] += 1
    levels.freq[level] = freq
    push_front(levels.chain, below, level)
    return level


@subroutine
def _free_level(levels: Levels, level: int) -> None:
    remove(levels.chain, level)
    levels.numbers[TAKEN] -= 1
    levels.free[levels.numbers[TAKEN]] = level


WINDOW, PROBATION, PROTECTED = 1, 2, 3
WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8


class WTinyLFU(Policy):
    """Window TinyLFU: an LRU window of 1 % (at least one block), then an SLRU of 20 % probation and 80 % protected.

        get(b): count b in the sketch
                if b in window or protected: move b to the front of it; hit
                if b in probation: move b to the front of protected; if that is one block too many, its back moves to
                    the front of probation; hit
                insert b at the front of the window; if that is one block too many:
                    candidate, victim = the backs of window and probation
                    if the cache was full: if the sketch has more references of the candidate: evict the victim
                                           else: evict the candidate
                    the candidate, if it stays, moves to the front of probation
                miss

    9 bytes per block; the sketch has 26 to 52 bytes per place.

    Source: G. Einziger, R. Friedman, B. Manes, TinyLFU: a highly efficient cache admission policy, ACM Transactions on
    Storage 13(4), 2017, section 4. Differs from Caffeine: the window stays at 1 %, the victim wins every tie, and the
    paper's doorkeeper is included. Differs from libCacheSim, which has no doorkeeper and other counters.
    """

    name = "wtinylfu"
    title = "W-TinyLFU"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._queues = new_queues(blocks, 3)
        self._sketch = new_sketch(min(capacity, blocks))  # unused if all blocks fit
        window = max(1, int(capacity * WINDOW_SHARE))
        self._limits = (capacity, window, int((capacity - window) * PROTECTED_SHARE))

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        _wtinylfu(self._queues, self._sketch, self._limits, first, count, hits)

    def _resident(self) -> Flags:
        return self._queues.where != ABSENT


@lean_kernel
def _wtinylfu(
    queues: Queues, sketch: Sketch, limits: tuple[int, int, int], first: Int64s, count: Int64s, hits: Int64s
) -> None:
    capacity, window, protected = limits
    _, where, sizes = queues
    for run in range(len(first)):
        for block in range(first[run], first[run] + count[run]):
            note(sketch, block)
            place = where[block]
            if place == ABSENT:
                is_full = sizes[WINDOW] + sizes[PROBATION] + sizes[PROTECTED] == capacity
                enter(queues, WINDOW, block)
                if sizes[WINDOW] > window:
                    _admit(queues, sketch, is_full)
                continue
            hits[run] += 1
            if place == PROBATION:
                shift(queues, PROTECTED, block)
                if sizes[PROTECTED] > protected:
                    shift(queues, PROBATION, oldest(queues, PROTECTED))
            else:
                move_to_front(queues.links, len(where) + place, block)


@subroutine
def _admit(queues: Queues, sketch: Sketch, is_full: bool) -> None:
    candidate = pop(queues, WINDOW)
    if is_full:
        victim = oldest(queues, PROBATION)
        if queues.sizes[PROBATION] == 0 or estimate(sketch, candidate) <= estimate(sketch, victim):
            return
        leave(queues, victim)
    enter(queues, PROBATION, candidate)


CACHED, LRU_HISTORY, LFU_HISTORY = 1, 2, 3
LEARNING_RATE = 0.45
DISCOUNT_BASE = 0.005
LEAST_WEIGHT = 0.01
SEED = 123


class LeCaR(Policy):
    """Learning cache replacement as in its authors' program: LRU and LFU, weighted by regret.

        get(b): the clock advances
                if b is cached: to the front of the LRU list, frequency + 1; hit
                if b is in the history of LRU (of LFU): remove it; frequency + 1, else the frequency is 1;
                    the weight of LRU (of LFU) is multiplied by exp(-0.45 * d ** (clock - time of its eviction)),
                    d = 0.005 ** (1 / capacity); the weights are scaled to sum 1 and clamped to 0.01 .. 0.99
                if full: p, q = the back of the LRU list, the least (frequency, block number)
                    draw LRU or LFU by weight; if p is q, evict it without a history entry
                    else LRU: evict p to the LRU history, LFU: evict q to the LFU history (whose oldest entry is dropped
                    if it has `capacity` entries); the entry includes the frequency
                insert b at the front of the LRU list; miss

    The draws are those of the authors' program (MT19937, seed 123), and so are the hits. The frequency heap is only
    corrected when its top is needed: O(log n) per eviction, O(1) per hit. 33 bytes per block and 24 per place.

    Source: G. Vietri et al., Driving cache replacement with ML-based LeCaR, HotStorage 2018, and github.com/sylab/LeCaR.
    Differs from libCacheSim, which breaks LFU's ties by age, not by block number: it has no hit on a loop.
    """

    name = "lecar"
    title = "LeCaR"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._state = Learner(
            queues=new_queues(blocks, 3),
            past=np.zeros((blocks, 2), np.int64),
            heap=new_heap(min(capacity, blocks), blocks),
            clock=np.zeros(1, np.int64),
            weights=np.array([0.5, 0.5], np.float32),
        )
        source = np.random.MT19937()
        # The authors' program calls numpy.random.seed, which seeds differently from MT19937(seed).
        seeded: Any = np.random.RandomState(SEED).get_state(legacy=False)
        source.state = seeded
        self._draws = np.random.Generator(source)

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        _lecar(self._state, self._draws, self.capacity, DISCOUNT_BASE ** (1 / self.capacity), first, count, hits)

    def _resident(self) -> Flags:
        return self._state.queues.where == CACHED


class Learner(NamedTuple):
    """LeCaR's state: the cache and its histories, past[block] (frequency, time of eviction), LFU's heap, the weights."""

    queues: Queues
    past: Int64s
    heap: Heap
    clock: Int64s
    weights: Floats


FREQUENCY, GONE = 0, 1


@lean_kernel
def _lecar(state: Learner, draws: Any, capacity: int, discount: float, first: Int64s, count: Int64s, hits: Int64s) -> None:
    queues, past, heap, clock, weights = state
    _, where, sizes = queues
    for run in range(len(first)):
        for block in range(first[run], first[run] + count[run]):
            clock[0] += 1
            if where[block] == CACHED:
                move_to_front(queues.links, len(where) + CACHED, block)
                past[block, FREQUENCY] += 1
                hits[run] += 1
                continue
            if where[block] == ABSENT:
                past[block, FREQUENCY] = 1
            else:
                _regret(state, discount, block)
            if sizes[CACHED] == capacity:
                _lecar_evict(state, LRU_HISTORY if draws.random() < weights[0] else LFU_HISTORY, capacity)
            enter(queues, CACHED, block)
            push(heap, past[block, FREQUENCY], block, block)


@subroutine
def _regret(state: Learner, discount: float, block: int) -> None:
    """Remove a missed block from its history, and reduce the weight of the policy that evicted it."""
    queues, past, _, clock, weights = state
    policy = queues.where[block] - LRU_HISTORY
    leave(queues, block)
    past[block, FREQUENCY] += 1
    loss = np.float32(discount ** (clock[0] - past[block, GONE]))
    # Single precision throughout, as in the authors' program, so that the draws agree.
    weights[policy] *= np.exp(np.float32(-LEARNING_RATE) * loss)
    total = weights[0] + weights[1]
    weights[0] /= total
    weights[1] /= total
    for policy in range(2):
        if weights[policy] >= np.float32(1 - LEAST_WEIGHT):
            weights[policy] = 1 - LEAST_WEIGHT
            weights[1 - policy] = LEAST_WEIGHT
            break


@subroutine
def _lecar_evict(state: Learner, history: int, capacity: int) -> None:
    queues, past, heap, clock, _ = state
    least_recent = oldest(queues, CACHED)
    # The cached block of the least (frequency, number), after correcting the heap's top.
    rarest = heap.rows[0, ITEM]
    while heap.rows[0, MAJOR] != past[rarest, FREQUENCY]:
        grow(heap, rarest, past[rarest, FREQUENCY])
        rarest = heap.rows[0, ITEM]
    victim = least_recent if history == LRU_HISTORY else rarest
    leave(queues, victim)
    take_out(heap, victim)
    if least_recent != rarest:
        if queues.sizes[history] == capacity:
            pop(queues, history)
        enter(queues, history, victim)
        past[victim, GONE] = clock[0]
