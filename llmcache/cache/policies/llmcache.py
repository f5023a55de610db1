"""llmcache's policy: keep what comes back soonest, judged by measured reuse, and never do much worse than LRU."""

from __future__ import annotations

import numpy as np

from llmcache.cache.policies.base import Ids, Policy, lean_kernel, subroutine
from llmcache.cache.policies.reuse import (
    GONE,
    HOT,
    IRREGULAR,
    LEFT,
    PER_KIND,
    REGULAR,
    ROUND,
    Plan,
    choose,
    forget,
    make_plan,
    put,
    take,
    weigh_once,
)
from llmcache.cache.policies.segments import end_piece, find, highest_bit, leave, next_start
from llmcache.cache.policies.streams import follow

STREAM_BLOCKS = 4  # a stream is sequential from its fourth block on: three in a row also happen by chance
TOLERANCE_SHIFT = 3  # two intervals agree within an eighth: two groups an octave cannot tell them apart anyway
SLACK = 8  # and within 8 steps: short intervals are disturbed by single references
FADE_ROUNDS = 16  # after so many the statistics count half


class LLMCache(Policy):
    """Reuse-time classes over runs, with LRU as a fallback that is measured and not assumed.

    *Step* counts references; an immediate repeat of a block is none. Each block has the step of its last reference and
    an interval. A reuse after `v` steps is REGULAR when `v` agrees with the block's interval, or, the first time, with
    the interval of the block before it in its sequential stream; IRREGULAR in a stream otherwise; HOT outside streams
    (intervals of both are smoothed). Blocks of a kind and similar interval form a group in order of reference. A block
    seen once belongs to the run of its stream.

    A victim is what is needed last: of a loop group the block referenced latest (its next use is one interval away), of
    HOT the one referenced longest ago, and of any group a block that is overdue, which is worth 1 / age: loops of a
    model that is no more used drain by themselves. Runs go before all that, the oldest run first and its highest block
    first, unless the measured rate at which blocks seen once come back says that they are worth their room.

    This plan is kept as if it ruled. A shadow LRU of the same size is kept beside it (its content follows from the
    recency list), and the cache gives up what the better one of the two does not hold. The lead changes when the other
    has had half a cache of hits more: what a change costs is refetching what differs.

    Sequential first out, loops by period, hot set by LRU: Source: io_caching section 4.1, Algorithm 1.
    Differs from the paper: loops are not pinned from the lowest block, the classes are intervals, nothing is for ever.
    Choosing between two policies by shadow: Subramanian, Smaragdakis, Loh, "Adaptive Caches", MICRO 2006.

    Cost per run of a known loop is constant, whatever its length; memory about 64 bytes per segment (nine capacities
    of blocks at most) and 4 bytes per id at places where segments start.
    """

    name = "llmcache"
    title = "llmcache"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._plan = make_plan(capacity, blocks)

    def replay(self, first: Ids, count: Ids) -> Ids:
        """Returns the hit blocks of each run."""
        hits = np.zeros(len(first), np.int64)
        _replay(self._plan, first, count, hits)
        self.evictions = int(self._plan.v["evictions"][0])
        return hits

    def resident(self) -> Ids:
        """Returns the ids that the cache holds now, ascending."""
        blocks = np.empty(int(self._plan.v["held"][0]), np.int64)
        _held_blocks(self._plan, blocks)
        return np.sort(blocks)


@lean_kernel
def _replay(p: Plan, first: Ids, count: Ids, hits: Ids) -> None:
    for run in range(first.size):
        hits[run] = _refer(p, first[run], count[run])


@subroutine
def _refer(p: Plan, block: int, n: int) -> int:
    """Returns the hits of one run."""
    v = p.v[0]
    hits, end = 0, block + n
    if block == v.previous and n > 0:
        segment = find(p.s, block)
        if p.s.seg[segment].held:
            hits, block = 1, block + 1
    if block >= end:
        return hits
    v.previous = end - 1
    stream, fresh = follow(p.t, block, end - block)
    if fresh:
        run = p.t.row[stream].run
        if run >= 0:
            p.s.queue[run].stream = -1
        p.t.row[stream].run = -1
    while block < end:
        done, held = _refer_piece(p, stream, block, end - block)
        block += done
        hits += held
        if v.step & (ROUND - 1) == 0:
            _look(p)
    return hits


