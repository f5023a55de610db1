"""Writes Parquet traces as they come, in row groups that can be read in constant memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from llmcache.trace.record.columns import BLOCK_BYTES, SCHEMA, Columns, Reach, check_rows, columns_from, concatenated
from llmcache.trace.record.meta import KEY, Provenance, TraceFile, encode, file_table
from llmcache.trace.record.output import Output, problem
from llmcache.trace.record.trace import Trace

# What a reader holds in memory at once: 4 MiB of columns.
GROUP_ROWS = 1 << 17


class TraceWriter:
    """Writes a trace under a temporary name; `close` (or the end of a with block) gives it its own.

    Files may be added, and `provenance` be replaced, until it is closed; a size that is known grows with the writes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        files: Iterable[TraceFile] = (),
        provenance: Provenance | None = None,
        force: bool = False,
    ) -> None:
        """UsageError if `path` exists and `force` is not set."""
        self.provenance = provenance or Provenance(tier="unknown")
        self.rows = 0
        self._files = {file.id: file for file in file_table(files)}
        self._known: tuple[TraceFile, ...] = ()  # of the last `Trace` appended: batches of one share it
        self._output = Output(path, force)
        self._reach = Reach()
        self._after_ns = 0
        self._waiting: list[Columns] = []
        self._waiting_rows = 0
        # Times and blocks mostly ascend: deltas are shorter than dictionaries. Checksums find a damaged page.
        deltas = ("t_ns", "first")
        others = [name for name in SCHEMA.names if name not in deltas]
        try:
            self._parquet = pq.ParquetWriter(
                self._output.begin(),
                SCHEMA,
                compression="zstd",
                use_dictionary=others,
                column_encoding=dict.fromkeys(deltas, "DELTA_BINARY_PACKED"),
                write_page_checksum=True,
            )
        except OSError as error:
            self._output.discard()
            raise problem(path, error) from error

    def add_file(self, file: TraceFile) -> None:
        """Take a file into the table; one with the same id is replaced."""
        self._files[file.id] = file

    def append(self, rows: Trace | Columns | Mapping[str, ArrayLike]) -> None:
        """Write rows, which may not be earlier than those before; DataError names a wrong column.

        The files of a `Trace` are added to the table.
        """
        if isinstance(rows, Trace):
            if rows.files is not self._known:
                self._known = rows.files
                self._files |= {file.id: file for file in rows.files}
            columns = rows.columns
        else:
            columns = rows if isinstance(rows, Columns) else columns_from(rows)
        if not len(columns):
            return
        check_rows(columns, self.rows, self._after_ns)
        self._reach.note(columns)
        self._after_ns = int(columns.t_ns[-1])
        self.rows += len(columns)
        self._waiting.append(columns)
        self._waiting_rows += len(columns)
        if self._waiting_rows >= GROUP_ROWS:
            self._write_groups()

    def close(self) -> None:
        """Write what waits and the file table, and give the file its name; DataError if a file is not in the table."""
        try:
            table = file_table(self._grown(file) for file in self._files.values())
            self._reach.check(self._reach.ids, {file.id: file for file in table})
            self._write_groups(all_rows=True)
            self._parquet.add_key_value_metadata({KEY: encode(table, self.provenance)})
            self._parquet.close()
        except OSError as error:
            self.discard()
            raise problem(self._output.path, error) from error
        except BaseException:
            self.discard()
            raise
        self._output.keep()

    def discard(self) -> None:
        """Give up: nothing is left of the file."""
        self._parquet.is_open = False  # a footer would only be thrown away
        if self._parquet.file_handle is not None:
            self._parquet.file_handle.close()
        self._output.discard()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _grown(self, file: TraceFile) -> TraceFile:
        written = self._reach.written_bytes(file.id)
        # A size that is unknown stays so: what was written is only a part. Writes are known to the block.
        if not file.size_bytes or written - file.size_bytes < BLOCK_BYTES:
            return file
        return dataclasses.replace(file, size_bytes=written)

    def _write_groups(self, all_rows: bool = False) -> None:
        if not self._waiting:
            return
        columns, start = concatenated(self._waiting), 0
        rows = len(columns)
        while start < rows and (all_rows or rows - start >= GROUP_ROWS):
            part = columns.rows(start, start + GROUP_ROWS)
            try:
                self._parquet.write_batch(pa.record_batch(list(part), schema=SCHEMA), row_group_size=GROUP_ROWS)
            except OSError as error:
                raise problem(self._output.path, error) from error
            start += GROUP_ROWS
        self._waiting = [columns.rows(start, rows)] if start < rows else []
        self._waiting_rows = max(0, rows - start)
