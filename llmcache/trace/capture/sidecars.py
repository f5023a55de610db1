"""Files beside a trace, for what is no access: block requests with their latency, and sampled touches of mapped pages.

`RUN.block.parquet` (schema "llmcache.block/1") has a row for each request of the block layer. `RUN.sampled.parquet` is a
trace by itself: sets of pages touched within each interval, in the order of their blocks and not of time.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llmcache.arrays import Records
from llmcache.errors import EnvironmentProblem
from llmcache.files import Output, writing
from llmcache.trace.capture.files import FileTable
from llmcache.trace.record import Provenance, TraceFile, TraceWriter
from llmcache.trace.sources.base import MATCHED
from llmcache.units import BLOCK_BYTES, format_duration, format_size

BLOCK_SCHEMA = "llmcache.block/1"
NO_FILE = (1 << 32) - 1
_COLUMNS = pa.schema(
    [
        ("t_ns", pa.uint64()),  # completion, clock of the trace
        ("latency_us", pa.uint32()),
        ("dev", pa.uint64()),  # of the disk, or of the file system where a file is known
        ("file", pa.uint32()),  # id in the trace; NO_FILE if not known
        ("first", pa.uint64()),  # block of the file, or of the disk
        ("count", pa.uint32()),
        ("op", pa.uint8()),
        ("pid", pa.uint32()),
    ]
)


def sidecar(output: str | os.PathLike[str], what: str) -> Path:
    """Returns the name of the file with `what` beside the trace `output`: run.parquet, "block": run.block.parquet."""
    path = Path(output)
    return path.with_suffix(f".{what}{path.suffix}")


class BlockRequests:
    """Writes the requests of the block layer, under a temporary name until `close`."""

    def __init__(self, path: Path, force: bool) -> None:
        """UsageError if `path` exists and `force` is not set; EnvironmentProblem if it cannot be written."""
        self.path = path
        self._requests = self._blocks = self._latency_us = 0
        self._output = Output(path, force)
        described = _COLUMNS.with_metadata({"llmcache.block": BLOCK_SCHEMA})
        try:
            with writing(path):
                self._parquet = pq.ParquetWriter(self._output.begin(), described, compression="zstd")
        except EnvironmentProblem:
            self._output.discard()
            raise

    def append(self, records: Records, table: FileTable) -> None:
        """Write `records`, all of kind BLOCK; those that are matched get the number of their file."""
        if not len(records):
            return
        self._requests += len(records)
        self._blocks += int(records["count"].sum(dtype=np.int64))
        self._latency_us += int(records["aux"].sum(dtype=np.int64))
        matched = records["flags"] & MATCHED != 0
        file = np.full(len(records), NO_FILE, np.uint32)
        some = records[matched]
        file[matched] = table.numbers(some["dev"], some["inode"], some["pid"])
        columns = [records[name] for name in ("t_ns", "aux", "dev")]
        columns += [file, *(records[name] for name in ("first", "count", "op", "pid"))]
        batch = pa.record_batch([np.ascontiguousarray(column) for column in columns], schema=_COLUMNS)
        with writing(self.path):
            self._parquet.write_batch(batch)

    @property
    def summary(self) -> str:
        """How many requests there were, their size and their latency on average."""
        if not self._requests:
            return "no block requests"
        latency = format_duration(self._latency_us / self._requests * 1e3)
        return f"{self._requests} block requests, {format_size(self._blocks * BLOCK_BYTES)}, {latency} each on average"

    def close(self, files: list[TraceFile], provenance: Provenance) -> None:
        """Give the file its name."""
        with writing(self.path):
            self._parquet.close()
        self._output.keep()

    def discard(self) -> None:
        """Remove what has been written."""
        self._output.discard()


class SampledTouches:
    """Writes the sampled sets as a trace, under a temporary name until `close`."""

    def __init__(self, path: Path, force: bool) -> None:
        """UsageError if `path` exists and `force` is not set."""
        self.path = path
        self._blocks = 0
        self._writer = TraceWriter(path, force=force)

    @property
    def summary(self) -> str:
        """How many blocks were found touched, all intervals together."""
        return f"{self._blocks} sampled touches of blocks"

    def append(self, records: Records, table: FileTable) -> None:
        """Write `records`, all of kind SAMPLED."""
        if not len(records):
            return
        self._blocks += int(records["count"].sum(dtype=np.int64))
        file = table.numbers(records["dev"], records["inode"], records["pid"])
        columns = {name: records[name] for name in ("t_ns", "first", "count", "op", "miss", "pid")}
        self._writer.append({**columns, "file": file})

    def close(self, files: list[TraceFile], provenance: Provenance) -> None:
        """Give the file its name; `provenance` is that of the trace."""
        for file in files:
            self._writer.add_file(file)
        note = "Sampled: pages touched within each interval, in the order of their blocks; not single accesses."
        self._writer.provenance = dataclasses.replace(provenance, tier=f"{provenance.tier}, sampled", note=note)
        self._writer.close()

    def discard(self) -> None:
        """Remove what has been written."""
        self._writer.discard()
