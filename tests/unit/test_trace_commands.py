"""`llmcache info` and `llmcache convert`: output, refusals and exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llmcache import cli
from llmcache.trace.formats import open_trace
from llmcache.trace.record import Provenance, Trace, TraceFile
from tests.unit.trace_parts import FILES, PROVENANCE, blocks, trace


def run(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.run(cli.app, "llmcache", [str(arg) for arg in args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Parquet trace of four rows."""
    trace(op=(0, 1, 2, 0), miss=(0, 1, 2, 0), pid=(5, 6, 5, 5)).save(tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def test_info_as_json_has_everything(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", source, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
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


def test_info_for_people(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", source) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) < 80
    for text in ("4 rows, 9 accesses", "test, 2 events lost", "hit 6, miss 1, unknown 2", "/models/a.gguf", "unknown"):
        assert text in " ".join(shown.split()), text


def test_info_for_people_leaves_long_documents_to_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    origin = Provenance("test", extra={"document": "x" * 5000, "seed": "5"})
    Trace.build(0, 0, 0, 1, files=FILES, provenance=origin).save(tmp_path / "t.parquet")
    assert run("info", tmp_path / "t.parquet") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "document 5000 characters, which --json shows" in shown and "seed 5" in shown


def test_info_names_many_files_only_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [TraceFile(number, f"/{number}", 0, 0, 0, 0) for number in range(25)]
    trace(range(25), range(25), 0, 1, files).save(tmp_path / "t.parquet")
    assert run("info", tmp_path / "t.parquet") == 0
    assert "and 5 more files" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["out.csv", "OUT.CSV", "out.oracleGeneral", "out.parquet"])
def test_convert_writes_every_format_and_reads_it_back(name: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = source.with_name(name)
    assert run("convert", source, target) == 0
    output = capsys.readouterr()
    assert output.out == "" and "4 rows" in output.err
    with open_trace(target) as reader:
        assert reader.read().accesses == 9
    assert sorted(entry.name for entry in source.parent.iterdir()) == sorted(["in.parquet", name])


def test_parquet_to_parquet_keeps_everything(source: Path) -> None:
    assert run("convert", source, source.with_name("out.parquet")) == 0
    assert Trace.load(source.with_name("out.parquet")).equals(Trace.load(source))
    assert run("convert", source, source, "--force") == 0
    assert Trace.load(source).equals(Trace.load(source.with_name("out.parquet")))


def test_a_strace_log_becomes_parquet(tmp_path: Path) -> None:
    log = 'openat(AT_FDCWD, "/m", O_RDONLY) = 3\nread(3, "x"..., 8192) = 8192\n'
    (tmp_path / "t.strace").write_text(log)
    assert run("convert", tmp_path / "t.strace", tmp_path / "t.parquet") == 0
    loaded = Trace.load(tmp_path / "t.parquet")
    assert blocks(loaded) == [("/m", 0, 0), ("/m", 1, 0)] and loaded.provenance.tier == "strace"


@pytest.mark.parametrize("name", ["out.csv", "out.oracleGeneral", "out.parquet"])
def test_nothing_is_replaced_unasked(name: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = source.with_name(name)
    target.write_text("precious")
    assert run("convert", source, target) == 2
    assert "exists" in capsys.readouterr().err and target.read_text() == "precious"
    assert run("convert", source, target, "--force") == 0
    assert target.read_bytes() != b"precious"


@pytest.mark.parametrize(
    ("written", "name", "code", "message"),
    [
        ("a,-1,1,read\n", "in.csv", 5, "offset: row 0 has -1"),
        ("a,0,-1,read\n", "in.csv", 5, "length: row 0 has -1"),
        ("a,0,1,read,9\na,0,1,read,8\n", "in.csv", 5, "time: row 1"),
        ("", "in.csv", 5, "rows: "),
        ("nothing\n", "in.strace", 5, "rows: "),
        ("x" * 23, "in.oracleGeneral", 5, "size: "),
        ("x" * 240, "in.oracleGeneral", 5, ""),
        ("PAR1", "in.parquet", 5, "Parquet"),
        ("", "in.txt", 2, "the ending '.txt'"),
        (None, "in.parquet", 2, "does not exist"),
        (None, "in.csv", 2, "does not exist"),
        (None, "in.strace", 2, "does not exist"),
        (None, "in.oracleGeneral", 2, "does not exist"),
    ],
)
@pytest.mark.parametrize("target", ["out.parquet", "out.csv", "out.oracleGeneral"])
def test_bad_input_has_its_exit_code_and_leaves_nothing(
    written: str | None, name: str, code: int, message: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if written is not None:
        path.write_text(written)
    if written == "x" * 240:
        path.write_bytes(bytes(20) + b"\xff" * 4 + b"\x00" * 24)  # the next access of the first record is negative
        message = "next: record 0"
    assert run("convert", path, tmp_path / target) == code
    error = capsys.readouterr().err
    assert error.startswith("llmcache: error: ") and message in error and "\nhint: " in error
    assert {entry.name for entry in tmp_path.iterdir()} <= {name}


def test_an_empty_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trace.build([], [], [], [], files=FILES, provenance=PROVENANCE).save(tmp_path / "t.parquet")
    for args in (("info", "t.parquet"), ("convert", "t.parquet", "u.csv"), ("convert", "t.parquet", "u.parquet")):
        assert run(args[0], *(tmp_path / name for name in args[1:])) == 5
        assert "rows: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "message"),
    [("out.strace", ".strace cannot be written"), ("out.txt", "the ending '.txt'"), ("none/out.csv", "is not a directory")],
)
def test_targets_that_cannot_be_written(target: str, message: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", source, source.parent / target) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.csv", "out.oracleGeneral", "out.parquet"])
def test_a_place_without_room_is_an_environment_problem(
    name: str, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """/dev/full stands for a full disk: everything can be opened and nothing written."""

    def full(path: Path, mode: int) -> int:
        path.symlink_to("/dev/full")
        return os.open(path, os.O_WRONLY)

    target = source.with_name(name)
    monkeypatch.setattr("llmcache.files.create", full)
    assert run("convert", source, target) == 3
    assert "cannot write" in capsys.readouterr().err
    assert [entry.name for entry in source.parent.iterdir()] == ["in.parquet"]
