"""Rows of a trace in memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmcache.errors import DataError
from llmcache.trace.record.columns import Columns, check_files, check_rows, columns_from, concatenated
from llmcache.trace.record.meta import Provenance, TraceFile, file_table

BATCH_ROWS = 1 << 16


class Trace:
    """Accesses to runs of blocks, in the order of time, with the files they are in. Not changed once made.

    Columns, one entry per run: `t_ns` u64, `file` u32 (an id of `files`), `first` u64 and `count` u32 (blocks of
    4 KiB), `op` u8 (READ, WRITE, MAP), `miss` u8 (HIT, MISS, UNKNOWN), `pid` u32. `files` is sorted by id.
    """

    def __init__(self, columns: Columns, files: Sequence[TraceFile], provenance: Provenance) -> None:
        """Takes columns that have been checked; `Trace.build` checks."""
        self.columns = columns
        self.t_ns, self.file, self.first, self.count = columns.t_ns, columns.file, columns.first, columns.count
        self.op, self.miss, self.pid = columns.op, columns.miss, columns.pid
        self.files = tuple(files)
        self.provenance = provenance

    @classmethod
    def build(
        cls,
        t_ns: ArrayLike,
        file: ArrayLike,
        first: ArrayLike,
        count: ArrayLike,
        op: ArrayLike = 0,
        miss: ArrayLike = 2,
        pid: ArrayLike = 0,
        *,
        files: Sequence[TraceFile],
        provenance: Provenance,
    ) -> Trace:
        """Returns a trace of these columns (integers of any width; a number is repeated); DataError names a wrong one."""
        given = {"t_ns": t_ns, "file": file, "first": first, "count": count, "op": op, "miss": miss, "pid": pid}
        columns, table = columns_from(given), file_table(files)
        check_rows(columns)
        check_files(columns, table)
        return cls(columns, table, provenance)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Returns the whole trace in the Parquet file `path`; DataError if it is not one."""
        from llmcache.trace.record.reader import TraceReader

        with TraceReader(path) as reader:
            return reader.read()

    def save(self, path: str | os.PathLike[str], force: bool = False) -> None:
        """Write Parquet; UsageError if `path` exists and `force` is not set."""
        from llmcache.trace.record.writer import TraceWriter

        with TraceWriter(path, files=self.files, provenance=self.provenance, force=force) as writer:
            writer.append(self)

    def __len__(self) -> int:
        return len(self.t_ns)

    def __repr__(self) -> str:
        return f"<Trace: {len(self)} rows, {self.accesses} blocks, {len(self.files)} files, {self.provenance.tier}>"

    @property
    def accesses(self) -> int:
        """Blocks accessed, repeats included."""
        return int(self.count.sum(dtype=np.uint64))

    @property
    def end(self) -> NDArray[np.uint64]:
        """The block past the last of each run (u64)."""
        return self.first + self.count

    def slice(self, start_row: int, end_row: int) -> Trace:
        """Returns rows start_row .. end_row - 1 (a view), with all files."""
        return Trace(self.columns.rows(start_row, end_row), self.files, self.provenance)

    def between(self, t0_ns: int, t1_ns: int) -> Trace:
        """Returns the rows with t0_ns <= t_ns < t1_ns (a view), with all files."""
        start, end = (int(np.searchsorted(self.t_ns, np.uint64(max(0, at)))) for at in (t0_ns, t1_ns))
        return self.slice(start, max(start, end))

    def batches(self, rows: int = BATCH_ROWS) -> Iterator[Trace]:
        """Yields the trace in parts of at most `rows` rows, as `TraceReader.batches` does."""
        for start in range(0, len(self), rows):
            yield self.slice(start, start + rows)

    def equals(self, other: Trace) -> bool:
        """Whether rows, files and provenance are the same."""
        same = all(np.array_equal(a, b) for a, b in zip(self.columns, other.columns, strict=True))
        return same and self.files == other.files and self.provenance == other.provenance


def concatenate(traces: Sequence[Trace]) -> Trace:
    """Returns all rows of `traces` in this order. Files with the same dev, inode, generation and path become one.

    A trace that begins before the one in front of it has ended is moved in time to begin where that one ended.
    The provenance is that of the first, with the events lost in all.
    """
    if not traces:
        raise ValueError("traces: at least one is needed")
    table: dict[tuple[int, int, int, str], TraceFile] = {}
    parts: list[Columns] = []
    end_ns = 0
    for trace in traces:
        ids = _merge(table, trace.files)
        t_ns = _moved(trace.t_ns, end_ns)
        end_ns = int(t_ns[-1]) if len(t_ns) else end_ns
        parts.append(dataclasses.replace(trace.columns, t_ns=t_ns, file=_renumbered(trace, ids)))
    lost = sum(trace.provenance.lost_events for trace in traces)
    provenance = dataclasses.replace(traces[0].provenance, lost_events=lost)
    return Trace(concatenated(parts), file_table(table.values()), provenance)


def _merge(table: dict[tuple[int, int, int, str], TraceFile], files: Sequence[TraceFile]) -> NDArray[np.uint32]:
    """Returns the new id of each of `files`, which are added to `table`."""
    ids = np.zeros(len(files), np.uint32)
    for index, file in enumerate(files):
        known = table.get(file.identity)
        size_bytes = max(file.size_bytes, known.size_bytes if known else 0)
        ids[index] = known.id if known else len(table)
        table[file.identity] = dataclasses.replace(file, id=int(ids[index]), size_bytes=size_bytes)
    return ids


def _renumbered(trace: Trace, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
    old = np.array([file.id for file in trace.files], np.uint32)
    return ids[np.searchsorted(old, trace.file)] if len(trace) else trace.file


def _moved(t_ns: NDArray[np.uint64], end_ns: int) -> NDArray[np.uint64]:
    if not len(t_ns) or int(t_ns[0]) >= end_ns:
        return t_ns
    if int(t_ns[-1]) - int(t_ns[0]) + end_ns >= 1 << 64:
        raise DataError("t_ns: the traces together last longer than 64 bits of nanoseconds", "concatenate fewer")
    moved: NDArray[np.uint64] = t_ns - t_ns[0] + np.uint64(end_ns)
    return moved
