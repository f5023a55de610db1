"""Streams: the sequential readers that a block-level policy tells apart, in a table of 64.

A reference goes on with a stream if it is up to 8 blocks ahead of it or up to 4 behind it (interleaved threads, strides,
descending runs, pages that arrive out of order); otherwise it starts a new one in place of the stream that rested
longest. A run of blocks belongs to one stream.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.policies.base import subroutine

STREAMS = 64
AHEAD = 8
BEHIND = 4
NOWHERE = -(1 << 40)

STREAM = np.dtype([("length", "i8"), ("interval", "i8"), ("run", "i8"), ("before", "i8"), ("after", "i8")])


class Streams(NamedTuple):
    """`head`: last block of each stream, NOWHERE for none; `ends`: longest rested and latest stream; `row`: the rest.

    Of each stream: `length` in blocks, `interval` of its last block that was seen before (-1: none yet), `run` for the
    policy's use (-1: none).
    """

    head: NDArray[np.int64]
    row: NDArray[Any]
    ends: NDArray[np.int64]


def make_streams() -> Streams:
    """Returns an empty table."""
    row = np.zeros(STREAMS, STREAM)
    row["before"] = np.arange(-1, STREAMS - 1)
    row["after"] = np.arange(1, STREAMS + 1)
    row["after"][-1] = row["interval"] = row["run"] = -1
    row["after"][:-1] = np.arange(1, STREAMS)
    return Streams(np.full(STREAMS, NOWHERE, np.int64), row, np.array([0, STREAMS - 1], np.int64))


@subroutine
def _unlink(t: Streams, stream: int) -> None:
    row = t.row[stream]
    if row.before >= 0:
        t.row[row.before].after = row.after
    else:
        t.ends[0] = row.after
    if row.after >= 0:
        t.row[row.after].before = row.before
    else:
        t.ends[1] = row.before


@subroutine
def _be_latest(t: Streams, stream: int) -> None:
    if t.ends[1] == stream:
        return
    _unlink(t, stream)
    t.row[stream].before, t.row[stream].after = t.ends[1], -1
    t.row[t.ends[1]].after = stream
    t.ends[1] = stream


@subroutine
def _be_free(t: Streams, stream: int) -> None:
    t.head[stream] = NOWHERE
    if t.ends[0] == stream:
        return
    _unlink(t, stream)
    t.row[stream].before, t.row[stream].after = -1, t.ends[0]
    t.row[t.ends[0]].before = stream
    t.ends[0] = stream


@subroutine
def follow(t: Streams, block: int, n: int) -> tuple[int, bool]:
    """Returns the stream of a run of `n` blocks from `block`, moved to its end, and whether it is a new one.

    Streams that the run passes over end. The caller counts the run's blocks in `length`.
    """
    end = block + n
    near = 0
    for stream in range(STREAMS):  # nearly always nothing is found: one pass that vectorises
        ahead = t.head[stream] - (block - AHEAD)
        near += (ahead >= 0) & (ahead < AHEAD + max(n, BEHIND + 1))
    best, best_rank = -1, AHEAD + BEHIND + 1
    if near:
        for stream in range(STREAMS):
            step = block - t.head[stream]
            rank = step if step > 0 else AHEAD - step
            if step != 0 and -BEHIND <= step <= AHEAD and rank < best_rank:
                best, best_rank = stream, rank
        for stream in range(STREAMS):
            if block <= t.head[stream] < end and stream != best:
                _be_free(t, stream)
    fresh = best < 0
    if fresh:
        best = t.ends[0]
        t.row[best].length, t.row[best].interval = 0, -1
    t.head[best] = end - 1
    _be_latest(t, best)
    return best, fresh
