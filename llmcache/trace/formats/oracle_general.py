"""libCacheSim's oracleGeneral: records of 24 bytes, u32 time (s), u64 object, u32 size (bytes), i64 next access.

`read` places all objects in one file, in the order of their ids. An object occupies a run of blocks of the largest size that
a request has for it. Gaps between ids stay, up to `GAP` blocks. `write` writes a record for each touched block, with the
number of the block's next request.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llmcache.arrays import Int64s, Records, Uint32s, Uint64s
from llmcache.errors import DataError
from llmcache.trace.record import (
    GAP,
    LAST_BLOCK,
    BlockSpace,
    Provenance,
    Trace,
    TraceFile,
    TraceReader,
    TraceWriter,
    largest,
    readable,
)
from llmcache.units import BLOCK_BYTES

RECORD = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
NEVER = -1
_BATCH_ROWS = 1 << 18
_SECOND_NS = 10**9
_HINT = "not an uncompressed oracleGeneral trace: records of 24 bytes, u32 time, u64 object, u32 size, i64 next access"


def read(path: Path, writer: TraceWriter) -> None:
    """Append the accesses in `path`; DataError. Memory: 40 bytes for each distinct object."""
    known: tuple[Uint64s, Uint64s] = np.empty(0, np.uint64), np.empty(0, np.uint64)
    waiting: list[tuple[Uint64s, Uint64s]] = []
    after_s = 0
    for row, records in _batches(path):
        _check(records, row, after_s)
        after_s = int(records["time"][-1])
        waiting.append(largest(records["object"], _in_blocks(records["size"])))
        # A merge takes time in proportion to the known objects, so wait until as many new records have arrived.
        if sum(len(ids) for ids, _ in waiting) > max(_BATCH_ROWS, len(known[0])):
            known, waiting = _merged([known, *waiting]), []
    ids, sizes = _merged([known, *waiting])
    gaps = np.minimum(np.diff(ids) - 1, GAP)
    starts = np.concatenate(([0], np.cumsum(sizes[:-1] + gaps))).astype(np.uint64)
    blocks = int(starts[-1] + sizes[-1]) if len(ids) else 0
    if blocks >= LAST_BLOCK:
        raise DataError(f"size: all objects together have {blocks} blocks, too many for a file", _HINT)
    for _, records in _batches(path):
        writer.append(
            {
                "t_ns": records["time"].astype(np.uint64) * _SECOND_NS,
                "file": 0,
                "first": starts[np.searchsorted(ids, records["object"])],
                "count": _in_blocks(records["size"]),
            }
        )
    writer.add_file(TraceFile(0, path.name, 0, 0, 0, blocks * BLOCK_BYTES))
    note = f"From {path.name}: objects are runs of blocks of one file; the format does not distinguish reads from writes."
    writer.provenance = Provenance(tier="oracleGeneral", clock="seconds", note=note)


def _merged(parts: list[tuple[Uint64s, Uint64s]]) -> tuple[Uint64s, Uint64s]:
    return largest(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _in_blocks(sizes: Uint32s) -> Uint64s:
    return np.maximum((sizes.astype(np.uint64) + BLOCK_BYTES - 1) // BLOCK_BYTES, 1)


def _batches(path: Path) -> Iterator[tuple[int, Records]]:
    with readable(path):
        size_bytes = path.stat().st_size
        if size_bytes % RECORD.itemsize:
            raise DataError(
                f"size: '{path}' has {size_bytes} bytes, not a multiple of 24: truncated, or of another format", _HINT
            )
        row = 0
        with open(path, "rb") as file:
            while len(records := np.fromfile(file, RECORD, _BATCH_ROWS)):
                yield row, records
                row += len(records)


def _check(records: Records, row: int, after_s: int) -> None:
    time, following = records["time"], records["next"]
    back = np.diff(time.astype(np.int64), prepend=after_s) < 0
    if back.any():
        at = int(back.argmax())
        raise DataError(f"time: record {row + at} has {time[at]}, less than the record before it: times must ascend", _HINT)
    # -1 is never, -2 unknown; some writers use the largest number for never.
    if (following < -2).any():
        at = int((following < -2).argmax())
        raise DataError(f"next: record {row + at} has {following[at]}, must be -1 or the number of a request", _HINT)


def write(reader: TraceReader, path: Path) -> None:
    """Write all accesses, reads and writes alike; memory: 8 bytes for each distinct block.

    Requests are numbered from 1; the object of a block is its id in the space of the trace, plus 1.
    """
    space = BlockSpace.of(reader.batches())
    records = _reserved(path, sum(batch.accesses for batch in reader.batches()))
    latest = np.full(space.blocks, -1, np.int64)  # the last record of each block
    done = 0
    for batch in reader.batches():
        for ids, seconds in _touched(batch, space.place(batch)):
            part = records[done : done + len(ids)]
            part["time"], part["object"], part["size"], part["next"] = seconds, ids + 1, BLOCK_BYTES, NEVER
            _link(records, ids, latest, done)
            done += len(ids)
    records.flush()


def _reserved(path: Path, rows: int) -> np.memmap[tuple[int], np.dtype[np.void]]:
    """Reserve the space, so that a full disk is an OSError and not a SIGBUS."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, rows * RECORD.itemsize)
    return np.memmap(path, RECORD, "r+", shape=(rows,))


def _touched(batch: Trace, starts: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    seconds = (batch.t_ns // _SECOND_NS).astype(np.int64)
    if len(seconds) and int(seconds[-1]) >> 32:
        raise DataError(f"t_ns: {batch.t_ns[-1]} ns is beyond 32 bits of seconds", "oracleGeneral cannot hold such a time")
    count = batch.count.astype(np.int64)
    ends = np.cumsum(count)
    for begin in range(0, int(ends[-1]) if len(ends) else 0, _BATCH_ROWS):
        at = np.arange(begin, min(begin + _BATCH_ROWS, int(ends[-1])))
        row = np.searchsorted(ends, at, side="right")
        yield starts[row] + at - (ends - count)[row], seconds[row]


def _link(records: np.memmap[tuple[int], np.dtype[np.void]], ids: Int64s, latest: Int64s, done: int) -> None:
    """Set `next` of the requests from `done` on, and of earlier requests for the same blocks."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    again = ordered[1:] == ordered[:-1]
    records["next"][done + order[:-1][again]] = done + order[1:][again] + 1
    first = order[np.concatenate(([True], ~again))]
    before = latest[ids[first]]
    records["next"][before[before >= 0]] = done + first[before >= 0] + 1
    last = order[np.concatenate((~again, [True]))]
    latest[ids[last]] = done + last
