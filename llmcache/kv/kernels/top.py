"""The k largest of many scores, without a sort: a bound from a sample, one pass that filters by it, then a radix selection.

Slice assignment, np.sort and np.searchsorted take seconds to compile; `copy`, `sort` and `first_from` replace them.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
from numba import njit

from llmcache.arrays import Floats, Int64s
from llmcache.kv.kernels.scores import bits_of
from llmcache.kv.kernels.threads import run_all

SAMPLE = 1024
FEW_SCORES = 1 << 16  # up to this many scores, the calling thread does all work
MOST_SHARED = 2  # limit of a head's tokens in `top_shared`, in multiples of k, so that the memory needed is known
_DIGITS = ((21, 2048), (10, 2048), (0, 1024))  # shift and values of the three parts of a key


def top(scores: Floats, k: int, threads: int | None = None) -> Int64s:
    """Return the positions of the `k` largest (or all) of each row of `scores` [..., tokens], ascending.

    Of equal scores, the earlier position wins; NaN is smallest.
    """
    if scores.dtype != np.float32 or not scores.ndim:
        raise ValueError(f"scores: must be float32 with at least one axis, not {scores.dtype} with {scores.ndim}")
    if k < 1:
        raise ValueError(f"k: must be at least 1, not {k}")
    tokens = scores.shape[-1]
    k = min(k, tokens)
    rows = np.ascontiguousarray(scores).reshape(-1, tokens) if tokens else np.empty((0, 0), np.float32)
    out = np.empty((len(rows), k), np.int64)
    jobs = [partial(_top_of, row, into) for row, into in zip(rows, out, strict=True)]
    run_all(jobs, 1 if scores.size <= FEW_SCORES else threads)
    return out.reshape(*scores.shape[:-1], k)


def top_shared(scores: Floats, k: int, threads: int | None = None) -> Int64s:
    """Return the positions [heads, n], ascending, of the k * heads largest of all `scores` [heads, tokens].

    Each head gets from 1 to `MOST_SHARED` * k positions; the last one is repeated where others have more.
    """
    positions = top(scores, min(scores.shape[1], MOST_SHARED * k), threads)
    _scratch.fit(positions.size)
    most = _share(scores, positions, min(len(positions) * k, positions.size), _scratch.keys, _scratch.rest)
    return positions[:, :most]


class RunningTop:
    """The `k` largest of scores that arrive in blocks, in any order; keeps at most about 3 * k scores.

    Source: hillinfer.txt, Algorithm 1, lines 11 to 15. Differs from the paper: only a lower bound is kept, no sorted order.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"k: must be at least 1, not {k}")
        self.k = k
        self._scores: list[Floats] = []
        self._positions: list[Int64s] = []
        self._held = 0
        self._bound = np.float32(-np.inf)

    def add(self, positions: Int64s, scores: Floats) -> None:
        if positions.shape != scores.shape:
            raise ValueError(f"positions: must have the shape of the scores, {scores.shape}, not {positions.shape}")
        # A score equal to the bound may still win by its position; NaN counts only while there is no bound.
        keep = ~(scores < self._bound) if self._bound == -np.inf else scores >= self._bound
        self._scores.append(scores[keep])
        self._positions.append(positions[keep])
        self._held += len(self._scores[-1])
        if self._held > 3 * self.k:
            self._compact()

    def result(self) -> Int64s:
        self._compact()
        return self._positions[0]

    def _compact(self) -> None:
        scores = np.concatenate([*self._scores, np.empty(0, np.float32)])
        positions = np.concatenate([*self._positions, np.empty(0, np.int64)])
        order = np.argsort(positions)  # of equal scores, the earlier position wins
        scores, positions = scores[order], positions[order]
        if len(scores) > self.k:
            best = top(scores, self.k, threads=1)
            scores, positions = scores[best], positions[best]
            least = scores.min()
            self._bound = least if least == least else self._bound  # NaN: there are fewer than k numbers
        self._scores, self._positions, self._held = [scores], [positions], len(scores)


class _Scratch(threading.local):
    """Buffers for one row, kept by each thread, because a new allocation takes as long as the selection."""

    places = np.empty(0, np.int32)

    def fit(self, size: int) -> None:
        if len(self.places) <= size:
            self.keys, self.rest = (np.empty(size + 1, np.uint32) for _ in range(2))
            self.places = np.empty(size + 1, np.int32)


_scratch = _Scratch()


def _top_of(row: Floats, out: Int64s) -> None:
    _scratch.fit(len(row))
    select(row, len(out), _scratch.keys, _scratch.rest, _scratch.places, out)


