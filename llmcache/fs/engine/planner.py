"""Turns the arbitration of `llmcache.cache` into pins and windows for each group, and chooses the extents to evict.

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
from llmcache.fs.engine.group import LOADING, PINNED, SETTLED_PASSES, SINGLE, Group

if TYPE_CHECKING:
    from llmcache.cache.steering import Steering
    from llmcache.fs.backends.base import Holder
    from llmcache.fs.backends.holders import ArenaHolder
    from llmcache.fs.engine.state import CacheState


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

    def __init__(self, state: CacheState, holder: Holder) -> None:
        self.state = state
        self.holder = holder
        self.pinnable_bytes = UNLIMITED  # lower for a while after the kernel has refused a lock

    def plan(self) -> None:
        """Bring pins and windows in line with the limit and the loops. Lock held."""
        groups = [
            group for group in self.state.groups.values() if group.looping and (group.loop_bytes or group.pinned_bytes)
        ]
        now_ns = time.monotonic_ns()
        loops = [
            Loop(
                group.key,
                group.loop_bytes,
                group.learner.period,
                self._active(group, now_ns),
                group.convoy,
                group.first,
                self.state.least_window_bytes,
            )
            for group in groups
            if group.loop_bytes
            and not group.left
            and (group.first or group.warm or self.state.opens_of(group) or self.holder.pinned(group))
        ]
        budget_bytes = max(0, self.state.limit_bytes - self._reserve())
        shares = share_budget(budget_bytes, loops)
        planned_bytes = sum(share.pinned_bytes + share.window_bytes for share in shares.values())
        self.state.mixtures.room_bytes = budget_bytes - planned_bytes
        # Windows may exceed the budget by the allowance; pins may not, and the kernel may lock less.
        shares = cap_pins(shares, min(self.pinnable_bytes, self.state.pin_limit_bytes))
        ranked = sorted(groups, key=lambda group: shares.get(group.key, Share(0, 0)).pinned_bytes)
        for group in ranked:  # groups that lose pins come first, because the others need their room
            self._apply(group, shares.get(group.key, Share(0, 0)))

    def watch(self, group: Group, now_ns: int, *, in_place: bool) -> bool:
        """Expire cursors of readers that have stopped, and adapt the window to readers that drift apart (a convoy).

        The window is widened step by step while readers drift apart, and narrowed again once they have stayed together.
        Return True if a new plan is due. `in_place`: the first reader never waits for the last one, because the kernel
        serves its faults, so the window is widened at once. Lock held.
        """
        if not (group.cursors.live or group.cursors.strays or group.convoy):  # true of most of thousands of files
            group.together_ns = now_ns
            return False
        group.cursors.expire(now_ns - CURSOR_LIFE_NS)
        seen_ns = SEEN_NS if group.learner.period is None else min(SEEN_NS, group.learner.period // SEEN_SHARE)
        if not group.looping or group.cursors.moving(now_ns - seen_ns) < 2:
            group.together_ns = now_ns
        # Threads of one client may look like several readers for a moment, and miss extents that another has read and left.
        several = self.state.programs_of(group) > 1
        most, apart_ns = (CONVOY_MAX, APART_NS) if several else (1, ALONE_APART_NS)
        fall_behind = several and group.learner.passes >= SETTLED_PASSES and group.cursors.strays >= STRAYS_MIN
        waited = now_ns - group.apart_ns > (CONVOY_STEP_NS if group.convoy else 0)
        if waited and (fall_behind or now_ns - group.together_ns > apart_ns):
            steps = most if in_place else min(most, group.convoy + 1)
        elif now_ns - group.apart_ns > CONVOY_LIFE_NS:
            steps = max(0, group.convoy - 1)
        else:
            return False
        group.cursors.strays = 0
        group.together_ns = group.apart_ns = now_ns
        if steps == group.convoy:
            return False
        group.convoy = steps
        self.state.references.tell("convoy", group.key, group.convoy)
        return True

    def _active(self, group: Group, now_ns: int) -> bool:
        if group.first or group.warm:
            return True  # the user requested it
        if not self.state.opens_of(group):
            return False
        if PINNED in group.status and group.status.count(PINNED) * group.extent_bytes >= group.loop_bytes:
            return True  # pinned whole: touches of it are not observed
        return now_ns - group.last_ns < max(IDLE_NS, IDLE_PERIODS * (group.learner.period or 0))

    def _reserve(self) -> int:
        """Return the bytes reserved for hot pages, and for rows if any are read by pages."""
        hot = sum(group.charge[extent] for group in self.state.groups.values() for extent in group.hot)
        has_rows = any(SINGLE in group.status for group in self.state.groups.values())
        return reserve_bytes(self.state.limit_bytes, hot, has_rows)

    def _apply(self, group: Group, share: Share) -> None:
        unused, thin, by_rank = group.use.unused, group.thin, zip(group.order.extent_at, group.status, strict=True)
        candidates = [extent for extent, state in by_rank if state != SINGLE and not (unused[extent] or thin[extent])]
        stale = [extent for extent in range(group.count) if group.wanted[extent] and (unused[extent] or thin[extent])]
        for extent in stale:
            group.wanted[extent] = 0
        whole = share.pinned_bytes >= group.loop_bytes
        settled = settle(candidates, group.wanted, share.pinned_bytes, group.extent_bytes, whole)
        set_window(group, share, settled)
        group.learner.expect(settled.extents - settled.pinned)
        if unpinned := stale + settled.unpinned:
            self.holder.release(group, unpinned)
            self.state.room.notify()
        self.holder.pin_ready(group)


class ArenaPlanner(Planner):
    """Plans windows only, from the deterministic core's plan of pins (mode arena)."""

    core: Steering

    def __init__(self, state: CacheState, holder: ArenaHolder) -> None:
        super().__init__(state, holder)
        self.core = holder.core

    def plan(self) -> None:
        """Bring windows in line with the core's plan. Lock held."""
        free_bytes = self.state.limit_bytes - self._reserve()
        for key, space in self.core.spaces.items():
            if space.learner.looping:
                set_window(self.state.groups[key], space.share, space.settled)
                free_bytes -= space.share.pinned_bytes + space.share.window_bytes
        self.state.mixtures.room_bytes = free_bytes


