"""Reads Parquet traces, whole or in batches; everything read is checked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llmcache.errors import DataError, EnvironmentProblem, UsageError
from llmcache.trace.record.columns import COLUMNS, SCHEMA, Columns, Reach, check_files, check_rows
from llmcache.trace.record.meta import KEY, decode
from llmcache.trace.record.trace import BATCH_ROWS, Trace

_FOREIGN = "not a trace of llmcache; its formats are listed by: llmcache convert --help"


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
