"""A trace in memory (`Trace`), read from Parquet (`TraceReader`) and written to it (`TraceWriter`), checked both ways.

Reader and writer stream: files larger than memory pass in batches, in row groups that can be read in constant memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from llmcache.arrays import Uint32s, Uint64s
from llmcache.errors import DataError, EnvironmentProblem, UsageError
from llmcache.files import Output, writing
from llmcache.trace.record.columns import (
    COLUMNS,
    SCHEMA,
    Columns,
    Reach,
    check_files,
    check_rows,
    columns_from,
    concatenated,
)
from llmcache.trace.record.meta import KEY, Provenance, TraceFile, decode, encode, file_table
from llmcache.units import BLOCK_BYTES

BATCH_ROWS = 1 << 16
GROUP_ROWS = 1 << 17  # what a reader holds in memory at once: 4 MiB of columns
_FOREIGN = "not a trace of llmcache; its formats are listed by: llmcache convert --help"


class Trace:
    """Accesses to runs of blocks, in the order of time, with the files they are in. Not changed once made.

    Columns, one entry per run: `t_ns` u64, `file` u32 (an id of `files`), `first` u64 and `count` u32 (blocks of
    4 KiB), `op` u8 (READ, WRITE, MAP), `miss` u8 (HIT, MISS, UNKNOWN), `pid` u32. `files` is sorted by id.
    """

    def __init__(self, columns: Columns, files: Sequence[TraceFile], provenance: Provenance) -> None:
        """Takes columns that have been checked; `Trace.build` checks."""
        self.columns = columns
        self.t_ns, self.file, self.first, self.count = columns.t_ns, columns.file, columns.first, columns.count
        self.op, self.miss, self.pid = columns.op, columns.miss, columns.pid
        self.files = tuple(files)
        self.provenance = provenance

    @classmethod
    def build(
        cls,
        t_ns: ArrayLike,
        file: ArrayLike,
        first: ArrayLike,
        count: ArrayLike,
        op: ArrayLike = 0,
        miss: ArrayLike = 2,
        pid: ArrayLike = 0,
        *,
        files: Sequence[TraceFile],
        provenance: Provenance,
    ) -> Trace:
        """Returns a trace of these columns (integers of any width; a number is repeated); DataError names a wrong one."""
        given = {"t_ns": t_ns, "file": file, "first": first, "count": count, "op": op, "miss": miss, "pid": pid}
        columns, table = columns_from(given), file_table(files)
        check_rows(columns)
        check_files(columns, table)
        return cls(columns, table, provenance)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Returns the whole trace in the Parquet file `path`; DataError if it is not one."""
        with TraceReader(path) as reader:
            return reader.read()

    def save(self, path: str | os.PathLike[str], force: bool = False) -> None:
        """Write Parquet; UsageError if `path` exists and `force` is not set."""
        with TraceWriter(path, files=self.files, provenance=self.provenance, force=force) as writer:
            writer.append(self)

    def __len__(self) -> int:
        return len(self.t_ns)

    def __repr__(self) -> str:
        return f"<Trace: {len(self)} rows, {self.accesses} blocks, {len(self.files)} files, {self.provenance.tier}>"

    @property
    def accesses(self) -> int:
        """Blocks accessed, repeats included."""
        return int(self.count.sum(dtype=np.uint64))

    @property
    def end(self) -> Uint64s:
        """The block past the last of each run (u64)."""
        return self.first + self.count

    def slice(self, start_row: int, end_row: int) -> Trace:
        """Returns rows start_row .. end_row - 1 (a view), with all files."""
        return Trace(self.columns.rows(start_row, end_row), self.files, self.provenance)

    def between(self, t0_ns: int, t1_ns: int) -> Trace:
        """Returns the rows with t0_ns <= t_ns < t1_ns (a view), with all files."""
        start, end = (int(np.searchsorted(self.t_ns, np.uint64(max(0, at)))) for at in (t0_ns, t1_ns))
        return self.slice(start, max(start, end))

    def batches(self, rows: int = BATCH_ROWS) -> Iterator[Trace]:
        """Yields the trace in parts of at most `rows` rows, as `TraceReader.batches` does."""
        for start in range(0, len(self), rows):
            yield self.slice(start, start + rows)

    def equals(self, other: Trace) -> bool:
        """Whether rows, files and provenance are the same."""
        same = all(np.array_equal(a, b) for a, b in zip(self.columns, other.columns, strict=True))
        return same and self.files == other.files and self.provenance == other.provenance