def set_window(group: Group, share: Share, settled: Settled) -> None:
    """Set how far loaders run ahead of the readers of `group`, and the distance within which readers are a convoy."""
    group.window_bytes = share.window_bytes
    streamed = max(1, settled.extents - settled.pinned)
    kept = max(2, share.window_bytes // 2 // group.extent_bytes)
    group.cursors.near = min(group.cursors.reach, kept * settled.extents // streamed) if settled.extents else 1
    group.cursors.step = 3 * -(-settled.extents // streamed)


LAG_NS = 3_000_000  # other threads of a reader may still read from an extent that was touched less than this ago
LAST_LAG_NS = 10_000_000  # the same, if the most recently touched extents are evicted first
ABANDONED_NS = 1_000_000_000  # a ready extent may be evicted if no reader has touched it for this time
BATCH_BYTES = 32 << 20

HEADROOM_EXTENTS = 4

Victim = tuple[Group, int, int, int, int]


def choose_victims(state: CacheState, now_ns: int) -> list[Victim]:
    """Return (group, node, offset, length, extent) to evict now, at most about BATCH_BYTES."""
    if (excess := excess_bytes(state)) <= 0:
        return []  # without sorting all groups
    victims: list[Victim] = []
    chosen: set[tuple[str, int]] = set()
    for group, extent in _in_order(state, now_ns):
        if excess <= 0 or len(victims) * group.extent_bytes > BATCH_BYTES:
            break
        if (group.key, extent) in chosen or group.state(extent) in (LOADING, PINNED):
            continue
        member = group.member_of(extent)
        if member.node is None:
            continue
        chosen.add((group.key, extent))
        excess -= group.charge[extent]
        victims.append((group, member.node, group.offset_of(member, extent), group.length_of(member, extent), extent))
    return victims


def excess_bytes(state: CacheState) -> int:
    """Return the bytes to evict: the excess over the limit, plus headroom when loaders or a warm-up have work waiting.

    Nothing is evicted until half of the headroom is used: evicting several extents at a time costs less than one by one.
    """
    loops = [group.extent_bytes for group in state.groups.values() if group.cursors.live]
    extent = max(loops, default=0)
    wanted = max(HEADROOM_EXTENTS * extent, state.asked_bytes)
    headroom = min(wanted, max(state.limit_bytes // 8, extent, state.asked_bytes))
    excess = state.used_bytes + headroom - state.room_bytes
    return excess if state.asked_bytes or excess > headroom // 2 else 0


def _in_order(state: CacheState, now_ns: int) -> Iterator[tuple[Group, int]]:
    groups = sorted(state.groups.values(), key=lambda group: (state.opens_of(group) > 0, group.last_ns))
    yield from _rows(groups, ROWS_RESERVE_BYTES)
    for group in groups:
        if not group.looping:
            yield from _touched(group, now_ns)
        elif 1 in group.use.unused:
            yield from ((group, extent) for extent in group.touched if group.use.unused[extent])
    yield from _rows([group for group in groups if group.written], 0)
    for group in groups:
        if group.looping:
            is_last_first = state.slack_bytes and not group.left and group.learner.passes
            yield from _touched_last(group, now_ns) if is_last_first else _touched(group, now_ns)
    for group in groups:
        yield from ((group, extent) for extent, since in group.ready.items() if now_ns - since > ABANDONED_NS)
    yield from _hot(groups, state.limit_bytes // HOT_SHARE)
    yield from _rows(groups, 0)


def _touched(group: Group, now_ns: int) -> Iterator[tuple[Group, int]]:
    for extent, since in group.touched.items():
        if now_ns - since >= LAG_NS:
            yield group, extent


def _touched_last(group: Group, now_ns: int) -> Iterator[tuple[Group, int]]:
    """Yield the most recently touched extents first, so that the others stay, and are hits in the next pass."""
    for extent, since in reversed(list(group.touched.items())):
        if now_ns - since >= LAST_LAG_NS:
            yield group, extent


def _rows(groups: list[Group], reserve_bytes: int) -> Iterator[tuple[Group, int]]:
    """Yield single-page extents that are not hot, least recently read first, down to `reserve_bytes` for each group.

    Pages of written files have no reserve, and are yielded after the rows of other groups.
    """
    for group in groups:
        if group.written and reserve_bytes:
            continue
        rows = [extent for extent in group.strays if extent not in group.hot]
        over = sum(group.charge[extent] for extent in rows) - reserve_bytes
        for extent in rows:
            if over <= 0:
                break
            over -= group.charge[extent]
            yield group, extent


def _hot(groups: list[Group], reserve_bytes: int) -> Iterator[tuple[Group, int]]:
    """Yield hot extents beyond their share of the budget, least recently read first; files without a client come first."""
    kept = sum(group.charge[extent] for group in groups for extent in group.hot)
    for group in groups:
        for extent in [extent for extent in group.strays if extent in group.hot]:
            if kept <= reserve_bytes:
                return
            kept -= group.charge[extent]
            yield group, extent
