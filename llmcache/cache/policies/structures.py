"""Data structures of policies over dense ids: linked lists, queues, a heap, a set of times, a frequency sketch.

Nothing is allocated during a replay, and nothing is checked. Compiled loops inline these functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Bytes, Int64s, Uint32s, Uint64s
from llmcache.cache.policies.base import lean_kernel, subroutine

# Doubly linked lists. All lists of a policy share one array links[blocks + lists, 2]: row b has the two neighbors of
# block b, and the rows from `blocks` on are the heads of the lists. Each list is a ring through its head, so that no
# operation has a special case at the ends. For LRU this is the whole state, 8 bytes per block. Both links of a block
# are adjacent because every operation that reads one writes the other; ascending ids are adjacent in memory, so a
# sequential run touches one cache line per eight blocks. A block is in at most one list of an array: remove it before
# pushing it elsewhere.

Links = NDArray[Any]
"""int32[n, 2], or int64[n, 2] if ids do not fit: columns PREV (nearer to the front) and NEXT (nearer to the back)."""

PREV, NEXT = 0, 1
NONE = -1  # the link of a block that is in no list


def new_links(blocks: int, lists: int) -> Links:
    """Return links of `blocks` blocks in no list and of `lists` empty lists, whose heads are blocks, blocks + 1, …"""
    rows = blocks + lists
    links = np.full((rows, 2), NONE, np.int32 if rows <= np.iinfo(np.int32).max else np.int64)
    links[blocks:] = np.arange(blocks, rows)[:, None]
    return links


@subroutine
def is_linked(links: Links, block: int) -> bool:
    """Return whether `block` is in any list."""
    return bool(links[block, NEXT] != NONE)


@subroutine
def is_empty(links: Links, head: int) -> bool:
    """Return whether the list is empty."""
    return bool(links[head, NEXT] == head)


@subroutine
def front(links: Links, head: int) -> int:
    """Return the first block of a list, or `head` itself if the list is empty."""
    return int(links[head, NEXT])


@subroutine
def back(links: Links, head: int) -> int:
    """Return the last block of a list, or `head` itself if the list is empty."""
    return int(links[head, PREV])


@subroutine
def push_front(links: Links, head: int, block: int) -> None:
    """Insert `block`, which is in no list, at the front; if `head` is a block, insert after that one."""
    follower = links[head, NEXT]
    links[block, PREV] = head
    links[block, NEXT] = follower
    links[follower, PREV] = block
    links[head, NEXT] = block


@subroutine
def push_back(links: Links, head: int, block: int) -> None:
    """Insert `block`, which is in no list, at the back."""
    push_front(links, int(links[head, PREV]), block)


@subroutine
def unhook(links: Links, block: int) -> None:
    """Remove `block` from its list without updating its own row: only for an immediate push."""
    before = links[block, PREV]
    behind = links[block, NEXT]
    links[before, NEXT] = behind
    links[behind, PREV] = before


@subroutine
def remove(links: Links, block: int) -> None:
    """Remove `block` from its list."""
    unhook(links, block)
    links[block, NEXT] = NONE


@subroutine
def move_to_front(links: Links, head: int, block: int) -> None:
    """Move `block` to the front of the list of `head`."""
    unhook(links, block)
    push_front(links, head, block)


# Queues.

ABSENT = 0  # the queue of a block that is in none


class Queues(NamedTuple):
    """Queues 1, 2, …, newest block first; queue q has the head blocks + q; 9 bytes per block."""

    links: Links
    where: Bytes
    sizes: Int64s


def new_queues(blocks: int, queues: int) -> Queues:
    """Return empty queues 1 .. `queues`."""
    return Queues(new_links(blocks, queues + 1), np.zeros(blocks, np.uint8), np.zeros(queues + 1, np.int64))


@subroutine
def oldest(queues: Queues, queue: int) -> int:
    """Return the block at the back of a nonempty queue."""
    return int(queues.links[len(queues.where) + queue, PREV])


@subroutine
def enter(queues: Queues, queue: int, block: int) -> None:
    """Insert `block`, which is in no queue, at the front."""
    push_front(queues.links, len(queues.where) + queue, block)
    queues.where[block] = queue
    queues.sizes[queue] += 1


@subroutine
def leave(queues: Queues, block: int) -> None:
    """Remove `block` from its queue."""
    remove(queues.links, block)
    queues.sizes[queues.where[block]] -= 1
    queues.where[block] = ABSENT


@subroutine
def shift(queues: Queues, queue: int, block: int) -> None:
    """Move `block` to the front of this queue, which may be its own."""
    queues.sizes[queues.where[block]] -= 1
    move_to_front(queues.links, len(queues.where) + queue, block)
    queues.where[block] = queue
    queues.sizes[queue] += 1


@subroutine
def pop(queues: Queues, queue: int) -> int:
    """Remove the oldest block from a nonempty queue, and return it."""
    block = oldest(queues, queue)
    leave(queues, block)
    return block


# A binary heap of (major, minor, item) rows, least first, that supports removal of any item. The keys are in the heap
# itself and not in a separate array: a comparison then reads memory that is about to be moved.

MAJOR, MINOR, ITEM = 0, 1, 2


class Heap(NamedTuple):
    """`rows[position]` is a row, `at[item]` the item's position (NONE if it has none), `size[0]` the number of rows."""

    rows: Int64s
    at: Int64s
    size: Int64s


