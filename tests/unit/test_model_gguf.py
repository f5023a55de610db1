"""GGUF headers: layouts of valid files and errors for invalid ones."""

import tracemalloc
from unittest.mock import Mock

import pytest

from llmcache.errors import DataError
from llmcache.model import read_layout
from llmcache.model.gguf import GGML_TYPES
from llmcache.model.tensors import ModelLayout
from tests.unit.gguf_bytes import ARRAY, BOOL, F64, I32, STRING, U8, U16, U32, U64, Gguf, Reads, reading

F32_TYPE, Q8_0_TYPE = 0, 8


def small(**changes: object) -> Gguf:
    """Return a model of two tensors, 256 values of F32 and 64 of Q8_0."""
    gguf = Gguf(data_bytes=1024 + 68, **changes)  # type: ignore[arg-type]
    gguf.key("general.architecture", STRING, "llama").key("llama.block_count", U32, 1)
    gguf.array("tokenizer.ggml.tokens", STRING, [gguf.text(f"word {i}") for i in range(5)])
    gguf.tensor("output_norm.weight", [256], F32_TYPE, 0)
    return gguf.tensor("blk.0.attn_q.weight", [32, 2], Q8_0_TYPE, 1024)


def layout_of(content: bytes, name: str = "model.gguf") -> ModelLayout:
    layout = read_layout(*reading(content), name)
    assert layout is not None
    return layout


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("order", ["<", ">"])
def test_tensors_are_found_in_both_versions_and_byte_orders(version: int, order: str) -> None:
    gguf = small(version=version, order=order)
    layout = layout_of(gguf.file())
    assert layout.kind == "gguf" and layout.shard is None
    assert layout.header_bytes == len(gguf.file()) - gguf.data_bytes
    assert [(t.name, t.offset - layout.header_bytes, t.size_bytes, t.dtype) for t in layout.tensors] == [
        ("output_norm.weight", 0, 1024, "F32"),
        ("blk.0.attn_q.weight", 1024, 68, "Q8_0"),
    ]


def test_every_value_type_is_skipped() -> None:
    gguf = Gguf()
    for kind in (U8, U16, U32, I32, U64, F64, BOOL):
        gguf.key(f"a.{kind}", kind, 1)
        gguf.array(f"b.{kind}", kind, [gguf.number(kind, 1)] * 3)
    inner = gguf.number(U32, U16) + gguf.number(U64, 2) + gguf.number(U16, 7) * 2
    gguf.array("nested", ARRAY, [inner, inner]).array("empty", STRING, [])
    gguf.key("long", STRING, "x" * 300_000).array("texts", STRING, [gguf.text("y" * 100_000)] * 3)
    gguf.tensor("t", [4], F32_TYPE, 0).data_bytes = 16
    assert [tensor.name for tensor in layout_of(gguf.file()).tensors] == ["t"]


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_the_alignment_of_the_file_is_used(alignment: int) -> None:
    gguf = Gguf(alignment=alignment, data_bytes=alignment * 16 + 4).key("general.alignment", U32, alignment)
    gguf.tensor("a", [1], F32_TYPE, 0).tensor("b", [1], F32_TYPE, alignment * 16)
    layout = layout_of(gguf.file())
    assert layout.header_bytes % alignment == 0
    assert layout.tensors[1].offset == layout.header_bytes + alignment * 16


def test_shards_are_identified_by_their_headers() -> None:
    gguf = small().key("split.no", U16, 1).key("split.count", U16, 3)
    assert layout_of(gguf.file(), "blob-123").shard == (1, 3), "whatever the name of the file"
    assert layout_of(small().key("split.no", U16, 0).key("split.count", U16, 1).file()).shard is None
    empty = Gguf().key("split.no", U16, 0).key("split.count", U16, 2).header()
    layout = layout_of(empty)
    assert layout.tensors == () and layout.header_bytes == len(empty)


