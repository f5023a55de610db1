"""`llmcache classify` as a user calls it: table, JSON, tensor names from disk and from a copy, bad input."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from llmcache.cache.classes import Classification
from llmcache.cache.layers import Layer
from llmcache.report.classification import table
from llmcache.report.layers import layer_tables
from llmcache.trace.record import Provenance, Trace, TraceFile
from tests.unit.gguf_bytes import Gguf

BLOCK = 4096
LAYERS = 4
LAYER_BYTES = 100 * BLOCK


def classify(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmcache", "classify", *map(str, args)]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def document(*args: str | Path) -> dict[str, Any]:
    result = classify(*args, "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["schema"] == "llmcache.classify/1"
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A GGUF file of four layers of 100 blocks, behind a header."""
    content = Gguf()
    for layer in range(LAYERS):
        content.tensor(f"blk.{layer}.attn_q.weight", [LAYER_BYTES // 4], 0, layer * LAYER_BYTES)
    content.data_bytes = LAYERS * LAYER_BYTES
    path = tmp_path / "model.gguf"
    path.write_bytes(content.file())
    return path


def recorded(path: Path, tmp_path: Path, seen_as: str | None = None, inode: int | None = None) -> Path:
    """A trace in which the file at `path` is read six times, and a small one by the way."""
    status = path.stat()
    blocks = -(-status.st_size // BLOCK)
    files = [
        TraceFile(0, seen_as or str(path), 1, status.st_ino if inode is None else inode, 0, status.st_size),
        TraceFile(1, "/etc/small[1].conf", 1, 9, 0, 3 * BLOCK),
    ]
    rows = [(0, first, min(50, blocks - first)) for first in range(0, blocks, 50)]
    file, first, count = zip(*[*rows * 6, (1, 0, 3)], strict=True)
    times = [number * 10**8 for number in range(len(file))]
    trace = Trace.build(times, file, first, count, files=files, provenance=Provenance("test", lost_events=5))
    target = tmp_path / "trace.parquet"
    trace.save(target, force=True)
    return target


def names(found: dict[str, Any]) -> list[list[str]]:
    return [row["tensors"] for row in found["rows"]]


def test_table(model: Path, tmp_path: Path) -> None:
    result = classify(recorded(model, tmp_path))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "5 accesses lost" in lines[0]
    loop = next(line for line in lines if line.startswith("LOOP"))
    assert "1.64 MB" in loop and "0-400" in loop and "900 ms" in loop and "blk.0-3" in loop
    assert any(line.startswith("and 1 smaller than 64.0 KB: 12.3 KB") for line in lines)
    assert any("llmcache size --loop 1.6" in line for line in lines)
    assert "small[1].conf" in classify(recorded(model, tmp_path), "--min-bytes", "0").stdout


def classes() -> list[Classification]:
    """A loop in a model far down, with layers of long names; a part of a small file, read downwards."""
    path = "/home/somebody/.cache/huggingface/hub/models--org--model-8b/snapshots/0123456789abcdef/model.Q8_0.gguf"
    tensors = (
        "token_embd.weight",
        *(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(32)),
        "output.weight",
    )
    loop = Classification(
        0, path, "read", "LOOP", ((0, 1953124),), 8 * 10**9, 2 * 10**6, 0.9, 12, 0, 9, 10**8, tensors=tensors
    )
    parts = Classification(
        1, "/etc/small.conf", "write", "SEQ", ((8, 9), (2, 3)), 16384, 4, 0.1, 1, 0, 9, order="descending"
    )
    return [loop, parts]


def drawn(made: Table, width: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width, highlight=False, markup=False).print(made)
    return [line.rstrip() for line in text.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("width", "columns"), [(60, "class size period share file"), (80, "class op size times period share file")]
)
def test_a_row_stays_in_its_lines_on_a_narrow_terminal(width: int, columns: str) -> None:
    head, loop, names, *parts = drawn(table(classes(), width), width)
    assert " ".join(head.split()) == columns and max(map(len, (head, loop, names, *parts))) <= width
    assert loop.startswith("LOOP") and "8.00 GB" in loop and "100 ms" in loop and "90.0%" in loop
    assert "/home/" in loop and loop.endswith("model.Q8_0.gguf") and names.strip().startswith("model.layers.0-31 (32)")
    assert parts[0].startswith("SEQ") and "small.conf" in parts[0] and "(2 places, downwards)" in "".join(parts)
    assert len(parts) <= 2


def test_a_wide_terminal_has_all_of_it() -> None:
    head, loop, parts = drawn(table(classes(), 240), 240)
    assert head.split() == ["class", "op", "size", "blocks", "times", "period", "share", "file", "tensors"]
    assert classes()[0].path in loop and "0-1953124" in loop and "token_embd.weight" in loop and "…" not in loop
    assert parts.endswith("/etc/small.conf (2 places, downwards)")


def test_layers_stay_in_their_lines_on_a_narrow_terminal() -> None:
    layers = [Layer(0, "/m", f"model.vision_tower.encoder.layers.{n}", 9, 10**8, 10**6, 10**6, 5000, n) for n in range(3)]
    _, made = layer_tables(layers, 60)
    assert isinstance(made, Table)
    lines = drawn(made, 60)
    assert len(lines) == 4 and max(map(len, lines)) <= 60
    assert all(line.startswith("model.") and f"layers.{n} " in line for n, line in enumerate(lines[1:]))


def test_the_command_it_suggests_works(model: Path, tmp_path: Path) -> None:
    suggested = document(recorded(model, tmp_path))["size_command"].split()[1:]
    command = [sys.executable, "-m", "llmcache", *suggested, "--bw", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_tensors_of_a_model_that_is_still_there(model: Path, tmp_path: Path) -> None:
    found = document(recorded(model, tmp_path))
    assert names(found) == [["header", *(f"blk.{layer}.attn_q.weight" for layer in range(LAYERS))]]


def test_a_file_that_has_changed_gives_no_names(model: Path, tmp_path: Path) -> None:
    trace = recorded(model, tmp_path, inode=model.stat().st_ino + 1)
    assert names(document(trace)) == [[]]
    trace = recorded(model, tmp_path)
    with model.open("ab") as file:
        file.write(b"more")
    assert names(document(trace)) == [[]]
    model.unlink()
    assert names(document(trace)) == [[]]


def test_a_copy_given_with_model(model: Path, tmp_path: Path) -> None:
    """By its name, wherever it is; by its size if it was renamed."""
    for seen_as in ("/mnt/models/model.gguf", "/mnt/models/renamed.bin"):
        trace = recorded(model, tmp_path, seen_as=seen_as, inode=1)
        assert names(document(trace)) == [[]]
        assert "blk.3.attn_q.weight" in names(document(trace, "--model", model))[0]


def test_a_damaged_model_is_told_and_names_nothing(model: Path, tmp_path: Path) -> None:
    trace = recorded(model, tmp_path)
    content = bytearray(model.read_bytes())
    content[8:16] = b"\xff" * 8  # number of tensors
    model.write_bytes(bytes(content))
    result = classify(trace, "--json")
    assert result.returncode == 0
    assert names(json.loads(result.stdout)) == [[]]
    assert "no tensor names" in result.stderr
    given = classify(trace, "--model", model)
    assert given.returncode == 5
    assert "--model" in given.stderr


def test_bad_input(model: Path, tmp_path: Path) -> None:
    trace = recorded(model, tmp_path)
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    other = tmp_path / "other.gguf"
    other.write_bytes(Gguf().tensor("x", [8], 0, 0).file() + bytes(32))
    for args, code, named in (
        ((tmp_path / "none.parquet",), 2, "none.parquet"),
        ((text,), 2, "text.gguf"),
        ((trace, "--min-bytes", "many"), 2, "many"),
        ((trace, "--model", tmp_path / "none.gguf"), 2, "--model"),
        ((trace, "--model", text), 5, "--model"),
        ((trace, "--model", other), 2, "--model"),
        ((), 2, "TRACE"),
    ):
        result = classify(*args)
        assert (result.returncode, result.stdout) == (code, ""), (args, result)
        assert named in result.stderr
        assert "Traceback" not in result.stderr


def test_an_empty_trace(tmp_path: Path) -> None:
    path = tmp_path / "empty.parquet"
    Trace.build([], [], [], [], files=[], provenance=Provenance("test")).save(path)
    result = classify(path)
    assert result.returncode == 5
    assert "error: rows:" in result.stderr


def test_other_formats(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"a.bin,{first},{BLOCK * 50},read,{turn}" for turn in range(6) for first in range(0, BLOCK * 500, BLOCK * 50)]
    path.write_text("\n".join(["file,offset,length,op,time", *rows]) + "\n")
    (row,) = document(path)["rows"]
    assert (row["class"], row["bytes"], row["passes"], row["period_s"]) == ("LOOP", 500 * BLOCK, 6, 1)
