"""The cpu tier: pages of a layer in slots of arrays, from which rows are copied and in which keys are scored.

Users of a pool acquire its `lock`, so that slots are not reused and arrays do not move. No thread waits for the disk or
the device while it has the lock. numba's cache of the loops depends on the date of this file only.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.kv.kernels import score_pages
from llmcache.kv.kernels.threads import Job, processors, run_all
from llmcache.kv.kernels.top import copy, first_from, sort
from llmcache.kv.spill import KvShape
from llmcache.kv.tiers.config import Arrays

NOT_HERE = -1
EVERYWHERE = range(1 << 62)  # a range of all positions
FEW_BYTES = 1 << 22  # rows up to this size are copied in less time than it takes to distribute them to threads
SHORT_RUNS = 4
"""If runs have fewer pages than this on average, it is faster to copy the pages together and score them at once."""


class Pool:
    """Slots of pages: `sides` are keys and values [slots, kv_heads, page_tokens, dim].

    By page number, int64: `slot_of` (NOT_HERE for none), `since` (the order of additions), `down_at` (the step of the last
    move down). `most`: the number of slots up to which the arrays double.
    """

    def __init__(self, shape: KvShape) -> None:
        self.shape = shape
        self.lock = threading.RLock()
        self.most: int | None = None
        self._free: list[int] = []
        self._slots = 0
        self._clock = 0
        self.slot_of, self.since, self.down_at = (np.empty(0, np.int64) for _ in range(3))
        self.sides: Arrays = []
        self._grow(0)

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.sides)

    def extend_to(self, numbers: int) -> None:
        with self.lock:
            more = numbers - len(self.slot_of)
            if more > 0:
                self.slot_of = np.concatenate([self.slot_of, np.full(more, NOT_HERE, np.int64)])
                self.since = np.concatenate([self.since, np.zeros(more, np.int64)])
                self.down_at = np.concatenate([self.down_at, np.full(more, -(1 << 62), np.int64)])

    def add(self, numbers: Int64s) -> Int64s:
        """Return the slots of pages; the contents of a new slot are undefined."""
        fresh = numbers[self.slot_of[numbers] == NOT_HERE]
        if len(fresh):
            self._grow(len(fresh))
            self.slot_of[fresh] = [self._free.pop() for _ in range(len(fresh))]
            self.since[fresh] = np.arange(self._clock, self._clock + len(fresh))
            self._clock += len(fresh)
        return self.slot_of[numbers]

    def _grow(self, more: int) -> None:
        needed = self._slots - len(self._free) + more
        if needed <= self._slots and self.sides:
            return
        slots = max(16, 2 * self._slots) if more else 0
        slots = max(needed, slots if self.most is None else min(slots, self.most))
        old = self.sides
        self.sides = [np.empty(*form) for form in self.shape.forms(slots, self.shape.kv_heads, self.shape.page_tokens)]
        for into, array in zip(self.sides, old, strict=False):
            into[: self._slots] = array
        self._free = [*range(slots - 1, self._slots - 1, -1), *self._free]
        self._slots = slots

    def shrink(self) -> None:
        if self.most is None or self._slots <= self.most:
            return
        resident = np.flatnonzero(self.slot_of != NOT_HERE)
        slots = max(self.most, len(resident))
        before = self.slot_of[resident]
        for side, array in enumerate(self.sides):
            self.sides[side] = np.empty((slots, *array.shape[1:]), array.dtype)
            self.sides[side][: len(resident)] = array[before]
        self.slot_of[resident] = np.arange(len(resident))
        self._free = [*range(slots - 1, len(resident) - 1, -1)]
        self._slots = slots

    def drop(self, numbers: Int64s) -> None:
        slots = self.slot_of[numbers]
        # The lowest on top, so that neighboring pages get neighboring slots.
        self._free += sorted(slots[slots != NOT_HERE].tolist(), reverse=True)
        self.slot_of[numbers] = NOT_HERE

    def forget(self, numbers: Int64s) -> None:
        """Like `drop`, for pages whose numbers will be reused."""
        numbers = numbers[numbers < len(self.slot_of)]
        self.drop(numbers)
        self.down_at[numbers] = -(1 << 62)

    def copy(self, source: int, target: int) -> None:
        into = self.add(np.array([target]))[0]
        for array in self.sides:
            array[into] = array[self.slot_of[source]]

    def fill(self, numbers: Int64s, rows: Arrays, offset: int = 0) -> None:
        """Write rows [kv_heads, tokens, dim] to pages, from token `offset` of the first page up to the last page."""
        slots = self.add(numbers)
        size = self.shape.page_tokens
        first = size - offset if len(slots) > 1 else rows[0].shape[1]
        whole = len(slots) - 2
        for array, part in zip(self.sides, rows, strict=True):
            array[slots[0], :, offset : offset + first] = part[:, :first]
            if whole > 0:
                middle = part[:, first : first + whole * size]
                array[slots[1:-1]] = middle.reshape(len(part), whole, size, *part.shape[2:]).swapaxes(0, 1)
            if whole >= 0:
                rest = part[:, first + whole * size :]
                array[slots[-1], :, : rest.shape[1]] = rest

    def put(self, numbers: Int64s, pages: Arrays) -> None:
        slots = self.add(numbers)
        for array, part in zip(self.sides, pages, strict=True):
            array[slots] = part

    def rows(self, number: int) -> Arrays:
        return [array[self.slot_of[number]] for array in self.sides]


class RowCache:
    """An LRU cache of single rows of one layer, up to `capacity` for each head.

    Rows are copied to and from `outs`, keys and values [batch, kv_heads, k, dim], at `positions` [batch, kv_heads, k],
    ascending. The caller has `lock` from `absent` to `lay`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lock = threading.Lock()
        self._clock = 0
        self._sides: Arrays = []
        self._counts, self._positions, self._slots, self._used = (np.empty(0, np.int32) for _ in range(4))

    @property
    def size_bytes(self) -> int:
        tables = (self._positions, self._slots, self._used) if self._sides else ()
        return sum(array.nbytes for array in (*self._sides, *tables))

    def absent(self, index: Int64s, positions: Int64s, page_tokens: int) -> Flags:
        """Return which of `positions` are neither in a page of the pool (`index` [batch, pages] 0 or above) nor cached.

        Of repeated positions, only the first counts.
        """
        found = np.empty(positions.shape, np.bool_)
        if not len(self._counts):
            self._counts = np.zeros(positions.shape[:2], np.int64)
            self._positions, self._slots, self._used = (
                np.zeros((*positions.shape[:2], self.capacity), np.int32) for _ in range(3)
            )
        _find_rows(self._positions, self._counts, index, positions, page_tokens, found)
        return found

    def lay(self, index: Int64s, positions: Int64s, page_tokens: int, absent: Flags, outs: Arrays, most: int) -> None:
        """Copy cached rows to `outs`, and cache the `absent` rows of `outs`, at most `most` for each head."""
        if not self._sides:
            if not absent.any():
                return
            self._sides = [np.empty((*out.shape[:2], self.capacity, out.shape[3]), out.dtype) for out in outs]
        self._clock += 1
        word = _word(outs)
        views = [array.view(word) for array in (*self._sides, *outs)]
        tables = (self._positions, self._counts, self._slots, self._used)
        _update_rows(*tables, index, positions, page_tokens, absent, self._clock, most, *views)

    def choose(self, index: Int64s) -> None:
        with self.lock:
            if len(self._counts):
                tables = (self._counts, self._positions, self._slots, self._used)
                self._counts, self._positions, self._slots, self._used = (table[index] for table in tables)
                self._sides = [side[index] for side in self._sides]

    def crop(self, tokens: int) -> None:
        with self.lock:
            if len(self._counts):
                self._counts = np.minimum(self._counts, (self._positions < tokens).sum(axis=2))


