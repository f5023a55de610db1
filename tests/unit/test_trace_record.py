"""Traces in memory and in Parquet: what is kept, what is refused, what a writer leaves behind."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmcache.errors import DataError
from llmcache.trace.record import COLUMNS, MAP, UNKNOWN, WRITE, Provenance, Trace, TraceFile, TraceWriter
from tests.unit.trace_parts import FILES, blocks, trace


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
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
def test_impossible_rows_are_refused_by_name(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message.replace("(", r"\(")) as caught:
        trace(**columns)
    assert caught.value.hint


def test_files_may_have_grown_but_not_without_end() -> None:
    assert trace(first=(0, 7, 500, 0)).accesses == 9
    # Beyond anything that was written: a read there is wrong; after such a write it is right.
    with pytest.raises(DataError, match="far beyond the end"):
        trace(first=(2**30, 7, 2**30, 0))
    assert trace(first=(2**30, 7, 2**30, 0), op=(WRITE, 0, 0, 0)).accesses == 9


def test_a_file_that_no_file_is_is_refused() -> None:
    for field in ("id", "dev", "inode", "generation", "size_bytes"):
        with pytest.raises(DataError, match=field):
            dataclasses.replace(FILES[0], **{field: -1})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"path '\\ud800' is not what"):
        TraceFile(0, "\ud800", 0, 0, 0, 0)
    assert TraceFile(0, "\udcff", 0, 0, 0, 0).path == "\udcff"  # as os.fsdecode gives it


def test_a_writer_learns_files_and_provenance_late(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with TraceWriter(path) as writer:
        writer.append({"t_ns": [5], "file": [3], "first": [10], "count": [2], "op": WRITE})
        writer.append({"t_ns": [6], "file": [3], "first": [0], "count": [1], "op": MAP})
        assert not path.exists()
        writer.add_file(TraceFile(3, "/late", 0, 0, 0, 100))
        writer.provenance = Provenance("capture", lost_events=4)
    loaded = Trace.load(path)
    assert blocks(loaded) == [("/late", 10, WRITE), ("/late", 11, WRITE), ("/late", 0, MAP)]
    assert loaded.files[0].size_bytes == 12 * 4096, "a file is as large as what was written to it"
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
def test_a_writer_refuses_what_does_not_fit(appended: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message), TraceWriter(tmp_path / "t.parquet") as writer:
        for rows in appended:
            writer.append(rows)
    assert not list(tmp_path.iterdir())


def test_an_error_while_writing_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    trace().save(path)
    before = path.read_bytes()
    with pytest.raises(RuntimeError), TraceWriter(path, force=True) as writer:
        writer.append(trace())
        raise RuntimeError
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_trace_is_streamed_in_constant_memory(tmp_path: Path) -> None:
    """3 M rows are 84 MB of columns: written and read in parts, they take a part of it."""
    code = """
import sys
import numpy as np
from llmcache.trace.record import *
from tools.bench.machine import peak_bytes
path, before, rows = sys.argv[1], peak_bytes(), 300_000
with TraceWriter(path, [TraceFile(0, "/f", 0, 0, 0, 0)]) as writer:
    for part in range(10):
        writer.append({"t_ns": np.arange(rows) + part * rows, "file": 0, "first": np.arange(rows), "count": 1})
with TraceReader(path) as reader:
    print(sum(batch.accesses for batch in reader.batches()), peak_bytes() - before)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "t.parquet")]
    accesses, grown_bytes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(accesses) == 3_000_000
    assert int(grown_bytes) < 75 << 20
