"""The file that grows during a recording: an Arrow stream, readable up to the last flush even if the recorder is killed.

A Parquet file is readable only after its footer is written. Batches contain the new entries of the file table.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.files import PRIVATE, writing
from llmcache.trace.record import (
    COLUMNS,
    KEY,
    SCHEMA,
    Columns,
    Provenance,
    TraceFile,
    TraceWriter,
    columns_of,
    decode,
    encode,
    files_of,
    readable,
)

ENDING = ".recording"
FILES = b"files"
LOST = b"lost_events"
INTERRUPTED = "The recording was cut short: it ends with its last flush."
_END = b"\xff\xff\xff\xff\0\0\0\0"  # the last bytes of a closed Arrow stream
_FOREIGN = "the file is not a recording of llmcache trace, or it is damaged"


class RecordingFull(MissingRequirement):
    """The recording cannot grow (full disk, quota); all earlier batches are complete."""


class RecordingWriter:
    """Writes batches to `path`, which stays readable after `close` or a kill. UsageError if `path` exists and `force` is
    not set.
    """

    def __init__(self, path: Path, provenance: Provenance, force: bool) -> None:
        self.path = path
        with writing(path):
            if force:
                path.unlink(missing_ok=True)
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
            except FileExistsError as error:
                hint = f"a recorder is writing it, or one that was killed has left it: llmcache convert {path} OUT.parquet"
                raise UsageError(f"-o: '{path}' already exists", f"{hint}; --force replaces it") from error
        self._file = open(self._fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - open until close()
        self.size_bytes = 0  # up to the last whole batch
        schema = SCHEMA.with_metadata({KEY: encode((), provenance)})
        try:
            with writing(path):
                # Pass an unbuffered file and not a path, so that each batch is written at once.
                self._stream = pa.ipc.new_stream(self._file, schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
                # pyarrow writes the schema with the first batch: write an empty one, so that the file is readable now.
                self._write(no_rows(), (), 0)
        except MissingRequirement:
            self.discard()
            raise

    def append(self, rows: Columns, new_files: Sequence[TraceFile], lost_events: int) -> None:
        """Write a batch. If there is no space, truncate the file to the previous batch and raise RecordingFull."""
        try:
            with writing(self.path):
                self._write(rows, new_files, lost_events)
        except MissingRequirement as error:
            os.ftruncate(self._file.fileno(), self.size_bytes)
            self._file.close()
            raise RecordingFull(error.message, kept_hint(self.path)) from error

    def _write(self, rows: Columns, new_files: Sequence[TraceFile], lost_events: int) -> None:
        entries = [dataclasses.asdict(file) for file in new_files]
        facts = {FILES: json.dumps(entries).encode(), LOST: str(lost_events).encode()}
        self._stream.write_batch(pa.record_batch(list(rows), schema=SCHEMA), custom_metadata=facts)
        self.size_bytes = self._file.tell()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            with writing(self.path):
                self._stream.close()
        finally:
            self._file.close()

    @property
    def opened(self) -> Path:
        """Return a path of the open file, valid in this process until `discard` even if another file has its name."""
        return Path(f"/proc/self/fd/{self._fd}")

    def discard(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def kept_hint(path: Path) -> str:
    """Return the hint for an error after which the recording remains."""
    return f"the rows recorded so far are in '{path}', which llmcache info, classify and convert read"


def no_rows() -> Columns:
    """Return a batch without rows."""
    return Columns(*(np.zeros(0, dtype) for dtype in COLUMNS.values()))


def recording_of(output: str | os.PathLike[str]) -> Path:
    """Return the path of the recording for the trace `output`."""
    path = Path(output)
    return path.with_name(path.name + ENDING)


def read(path: Path, writer: TraceWriter) -> None:
    """Append the rows and files up to the first incomplete batch; DataError if it is not a recording."""
    with readable(path), pa.OSFile(str(path)) as file:
        stream = _stream(path, file)
        provenance = decode(stream.schema.metadata[KEY])[1]
        lost = 0
        for batch, facts in _batches(path, stream):
            try:
                files = files_of(json.loads(facts[FILES]))
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
        raise DataError(f"columns: '{path}' does not have the columns of a recording", _FOREIGN)
    return stream


def _batches(path: Path, stream: Any) -> Iterator[tuple[Any, dict[bytes, bytes]]]:
    while True:
        try:
            batch, facts = stream.read_next_batch_with_custom_metadata()
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            if _is_ended(path):
                raise _damaged(error) from error
            return  # the recorder was killed while it wrote this batch
        try:
            batch.validate()  # a damaged length would cause reads beyond the columns
        except pa.ArrowException as error:
            raise _damaged(error) from error
        yield batch, dict(facts or {})


def _damaged(error: Exception) -> DataError:
    return DataError(f"rows: a batch is damaged: {str(error).splitlines()[0]}", _FOREIGN)


def _is_ended(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-min(len(_END), path.stat().st_size), os.SEEK_END)
        return file.read() == _END
