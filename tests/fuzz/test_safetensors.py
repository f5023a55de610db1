"""Fuzz target: headers of safetensors files, and the indexes of sharded models."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcache.errors import DataError, LlmcacheError
from llmcache.model import read_layout
from llmcache.model.modelfile import model_bytes
from llmcache.model.safetensors import index_shards
from tests.conftest import examples
from tests.fuzz.mutations import Pieces, documents, mutated, written
from tests.fuzz.target import Target, bounded, is_printable, refusal, scratch
from tests.fuzz.test_gguf import check_cost, check_layout
from tests.unit.gguf_bytes import Reads

SIZE = 640
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "model.embed_tokens.weight": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
    "model.layers.0.mlp.experts.1.w1.weight": {"dtype": "BF16", "shape": [8, 8], "data_offsets": [128, 256]},
    "model.layers.0.input_layernorm.weight": {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [256, 272]},
    "packed": {"dtype": "F4", "shape": [2, 16], "data_offsets": [272, 288]},
    "empty": {"dtype": "I64", "shape": [0, 5], "data_offsets": [288, 288]},
    "lm_head.weight": {"dtype": "NEW", "shape": [3], "data_offsets": [288, 300]},
}
INDEX: dict[str, Any] = {
    "metadata": {"total_size": 300},
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
}


def file_of(header: bytes, length: int | None = None, size: int = SIZE) -> bytes:
    """Return a file with this header; `length` may be wrong."""
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(size)


def seeds() -> list[bytes]:
    """Return a model, a small one, and one with a padded header as the reference implementation writes it."""
    small = {"x": HEADER["packed"] | {"data_offsets": [0, 16]}}
    return [file_of(written(HEADER)), file_of(written(small)), file_of(written(HEADER) + b"   ")]


def check(data: bytes) -> None:
    reads = Reads(data)
    with bounded(), refusal():
        layout = read_layout(reads, len(data), "dir/model-00001-of-00002.safetensors")
        if layout is not None and layout.kind == "safetensors":
            assert layout.shard == (0, 2)
            check_layout(layout, len(data))
    assert reads.total_bytes <= 2 * len(data) + 64


def check_index(data: bytes) -> None:
    """Check that an index names files next to it or is refused, and that searching them changes nothing."""
    with bounded(), refusal():
        names = index_shards(data)
        assert list(names) == sorted(set(names))
        assert all(name and "/" not in name and "\0" not in name and is_printable(name) for name in names)
    with scratch() as directory:
        path = Path(directory) / "model.safetensors.index.json"
        path.write_bytes(data)
        (path.parent / "model-00001-of-00002.safetensors").write_bytes(seeds()[1])
        with bounded(), refusal(LlmcacheError):
            model_bytes(str(path))
        assert path.read_bytes() == data and len(list(path.parent.iterdir())) == 2


def _random_headers() -> st.SearchStrategy[bytes]:
    """Generate well-formed headers whose tensors may be adjacent, overlap, or lie beyond the end."""
    places = st.tuples(st.sampled_from([0, 8, 16, 24, 32, 640, 1 << 62]), st.sampled_from([0, 8, 16, 632, 640, 1 << 62]))
    entries = places.map(lambda place: {"dtype": "U8", "shape": [place[1]], "data_offsets": [place[0], sum(place)]})
    return st.dictionaries(st.sampled_from(["a", "b", "c", "lm_head.weight"]), entries).map(written).map(file_of)


TARGET = Target("safetensors", mutated(seeds()) | documents([HEADER]).map(written).map(file_of) | _random_headers(), check)
INDEXES = Target("safetensors-index", documents([INDEX]).map(written) | mutated([written(INDEX)]), check_index)


def test_the_seeds_are_read() -> None:
    for seed in seeds():
        layout = read_layout(Reads(seed), len(seed), "model.safetensors")
        assert layout is not None and layout.tensors
    assert len(index_shards(written(INDEX))) == 2


@given(TARGET.inputs)
@settings(max_examples=examples(250))
@example(file_of(b"{}", length=1 << 60))
@example(file_of(b"[" * 100_000))
@example(file_of(b'{"a":' * 100_000))
@example(file_of(b'{"a": {"dtype": "\\ud800", "shape": [], "data_offsets": [0, 0]}}'))
@example(file_of(b'{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'))
@example(file_of(json.dumps(HEADER).encode("utf-16")))
@example(file_of(b"9" * 5000))
def test_any_bytes(data: bytes) -> None:
    check(data)


@given(INDEXES.inputs)
@settings(max_examples=examples(150))
@example(b"[" * 100_000)
@example(b'{"weight_map": {"a": "../outside.safetensors"}}')
@example(b'{"weight_map": {"a": "\\ud800"}}')
def test_any_index(data: bytes) -> None:
    check_index(data)


def test_a_shape_of_many_numbers_is_refused_at_once() -> None:
    """The product of that many numbers takes hours, so it must not be computed before the comparison."""
    shape = ",".join(["9223372036854775807"] * 400_000)
    data = file_of(f'{{"a": {{"dtype": "U8", "shape": [{shape}], "data_offsets": [0, 1]}}}}'.encode())
    with pytest.raises(DataError) as refused:
        read_layout(Reads(data), len(data), "a.safetensors")
    assert len(refused.value.message) < 4096


TENSOR = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]'
COSTLY: dict[str, Pieces] = {
    "many items": [(b'"a":[', 1), (b"[],", 700_000), (b"1],", 1)],
    "levels": [(b'"a":', 1), (b"[", 700_000)],
    "digits": [(b'"a":', 1), (b"9", 700_000)],
    "many texts": [(b'"__metadata__":{', 1), (b'"a":"b",', 700_000), (b'"":""},', 1)],
    "long texts": [(b'"__metadata__":{', 1), (b'"%b":"\\n",' % (b"m" * 65_536), 100), (b'"":""},', 1)],
    "letters of four bytes": [(b'"__metadata__":{"a":"', 1), (b"\xf0\x90\x80\x80", 4_000_000), (b'"},', 1)],
    "escapes": [(b'"a":' + TENSOR + b',"other":"', 1), (b'\\"', 1_000_000), (b'"},', 1)],
    "a long name": [(b'"', 1), (b"n", 1_000_000), (b'":' + TENSOR + b"},", 1)],
    "many tensors": [(b'"t":' + TENSOR + b"},", 3000)],
    "a wrong length": [],  # declares a wrong length
}


@pytest.mark.parametrize("name", COSTLY)
def test_costly_headers(name: str) -> None:
    pieces = [(b"{", 1), *COSTLY[name], (b'"z":' + TENSOR + b"}}", 1)]
    length = 30 << 20 if name == "a wrong length" else sum(len(piece) * count for piece, count in pieces)
    check_cost([(struct.pack("<Q", length), 1), *pieces], "a.safetensors")
