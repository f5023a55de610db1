"""Turns the arbitration of `llmcache.cache` into pins: who is pinned where, who streams through which window.

Runs with the engine's lock held; cheap enough to run at every change (opens, closes, new periods, a new limit).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llmcache.cache.arbitration import Loop, Settled, Share, cap_pins, reserve_bytes, settle, share_budget
from llmcache.fs.group import PINNED, SINGLE, Group

if TYPE_CHECKING:
    from llmcache.cache.steering import Steering
    from llmcache.fs.holders import ArenaHolder, Holder
    from llmcache.fs.state import CacheState

UNLIMITED = 1 << 62
IDLE_PERIODS = 10
IDLE_NS = 30_000_000_000


class Planner:
    """Plans one mount in mode steer: pins and windows."""

    core: Steering | None = None

    def __init__(self, state: CacheState, holder: Holder) -> None:
        self.state = state
        self.holder = holder
        self.pinnable_bytes = UNLIMITED  # less for a while once the kernel has refused a lock

    def plan(self) -> None:
        """Brings pins and windows in line with the limit and with what loops. Lock held."""
        groups = [group for group in self.state.groups.values() if group.looping and group.loop_bytes]
        now_ns = time.monotonic_ns()
        loops = [
            Loop(group.key, group.loop_bytes, group.learner.period, self._active(group, now_ns), group.convoy, group.first)
            for group in groups
            if group.first or group.warm or self.state.opens_of(group) or self.holder.held(group)
        ]
        shares = share_budget(max(0, self.state.limit_bytes - self._reserve()), loops)
        # Pins, not windows, are cut to the budget and to what the kernel locks.
        shares = cap_pins(shares, min(self.pinnable_bytes, self.state.pin_limit_bytes))
        ranked = sorted(groups, key=lambda group: shares.get(group.key, Share(0, 0)).pinned_bytes)
        for group in ranked:  # the ones that lose first: their room is needed
            self._apply(group, shares.get(group.key, Share(0, 0)))

    def _active(self, group: Group, now_ns: int) -> bool:
        if group.first or group.warm:
            return True  # the user says that it will be read
        if not self.state.opens_of(group):
            return False
        if PINNED in group.status and group.status.count(PINNED) * group.extent_bytes >= group.loop_bytes:
            return True  # pinned whole: its readers cannot be seen
        return now_ns - group.last_ns < max(IDLE_NS, IDLE_PERIODS * (group.learner.period or 0))

    def _reserve(self) -> int:
        """Bytes kept for hot pages and rows that were really read."""
        hot = sum(group.charge[extent] for group in self.state.groups.values() for extent in group.hot)
        has_rows = any(SINGLE in group.status for group in self.state.groups.values())
        return reserve_bytes(self.state.limit_bytes, hot, has_rows)

    def _apply(self, group: Group, share: Share) -> None:
        by_rank = zip(group.order.extent_at, group.status, strict=True)
        candidates = [extent for extent, state in by_rank if state != SINGLE]
        whole = share.pinned_bytes >= group.loop_bytes
        settled = settle(candidates, group.wanted, share.pinned_bytes, group.extent_bytes, whole)
        set_window(group, share, settled)
        if settled.unpinned:
            self.holder.release(group, settled.unpinned)
            self.state.room.notify()
        self.holder.pin_ready(group)


class ArenaPlanner(Planner):
    """Takes the windows from the deterministic core, which plans by itself what is held."""

    core: Steering

    def __init__(self, state: CacheState, holder: ArenaHolder) -> None:
        super().__init__(state, holder)
        self.core = holder.core

    def plan(self) -> None:
        """Brings windows in line with the core's plan. Lock held."""
        for key, space in self.core.spaces.items():
            if space.learner.looping:
                set_window(self.state.groups[key], space.share, space.settled)


def set_window(group: Group, share: Share, settled: Settled) -> None:
    """Sets how far loaders run ahead of the readers of `group`, and how near readers are a convoy."""
    group.window_bytes = share.window_bytes
    streamed = max(1, settled.extents - settled.pinned)
    kept = max(2, share.window_bytes // 2 // group.extent_bytes)
    group.cursors.near = min(group.cursors.reach, kept * settled.extents // streamed) if settled.extents else 1
    group.cursors.step = 3 * -(-settled.extents // streamed)
