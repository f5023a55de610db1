"""The `llmcache classify` command: table, JSON, tensor names from disk and from a copy, experts, bad input."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.model.tensors import Experts
from llmcache.trace.record import Provenance, Trace, TraceFile
from tests.unit.command_parts import called
from tests.unit.gguf_bytes import Gguf
from tests.unit.simulation_parts import plain_belady, plain_lru
from tests.unit.test_make_model import made
from tools.bench import routing

BLOCK = 4096
LAYERS = 4
LAYER_BYTES = 100 * BLOCK


def classify(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return called("classify", *args)


def document(*args: str | Path) -> dict[str, Any]:
    result = classify(*args, "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["schema"] == "llmcache.classify/1"
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a GGUF file of a header and four layers of 100 blocks."""
    content = Gguf()
    for layer in range(LAYERS):
        content.tensor(f"blk.{layer}.attn_q.weight", [LAYER_BYTES // 4], 0, layer * LAYER_BYTES)
    content.data_bytes = LAYERS * LAYER_BYTES
    path = tmp_path / "model.gguf"
    path.write_bytes(content.file())
    return path


def recorded(path: Path, tmp_path: Path, seen_as: str | None = None, inode: int | None = None) -> Path:
    """Save a trace that reads the file at `path` six times, and a small file once."""
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


def test_tensors_are_named_and_the_suggested_size_command_runs(model: Path, tmp_path: Path) -> None:
    found = document(recorded(model, tmp_path))
    assert names(found) == [["header", *(f"blk.{layer}.attn_q.weight" for layer in range(LAYERS))]]
    done = called(*found["size_command"].split()[1:], "--bw", "100")
    assert done.returncode == 0, done.stderr


def test_file_names_are_escaped_in_the_table(model: Path, tmp_path: Path) -> None:
    """Names that are not UTF-8 are escaped too."""
    done = classify(recorded(model, tmp_path, seen_as="/models/\x1b[31mred\n\udcff.gguf"))
    assert r"/models/\x1b[31mred\n\xff.gguf" in done.stdout and done.stdout.isascii() and "\x1b" not in done.stdout


def test_a_changed_file_gives_no_tensor_names(model: Path, tmp_path: Path) -> None:
    trace = recorded(model, tmp_path, inode=model.stat().st_ino + 1)
    assert names(document(trace)) == [[]]
    trace = recorded(model, tmp_path)
    with model.open("ab") as file:
        file.write(b"more")
    assert names(document(trace)) == [[]]
    model.unlink()
    assert names(document(trace)) == [[]]


def test_the_model_option_names_tensors_from_a_copy(model: Path, tmp_path: Path) -> None:
    """The copy is matched by name anywhere, or by size if it was renamed."""
    for seen_as in ("/mnt/models/model.gguf", "/mnt/models/renamed.bin"):
        trace = recorded(model, tmp_path, seen_as=seen_as, inode=1)
        assert names(document(trace)) == [[]]
        assert "blk.3.attn_q.weight" in names(document(trace, "--model", model))[0]


def test_a_damaged_model_gives_no_tensor_names(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = recorded(model, tmp_path)
    content = bytearray(model.read_bytes())
    content[8:16] = b"\xff" * 8  # number of tensors
    model.write_bytes(bytes(content))
    result = classify(trace, "--json")
    assert result.returncode == 0
    assert names(json.loads(result.stdout)) == [[]]
    assert "no tensor names" in caplog.text
    given = classify(trace, "--model", model)
    assert given.returncode == 5
    assert "--model" in given.stderr


def test_bad_input_has_its_exit_code_and_names_the_field(model: Path, tmp_path: Path) -> None:
    trace = recorded(model, tmp_path)
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    other = tmp_path / "other.gguf"
    other.write_bytes(Gguf().tensor("x", [8], 0, 0).file() + bytes(32))
    empty = tmp_path / "empty.parquet"
    Trace.build([], [], [], [], files=[], provenance=Provenance("test")).save(empty)
    for args, code, named in (
        ((tmp_path / "none.parquet",), 2, "none.parquet"),
        ((text,), 2, "text.gguf"),
        ((trace, "--model", tmp_path / "none.gguf"), 2, "--model"),
        ((trace, "--model", text), 5, "--model"),
        ((trace, "--model", other), 2, "--model"),
        ((), 2, "TRACE"),
        ((empty,), 5, "error: rows:"),
    ):
        result = classify(*args)
        assert (result.returncode, result.stdout) == (code, ""), (args, result)
        assert named in result.stderr


USED, EXPERTS, TOKENS = 3, 12, 60
MIXTURE = ("--size", "8M", "--layers", "3", "--experts", str(EXPERTS), "--used", str(USED), "--slice", "100K")
ROUTED, _ = routing.ranked(TOKENS, 3, EXPERTS, USED, routing.Habits(zipf=1.2, stay=0.3))


def read_as(accesses: Sequence[tuple[int, int, int]], paths: Sequence[Path], tmp_path: Path) -> Path:
    """Save a trace of reads (index in `paths`, first byte, bytes), 1 ms apart."""
    file, offset, size = np.array(accesses).T
    first, end = offset // BLOCK, -(-(offset + size) // BLOCK)
    files = [
        TraceFile(number, str(path), 1, path.stat().st_ino, 0, path.stat().st_size) for number, path in enumerate(paths)
    ]
    times = np.arange(len(file)) * 10**6
    trace = Trace.build(times, file, first, end - first, files=files, provenance=Provenance("test"))
    trace.save(tmp_path / "experts.parquet", force=True)
    return tmp_path / "experts.parquet"


def planned(path: Path) -> list[tuple[int, int, int]]:
    """Return the reads of a decoder that runs the model at `path` with the routing: dense tensors and expert slices."""
    tokens = routing.ranges(routing.layout_of(path), ROUTED.tolist())
    return [(0, offset, size) for ranges in tokens for offset, size in ranges]


def check_routing(found: dict[str, Any], names: Sequence[str], expert_bytes: int) -> None:
    """Assert that `found` matches the routing, by an independent count."""
    assert [layer["layer"] for layer in found["layers"]] == list(names)
    for number, layer in enumerate(found["layers"]):
        tokens = [set(token) for token in ROUTED[:, number].tolist()]
        popularity = [sum(expert in token for token in tokens) for expert in range(EXPERTS)]
        most = sorted(popularity, reverse=True)
        assert layer["popularity"] == popularity and layer["used"] == sum(map(bool, popularity))
        assert (layer["experts"], layer["visits"], layer["uses"]) == (EXPERTS, TOKENS, USED * TOKENS)
        assert layer["top_tenth"] == pytest.approx(sum(most[:2]) / layer["uses"])
        assert layer["top_quarter"] == pytest.approx(sum(most[:3]) / layer["uses"])
        again = sum(len(one & other) for one, other in pairwise(tokens))
        assert layer["again"] == pytest.approx(again / (USED * (TOKENS - 1)))
    uses = [
        number * EXPERTS + expert for token in ROUTED.tolist() for number, chosen in enumerate(token) for expert in chosen
    ]
    assert (found["experts"], found["uses"], found["used"]) == (3 * EXPERTS, len(uses), len(set(uses)))
    assert found["bytes"] == 3 * EXPERTS * expert_bytes and found["equal_sizes"] and found["incomplete"] is None
    assert [cache["experts"] for cache in found["caches"]] == [1, 3, 4, 7, 10, 18, 28]
    for cache in found["caches"]:
        assert cache["bytes"] == cache["experts"] * expert_bytes
        lru = sum(hits for hits, _ in plain_lru([(0, use, 1, 0) for use in uses], cache["experts"]))
        assert cache["lru_hit_ratio"] == pytest.approx(lru / len(uses))
        assert cache["belady_hit_ratio"] == pytest.approx(plain_belady(uses, cache["experts"]) / len(uses))


@pytest.mark.parametrize("args", [(), ("--format", "safetensors", "--fused")])
def test_expert_statistics_match_the_routing(args: tuple[str, ...], tmp_path: Path) -> None:
    (path,) = made(tmp_path / f"m.{'safetensors' if args else 'gguf'}", *MIXTURE, *args)
    trace = read_as(planned(path), [path], tmp_path)
    shown = document(trace)
    experts = Experts(routing.layout_of(path))
    (found,) = shown["mixtures"]
    assert (found["model"], found["files"]) == (str(path), [0])
    check_routing(found, [name for name, _, _ in experts.layers], experts.bytes_of(0))
    in_rows = {(name, number) for row in shown["rows"] for name, numbers in row["experts"].items() for number in numbers}
    used = {(layer["layer"], number) for layer in found["layers"] for number in np.flatnonzero(layer["popularity"]).tolist()}
    assert in_rows <= used and 2 * len(in_rows) > len(used)  # positions of blocks read once or twice are not kept


def test_the_shards_of_an_moe_model_are_one_model(tmp_path: Path) -> None:
    """Each expert has tensors of its own, and one expert spans two shards."""
    args = (*MIXTURE, "--format", "safetensors", "--split", "3")
    shards = [path for path in made(tmp_path / "m.safetensors", *args) if path.suffix == ".safetensors"]
    parts = [Experts(routing.layout_of(shard)) for shard in shards]
    slices: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for shard, part in enumerate(parts):
        for name, first, count in part.layers:
            for number in range(count):
                slices.setdefault((name, number), []).extend((shard, *found) for found in part.ranges(first + number))
    assert [len(part.starts) for part in parts] == [0, 77, 31] and {len(found) for found in slices.values()} == {3}
    names = sorted({name for name, _ in slices})
    accesses = [
        slices[name, expert][turn]
        for token in ROUTED.tolist()
        for name, chosen in zip(names, token, strict=True)
        for turn in range(3)
        for expert in chosen
    ]
    (found,) = document(read_as(accesses, shards, tmp_path))["mixtures"]
    assert (found["model"], found["files"]) == (str(tmp_path / "m-*-of-00003.safetensors"), [1, 2])
    check_routing(found, names, parts[1].bytes_of(0))
