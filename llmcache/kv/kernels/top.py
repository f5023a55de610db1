"""The k best of many scores, without a sort: a bound from a sample, one pass that keeps what is above, then digits.

The compiled loops of this file call nothing outside it but `bits_of`.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
from numba import njit
from numpy.typing import NDArray

from llmcache.kv.kernels.compiled import bits_of
from llmcache.kv.kernels.threads import run_all

SAMPLE = 1024
_DIGITS = ((21, 2048), (10, 2048), (0, 1024))  # shift and values of the three parts of a key


def top(scores: NDArray[np.float32], k: int, threads: int | None = None) -> NDArray[np.int64]:
    """Returns the positions of the `k` largest of each row of `scores` [..., tokens], as [..., k], ascending.

    Of equal scores the earlier positions win; NaN is less than everything. `k` over the number of tokens: all of them.
    """
    if scores.dtype != np.float32 or not scores.ndim:
        raise ValueError(f"scores: {scores.dtype} of {scores.ndim} axes, float32 of at least one is needed")
    if k < 1:
        raise ValueError(f"k: {k}, at least 1 is needed")
    tokens = scores.shape[-1]
    k = min(k, tokens)
    rows = np.ascontiguousarray(scores).reshape(-1, tokens) if tokens else np.empty((0, 0), np.float32)
    out = np.empty((len(rows), k), np.int64)
    run_all([partial(_top_of, row, into) for row, into in zip(rows, out, strict=True)], threads)
    return out.reshape(*scores.shape[:-1], k)


class _Scratch(threading.local):
    """Room for one row, kept by each thread: fresh memory costs as much as choosing."""

    def __init__(self) -> None:
        self.keys, self.rest = (np.empty(0, np.uint32) for _ in range(2))
        self.places = np.empty(0, np.int32)

    def fit(self, size: int) -> None:
        """Makes it large enough for rows of `size`."""
        if len(self.places) <= size:
            self.keys, self.rest = (np.empty(size + 1, np.uint32) for _ in range(2))
            self.places = np.empty(size + 1, np.int32)


_scratch = _Scratch()


def _top_of(row: NDArray[np.float32], out: NDArray[np.int64]) -> None:
    _scratch.fit(len(row))
    select(row, len(out), _scratch.keys, _scratch.rest, _scratch.places, out)


@njit(inline="always")
def _key(score):  # type: ignore[no-untyped-def]
    """Bits in the order of the numbers: NaN lowest, -0 as 0. No branch on the sign: it would be guessed wrong."""
    bits = bits_of(score + np.float32(0))
    flip = (np.uint32(0) - (bits >> np.uint32(31))) | np.uint32(0x80000000)
    return np.uint32(bits ^ flip) * np.uint32(score == score)


@njit(nogil=True, cache=True)
def select(scores, k, keys, rest, places, out):  # type: ignore[no-untyped-def]
    """Writes the positions of the `k` largest to `out`, ascending; for compiled loops that go on with them.

    `keys` and `rest` uint32, `places` int32: room for one more than there are scores. `k` is at most their number.
    """
    count = _gather(scores, _bound(scores, k), keys, places)
    if count < k:  # the sample was not like the rest
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
def _gather(scores, bound, keys, places):  # type: ignore[no-untyped-def]
    """Keeps what is not below `bound`, with its place; returns how many. No branch: it would be guessed wrong."""
    count = 0
    for i in range(scores.size):
        key = _key(scores[i])
        keys[count] = key
        places[count] = i
        count += key >= bound
    return count


@njit(nogil=True, cache=True)
def _bound(scores, k):  # type: ignore[no-untyped-def]
    """A bound that about `k` scores pass, rather more: from every n-th score, five deviations on the safe side."""
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
    """Returns the `k`-th largest of the first `count` keys, and how many equal to it belong to the `k`: digit by digit."""
    rest[:count] = keys[:count]
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
