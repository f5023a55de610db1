"""Belady's MIN: evict the block whose next use is furthest away. It needs the whole trace, without gaps.

The state is the set of the times at which cached blocks are used next; a reference is a hit if its own time is in it.
"""

from __future__ import annotations

import numpy as np

from llmcache.arrays import Flags, Int64s
from llmcache.cache.policies.base import Policy, kernel, lean_kernel, subroutine
from llmcache.cache.policies.structures import TimeSet, add, contains, discard, latest, new_timeset

NEVER = -1  # the next use of a block that is not used again


class Belady(Policy):
    """Belady's MIN without bypass: no policy that inserts every missed block has more hits.

        get(b): if b in cache: hit
                if cache is full: evict the block with the latest next use, preferably one that is never used again
                insert b; miss

    1 bit per reference, 16 bytes per segment (about two per run in loops), 8 per block of capacity, and 8 per id during the
    search for next uses. `resident` is only valid before and after the replay, which is a single call.

    Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966.
    """

    name = "belady"
    title = "Belady"
    offline = True

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._replayed = False
        self._last = np.zeros(blocks, np.bool_)

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        if self._replayed:
            raise ValueError("replay: Belady needs the whole trace in one call, but this is the second call")
        self._replayed = True
        times = int(count.sum())
        segments = _segments(first, count, self.blocks, times)
        dead = np.zeros(min(self.capacity, self.blocks), np.int64)
        used = _belady(new_timeset(times), dead, self.capacity, *segments, first, count, hits)
        self._last[dead[:used]] = True

    def _resident(self) -> Flags:
        return self._last


@kernel
def _segments(first: Int64s, count: Int64s, blocks: int, times: int) -> tuple[Int64s, Int64s]:
    """Return next use and length of all segments, the last segment of the trace first."""
    next_use = np.full(blocks, NEVER, np.int64)
    uses = np.empty(1024, np.int64)
    lengths = np.empty(1024, np.int64)
    size = 0
    time = times
    for run in range(len(first) - 1, -1, -1):
        time -= count[run]
        if size + count[run] > len(uses):
            room = max(2 * len(uses), size + count[run])
            uses = _enlarged(uses, size, room)
            lengths = _enlarged(lengths, size, room)
        size = _split(next_use, uses, lengths, size, first[run], count[run], time)
    return uses[:size].copy(), lengths[:size].copy()


@kernel
def _enlarged(array: Int64s, size: int, room: int) -> Int64s:
    larger = np.empty(room, np.int64)
    for i in range(size):  # a slice takes seconds to compile
        larger[i] = array[i]
    return larger


@subroutine
def _split(next_use: Int64s, uses: Int64s, lengths: Int64s, size: int, first: int, count: int, time: int) -> int:
    expected = NEVER
    for offset in range(count - 1, -1, -1):
        use = next_use[first + offset]
        if offset < count - 1 and use == expected:
            uses[size - 1] = use
            lengths[size - 1] += 1
        else:
            uses[size] = use
            lengths[size] = 1
            size += 1
        expected = NEVER if use == NEVER else use - 1
        next_use[first + offset] = time + offset
    return size


@lean_kernel
def _belady(
    cached: TimeSet, dead: Int64s, capacity: int, uses: Int64s, lengths: Int64s, first: Int64s, count: Int64s, hits: Int64s
) -> int:
    """Return the number of blocks cached at the end, all of them in `dead`."""
    time = used = unwanted = 0
    segment = len(uses)
    for run in range(len(first)):
        left = 0
        use = NEVER
        for block in range(first[run], first[run] + count[run]):
            if left == 0:
                segment -= 1
                left = lengths[segment]
                use = uses[segment]
            left -= 1
            if contains(cached, time):
                discard(cached, time)
                hits[run] += 1
            elif used < capacity:
                used += 1
            elif unwanted > 0:
                unwanted -= 1
            else:
                discard(cached, latest(cached))
            if use == NEVER:
                dead[unwanted] = block
                unwanted += 1
            else:
                add(cached, use)
                use += 1
            time += 1
    return used