@subroutine
def _refer_piece(p: Plan, stream: int, block: int, n: int) -> tuple[int, int]:
    """References as many of the `n` blocks from `block` as share all they have; returns how many, and the hits."""
    s, v = p.s, p.v[0]
    row = p.t.row[stream]
    step = v.step
    n = min(n, ROUND - (step & (ROUND - 1)))
    segment = find(s, block)
    if segment < 0:
        n = min(n, next_start(s, block) - block)
        n = _refer_new(p, stream, block, n)
        row.length += n
        return n, 0
    record = s.seg[segment]
    n = min(n, record.lo + record.n - block)
    last = record.last + block - record.lo
    elapsed = max(1, step - last)
    in_loop = row.length + 1 >= STREAM_BLOCKS and row.interval >= 0 and _agree(elapsed, row.interval)
    if not in_loop:
        n = 1  # the next block of the stream has this one's interval to agree with
    planned = record.queue != LEFT and record.queue != GONE
    in_lru = last >= s.state[0].edge_step
    if not in_lru:
        n = min(n, s.state[0].edge_step - last)
    if not record.held:
        n = min(n, p.stale)
    if not planned and v.planned >= p.capacity:
        if v.chosen_until <= step:
            choose(p)
        n = min(n, v.chosen_until - step)
    interval, kind = record.interval, HOT
    if interval < 0:
        interval = elapsed
        kind = REGULAR if in_loop else HOT
        p.reuses[highest_bit(elapsed) + 1] += n
    elif _agree(elapsed, interval):
        interval = elapsed
        kind = REGULAR
    else:
        interval = (interval + elapsed) >> 1
        kind = IRREGULAR if in_loop else HOT
    row.interval = elapsed
    row.length += n
    held = record.held != 0
    take(p, segment, block, n, in_lru)
    change = n * (np.int64(in_lru) - np.int64(planned))
    v.lead = max(-p.bound, min(p.bound, v.lead + change))
    put(p, _group(kind, interval), -1, block, n, interval, planned)
    _settle(p, n, held)
    return n, n if held else 0


@subroutine
def _refer_new(p: Plan, stream: int, block: int, n: int) -> int:
    """References blocks that are not remembered; returns how many."""
    v = p.v[0]
    n = min(n, max(p.stale, p.capacity - max(v.planned, v.held)))
    if v.planned >= p.capacity:
        if v.chosen_until <= v.step:
            choose(p)
        n = min(n, v.chosen_until - v.step)
    v.once += n
    put(p, p.t.row[stream].run, stream, block, n, -1, False)
    _settle(p, n, False)
    return n


@subroutine
def _agree(elapsed: int, interval: int) -> bool:
    return abs(elapsed - interval) <= (interval >> TOLERANCE_SHIFT) + SLACK


@subroutine
def _group(kind: int, interval: int) -> int:
    octave = highest_bit(interval)
    return kind * PER_KIND + 2 * octave + ((2 * (interval - (1 << octave))) >> octave)


# What the cache holds


@subroutine
def _settle(p: Plan, n: int, held: bool) -> None:
    """After a reference of `n` blocks: moves the shadow LRU on, and evicts if the cache has grown."""
    s, v = p.s, p.v[0]
    v.recent += n
    state = s.state[0]
    while v.recent > p.capacity:
        record = s.seg[state.edge]
        since = max(state.edge_step, record.last)
        beyond = record.last + record.n - since
        if beyond <= 0:
            state.edge = record.newer
            continue
        step = min(beyond, v.recent - p.capacity)
        state.edge_step = since + step
        v.recent -= step
    if not held:
        v.held += n
        if v.held > p.capacity:
            _evict(p, v.held - p.capacity)


@subroutine
def _evict(p: Plan, n: int) -> None:
    """Evicts `n` blocks that the leader does not hold."""
    s, v = p.s, p.v[0]
    v.evictions += n
    v.held -= n
    while n > 0:
        if v.led_by_lru:
            while not s.seg[s.state[0].hand].held:
                s.state[0].hand = s.seg[s.state[0].hand].newer
            segment = s.state[0].hand
            down = False
        else:
            segment = s.queue[LEFT].head
            down = s.seg[segment].down != 0
        part = min(n, s.seg[segment].n)
        segment = end_piece(s, segment, down, part)
        s.seg[segment].held = 0
        if s.seg[segment].queue == LEFT:
            leave(s, segment)
            s.state[0].emptied = -1
            forget(p, segment, down)
        n -= part


@subroutine
def _look(p: Plan) -> None:
    """Once a round: who leads, and what a block that was seen once is worth."""
    v = p.v[0]
    if v.lead >= p.bound:
        v.led_by_lru = 1
    elif v.lead <= -p.bound:
        v.led_by_lru = 0
    weigh_once(p)
    if v.step & (FADE_ROUNDS * ROUND - 1) == 0:
        for octave in range(p.reuses.size):
            p.reuses[octave] >>= 1
        v.once >>= 1


@lean_kernel
def _held_blocks(p: Plan, blocks: Ids) -> None:
    """Fills `blocks`, least recently referenced first."""
    found = 0
    segment = p.s.state[0].oldest
    while segment >= 0:
        record = p.s.seg[segment]
        if record.held:
            for offset in range(record.n):
                blocks[found] = record.lo + offset
                found += 1
        segment = record.newer
