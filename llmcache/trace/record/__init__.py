"""The trace format: one row for each run of 4 KiB blocks of a file, in Parquet; everything else reads and writes this.

`Trace` is rows in memory, `TraceReader` and `TraceWriter` stream files larger than memory, `BlockSpace` numbers the blocks
of all files. `llmcache.trace.formats` reads and writes other formats.
"""

from llmcache.trace.record.columns import COLUMNS, HIT, MAP, MISS, READ, UNKNOWN, WRITE, Columns
from llmcache.trace.record.meta import Provenance, TraceFile
from llmcache.trace.record.space import BlockSpace
from llmcache.trace.record.trace import Trace, TraceReader, TraceWriter, concatenate

__all__ = [
    "COLUMNS",
    "HIT",
    "MAP",
    "MISS",
    "READ",
    "UNKNOWN",
    "WRITE",
    "BlockSpace",
    "Columns",
    "Provenance",
    "Trace",
    "TraceFile",
    "TraceReader",
    "TraceWriter",
    "concatenate",
]
