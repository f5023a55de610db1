"""One flat space of block ids for all files of a trace, so that a policy is arrays and not dictionaries.

The blocks that a trace touches, file by file, are a union of intervals. Laid one after the other they give every block
a small id; a run lies in one interval, so its blocks have consecutive ids. Distances up to `GAP` blocks within a file
stay true (policies look that far around a block), longer ones shrink to it, and two files are `GAP` apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llmcache.arrays import Int64s
from llmcache.errors import DataError
from llmcache.trace.record.trace import Trace

GAP = 16
MERGE_ROWS = 1 << 20  # intervals that wait for being merged: bounds the memory of `of`
FILE_BITS = 24
BLOCK_BITS = 63 - FILE_BITS


class BlockSpace:
    """Maps (file, block) to ids 0 .. `blocks` - 1; `footprint` is the number of distinct blocks."""

    def __init__(self, starts: Int64s, ends: Int64s) -> None:
        """Takes the union of intervals: sorted keys `file << BLOCK_BITS | block`, disjoint, not adjacent."""
        self._starts = starts
        self._ends = ends
        lengths = ends - starts
        gaps = np.minimum(starts[1:] - ends[:-1], GAP)
        self._ids = np.concatenate(([0], np.cumsum(lengths[:-1] + gaps))).astype(np.int64)
        # Intervals no further apart than GAP are moved alike, so a run is looked up among fewer, joined ones.
        apart = np.concatenate(([True], gaps == GAP)) if len(starts) else np.empty(0, np.bool_)
        self._joined = starts[apart]
        self._joined_ends = ends[np.concatenate((apart[1:], [True]))] if len(starts) else ends
        self._moves = self._ids[: len(starts)][apart] - self._joined
        self.footprint = int(lengths.sum())
        self.blocks = int(self._ids[-1] + lengths[-1]) if len(starts) else 0

    @classmethod
    def of(cls, batches: Iterable[Trace]) -> BlockSpace:
        """Returns the space of everything that `batches` touch; DataError for an empty trace."""
        starts = ends = np.empty(0, np.int64)
        waiting: list[tuple[Int64s, Int64s]] = []
        rows = 0
        for batch in batches:
            first = _keys(batch)
            waiting.append(_union(first, first + batch.count.astype(np.int64)))
            rows += len(waiting[-1][0])
            if rows > MERGE_ROWS:
                starts, ends = _merged(starts, ends, waiting)
                waiting, rows = [], 0
        starts, ends = _merged(starts, ends, waiting)
        if len(starts) == 0:
            raise DataError("rows: the trace has none", "record it again, or look at it with: llmcache info FILE")
        return cls(starts, ends)

    def within(self, file: int, first: int, end: int) -> Int64s:
        """Returns the ids of the touched blocks among first .. end - 1 of `file`, ascending."""
        low, high = (file << BLOCK_BITS) + first, (file << BLOCK_BITS) + end
        begin = np.searchsorted(self._ends, low, side="right")
        until = np.searchsorted(self._starts, high, side="left")
        parts = [np.empty(0, np.int64)]
        for index in range(int(begin), int(until)):
            start, stop = max(low, int(self._starts[index])), min(high, int(self._ends[index]))
            parts.append(np.arange(start, stop, dtype=np.int64) - self._starts[index] + self._ids[index])
        return np.concatenate(parts)

    def end_of(self, file: int) -> int:
        """Returns the block past the last touched one of `file`; 0 if there is none."""
        index = int(np.searchsorted(self._starts, (file << BLOCK_BITS) + (1 << BLOCK_BITS) - 1, side="right")) - 1
        if index < 0 or int(self._starts[index]) >> BLOCK_BITS != file:
            return 0
        return int(self._ends[index]) - (file << BLOCK_BITS)

    def place(self, batch: Trace) -> Int64s:
        """Returns the id of the first block of each run (int64, one per row). Every run must have been seen by `of`."""
        keys = _keys(batch)
        found = np.searchsorted(self._joined, keys, side="right") - 1
        if len(keys) and (found.min() < 0 or np.any(keys + batch.count.astype(np.int64) > self._joined_ends[found])):
            raise ValueError("a run lies outside the space")
        return keys + self._moves[found]

    def footprint_by_file(self) -> dict[int, int]:
        """Returns the number of distinct blocks of each file that was touched."""
        file, index = np.unique(self._starts >> BLOCK_BITS, return_inverse=True)
        blocks = np.zeros(len(file), np.int64)
        np.add.at(blocks, index, self._ends - self._starts)
        return dict(zip(file.tolist(), blocks.tolist(), strict=True))

    def locate(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Returns (file, block) of each id; the ids must be those of touched blocks."""
        interval = np.searchsorted(self._ids, ids, side="right") - 1
        keys = self._starts[interval] + ids - self._ids[interval]
        return keys >> BLOCK_BITS, keys & ((1 << BLOCK_BITS) - 1)


def _keys(batch: Trace) -> Int64s:
    if len(batch) and (int(batch.file.max()) >> FILE_BITS or int((batch.first + batch.count).max()) >> BLOCK_BITS):
        raise DataError(
            f"file or first: beyond {1 << FILE_BITS} files or {1 << BLOCK_BITS} blocks of a file",
            "no file system has such files; the trace is damaged",
        )
    keys: Int64s = (batch.file.astype(np.int64) << BLOCK_BITS) + batch.first.astype(np.int64)
    return keys


def _union(starts: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    """Returns the union of half-open intervals as sorted, disjoint, not adjacent ones.

    Starts and ends are sorted apart: where i intervals have begun and the i-th end lies before the next start, all i
    have ended. Two plain sorts take a quarter of the time of one that keeps the pairs together.
    """
    if len(starts) == 0:
        return starts, ends
    starts, ends = np.sort(starts), np.sort(ends)
    fresh = np.concatenate(([True], starts[1:] > ends[:-1]))
    last = np.concatenate((np.flatnonzero(fresh)[1:] - 1, [len(starts) - 1]))
    return starts[fresh], ends[last]


def _merged(starts: Int64s, ends: Int64s, more: list[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    return _union(np.concatenate([starts, *(part[0] for part in more)]), np.concatenate([ends, *(part[1] for part in more)]))
