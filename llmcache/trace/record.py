"""The trace format: a Parquet file with one row for each accessed run of 4 KiB blocks of a file.

Every row is checked when it is read and when it is written. The file table and the provenance are JSON in the metadata of
the Parquet schema. `BlockSpace` numbers the blocks of all files, so that policies can use arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from llmcache.arrays import Flags, Int64s, Uint32s, Uint64s
from llmcache.documents import from_json, invalid
from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.files import Output, writing
from llmcache.units import BLOCK_BYTES

FORMAT = "llmcache.trace/1"
KEY = b"llmcache.trace"
LOCKED = "locked_bytes"
_CHANGED = "the file is damaged or was modified: record or convert it again"
_LIMITS = {"id": 1 << 32, "dev": 1 << 64, "inode": 1 << 64, "generation": 1 << 64, "size_bytes": 1 << 63}


@dataclass(frozen=True)
class TraceFile:
    """A file of a trace. `size_bytes` is the largest size seen; unknown numbers are 0."""

    id: int
    path: str
    dev: int
    inode: int
    generation: int
    size_bytes: int

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not 0 <= value < limit:
                raise DataError(f"files: {name} of '{self.path}' is {value}, must be 0 to {limit - 1}", _CHANGED)
        try:
            os.fsencode(self.path)
        except UnicodeEncodeError:
            raise DataError(f"files: path {self.path!a} is not a valid path", _CHANGED) from None


@dataclass(frozen=True)
class Provenance:
    """The origin of a trace: a capture tier, an importer or "synthetic"; `clock` is the clock of `t_ns`.

    `lost_events` counts accesses known to be missing; `note` describes the limits of the data.
    """

    tier: str
    clock: str = ""
    kernel: str = ""
    lost_events: int = 0
    command: str = ""
    note: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.lost_events < 0:
            raise DataError(f"provenance: lost_events is {self.lost_events}, must be at least 0", _CHANGED)


def locked_extra(locked: Mapping[int, int]) -> str:
    """Return the locked bytes by file id as text for `Provenance.extra[LOCKED]`."""
    return json.dumps({str(file): size_bytes for file, size_bytes in locked.items()}) if locked else ""


def locked_bytes(provenance: Provenance) -> dict[int, int]:
    """Return the bytes by file id that a mount had locked, so that accesses to them are missing; DataError."""
    text = provenance.extra.get(LOCKED)
    if text is None:
        return {}
    try:
        return {int(file): int(size_bytes) for file, size_bytes in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise DataError(f"provenance: {LOCKED} is {reprlib.repr(text)}", _CHANGED) from None


def file_table(files: Iterable[TraceFile]) -> tuple[TraceFile, ...]:
    """Return `files` sorted by id; DataError for a duplicate id."""
    table = tuple(sorted(files, key=lambda file: file.id))
    for before, after in itertools.pairwise(table):
        if before.id == after.id:
            raise DataError(f"files: id {after.id} stands for '{before.path}' and for '{after.path}'", _CHANGED)
    return table


def encode(files: Iterable[TraceFile], provenance: Provenance) -> bytes:
    """Return file table and provenance as JSON."""
    described = asdict(provenance) | {"extra": dict(provenance.extra)}
    document = {"schema": FORMAT, "provenance": described, "files": [asdict(file) for file in files]}
    return json.dumps(document, separators=(",", ":")).encode()


def decode(text: bytes) -> tuple[tuple[TraceFile, ...], Provenance]:
    """Return file table and provenance; DataError names an invalid field."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"metadata: not JSON: {error}", _CHANGED) from error
    if not isinstance(document, dict) or document.get("schema") != FORMAT:
        found = document.get("schema") if isinstance(document, dict) else None
        raise DataError(
            f"schema: {reprlib.repr(found)}, not '{FORMAT}'", "the file was written by another version of llmcache"
        )
    table = file_table(files_of(document.get("files")))
    return table, _entry(Provenance, document.get("provenance"), "provenance")


def files_of(entries: object) -> list[TraceFile]:
    """Return the files in a JSON list; DataError names an invalid field."""
    if not isinstance(entries, list):
        raise DataError("files: the metadata has no file table", _CHANGED)
    return [_entry(TraceFile, entry, "files") for entry in entries]


_Entry = TypeVar("_Entry", TraceFile, Provenance)


def _entry(kind: type[_Entry], values: Any, where: str) -> _Entry:
    with invalid(where, _CHANGED):
        found: _Entry = from_json(kind, values)
        if unknown := values.keys() - {one.name for one in fields(kind)}:
            raise ValueError(f"{reprlib.repr(min(unknown))} is unknown")
    return found