def runs(slots: Int64s) -> Iterator[tuple[int, int, int]]:
    """Yield (first, count, step): `slots[first : first + count]`, ascending, are `step` slots apart."""
    steps = np.diff(slots)
    changes = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    first = 0
    while first < len(slots):
        last = max(first, changes[bisect_right(changes, first)] if first < len(steps) else first)
        yield first, last - first + 1, int(steps[first]) if last > first else 1
        first = last + 1


def score_slots(keys: NDArray[Any], slots: Int64s, queries: Floats, combine: str, threads: int | None) -> Floats:
    """Return the scores [kv_heads, n * page_tokens] of the pages of `keys` in `slots` [n]."""
    heads, tokens = keys.shape[1:3]
    order = np.argsort(slots)
    ordered = slots[order]
    found = list(runs(ordered))
    if len(found) * SHORT_RUNS > len(slots):
        return score_pages(queries, keys[slots], combine=combine, threads=threads)
    out = np.empty((heads, len(slots), tokens), np.float32)
    for first, count, step in found:
        part = slice(int(ordered[first]), int(ordered[first + count - 1]) + 1, step)
        scores = score_pages(queries, keys[part], combine=combine, threads=threads)
        out[:, order[first : first + count]] = scores.reshape(heads, count, tokens)
    return out.reshape(heads, -1)


