"""The memory of a mount: its limits, and its bytes in the page cache and in the daemon.

- `resident_bytes`, an upper bound of the bytes in the page cache: `LoopSpace.accounted_bytes` of all spaces, the resident
  experts, and the invalidations that are not done. Bytes count until they are invalidated, even if the kernel has reclaimed
  them.
- `pinned_bytes`: `LoopSpace.pinned_bytes` of all spaces; `hot_bytes`: the accounted bytes of hot extents.
- `held_bytes`: the regions of the arena.

Only the methods of `Accounting` change these sums. Every method expects the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from llmcache.cache.arbitration import WINDOW_ALLOWANCE_BYTES
from llmcache.mount.state.space import LoopSpace, SpaceIndex
from llmcache.units import BLOCK_BYTES


class Invalidation(NamedTuple):
    """A range to drop from the page cache; `charged` bytes are accounted until then."""

    node: int
    offset: int
    length: int
    charged: int = 0


@dataclass
class Counters:
    """Bytes since the mount began."""

    requested_bytes: int = 0  # by READ requests
    hit_bytes: int = 0  # read by clients from memory: from pinned extents (counted once a pass), or from the arena
    miss_bytes: int = 0  # read by clients from storage
    backing_read_bytes: int = 0
    backing_write_bytes: int = 0
    prefetch_useful_bytes: int = 0
    prefetch_late_bytes: int = 0
    prefetch_wasted_bytes: int = 0
    stored_bytes: int = 0
    invalidated_bytes: int = 0
    refault_bytes: int = 0


class Accounting:
    """The memory of one mount. `on_full()` is called when more is used than there is room for."""

    def __init__(
        self,
        budget_bytes: int,
        allowance_bytes: int = WINDOW_ALLOWANCE_BYTES,
        experts_allowance_bytes: int = 0,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        """`allowance_bytes`: what windows may use beyond the budget; `experts_allowance_bytes`: more with MoE models."""
        self.budget_bytes = budget_bytes
        self.allowance_bytes, self.experts_allowance_bytes = allowance_bytes, experts_allowance_bytes
        self.on_full = on_full
        self.pin_limit_bytes = budget_bytes  # what memory pressure leaves of the budget: the limit of pins
        self.limit_bytes = budget_bytes + allowance_bytes
        self.opportunistic_bytes = 0  # in place only: used beyond the limit, in memory that nothing else needs
        self.warmup_bytes = 0  # room that a warm-up waits for
        self.index = SpaceIndex()
        self.pending: list[Invalidation] = []
        self.extents_bytes = self.experts_bytes = self.pending_bytes = 0  # the parts of `resident_bytes`
        self.hot_bytes = self.pinned_bytes = self.held_bytes = 0

    # Limits

    @property
    def room_bytes(self) -> int:
        return self.limit_bytes + self.opportunistic_bytes

    @property
    def resident_bytes(self) -> int:
        return self.extents_bytes + self.experts_bytes + self.pending_bytes

    @property
    def used_bytes(self) -> int:
        return self.resident_bytes + self.held_bytes

    @property
    def window_bytes(self) -> int:
        return max(0, self.used_bytes - self.pinned_bytes)

    @property
    def needed_window_bytes(self) -> int:
        """The part of the window's extents, at most the allowance, that are in use."""
        return min(max(0, self.extents_bytes + self.pending_bytes - self.pinned_bytes), self.allowance_bytes)

    def set_limit(self, pin_limit_bytes: int, *, has_experts: bool) -> None:
        self.pin_limit_bytes = pin_limit_bytes
        self.limit_bytes = pin_limit_bytes + self.allowance_bytes + (self.experts_allowance_bytes if has_experts else 0)

    def set_opportunistic(self, free_bytes: int) -> None:
        """`free_bytes` is negative if memory is short."""
        before, self.opportunistic_bytes = self.opportunistic_bytes, max(0, self.used_bytes + free_bytes - self.limit_bytes)
        if self.opportunistic_bytes < before:
            self.on_full()

    # Extents

    def account(self, space: LoopSpace, extent: int, length: int) -> None:
        if not space.alive or space.member_of(extent).node is None:
            return  # until the node is known, nothing is accounted; then all pages are dropped
        more = -(-length // BLOCK_BYTES) * BLOCK_BYTES
        self.correct(space, extent, min(space.extent_bytes, space.accounted_bytes[extent] + more))
        if self.used_bytes > self.room_bytes:
            self.on_full()

    def correct(self, space: LoopSpace, extent: int, size_bytes: int) -> None:
        change = size_bytes - space.accounted_bytes[extent]
        space.accounted_bytes[extent] = size_bytes
        space.resident_bytes += change
        self.extents_bytes += change
        if extent in space.hot:
            space.hot_bytes += change
            self.hot_bytes += change

    def count_hot(self, space: LoopSpace) -> None:
        before, space.hot_bytes = space.hot_bytes, sum(space.accounted_bytes[extent] for extent in space.hot)
        self.hot_bytes += space.hot_bytes - before

    def forget(self, space: LoopSpace, extents: Iterable[int]) -> None:
        for extent in extents:
            space.forget(extent)
            self.correct(space, extent, 0)

    def evict(self, space: LoopSpace, extent: int) -> Invalidation:
        """Make an extent absent; return its range, which the caller must invalidate."""
        member = space.member_of(extent)
        charged = space.accounted_bytes[extent]
        space.forget(extent)
        self.correct(space, extent, 0)
        offset, length = space.offset_of(member, extent), space.length_of(member, extent)
        return self.pend(member.node or 0, offset, length, charged)

    def end(self, space: LoopSpace, *, invalidate: bool) -> None:
        for extent in list(space.charged_extents()):
            member = space.member_of(extent)
            charged = space.accounted_bytes[extent]
            self.correct(space, extent, 0)
            if invalidate and member.node is not None:
                offset, length = space.offset_of(member, extent), space.length_of(member, extent)
                self.pending.append(self.pend(member.node, offset, length, charged))
        assert space.resident_bytes == space.hot_bytes == 0
        self.pin(space, -space.pinned_bytes)
        self.index.remove(space)

    def pin(self, space: LoopSpace, size_bytes: int) -> None:
        space.pinned_bytes += size_bytes
        self.pinned_bytes += size_bytes
        assert space.pinned_bytes >= 0

    def hold(self, space: LoopSpace, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        self.pin(space, size_bytes)

    def add_expert(self, size_bytes: int) -> None:
        self.experts_bytes += size_bytes
        assert self.experts_bytes >= 0

    # Invalidations

    def pend(self, node: int, offset: int, length: int, charged: int) -> Invalidation:
        """Return an invalidation that the caller must queue or perform."""
        self.pending_bytes += charged
        return Invalidation(node, offset, length, charged)

    def invalidated(self, invalidations: Iterable[Invalidation]) -> None:
        self.pending_bytes -= sum(each.charged for each in invalidations)
        assert self.held_bytes in (0, self.pinned_bytes)
        assert self.pending_bytes >= 0

    def verify(self, spaces: Iterable[LoopSpace]) -> None:
        """Raise AssertionError if a sum differs from its terms."""
        spaces = list(spaces)
        for space in spaces:
            assert space.resident_bytes == sum(space.accounted_bytes)
            assert space.hot_bytes == sum(space.accounted_bytes[extent] for extent in space.hot)
            assert all(size <= space.extent_bytes for size in space.accounted_bytes)
        assert self.extents_bytes == sum(space.resident_bytes for space in spaces)
        assert self.hot_bytes == sum(space.hot_bytes for space in spaces)
        assert self.pinned_bytes == sum(space.pinned_bytes for space in spaces)
        assert self.pending_bytes >= sum(each.charged for each in self.pending)  # others are being dropped
