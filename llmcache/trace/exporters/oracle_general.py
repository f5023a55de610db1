"""Writes libCacheSim's oracleGeneral: one record for each block touched, with the number of the block's next request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.space import BlockSpace
from llmcache.errors import DataError
from llmcache.trace.importers.oracle_general import RECORD
from llmcache.trace.record import BLOCK_BYTES, Trace, TraceReader

NEVER = -1
_SECOND_NS = 10**9
_CHUNK_BLOCKS = 1 << 18

Int64s = NDArray[np.int64]


def write(reader: TraceReader, path: Path) -> None:
    """Write all accesses to `path`, reads and writes alike; memory: 8 bytes for each distinct block.

    Requests are numbered from 1; the object of a block is its id in the space of the trace, plus 1.
    """
    space = BlockSpace.of(reader.batches())
    records = _reserved(path, sum(batch.accesses for batch in reader.batches()))
    latest = np.full(space.blocks, -1, np.int64)  # where each block was touched last
    done = 0
    for batch in reader.batches():
        for ids, seconds in _blocks(batch, space.place(batch)):
            part = records[done : done + len(ids)]
            part["time"], part["object"], part["size"], part["next"] = seconds, ids + 1, BLOCK_BYTES, NEVER
            _link(records, ids, latest, done)
            done += len(ids)
    records.flush()


def _reserved(path: Path, rows: int) -> np.memmap[tuple[int], np.dtype[np.void]]:
    """Returns a new file of `rows` records, mapped. Its room is reserved: a full disk is an error here, not a SIGBUS."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, rows * RECORD.itemsize)
    return np.memmap(path, RECORD, "r+", shape=(rows,))


def _blocks(batch: Trace, starts: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    """Yields the id of each block touched and its time in seconds, at most `_CHUNK_BLOCKS` at once."""
    seconds = (batch.t_ns // np.uint64(_SECOND_NS)).astype(np.int64)
    if len(seconds) and int(seconds[-1]) >> 32:
        raise DataError(f"t_ns: {batch.t_ns[-1]} ns is beyond 32 bits of seconds", "oracleGeneral cannot hold such a time")
    count = batch.count.astype(np.int64)
    ends = np.cumsum(count)
    for begin in range(0, int(ends[-1]) if len(ends) else 0, _CHUNK_BLOCKS):
        at = np.arange(begin, min(begin + _CHUNK_BLOCKS, int(ends[-1])))
        row = np.searchsorted(ends, at, side="right")
        yield starts[row] + at - (ends - count)[row], seconds[row]


def _link(records: np.memmap[tuple[int], np.dtype[np.void]], ids: Int64s, latest: Int64s, done: int) -> None:
    """Write the numbers of the requests that follow, for requests done .. done + len(ids) - 1 and those before them."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    again = ordered[1:] == ordered[:-1]
    records["next"][done + order[:-1][again]] = done + order[1:][again] + 1
    first = order[np.concatenate(([True], ~again))]
    before = latest[ids[first]]
    records["next"][before[before >= 0]] = done + first[before >= 0] + 1
    last = order[np.concatenate((~again, [True]))]
    latest[ids[last]] = done + last
