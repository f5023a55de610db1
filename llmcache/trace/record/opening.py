"""Opens a trace in any format, by the ending of its name. The importers are looked up when they are needed."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from llmcache.errors import DataError, UsageError
from llmcache.trace.record.reader import TraceReader
from llmcache.trace.record.writer import TraceWriter

# ending (in lower case): module:function that appends what it reads to a writer. Strings, because the record is
# imported by parts of the package that must not import the importers.
Importer = Callable[[Path, TraceWriter], None]
IMPORTERS = {
    ".strace": "llmcache.trace.importers.strace:read",
    ".csv": "llmcache.trace.importers.csv:read",
    ".oraclegeneral": "llmcache.trace.importers.oracle_general:read",
    ".recording": "llmcache.trace.importers.recording:read",
}
PARQUET = ".parquet"


def open_trace(path: str | os.PathLike[str]) -> TraceReader:
    """Returns a reader of a trace in any format; other formats than Parquet are converted to a temporary file first.

    UsageError for an ending that is unknown; DataError for contents that are wrong, or no rows.
    """
    path = Path(path)
    reader = TraceReader(path) if ending(path) == PARQUET else _imported(path)
    if not reader.rows:
        reader.close()
        raise DataError(f"rows: '{path}' has no accesses", "record it again")
    return reader


def _imported(path: Path) -> TraceReader:
    with tempfile.TemporaryDirectory(prefix="llmcache-") as directory:
        converted = Path(directory) / "trace.parquet"
        with TraceWriter(converted) as writer:
            importer(path)(path, writer)
        # The open file outlives its name.
        return TraceReader(converted)


def ending(path: Path) -> str:
    """Returns the ending of `path` in lower case; UsageError for one that no format has."""
    found = path.suffix.lower()
    if found != PARQUET and found not in IMPORTERS:
        known = ", ".join([PARQUET, *IMPORTERS]).replace("general", "General")
        raise UsageError(f"'{path}': the ending '{path.suffix}' is of no known trace format", f"known are: {known}")
    return found


def importer(path: Path) -> Importer:
    """Returns the function that reads files with the ending of `path`."""
    module, _, attribute = IMPORTERS[ending(path)].partition(":")
    found: Importer = getattr(importlib.import_module(module), attribute)
    return found
