"""Writes CSV: `file,offset,length,op,time` with a header; bytes, and seconds with nine digits after the point.

Lines are put together column by column: pyarrow's own writer refuses paths that are not UTF-8 and writes 1E-9.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from llmcache.trace.record import BLOCK_BYTES, Trace, TraceReader
from llmcache.trace.record.columns import OP_NAMES

HEADER = b"file,offset,length,op,time\n"
_SECOND_NS = np.uint64(10**9)
_SPECIAL = set(b',"\r\n ')


def write(reader: TraceReader, path: Path) -> None:
    """Write all rows to `path`, whole blocks; what CSV has no column for (miss, pid, identity of files) is left out."""
    numbers = np.array([file.id for file in reader.files], np.uint32)
    paths = pa.array([_quoted(os.fsencode(file.path)) for file in reader.files], pa.binary())
    with open(path, "wb") as target:
        target.write(HEADER)
        for batch in reader.batches():
            target.write(_lines(batch, numbers, paths))


def _quoted(path: bytes) -> bytes:
    return b'"' + path.replace(b'"', b'""') + b'"' if _SPECIAL & set(path) else path


def _lines(batch: Trace, numbers: NDArray[np.uint32], paths: Any) -> Any:
    """Returns the lines of a batch, as one buffer of bytes."""
    cells = [
        paths.take(pa.array(np.searchsorted(numbers, batch.file))),
        _decimal(batch.first * np.uint64(BLOCK_BYTES)),
        _decimal(batch.count.astype(np.uint64) * np.uint64(BLOCK_BYTES)),
        pa.array([name.encode() for name in OP_NAMES]).take(pa.array(batch.op)),
        pc.binary_join_element_wise(_decimal(batch.t_ns // _SECOND_NS), _decimal(batch.t_ns % _SECOND_NS, digits=9), b"."),
    ]
    lines = pc.binary_join_element_wise(pc.binary_join_element_wise(*cells, b","), pa.scalar(b""), b"\n")
    return lines.buffers()[2] if len(batch) else b""


def _decimal(values: NDArray[np.uint64], digits: int = 1) -> Any:
    return pc.utf8_lpad(pa.array(values).cast(pa.string()), digits, "0").cast(pa.binary())
