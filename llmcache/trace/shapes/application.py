"""Makes synthetic traces: the blocks that an application touches, written down in the block numbers of the paper's figures.

The figures show all files of an application in one space of block numbers; `FileRange`s cut that space into files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from llmcache.arrays import Bytes, Int64s
from llmcache.trace.record import READ, Provenance, Trace, TraceFile
from llmcache.units import BLOCK_BYTES

# Times are invented: each request costs a set-up of 50 us and 4.096 us per block (1 GB/s), as phones' UFS would.
SETUP_NS = 50_000
BLOCK_NS = 4_096
REQUEST_BLOCKS = 256  # what one row holds at most (1 MiB), so that a scan is seen to progress
PID = 1000
# Hot references are skewed: block `len * u ** SKEW` for u uniform in 0..1.
SKEW = 2
LONGEST_BURST = 4
# What notes say, after what the shape is.
LIKE_THE_PAPER = (
    "Synthetic: the ranges of blocks and the kinds of access follow the paper's figure and text; the times, the number "
    "of passes, how often hot blocks are touched, and the sizes of single prompts and responses are invented."
)
INVENTED = "Synthetic: everything in it is invented."


@dataclass(frozen=True)
class FileRange:
    """A file at blocks `start` .. `end` - 1 of the common space."""

    path: str
    start: int
    end: int


class Application:
    """Collects what an application does, in order; `trace` turns it into a trace.

    Blocks are drawn from `random`, times from a generator of their own: the blocks do not depend on how times are made.
    """

    def __init__(self, name: str, seed: int, regions: Sequence[FileRange]) -> None:
        """Takes regions in ascending order that cover every block which will be touched."""
        self.random = np.random.default_rng(seed)
        self._name, self._seed = name, seed
        self._regions = tuple(regions)
        self._clock = np.random.default_rng([seed, 1])
        self._blocks: list[Int64s] = []
        self._ops: list[Bytes] = []
        self._pauses: dict[int, int] = {}
        self._touched = 0

    def touch(self, blocks: ArrayLike, op: int = READ) -> None:
        """Touch `blocks` one after the other."""
        self._note(np.asarray(blocks, np.int64), op)

    def mixed(self, blocks: ArrayLike, hot: Int64s, rate: float, op: int = READ) -> None:
        """Touch `blocks` in order, with bursts of 1 to 4 hot reads at random places: about `rate` per block."""
        stream = np.asarray(blocks, np.int64)
        bursts = self.random.poisson(rate * len(stream) / 2.0)
        places = np.sort(self.random.integers(0, len(stream) + 1, bursts))
        done = 0
        for place in places.tolist():
            self._note(stream[done:place], op)
            self._note(self.picked(hot, int(self.random.integers(1, LONGEST_BURST + 1))), READ)
            done = place
        self._note(stream[done:], op)

    def picked(self, hot: Int64s, number: int) -> Int64s:
        """Returns `number` of the blocks `hot`, the first of them more often."""
        at = (len(hot) * self.random.random(number) ** SKEW).astype(np.int64)
        return hot[np.minimum(at, len(hot) - 1)]

    def shuffled(self, start: int, end: int) -> Int64s:
        """Returns blocks start .. end - 1 in random order."""
        blocks = np.arange(start, end)
        self.random.shuffle(blocks)
        return blocks

    def pause(self, seconds: float) -> None:
        """Let `seconds`, give or take a fifth, pass before what comes next: computing, typing, waiting for a server."""
        length_ns = int(seconds * 1e9 * self._clock.uniform(0.8, 1.2))
        self._pauses[self._touched] = self._pauses.get(self._touched, 0) + length_ns

    def trace(self, note: str) -> Trace:
        """Returns everything touched as a trace; `note` tells what it is and what of it is invented."""
        blocks, ops = np.concatenate(self._blocks), np.concatenate(self._ops)
        region = self._region_of(blocks)
        rows = self._row_starts(blocks, ops, region)
        count = np.diff(np.concatenate((rows, [len(blocks)])))
        bases = np.array([entry.start for entry in self._regions])
        return Trace.build(
            self._times(rows, count),
            region[rows],
            blocks[rows] - bases[region[rows]],
            count,
            ops[rows],
            pid=PID,
            files=[_file(number, entry) for number, entry in enumerate(self._regions)],
            provenance=self._provenance(note),
        )

    def _provenance(self, note: str) -> Provenance:
        extra = {"shape": self._name, "seed": str(self._seed)}
        return Provenance(tier="synthetic", clock="invented", note=note, extra=extra)

    def _note(self, blocks: Int64s, op: int) -> None:
        self._blocks.append(blocks)
        self._ops.append(np.full(len(blocks), op, np.uint8))
        self._touched += len(blocks)

    def _region_of(self, blocks: Int64s) -> Int64s:
        """Returns the number of the region of each block; ValueError if one lies in none."""
        starts = np.array([entry.start for entry in self._regions])
        ends = np.array([entry.end for entry in self._regions])
        region = np.searchsorted(starts, blocks, side="right") - 1
        outside = (region < 0) | (blocks >= ends[region])
        if outside.any():
            raise ValueError(f"regions: block {blocks[outside][0]} of {self._name} is in none")
        return region

    def _row_starts(self, blocks: Int64s, ops: Bytes, region: Int64s) -> Int64s:
        """Returns where rows begin: adjacent blocks, touched alike and without a pause, are one row."""
        begins = np.ones(len(blocks), bool)
        begins[1:] = (np.diff(blocks) != 1) | (np.diff(ops) != 0) | (np.diff(region) != 0)
        begins[[at for at in self._pauses if at < len(blocks)]] = True
        runs = np.flatnonzero(begins)
        lengths = np.diff(np.concatenate((runs, [len(blocks)])))
        within = np.arange(len(blocks)) - np.repeat(runs, lengths)
        return np.flatnonzero(within % REQUEST_BLOCKS == 0)

    def _times(self, rows: Int64s, count: Int64s) -> Int64s:
        """Returns when each row begins, in nanoseconds from the start."""
        busy = np.concatenate(([0], np.cumsum(SETUP_NS + BLOCK_NS * count)[:-1]))
        waits = np.zeros(len(rows), np.int64)
        for at, length_ns in self._pauses.items():
            if at < self._touched:
                waits[np.searchsorted(rows, at)] += length_ns
        return busy + np.cumsum(waits)


def _file(number: int, region: FileRange) -> TraceFile:
    size_bytes = (region.end - region.start) * BLOCK_BYTES
    return TraceFile(number, region.path, dev=1, inode=number + 1, generation=0, size_bytes=size_bytes)
