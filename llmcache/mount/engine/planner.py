"""Turns the arbitration of `llmcache.cache` into pins and windows for each space, and chooses the extents to evict.

Planning runs with the engine's lock held, at every change: opens, closes, new periods, a new limit.

`choose_victims` evicts in this order: single pages beyond their reserve; extents of files that do not loop;
extents that are no longer used; extents of a loop that its readers have passed, oldest touch first; extents fetched ahead of
a reader that never came; the reserves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmcache.cache.arbitration import (
    HOT_SHARE,
    ROWS_RESERVE_BYTES,
    Loop,
    Settled,
    Share,
    cap_pins,
    reserve_bytes,
    settle,
    share_budget,
)
from llmcache.cache.loops import CURSOR_LIFE_NS
from llmcache.mount.engine.space import LOADING, PINNED, SETTLED_PASSES, SINGLE, LoopSpace

if TYPE_CHECKING:
    from llmcache.cache.steering import Steering
    from llmcache.mount.backends.base import PinStore
    from llmcache.mount.backends.holders import ArenaPinStore
    from llmcache.mount.engine.state import CacheState


UNLIMITED = 1 << 62
IDLE_PERIODS = 10
IDLE_NS = 30_000_000_000
SEEN_NS, SEEN_SHARE = 200_000_000, 4  # a cursor is a reader's if touched in this time, or in a quarter of a pass
# Cursors that stay apart this long are separate readers. One client alone needs longer: when it wraps round, it looks like
# two readers for SEEN_NS.
APART_NS, ALONE_APART_NS = 300_000_000, 2_000_000_000
STRAYS_MIN = 3  # readers that have fallen out of the convoy, after which the window is widened
CONVOY_STEP_NS = 3_000_000_000  # time for a wider window to bring readers together, before it is widened again
CONVOY_MAX = 3
CONVOY_LIFE_NS = 60_000_000_000  # time after which the window is narrowed by a step


class Planner:
    """Plans pins and windows of a mount in mode steer or inplace."""

    core: Steering | None = None

    def __init__(self, state: CacheState, holder: PinStore) -> None:
        self.state = state
        self.holder = holder
        self.pinnable_bytes = UNLIMITED  # lower for a while after the kernel has refused a lock

    def plan(self) -> None:
        """Bring pins and windows in line with the limit and the loops. Lock held."""
        spaces = [
            space for space in self.state.spaces.values() if space.looping and (space.loop_bytes or space.pinned_bytes)
        ]
        now_ns = time.monotonic_ns()
        loops = [
            Loop(
                space.key,
                space.loop_bytes,
                space.learner.period,
                self._active(space, now_ns),
                space.convoy,
                space.user_pinned,
                self.state.least_window_bytes,
            )
            for space in spaces
            if space.loop_bytes
            and not space.left
            and (space.user_pinned or space.warm or self.state.opens_of(space) or self.holder.pinned(space))
        ]
        budget_bytes = max(0, self.state.limit_bytes - self._reserve())
        shares = share_budget(budget_bytes, loops)
        planned_bytes = sum(share.pinned_bytes + share.window_bytes for share in shares.values())
        self.state.expert_cache.room_bytes = budget_bytes - planned_bytes
        # Windows may exceed the budget by the allowance; pins may not, and the kernel may lock less.
        shares = cap_pins(shares, min(self.pinnable_bytes, self.state.pin_limit_bytes))
        ranked = sorted(spaces, key=lambda space: shares.get(space.key, Share(0, 0)).pinned_bytes)
        for space in ranked:  # spaces that lose pins come first, because the others need their room
            self._apply(space, shares.get(space.key, Share(0, 0)))

    def watch(self, space: LoopSpace, now_ns: int, *, in_place: bool) -> bool:
        """Expire cursors of readers that have stopped, and adapt the window to readers that drift apart (a convoy).

        The window is widened step by step while readers drift apart, and narrowed again once they have stayed together.
        Return True if a new plan is due. `in_place`: the first reader never waits for the last one, because the kernel
        serves its faults, so the window is widened at once. Lock held.
        """
        if not (space.cursors.live or space.cursors.laggards or space.convoy):  # true of most of thousands of files
            space.together_ns = now_ns
            return False
        space.cursors.expire(now_ns - CURSOR_LIFE_NS)
        seen_ns = SEEN_NS if space.learner.period is None else min(SEEN_NS, space.learner.period // SEEN_SHARE)
        if not space.looping or space.cursors.moving(now_ns - seen_ns) < 2:
            space.together_ns = now_ns
        # Threads of one client may look like several readers for a moment, and miss extents that another has read and left.
        several = self.state.programs_of(space) > 1
        most, apart_ns = (CONVOY_MAX, APART_NS) if several else (1, ALONE_APART_NS)
        fall_behind = several and space.learner.passes >= SETTLED_PASSES and space.cursors.laggards >= STRAYS_MIN
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
        space.convoy = steps
        self.state.references.record_event("convoy", space.key, space.convoy)
        return True

    def _active(self, space: LoopSpace, now_ns: int) -> bool:
        if space.user_pinned or space.warm:
            return True  # the user requested it
        if not self.state.opens_of(space):
            return False
        if PINNED in space.status and space.status.count(PINNED) * space.extent_bytes >= space.loop_bytes:
            return True  # pinned whole: touches of it are not observed
        return now_ns - space.last_ns < max(IDLE_NS, IDLE_PERIODS * (space.learner.period or 0))

    def _reserve(self) -> int:
        """Return the bytes reserved for hot pages, and for rows if any are read by pages."""
        hot = sum(space.accounted_bytes[extent] for space in self.state.spaces.values() for extent in space.hot)
        has_rows = any(SINGLE in space.status for space in self.state.spaces.values())
        return reserve_bytes(self.state.limit_bytes, hot, has_rows)

    def _apply(self, space: LoopSpace, share: Share) -> None:
        unused, thin, by_rank = space.use.unused, space.thin, zip(space.order.extent_at, space.status, strict=True)
        candidates = [extent for extent, state in by_rank if state != SINGLE and not (unused[extent] or thin[extent])]
        stale = [extent for extent in range(space.count) if space.wanted[extent] and (unused[extent] or thin[extent])]
        for extent in stale:
            space.wanted[extent] = 0
        whole = share.pinned_bytes >= space.loop_bytes
        settled = settle(candidates, space.wanted, share.pinned_bytes, space.extent_bytes, whole)
        set_window(space, share, settled)
        space.learner.expect(settled.extents - settled.pinned)
        if unpinned := stale + settled.unpinned:
            self.holder.release(space, unpinned)
            self.state.room.notify()
        self.holder.pin_ready(space)


class ArenaPlanner(Planner):
    """Plans windows only, from the deterministic core's plan of pins (mode arena)."""

    core: Steering

    def __init__(self, state: CacheState, holder: ArenaPinStore) -> None:
        super().__init__(state, holder)
        self.core = holder.core

    def plan(self) -> None:
        """Bring windows in line with the core's plan. Lock held."""
        free_bytes = self.state.limit_bytes - self._reserve()
        for key, core_space in self.core.spaces.items():
            if core_space.learner.looping:
                set_window(self.state.spaces[key], core_space.share, core_space.settled)
                free_bytes -= core_space.share.pinned_bytes + core_space.share.window_bytes
        self.state.expert_cache.room_bytes = free_bytes


