"""Segments: blocks that were referenced one after the other, kept as one record, for policies that work on runs.

A *segment* is a range of ids whose blocks were referenced in consecutive steps, so that the step of each follows from
the first one's, and that share an interval and a place. A loop of a million blocks is one segment: a pass over it takes
one record off and puts one back. Segments never overlap. Every one is in a *queue* (in the order of joining), and all
of them are in one *recency list* (in the order of their last reference). A bit set over the ids of their first blocks,
with summaries of summaries, finds the segment around a block.

Records refer to each other by index, -1 for none. `start[id]` is valid where the bit of `id` is set.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import subroutine


def _record(fields: dict[str, str], size: int) -> np.dtype[Any]:
    offsets = np.cumsum([0, *(np.dtype(kind).itemsize for kind in fields.values())])[:-1]
    names, formats = list(fields), list(fields.values())
    return np.dtype({"names": names, "formats": formats, "offsets": offsets.tolist(), "itemsize": size})


# One cache line each: a random reference touches about ten of them.
SEGMENT = _record(
    {
        "last": "i8",  # step of the last reference of the first block; the following blocks' are one later each
        "interval": "i8",  # steps between references, -1 when there was only one
        "lo": "i4",  # first id
        "n": "i4",  # blocks
        "queue": "i4",
        "prev": "i4",  # neighbours in the queue
        "next": "i4",
        "older": "i4",  # neighbours in the recency list
        "newer": "i4",
        "down": "i1",  # in a queue of what went away: the highest block went first
        "held": "i1",  # the cache holds these blocks
    },
    64,
)
QUEUE = _record({"head": "i4", "tail": "i4", "before": "i4", "after": "i4", "stream": "i4", "place": "i4"}, 32)
STATE = _record(
    {
        "free": "i8",  # chain of unused segment records
        "used": "i8",  # records ever taken
        "oldest": "i8",  # ends of the recency list
        "newest": "i8",
        "edge": "i8",  # segment where the shadow LRU ends, and the step from which on it holds everything
        "edge_step": "i8",
        "hand": "i8",  # no segment that the cache holds is older than this one
        "emptied": "i8",  # queue that became empty last, -1 when its owner has seen to it
    },
    64,
)


class Segments(NamedTuple):
    """Arrays of a store; `make_segments` makes them."""

    seg: NDArray[Any]
    queue: NDArray[Any]
    state: NDArray[Any]
    bits: NDArray[np.uint64]
    levels: NDArray[np.int64]
    start: NDArray[np.int32]


def make_segments(blocks: int, records: int, queues: int) -> Segments:
    """Returns a store for ids below `blocks`; memory is taken as it is touched."""
    levels, words, left = [], 0, blocks + 1
    while True:
        left = -(-left // 64)
        levels.append(words)
        words += left
        if left == 1:
            break
    state = np.zeros(1, STATE)
    for name in ("free", "oldest", "newest", "edge", "hand", "emptied"):
        state[name] = -1
    queue = np.zeros(queues, QUEUE)
    for name in QUEUE.names or ():
        queue[name] = -1
    return Segments(
        np.empty(records, SEGMENT),
        queue,
        state,
        np.zeros(words, np.uint64),
        np.array(levels, np.int64),
        np.empty(blocks + 1, np.int32),
    )


# The bit set

ONE = np.uint64(1)
FULL = np.uint64(0xFFFFFFFFFFFFFFFF)


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _leading_zeros(context: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], numba.core.cgutils.true_bit)

    return numba.types.uint64(numba.types.uint64), codegen


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _trailing_zeros(context: Any, word: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], numba.core.cgutils.true_bit)

    return numba.types.uint64(numba.types.uint64), codegen


@subroutine
def highest_bit(word: int) -> int:
    """Returns the place of the highest set bit of a positive `word`."""
    return 63 - np.int64(_leading_zeros(np.uint64(word)))


@subroutine
def _mark(s: Segments, place: int) -> None:
    for level in range(s.levels.size):
        word = s.levels[level] + (place >> 6)
        old = s.bits[word]
        s.bits[word] = old | (ONE << np.uint64(place & 63))
        if old:
            return
        place >>= 6


@subroutine
def _unmark(s: Segments, place: int) -> None:
    for level in range(s.levels.size):
        word = s.levels[level] + (place >> 6)
        s.bits[word] &= ~(ONE << np.uint64(place & 63))
        if s.bits[word]:
            return
        place >>= 6


@subroutine
def find(s: Segments, block: int) -> int:
    """Returns the segment that `block` is in, or -1."""
    place = block
    for level in range(s.levels.size):
        word = place >> 6
        seen = s.bits[s.levels[level] + word] & (FULL >> np.uint64(63 - (place & 63)))
        if seen:
            place = (word << 6) + 63 - np.int64(_leading_zeros(seen))
            for below in range(level - 1, -1, -1):
                place = (place << 6) + 63 - np.int64(_leading_zeros(s.bits[s.levels[below] + place]))
            segment = s.start[place]
            return segment if block < s.seg[segment].lo + s.seg[segment].n else -1
        place = word - 1
        if place < 0:
            return -1
    return -1


@subroutine
def next_start(s: Segments, block: int) -> int:
    """Returns the id of the first segment that starts at `block` or after it, or one past all ids."""
    place, top = block, s.levels.size
    for level in range(top):
        word = place >> 6
        end = s.levels[level + 1] if level + 1 < top else s.bits.size
        if s.levels[level] + word >= end:
            return s.start.size
        seen = s.bits[s.levels[level] + word] & (FULL << np.uint64(place & 63))
        if seen:
            place = (word << 6) + np.int64(_trailing_zeros(seen))
            for below in range(level - 1, -1, -1):
                place = (place << 6) + np.int64(_trailing_zeros(s.bits[s.levels[below] + place]))
            return place
        place = word + 1
    return s.start.size


# Records


@subroutine
def make(s: Segments, lo: int, n: int, last: int, interval: int) -> int:
    """Returns a new segment that the cache holds, in no queue and not in the recency list."""
    segment = s.state[0].free
    if segment >= 0:
        s.state[0].free = s.seg[segment].next
    else:
        segment = s.state[0].used
        s.state[0].used = segment + 1
    record = s.seg[segment]
    record.lo, record.n, record.last, record.interval = lo, n, last, interval
    record.down, record.held = 0, 1
    s.start[lo] = segment
    _mark(s, lo)
    return segment


@subroutine
def release(s: Segments, segment: int) -> None:
    """Ends a segment that is in no queue: takes it out of the recency list and gives its record back."""
    _unmark(s, s.seg[segment].lo)
    leave_recency(s, segment)
    _give_back(s, segment)


@subroutine
def _give_back(s: Segments, segment: int) -> None:
    s.seg[segment].next = s.state[0].free
    s.state[0].free = segment


@subroutine
def split(s: Segments, segment: int, at: int) -> int:
    """Cuts `segment` before the id `at`, which lies inside; it keeps the low part, the high part is returned."""
    low = s.seg[segment]
    d = at - low.lo
    high_segment = make(s, at, low.n - d, low.last + d, low.interval)
    high = s.seg[high_segment]
    high.down, high.held, high.queue = low.down, low.held, low.queue
    low.n = d
    queue = s.queue[low.queue]
    if low.down:
        high.prev, high.next = low.prev, segment
        if low.prev >= 0:
            s.seg[low.prev].next = high_segment
        else:
            queue.head = high_segment
        low.prev = high_segment
    else:
        high.next, high.prev = low.next, segment
        if low.next >= 0:
            s.seg[low.next].prev = high_segment
        else:
            queue.tail = high_segment
        low.next = high_segment
    high.older, high.newer = segment, low.newer
    if low.newer >= 0:
        s.seg[low.newer].older = high_segment
    else:
        s.state[0].newest = high_segment
    low.newer = high_segment
    return high_segment


@subroutine
def end_piece(s: Segments, segment: int, high: bool, n: int) -> int:
    """Returns a segment of the `n` highest or lowest blocks of `segment`, cut off if it has more."""
    record = s.seg[segment]
    if n == record.n:
        return segment
    if high:
        return split(s, segment, record.lo + record.n - n)
    split(s, segment, record.lo + n)
    return segment


# Queues


@subroutine
def join(s: Segments, queue: int, segment: int) -> bool:
    """Puts a segment at the tail of `queue`; returns True if the queue was empty."""
    record, line = s.seg[segment], s.queue[queue]
    record.queue, record.prev, record.next = queue, line.tail, -1
    empty = line.tail < 0
    if empty:
        line.head = segment
    else:
        s.seg[line.tail].next = segment
    line.tail = segment
    return empty


@subroutine
def leave(s: Segments, segment: int) -> None:
    """Takes a segment out of its queue; `state.emptied` tells when that was its last."""
    record = s.seg[segment]
    line = s.queue[record.queue]
    if record.prev >= 0:
        s.seg[record.prev].next = record.next
    else:
        line.head = record.next
    if record.next >= 0:
        s.seg[record.next].prev = record.prev
    else:
        line.tail = record.prev
    if line.head < 0:
        s.state[0].emptied = record.queue


@subroutine
def extend_tail(s: Segments, queue: int, lo: int, n: int, last: int, interval: int) -> bool:
    """Adds blocks to the segment at the tail of `queue` if they go on where it ends; returns whether they do."""
    tail = s.queue[queue].tail
    if tail < 0:
        return False
    record = s.seg[tail]
    goes_on = record.lo + record.n == lo and record.last + record.n == last and record.interval == interval and record.held
    if goes_on:
        record.n += n
    return goes_on


@subroutine
def join_merged(s: Segments, queue: int, segment: int, down: bool) -> None:
    """Puts a segment at the tail of a queue of what went away, as one with the tail's if that is its neighbour.

    `down`: its highest block went first. The order in which single blocks went stays as it was.
    """
    record = s.seg[segment]
    tail = s.queue[queue].tail
    if tail >= 0 and s.seg[tail].interval == record.interval:
        behind = s.seg[tail]
        alone, free = record.n == 1, behind.n == 1
        up = (alone or not down) and (free or not behind.down)
        if up and behind.lo + behind.n == record.lo and behind.last + behind.n == record.last:
            _unmark(s, record.lo)
            _move_marks(s, segment, tail)
            leave_recency(s, segment)
            behind.n += record.n
            behind.down = 0
            _give_back(s, segment)
            return
        falling = (alone or down) and (free or behind.down)
        if falling and record.lo + record.n == behind.lo and record.last + record.n == behind.last:
            _unmark(s, behind.lo)
            _move_marks(s, segment, tail)
            leave_recency(s, segment)
            behind.lo, behind.last = record.lo, record.last
            behind.n += record.n
            behind.down = 1
            s.start[behind.lo] = tail
            _give_back(s, segment)
            return
    record.down = down
    join(s, queue, segment)


@subroutine
def _move_marks(s: Segments, segment: int, newer: int) -> None:
    if s.state[0].edge == segment:
        s.state[0].edge = newer
    if s.state[0].hand == segment:
        s.state[0].hand = newer


# Recency


@subroutine
def be_newest(s: Segments, segment: int) -> None:
    """Appends a segment to the recency list."""
    state, record = s.state[0], s.seg[segment]
    record.older, record.newer = state.newest, -1
    if state.newest >= 0:
        s.seg[state.newest].newer = segment
    else:
        state.oldest = segment
    state.newest = segment
    if state.edge < 0:
        state.edge = segment
    if state.hand < 0:
        state.hand = segment


@subroutine
def leave_recency(s: Segments, segment: int) -> None:
    """Takes a segment out of the recency list; the marks on it go to the next newer one."""
    state, record = s.state[0], s.seg[segment]
    if record.older >= 0:
        s.seg[record.older].newer = record.newer
    else:
        state.oldest = record.newer
    if record.newer >= 0:
        s.seg[record.newer].older = record.older
    else:
        state.newest = record.older
    _move_marks(s, segment, record.newer)
