"""Counts how often blocks were referenced of late, in memory that depends on the cache's size only (TinyLFU's sketch).

Four rows of counters that stop at 15, as 4-bit ones do (one byte each here), and a Bloom filter, the doorkeeper, that
takes the first reference of a block, so that blocks seen once do not fill the counters. After `SAMPLE` references per
place of the cache all counters are halved and the doorkeeper is emptied. The hash is fixed: same trace, same verdicts.

Source: G. Einziger, R. Friedman, B. Manes, TinyLFU: a highly efficient cache admission policy, ACM Transactions on
Storage 13(4), 2017, section 3: minimal increment (3.2), reset (3.3), doorkeeper (3.4.2). The sizes are Caffeine's: 16
counters per place, a sample of ten references per place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import lean_kernel, subroutine

SAMPLE = 10
ROWS = 4
COUNTERS_PER_PLACE = 16
MOST = 15
DOOR_HASHES = 3
DOOR_BITS = 8  # per reference of a sample: about 3 % false positives when every reference is to another block

Counters = NDArray[np.uint8]
Door = NDArray[np.uint64]
Sample = NDArray[np.int64]


def new_sketch(capacity: int) -> tuple[Counters, Door, Sample]:
    """Returns an empty sketch for a cache of `capacity` blocks.

    It is counters[row, column], a doorkeeper of 64 bits a word, and (references since the last reset, those of a sample).
    """
    columns = _power_of_two(capacity * COUNTERS_PER_PLACE // ROWS)
    words = _power_of_two(-(-capacity * SAMPLE * DOOR_BITS // 64))
    counters = np.zeros((ROWS, columns), np.uint8)
    return counters, np.zeros(words, np.uint64), np.array([0, capacity * SAMPLE], np.int64)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@lean_kernel
def note(counters: Counters, door: Door, sample: Sample, block: int) -> None:
    """Counts a reference to `block`."""
    key = _hash(block)
    if not _enter(door, key):
        least = _least(counters, key)
        if least < MOST:
            for row in range(ROWS):
                column = _column(counters, key, row)
                if counters[row, column] == least:
                    counters[row, column] += 1
    sample[0] += 1
    if sample[0] == sample[1]:
        sample[0] = 0
        _age(counters, door)


@subroutine
def _age(counters: Counters, door: Door) -> None:
    for word in range(len(door)):
        door[word] = 0
    for row in range(ROWS):
        for column in range(counters.shape[1]):
            counters[row, column] >>= 1


@lean_kernel
def estimate(counters: Counters, door: Door, block: int) -> int:
    """Returns about how often `block` was referenced of late, 0 .. 16; never too low within a sample."""
    key = _hash(block)
    return int(_least(counters, key) + _is_inside(door, key))


@subroutine
def _hash(block: int) -> Any:
    """Returns 64 well mixed bits (the finaliser of splitmix64, by S. Vigna)."""
    bits = np.uint64(block) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@subroutine
def _slot(key: Any, index: int, slots: int) -> int:
    """Returns the `index`-th of the places of a key among a power of two of them (double hashing)."""
    step = (key >> np.uint64(32)) | np.uint64(1)
    return int((key + np.uint64(index) * step) & np.uint64(slots - 1))


@subroutine
def _column(counters: Counters, key: Any, row: int) -> int:
    return _slot(key, row, counters.shape[1])


@subroutine
def _least(counters: Counters, key: Any) -> int:
    least = MOST
    for row in range(ROWS):
        least = min(least, int(counters[row, _column(counters, key, row)]))
    return least


@subroutine
def _is_inside(door: Door, key: Any) -> bool:
    for index in range(DOOR_HASHES):
        bit = _slot(key, ROWS + index, len(door) * 64)
        if not (door[bit >> 6] >> np.uint64(bit & 63)) & np.uint64(1):
            return False
    return True


@subroutine
def _enter(door: Door, key: Any) -> bool:
    """Puts the key into the doorkeeper; returns whether it was not in it."""
    fresh = not _is_inside(door, key)
    for index in range(DOOR_HASHES):
        bit = _slot(key, ROWS + index, len(door) * 64)
        door[bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)
    return fresh
