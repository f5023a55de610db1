"""The trace format: one row for each run of 4 KiB blocks of a file, in Parquet; everything else reads and writes this.

`Trace` is rows in memory, `TraceReader` and `TraceWriter` stream files larger than memory, `open_trace` reads any
supported format.
"""

from llmcache.trace.record.columns import BLOCK_BYTES, COLUMNS, HIT, MAP, MISS, READ, UNKNOWN, WRITE, Columns
from llmcache.trace.record.meta import Provenance, TraceFile
from llmcache.trace.record.opening import open_trace
from llmcache.trace.record.reader import TraceReader
from llmcache.trace.record.trace import Trace, concatenate
from llmcache.trace.record.writer import TraceWriter

__all__ = [
    "BLOCK_BYTES",
    "COLUMNS",
    "HIT",
    "MAP",
    "MISS",
    "READ",
    "UNKNOWN",
    "WRITE",
    "Columns",
    "Provenance",
    "Trace",
    "TraceFile",
    "TraceReader",
    "TraceWriter",
    "concatenate",
    "open_trace",
]
