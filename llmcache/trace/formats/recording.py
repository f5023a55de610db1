"""The file that grows while recording: an Arrow stream, readable up to its last flush however the recorder ends.

Parquet can be read only when its footer is written, last of all. So rows go to `OUT.recording` first, in batches that
carry what was new in the file table (`RecordingWriter`), and become OUT at the end; what a kill or a full disk leaves is
read like any other format (`read`).
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

from llmcache.errors import DataError, EnvironmentProblem, UsageError
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
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream that was closed
_FOREIGN = "the file is not a recording of llmcache trace, or it is damaged"


class RecordingFull(EnvironmentProblem):
    """The recording cannot grow any more (a full disk, a quota); it is whole up to the batch before."""


class RecordingWriter:
    """Appends batches to `path`; `close` or the death of the process leaves it readable."""

    def __init__(self, path: Path, provenance: Provenance, force: bool) -> None:
        """UsageError if `path` is there already and `force` is not set; EnvironmentProblem if it cannot be written."""
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
                # A sink of our own, so that every write is seen: pyarrow keeps nothing back between batches.
                self._stream = pa.ipc.new_stream(self._file, schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
                # The schema goes with the first batch: an empty one, so that the file can be read from now on.
                self._write(no_rows(), (), 0)
        except EnvironmentProblem:
            self.discard()
            raise

    def append(self, rows: Columns, new_files: Sequence[TraceFile], lost_events: int) -> None:
        """Write a batch. RecordingFull, with the file cut back to the batch before, if there is no room."""
        try:
            with writing(self.path):
                self._write(rows, new_files, lost_events)
        except EnvironmentProblem as error:
            os.ftruncate(self._file.fileno(), self.size_bytes)
            self._file.close()
            raise RecordingFull(error.message, kept_hint(self.path)) from error

    def _write(self, rows: Columns, new_files: Sequence[TraceFile], lost_events: int) -> None:
        entries = [dataclasses.asdict(file) for file in new_files]
        facts = {FILES: json.dumps(entries).encode(), LOST: str(lost_events).encode()}
        self._stream.write_batch(pa.record_batch(list(rows), schema=SCHEMA), custom_metadata=facts)
        self.size_bytes = self._file.tell()

    def close(self) -> None:
        """End the stream. The file stays."""
        if self._file.closed:
            return
        try:
            with writing(self.path):
                self._stream.close()
        finally:
            self._file.close()

    @property
    def opened(self) -> Path:
        """A path by which this process reads the file until `discard`, whatever lies at its name by then."""
        return Path(f"/proc/self/fd/{self._fd}")

    def discard(self) -> None:
        """Remove the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def kept_hint(path: Path) -> str:
    """Return the hint for an error that leaves the recording `path`."""
    return f"the rows recorded so far are in '{path}', which llmcache info, classify and convert read"


def no_rows() -> Columns:
    """A batch without rows."""
    return Columns(*(np.zeros(0, dtype) for dtype in COLUMNS.values()))


def recording_of(output: str | os.PathLike[str]) -> Path:
    """Return the name of the recording that becomes the trace `output`."""
    path = Path(output)
    return path.with_name(path.name + ENDING)


def read(path: Path, writer: TraceWriter) -> None:
    """Append the rows in `path` and its files; a batch that is cut off ends it. DataError if it is something else."""
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
    """Yield whole batches with their metadata."""
    while True:
        try:
            batch, facts = stream.read_next_batch_with_custom_metadata()
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            if _is_ended(path):
                raise _damaged(error) from error
            return  # it was being written when the recorder died
        try:
            batch.validate()  # that its columns are as long as it says; reading on would be outside of them
        except pa.ArrowException as error:
            raise _damaged(error) from error
        yield batch, dict(facts or {})


def _damaged(error: Exception) -> DataError:
    return DataError(f"rows: a batch is damaged: {str(error).splitlines()[0]}", _FOREIGN)


def _is_ended(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-min(len(_END), path.stat().st_size), os.SEEK_END)
        return file.read() == _END
