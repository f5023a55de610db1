"""Holding what is kept in memory of the daemon: every pass copies it into the page cache ahead of the reader and drops it
behind. Slower than locking, but it needs no privilege, and every hit is seen.

What is held is decided by the deterministic core (`llmcache.cache.steering`); `ArenaHolder` only keeps the memory.
"""

from __future__ import annotations

from collections.abc import Callable

from llmcache.cache.steering import HIT, KEPT, Steering
from llmcache.fs.backends.buffers import Region
from llmcache.fs.engine.group import Fetch, Group
from llmcache.fs.engine.state import CacheState


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
