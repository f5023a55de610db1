"""Fuzz target: the trees of keys that are saved beside a spill file."""

from __future__ import annotations

import functools
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcache.kv.index.dci import DciIndex, DciSettings, load_indexes, save_indexes
from llmcache.kv.index.dci.file import fault_of
from llmcache.kv.index.dci.tree import Tree
from tests.conftest import examples
from tests.fuzz.mutations import NUMBERS, documents, mutated, nested, written
from tests.fuzz.target import Target, bounded, refusal, scratch

DIM, TOKENS = 6, 40
IDENTITY = {"model": "tiny", "layers": 1}
_START = struct.Struct("<8sIII")


@functools.cache
def seed() -> bytes:
    """Two trees, one of which is empty. Made when it is asked for: what makes it may have to be compiled, for a minute."""
    index = DciIndex(DIM, DciSettings(promotion=0.4, first_promotion=0.3, page_slots=4, seed=3))
    index.insert(np.random.default_rng(0).standard_normal((TOKENS, DIM), np.float32), np.arange(TOKENS))
    with scratch() as directory:
        path = Path(directory) / "dci-a.kv"
        save_indexes(path, {(0, 0, 0): index, (0, 0, 1): DciIndex(DIM, index.settings)}, IDENTITY)
        return path.read_bytes()


def header_in(data: bytes) -> Any:
    """What the header tells."""
    return json.loads(data[_START.size : _START.size + _START.unpack_from(data)[2]])


def with_header(text: bytes, arrays: bytes) -> bytes:
    """A file with this header, its checksum right, and these arrays."""
    start = _START.pack(b"LLMDCI\r\n", 1, len(text), zlib.crc32(text)) + text
    return start + bytes(-len(start) % 64) + arrays


def arrays_in(data: bytes) -> bytes:
    """The arrays as they lie."""
    end = _START.size + _START.unpack_from(data)[2]
    return data[end + -end % 64 :]


def patched(name: str, which: int, place: int, value: int) -> bytes:
    """One number of an array of the first tree replaced, all checksums right."""
    told, arrays = header_in(seed()), bytearray(arrays_in(seed()))
    entry = told["indexes"][which]["arrays"][name]
    dtype, size = np.dtype(entry[0]), int(np.prod(entry[1]))
    if size:
        at = entry[2] + place % size * dtype.itemsize
        arrays[at : at + dtype.itemsize] = (value % (1 << 8 * dtype.itemsize)).to_bytes(dtype.itemsize, "little")
        entry[3] = zlib.crc32(arrays[entry[2] : entry[2] + size * dtype.itemsize])
    return with_header(written(told), bytes(arrays))


def check(data: bytes) -> None:
    """Whole trees that can be asked and that grow, or a refusal."""
    with scratch() as directory:
        path = Path(directory) / "dci-a.kv"
        path.write_bytes(data)
        with bounded(), refusal():
            for index in load_indexes(path, IDENTITY).values():
                assert fault_of(index.tree) is None
                assert 0 <= len(index) <= TOKENS
        assert path.read_bytes() == data


PATCHES = st.builds(patched, st.sampled_from(Tree._fields), st.integers(0, 1), st.integers(0, 4000), NUMBERS | st.just(-1))
HEADERS = st.deferred(lambda: documents([header_in(seed())]).map(lambda told: with_header(written(told), arrays_in(seed()))))
TARGET = Target("spill-index", st.deferred(lambda: mutated([seed()])) | HEADERS | PATCHES, check)


def test_the_seed_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(seed())
    assert [len(index) for index in load_indexes(tmp_path / "a", IDENTITY).values()] == [TOKENS, 0]
    assert with_header(written(header_in(seed())), arrays_in(seed()))[:20] == seed()[:20]


@given(TARGET.inputs)
@settings(max_examples=examples(150))
@example(with_header(nested(100_000), b""))
@example(with_header(b"[]", b""))
@example(with_header(written({"identity": IDENTITY, "indexes": [], "bytes": 1 << 62}), b""))
def test_any_bytes(data: bytes) -> None:
    check(data)
