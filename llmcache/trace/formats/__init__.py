"""Other trace formats: the suffix of the file name selects the format, and conversion takes constant memory.

A format is a module with `read(path, writer)`, which raises DataError for an invalid file. A writable format has
`write(reader, path)`, which fills an existing empty file.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

from llmcache.errors import DataError, UsageError
from llmcache.files import Output, writing
from llmcache.trace.record import TraceReader, TraceWriter

PARQUET = ".parquet"
# Suffix (lower case): module. Modules are imported on demand, because some import slow parts of pyarrow.
FORMATS = {".strace": "strace", ".csv": "csv", ".oraclegeneral": "oracle_general", ".recording": "recording"}


def open_trace(path: str | os.PathLike[str]) -> TraceReader:
    """Return a reader of a trace, converted to a temporary file if necessary.

    UsageError for an unknown suffix; DataError for an invalid or empty trace.
    """
    path = Path(path)
    reader = TraceReader(path) if _suffix(path) == PARQUET else _imported(path)
    if not reader.rows:
        reader.close()
        raise DataError(f"rows: '{path}' has no accesses", "record it again")
    return reader


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str], force: bool = False) -> int:
    """Write the trace in `source` to `target`, and return the number of rows.

    UsageError for an unusable suffix or target; DataError for an invalid or empty trace. A failed conversion leaves no file.
    """
    source, target = Path(source), Path(target)
    if _suffix(target) == PARQUET:
        return _to_parquet(source, target, force)
    module = _module(target)
    if not hasattr(module, "write"):
        raise UsageError(f"OUT: {_suffix(target)} cannot be written", "use .parquet, .csv or .oracleGeneral")
    output = Output(target, force)
    with open_trace(source) as reader, output as temporary:
        with writing(target):
            module.write(reader, temporary)
        return reader.rows


def _imported(path: Path) -> TraceReader:
    with tempfile.TemporaryDirectory(prefix="llmcache-") as directory:
        converted = Path(directory) / "trace.parquet"
        with TraceWriter(converted) as writer:
            _module(path).read(path, writer)
        # The reader's open file stays readable after its name is removed.
        return TraceReader(converted)


def _suffix(path: Path) -> str:
    found = path.suffix.lower()
    if found != PARQUET and found not in FORMATS:
        known = ", ".join([PARQUET, *FORMATS]).replace("general", "General")
        raise UsageError(f"'{path}': no trace format has the ending '{path.suffix}'", f"known endings: {known}")
    return found


def _module(path: Path) -> Any:
    return importlib.import_module(f"{__name__}.{FORMATS[_suffix(path)]}")


def _to_parquet(source: Path, target: Path, force: bool) -> int:
    read = _copy if _suffix(source) == PARQUET else _module(source).read
    with TraceWriter(target, force=force) as writer:
        read(source, writer)
        if not writer.rows:
            raise DataError(f"rows: '{source}' has no accesses", "record it again")
    return writer.rows


def _copy(path: Path, writer: TraceWriter) -> None:
    with TraceReader(path) as reader:
        writer.provenance = reader.provenance
        for file in reader.files:
            writer.add_file(file)
        for batch in reader.batches():
            writer.append(batch)