READ, WRITE, MAP = 0, 1, 2
HIT, MISS, UNKNOWN = 0, 1, 2
OP_NAMES = ("read", "write", "map")
MISS_NAMES = ("hit", "miss", "unknown")

COLUMNS: dict[str, np.dtype[Any]] = {
    "t_ns": np.dtype(np.uint64),
    "file": np.dtype(np.uint32),
    "first": np.dtype(np.uint64),
    "count": np.dtype(np.uint32),
    "op": np.dtype(np.uint8),
    "miss": np.dtype(np.uint8),
    "pid": np.dtype(np.uint32),
}
SCHEMA = pa.schema([pa.field(name, pa.from_numpy_dtype(dtype), nullable=False) for name, dtype in COLUMNS.items()])

LAST_BLOCK = (1 << 63) // BLOCK_BYTES  # one past the last block of the largest file: offsets are signed 64-bit bytes

# An untraced process may have enlarged a file by this much after its size was read; growth by traced writes is known.
# Generous, because rejecting a valid trace is worse than accepting a damaged one.
GROWTH_BLOCKS = (64 << 30) // BLOCK_BYTES
_HINT = "the trace is damaged, or the program that wrote it has a bug"


@dataclass(frozen=True)
class Columns:
    """Some rows: arrays of equal length with the dtypes of `COLUMNS`."""

    t_ns: Uint64s
    file: Uint32s
    first: Uint64s
    count: Uint32s
    op: NDArray[np.uint8]
    miss: NDArray[np.uint8]
    pid: Uint32s

    def __len__(self) -> int:
        return len(self.t_ns)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (getattr(self, name) for name in COLUMNS)

    def rows(self, start: int, end: int) -> Columns:
        return Columns(*(column[start:end] for column in self))


def columns_from(arrays: Mapping[str, ArrayLike]) -> Columns:
    """Return `arrays` (integers of any width; numbers are repeated) as columns; DataError."""
    given = {"op": READ, "miss": UNKNOWN, "pid": 0, **arrays}
    if unlike := given.keys() ^ COLUMNS.keys():
        problem = "unknown" if min(unlike) in given else "missing"
        raise DataError(f"{min(unlike)}: {problem}", f"the columns are: {', '.join(COLUMNS)}")
    fitted = [_fitted(name, given[name]) for name in COLUMNS]
    rows = max((len(column) for column in fitted if column.ndim), default=1)
    for name, column in zip(COLUMNS, fitted, strict=True):
        if column.ndim and len(column) != rows:
            raise DataError(f"{name}: {len(column)} rows, other columns have {rows}", _HINT)
    return Columns(*(column if column.ndim else np.full(rows, column) for column in fitted))


def _fitted(name: str, values: ArrayLike) -> NDArray[Any]:
    array, dtype = np.asarray(values), COLUMNS[name]
    if array.dtype == dtype:
        return array
    if array.size and array.dtype.kind not in "iub":
        raise DataError(f"{name}: {array.dtype}, must be integers", _HINT)
    if array.size and (int(array.min()) < 0 or int(array.max()) > np.iinfo(dtype).max):
        raise DataError(f"{name}: {array.min()} to {array.max()}, must be 0 to {np.iinfo(dtype).max}", _HINT)
    return array.astype(dtype)


