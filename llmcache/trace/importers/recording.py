"""What `llmcache trace` leaves when it is killed: the rows up to the last flush, and the files they are in."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from llmcache.errors import DataError
from llmcache.trace.capture.journal import LOST, files_in
from llmcache.trace.record import TraceWriter
from llmcache.trace.record.columns import SCHEMA
from llmcache.trace.record.meta import KEY, decode
from llmcache.trace.record.reader import columns_of, readable

INTERRUPTED = "The recording was cut short: it ends with its last flush."
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream that was closed
_FOREIGN = "not what llmcache trace leaves, or damaged"


def read(path: Path, writer: TraceWriter) -> None:
    """Append the rows in `path` and its files; a batch that is cut off ends it. DataError if it is something else."""
    with readable(path), pa.OSFile(str(path)) as file:
        stream = _stream(path, file)
        provenance = decode(stream.schema.metadata[KEY])[1]
        lost = 0
        for batch, facts in _batches(stream):
            try:
                files = files_in(facts)
                lost = int(facts[LOST])
            except (ValueError, KeyError, RecursionError) as error:
                raise DataError(f"files: '{path}' has a batch without its file table", _FOREIGN) from error
            for entry in files:
                writer.add_file(entry)
            writer.append(columns_of(batch))
    note = provenance.note if _is_ended(path) else f"{provenance.note} {INTERRUPTED}".strip()
    writer.provenance = dataclasses.replace(provenance, lost_events=lost, note=note)


def _stream(path: Path, file: Any) -> Any:
    try:
        stream = pa.ipc.open_stream(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"'{path}' is not a recording: {str(error).splitlines()[0]}", _FOREIGN) from error
    if not stream.schema.equals(SCHEMA) or KEY not in (stream.schema.metadata or {}):
        raise DataError(f"columns: '{path}' has others than a recording", _FOREIGN)
    return stream


def _batches(stream: Any) -> Iterator[tuple[Any, dict[bytes, bytes]]]:
    """Yields whole batches with their metadata."""
    while True:
        try:
            batch, facts = stream.read_next_batch_with_custom_metadata()
        except (StopIteration, pa.ArrowException, OSError):
            return  # the end, or a batch that was being written when the recorder died
        try:
            batch.validate()  # that its columns are as long as it says; reading on would be outside of them
        except pa.ArrowException as error:
            raise DataError(f"rows: a batch is damaged: {str(error).splitlines()[0]}", _FOREIGN) from error
        yield batch, dict(facts or {})


def _is_ended(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-min(len(_END), path.stat().st_size), os.SEEK_END)
        return file.read() == _END
