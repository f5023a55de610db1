"""Traces in memory and in Parquet: saving and loading, foreign and damaged files, and failures of the writer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from llmcache import cli
from llmcache.errors import DataError
from llmcache.trace.formats import open_trace
from llmcache.trace.record import (
    COLUMNS,
    MAP,
    UNKNOWN,
    WRITE,
    Provenance,
    Trace,
    TraceFile,
    TraceReader,
    TraceWriter,
    encode,
)
from tests.unit.trace_parts import FILES, PROVENANCE, blocks, trace, write_parquet


def test_a_saved_trace_is_loaded_unchanged(tmp_path: Path) -> None:
    made = trace()
    assert {name: getattr(made, name).dtype for name in COLUMNS} == COLUMNS
    assert (len(made), made.accesses, made.end.tolist()) == (4, 9, [3, 8, 5, 3])
    assert made.op.tolist() == [0] * 4 and made.miss.tolist() == [UNKNOWN] * 4 and made.pid.tolist() == [0] * 4
    made = trace(op=(0, 1, 2, 0), miss=(0, 1, 2, 0), pid=7)
    made.save(tmp_path / "t.parquet")
    assert Trace.load(tmp_path / "t.parquet").equals(made)
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"t_ns": (-1, 3, 4, 4)}, "t_ns: -1 to 4"),
        ({"count": (1, 1, 1 << 32, 1)}, "count: 1 to 4294967296"),
        ({"count": (1, 1, 1)}, "count: 3 rows, other columns have 4"),
        ({"first": (0, -5, 0, 0)}, "first: -5 to 0"),
        ({"first": (0, 2**51, 0, 0)}, "first: row 1 has 2251799813685248"),
        ({"first": (0.5, 1, 2, 3)}, "first: float64, must be integers"),
        ({"pid": -1}, "pid: -1 to -1"),
    ],
)
def test_impossible_rows_are_refused_by_field(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message.replace("(", r"\(")) as caught:
        trace(**columns)
    assert caught.value.hint


def test_files_may_have_grown_within_limits() -> None:
    assert trace(first=(0, 7, 500, 0)).accesses == 9
    # Far beyond the end, a read is an error, unless a write there precedes it.
    with pytest.raises(DataError, match="far beyond the end"):
        trace(first=(2**30, 7, 2**30, 0))
    assert trace(first=(2**30, 7, 2**30, 0), op=(WRITE, 0, 0, 0)).accesses == 9


def test_impossible_files_are_refused_by_field() -> None:
    for field in ("id", "dev", "inode", "generation", "size_bytes"):
        with pytest.raises(DataError, match=field):
            dataclasses.replace(FILES[0], **{field: -1})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"path '\\ud800' is not a valid path"):
        TraceFile(0, "\ud800", 0, 0, 0, 0)
    assert TraceFile(0, "\udcff", 0, 0, 0, 0).path == "\udcff"  # as os.fsdecode returns it


def test_files_and_provenance_can_be_set_after_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with TraceWriter(path) as writer:
        writer.append({"t_ns": [5], "file": [3], "first": [10], "count": [2], "op": WRITE})
        writer.append({"t_ns": [6], "file": [3], "first": [0], "count": [1], "op": MAP})
        assert not path.exists()
        writer.add_file(TraceFile(3, "/late", 0, 0, 0, 100))
        writer.provenance = Provenance("capture", lost_events=4)
    loaded = Trace.load(path)
    assert blocks(loaded) == [("/late", 10, WRITE), ("/late", 11, WRITE), ("/late", 0, MAP)]
    assert loaded.files[0].size_bytes == 12 * 4096, "a file is at least as large as the writes to it"
    assert loaded.provenance == Provenance("capture", lost_events=4)


@pytest.mark.parametrize(
    ("appended", "message"),
    [
        ([{"t_ns": 0, "file": 0, "first": 0}], "count: missing"),
        ([{**dict.fromkeys(COLUMNS, 0), "size": 1}], "size: unknown"),
        ([{"t_ns": 0, "file": 3, "first": 0, "count": 1}], "file: 3 is not in the file table"),
        ([trace(), trace()], "t_ns: row 4 has 1"),
    ],
)
def test_a_writer_refuses_invalid_rows(appended: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message), TraceWriter(tmp_path / "t.parquet") as writer:
        for rows in appended:
            writer.append(rows)
    assert not list(tmp_path.iterdir())


def test_an_error_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    trace().save(path)
    before = path.read_bytes()
    with pytest.raises(RuntimeError), TraceWriter(path, force=True) as writer:
        writer.append(trace())
        raise RuntimeError
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def info(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return exit code and stderr of `llmcache info PATH`."""
    with pytest.raises(SystemExit) as caught:
        cli.run(cli.app, "llmcache", ["info", str(path)])
    assert isinstance(caught.value.code, int)
    return caught.value.code, capsys.readouterr().err


def metadata(**changes: Any) -> bytes:
    """Return the metadata of a valid trace with some entries replaced; None removes an entry."""
    document = json.loads(encode(FILES, PROVENANCE)) | changes
    return json.dumps({name: value for name, value in document.items() if value is not None}).encode()


