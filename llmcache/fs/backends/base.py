"""What an engine needs of its means: something that brings extents in, and something that holds those that are kept.

Methods that say so expect the engine's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llmcache.fs.backends.buffers import Region
    from llmcache.fs.engine.group import Fetch, Group, Member
    from llmcache.fs.engine.state import Job
    from llmcache.fs.vfs.backing import Backing


class Fetching(Protocol):
    """How extents are brought into the page cache."""

    def follows(self, group: Group) -> bool:
        """True if it is worth running ahead of the readers of `group`. Lock held."""

    def ahead(self, group: Group, member: Member, extent: int, pid: int = 0) -> Job | None:
        """Claims an extent that nobody waits for; what it returns brings it in. None: not now. Lock held."""


    def fill(self, group: Group, member: Member, extent: int, backing: Backing) -> bool:
        """Has a whole extent in the page cache that is else read page by page; False if that cannot be.

        Returns with it there, or nearly: a writer is kept waiting meanwhile.
        """


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
