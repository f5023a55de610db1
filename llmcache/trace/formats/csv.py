"""CSV traces: `file,offset,length,op[,time]`, offsets and lengths in bytes, time in seconds, with or without a header.

`op` is read, write or map, or its first letter. Without times, the rows are one microsecond apart. `write` joins the columns
itself, because pyarrow's writer rejects paths that are not UTF-8 and writes small times as 1E-9.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from llmcache.arrays import Flags, Int64s, Uint32s, Uint64s
from llmcache.errors import DataError
from llmcache.trace.record import OP_NAMES, Provenance, Trace, TraceFile, TraceReader, TraceWriter, readable
from llmcache.units import BLOCK_BYTES

FIELDS = ("file", "offset", "length", "op", "time")
REQUIRED = FIELDS[:4]
ROW_NS = 1_000
_CHUNK_BYTES = 1 << 20  # larger chunks are not read faster, and several are in memory at once
_LONGEST_BYTES = BLOCK_BYTES << 31
_LONGEST_SHOWN = 200
# Seconds are read as decimals, wide enough for Unix time with 18 decimals; a float would lose digits.
_TIME, _TIME_NS = pa.decimal128(38, 18), pa.decimal128(38, 9)
_TYPES = {"file": pa.binary(), "offset": pa.int64(), "length": pa.int64(), "op": pa.string(), "time": _TIME}
_HEADER = b"file,offset,length,op,time\n"
_SECOND_NS = 10**9
_QUOTED_BYTES = set(b',"\r\n ')
_HINT = "columns: file,offset,length,op[,time]; bytes, read|write|map, seconds; see: llmcache convert --help"


def read(path: Path, writer: TraceWriter) -> None:
    """Append the rows of `path`; DataError with invalid field and row."""
    with readable(path):
        names, has_header = _header(path)
    writer.provenance = Provenance(
        tier="csv", clock="as given, seconds" if "time" in names else "none: rows are 1 us apart", note=f"From {path.name}."
    )
    importer = _CsvImporter(writer)
    for batch in _batches(path, names, has_header):
        importer.take(batch)
    importer.finish()


class _CsvImporter:
    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._ids: dict[bytes, int] = {}
        self._sizes: list[int] = []
        self._rows = 0
        self._after_ns = 0

    def take(self, batch: Any) -> None:
        for name in batch.schema.names:
            if batch.column(name).null_count:
                row = self._rows + int(pc.index(pc.is_null(batch.column(name)), True).as_py())
                raise DataError(f"{name}: row {row} has no value", _HINT)
        offset, length = batch.column("offset").to_numpy(), batch.column("length").to_numpy()
        self._refuse("offset", offset, offset < 0, "must not be negative")
        self._refuse("length", length, length < 1, "must be at least 1")
        self._refuse("length", length, length >= _LONGEST_BYTES, "too long for a single access")
        self._refuse(
            "length", length, offset > np.iinfo(np.int64).max - length, "the access ends beyond the largest possible file"
        )
        first = offset // BLOCK_BYTES
        file = self._numbered(batch.column("file"), offset + length)
        self._writer.append(
            {
                "t_ns": self._times(batch),
                "file": file,
                "first": first,
                "count": (offset + length - 1) // BLOCK_BYTES - first + 1,
                "op": self._ops(batch.column("op")),
            }
        )
        self._rows += len(offset)

    def finish(self) -> None:
        for path, number in self._ids.items():
            self._writer.add_file(TraceFile(number, os.fsdecode(path), 0, 0, 0, self._sizes[number]))

    def _numbered(self, paths: Any, ends: Int64s) -> Int64s:
        coded = paths.dictionary_encode()
        numbers = np.empty(len(coded.dictionary), np.int64)
        for index, path in enumerate(coded.dictionary.to_pylist()):
            if not path:
                raise DataError("file: a row has an empty path", _HINT)
            numbers[index] = self._ids.setdefault(path, len(self._ids))
        self._sizes += [0] * (len(self._ids) - len(self._sizes))
        codes = coded.indices.to_numpy()
        furthest = np.zeros(len(numbers), np.int64)
        np.maximum.at(furthest, codes, ends)
        for number, end in zip(numbers.tolist(), furthest.tolist(), strict=True):
            self._sizes[number] = max(self._sizes[number], end)
        numbered: Int64s = numbers[codes]
        return numbered

    def _ops(self, ops: Any) -> Int64s:
        coded = pc.utf8_lower(pc.utf8_trim_whitespace(ops)).dictionary_encode()
        known = {form: code for code, name in enumerate(OP_NAMES) for form in (name, name[0])}
        codes = np.array([known.get(name, -1) for name in coded.dictionary.to_pylist()], np.int64)
        found: Int64s = codes[coded.indices.to_numpy()]
        if (found < 0).any():
            at = int((found < 0).argmax())
            raise DataError(
                f"op: row {self._rows + at} has '{str(ops[at])[:_LONGEST_SHOWN]}', must be one of {', '.join(OP_NAMES)}",
                _HINT,
            )
        return found

    def _times(self, batch: Any) -> Int64s:
        if "time" not in batch.schema.names:
            return np.arange(self._rows, self._rows + batch.num_rows) * ROW_NS
        scaled = batch.column("time").cast(_TIME_NS, safe=False)
        # A decimal is a 128-bit integer; with nine decimals, its value is in nanoseconds.
        words = np.frombuffer(scaled.buffers()[1], np.int64).reshape(-1, 2)[scaled.offset : scaled.offset + len(scaled)]
        self._refuse("time", words[:, 0], words[:, 1] != words[:, 0] >> 63, "beyond 64 bits of nanoseconds")
        t_ns: Int64s = words[:, 0]
        self._refuse("time", t_ns, t_ns < 0, "nanoseconds: must not be negative")
        self._refuse(
            "time", t_ns, np.diff(t_ns, prepend=self._after_ns) < 0, "nanoseconds: must not be less than in the row above"
        )
        self._after_ns = int(t_ns[-1])
        return t_ns

    def _refuse(self, name: str, values: Int64s, wrong: Flags, reason: str) -> None:
        if wrong.any():
            at = int(wrong.argmax())
            raise DataError(f"{name}: row {self._rows + at} has {values[at]}: {reason}", _HINT)


def _header(path: Path) -> tuple[list[str], bool]:
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        rows = csv.reader(iter(lambda: file.readline(_CHUNK_BYTES), ""))
        try:
            cells = [cell.strip().lower() for cell in next(rows, [])]
        except csv.Error as error:
            raise DataError(f"columns: line {rows.line_num}: {error}", _HINT) from error
    if not set(cells) & set(FIELDS[1:]):
        if cells and not len(REQUIRED) <= len(cells) <= len(FIELDS):
            raise DataError(f"columns: '{path}' has {len(cells)}, must be {len(REQUIRED)} or {len(FIELDS)}", _HINT)
        return list(FIELDS[: len(cells) or len(REQUIRED)]), False
    for name in cells:
        if name not in FIELDS or cells.count(name) > 1:
            raise DataError(
                f"{name}: '{path}' has {'this column twice' if name in FIELDS else 'an unknown column of this name'}", _HINT
            )
    for name in REQUIRED:
        if name not in cells:
            raise DataError(f"{name}: '{path}' has no such column", _HINT)
    return cells, True


def _batches(path: Path, names: list[str], has_header: bool) -> Iterator[Any]:
    options = {
        "read_options": pyarrow.csv.ReadOptions(
            column_names=names, skip_rows=int(has_header), block_size=_CHUNK_BYTES, use_threads=False
        ),
        "parse_options": pyarrow.csv.ParseOptions(newlines_in_values=True),
        "convert_options": pyarrow.csv.ConvertOptions(column_types=_TYPES, strings_can_be_null=False),
    }
    try:
        with readable(path), pyarrow.csv.open_csv(path, **options) as source:
            yield from source
    except pa.ArrowInvalid as error:
        if "Empty CSV file" in str(error):
            return
        raise _explained(str(error).splitlines()[0], names) from error


def _explained(message: str, names: list[str]) -> DataError:
    found = re.match(r"In CSV column #(\d+): (?:Row #(\d+): )?(.*)", message)
    if found is None:
        return DataError(f"columns: {message}", _HINT)
    line = f"line {found[2]}: " if found[2] else ""
    return DataError(f"{names[int(found[1])]}: {line}{found[3][:_LONGEST_SHOWN]}", _HINT)


def write(reader: TraceReader, path: Path) -> None:
    """Write all rows to `path`, in whole blocks, without miss, pid, device and inode."""
    numbers = np.array([file.id for file in reader.files], np.uint32)
    paths = pa.array([_quoted(os.fsencode(file.path)) for file in reader.files], pa.binary())
    with open(path, "wb") as target:
        target.write(_HEADER)
        for batch in reader.batches():
            target.write(_lines(batch, numbers, paths))


def _quoted(path: bytes) -> bytes:
    return b'"' + path.replace(b'"', b'""') + b'"' if _QUOTED_BYTES & set(path) else path


def _lines(batch: Trace, numbers: Uint32s, paths: Any) -> Any:
    cells = [
        paths.take(pa.array(np.searchsorted(numbers, batch.file))),
        _decimal(batch.first * BLOCK_BYTES),
        _decimal(batch.count.astype(np.uint64) * BLOCK_BYTES),
        pa.array([name.encode() for name in OP_NAMES]).take(pa.array(batch.op)),
        pc.binary_join_element_wise(_decimal(batch.t_ns // _SECOND_NS), _decimal(batch.t_ns % _SECOND_NS, digits=9), b"."),
    ]
    lines = pc.binary_join_element_wise(pc.binary_join_element_wise(*cells, b","), pa.scalar(b""), b"\n")
    return lines.buffers()[2] if len(batch) else b""


def _decimal(values: Uint64s, digits: int = 1) -> Any:
    return pc.utf8_lpad(pa.array(values).cast(pa.string()), digits, "0").cast(pa.binary())
