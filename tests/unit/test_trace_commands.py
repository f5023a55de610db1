"""The `llmcache info` and `llmcache convert` commands: output, errors and exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llmcache.trace.formats import open_trace
from llmcache.trace.record import Trace, TraceFile, TraceWriter
from tests.unit.command_parts import called
from tests.unit.trace_parts import FILES, PROVENANCE, trace


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a Parquet trace of four rows."""
    trace(op=(0, 1, 2, 0), miss=(0, 1, 2, 0), pid=(5, 6, 5, 5)).save(tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def test_info_prints_all_facts_as_json(source: Path) -> None:
    assert json.loads(called("info", source, "--json").stdout) == {
        "schema": "llmcache.info/1",
        "trace": str(source),
        "rows": 4,
        "accesses": 9,
        "accessed_bytes": 9 * 4096,
        "touched_bytes": 6 * 4096,
        "start_ns": 1,
        "end_ns": 9,
        "duration_ns": 8,
        "ops": {"read": 6, "write": 1, "map": 2},
        "misses": {"hit": 6, "miss": 1, "unknown": 2},
        "pids": [5, 6],
        "files": [
            {"path": FILES[0].path, "size_bytes": 400 * 4096, "rows": 3, "accesses": 8, "touched_bytes": 5 * 4096},
            {"path": FILES[1].path, "size_bytes": 0, "rows": 1, "accesses": 1, "touched_bytes": 4096},
        ],
        "untouched_files": 0,
        "provenance": {
            "tier": "test",
            "clock": "monotonic",
            "kernel": "6.18",
            "lost_events": 2,
            "command": "x y",
            "note": "",
            "extra": {"k": "ü"},
        },
    }


def test_names_in_a_trace_are_escaped(tmp_path: Path) -> None:
    columns = {"t_ns": [1], "file": [0], "first": [0], "count": [1]}
    with TraceWriter(tmp_path / "in.parquet", [TraceFile(0, "/\x1b[2J\udcff", 0, 0, 0, 0)], PROVENANCE) as writer:
        writer.append(columns)
    shown = called("info", tmp_path / "in.parquet").stdout
    assert "/\\x1b[2J\\xff" in shown and "\x1b" not in shown


@pytest.mark.parametrize("name", ["out.csv", "OUT.CSV", "out.oracleGeneral", "out.parquet"])
def test_convert_writes_every_format_and_replaces_only_with_force(name: str, source: Path) -> None:
    target = source.with_name(name)
    target.write_text("precious")
    refused = called("convert", source, target)
    assert refused.returncode == 2 and "exists" in refused.stderr and target.read_text() == "precious"
    done = called("convert", source, target, "--force")
    assert (done.returncode, done.stdout) == (0, "") and "4 rows" in done.stderr
    with open_trace(target) as reader:
        assert reader.read().accesses == 9
    assert sorted(entry.name for entry in source.parent.iterdir()) == sorted(["in.parquet", name])


def test_converting_parquet_to_parquet_keeps_the_trace(source: Path) -> None:
    target, before = source.with_name("out.parquet"), Trace.load(source)
    assert called("convert", source, target).returncode == 0 and Trace.load(target).equals(before)
    assert called("convert", source, source, "--force").returncode == 0 and Trace.load(source).equals(before)


NEGATIVE = bytes(20) + b"\xff" * 4 + bytes(24)  # the next access of the first record


@pytest.mark.parametrize(
    ("written", "name", "target", "code", "message"),
    [
        (b"a,-1,1,read\n", "in.csv", "out.parquet", 5, "offset: row 0 has -1"),
        (b"", "in.csv", "out.csv", 5, "rows: "),
        (b"x" * 23, "in.oracleGeneral", "out.parquet", 5, "size: "),
        (NEGATIVE, "in.oracleGeneral", "out.csv", 5, "next: record 0"),
        (b"PAR1", "in.parquet", "out.parquet", 5, "Parquet"),
        (b"", "in.txt", "out.parquet", 2, "the ending '.txt'"),
        (None, "in.csv", "out.parquet", 2, "does not exist"),
    ],
)
def test_bad_input_has_its_exit_code_and_leaves_no_files(
    written: bytes | None, name: str, target: str, code: int, message: str, tmp_path: Path
) -> None:
    if written is not None:
        (tmp_path / name).write_bytes(written)
    done = called("convert", tmp_path / name, tmp_path / target)
    assert done.returncode == code
    assert done.stderr.startswith("llmcache: error: ") and message in done.stderr and "\nhint: " in done.stderr
    assert {entry.name for entry in tmp_path.iterdir()} <= {name}


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    Trace.build([], [], [], [], files=FILES, provenance=PROVENANCE).save(tmp_path / "t.parquet")
    for args in (("info", "t.parquet"), ("convert", "t.parquet", "u.csv"), ("convert", "t.parquet", "u.parquet")):
        done = called(args[0], *(tmp_path / name for name in args[1:]))
        assert done.returncode == 5 and "rows: " in done.stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [("out.strace", ".strace cannot be written"), ("out.txt", "the ending '.txt'"), ("none/out.csv", "is not a directory")],
)
def test_impossible_targets_are_refused(target: str, message: str, source: Path) -> None:
    done = called("convert", source, source.parent / target)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize("name", ["out.csv", "out.oracleGeneral", "out.parquet"])
def test_a_full_disk_is_an_environment_error(name: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full stands for a full disk: it can be opened but not written."""

    def full(path: Path) -> int:
        path.symlink_to("/dev/full")
        return os.open(path, os.O_WRONLY)

    monkeypatch.setattr("llmcache.files.create", full)
    done = called("convert", source, source.with_name(name))
    assert done.returncode == 3 and "cannot write" in done.stderr
    assert [entry.name for entry in source.parent.iterdir()] == ["in.parquet"]