def new_heap(capacity: int, items: int) -> Heap:
    """Return an empty heap for at most `capacity` of the items 0 .. `items` - 1; 24 bytes per place, 8 per item."""
    return Heap(np.zeros((capacity, 3), np.int64), np.full(items, NONE, np.int64), np.zeros(1, np.int64))


@subroutine
def push(heap: Heap, major: int, minor: int, item: int) -> None:
    """Add an item that is not in the heap."""
    heap.size[0] += 1
    _rise(heap, heap.size[0] - 1, major, minor, item)


@subroutine
def take_out(heap: Heap, item: int) -> None:
    """Remove an item that is in the heap."""
    place = heap.at[item]
    heap.at[item] = NONE
    heap.size[0] -= 1
    last = heap.size[0]
    if place != last:
        major, minor, moved = heap.rows[last, MAJOR], heap.rows[last, MINOR], heap.rows[last, ITEM]
        if place > 0 and not _before(heap.rows, (place - 1) // 2, major, minor):
            _rise(heap, place, major, minor, moved)
        else:
            _sink(heap, place, major, minor, moved)


@subroutine
def grow(heap: Heap, item: int, major: int) -> None:
    """Raise the major key of an item that is in the heap."""
    place = heap.at[item]
    _sink(heap, place, major, heap.rows[place, MINOR], item)


@subroutine
def _before(rows: Int64s, place: int, major: int, minor: int) -> bool:
    if rows[place, MAJOR] != major:
        return bool(rows[place, MAJOR] < major)
    return bool(rows[place, MINOR] < minor)


@subroutine
def _rise(heap: Heap, place: int, major: int, minor: int, item: int) -> None:
    while place > 0:
        above = (place - 1) // 2
        if _before(heap.rows, above, major, minor):
            break
        _write(heap, place, heap.rows[above, MAJOR], heap.rows[above, MINOR], heap.rows[above, ITEM])
        place = above
    _write(heap, place, major, minor, item)


@subroutine
def _sink(heap: Heap, place: int, major: int, minor: int, item: int) -> None:
    rows, size = heap.rows, heap.size[0]
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and _before(rows, below + 1, rows[below, MAJOR], rows[below, MINOR]):
            below += 1
        if not _before(rows, below, major, minor):
            break
        _write(heap, place, rows[below, MAJOR], rows[below, MINOR], rows[below, ITEM])
        place = below
    _write(heap, place, major, minor, item)


@subroutine
def _write(heap: Heap, place: int, major: int, minor: int, item: int) -> None:
    heap.rows[place, MAJOR] = major
    heap.rows[place, MINOR] = minor
    heap.rows[place, ITEM] = item
    heap.at[item] = place


# A set of times 0 .. n - 1 that finds its latest member in a few steps: one bit per time, and a tree of summaries.
# Level 0 has one bit per time; a bit of a higher level is set if a word of the level below has any bit set. The last
# level is a single word. It takes n/8 bytes and 1/31 more.

EMPTY = -1  # result of `latest` for an empty set
_SHIFT, _LOW = 5, 31  # a word has 32 bits, which signed 64-bit arithmetic, Numba's default, represents safely


class TimeSet(NamedTuple):
    """The `words` of all levels; those of level l begin at `starts[l]`."""

    words: Uint32s
    starts: Int64s


def new_timeset(times: int) -> TimeSet:
    """Return an empty set for the times 0 .. `times` - 1."""
    lengths = [max(1, (times + _LOW) >> _SHIFT)]
    while lengths[-1] > 1:
        lengths.append((lengths[-1] + _LOW) >> _SHIFT)
    return TimeSet(np.zeros(sum(lengths), np.uint32), np.cumsum([0, *lengths[:-1]], dtype=np.int64))


@subroutine
def contains(times: TimeSet, time: int) -> bool:
    """Return whether `time` is in the set."""
    return (int(times.words[time >> _SHIFT]) >> (time & _LOW)) & 1 == 1


@subroutine
def add(times: TimeSet, time: int) -> None:
    """Add a time."""
    for level in range(len(times.starts)):
        place = times.starts[level] + (time >> _SHIFT)
        before = int(times.words[place])
        times.words[place] = before | (1 << (time & _LOW))
        if before != 0:
            return
        time >>= _SHIFT


@subroutine
def discard(times: TimeSet, time: int) -> None:
    """Remove a time that is in the set."""
    for level in range(len(times.starts)):
        place = times.starts[level] + (time >> _SHIFT)
        rest = int(times.words[place]) & ~(1 << (time & _LOW))
        times.words[place] = rest
        if rest != 0:
            return
        time >>= _SHIFT


@subroutine
def latest(times: TimeSet) -> int:
    """Return the greatest time in the set, or EMPTY."""
    top = len(times.starts) - 1
    if times.words[times.starts[top]] == 0:
        return EMPTY
    time = 0
    for level in range(top, -1, -1):
        word, bit = int(times.words[times.starts[level] + time]), 0
        for half in (16, 8, 4, 2, 1):  # the highest bit set
            if word >> (bit + half):
                bit += half
        time = (time << _SHIFT) | bit
    return time


# TinyLFU's sketch: approximate counts of recent references per block, in memory that depends only on the cache's size.
# Four rows of counters that stop at 15, as 4-bit ones do (one byte each here), and a Bloom filter, the doorkeeper, that
# absorbs the first reference of a block, so that blocks seen once do not fill the counters. After `SAMPLE` references
# per place of the cache all counters are halved and the doorkeeper is cleared. The hash is fixed: same trace, same
# verdicts.
#
# Source: G. Einziger, R. Friedman, B. Manes, TinyLFU: a highly efficient cache admission policy, ACM Transactions on
# Storage 13(4), 2017, section 3: minimal increment (3.2), reset (3.3), doorkeeper (3.4.2). The sizes are Caffeine's: 16
# counters per place, a sample of ten references per place.

SAMPLE = 10
MOST = 15
_ROWS = 4
_COUNTERS_PER_PLACE = 16
_DOOR_HASHES = 3
_DOOR_BITS = 8  # per reference of a sample: about 3 % false positives if all references are to distinct blocks


class Sketch(NamedTuple):
    """counters[row, column], the doorkeeper's bits, and `sample`: references since the last reset, and per sample."""

    counters: Bytes
    door: Uint64s
    sample: Int64s


def new_sketch(capacity: int) -> Sketch:
    """Return an empty sketch: 26 to 52 bytes per block of `capacity`."""
    columns = _power_of_two(capacity * _COUNTERS_PER_PLACE // _ROWS)
    words = _power_of_two(-(-capacity * SAMPLE * _DOOR_BITS // 64))
    counters = np.zeros((_ROWS, columns), np.uint8)
    return Sketch(counters, np.zeros(words, np.uint64), np.array([0, capacity * SAMPLE], np.int64))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@lean_kernel
def note(sketch: Sketch, block: int) -> None:
    """Count a reference to `block`."""
    counters, door, sample = sketch
    key = _hash(block)
    if _is_inside(door, key):
        least = _least(counters, key)
        for row in range(_ROWS):
            column = _slot(key, row, counters.shape[1])
            if counters[row, column] == least < MOST:
                counters[row, column] += 1
    else:
        for index in range(_DOOR_HASHES):
            bit = _slot(key, _ROWS + index, len(door) * 64)
            door[bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)
    sample[0] += 1
    if sample[0] == sample[1]:
        sample[0] = 0
        door[:] = 0
        for row in range(_ROWS):
            for column in range(counters.shape[1]):
                counters[row, column] >>= 1


@lean_kernel
def estimate(sketch: Sketch, block: int) -> int:
    """Return an estimate of the recent references to `block`, 0 .. 16; never too low within a sample."""
    key = _hash(block)
    return int(_least(sketch.counters, key) + _is_inside(sketch.door, key))


@subroutine
def _hash(block: int) -> Any:
    """Return 64 well mixed bits (the finalizer of splitmix64, by S. Vigna)."""
    bits = np.uint64(block) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@subroutine
def _slot(key: Any, index: int, slots: int) -> int:
    step = (key >> np.uint64(32)) | np.uint64(1)
    return int((key + np.uint64(index) * step) & np.uint64(slots - 1))


@subroutine
def _least(counters: Bytes, key: Any) -> int:
    least = MOST
    for row in range(_ROWS):
        least = min(least, int(counters[row, _slot(key, row, counters.shape[1])]))
    return least


@subroutine
def _is_inside(door: Uint64s, key: Any) -> bool:
    for index in range(_DOOR_HASHES):
        bit = _slot(key, _ROWS + index, len(door) * 64)
        if not (door[bit >> 6] >> np.uint64(bit & 63)) & np.uint64(1):
            return False
    return True