def concatenated(parts: Sequence[Columns]) -> Columns:
    """Return the rows of all `parts`."""
    if len(parts) == 1:
        return parts[0]
    return Columns(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def check_rows(columns: Columns, row: int = 0, after_ns: int = 0) -> None:
    """Raise DataError unless every row is valid and times ascend; `row` is the number of the first."""
    if not len(columns):
        return
    _no(columns.count == 0, "count", columns.count, "a run has at least one block", row)
    _no(columns.op > MAP, "op", columns.op, "must be 0 (read), 1 (write) or 2 (map)", row)
    _no(columns.miss > UNKNOWN, "miss", columns.miss, "must be 0 (hit), 1 (miss) or 2 (unknown)", row)
    # In this form, a `first` near 2**64 cannot overflow.
    beyond = columns.first > LAST_BLOCK - columns.count.astype(np.uint64)
    _no(beyond, "first", columns.first, "the run ends beyond the largest file", row)
    if int(columns.t_ns[0]) < after_ns:
        raise DataError(f"t_ns: row {row} has {columns.t_ns[0]}, the row before it {after_ns}: times must ascend", _HINT)
    _no(np.concatenate(([False], columns.t_ns[1:] < columns.t_ns[:-1])), "t_ns", columns.t_ns, "times must ascend", row)


def _no(wrong: Flags, name: str, column: NDArray[Any], rule: str, row: int) -> None:
    if wrong.any():
        at = int(wrong.argmax())
        raise DataError(f"{name}: row {row + at} has {column[at]}: {rule}", _HINT)


class Reach:
    """The block after the last accessed one of each file."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}
        self._written: dict[int, int] = {}

    def note(self, columns: Columns) -> set[int]:
        ends = columns.first + columns.count
        is_write = columns.op == WRITE
        seen: set[int] = set()
        for reach, rows in ((self._read, ~is_write), (self._written, is_write)):
            for file, end in zip(*(found.tolist() for found in largest(columns.file[rows], ends[rows])), strict=True):
                reach[file] = max(end, reach.get(file, 0))
                seen.add(file)
        return seen

    @property
    def ids(self) -> set[int]:
        return self._read.keys() | self._written.keys()

    def written_bytes(self, file: int) -> int:
        """Return the offset up to which a file was written, rounded up to blocks."""
        return min(self._written.get(file, 0) * BLOCK_BYTES, (1 << 63) - 1)

    def check(self, ids: set[int], files: Mapping[int, TraceFile]) -> None:
        """Raise DataError unless `files` has all `ids` and no file was read far beyond its end."""
        for file in sorted(ids):
            if file not in files:
                raise DataError(f"file: {file} is not in the file table", _HINT)
            entry = files[file]
            size = max(-(-entry.size_bytes // BLOCK_BYTES), self._written.get(file, 0))
            if entry.size_bytes and self._read.get(file, 0) > size + GROWTH_BLOCKS:
                reason = f"block {self._read[file] - 1} of '{entry.path}', which has {size}"
                raise DataError(f"first: {reason}: far beyond the end of the file", _HINT)


def check_files(columns: Columns, files: Sequence[TraceFile]) -> None:
    """Raise DataError unless all rows of a trace fit the file table."""
    reach = Reach()
    reach.check(reach.note(columns), {file.id: file for file in files})


def largest(ids: NDArray[Any], values: Uint64s) -> tuple[NDArray[Any], Uint64s]:
    """Return the distinct `ids`, ascending, and the largest of the `values` of each."""
    if len(ids) and (ids == ids[0]).all():
        return ids[:1], values.max(keepdims=True)
    distinct, index = np.unique(ids, return_inverse=True)
    found = np.zeros(len(distinct), np.uint64)
    np.maximum.at(found, index, values)
    return distinct, found


BATCH_ROWS = 1 << 16
GROUP_ROWS = 1 << 17  # a reader has one row group in memory: 4 MiB of columns
_FOREIGN = "this is not a trace of llmcache; llmcache convert --help lists the formats"


class Trace:
    """Accesses to runs of blocks, in the order of time, with the file table, sorted by id. Immutable.

    Columns, one entry per run: `t_ns` u64, `file` u32 (an id of `files`), `first` u64 and `count` u32 (blocks of 4 KiB),
    `op` u8 (READ, WRITE, MAP), `miss` u8 (HIT, MISS, UNKNOWN), `pid` u32. The constructor does not check them.
    """

    def __init__(self, columns: Columns, files: Sequence[TraceFile], provenance: Provenance) -> None:
        self.columns = columns
        self.t_ns, self.file, self.first, self.count = columns.t_ns, columns.file, columns.first, columns.count
        self.op, self.miss, self.pid = columns.op, columns.miss, columns.pid
        self.files = tuple(files)
        self.provenance = provenance

    @classmethod
    def build(cls, *columns: ArrayLike, files: Sequence[TraceFile], provenance: Provenance, **named: ArrayLike) -> Trace:
        """Return a trace of columns, in the order of COLUMNS or by name; DataError."""
        given, table = columns_from({**dict(zip(COLUMNS, columns, strict=False)), **named}), file_table(files)
        check_rows(given)
        check_files(given, table)
        return cls(given, table, provenance)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        with TraceReader(path) as reader:
            return reader.read()

    def save(self, path: str | os.PathLike[str], force: bool = False) -> None:
        with TraceWriter(path, files=self.files, provenance=self.provenance, force=force) as writer:
            writer.append(self)

    def __len__(self) -> int:
        return len(self.t_ns)

    def __repr__(self) -> str:
        return f"<Trace: {len(self)} rows, {self.accesses} blocks, {len(self.files)} files, {self.provenance.tier}>"

    @property
    def accesses(self) -> int:
        return int(self.count.sum(dtype=np.uint64))

    @property
    def end(self) -> Uint64s:
        return self.first + self.count

    def slice(self, start_row: int, end_row: int) -> Trace:
        return Trace(self.columns.rows(start_row, end_row), self.files, self.provenance)

    def batches(self, rows: int = BATCH_ROWS) -> Iterator[Trace]:
        for start in range(0, len(self), rows):
            yield self.slice(start, start + rows)

    def equals(self, other: Trace) -> bool:
        same = all(np.array_equal(a, b) for a, b in zip(self.columns, other.columns, strict=True))
        return same and self.files == other.files and self.provenance == other.provenance


class TraceReader:
    """Reads a Parquet trace; `batches` in constant memory. DataError if it is not a trace, UsageError if it does not
    exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
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
        with _decoding(self.path):
            table = self._parquet.read(columns=list(COLUMNS))
        columns = columns_of(table)
        check_rows(columns)
        check_files(columns, self.files)
        return Trace(columns, self.files, self.provenance)

    def close(self) -> None:
        self._parquet.close()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class TraceWriter:
    """Writes a trace to a temporary file, which `close` (or the end of a with block) renames to `path`.

    Until then, files can be added and `provenance` can be replaced. A known file size grows with the writes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        files: Iterable[TraceFile] = (),
        provenance: Provenance | None = None,
        force: bool = False,
    ) -> None:
        self.provenance = provenance or Provenance(tier="unknown")
        self.rows = 0
        self._files = {file.id: file for file in file_table(files)}
        self._known: tuple[TraceFile, ...] = ()  # of the last `Trace` appended: batches of one share it
        self._output = Output(path, force)
        self._reach = Reach()
        self._after_ns = 0
        self._waiting: list[Columns] = []
        self._waiting_rows = 0
        # Times and blocks mostly ascend: delta encoding is more compact than dictionaries. Checksums detect damage.
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
        self._files[file.id] = file

    def append(self, rows: Trace | Columns | Mapping[str, ArrayLike]) -> None:
        """Write rows, no earlier than the previous ones, and the files of a `Trace`; DataError."""
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
        self._parquet.is_open = False  # so that pyarrow does not write a footer
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
        # An unknown size stays unknown, because the file may be larger than its writes. The end of a write is rounded up
        # to a block, so a smaller difference is no growth.
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


@contextlib.contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert OSErrors of a with block that reads `path` to UsageError or MissingRequirement."""
    if os.path.isdir(path):
        raise UsageError(f"'{path}' is a directory", "give the name of a file")
    try:
        yield
    except FileNotFoundError as error:
        raise UsageError(f"'{path}' does not exist", "check the path") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise MissingRequirement(f"cannot read '{path}': {reason}", "check its permissions") from error


@contextlib.contextmanager
def _decoding(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: invalid names of columns
        # The system's OSErrors have an errno; pyarrow also raises OSErrors without one, for data it cannot decode.
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
            raise DataError(f"{name}: '{path}' has type {found}, must be {wanted}", _FOREIGN)
    if extra := [name for name in schema.names if name not in COLUMNS]:
        raise DataError(f"{extra[0]}: '{path}' has a column that a trace does not have", _FOREIGN)


def columns_of(data: Any) -> Columns:
    """Return the columns of a pyarrow table or batch; DataError for a null value."""
    arrays = []
    for name in COLUMNS:
        column = data.column(name)
        if column.null_count:
            raise DataError(f"{name}: {column.null_count} rows have no value", _FOREIGN)
        arrays.append(np.asarray(column.to_numpy()))
    return Columns(*arrays)


# One space of block ids for all files of a trace. The touched blocks of each file are a union of intervals; the intervals of
# all files in sequence give every block a small id. A run lies in one interval, so its blocks have consecutive ids. Between
# two intervals of a file, gaps of up to `GAP` blocks keep their size, because policies look that far around a block; longer
# gaps shrink to `GAP`. The gap between two files is `GAP`.

GAP = 16
MERGE_ROWS = 1 << 20  # intervals that `of` collects before it merges them; bounds its memory
FILE_BITS = 24
BLOCK_BITS = 63 - FILE_BITS


class BlockSpace:
    """A mapping from (file, block) to ids 0 .. `blocks` - 1; `footprint` counts distinct blocks.

    It is built from keys `file << BLOCK_BITS | block` of intervals: at least one, sorted, disjoint and not adjacent.
    """

    def __init__(self, starts: Int64s, ends: Int64s) -> None:
        self._starts = starts
        self._ends = ends
        lengths = ends - starts
        gaps = np.minimum(starts[1:] - ends[:-1], GAP)
        self._ids = np.concatenate(([0], np.cumsum(lengths[:-1] + gaps))).astype(np.int64)
        # Intervals less than GAP apart have the same offset between key and id, so `place` searches in joined intervals.
        apart = np.concatenate(([True], gaps == GAP))
        self._joined = starts[apart]
        self._joined_ends = ends[np.concatenate((apart[1:], [True]))]
        self._moves = self._ids[apart] - self._joined
        self.footprint = int(lengths.sum())
        self.blocks = int(self._ids[-1] + lengths[-1])

    @classmethod
    def of(cls, batches: Iterable[Trace]) -> BlockSpace:
        """Return the space of the touched blocks; DataError for an empty trace."""
        starts = ends = np.empty(0, np.int64)
        waiting: list[tuple[Int64s, Int64s]] = []
        rows = 0
        for batch in batches:
            first = _keys(batch)
            waiting.append(_union(first, first + batch.count.astype(np.int64)))
            rows += len(waiting[-1][0])
            if rows > MERGE_ROWS:
                starts, ends = _merged(starts, ends, waiting)
                waiting, rows = [], 0
        starts, ends = _merged(starts, ends, waiting)
        if len(starts) == 0:
            raise DataError("rows: the trace is empty", "record it again, or look at it with: llmcache info FILE")
        return cls(starts, ends)

    def within(self, file: int, first: int, end: int) -> Int64s:
        """Return the ids of the touched blocks first .. end - 1 of `file`, ascending."""
        low, high = (file << BLOCK_BITS) + first, (file << BLOCK_BITS) + end
        begin = np.searchsorted(self._ends, low, side="right")
        until = np.searchsorted(self._starts, high, side="left")
        parts = [np.empty(0, np.int64)]
        for index in range(int(begin), int(until)):
            start, stop = max(low, int(self._starts[index])), min(high, int(self._ends[index]))
            parts.append(np.arange(start, stop, dtype=np.int64) - self._starts[index] + self._ids[index])
        return np.concatenate(parts)

    def place(self, batch: Trace) -> Int64s:
        """Return the id of the first block of each run (int64); ValueError for a run outside of the space."""
        keys = _keys(batch)
        found = np.searchsorted(self._joined, keys, side="right") - 1
        if len(keys) and (found.min() < 0 or np.any(keys + batch.count.astype(np.int64) > self._joined_ends[found])):
            raise ValueError("a run lies outside the space")
        return keys + self._moves[found]

    def footprint_by_file(self) -> dict[int, int]:
        file, index = np.unique(self._starts >> BLOCK_BITS, return_inverse=True)
        blocks = np.bincount(index, self._ends - self._starts).astype(np.int64)
        return dict(zip(file.tolist(), blocks.tolist(), strict=True))

    def locate(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return (file, block) of each id, which must be that of a touched block."""
        interval = np.searchsorted(self._ids, ids, side="right") - 1
        keys = self._starts[interval] + ids - self._ids[interval]
        return keys >> BLOCK_BITS, keys & ((1 << BLOCK_BITS) - 1)


def _keys(batch: Trace) -> Int64s:
    if len(batch) and (int(batch.file.max()) >> FILE_BITS or int((batch.first + batch.count).max()) >> BLOCK_BITS):
        raise DataError(
            f"file or first: beyond {1 << FILE_BITS} files or {1 << BLOCK_BITS} blocks of a file",
            "no file system has such files; the trace is damaged",
        )
    keys: Int64s = (batch.file.astype(np.int64) << BLOCK_BITS) + batch.first.astype(np.int64)
    return keys


def _union(starts: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    """Return the union of half-open intervals as sorted, disjoint, non-adjacent intervals.

    Sorting starts and ends independently takes a quarter of the time of sorting pairs. If the i-th end lies before the next
    start, all i intervals that have begun have also ended.
    """
    if len(starts) == 0:
        return starts, ends
    starts, ends = np.sort(starts), np.sort(ends)
    fresh = np.concatenate(([True], starts[1:] > ends[:-1]))
    last = np.concatenate((np.flatnonzero(fresh)[1:] - 1, [len(starts) - 1]))
    return starts[fresh], ends[last]


def _merged(starts: Int64s, ends: Int64s, more: list[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    return _union(np.concatenate([starts, *(part[0] for part in more)]), np.concatenate([ends, *(part[1] for part in more)]))