def test_only_the_header_is_read_in_few_calls() -> None:
    gguf = small()
    read = Reads(gguf.file() + bytes(10_000_000))
    assert read_layout(read, len(read.content), "model.gguf") is not None and read.total_bytes < 70_000
    words = [gguf.text(f"token number {i} " + "x" * 60) for i in range(60_000)]
    gguf.array("tokenizer.ggml.merges", STRING, words).array("scores", U32, [bytes(4 * 60_000)], count=60_000)
    read = Reads(gguf.file() + bytes(10_000_000))
    tracemalloc.start()
    layout = read_layout(read, len(read.content), "model.gguf")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert layout is not None and len(layout.tensors) == 2
    assert most_bytes < 4 * 2**20  # the words would be 8 MB
    assert read.calls < 20
    assert read.furthest <= layout.header_bytes + 2**20
    content = small().file()
    layout = read_layout(lambda offset, size: content[offset : offset + min(size, 7)], len(content), "m.gguf")
    assert layout is not None and len(layout.tensors) == 2, "short reads are continued"


SAME_NAME = Gguf(data_bytes=64).tensor("t", [4], F32_TYPE, 0).tensor("t", [4], F32_TYPE, 32)
BAD_HEADERS: dict[str, tuple[bytes, str]] = {
    "version 1": (small(version=1).file(), "version 1 is not supported"),
    "only the magic": (b"GGUF", "ends inside its header"),
    "cut": (small().header()[:-5], "ends inside its header"),
    "tensor count": (small(counts=(2**60, 3)).file(), "declares"),
    "key count": (small(counts=(2, 2**40)).file(), "declares"),
    "key length": (Gguf(counts=(0, 1)).header() + b"\xff" * 8 + bytes(100), "a name of"),
    "value length": (small().raw_key("k", STRING, b"\xff" * 7 + b"\x7f").file(), "ends inside its header"),
    "array count": (small().array("k", U64, [], count=2**61).file(), "ends inside its header"),
    "text array count": (small().array("k", STRING, [], count=2**61).file(), "ends inside|names|header"),
    "value type": (small().raw_key("k", 99, b"").file(), "unknown value type 99"),
    "array type": (small().array("k", 99, [bytes(8)]).file(), "unknown value type 99"),
    "alignment": (small().key("general.alignment", U32, 33).file(), "not a power of two"),
    "alignment 0": (small().key("general.alignment", U32, 0).file(), "not a power of two"),
    "alignment type": (small().key("general.alignment", STRING, "32").file(), "not an integer"),
    "dimensions": (small().tensor("t", [1] * 9, F32_TYPE, 2048).file(), "9 dimensions"),
    "type": (small().tensor("t", [1], 77, 2048).file(), "unknown type 77"),
    "rows": (small().tensor("t", [33], Q8_0_TYPE, 2048).file(), "not whole blocks"),
    "offset": (small().tensor("t", [1], F32_TYPE, 1100).file(), "not a multiple"),
    "beyond the end": (small().tensor("t", [1], F32_TYPE, 2**40).file(), "beyond the end"),
    "too large": (small().tensor("t", [2**62, 2**62], F32_TYPE, 2048).file(), "beyond the end"),
    "overlap": (small().tensor("t", [8], F32_TYPE, 32).file(), "overlaps"),
    "same name": (SAME_NAME.file(), "two tensors"),
    "split": (small().key("split.no", U16, 3).key("split.count", U16, 3).file(), "split.no is 3, but split.count is 3"),
    "truncated data": (small().file()[:-1], "beyond the end"),
}


@pytest.mark.parametrize(("content", "message"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_invalid_headers_are_refused_with_a_reason(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_layout(*reading(content), "model.gguf")


def test_disk_errors_pass_through_and_other_files_are_not_models() -> None:
    with pytest.raises(OSError, match="Input/output"):
        read_layout(Mock(side_effect=OSError(5, "Input/output error")), 100, "model.gguf")
    for content in (b"", b"GG", b"ELF and more", b"{}"):
        assert read_layout(*reading(content), "notes.txt") is None


@pytest.mark.llama
def test_the_type_table_agrees_with_the_gguf_package() -> None:
    from gguf import GGML_QUANT_SIZES

    for kind, (values, size_bytes) in GGML_QUANT_SIZES.items():
        ours = GGML_TYPES[int(kind)]
        assert ours[0] == kind.name
        # The package counts float32 scales in Q8_1; ggml has stored float16 since 2023. No file contains this type.
        if kind.name != "Q8_1":
            assert ours[1:] == (values, size_bytes), kind.name
