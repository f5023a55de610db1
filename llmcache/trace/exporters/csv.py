"""Writes CSV: `file,offset,length,op,time` with a header; bytes, and seconds with nine digits after the point."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from llmcache.trace.record import BLOCK_BYTES, Trace, TraceReader
from llmcache.trace.record.columns import OP_NAMES

_SCHEMA = pa.schema(
    {"file": pa.binary(), "offset": pa.int64(), "length": pa.int64(), "op": pa.string(), "time": pa.decimal128(29, 9)}
)


def write(reader: TraceReader, path: Path) -> None:
    """Write all rows to `path`, whole blocks; what CSV has no column for (miss, pid, identity of files) is left out."""
    numbers = np.array([file.id for file in reader.files], np.uint32)
    paths = pa.array([os.fsencode(file.path) for file in reader.files], pa.binary())
    with pyarrow.csv.CSVWriter(str(path), _SCHEMA) as target:
        for batch in reader.batches():
            target.write_batch(_batch(batch, numbers, paths))


def _batch(batch: Trace, numbers: np.ndarray[Any, np.dtype[np.uint32]], paths: Any) -> Any:
    return pa.record_batch(
        [
            paths.take(pa.array(np.searchsorted(numbers, batch.file))),
            batch.first.astype(np.int64) * BLOCK_BYTES,
            batch.count.astype(np.int64) * BLOCK_BYTES,
            pa.array(OP_NAMES).take(pa.array(batch.op)),
            _seconds(batch),
        ],
        schema=_SCHEMA,
    )


def _seconds(batch: Trace) -> Any:
    """Returns the times as decimals: 128-bit integers that count nanoseconds, with nine digits after the point."""
    words = np.zeros((len(batch), 2), np.uint64)
    words[:, 0] = batch.t_ns
    return pa.Array.from_buffers(_SCHEMA.field("time").type, len(batch), [None, pa.py_buffer(words)])