class TraceReader:
    """A Parquet trace on disk: `files`, `provenance`, `rows`, and `batches`, which need the memory of one batch only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """DataError, naming what is wrong, if the file is no trace; UsageError if there is no such file."""
        self.path = Path(path)
        with readable(self.path), _decoding(self.path):
            self._parquet = pq.ParquetFile(self.path, page_checksum_verification=True)
        try:
            with _decoding(self.path):
                _check_schema(self.path, self._parquet.schema_arrow)
            metadata = self._parquet.metadata.metadata or {}
            if KEY not in metadata:
                raise DataError(f"metadata: '{self.path}' is Parquet without '{KEY.decode()}' in it", _FOREIGN)
            self.files, self.provenance = decode(metadata[KEY])
        except BaseException:
            self.close()
            raise
        self.rows: int = self._parquet.metadata.num_rows

    def batches(self, rows: int = BATCH_ROWS) -> Iterator[Trace]:
        """Yields the rows in order, at most `rows` at a time, in constant memory; DataError at the first wrong row."""
        if rows < 1:
            raise ValueError(f"rows: {rows}, at least 1 is needed")
        row, after_ns, reach, files = 0, 0, Reach(), {file.id: file for file in self.files}
        source = self._parquet.iter_batches(batch_size=rows, columns=list(COLUMNS))
        while True:
            with _decoding(self.path):
                batch = next(source, None)
            if batch is None:
                return
            columns = columns_of(batch)
            check_rows(columns, row, after_ns)
            reach.check(reach.note(columns), files)
            row, after_ns = row + len(columns), int(columns.t_ns[-1]) if len(columns) else after_ns
            yield Trace(columns, self.files, self.provenance)

    def read(self) -> Trace:
        """Returns the whole trace."""
        with _decoding(self.path):
            table = self._parquet.read(columns=list(COLUMNS))
        columns = columns_of(table)
        check_rows(columns)
        check_files(columns, self.files)
        return Trace(columns, self.files, self.provenance)

    def close(self) -> None:
        """Close the file."""
        self._parquet.close()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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
            with writing(path):
                self._parquet = pq.ParquetWriter(
                    self._output.begin(),
                    SCHEMA,
                    compression="zstd",
                    use_dictionary=others,
                    column_encoding=dict.fromkeys(deltas, "DELTA_BINARY_PACKED"),
                    write_page_checksum=True,
                )
        except BaseException:
            self._output.discard()
            raise

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
            with writing(self._output.path):
                self._parquet.add_key_value_metadata({KEY: encode(table, self.provenance)})
                self._parquet.close()
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
            with writing(self._output.path):
                self._parquet.write_batch(pa.record_batch(list(part), schema=SCHEMA), row_group_size=GROUP_ROWS)
            start += GROUP_ROWS
        self._waiting = [columns.rows(start, rows)] if start < rows else []
        self._waiting_rows = max(0, rows - start)


def concatenate(traces: Sequence[Trace]) -> Trace:
    """Returns all rows of `traces` in this order. Files with the same dev, inode, generation and path become one.

    A trace that begins before the one in front of it has ended is moved in time to begin where that one ended.
    The provenance is that of the first, with the events lost in all.
    """
    if not traces:
        raise ValueError("traces: at least one is needed")
    table: dict[tuple[int, int, int, str], TraceFile] = {}
    parts: list[Columns] = []
    end_ns = 0
    for trace in traces:
        ids = _merge(table, trace.files)
        t_ns = _moved(trace.t_ns, end_ns)
        end_ns = int(t_ns[-1]) if len(t_ns) else end_ns
        parts.append(dataclasses.replace(trace.columns, t_ns=t_ns, file=_renumbered(trace, ids)))
    lost = sum(trace.provenance.lost_events for trace in traces)
    provenance = dataclasses.replace(traces[0].provenance, lost_events=lost)
    return Trace(concatenated(parts), file_table(table.values()), provenance)


def _merge(table: dict[tuple[int, int, int, str], TraceFile], files: Sequence[TraceFile]) -> Uint32s:
    """Returns the new id of each of `files`, which are added to `table`."""
    ids = np.zeros(len(files), np.uint32)
    for index, file in enumerate(files):
        known = table.get(file.identity)
        size_bytes = max(file.size_bytes, known.size_bytes if known else 0)
        ids[index] = known.id if known else len(table)
        table[file.identity] = dataclasses.replace(file, id=int(ids[index]), size_bytes=size_bytes)
    return ids


def _renumbered(trace: Trace, ids: Uint32s) -> Uint32s:
    old = np.array([file.id for file in trace.files], np.uint32)
    return ids[np.searchsorted(old, trace.file)] if len(trace) else trace.file


def _moved(t_ns: Uint64s, end_ns: int) -> Uint64s:
    if not len(t_ns) or int(t_ns[0]) >= end_ns:
        return t_ns
    if int(t_ns[-1]) - int(t_ns[0]) + end_ns >= 1 << 64:
        raise DataError("t_ns: the traces together last longer than 64 bits of nanoseconds", "concatenate fewer")
    moved: Uint64s = t_ns - t_ns[0] + np.uint64(end_ns)
    return moved


@contextlib.contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """A with block that reads `path`: its OSErrors become UsageError (no such file) or EnvironmentProblem."""
    if os.path.isdir(path):
        raise UsageError(f"'{path}' is a directory", "name a file")
    try:
        yield
    except FileNotFoundError as error:
        raise UsageError(f"'{path}' does not exist", "check the path") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentProblem(f"cannot read '{path}': {reason}", "check its permissions") from error


@contextlib.contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """A with block in which pyarrow's complaints mean that the file is damaged."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names of columns
        # An OSError with an errno comes from the system; pyarrow raises those without for what it cannot decode.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0]
        hint = "truncated, damaged or not Parquet: record or convert it again"
        raise DataError(f"'{path}' cannot be read as Parquet: {reason}", hint) from error


def _check_schema(path: Path, schema: Any) -> None:
    for name in SCHEMA.names:
        if name not in schema.names:
            raise DataError(f"{name}: '{path}' has no such column", _FOREIGN)
        if schema.names.count(name) > 1:
            raise DataError(f"{name}: '{path}' has this column twice", _FOREIGN)
        if schema.field(name).type != SCHEMA.field(name).type:
            found, wanted = schema.field(name).type, SCHEMA.field(name).type
            raise DataError(f"{name}: '{path}' has {found}, must be {wanted}", _FOREIGN)
    if extra := [name for name in schema.names if name not in COLUMNS]:
        raise DataError(f"{extra[0]}: '{path}' has a column that a trace does not have", _FOREIGN)


def columns_of(data: Any) -> Columns:
    """Returns the columns of a pyarrow table or batch as arrays; DataError where a row has no value."""
    arrays = []
    for name in COLUMNS:
        column = data.column(name)
        if column.null_count:
            raise DataError(f"{name}: {column.null_count} rows have no value", _FOREIGN)
        arrays.append(np.asarray(column.to_numpy()))
    return Columns(*arrays)
