"""Carries out the plans of `llmcache.cache.arbitration`, and chooses the extents to evict, with the engine's lock held.

`choose_victims` evicts in this order: single pages beyond their reserve; extents of files that do not loop; extents that are
no longer used; extents of a loop that its readers have passed, oldest touch first; extents fetched ahead of a reader that
never came; the reserves.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from llmcache.cache.arbitration import HOT_SHARE, ROWS_RESERVE_BYTES, Limits, plan
from llmcache.cache.loops import CURSOR_LIFE_NS
from llmcache.mount.state.interfaces import PinStore
from llmcache.mount.state.space import LOADING, PINNED, LoopSpace
from llmcache.mount.state.state import CacheState

UNLIMITED = 1 << 62
IDLE_PERIODS = 10
SETTLED_PASSES = 1  # passes until misses count as readers that fall behind; earlier ones only show that the order is unknown
IDLE_NS = 30_000_000_000
SEEN_NS, SEEN_SHARE = 200_000_000, 4  # a cursor is a reader's if touched in this time, or in a quarter of a pass
# Cursors that stay apart this long are separate readers. One client alone needs longer: when it wraps round, it looks like
# two readers for SEEN_NS.
APART_NS, ALONE_APART_NS = 300_000_000, 2_000_000_000
LAGGARDS_MIN = 3  # readers that have fallen out of the convoy, after which the window is widened
CONVOY_STEP_NS = 3_000_000_000  # time for a wider window to bring readers together, before it is widened again
CONVOY_MAX = 3
CONVOY_LIFE_NS = 60_000_000_000  # time after which the window is narrowed by a step


class Planner:
    """Carries out plans, which the steering makes in mode arena."""

    def __init__(self, state: CacheState, pin_store: PinStore) -> None:
        self.state = state
        self.pin_store = pin_store
        self.pinnable_bytes = UNLIMITED  # lower for a while after the kernel has refused a lock

    def plan(self) -> None:
        state, core = self.state, self.state.references.core
        if core is not None:
            state.expert_cache.room_bytes = core.experts_bytes
            for space in state.index.looping:
                space.follow_plan()
            return
        memory, now_ns = state.memory, time.monotonic_ns()
        competing = {
            space.key: self._active(space, now_ns)
            for space in state.index.looping
            if space.loop_bytes and not space.left and (space.open or space.pinned_bytes)
        }
        limits = Limits(
            memory.limit_bytes,
            min(self.pinnable_bytes, memory.pin_limit_bytes),
            memory.hot_bytes,
            bool(state.steering.with_single),
            state.least_window_bytes,
        )
        made = plan(state.index.looping, competing, limits)
        state.expert_cache.room_bytes = made.experts_bytes
        # Spaces that lose pins come first, because the others need their room.
        for space in sorted(state.index.looping, key=lambda space: made.spaces[space.key].pinned_bytes):
            space.adopt(made.spaces[space.key])
            space.follow_plan()
            if space.plan.unpin:
                self.pin_store.release(space, list(space.plan.unpin))
                state.room.notify()
            self.pin_store.pin_ready(space)

    def watch(self, space: LoopSpace, now_ns: int, *, in_place: bool) -> bool:
        """Expire cursors of stopped readers, and adapt the window to a convoy. Return True if a new plan is due.

        The caller holds the lock.

        `in_place`: the window widens at once, because the first reader never waits for the last one.
        """
        space.cursors.expire(now_ns - CURSOR_LIFE_NS)
        if not (space.cursors.live or space.cursors.laggards or space.convoy):
            del self.state.index.read[space]
            return False
        seen_ns = SEEN_NS if space.touches.period is None else min(SEEN_NS, space.touches.period // SEEN_SHARE)
        if not space.looping or space.cursors.moving(now_ns - seen_ns) < 2:
            space.together_ns = now_ns
        # Threads of one client may look like several readers for a moment, and miss extents that another has read and left.
        several = self.state.programs_of(space) > 1
        most, apart_ns = (CONVOY_MAX, APART_NS) if several else (1, ALONE_APART_NS)
        fall_behind = several and space.touches.passes >= SETTLED_PASSES and space.cursors.laggards >= LAGGARDS_MIN
        waited = now_ns - space.apart_ns > (CONVOY_STEP_NS if space.convoy else 0)
        if waited and (fall_behind or now_ns - space.together_ns > apart_ns):
            steps = most if in_place else min(most, space.convoy + 1)
        elif now_ns - space.apart_ns > CONVOY_LIFE_NS:
            steps = max(0, space.convoy - 1)
        else:
            return False
        space.cursors.laggards = 0
        space.together_ns = space.apart_ns = now_ns
        if steps == space.convoy:
            return False
        self.state.steering.convoy(space.key, steps)
        return True

    def _active(self, space: LoopSpace, now_ns: int) -> bool:
        if space.user_pinned or space.warm:
            return True  # the user requested it
        if not self.state.opens_of(space):
            return False
        if 0 < space.plan.extents <= space.status.count(PINNED):
            return True  # pinned whole: touches of it are not observed
        return now_ns - space.last_ns < max(IDLE_NS, IDLE_PERIODS * (space.touches.period or 0))


LAG_NS = 3_000_000  # other threads of a reader may still read from an extent that was touched less than this ago
LAST_LAG_NS = 10_000_000  # the same, if the most recently touched extents are evicted first
ABANDONED_NS = 1_000_000_000  # a ready extent may be evicted if no reader has touched it for this time
BATCH_BYTES = 32 << 20
HEADROOM_EXTENTS = 4

Victim = tuple[LoopSpace, int]
"""A space and one of its extents."""


def choose_victims(state: CacheState, now_ns: int) -> list[Victim]:
    """Return about BATCH_BYTES of extents to evict now; their files have a node."""
    if (excess := excess_bytes(state)) <= 0:
        return []
    victims: dict[Victim, None] = {}
    chosen_bytes = 0
    for space, extent in _in_order(state, now_ns):
        if excess <= 0 or chosen_bytes > BATCH_BYTES:
            break
        if (space, extent) in victims or space.state(extent) in (LOADING, PINNED):
            continue
        if space.member_of(extent).node is None:
            continue
        victims[space, extent] = None
        excess -= space.accounted_bytes[extent]
        chosen_bytes += space.extent_bytes
    return list(victims)


def excess_bytes(state: CacheState) -> int:
    """Return the bytes to evict, with headroom for waiting loaders.

    Nothing is evicted until half of the headroom is used: evicting several extents at a time costs less.
    """
    memory = state.memory
    extent = max((space.extent_bytes for space in state.index.read if space.cursors.live), default=0)
    wanted = max(HEADROOM_EXTENTS * extent, memory.warmup_bytes)
    headroom = min(wanted, max(memory.limit_bytes // 8, extent, memory.warmup_bytes))
    excess = memory.used_bytes + headroom - memory.room_bytes
    return excess if memory.warmup_bytes or excess > headroom // 2 else 0


def _in_order(state: CacheState, now_ns: int) -> Iterator[Victim]:
    index, memory = state.index, state.memory
    yield from _rows(index.many_partial, ROWS_RESERVE_BYTES)
    for space in index.touched:
        yield from _touched(space, now_ns)
    loops = sorted(index.looping, key=lambda space: (space.open, space.last_ns))
    for space in loops:
        if 1 in space.use.unused:
            yield from ((space, extent) for extent in space.touched if space.use.unused[extent])
    yield from _rows(index.written, 0)
    for space in loops:
        is_last_first = memory.opportunistic_bytes and not space.left and space.touches.passes
        yield from _touched_last(space, now_ns) if is_last_first else _touched(space, now_ns)
    for space in index.ready:
        yield from ((space, extent) for extent, since in space.ready.items() if now_ns - since > ABANDONED_NS)
    yield from _hot(index.partial, memory.hot_bytes - memory.limit_bytes // HOT_SHARE)
    yield from _rows(index.partial, 0)


def _touched(space: LoopSpace, now_ns: int) -> Iterator[Victim]:
    for extent, since in space.touched.items():
        if now_ns - since >= LAG_NS:
            yield space, extent


def _touched_last(space: LoopSpace, now_ns: int) -> Iterator[Victim]:
    """Yield the most recently touched extents first, so that the others are hits in the next pass."""
    for extent, since in reversed(space.touched.items()):
        if now_ns - since >= LAST_LAG_NS:
            yield space, extent


def _rows(spaces: Iterable[LoopSpace], reserve_bytes: int) -> Iterator[Victim]:
    for space in spaces:
        rows = [extent for extent in space.partial_extents if extent not in space.hot]
        over = sum(space.accounted_bytes[extent] for extent in rows) - reserve_bytes
        for extent in rows:
            if over <= 0:
                break
            over -= space.accounted_bytes[extent]
            yield space, extent


def _hot(spaces: Iterable[LoopSpace], excess_bytes: int) -> Iterator[Victim]:
    if excess_bytes <= 0:
        return
    for space in spaces:
        for extent in [extent for extent in space.partial_extents if extent in space.hot]:
            if excess_bytes <= 0:
                return
            excess_bytes -= space.accounted_bytes[extent]
            yield space, extent
