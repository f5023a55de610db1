"""The one way by which references to extents, and events, reach the deterministic core and the access log.

Both get the same sequence: what a log holds, replayed through `llmcache.cache.steering`, gives what the mount did. Mode
steer has no core here (pinned extents are read without a request, so its references are not all seen); its log is what
the daemon sees. Every method expects the engine's lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llmcache.cache.steering import HIT, MISS, Steering
from llmcache.units import BLOCK_BYTES

if TYPE_CHECKING:
    from llmcache.fs.daemon.accesslog import AccessLog
    from llmcache.fs.engine.group import Group, Member
    from llmcache.fs.vfs.backing import Backing

READ, WRITE = 0, 1  # as in llmcache.trace.record, which the daemon must not import


class References:
    """Passes everything on to `core` (mode arena) and `log` (when one is kept)."""

    def __init__(self, core: Steering | None = None, limit_bytes: int = 0) -> None:
        self.core = core
        self.log: AccessLog | None = None
        self._limit_bytes = limit_bytes
        self._files: dict[tuple[str, int, int, int], int] = {}
        self._untold: list[tuple[Any, ...]] | None = None

    def pause(self) -> None:
        """The mount ends: what is given up from here on is not what a replay should end with, so the log is not told."""
        self._untold = []

    def resume(self) -> None:
        """The mount goes on after all: the log is told everything."""
        untold, self._untold = self._untold or [], None
        for event in untold:
            if self.log is not None:
                self.log.event(event)

    def _tell(self, *event: Any) -> None:
        if self._untold is not None:
            self._untold.append(event)
        elif self.log is not None:
            self.log.event(event)
        if self.core is not None:
            self.core.apply(event)

    # Events

    def began(self, group: Group, kind: str) -> None:
        """A group was made; `kind` is "loop", "hot", "written" or "paged"."""
        parts = [(member.size_bytes, member.base, member.count) for member in group.members]
        self._tell("space", group.key, group.extent_bytes, parts, kind)
        group.listed_open = True

    def joined(self, group: Group, member: Member, backing: Backing) -> None:
        """A member's file is open: its identity is known."""
        if self.log is None:
            return
        identity = (backing.path, backing.dev, backing.ino, backing.generation)
        number = self._files.setdefault(identity, len(self._files))
        if number == member.file_id:
            return
        member.file_id = number
        self.log.file(member.file_id, *identity, backing.size)
        self.log.event(("file", member.file_id, group.key, group.members.index(member)))

    def guessed(self, group: Group, single: Iterable[int], hot: Iterable[int], order: Iterable[int]) -> None:
        """A header was read."""
        self._tell("guess", group.key, ranges(single), ranges(hot), ranges(order))

    def first(self, group: Group) -> None:
        """The user wants the group kept before all others."""
        self._tell("first", group.key)

    def planned(self) -> None:
        """What is due is planned now."""
        self._tell("plan")

    def held(self, group: Group, extent: int) -> None:
        """An extent was brought in by a warm-up."""
        self._tell("hold", group.key, extent)

    def presence(self, group: Group, is_open: bool) -> None:
        """Somebody has a file of `group` open, or nobody any more."""
        if group.alive and group.listed_open != is_open:
            group.listed_open = is_open
            self._tell("open" if is_open else "close", group.key)

    def convoy(self, group: Group) -> None:
        """The group's readers need another window."""
        self._tell("convoy", group.key, group.convoy)

    def limited(self, limit_bytes: int) -> None:
        """What may be held has changed."""
        if limit_bytes != self._limit_bytes:
            self._limit_bytes = limit_bytes
            self._tell("limit", limit_bytes)

    def ended(self, group: Group) -> None:
        """The group is given up."""
        self._tell("end", group.key)

    def lost(self, group: Group, extent: int) -> None:
        """An extent that was to be held could not be read."""
        if self.core is not None and self.core.holds(group.key, extent):
            self._tell("lost", group.key, extent)

    # References

    def claimed(self, group: Group, member: Member, extent: int, pid: int) -> int:
        """A whole extent is being fetched; returns the core's verdict (MISS without one)."""
        verdict = MISS if self.core is None else self.core.reference(group.key, extent)
        if self.log is not None:
            offset, length = group.offset_of(member, extent), group.length_of(member, extent)
            count = -(-length // BLOCK_BYTES)
            self.log.row(member.file_id, offset // BLOCK_BYTES, count, READ, int(verdict != HIT), pid)
        return verdict

    def slices(self, group: Group, member: Member, parts: Iterable[tuple[int, int]], pid: int) -> None:
        """An expert is missed: (offset, bytes) of what is read of it, in whole pages."""
        for offset, length in parts:
            self.pages(group, member, offset, length, READ, pid)

    def pages(self, group: Group, member: Member, offset: int, length: int, op: int, pid: int) -> None:
        """Pages of single extents were read from storage, or written to it."""
        if length <= 0:
            return
        first, end = offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)
        if self.core is not None:
            self.core.page(group.key, member.base + offset // group.extent_bytes, end - first)
        if self.log is not None:
            self.log.row(member.file_id, first, end - first, op, 1, pid)


def ranges(extents: Iterable[int]) -> list[tuple[int, int]]:
    """Returns `extents`, in their order, as (first, end) of runs of neighbours."""
    runs: list[tuple[int, int]] = []
    for extent in extents:
        if runs and runs[-1][1] == extent:
            runs[-1] = (runs[-1][0], extent + 1)
        else:
            runs.append((extent, extent + 1))
    return runs
