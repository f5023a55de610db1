"""CLOCK: a hand goes round the cache and takes the first block not used since it last came by."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import Ids, Policy, lean_kernel

FREE = -1
"""The slot of a block that is not in the cache."""


class Clock(Policy):
    """CLOCK with one bit, which a block gets by its first reference after the one that brought it in.

        get(b): if b in cache: used[b] = 1; hit
                if cache is full: while used[block at hand]: used[block at hand] = 0, move the hand on
                                  drop the block at the hand
                put b at the hand with used[b] = 0, move the hand on; miss

    5 bytes per id and 8 per block of capacity.

    Source: F. J. Corbató, A paging experiment with the Multics system, MIT Project MAC, 1968.
    Differs from the paper: the reference that brings a block in does not set its bit, as in FIFO with second chance; else
    a scan would clear the bits of the whole cache before it drops its own blocks.
    """

    name = "clock"
    title = "CLOCK"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        self._slot = np.full(blocks, FREE, np.int32 if capacity <= np.iinfo(np.int32).max else np.int64)
        self._block = np.zeros(min(capacity, blocks), np.int64)
        self._was_used = np.zeros(blocks, np.uint8)
        self._used = 0
        self._hand = 0

    def replay(self, first: Ids, count: Ids) -> Ids:
        """See `Policy.replay`."""
        hits = np.zeros(len(first), np.int64)
        state = (self._slot, self._block, self._was_used)
        self._used, self._hand, evicted = _replay(*state, self._used, self._hand, first, count, hits)
        self.evictions += evicted
        return hits

    def resident(self) -> Ids:
        """See `Policy.resident`."""
        return np.flatnonzero(self._slot != FREE).astype(np.int64, copy=False)


@lean_kernel
def _replay(
    slot: NDArray[Any], block_at: Ids, was_used: NDArray[np.uint8], used: int, hand: int, first: Ids, count: Ids, hits: Ids
) -> tuple[int, int, int]:
    slots = len(block_at)
    evicted = 0
    for run in range(len(first)):
        found = 0
        for block in range(first[run], first[run] + count[run]):
            if slot[block] != FREE:
                was_used[block] = 1
                found += 1
                continue
            if used == slots:
                while was_used[block_at[hand]]:
                    was_used[block_at[hand]] = 0
                    hand = hand + 1 if hand + 1 < slots else 0
                slot[block_at[hand]] = FREE
                evicted += 1
            else:
                used += 1
            slot[block] = hand
            block_at[hand] = block
            hand = hand + 1 if hand + 1 < slots else 0
        hits[run] = found
    return used, hand, evicted
