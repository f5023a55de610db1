"""Two ways of holding the pinned part of a loop.

`SteerHolder`: in the page cache of the mount, locked by the pin helper; readers hit it without a request.
`ArenaHolder`: in the daemon's own memory; every pass copies it into the page cache ahead of the reader and drops it
behind. Slower, but needs no privilege, and every hit is seen.

What the arena holds is decided by the deterministic core (`llmcache.cache.steering`); `ArenaHolder` only keeps the memory.
Methods that say so expect the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from llmcache.cache.steering import HIT, KEPT, Steering
from llmcache.fs.buffers import Region
from llmcache.fs.group import PINNED, READY, TOUCHED, Fetch, Group, Member
from llmcache.fs.pins import PinService
from llmcache.fs.state import CacheState, Job


class Fetching(Protocol):
    """How extents are brought into the page cache."""

    def ahead(self, group: Group, member: Member, extent: int, pid: int = 0) -> Job | None:
        """Claims an extent that nobody waits for; what it returns brings it in. None: not now. Lock held."""

    def cancel(self, group: Group, extent: int) -> None:
        """An extent that is on its way is of no use any more. Lock held."""


class Holder(Protocol):
    """How pins are kept."""

    mode: str

    def brings_region(self, group: Group, extent: int) -> bool:
        """True if `region` will give memory for `extent`, as far as can be told before the reference. Lock held."""

    def region(self, group: Group, extent: int, verdict: int) -> Region | None:
        """Memory that holds `extent`, or that it is read into to stay, by the core's verdict; else None. Lock held."""

    def keep(self, group: Group, extent: int, region: Region) -> None:
        """`region`, which came from `region`, now contains `extent`. Lock held."""

    def stored(self, group: Group, fetch: Fetch) -> None:
        """The extent of `fetch` is complete in the page cache. Lock held."""

    def skips_trip(self, group: Group, extent: int) -> bool:
        """True if the extent is stored whole, because it will be pinned there. Lock held."""

    def pin_ready(self, group: Group) -> None:
        """Pins what the plan wants and the page cache already holds. Lock held."""

    def release(self, group: Group, extents: list[int]) -> None:
        """Gives `extents` up: no longer pinned. Lock held."""

    def held(self, group: Group) -> list[int]:
        """The extents that are held. Lock held."""


class SteerHolder:
    """Pins live in the page cache, locked through `PinService`."""

    mode = "steer"

    def __init__(self, state: CacheState, pins: PinService) -> None:
        self.state = state
        self.pins = pins

    def brings_region(self, group: Group, extent: int) -> bool:
        """Nothing is held in memory."""
        return False

    def region(self, group: Group, extent: int, verdict: int) -> Region | None:
        """Nothing is held in memory."""
        return None

    def keep(self, group: Group, extent: int, region: Region) -> None:
        """Never called: `region` gives no memory."""

    def skips_trip(self, group: Group, extent: int) -> bool:
        """True for wanted extents: they are locked as soon as they are stored."""
        return bool(group.wanted[extent])

    def stored(self, group: Group, fetch: Fetch) -> None:
        """Locks the extent if the plan wants it."""
        if group.wanted[fetch.extent]:
            self._pin(group, [fetch.extent])

    def pin_ready(self, group: Group) -> None:
        """Locks the wanted extents that are ready or touched."""
        present = (READY, TOUCHED)
        by_rank = zip(group.order.extent_at, group.status, strict=True)
        self._pin(group, [extent for extent, state in by_rank if state in present and group.wanted[extent]])

    def _pin(self, group: Group, extents: list[int]) -> None:
        for extent in extents:
            group.set_state(extent, PINNED)
            for table in (group.trips, group.ready, group.touched):
                table.pop(extent, None)
            group.pinned_bytes += group.length_of(group.member_of(extent), extent)
        for member, offset, length in self.state.ranges(group, extents):
            self.pins.lock(member.path, offset, length)

    def release(self, group: Group, extents: list[int]) -> None:
        """Unlocks; the data stays until the evictor wants the room."""
        for extent in extents:
            if group.state(extent) == PINNED:
                group.set_state(extent, TOUCHED)
                group.touched[extent] = 0
                group.pinned_bytes -= group.length_of(group.member_of(extent), extent)
        for member, offset, length in self.state.ranges(group, extents):
            self.pins.unlock(member.path, offset, length)

    def held(self, group: Group) -> list[int]:
        """Extents in state PINNED."""
        return [group.order.extent_at[rank] for rank, state in enumerate(group.status) if state == PINNED]


class ArenaHolder:
    """Pins live in anonymous memory, one region an extent; regions are read into directly with O_DIRECT."""

    mode = "arena"

    def __init__(self, state: CacheState, on_plan: Callable[[], None]) -> None:
        self.state = state
        self.core = Steering(state.budget_bytes, self._evicted, on_plan)
        self._slots: dict[tuple[str, int], Region] = {}

    def brings_region(self, group: Group, extent: int) -> bool:
        """True for extents that are held, or will be."""
        return self.core.holds(group.key, extent) or self.core.wants(group.key, extent)

    def region(self, group: Group, extent: int, verdict: int) -> Region | None:
        """Returns the held copy, or a new region."""
        if verdict == HIT:
            return self._slots[(group.key, extent)]
        return Region(group.extent_bytes) if verdict == KEPT else None

    def keep(self, group: Group, extent: int, region: Region) -> None:
        """Holds `region`, unless the core has changed its mind while it was read."""
        if self.core.holds(group.key, extent):
            self._slots[(group.key, extent)] = region
            self.state.held_bytes += region.size
            group.pinned_bytes += region.size

    def skips_trip(self, group: Group, extent: int) -> bool:
        """Never: every pass goes through the window."""
        return False

    def stored(self, group: Group, fetch: Fetch) -> None:
        """Nothing to do: the arena copy was made when the data arrived."""

    def pin_ready(self, group: Group) -> None:
        """Nothing to do: extents are held when they pass by next."""

    def release(self, group: Group, extents: list[int]) -> None:
        """Nothing to do: the core says what leaves."""

    def _evicted(self, key: str, extent: int) -> None:
        """Frees the region; one that is still being read goes when it is."""
        region = self._slots.pop((key, extent), None)
        if region is not None:
            self.state.held_bytes -= region.size
            self.state.groups[key].pinned_bytes -= region.size
            self.state.room.notify()

    def held(self, group: Group) -> list[int]:
        """Extents with a slot."""
        return [extent for key, extent in self._slots if key == group.key]
