"""safetensors headers: layouts of valid files and errors for invalid ones."""

import json
import struct

import pytest

from llmcache.errors import DataError
from llmcache.model import read_layout
from llmcache.model.safetensors import index_shards
from llmcache.model.tensors import ModelLayout
from tests.unit.gguf_bytes import reading

GOOD = {
    "__metadata__": {"format": "pt"},
    "model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    "lm_head.weight": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [16, 32]},
}


def encoded(header: object, data_bytes: int = 32) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def layout_of(content: bytes, name: str = "model.safetensors") -> ModelLayout:
    layout = read_layout(*reading(content), name)
    assert layout is not None
    return layout


def changed(**entry: object) -> dict[str, object]:
    return {**GOOD, "t": {"dtype": "F32", "shape": [1], "data_offsets": [32, 36], **entry}}


def test_tensors_are_located() -> None:
    layout = layout_of(encoded(GOOD))
    assert layout.kind == "safetensors" and layout.shard is None and layout.has_output
    assert layout.header_bytes == len(encoded(GOOD)) - 32
    assert [(t.name, t.offset - layout.header_bytes, t.size_bytes, t.dtype) for t in layout.tensors] == [
        ("model.norm.weight", 0, 16, "F32"),
        ("lm_head.weight", 16, 16, "BF16"),
    ]
    assert layout_of(encoded(GOOD), "x/model-00002-of-00003.safetensors").shard == (1, 3)
    assert layout_of(encoded(GOOD), "x/model-00001-of-00001.safetensors").shard is None
    assert layout_of(encoded(changed(dtype="F3"), 40)).tensors[-1].size_bytes == 4, "unknown type: the size of its range"


def test_a_file_is_recognized_by_its_content() -> None:
    """Without the extension, a file with an invalid header is not a model, instead of a damaged one."""
    assert len(layout_of(encoded(GOOD), "0123456789abcdef").tensors) == 2
    for content in (
        encoded(GOOD)[:50],
        encoded(GOOD, 31),
        encoded(b"{}"),
        encoded(b'{"a": 1}'),
        bytes(100),
        b"",
        b"\x02" + bytes(9),
    ):
        assert read_layout(*reading(content), "0123456789abcdef") is None


@pytest.mark.parametrize(("dtype", "size_bytes"), [("F4", 2), ("F6_E2M3", 3), ("F8_E4M3", 4), ("C64", 32), ("I64", 32)])
def test_small_and_large_types_have_their_sizes(dtype: str, size_bytes: int) -> None:
    header = {"t": {"dtype": dtype, "shape": [2, 2], "data_offsets": [0, size_bytes]}}
    assert layout_of(encoded(header)).tensors[0].size_bytes == size_bytes


def test_metadata_of_any_length_is_skipped() -> None:
    metadata = {"a": '\\"}{' * 40_000, "é\ud83d": "\0" * 70_000, "": ""}
    layout = layout_of(encoded(json.dumps(GOOD | {"__metadata__": metadata}).encode() + b" " * 70_000))
    assert [tensor.name for tensor in layout.tensors] == ["model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends inside its header"),
        (encoded(GOOD)[:50], "ends inside its header"),
        (struct.pack("<Q", 2**62) + bytes(100), "declares a header"),
        (encoded(b"{"), "not valid JSON"),
        (encoded(b"\xff\xfe{}"), "not a JSON object"),
        (encoded(b'{"\xff": {}}'), "not valid JSON"),
        (encoded(b'{"a": {"b": ' + b"[" * 9_000), "not valid JSON"),
        (encoded(b'{"a": {"b": ' + b"[" * 9_000 + b"}}"), "not valid JSON"),
        (encoded(b"[" * 100_000), "not a JSON object"),
        (encoded(b"{} {}"), "after the end"),
        (encoded(b'{"__metadata__": {"a": "b",}}'), "comma"),
        (encoded(b'{"__metadata__": {"a": 1}}'), "not valid JSON"),
        (encoded(b'{"__metadata__": {"a": "b"} "t": {}}'), "after a value"),
        (encoded(b'{"a": {"dtype": "U8", "dtype": "U8"}}'), "the same name twice"),
        (encoded(b'{"a": %b, "a": %b}' % ((json.dumps(changed()["t"]).encode(),) * 2), 40), "two tensors are called"),
        (encoded({"t": 5}), "not described"),
        (encoded(changed(shape=[-1]), 40), "needs a dtype"),
        (encoded(changed(shape=[True]), 40), "needs a dtype"),
        (encoded(changed(data_offsets=[32]), 40), "needs a dtype"),
        (encoded(changed(data_offsets=[36, 32]), 40), "does not fill"),
        (encoded(changed(shape=[3]), 40), "does not fill"),
        (encoded(changed(data_offsets=[30, 34]), 40), "overlaps"),
        (encoded(changed(data_offsets=[2**50, 2**50 + 4]), 40), "beyond the end"),
        (encoded(GOOD, 31), "beyond the end"),
    ],
)
def test_invalid_headers_are_refused_with_a_reason(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_layout(*reading(content), "model.safetensors")


def test_the_index_names_the_shards() -> None:
    index = {"metadata": {}, "weight_map": {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}}
    assert index_shards(json.dumps(index).encode()) == ("m-1.safetensors", "m-2.safetensors")


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"weight_map": 3}', b"\xff", b'{"weight_map": [1]}', b"[" * 99])
def test_invalid_indexes_are_refused(text: bytes) -> None:
    with pytest.raises(DataError, match="not a safetensors index"):
        index_shards(text)
