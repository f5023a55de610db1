"""The block cache of the simulated llmcache: it keeps the blocks with the soonest expected reuse, guarded by LRU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llmcache.arrays import Bytes, Flags, Int64s
from llmcache.cache.loops import UNUSED_GAPS
from llmcache.cache.policies.base import Policy, lean_kernel, subroutine
from llmcache.cache.policies.structures import (
    Links,
    back,
    front,
    is_empty,
    is_linked,
    move_to_front,
    new_links,
    push_front,
    remove,
)
from llmcache.cache.shadow import Guard
from llmcache.units import BLOCK_BYTES

AGREE_SHIFT, AGREE_STEPS = 3, 8  # intervals agree if they differ by at most an eighth and 8 steps
STREAM_STEPS = 16  # a block that follows its predecessor within this number of steps belongs to the same stream
NEAR_SHIFT = 4  # a loop is about to reach a block if it is less than a sixteenth of its length before the block
STREAM_SHIFT = 7  # a 128th of the cache is for streamed blocks
GIVEN_UP = 4  # usual intervals after which a block is no longer expected
GUARD_SHARE = 8  # the plan and LRU switch roles after an excess of capacity / GUARD_SHARE misses
LEAST_EXCESS = 256  # blocks; a smaller excess is noise
WINDOW_SHARE, LEAST_WINDOW = 16, 64  # references per window of the guard: capacity / WINDOW_SHARE, at least LEAST_WINDOW

# Groups: for each kind of block, one per half octave of the usual interval; then runs of blocks referenced once.
REGULAR, IRREGULAR, HOT = 0, 1, 2
_PER_KIND = 2 * 64
FIRST_RUN = 3 * _PER_KIND
RUNS = 256
GROUPS = FIRST_RUN + RUNS

HELD, PLANNED, RECENT = 1, 2, 4  # in the cache; in the plan; in LRU
NEVER = -1

# Indices into `numbers`: references so far, the block of the last one, blocks in the cache, in the plan and in LRU,
# nonempty groups, runs begun, and misses of the plan and of LRU in this window.
STEP, PREVIOUS, IN_CACHE, IN_PLAN, IN_LRU, ACTIVE, BEGUN, PLAN_MISSES, LRU_MISSES = range(9)


class ReuseState(NamedTuple):
    """The state of the cache, of the plan and of LRU.

    `plan`: the blocks of each group, latest reference first (head: blocks + group), and the blocks in the cache but not in
    the plan (head: blocks + GROUPS). `recent`: the blocks in LRU, and those in the cache but not in LRU. `last`: the step of
    each block's last reference. `active`: the nonempty groups, and `place`, the index of each group in it.
    """

    plan: Links
    recent: Links
    last: Int64s
    latest: Int64s
    usual: Int64s
    group: Int64s
    flags: Bytes
    active: Int64s
    place: Int64s
    numbers: Int64s


class Reuse(Policy):
    """Keep the blocks with the soonest expected reference; of a loop that does not fit, keep a part and stream the rest.

        get(b): compare the interval since the last reference to b with the usual one of b and with the latest one of b - 1:
                    b is REGULAR (it agrees with the usual one), IRREGULAR (only with that of b - 1), or HOT
                choose a victim: if there are blocks that were referenced once, the latest one of the oldest run of these,
                    or an overdue block that is older; else the block that is expected last: of the blocks of a loop the
                    most recently read one, of HOT the least recently read one
                if that is b, stream it: it is evicted as soon as a 128th of the cache has been streamed

    The usual interval is the latest one that agreed with it, else the mean of the last two; a pause does not change it. A
    block is overdue if its interval can no longer agree, unless blocks a little before it in a REGULAR loop were read.

    This plan is simulated as a cache of its own, and so is LRU. The actual cache evicts blocks that the deciding one of the
    two does not contain: LRU decides while the plan misses more. `Guard` and UNUSED_GAPS are those of mounts. 49 bytes per
    block; a miss compares the nonempty groups, usually 10 to 30.

    Source: io_caching section 4.1 (scans are evicted first, loops by period, hot set by LRU); two policies by their
    shadows: Subramanian, Smaragdakis, Loh, Adaptive Caches, MICRO 2006.
    """

    name = "reuse"
    title = "reuse"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._state = ReuseState(
            plan=new_links(blocks, GROUPS + 1),
            recent=new_links(blocks, 2),
            last=np.full(blocks, NEVER, np.int64),
            latest=np.zeros(blocks, np.int64),
            usual=np.zeros(blocks, np.int64),
            group=np.zeros(blocks, np.int64),
            flags=np.zeros(blocks, np.uint8),
            active=np.zeros(GROUPS, np.int64),
            place=np.zeros(GROUPS, np.int64),
            numbers=np.zeros(9, np.int64),
        )
        self._state.numbers[PREVIOUS] = NEVER
        self._guard = Guard(max(LEAST_EXCESS, capacity // GUARD_SHARE) * BLOCK_BYTES)
        self._window = max(LEAST_WINDOW, capacity // WINDOW_SHARE)
        self._window_ends = self._window

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        numbers, run, offset = self._state.numbers, 0, 0
        while run < len(first):
            steering = self._guard.steering
            run, offset = _reuse(self._state, self.capacity, steering, self._window_ends, first, count, hits, run, offset)
            if numbers[STEP] == self._window_ends:
                missed = numbers[[PLAN_MISSES, LRU_MISSES]] * BLOCK_BYTES
                self._guard.judge(*missed.tolist())
                numbers[[PLAN_MISSES, LRU_MISSES]] = 0
                self._window_ends += self._window

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        _fit(self._state, capacity, self._guard.steering)

    def _resident(self) -> Flags:
        return (self._state.flags & HELD) != 0


@lean_kernel
def _reuse(
    state: ReuseState,
    capacity: int,
    steering: bool,
    window_ends: int,
    first: Int64s,
    count: Int64s,
    hits: Int64s,
    run: int,
    offset: int,
) -> tuple[int, int]:
    flags, numbers = state.flags, state.numbers
    while run < len(first):
        while offset < count[run]:
            if numbers[STEP] == window_ends:
                return run, offset
            block = first[run] + offset
            offset += 1
            if block == numbers[PREVIOUS]:  # a repeated reference
                hits[run] += 1
                continue
            numbers[PREVIOUS] = block
            numbers[STEP] += 1
            _touch_lru(state, capacity, block)
            _touch_plan(state, _room(capacity), block)
            if flags[block] & HELD:
                hits[run] += 1
                continue
            if numbers[IN_CACHE] == capacity:
                _evict(state, steering)
            flags[block] |= HELD
            numbers[IN_CACHE] += 1
            if not flags[block] & PLANNED:
                push_front(state.plan, len(flags) + GROUPS, block)
        offset = 0
        run += 1
    return run, 0


@lean_kernel
def _fit(state: ReuseState, capacity: int, steering: bool) -> None:
    numbers = state.numbers
    while numbers[IN_LRU] > capacity:
        _drop_oldest(state)
    while numbers[IN_PLAN] > _room(capacity):
        _unplan(state, _victim(state, NEVER, 0))
    while numbers[IN_CACHE] > capacity:
        _evict(state, steering)


# The cache


@subroutine
def _room(capacity: int) -> int:
    return capacity - max(1, capacity >> STREAM_SHIFT)


@subroutine
def _evict(state: ReuseState, steering: bool) -> None:
    blocks, flags = len(state.flags), state.flags
    block = back(state.plan, blocks + GROUPS) if steering else back(state.recent, blocks + 1)
    if not flags[block] & PLANNED:
        remove(state.plan, block)
    if not flags[block] & RECENT:
        remove(state.recent, block)
    flags[block] &= ~HELD & 0xFF
    state.numbers[IN_CACHE] -= 1


# LRU


@subroutine
def _touch_lru(state: ReuseState, capacity: int, block: int) -> None:
    recent, flags, numbers = state.recent, state.flags, state.numbers
    if flags[block] & RECENT:
        move_to_front(recent, len(flags), block)
        return
    if is_linked(recent, block):
        remove(recent, block)
    push_front(recent, len(flags), block)
    flags[block] |= RECENT
    numbers[IN_LRU] += 1
    numbers[LRU_MISSES] += 1
    if numbers[IN_LRU] > capacity:
        _drop_oldest(state)


@subroutine
def _drop_oldest(state: ReuseState) -> None:
    recent, flags = state.recent, state.flags
    block = back(recent, len(flags))
    remove(recent, block)
    flags[block] &= ~RECENT & 0xFF
    state.numbers[IN_LRU] -= 1
    if flags[block] & HELD:
        push_front(recent, len(flags) + 1, block)


# The plan


@subroutine
def _touch_plan(state: ReuseState, room: int, block: int) -> None:
    flags, numbers = state.flags, state.numbers
    group = _classify(state, block)
    state.last[block] = numbers[STEP]
    planned = flags[block] & PLANNED != 0
    if planned:
        _leave(state, block)
    state.group[block] = group
    if not planned:
        numbers[PLAN_MISSES] += 1
        if numbers[IN_PLAN] >= room:
            victim = _victim(state, block, group) if room else block
            if victim == block:
                return
            _unplan(state, victim)
        if is_linked(state.plan, block):
            remove(state.plan, block)
    _join(state, block, group)


@subroutine
def _classify(state: ReuseState, block: int) -> int:
    last, latest, numbers = state.last, state.latest, state.numbers
    step = numbers[STEP]
    follows = block > 0 and last[block - 1] != NEVER and step - last[block - 1] <= STREAM_STEPS
    if last[block] == NEVER:
        if follows and state.group[block - 1] >= FIRST_RUN:
            return int(state.group[block - 1])
        numbers[BEGUN] += 1
        return int(FIRST_RUN + numbers[BEGUN] % RUNS)
    interval, before, usual = step - last[block], latest[block], state.usual[block]
    alike = follows and _agree(interval, latest[block - 1])
    if usual == 0:
        kind, usual = REGULAR if alike else HOT, interval
    elif _agree(interval, usual):
        kind, usual = REGULAR, interval
    else:
        kind = IRREGULAR if alike else HOT
        if interval <= UNUSED_GAPS * usual or before > UNUSED_GAPS * usual:
            usual = (before + interval) >> 1
    latest[block], state.usual[block] = interval, usual
    return kind * _PER_KIND + _half_octave(usual)


@subroutine
def _agree(interval: int, other: int) -> bool:
    return abs(interval - other) <= (other >> AGREE_SHIFT) + AGREE_STEPS


@subroutine
def _half_octave(interval: int) -> int:
    bit = 0
    for half in (32, 16, 8, 4, 2, 1):  # the highest bit set
        if interval >> (bit + half):
            bit += half
    return 2 * bit + ((interval >> (bit - 1)) & 1 if bit else 0)


@subroutine
def _victim(state: ReuseState, newcomer: int, group: int) -> int:
    """Return the block that the plan drops for `newcomer`, of `group`; the newcomer itself if it is expected last."""
    blocks, last, usual, step = len(state.flags), state.last, state.usual, state.numbers[STEP]
    best = run = stale = NEVER
    run_age = stale_age = 0
    furthest = -1 << 62
    for index in range(state.numbers[ACTIVE]):
        active = state.active[index]
        block = back(state.plan, blocks + active)
        age = step - last[block]
        if active >= FIRST_RUN:
            if age > run_age:
                run, run_age = active, age
            continue
        overdue = _is_overdue(state, active, block, age)
        if overdue and age > stale_age:
            stale, stale_age = block, age
        if active >= HOT * _PER_KIND:
            away = max(age, usual[block])
        elif overdue:
            away = age
        else:
            block = front(state.plan, blocks + active)
            away = last[block] + usual[block] - step
        if away > furthest:
            best, furthest = block, away
    if run != NEVER and run_age >= stale_age:
        return newcomer if run == group else front(state.plan, blocks + run)
    if run != NEVER:
        return stale
    return newcomer if newcomer != NEVER and group < HOT * _PER_KIND and usual[newcomer] >= furthest else best


@subroutine
def _is_overdue(state: ReuseState, group: int, block: int, age: int) -> bool:
    last, usual = state.last, state.usual[block]
    if age > GIVEN_UP * usual + AGREE_STEPS:
        return True
    if group >= IRREGULAR * _PER_KIND or age <= usual + (usual >> AGREE_SHIFT) + AGREE_STEPS:
        return False
    distance = 1
    while distance <= min(usual >> NEAR_SHIFT, block):
        if last[block - distance] > last[block]:
            return False  # the loop is slower this time, and close to the block
        distance *= 2
    return True


@subroutine
def _join(state: ReuseState, block: int, group: int) -> None:
    head, numbers = len(state.flags) + group, state.numbers
    if is_empty(state.plan, head):
        state.place[group] = numbers[ACTIVE]
        state.active[numbers[ACTIVE]] = group
        numbers[ACTIVE] += 1
    push_front(state.plan, head, block)
    state.flags[block] |= PLANNED
    numbers[IN_PLAN] += 1


@subroutine
def _leave(state: ReuseState, block: int) -> None:
    group, numbers = state.group[block], state.numbers
    remove(state.plan, block)
    state.flags[block] &= ~PLANNED & 0xFF
    numbers[IN_PLAN] -= 1
    if is_empty(state.plan, len(state.flags) + group):
        numbers[ACTIVE] -= 1
        moved = state.active[numbers[ACTIVE]]
        state.active[state.place[group]] = moved
        state.place[moved] = state.place[group]


@subroutine
def _unplan(state: ReuseState, block: int) -> None:
    _leave(state, block)
    if state.flags[block] & HELD:
        push_front(state.plan, len(state.flags) + GROUPS, block)
