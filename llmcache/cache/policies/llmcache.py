"""llmcache's policy: keep what comes back soonest, judged by measured reuse, and never do much worse than LRU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import Ids, Policy, bare_kernel
from llmcache.cache.policies.segments import (
    Segments,
    be_newest,
    end_piece,
    extend_tail,
    find,
    highest_bit,
    join,
    join_merged,
    leave,
    make,
    make_segments,
    next_start,
    release,
    split,
)
from llmcache.cache.policies.streams import STREAMS, Streams, follow, make_streams

# Queues: for each kind of reuse one per half octave of interval; what the plan gave up (still held, and gone); runs.
REGULAR, IRREGULAR, HOT = 0, 1, 2
PER_KIND = 2 * 64
GROUPS = 3 * PER_KIND
LEFT = GROUPS
GONE = GROUPS + 1
RUNS = GROUPS + 2

STREAM_BLOCKS = 4  # a stream is sequential from its fourth block on: three in a row also happen by chance
TOLERANCE_SHIFT = 3  # two intervals agree within an eighth: two groups an octave cannot tell them apart anyway
SLACK = 8  # and within 8 steps: short intervals are disturbed by single references
STALENESS = 1024  # a choice of victims serves for capacity / 1024 evictions: a thousandth of the cache at most
ROUND = 1024  # steps between looks at the statistics
FADE_ROUNDS = 16  # after so many the statistics count half
REMEMBERED = 8  # capacities of blocks that are remembered after they are gone: intervals up to that are measured
LEAST_REMEMBERED = 1 << 15
LEAST_EVIDENCE = 8  # reuses that make a rate

STATE = np.dtype(
    [
        (name, "i8")
        for name in (
            "step", "previous", "planned", "held", "gone", "evictions", "victims", "from_tail", "chosen_until",
            "oldest_run", "newest_run", "free_run", "runs", "groups", "patience", "worth", "once",
            "recent", "lead", "led_by_lru",
        )
    ]
)  # fmt: skip


class Plan(NamedTuple):
    """All state of the policy."""

    s: Segments
    t: Streams
    v: NDArray[Any]  # one record of STATE
    groups: NDArray[np.int64]  # the groups that hold something, in no order
    reuses: NDArray[np.int64]  # first reuses by octave of the interval
    capacity: int
    remembered: int
    stale: int


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
        remembered = max(REMEMBERED * capacity, LEAST_REMEMBERED)
        records = min(2 * capacity + remembered, blocks) + STREAMS
        state = np.zeros(1, STATE)
        for name in ("previous", "victims", "chosen_until", "oldest_run", "newest_run", "free_run", "patience"):
            state[name] = -1
        state["runs"] = RUNS
        state["lead"] = -_evidence(capacity)
        queues = RUNS + min(capacity, blocks) + STREAMS
        self._plan = Plan(
            make_segments(blocks, records, queues),
            make_streams(),
            state,
            np.zeros(GROUPS, np.int64),
            np.zeros(64, np.int64),
            capacity,
            remembered,
            1 << max(0, min(ROUND, capacity // STALENESS).bit_length() - 1),
        )

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


def _evidence(capacity: int) -> int:
    return max(1, capacity // 2)


@bare_kernel
def _replay(p: Plan, first: Ids, count: Ids, hits: Ids) -> None:
    for run in range(first.size):
        hits[run] = _refer(p, first[run], count[run])


@bare_kernel
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


@bare_kernel
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
            _choose(p)
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
    held = record.held
    _take(p, segment, block, n, in_lru)
    change = n * (np.int64(in_lru) - np.int64(planned))
    bound = max(1, p.capacity // 2)
    v.lead = max(-bound, min(bound, v.lead + change))
    _put(p, _group(kind, interval), -1, block, n, interval, planned)
    _settle(p, n, held)
    return n, n if held else 0


@bare_kernel
def _refer_new(p: Plan, stream: int, block: int, n: int) -> int:
    """References blocks that are not remembered; returns how many."""
    v = p.v[0]
    n = min(n, max(p.stale, p.capacity - max(v.planned, v.held)))
    if v.planned >= p.capacity:
        if v.chosen_until <= v.step:
            _choose(p)
        n = min(n, v.chosen_until - v.step)
    v.once += n
    _put(p, p.t.row[stream].run, stream, block, n, -1, False)
    _settle(p, n, 0)
    return n


@bare_kernel
def _agree(elapsed: int, interval: int) -> bool:
    return abs(elapsed - interval) <= (interval >> TOLERANCE_SHIFT) + SLACK


@bare_kernel
def _group(kind: int, interval: int) -> int:
    octave = highest_bit(interval)
    return kind * PER_KIND + 2 * octave + ((2 * (interval - (1 << octave))) >> octave)


# The plan


@bare_kernel
def _take(p: Plan, segment: int, block: int, n: int, in_lru: bool) -> None:
    """Takes `n` blocks from `block` out of `segment`, wherever it is."""
    s, v = p.s, p.v[0]
    if s.seg[segment].lo < block:
        segment = split(s, segment, block)
    if s.seg[segment].n > n:
        split(s, segment, block + n)
    if s.seg[segment].queue == GONE:
        v.gone -= n
    if in_lru:
        v.recent -= n
    _leave(p, segment)
    release(s, segment)


@bare_kernel
def _put(p: Plan, queue: int, stream: int, block: int, n: int, interval: int, planned: bool) -> None:
    """Gives `n` referenced blocks their place in the plan: `queue`, or the run of `stream` when that is given (>= 0)."""
    v = p.v[0]
    done = 0
    while done < n:
        part = n - done
        if not planned:
            room = p.capacity - v.planned
            if room > 0:
                part = min(part, room)
            else:
                if v.chosen_until <= v.step:
                    _choose(p)
                part = min(part, v.chosen_until - v.step)
                if v.from_tail and v.victims == queue:
                    # Each block takes the place of the one before it: only the last one stays.
                    _give_up(p, 1)
                    if v.chosen_until < 0:
                        part = 1  # it was the last one there: choose anew
                    if part > 1:
                        passing = make(p.s, block + done, part - 1, v.step, interval)
                        be_newest(p.s, passing)
                        _forget(p, passing, False)
                        v.step += part - 1
                        done += part - 1
                        part = 1
                else:
                    part = _give_up(p, part)
        if stream >= 0:
            queue = _run_of(p, stream)
        if not extend_tail(p.s, queue, block + done, part, v.step, interval):
            segment = make(p.s, block + done, part, v.step, interval)
            be_newest(p.s, segment)
            _join(p, queue, segment)
        if not planned:
            v.planned += part
        v.step += part
        done += part


@bare_kernel
def _run_of(p: Plan, stream: int) -> int:
    """Returns the queue of what `stream` has read once, made if it has none."""
    v = p.v[0]
    run = p.t.row[stream].run
    if run >= 0:
        return run
    run = v.free_run
    if run >= 0:
        v.free_run = p.s.queue[run].after
    else:
        run = v.runs
        v.runs = run + 1
    line = p.s.queue[run]
    line.stream, line.before, line.after = stream, v.newest_run, -1
    if v.newest_run >= 0:
        p.s.queue[v.newest_run].after = run
    else:
        v.oldest_run = run
    v.newest_run = run
    p.t.row[stream].run = run
    return run


@bare_kernel
def _join(p: Plan, queue: int, segment: int) -> None:
    v = p.v[0]
    if join(p.s, queue, segment) and queue < GROUPS:
        p.groups[v.groups] = queue
        p.s.queue[queue].place = v.groups
        v.groups += 1


@bare_kernel
def _leave(p: Plan, segment: int) -> None:
    """Takes a segment out of its queue, and the queue out of the lists of those that hold something."""
    leave(p.s, segment)
    queue = p.s.state[0].emptied
    if queue < 0:
        return
    p.s.state[0].emptied = -1
    v, line = p.v[0], p.s.queue[queue]
    if queue == v.victims:
        v.chosen_until = -1
    if queue < GROUPS:
        v.groups -= 1
        moved = p.groups[v.groups]
        p.groups[line.place] = moved
        p.s.queue[moved].place = line.place
    elif queue >= RUNS:
        if line.before >= 0:
            p.s.queue[line.before].after = line.after
        else:
            v.oldest_run = line.after
        if line.after >= 0:
            p.s.queue[line.after].before = line.before
        else:
            v.newest_run = line.before
        if line.stream >= 0:
            p.t.row[line.stream].run = -1
        line.after = v.free_run
        v.free_run = queue


@bare_kernel
def _choose(p: Plan) -> None:
    """Chooses the queue, and its end, that gives up blocks next: what is needed last."""
    s, v = p.s, p.v[0]
    step = v.step
    best, from_tail, furthest = -1, 0, -(1 << 62)
    for index in range(v.groups):
        queue = p.groups[index]
        head = s.seg[s.queue[queue].head]
        age, interval = step - head.last, head.interval
        tail = 0
        if queue >= HOT * PER_KIND:
            away = max(interval, age)
        elif age > (2 if queue < PER_KIND else 3) * interval + STREAMS:
            away = age  # overdue by a whole period (two, where periods vary)
        else:
            late = s.seg[s.queue[queue].tail]
            away = late.last + late.n - 1 + late.interval - step
            tail = 1
        if away > furthest or (away == furthest and queue < best):
            best, from_tail, furthest = queue, tail, away
    if v.oldest_run >= 0:
        late = s.seg[s.queue[v.oldest_run].tail]
        age = step - (late.last + late.n - 1)
        if age > v.patience or v.worth >= furthest:
            best, from_tail = v.oldest_run, 1
    v.victims, v.from_tail = best, from_tail
    v.chosen_until = (step // p.stale + 1) * p.stale


@bare_kernel
def _give_up(p: Plan, n: int) -> int:
    """Takes up to `n` blocks of the chosen queue out of the plan; returns how many."""
    s, v = p.s, p.v[0]
    line = s.queue[v.victims]
    segment = line.tail if v.from_tail else line.head
    n = min(n, s.seg[segment].n)
    segment = end_piece(s, segment, v.from_tail, n)
    _leave(p, segment)
    if not v.from_tail and line.head >= 0 and not _goes_on(s, segment, line.head):
        v.chosen_until = -1  # what comes behind it may have another age
    _forget(p, segment, v.from_tail)
    v.planned -= n
    return n


@bare_kernel
def _goes_on(s: Segments, first: int, second: int) -> bool:
    """Returns whether two segments could be one: blocks and steps go on, the interval is the same."""
    a, b = s.seg[first], s.seg[second]
    return a.lo + a.n == b.lo and a.last + a.n == b.last and a.interval == b.interval


@bare_kernel
def _forget(p: Plan, segment: int, down: bool) -> None:
    """A segment that is in no queue is out of the plan: remembered, within bounds, whether or not the cache holds it."""
    s, v = p.s, p.v[0]
    if s.seg[segment].held:
        join_merged(s, LEFT, segment, down)
        return
    v.gone += s.seg[segment].n
    join_merged(s, GONE, segment, down)
    while v.gone > p.remembered:
        oldest = s.queue[GONE].head
        n = min(s.seg[oldest].n, v.gone - p.remembered)
        oldest = end_piece(s, oldest, s.seg[oldest].down, n)
        if s.seg[oldest].last >= s.state[0].edge_step:
            v.recent -= n
        v.gone -= n
        leave(s, oldest)
        s.state[0].emptied = -1
        release(s, oldest)


# What the cache holds


@bare_kernel
def _settle(p: Plan, n: int, held: int) -> None:
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


@bare_kernel
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
            _forget(p, segment, down)
        n -= part


@bare_kernel
def _look(p: Plan) -> None:
    """Once a round: who leads, and what a block that was seen once is worth."""
    v = p.v[0]
    bound = max(1, p.capacity // 2)
    if v.lead >= bound:
        v.led_by_lru = 1
    elif v.lead <= -bound:
        v.led_by_lru = 0
    _weigh_once(p)
    if v.step & (FADE_ROUNDS * ROUND - 1) == 0:
        for octave in range(p.reuses.size):
            p.reuses[octave] >>= 1
        v.once >>= 1


@bare_kernel
def _weigh_once(p: Plan) -> None:
    """Finds how long to wait for a first reuse: the horizon with the most reuses per step of waiting.

    `patience` is that horizon (-1: none pays), `worth` the steps of waiting that one reuse costs.
    """
    v = p.v[0]
    v.patience = -1
    waiting, reused, waited, best = v.once, 0, 0.0, 0.0
    if waiting <= STREAMS:
        return
    for octave in range(40):
        horizon = 1 << octave
        reused += p.reuses[octave]
        waited += waiting * (horizon - (horizon >> 1))
        waiting = max(0, waiting - p.reuses[octave])
        if reused > LEAST_EVIDENCE and reused > best * waited:
            best = reused / waited
            v.patience, v.worth = horizon, np.int64(1 / best)


@bare_kernel
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
