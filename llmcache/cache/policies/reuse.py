"""The plan of llmcache's policy: what is worth keeping by measured reuse, as if the plan ruled alone.

Blocks of a kind and of similar interval form a group, in order of reference; blocks seen once belong to the run of
their stream. All functions work on runs that share whatever matters; `llmcache.py` cuts them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import subroutine
from llmcache.cache.policies.segments import (
    Segments,
    be_newest,
    end_piece,
    extend_tail,
    join,
    join_merged,
    leave,
    make,
    make_segments,
    release,
    split,
)
from llmcache.cache.policies.streams import STREAMS, Streams, make_streams

# Queues: for each kind of reuse one per half octave of interval; what the plan gave up (still held, and gone); runs.
REGULAR, IRREGULAR, HOT = 0, 1, 2
PER_KIND = 2 * 64
GROUPS = 3 * PER_KIND
LEFT = GROUPS
GONE = GROUPS + 1
RUNS = GROUPS + 2

STALENESS = 1024  # a choice of victims serves for capacity / 1024 evictions: a thousandth of the cache at most
ROUND = 1024  # steps between looks at the statistics
REMEMBERED = 8  # capacities of blocks that are remembered after they are gone: intervals up to that are measured
LEAST_REMEMBERED = 1 << 15
LEAST_EVIDENCE = 8  # reuses that make a rate

FIELDS = (
    "step",  # references so far, repeats left out
    "previous",  # last block referenced
    "planned",  # blocks that the plan keeps
    "held",  # blocks that the cache holds
    "recent",  # blocks in the shadow LRU
    "gone",  # blocks remembered that neither keeps
    "evictions",
    "victims",  # queue that gives up blocks, from its tail or its head, until a step (-1: choose anew)
    "from_tail",
    "chosen_until",
    "oldest_run",  # chain of the runs that keep something, and of unused ones
    "newest_run",
    "free_run",
    "runs",  # queues ever used
    "groups",  # groups that keep something
    "once",  # blocks seen for the first time, fading
    "patience",  # steps to wait for a first reuse (-1: not at all), and steps of waiting that one costs
    "worth",
    "lead",  # hits of the shadow LRU beyond those of the plan, within half a capacity either way
    "led_by_lru",
)
STATE = np.dtype([(name, "i8") for name in FIELDS])


class Plan(NamedTuple):
    """All state of the policy."""

    s: Segments
    t: Streams
    v: NDArray[Any]  # one record of STATE: `FIELDS`
    groups: NDArray[np.int64]  # the groups that hold something, in no order
    reuses: NDArray[np.int64]  # first reuses by octave of the interval
    capacity: int
    remembered: int  # blocks, in GONE at most
    bound: int  # hits by which a shadow must lead to take over: half a capacity, about what a change refetches
    stale: int  # evictions that one choice of victims serves


def make_plan(capacity: int, blocks: int) -> Plan:
    """Returns the state of an empty cache."""
    remembered = max(REMEMBERED * capacity, LEAST_REMEMBERED)
    records = min(2 * capacity + remembered, blocks) + STREAMS
    state = np.zeros(1, STATE)
    for name in ("previous", "victims", "chosen_until", "oldest_run", "newest_run", "free_run", "patience"):
        state[name] = -1
    state["runs"] = RUNS
    bound = max(1, capacity // 2)
    state["lead"] = -bound
    queues = RUNS + min(capacity, blocks) + STREAMS
    return Plan(
        make_segments(blocks, records, queues),
        make_streams(),
        state,
        np.zeros(GROUPS, np.int64),
        np.zeros(64, np.int64),
        capacity,
        remembered,
        bound,
        1 << max(0, min(ROUND, capacity // STALENESS).bit_length() - 1),
    )


@subroutine
def take(p: Plan, segment: int, block: int, n: int, in_lru: bool) -> None:
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


@subroutine
def put(p: Plan, queue: int, stream: int, block: int, n: int, interval: int, planned: bool) -> None:
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
                    choose(p)
                part = min(part, v.chosen_until - v.step)
                if v.from_tail and v.victims == queue:
                    # Each block takes the place of the one before it: only the last one stays.
                    _give_up(p, 1)
                    if v.chosen_until < 0:
                        part = 1  # it was the last one there: choose anew
                    if part > 1:
                        passing = make(p.s, block + done, part - 1, v.step, interval)
                        be_newest(p.s, passing)
                        forget(p, passing, False)
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


@subroutine
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


@subroutine
def _join(p: Plan, queue: int, segment: int) -> None:
    v = p.v[0]
    if join(p.s, queue, segment) and queue < GROUPS:
        p.groups[v.groups] = queue
        p.s.queue[queue].place = v.groups
        v.groups += 1


@subroutine
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


@subroutine
def choose(p: Plan) -> None:
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


@subroutine
def _give_up(p: Plan, n: int) -> int:
    """Takes up to `n` blocks of the chosen queue out of the plan; returns how many."""
    s, v = p.s, p.v[0]
    line = s.queue[v.victims]
    down = v.from_tail != 0
    segment = np.int64(line.tail if down else line.head)
    n = min(n, s.seg[segment].n)
    segment = end_piece(s, segment, down, n)
    _leave(p, segment)
    if not down and line.head >= 0 and not _goes_on(s, segment, line.head):
        v.chosen_until = -1  # what comes behind it may have another age
    forget(p, segment, down)
    v.planned -= n
    return n


@subroutine
def _goes_on(s: Segments, first: int, second: int) -> bool:
    """Returns whether two segments could be one: blocks and steps go on, the interval is the same."""
    a, b = s.seg[first], s.seg[second]
    return a.lo + a.n == b.lo and a.last + a.n == b.last and a.interval == b.interval


@subroutine
def forget(p: Plan, segment: int, down: bool) -> None:
    """A segment that is in no queue is out of the plan: remembered, within bounds, whether or not the cache holds it."""
    s, v = p.s, p.v[0]
    if s.seg[segment].held:
        join_merged(s, LEFT, segment, down)
        return
    v.gone += s.seg[segment].n
    join_merged(s, GONE, segment, down)
    while v.gone > p.remembered:
        oldest = np.int64(s.queue[GONE].head)
        n = min(s.seg[oldest].n, v.gone - p.remembered)
        oldest = end_piece(s, oldest, s.seg[oldest].down != 0, n)
        if s.seg[oldest].last >= s.state[0].edge_step:
            v.recent -= n
        v.gone -= n
        leave(s, oldest)
        s.state[0].emptied = -1
        release(s, oldest)


@subroutine
def weigh_once(p: Plan) -> None:
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
