"""A set of times 0 .. n - 1 whose latest member is found in a few steps: one bit per time, and a tree of summaries.

Level 0 has one bit per time; a bit of a higher level says whether a word of the level below has any bit set. All levels
stand in one array, level l from `starts[l]` on; the last level is a single word. n/8 bytes and 1/31 of it more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import Ids, subroutine

Words = NDArray[np.uint32]

EMPTY = -1
"""What `latest` answers for an empty set."""
SHIFT = 5
"""A word has 2^SHIFT bits; signed 64-bit arithmetic, Numba's default, holds it without surprises."""
LOW = 31


def new_timeset(times: int) -> tuple[Words, Ids]:
    """Returns an empty set for the times 0 .. `times` - 1: words and starts int64[levels]."""
    lengths = [max(1, (times + LOW) >> SHIFT)]
    while lengths[-1] > 1:
        lengths.append((lengths[-1] + LOW) >> SHIFT)
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    return np.zeros(sum(lengths), np.uint32), starts


@subroutine
def contains(words: Words, time: int) -> bool:
    """Returns whether `time` is in the set."""
    return (int(words[time >> SHIFT]) >> (time & LOW)) & 1 == 1


@subroutine
def add(words: Words, starts: Ids, time: int) -> None:
    """Adds a time."""
    for level in range(len(starts)):
        place = starts[level] + (time >> SHIFT)
        before = int(words[place])
        words[place] = before | (1 << (time & LOW))
        if before != 0:
            return
        time >>= SHIFT


@subroutine
def discard(words: Words, starts: Ids, time: int) -> None:
    """Takes a time out that is in the set."""
    for level in range(len(starts)):
        place = starts[level] + (time >> SHIFT)
        rest = int(words[place]) & ~(1 << (time & LOW))
        words[place] = rest
        if rest != 0:
            return
        time >>= SHIFT


@subroutine
def latest(words: Words, starts: Ids) -> int:
    """Returns the greatest time in the set, or EMPTY."""
    top = len(starts) - 1
    if words[starts[top]] == 0:
        return EMPTY
    time = 0
    for level in range(top, -1, -1):
        time = (time << SHIFT) | _highest_bit(int(words[starts[level] + time]))
    return time


@subroutine
def _highest_bit(word: int) -> int:
    """Returns the index of the highest bit set in a word that is not 0."""
    index = 0
    for half in (16, 8, 4, 2, 1):
        if word >> (index + half):
            index += half
    return index