def set_window(space: LoopSpace, share: Share, settled: Settled) -> None:
    """Set how far loaders run ahead of the readers of `space`, and the distance within which readers are a convoy."""
    space.window_bytes = share.window_bytes
    streamed = max(1, settled.extents - settled.pinned)
    kept = max(2, share.window_bytes // 2 // space.extent_bytes)
    space.cursors.near = min(space.cursors.reach, kept * settled.extents // streamed) if settled.extents else 1
    space.cursors.step = 3 * -(-settled.extents // streamed)


LAG_NS = 3_000_000  # other threads of a reader may still read from an extent that was touched less than this ago
LAST_LAG_NS = 10_000_000  # the same, if the most recently touched extents are evicted first
ABANDONED_NS = 1_000_000_000  # a ready extent may be evicted if no reader has touched it for this time
BATCH_BYTES = 32 << 20

HEADROOM_EXTENTS = 4

Victim = tuple[LoopSpace, int, int, int, int]


def choose_victims(state: CacheState, now_ns: int) -> list[Victim]:
    """Return (space, node, offset, length, extent) to evict now, at most about BATCH_BYTES."""
    if (excess := excess_bytes(state)) <= 0:
        return []  # without sorting all spaces
    victims: list[Victim] = []
    chosen: set[tuple[str, int]] = set()
    for space, extent in _in_order(state, now_ns):
        if excess <= 0 or len(victims) * space.extent_bytes > BATCH_BYTES:
            break
        if (space.key, extent) in chosen or space.state(extent) in (LOADING, PINNED):
            continue
        member = space.member_of(extent)
        if member.node is None:
            continue
        chosen.add((space.key, extent))
        excess -= space.accounted_bytes[extent]
        victims.append((space, member.node, space.offset_of(member, extent), space.length_of(member, extent), extent))
    return victims


def excess_bytes(state: CacheState) -> int:
    """Return the bytes to evict: the excess over the limit, plus headroom when loaders or a warm-up have work waiting.

    Nothing is evicted until half of the headroom is used: evicting several extents at a time costs less than one by one.
    """
    loops = [space.extent_bytes for space in state.spaces.values() if space.cursors.live]
    extent = max(loops, default=0)
    wanted = max(HEADROOM_EXTENTS * extent, state.asked_bytes)
    headroom = min(wanted, max(state.limit_bytes // 8, extent, state.asked_bytes))
    excess = state.used_bytes + headroom - state.room_bytes
    return excess if state.asked_bytes or excess > headroom // 2 else 0


def _in_order(state: CacheState, now_ns: int) -> Iterator[tuple[LoopSpace, int]]:
    spaces = sorted(state.spaces.values(), key=lambda space: (state.opens_of(space) > 0, space.last_ns))
    yield from _rows(spaces, ROWS_RESERVE_BYTES)
    for space in spaces:
        if not space.looping:
            yield from _touched(space, now_ns)
        elif 1 in space.use.unused:
            yield from ((space, extent) for extent in space.touched if space.use.unused[extent])
    yield from _rows([space for space in spaces if space.written], 0)
    for space in spaces:
        if space.looping:
            is_last_first = state.opportunistic_bytes and not space.left and space.learner.passes
            yield from _touched_last(space, now_ns) if is_last_first else _touched(space, now_ns)
    for space in spaces:
        yield from ((space, extent) for extent, since in space.ready.items() if now_ns - since > ABANDONED_NS)
    yield from _hot(spaces, state.limit_bytes // HOT_SHARE)
    yield from _rows(spaces, 0)


def _touched(space: LoopSpace, now_ns: int) -> Iterator[tuple[LoopSpace, int]]:
    for extent, since in space.touched.items():
        if now_ns - since >= LAG_NS:
            yield space, extent


def _touched_last(space: LoopSpace, now_ns: int) -> Iterator[tuple[LoopSpace, int]]:
    """Yield the most recently touched extents first, so that the others stay, and are hits in the next pass."""
    for extent, since in reversed(list(space.touched.items())):
        if now_ns - since >= LAST_LAG_NS:
            yield space, extent


def _rows(spaces: list[LoopSpace], reserve_bytes: int) -> Iterator[tuple[LoopSpace, int]]:
    """Yield single-page extents that are not hot, least recently read first, down to `reserve_bytes` for each space.

    Pages of written files have no reserve, and are yielded after the rows of other spaces.
    """
    for space in spaces:
        if space.written and reserve_bytes:
            continue
        rows = [extent for extent in space.partial_extents if extent not in space.hot]
        over = sum(space.accounted_bytes[extent] for extent in rows) - reserve_bytes
        for extent in rows:
            if over <= 0:
                break
            over -= space.accounted_bytes[extent]
            yield space, extent


def _hot(spaces: list[LoopSpace], reserve_bytes: int) -> Iterator[tuple[LoopSpace, int]]:
    """Yield hot extents beyond their share of the budget, least recently read first; files without a client come first."""
    kept = sum(space.accounted_bytes[extent] for space in spaces for extent in space.hot)
    for space in spaces:
        for extent in [extent for extent in space.partial_extents if extent in space.hot]:
            if kept <= reserve_bytes:
                return
            kept -= space.accounted_bytes[extent]
            yield space, extent
