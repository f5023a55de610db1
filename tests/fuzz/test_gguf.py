"""Fuzz target: headers of GGUF files."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcache.model import read_layout
from llmcache.model.gguf import HEADER_LIMIT
from llmcache.model.tensors import LayerMap, ModelLayout
from tests.conftest import examples
from tests.fuzz.mutations import Pieces, Repeated, mutated
from tests.fuzz.target import Target, bounded, is_printable, light, refusal
from tests.unit import gguf_bytes as gguf
from tests.unit.gguf_bytes import Gguf, Reads


def seeds() -> list[bytes]:
    """Return small files: with every kind of key in both byte orders, a shard, and a file without tensors."""
    files = []
    for order, version in (("<", 3), (">", 3), ("<", 2)):
        file = Gguf(order=order, version=version, data_bytes=1024)
        file.key("general.architecture", gguf.STRING, "llama").key("general.alignment", gguf.U32, 32)
        file.key("llama.block_count", gguf.U16, 2).key("llama.rope", gguf.F64, 1.5)
        words = [file.text(word) for word in ("a", "bc", "")]
        file.array("tokenizer.ggml.tokens", gguf.STRING, words).array("scores", gguf.F32, [bytes(4)] * 3)
        inner = file.number(gguf.U32, gguf.U8) + file.number(gguf.U64, 2) + b"ab"
        file.array("nested", gguf.ARRAY, [inner, inner])
        file.tensor("token_embd.weight", [32, 4], 8, 0).tensor("blk.0.attn_q.weight", [8, 8], 0, 160)
        files.append(file.tensor("blk.0.ffn_gate_exps.weight", [4, 4, 2], 1, 416).tensor("empty", [0], 0, 480).file())
    shard = Gguf(data_bytes=64).key("split.no", gguf.U16, 1).key("split.count", gguf.U16, 3)
    return [*files, shard.tensor("output.weight", [16], 0, 0).file(), Gguf().key("split.count", gguf.I32, 2).file()]


def check_layout(layout: ModelLayout, size: int) -> None:
    """Check that the header, tensors and regions lie in the file without overlaps and have printable names."""
    assert 0 < layout.header_bytes <= size
    assert layout.shard is None or 0 <= layout.shard[0] < layout.shard[1]
    end = layout.header_bytes
    for tensor in layout.tensors:
        assert tensor.size_bytes >= 0 and layout.header_bytes <= tensor.offset and tensor.end <= size
        assert tensor.offset >= end or not tensor.size_bytes
        assert is_printable(tensor.name) and is_printable(tensor.dtype) and is_printable(tensor.layer)
        end = max(end, tensor.end)
    names = sorted(tensor.name for tensor in layout.tensors)
    assert len(set(names)) == len(names)
    for tied in (None, True, False):
        regions = layout.regions(tied)
        assert sorted(region.name for region in regions[1:]) == names
        assert sum(region.size_bytes for region in regions) <= size


def check(data: bytes) -> None:
    reads = Reads(data)
    with bounded(), refusal():
        layout = read_layout(reads, len(data), "model.gguf")
        assert (layout is None) == (data[:4] != b"GGUF")
        if layout is not None:
            check_layout(layout, len(data))
            assert layout == read_layout(Reads(data), len(data), "model.gguf")
    assert reads.total_bytes <= 2 * len(data) + 64, "the header is read once"


def _random_headers() -> st.SearchStrategy[bytes]:
    """Generate well-formed headers whose tensors may be adjacent, overlap, or lie beyond the end."""
    sizes = st.sampled_from([0, 1, 1, 2, 8, 8, 31, 32, 64, 1 << 62, (1 << 64) - 1])
    names = st.sampled_from(["a", "b", "blk.0.attn_q.weight", "token_embd.weight", ""])
    offsets = st.sampled_from([0, 32, 64, 96, 128, 256, 33, (1 << 63) - 32, (1 << 64) - 32])
    tensors = st.lists(
        st.tuples(names, st.lists(sizes, max_size=2), st.sampled_from([0, 1, 8, 24, 24, 24, 99]), offsets), max_size=5
    )
    alignments = st.sampled_from([32, 32, 32, 1, 64, 0, 3, 1 << 31])
    return st.builds(_file, tensors, st.sampled_from([0, 32, 64, 128, 300, 1024]), alignments)


def _file(tensors: list[tuple[str, list[int], int, int]], data_bytes: int, alignment: int) -> bytes:
    file = Gguf(data_bytes=data_bytes).key("general.alignment", gguf.U32, alignment)
    for tensor in tensors:
        file.tensor(*tensor)
    return file.file()


TARGET = Target("gguf", mutated(seeds()) | _random_headers(), check)


def test_the_seeds_are_read() -> None:
    for seed in seeds():
        layout = read_layout(Reads(seed), len(seed), "model.gguf")
        assert layout is not None
        check_layout(layout, len(seed))


@given(TARGET.inputs)
@settings(max_examples=examples(250))
@example(b"GGUF")
@example(_file([("a", [8], 24, 0), ("a", [8], 24, 32)], 128, 32))
@example(_file([("a", [33], 24, 0), ("b", [8], 24, 32)], 128, 32))
@example(_file([("a", [64], 24, 96)], 128, 32))
@example(Gguf(counts=(1 << 17, 1 << 20)).file() + bytes(4096))
@example(Gguf().array("a", gguf.ARRAY, [], count=1 << 60).file() + bytes(4096))
@example(Gguf().array("a", gguf.STRING, [], count=1 << 60).file() + bytes(4096))
def test_any_bytes(data: bytes) -> None:
    check(data)


PEAK_BYTES = 32 << 20
"""Memory that parsing a header may use in a mount, which promises at most 64 MiB beyond its cache."""


def check_cost(pieces: Pieces, name: str) -> None:
    """Check that a header costs little memory and is read once, whatever counts it declares."""
    read = Repeated([*pieces, (bytes(4096), 1 << 20)])
    with light(PEAK_BYTES), refusal():
        layout = read_layout(read, read.size, name)
        assert layout is not None
        LayerMap(layout)
        layout.regions()
    assert read.total_bytes <= min(2 * read.size, 2 * HEADER_LIMIT)


def _key(length: int, kind: int, value: bytes) -> bytes:
    return Gguf().raw_key("k" * length, kind, value).keys[0]


def _array(kind: int, announced: int) -> bytes:
    return Gguf().array("a", kind, [], count=announced).keys[0]


def _tensors(length: int, dimensions: int, count: int) -> Pieces:
    one = Gguf().tensor("t" * length, [1] * dimensions, 24, 0)
    return [(one.header()[24:], count)]


def _header(tensors: int, keys: int) -> tuple[bytes, int]:
    return Gguf(counts=(tensors, keys)).header(), 1


COSTLY: dict[str, Pieces] = {
    "long names of tensors": [_header(2000, 0), *_tensors(65_536, 1, 2000)],
    "many tensors": [_header(65_537, 0), *_tensors(1, 1, 65_537)],
    "many dimensions": [_header(3000, 0), *_tensors(1, 1000, 3000)],
    "long names of keys": [_header(0, 3000), (_key(65_536, gguf.U8, b"1"), 3000)],
    "many keys": [_header(0, 65_537), (_key(1, gguf.U8, b"1"), 65_537)],
    "a long text": [_header(0, 1), (_key(1, gguf.STRING, Gguf().text("x" * 1_000_000)), 1)],
    "many texts": [_header(0, 1), (_array(gguf.STRING, 200_000), 1), (Gguf().text("x" * 60), 200_000)],
    "many arrays": [_header(0, 1), (_array(gguf.ARRAY, 700_000), 1), (_array(gguf.U8, 0)[13:], 700_000)],
    "arrays in arrays": [_header(0, 1), (_array(gguf.ARRAY, 1), 1), (_array(gguf.ARRAY, 1)[13:], 700_000)],
    "endless empty arrays": [_header(0, 1), (_array(gguf.ARRAY, 1 << 60), 1)],
    "endless empty texts": [_header(0, 1), (_array(gguf.STRING, 1 << 60), 1)],
    "counts beyond the end": [_header(1 << 60, 1 << 60), *_tensors(1, 1, 100)],
}


@pytest.mark.parametrize("name", COSTLY)
def test_costly_headers(name: str) -> None:
    check_cost(COSTLY[name], "a.gguf")
