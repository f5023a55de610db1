"""The file that grows while recording: an Arrow stream, readable up to its last flush however the recorder ends.

Parquet can be read only when its footer is written, last of all. So rows go to `OUT.recording` first, in batches that
carry what was new in the file table, and become OUT at the end; what a kill or a full disk leaves is read by
`importers/recording.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.files import PRIVATE
from llmcache.trace.record.columns import SCHEMA, Columns
from llmcache.trace.record.meta import KEY, Provenance, TraceFile, encode, files_of
from llmcache.trace.record.output import problem

ENDING = ".recording"
FILES = b"files"
LOST = b"lost_events"


class Full(EnvironmentProblem):
    """The journal cannot grow any more (a full disk, a quota); it is whole up to the batch before."""


class Journal:
    """Appends batches to `path`; `close` or the death of the process leaves it readable."""

    def __init__(self, path: Path, provenance: Provenance, force: bool) -> None:
        """UsageError if `path` is there already and `force` is not set; EnvironmentProblem if it cannot be written."""
        self.path = path
        try:
            if force:
                path.unlink(missing_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
            self._file = open(fd, "wb", buffering=0)  # noqa: SIM115 - open until close()
        except FileExistsError as error:
            hint = f"it is being written, or was left by a recorder that was killed: llmcache convert {path} OUT.parquet"
            raise UsageError(f"-o: '{path}' exists", f"{hint}; --force replaces it") from error
        except OSError as error:
            raise problem(path, error) from error
        self._good = 0
        schema = SCHEMA.with_metadata({KEY: encode((), provenance)})
        try:
            # A sink of our own, so that every write is seen: pyarrow keeps nothing back between batches.
            self._stream = pa.ipc.new_stream(self._file, schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
            # The schema goes with the first batch: an empty one, so that the file can be read from now on.
            self._write(no_rows(), (), 0)
        except OSError as error:
            self._file.close()
            path.unlink(missing_ok=True)
            raise problem(path, error) from error

    def append(self, rows: Columns, new_files: Sequence[TraceFile], lost_events: int) -> None:
        """Write a batch. Full, with the journal cut back to the batch before, if there is no room."""
        try:
            self._write(rows, new_files, lost_events)
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._good)
            self._file.close()
            raise Full(problem(self.path, error).message, kept(self.path)) from error

    def _write(self, rows: Columns, new_files: Sequence[TraceFile], lost_events: int) -> None:
        entries = [dataclasses.asdict(file) for file in new_files]
        facts = {FILES: json.dumps(entries).encode(), LOST: str(lost_events).encode()}
        self._stream.write_batch(pa.record_batch(list(rows), schema=SCHEMA), custom_metadata=facts)
        self._good = self._file.tell()

    @property
    def size_bytes(self) -> int:
        """How large the journal is."""
        return self._good

    def close(self) -> None:
        """End the stream. The file stays."""
        if self._file.closed:
            return
        try:
            self._stream.close()
        except OSError as error:
            raise problem(self.path, error) from error
        finally:
            self._file.close()

    def discard(self) -> None:
        """Remove the journal."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def kept(path: Path) -> str:
    """Returns the hint for an error that leaves the journal `path`."""
    return f"what was recorded until then is kept in '{path}', which info, classify and convert read"


def no_rows() -> Columns:
    """A batch without rows."""
    empty = np.zeros(0, np.uint64)
    u32, u8 = empty.astype(np.uint32), empty.astype(np.uint8)
    return Columns(empty, u32, empty, u32, u8, u8, u32)


def journal_of(output: str | os.PathLike[str]) -> Path:
    """Returns the journal of the trace that will be `output`."""
    path = Path(output)
    return path.with_name(path.name + ENDING)


def files_in(facts: Mapping[bytes, bytes]) -> list[TraceFile]:
    """Returns the files that a batch's metadata adds; ValueError, KeyError, RecursionError or DataError: it is damaged."""
    return files_of(json.loads(facts[FILES]))