def file_entry(**changes: Any) -> list[dict[str, Any]]:
    """Return a file table whose first entry is changed; None removes a field."""
    table: list[dict[str, Any]] = json.loads(encode(FILES, PROVENANCE))["files"]
    table[0] = {name: value for name, value in (table[0] | changes).items() if value is not None}
    return table


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "missing column": ({"columns": {"count": None}}, "count: .* has no such column"),
    "extra column": ({"columns": {"extra": [1, 2, 3, 4]}}, "extra: .* has a column that a trace does not have"),
    "wrong type": ({"columns": {"first": np.zeros(4)}}, "first: .* has type double, must be uint64"),
    "no value": (
        {"columns": {"pid": pa.array([1, None, 3, 4], pa.uint32())}, "nullable": True},
        "pid: 1 rows have no value",
    ),
    "no metadata": ({"metadata": b""}, "metadata: .* without 'llmcache.trace'"),
    "metadata not JSON": ({"metadata": b"{"}, "metadata: not JSON"),
    "other version": ({"metadata": metadata(schema="llmcache.trace/9")}, "schema: 'llmcache.trace/9'"),
    "no file table": ({"metadata": metadata(files=None)}, "files: the metadata has no file table"),
    "unknown in provenance": ({"metadata": metadata(provenance={"tier": "x", "y": 1})}, "provenance: 'y' is unknown"),
    "provenance without tier": ({"metadata": metadata(provenance={})}, "provenance: tier: missing"),
    "lost events below 0": ({"metadata": metadata(provenance={"tier": "", "lost_events": -1})}, "lost_events is -1"),
    "file without path": ({"metadata": metadata(files=file_entry(path=None))}, "files: path: missing"),
    "file size below 0": ({"metadata": metadata(files=file_entry(size_bytes=-1))}, "files: size_bytes of .* is -1"),
    "inode a boolean": ({"metadata": metadata(files=file_entry(inode=True))}, "files: inode: 'True' is not a number"),
    "two files, one id": ({"metadata": metadata(files=file_entry(id=1))}, "files: id 1 stands for"),
    "file not in table": ({"metadata": metadata(files=file_entry(id=5))}, "file: 0 is not in the file table"),
    "times go back": ({"columns": {"t_ns": np.array([1, 5, 4, 9], np.uint64)}}, "t_ns: row 2 has 4"),
    "count 0": ({"columns": {"count": np.array([1, 0, 4, 9], np.uint32)}}, "count: row 1 has 0"),
    "op 7": ({"columns": {"op": np.array([0, 1, 2, 7], np.uint8)}}, "op: row 3 has 7"),
    "miss 3": ({"columns": {"miss": np.array([3, 1, 2, 0], np.uint8)}}, "miss: row 0 has 3"),
    "block overflow": ({"columns": {"first": np.full(4, 2**64 - 2, np.uint64)}}, "first: row 0 has 18446744073709551614"),
    "beyond the file": ({"columns": {"first": np.full(4, 2**45, np.uint64)}}, "first: block .*a.gguf', which has 400"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_file_is_bad_data(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, message = FOREIGN[case]
    path = write_parquet(tmp_path / "t.parquet", **{"columns": {}, **changes})
    with pytest.raises(DataError, match=message), open_trace(path) as reader:
        reader.read()
    code, error = info(path, capsys)
    assert code == 5
    assert error.startswith("llmcache: error: ") and "\nhint: " in error and "Traceback" not in error


def test_a_wrong_row_is_found_while_streaming(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", {"t_ns": np.array([3, 2, 1, 0], np.uint64)})
    with TraceReader(path) as reader, pytest.raises(DataError, match="t_ns: row 1 has 2, the row before it 3"):
        list(reader.batches(1))


def test_a_damaged_file_is_bad_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_parquet(tmp_path / "t.parquet", {})
    assert info(path, capsys) == (0, "")
    data = path.read_bytes()
    flipped = data[:60] + bytes([data[60] ^ 1]) + data[61:]  # in the first page, where only the checksum detects it
    for damaged in (data[: len(data) // 2], data[:-1], flipped, b"t_ns,file\n", b""):
        path.write_bytes(damaged)
        code, error = info(path, capsys)
        assert code == 5 and error.startswith("llmcache: error: ") and "Traceback" not in error
        assert "cannot be read as Parquet" in error and "\nhint: truncated, damaged or not Parquet" in error
    path.unlink()
    path.symlink_to(path)
    code, error = info(path, capsys)
    assert code == 3 and "cannot read" in error and "symbolic links" in error


def test_damage_of_any_byte_is_detected_or_harmless(tmp_path: Path) -> None:
    """For every seventh byte, a changed trace is refused or loads unchanged."""
    path = tmp_path / "t.parquet"
    trace().save(path)
    good, same = path.read_bytes(), 0
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
        try:
            loaded = Trace.load(path)
        except DataError:
            continue
        same += 1
        assert np.array_equal(loaded.first, trace().first) and np.array_equal(loaded.count, trace().count), at
    assert same < len(good) / 14
