"""What the filesystem itself keeps: `llmcachefs` in mode arena, decided by the very code that decides in the mount."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcache.cache.policies.base import Ids, Policy
from llmcache.cache.replaying import Cut, OneFile, Recorded

if TYPE_CHECKING:
    from llmcache.trace.record import BlockSpace, Provenance, TraceFile


class LLMCacheFS(Policy):
    """`llmcache.cache.steering` at the granularity of extents (1 MiB, or 128 KiB of small files).

    On the access log of an arena mount, with its budget as the capacity: the mount's own hits, misses and evictions.
    Differs from the other policies: a block that the plan does not want is not inserted, one that it wants comes with
    its whole extent, and windows beside the budget hold what is being read. Without `describe` all ids are one file.
    """

    name = "llmcachefs"
    title = "llmcachefs"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._source: Recorded | Cut = Cut(OneFile(blocks), (), capacity)

    def describe(self, space: BlockSpace, files: Sequence[TraceFile], provenance: Provenance) -> None:
        """Takes the facts on files from a mount's log, or from the file table. DataError for a damaged log."""
        if Recorded.fits(provenance):
            self._source = Recorded(space, provenance, self.capacity)
        else:
            self._source = Cut(space, files, self.capacity)

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`; a few microseconds for each extent."""
        hits = self._source.replay(first, count)
        self.evictions = self._source.evictions
        return hits

    def resident(self) -> Ids:
        """Returns the ids of held blocks."""
        return self._source.resident()
