"""Damaged and foreign Parquet files, through the command line: exit code 5, and a message that names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from llmcache import cli
from llmcache.errors import DataError
from llmcache.trace.formats import open_trace
from llmcache.trace.record import Trace, TraceReader, encode
from tests.unit.trace_parts import FILES, PROVENANCE, trace, write_parquet


def info(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Returns exit code and stderr of `llmcache info PATH`."""
    with pytest.raises(SystemExit) as caught:
        cli.run(cli.app, "llmcache", ["info", str(path)])
    assert isinstance(caught.value.code, int)
    return caught.value.code, capsys.readouterr().err


def metadata(**changes: Any) -> bytes:
    """The metadata of a good trace with some entries replaced; None leaves one out."""
    document = json.loads(encode(FILES, PROVENANCE)) | changes
    return json.dumps({name: value for name, value in document.items() if value is not None}).encode()


def file_entry(**changes: Any) -> list[dict[str, Any]]:
    """A file table of which the first entry is changed; None leaves a field out."""
    table: list[dict[str, Any]] = json.loads(encode(FILES, PROVENANCE))["files"]
    table[0] = {name: value for name, value in (table[0] | changes).items() if value is not None}
    return table


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "missing column": ({"columns": {"count": None}}, "count: .* has no such column"),
    "extra column": ({"columns": {"extra": [1, 2, 3, 4]}}, "extra: .* has a column that a trace does not have"),
    "wrong type": ({"columns": {"first": np.zeros(4)}}, "first: .* has double, must be uint64"),
    "no value": (
        {"columns": {"pid": pa.array([1, None, 3, 4], pa.uint32())}, "nullable": True},
        "pid: 1 rows have no value",
    ),
    "no metadata": ({"metadata": b""}, "metadata: .* without 'llmcache.trace'"),
    "metadata not JSON": ({"metadata": b"{"}, "metadata: not JSON"),
    "other version": ({"metadata": metadata(schema="llmcache.trace/9")}, "schema: 'llmcache.trace/9'"),
    "no file table": ({"metadata": metadata(files=None)}, "files: the metadata has no file table"),
    "unknown in provenance": ({"metadata": metadata(provenance={"tier": "x", "y": 1})}, "provenance: 'y' is unknown"),
    "provenance without tier": ({"metadata": metadata(provenance={})}, "provenance: .*'tier'"),
    "lost events below 0": ({"metadata": metadata(provenance={"tier": "", "lost_events": -1})}, "lost_events is -1"),
    "file without path": ({"metadata": metadata(files=file_entry(path=None))}, "files: .*'path'"),
    "file size below 0": ({"metadata": metadata(files=file_entry(size_bytes=-1))}, "files: size_bytes of .* is -1"),
    "inode a boolean": ({"metadata": metadata(files=file_entry(inode=True))}, "files: inode is True"),
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


def test_a_wrong_row_is_found_where_it_is_streamed(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", {"t_ns": np.array([3, 2, 1, 0], np.uint64)})
    with TraceReader(path) as reader, pytest.raises(DataError, match="t_ns: row 1 has 2, the row before it 3"):
        list(reader.batches(1))


def test_a_damaged_file_is_bad_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_parquet(tmp_path / "t.parquet", {})
    assert info(path, capsys) == (0, "")
    data = path.read_bytes()
    flipped = data[:60] + bytes([data[60] ^ 1]) + data[61:]  # in the first page: only its checksum tells
    for damaged in (data[: len(data) // 2], data[:-1], flipped, b"t_ns,file\n", b""):
        path.write_bytes(damaged)
        code, error = info(path, capsys)
        assert code == 5 and error.startswith("llmcache: error: ") and "Traceback" not in error
        assert "cannot be read as Parquet" in error and "\nhint: truncated, damaged or not Parquet" in error
    path.unlink()
    path.symlink_to(path)
    code, error = info(path, capsys)
    assert code == 3 and "cannot read" in error and "symbolic links" in error


def test_every_byte_of_damage_is_found_or_harmless(tmp_path: Path) -> None:
    """Whatever byte is changed, here every seventh: the trace is refused by name, or it is the same trace."""
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
