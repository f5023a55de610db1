"""CSV traces: accepted forms, and errors that name the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmcache.errors import DataError
from llmcache.trace.formats import convert, open_trace
from llmcache.trace.record import MAP, READ, WRITE, Trace
from tests.unit.trace_parts import blocks, trace


def read(text: str | bytes, directory: Path) -> Trace:
    path = directory / "t.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with open_trace(path) as reader:
        return reader.read()


def test_bytes_become_blocks(tmp_path: Path) -> None:
    loaded = read("a,0,4096,read\na,4095,2,write\nb,10000,1,map\n", tmp_path)
    assert blocks(loaded) == [("a", 0, READ), ("a", 0, WRITE), ("a", 1, WRITE), ("b", 2, MAP)]
    assert [file.size_bytes for file in loaded.files] == [4097, 10001]
    assert loaded.t_ns.tolist() == [0, 1000, 2000] and "none" in loaded.provenance.clock
    timed = read("a,0,1,r,0.000000001\na,0,1,r,3\na,0,1,r,1700000000.123456789\n", tmp_path)
    assert timed.t_ns.tolist() == [1, 3 * 10**9, 1700000000123456789], "every nanosecond is kept"


@pytest.mark.parametrize(
    "text",
    [
        "file,offset,length,op\na,1,2,read\n",
        "\ufeffFile, Offset, Length, Op\r\na,1,2,read\r\n",
        "op,length,offset,file\nR,2,1,a\n",
        '"a",1,2,READ',
        "\na,1,2,r\n\n",
    ],
)
def test_equivalent_forms_are_accepted(text: str, tmp_path: Path) -> None:
    assert blocks(read(text, tmp_path)) == [("a", 0, READ)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,-1,1,read\n", "offset: row 0 has -1: must not be negative"),
        ("a,0,1,read\na,0,-4096,read\n", "length: row 1 has -4096: must be at least 1"),
        ("a,9223372036854775807,1,read\n", "length: .* beyond the largest possible file"),
        ("a,0,99999999999999999,read\n", "length: .* too long for a single access"),
        ("a,0,70M,read\n", "length: line 1: .*'70M'"),
        ("a,0,1,erase\n", "op: row 0 has 'erase', must be one of read, write, map"),
        ("a,0,1,read,2\na,0,1,read,1\n", "time: row 1 has 1000000000: .* not be less than in the row above"),
        ("a,0,1,read,-1\n", "time: row 0 has -1000000000: .* not be negative"),
        (",0,1,read\n", "file: a row has an empty path"),
        ("a,0,1\n", "columns: .* has 3, must be 4 or 5"),
        ("a,0,1,read\na,0\n", "columns: .*Expected 4 columns, got 2"),
        ("file,offset,op\na,0,read\n", "length: .* has no such column"),
        ("file,offset,offset,op\na,0,1,read\n", "offset: .* has this column twice"),
        ('file,offset,length,op\n"a' + "," * 200_000, "columns: "),
        ("a" * 200_000 + ",0,4,read", "columns: line 1: field larger"),
        ('"a\n' + "a" * 200_000 + '",0,4,read', "columns: line 2: field larger"),
        ("," * 3_000_000, "columns: "),
        ("a,0," + "9" * 5000 + ",read", "(?m)length: line 1: .{,300}$"),
        ("a,0,4," + "9" * 5000, "(?m)op: .{,300}$"),
        ("", "rows: .* has no accesses"),
    ],
)
def test_errors_name_the_field(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(text, tmp_path)
    assert caught.value.hint


def test_times_are_compared_across_chunks(tmp_path: Path) -> None:
    lines = [f"/models/a-long-path-to-fill-several-chunks.gguf,0,1,read,{at}" for at in range(60_000)]
    assert len(read("\n".join(lines), tmp_path)) == 60_000
    lines[59_000] = lines[0]
    with pytest.raises(DataError, match="time: row 59000 has 0"):
        read("\n".join(lines), tmp_path)


def test_paths_that_are_not_utf_8_are_preserved(tmp_path: Path) -> None:
    read(b'"/m/\xff\xfe,\n""x""",0,1,r\n', tmp_path)
    convert(tmp_path / "t.csv", tmp_path / "u.csv")
    with open_trace(tmp_path / "u.csv") as reader:
        assert reader.files[0].path == '/m/\udcff\udcfe,\n"x"'


def test_a_trace_is_written_as_csv(tmp_path: Path) -> None:
    trace(t_ns=(1, 2, 2, 1700000000123456789), op=(0, 1, 2, 0)).save(tmp_path / "t.parquet")
    convert(tmp_path / "t.parquet", tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == (
        "file,offset,length,op,time\n"
        "/models/a.gguf,0,12288,read,0.000000001\n"
        '"/models/b,""c\n.bin",28672,4096,write,0.000000002\n'
        "/models/a.gguf,12288,8192,map,0.000000002\n"
        "/models/a.gguf,0,12288,read,1700000000.123456789\n"
    )
