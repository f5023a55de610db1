"""Stalls of a replay: slices of the trace's time in which more blocks miss than storage delivers. *Modelled*."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcache.arrays import Int64s, Uint64s
from llmcache.cache.sizing import SECOND_NS
from llmcache.units import BLOCK_BYTES


@dataclass(frozen=True)
class Stalls:
    """Stalls with storage of `bw` bytes/s, in slices of T of the trace's own time (modelled)."""

    bw: int
    slices: int  # slices with at least one reference
    stalled_slices: int  # slices with more misses than storage delivers within a slice, so that inference waits
    stall_s: float  # sum over the stalled slices of the fetch time beyond the slice
    worst_bytes: int  # most bytes missed in one slice; BW x T has to cover them


class StallMeter:
    """Adds up the missed reads of each slice of T; rows are added in order of time.

    Source: io_caching section 4.1, formula (1). A stalled slice delays the next ones as a whole, so no backlog is carried
    over. The setup latency is left out. A slice contains the rows that begin in it.
    """

    def __init__(self, period_ns: int, bandwidths: tuple[int, ...]) -> None:
        self._period_ns = period_ns
        self._bandwidths = bandwidths
        self._start_ns = -1
        self._current = -1  # the slice that later rows may still belong to
        self._blocks = 0
        self._slices = 0
        self._worst = 0
        self._stalled = [0] * len(bandwidths)
        self._stall_s = [0.0] * len(bandwidths)

    def add(self, t_ns: Uint64s, missed: Int64s) -> None:
        if len(t_ns) == 0:
            return
        if self._start_ns < 0:
            self._start_ns = int(t_ns[0])
        slices = ((t_ns - self._start_ns) // self._period_ns).astype(np.int64)
        begins = np.flatnonzero(np.concatenate(([True], slices[1:] != slices[:-1])))
        sums = np.add.reduceat(missed, begins)
        numbers = slices[begins]
        if int(numbers[0]) == self._current:
            sums[0] += self._blocks
        else:
            self._close(np.array([self._blocks], np.int64)[: self._current >= 0])
        self._close(sums[:-1])
        self._current, self._blocks = int(numbers[-1]), int(sums[-1])

    def _close(self, blocks: Int64s) -> None:
        if len(blocks) == 0:
            return
        self._slices += len(blocks)
        self._worst = max(self._worst, int(blocks.max()))
        for index, bandwidth in enumerate(self._bandwidths):
            late_s = blocks * (BLOCK_BYTES / bandwidth) - self._period_ns / SECOND_NS
            self._stalled[index] += int(np.count_nonzero(late_s > 0))
            self._stall_s[index] += float(late_s[late_s > 0].sum())

    def stalls(self) -> list[Stalls]:
        self._close(np.array([self._blocks], np.int64))
        self._blocks, self._current = 0, -1
        worst_bytes = self._worst * BLOCK_BYTES
        each = zip(self._bandwidths, self._stalled, self._stall_s, strict=True)
        return [Stalls(bw, self._slices, stalled, stall_s, worst_bytes) for bw, stalled, stall_s in each]
