"""`llmcache convert`: a trace from one format to another, by the endings of the names, in constant memory."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcache.errors import DataError, UsageError
from llmcache.trace.record import TraceReader, TraceWriter, open_trace
from llmcache.trace.record.opening import PARQUET, ending, importer
from llmcache.trace.record.output import Output, problem

SCHEMA = "llmcache.convert/1"
Exporter = Callable[[TraceReader, Path], None]
# ending (in lower case): module:function
EXPORTERS = {
    ".csv": "llmcache.trace.exporters.csv:write",
    ".oraclegeneral": "llmcache.trace.exporters.oracle_general:write",
}


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote."""

    path: Path
    rows: int
    size_bytes: int

    def document(self) -> dict[str, Any]:
        """Returns the JSON-ready document of `llmcache convert --json`."""
        return {"schema": SCHEMA, "path": str(self.path), "rows": self.rows, "size_bytes": self.size_bytes}


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str], force: bool = False) -> Converted:
    """Write the trace in `source` to `target`, and return what was written.

    UsageError for an ending that is unknown or cannot be written, or if `target` exists and `force` is not set;
    DataError for contents that are wrong, or a trace without rows. Nothing is left of a conversion that fails.
    """
    source, target = Path(source), Path(target)
    exporter = _exporter(target)
    if exporter is None:
        rows = _to_parquet(source, target, force)
    else:
        output = Output(target, force)
        with open_trace(source) as reader, output as temporary:
            try:
                exporter(reader, temporary)
            except OSError as error:
                raise problem(target, error) from error
            rows = reader.rows
    return Converted(target, rows, target.stat().st_size)


def _exporter(target: Path) -> Exporter | None:
    """Returns what writes files with the ending of `target`; None for Parquet."""
    found = ending(target)
    if found == PARQUET:
        return None
    if found not in EXPORTERS:
        raise UsageError(f"OUT: {found} cannot be written", "write .parquet, .csv or .oracleGeneral")
    module, _, attribute = EXPORTERS[found].partition(":")
    exporter: Exporter = getattr(importlib.import_module(module), attribute)
    return exporter


def _to_parquet(source: Path, target: Path, force: bool) -> int:
    """Returns the rows written; other formats are read straight into the target, without a temporary Parquet file."""
    read = importer(source) if ending(source) != PARQUET else _copy
    with TraceWriter(target, force=force) as writer:
        read(source, writer)
        if not writer.rows:
            raise DataError(f"rows: '{source}' has no accesses", "record it again")
    return writer.rows


def _copy(source: Path, writer: TraceWriter) -> None:
    with TraceReader(source) as reader:
        writer.provenance = reader.provenance
        for file in reader.files:
            writer.add_file(file)
        for batch in reader.batches():
            writer.append(batch)
