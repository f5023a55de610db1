"""Turns the arbitration of `llmcache.cache` into pins: who is pinned where, who streams through which window.

Runs with the engine's lock held; cheap enough to run at every change (opens, closes, new periods, a new limit).
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import TYPE_CHECKING

from llmcache.cache.arbitration import Loop, Share, repin, share_budget
from llmcache.fs.group import PINNED, SINGLE, Group
from llmcache.fs.victims import HOT_SHARE, ROWS_RESERVE_BYTES

if TYPE_CHECKING:
    from llmcache.fs.holders import Holder
    from llmcache.fs.state import CacheState

UNLIMITED = 1 << 62
IDLE_PERIODS = 10
IDLE_NS = 30_000_000_000


class Planner:
    """Plans one mount."""

    def __init__(self, state: CacheState, holder: Holder) -> None:
        self.state = state
        self.holder = holder
        self.pinnable_bytes = UNLIMITED  # less for a while once the kernel has refused a lock

    def plan(self) -> None:
        """Brings pins and windows in line with the limit and with what loops. Lock held."""
        groups = [group for group in self.state.groups.values() if group.looping and group.loop_bytes]
        now_ns = time.monotonic_ns()
        loops = [
            Loop(group.key, group.loop_bytes, group.period_ns, self._active(group, now_ns), group.convoy)
            for group in groups
            if self.state.opens_of(group) or self.holder.held(group)
        ]
        shares = self._lockable(share_budget(max(0, self.state.limit_bytes - self._reserve()), loops))
        ranked = sorted(groups, key=lambda group: shares.get(group.key, Share(0, 0)).pinned_bytes)
        for group in ranked:  # the ones that lose first: their room is needed
            self._apply(group, shares.get(group.key, Share(0, 0)))

    def _lockable(self, shares: dict[Hashable, Share]) -> dict[Hashable, Share]:
        """Cuts the pins, not the windows, to the budget and to what the kernel locks."""
        left = min(self.pinnable_bytes, self.state.pin_limit_bytes)
        for key, share in shares.items():
            shares[key] = Share(min(share.pinned_bytes, left), share.window_bytes)
            left -= shares[key].pinned_bytes
        return shares

    def _active(self, group: Group, now_ns: int) -> bool:
        if not self.state.opens_of(group):
            return False
        if PINNED in group.status and group.status.count(PINNED) * group.extent_bytes >= group.loop_bytes:
            return True  # pinned whole: its readers cannot be seen
        return now_ns - group.last_ns < max(IDLE_NS, IDLE_PERIODS * (group.period_ns or 0))

    def _reserve(self) -> int:
        """Bytes kept for hot pages and rows that were really read."""
        hot = sum(group.charge[extent] for group in self.state.groups.values() for extent in group.hot)
        rows = ROWS_RESERVE_BYTES if any(SINGLE in group.status for group in self.state.groups.values()) else 0
        return min(hot, self.state.limit_bytes // HOT_SHARE) + min(rows, self.state.limit_bytes // 32)

    def _apply(self, group: Group, share: Share) -> None:
        group.window_bytes = share.window_bytes
        candidates = [extent for extent in group.order.extent_at if group.state(extent) != SINGLE]
        wanted = {extent for extent in candidates if group.wanted[extent]}
        count = min(len(candidates), share.pinned_bytes // group.extent_bytes)
        if share.pinned_bytes >= group.loop_bytes:
            count = len(candidates)
        pin, unpin = repin(candidates, wanted, count)
        for extent in pin:
            group.wanted[extent] = 1
        for extent in unpin:
            group.wanted[extent] = 0
        streamed = max(1, len(candidates) - count)
        kept = max(2, share.window_bytes // 2 // group.extent_bytes)
        group.cursors.near = min(group.cursors.reach, kept * len(candidates) // streamed) if candidates else 1
        group.cursors.step = 3 * -(-len(candidates) // streamed)
        if unpin:
            self.holder.release(group, unpin)
            self.state.room.notify()
        self.holder.pin_ready(group)
