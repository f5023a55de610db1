"""The columns of a trace, their types and codes, and the checks that every row passes, read or written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from llmcache.arrays import Flags, Uint32s, Uint64s
from llmcache.errors import DataError
from llmcache.trace.record.meta import TraceFile
from llmcache.units import BLOCK_BYTES

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

# What a file may have grown, by somebody who was not traced, since its size was noted. Growth by traced writes is known
# exactly. Generous: to refuse a good trace is worse than to take a damaged one whose damage looks plausible.
GROWTH_BLOCKS = (64 << 30) // BLOCK_BYTES
_HINT = "the trace is damaged, or what wrote it has a fault"


@dataclass(frozen=True)
class Columns:
    """The columns of some rows: arrays of one length with the dtypes of `COLUMNS`."""

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
        """Returns views of rows start .. end - 1."""
        return Columns(*(column[start:end] for column in self))


def columns_from(arrays: Mapping[str, ArrayLike]) -> Columns:
    """Returns `arrays` (numbers or arrays, integers of any width) as columns; DataError names one that does not fit.

    Numbers are repeated; `op`, `miss` and `pid` may be left out: READ, UNKNOWN and 0.
    """
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
    if array.ndim > 1:
        raise DataError(f"{name}: {array.ndim} dimensions, must be one", _HINT)
    if array.dtype == dtype:
        return array
    if array.size and array.dtype.kind not in "iub":
        raise DataError(f"{name}: {array.dtype}, must be integers", _HINT)
    if array.size and (int(array.min()) < 0 or int(array.max()) > np.iinfo(dtype).max):
        raise DataError(f"{name}: {array.min()} to {array.max()}, must be 0 to {np.iinfo(dtype).max}", _HINT)
    return array.astype(dtype)


def concatenated(parts: Sequence[Columns]) -> Columns:
    """Returns the rows of all `parts`, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Columns(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def check_rows(columns: Columns, row: int = 0, after_ns: int = 0) -> None:
    """DataError, naming column and row, unless every row is possible by itself and times ascend (from `after_ns`).

    `row` is the number of the first row, for the message.
    """
    if not len(columns):
        return
    _no(columns.count == 0, "count", columns.count, "a run has at least one block", row)
    _no(columns.op > MAP, "op", columns.op, "must be 0 (read), 1 (write) or 2 (map)", row)
    _no(columns.miss > UNKNOWN, "miss", columns.miss, "must be 0 (hit), 1 (miss) or 2 (unknown)", row)
    # Written so that a first near 2**64 cannot wrap round.
    _no(
        columns.first > LAST_BLOCK - columns.count.astype(np.uint64),
        "first",
        columns.first,
        "the run ends beyond the largest file",
        row,
    )
    if int(columns.t_ns[0]) < after_ns:
        raise DataError(f"t_ns: row {row} has {columns.t_ns[0]}, the row before it {after_ns}; must ascend", _HINT)
    _no(np.concatenate(([False], columns.t_ns[1:] < columns.t_ns[:-1])), "t_ns", columns.t_ns, "times must ascend", row)


def _no(wrong: Flags, name: str, column: NDArray[Any], what: str, row: int) -> None:
    if wrong.any():
        at = int(wrong.argmax())
        raise DataError(f"{name}: row {row + at} has {column[at]}: {what}", _HINT)


class Reach:
    """How far the rows of each file went, block past the last: what tells whether they fit the file table."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}
        self._written: dict[int, int] = {}

    def note(self, columns: Columns) -> set[int]:
        """Take the rows into account; returns the ids of their files."""
        ends = columns.first + columns.count
        is_write = columns.op == WRITE
        seen: set[int] = set()
        for reach, rows in ((self._read, ~is_write), (self._written, is_write)):
            for file, end in _furthest(columns.file[rows], ends[rows]):
                reach[file] = max(end, reach.get(file, 0))
                seen.add(file)
        return seen

    @property
    def ids(self) -> set[int]:
        """Ids of all files seen."""
        return self._read.keys() | self._written.keys()

    def written_bytes(self, file: int) -> int:
        """The offset up to which a file was written, rounded up to blocks; 0 if it was not."""
        return min(self._written.get(file, 0) * BLOCK_BYTES, (1 << 63) - 1)

    def check(self, ids: set[int], files: Mapping[int, TraceFile]) -> None:
        """DataError unless the files `ids` are all in the table, and none was read far beyond its end."""
        for file in sorted(ids):
            if file not in files:
                raise DataError(f"file: {file} is not in the file table", _HINT)
            entry = files[file]
            size = max(-(-entry.size_bytes // BLOCK_BYTES), self._written.get(file, 0))
            if entry.size_bytes and self._read.get(file, 0) > size + GROWTH_BLOCKS:
                reason = f"block {self._read[file] - 1} of '{entry.path}', which has {size}"
                raise DataError(f"first: {reason}: far beyond the end of the file", _HINT)


def check_files(columns: Columns, files: Sequence[TraceFile]) -> None:
    """DataError unless the rows, which are all there are, fit the file table."""
    reach = Reach()
    reach.check(reach.note(columns), {file.id: file for file in files})


def _furthest(file: Uint32s, ends: Uint64s) -> list[tuple[int, int]]:
    if not len(file):
        return []
    if (file == file[0]).all():
        return [(int(file[0]), int(ends.max()))]
    ids, index = np.unique(file, return_inverse=True)
    furthest = np.zeros(len(ids), np.uint64)
    np.maximum.at(furthest, index, ends)
    return [(int(a), int(b)) for a, b in zip(ids, furthest, strict=True)]