def copy_pages(sides: Arrays, index: Int64s, positions: Int64s, outs: Arrays, threads: int | None) -> None:
    """Copy the rows at `positions` [batch, kv_heads, k] that `sides` has to `outs` [batch, kv_heads, k, dim].

    `index` [batch, pages] maps the pages of a sequence to those of `sides`; below 0 for none.
    """
    jobs: list[Job] = []
    heads, count = positions.shape[1:]
    share = max(1, heads * count // (threads or processors()))
    for source, out in zip(sides, outs, strict=True):
        for b in range(len(index)):
            # About one job per thread, or per head if there are more heads.
            for head in (slice(head, head + 1) for head in range(heads)):
                for some in (slice(first, first + share) for first in range(0, count, share)):
                    own = source[:, head], index[b], positions[b, head, some], out[b, head, some]
                    jobs.append(partial(copy_rows, *own))
    run_all(jobs, threads)


class Destination:
    """The destination of rows from pages that many threads read in batches; each thread writes different rows.

    `index` [batch, pages]: the number of each page in the order of reading, below 0 for none. `positions` [batch, kv_heads,
    k], ascending; `outs`: keys and values [batch, kv_heads, k, dim].
    """

    def __init__(self, index: Int64s, positions: Int64s, outs: Arrays, page_tokens: int) -> None:
        self._index, self._positions, self._outs = index, positions, outs
        self._page_tokens = page_tokens
        self._pages = [np.flatnonzero(of_sequence >= 0) for of_sequence in index]

    def take(self, side: int, first: int, rows: NDArray[Any]) -> None:
        """Copy rows of the keys (`side` 0) or values (1) of the pages from number `first` on."""
        for index, pages, positions, out in zip(self._index, self._pages, self._positions, self._outs[side], strict=True):
            low, high = np.searchsorted(index[pages], (first, first + len(rows))).tolist()
            if low < high:
                part = range(pages[low] * self._page_tokens, (pages[high - 1] + 1) * self._page_tokens)
                copy_rows(rows, index, positions, out, first, part)


def copy_rows(
    source: NDArray[Any], index: Int64s, positions: Int64s, out: NDArray[Any], first: int = 0, part: range = EVERYWHERE
) -> None:
    """Copy the rows of one sequence in the pages `source` to `out` [kv_heads, k, dim], on this thread.

    `index` [pages] maps the pages of the sequence to those of `source`, which start at number `first`; other numbers mean
    none. Only `positions` [kv_heads, k], ascending, within `part` are considered.
    """
    if not out.size:
        return
    row_bytes = out.shape[2] * out.itemsize
    word = np.dtype(np.uint64 if row_bytes % 8 == 0 else np.uint8)
    words, strides = _in_words(source, word)
    into, into_strides = _in_words(out[:, :, None], word)
    place = (first, len(source), index, positions, part.start, part.stop, source.shape[2])
    _copy_words(words, *strides, *place, into, *into_strides, row_bytes // word.itemsize)


def _in_words(rows: NDArray[Any], word: np.dtype[Any]) -> tuple[NDArray[Any], tuple[int, int]]:
    span = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.strides, strict=True)) + rows.itemsize
    flat = np.lib.stride_tricks.as_strided(rows, (span // rows.itemsize,), (rows.itemsize,))
    return flat.view(word), (rows.strides[0] // word.itemsize, rows.strides[1] // word.itemsize)


def copy_few(sides: Arrays, index: Int64s, positions: Int64s, outs: Arrays) -> tuple[int, int]:
    """Like `copy_pages`, without threads; return how many positions are in no page, and how many are repeated."""
    word = _word(outs)
    missing, repeats = _copy_few(index, positions, sides[0].shape[2], *(array.view(word) for array in (*sides, *outs)))
    return int(missing), int(repeats)


def copy_repeated(positions: Int64s, outs: Arrays) -> None:
    """Copy the last row of each head to its `repeated` positions in `outs` [batch, kv_heads, k, dim]."""
    word = _word(outs)
    _copy_repeated(positions, *(out.view(word) for out in outs))


def put_rows(outs: Arrays, where: Int64s, rows: Arrays) -> None:
    """Copy keys and values [n, dim] to the indexes `where` (see `rows_at`) in `outs`."""
    word = _word(outs)
    for out, side in zip(outs, rows, strict=True):
        _put_rows(out.view(word), where, side.view(word))


def _word(outs: Arrays) -> type[np.uint64 | np.uint8]:
    return np.uint64 if all(out.shape[-1] * out.itemsize % 8 == 0 for out in outs) else np.uint8


@numba.njit(nogil=True, cache=True)
def _copy_few(index, positions, tokens, own_keys, own_values, keys, values):  # type: ignore[no-untyped-def]
    missing = repeats = 0
    for b in range(positions.shape[0]):
        for head in range(positions.shape[1]):
            for i in range(positions.shape[2]):
                position = positions[b, head, i]
                repeats += i > 0 and position == positions[b, head, i - 1]
                page, token = index[b, position // tokens], position % tokens
                if page < 0:
                    missing += 1
                    continue
                # Not by `copy`: it is slower here to create a view for each row.
                for j in range(keys.shape[3]):
                    keys[b, head, i, j] = own_keys[page, head, token, j]
                for j in range(values.shape[3]):
                    values[b, head, i, j] = own_values[page, head, token, j]
    return missing, repeats


@numba.njit(nogil=True, cache=True)
def rows_at(wanted, positions, table, tokens):  # type: ignore[no-untyped-def]
    """Return the indexes [n, 3] at which `wanted` [batch, kv_heads, k] is set, their page numbers [n] and rows [n].

    `table` [batch, pages] contains the page numbers. A row is numbered head x `tokens` + token within its page.
    """
    where = np.empty((wanted.sum(), 3), np.int64)
    numbers, rows = np.empty(len(where), np.int64), np.empty(len(where), np.int64)
    n = 0
    for b in range(wanted.shape[0]):
        for head in range(wanted.shape[1]):
            for i in range(wanted.shape[2]):
                if wanted[b, head, i]:
                    page, token = divmod(positions[b, head, i], tokens)
                    where[n, 0], where[n, 1], where[n, 2] = b, head, i
                    numbers[n], rows[n] = table[b, page], head * tokens + token
                    n += 1
    return where, numbers, rows


@numba.njit(nogil=True, cache=True)
def _put_rows(out, where, rows):  # type: ignore[no-untyped-def]
    for n in range(len(where)):
        copy(rows[n], out[where[n, 0], where[n, 1], where[n, 2]])


@numba.njit(nogil=True, cache=True)
def count_missing(index, positions, tokens):  # type: ignore[no-untyped-def]
    """Return how many of `positions` [batch, kv_heads, k] are in pages with an `index` below 0."""
    count = 0
    for b in range(positions.shape[0]):
        for head in range(positions.shape[1]):
            for i in range(positions.shape[2]):
                count += index[b, positions[b, head, i] // tokens] < 0
    return count


@numba.njit(nogil=True, cache=True)
def _copy_words(  # type: ignore[no-untyped-def]
    words, page_stride, head_stride, first, pages, index, positions, begin, end, tokens, out, out_head, out_row, size
):
    for head in range(positions.shape[0]):
        of_head = positions[head]
        i = first_from(of_head, begin)
        while i < of_head.size and of_head[i] < end:
            page, token, many = index[of_head[i] // tokens] - first, of_head[i] % tokens, 1
            if page >= 0 and page < pages:
                # Consecutive tokens of a page are copied together if their rows are adjacent.
                most = min(tokens - token, of_head.size - i) if out_row == size else 1
                while many < most and of_head[i + many] == of_head[i] + many:
                    many += 1
                # Unsigned: numba checks signed indexes for negative values, which prevents vectorization.
                at = np.uint64(page * page_stride + head * head_stride + token * size)
                to = np.uint64(head * out_head + i * out_row)
                for j in range(many * size):
                    out[to + np.uint64(j)] = words[at + np.uint64(j)]
            i += many


@numba.njit(nogil=True, cache=True)
def _copy_repeated(positions, keys, values):  # type: ignore[no-untyped-def]
    for b in range(positions.shape[0]):
        for head in range(positions.shape[1]):
            of_head, last = positions[b, head], positions.shape[2] - 1
            while last > 0 and of_head[last] == of_head[last - 1]:
                last -= 1
            for i in range(last + 1, of_head.size):
                copy(keys[b, head, last], keys[b, head, i])
                copy(values[b, head, last], values[b, head, i])


@numba.njit(nogil=True, cache=True)
def _find_rows(cached, counts, index, positions, tokens, absent):  # type: ignore[no-untyped-def]
    for b in range(positions.shape[0]):
        for head in range(positions.shape[1]):
            of_head, mine, count, j = positions[b, head], cached[b, head], counts[b, head], 0
            for i in range(of_head.size):
                while j < count and mine[j] < of_head[i]:
                    j += 1
                present = index[b, of_head[i] // tokens] >= 0 or (j < count and mine[j] == of_head[i])
                present = present or (i > 0 and of_head[i] == of_head[i - 1])
                absent[b, head, i] = not present


@numba.njit(nogil=True, cache=True)
def _update_rows(  # type: ignore[no-untyped-def]
    cached, counts, slots, used, index, positions, tokens, absent, clock, most, own_keys, own_values, keys, values
):
    free = np.empty(cached.shape[2], np.int64)
    for b in range(positions.shape[0]):
        for head in range(positions.shape[1]):
            of_head, is_new, count, j = positions[b, head], absent[b, head], counts[b, head], 0
            mine, places, last = cached[b, head], slots[b, head], used[b, head]
            for i in range(of_head.size):
                while j < count and mine[j] < of_head[i]:
                    j += 1
                if j < count and mine[j] == of_head[i] and index[b, of_head[i] // tokens] < 0:
                    last[j] = clock
                    copy(own_keys[b, head, places[j]], keys[b, head, i])
                    copy(own_values[b, head, places[j]], values[b, head, i])
            new = is_new.sum()
            if new == 0:
                continue
            count = _make_room(mine, places, last, count, count + new - most, free)
            counts[b, head] = count + new
            # From the end, so that no row is overwritten before it has moved.
            j, i = count - 1, of_head.size
            while new > 0:
                i -= 1
                if is_new[i]:
                    while j >= 0 and mine[j] > of_head[i]:
                        mine[j + new], places[j + new], last[j + new] = mine[j], places[j], last[j]
                        j -= 1
                    new -= 1
                    slot, to = free[new], j + 1 + new
                    mine[to], places[to], last[to] = of_head[i], slot, clock
                    copy(keys[b, head, i], own_keys[b, head, slot])
                    copy(values[b, head, i], own_values[b, head, slot])


@numba.njit(nogil=True, cache=True)
def _make_room(mine, places, last, count, over, free):  # type: ignore[no-untyped-def]
    oldest, ties = np.int64(-1), 0
    if over > 0:
        ages = last[:count].copy()
        sort(ages)
        oldest = ages[over - 1]
        ties = over - first_from(ages, oldest)
    taken = np.zeros(free.size, np.bool_)
    left = 0
    for j in range(count):
        if last[j] < oldest or (last[j] == oldest and ties > 0):
            ties -= last[j] == oldest
        else:
            mine[left], places[left], last[left] = mine[j], places[j], last[j]
            taken[places[j]] = True
            left += 1
    vacant = 0
    for slot in range(free.size):
        if not taken[slot]:
            free[vacant] = slot
            vacant += 1
    return left