@njit(inline="always")
def _key(score):  # type: ignore[no-untyped-def]
    """Return bits with the order of the numbers: NaN smallest, -0 as 0. A branch would be mispredicted."""
    bits = bits_of(score + np.float32(0))
    flip = (np.uint32(0) - (bits >> np.uint32(31))) | np.uint32(0x80000000)
    return np.uint32(bits ^ flip) * np.uint32(score == score)


@njit(nogil=True, cache=True)
def select(scores, k, keys, rest, places, out):  # type: ignore[no-untyped-def]
    """Write the positions of the `k` largest to `out`, ascending; for compiled loops. There must be `k` scores.

    `keys` and `rest` uint32, `places` int32: buffers for one more than the scores.
    """
    count = _gather(scores, _bound(scores, k), keys, places)
    if count < k:  # the sample was not representative
        count = _gather(scores, np.uint32(0), keys, places)
    least, equal = _kth(keys, count, k, rest)
    done = 0
    for i in range(count):
        key = keys[i]
        take = key > least
        if key == least and equal > 0:
            take = True
            equal -= 1
        if take:
            out[done] = places[i]
            done += 1


@njit(nogil=True, cache=True)
def _share(scores, positions, count, keys, rest):  # type: ignore[no-untyped-def]
    heads, each = positions.shape
    for head in range(heads):
        best = head * each
        for i in range(each):
            keys[head * each + i] = _key(scores[head, positions[head, i]])
            if keys[head * each + i] > keys[best]:
                best = head * each + i
        keys[best] = np.uint32(0xFFFFFFFF)
    least, equal = _kth(keys, heads * each, count, rest)
    most = 0
    for head in range(heads):
        taken = 0
        for i in range(each):
            key = keys[head * each + i]
            if key > least or (key == least and equal > 0):
                equal -= key == least
                positions[head, taken] = positions[head, i]
                taken += 1
        positions[head, taken:] = positions[head, taken - 1]
        most = max(most, taken)
    return most


@njit(nogil=True, cache=True)
def _gather(scores, bound, keys, places):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(scores.size):
        key = _key(scores[i])
        keys[count] = key
        places[count] = i
        count += key >= bound
    return count


@njit(nogil=True, cache=True)
def _bound(scores, k):  # type: ignore[no-untyped-def]
    if scores.size < 4 * SAMPLE:
        return np.uint32(0)
    step = scores.size // SAMPLE
    counts = np.zeros(2048, np.int32)
    for i in range(SAMPLE):
        counts[_key(scores[i * step]) >> np.uint32(21)] += 1
    share = k * SAMPLE / scores.size
    wanted = share + 5 * np.sqrt(share) + 2
    above = 0
    for digit in range(2047, -1, -1):
        above += counts[digit]
        if above >= wanted:
            return np.uint32(digit) << np.uint32(21)
    return np.uint32(0)


@njit(nogil=True, cache=True)
def _kth(keys, count, k, rest):  # type: ignore[no-untyped-def]
    copy(keys[:count], rest)
    left, found = k, np.uint32(0)
    for shift, values in _DIGITS:
        counts = np.zeros(2048, np.int32)
        for i in range(count):
            counts[(rest[i] >> np.uint32(shift)) & np.uint32(values - 1)] += 1
        digit = values - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        found |= np.uint32(digit) << np.uint32(shift)
        kept = 0
        for i in range(count):
            key = rest[i]
            rest[kept] = key
            kept += ((key >> np.uint32(shift)) & np.uint32(values - 1)) == digit
        count = kept
    return found, left


@njit(nogil=True, cache=True)
def copy(row, to):  # type: ignore[no-untyped-def]
    """Copy `row` [n] to the first n elements of `to`."""
    for i in range(row.size):
        to[i] = row[i]


@njit(nogil=True, cache=True)
def sort(numbers):  # type: ignore[no-untyped-def]
    """Sort `numbers` [n], up to some hundreds, in place.

    Source: D. L. Shell, CACM 2(7), 1959; gaps of D. E. Knuth, TAOCP 3, section 5.2.1.
    """
    gap = 1
    while gap < numbers.size // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, numbers.size):
            number, j = numbers[i], i
            while j >= gap and numbers[j - gap] > number:
                numbers[j] = numbers[j - gap]
                j -= gap
            numbers[j] = number
        gap //= 3


@njit(nogil=True, cache=True)
def first_from(numbers, least):  # type: ignore[no-untyped-def]
    """Return the index of the first of the ascending `numbers` that is not below `least`; n if there is none."""
    low, high = 0, numbers.size
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < least:
            low = middle + 1
        else:
            high = middle
    return low
