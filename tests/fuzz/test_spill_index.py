"""Fuzz target: the trees of keys that are saved next to a spill file."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcache.kv.index.dci import DciIndex, DciSettings, load_indexes, save_indexes
from llmcache.kv.index.dci.file import fault_of
from llmcache.kv.index.dci.tree import Tree
from tests.conftest import examples
from tests.fuzz.mutations import NUMBERS, Headed, documents, mutated, written
from tests.fuzz.target import Target, bounded, refusal, scratch

DIM, TOKENS = 6, 40
IDENTITY = {"model": "tiny", "layers": 1}
FILES = Headed(b"LLMDCI\r\n", 64)


@functools.cache
def seed() -> bytes:
    """Return a file with two trees, one of them empty. Created on first use, because compilation may take a minute."""
    index = DciIndex(DIM, DciSettings(promotion=0.4, first_promotion=0.3, page_slots=4, seed=3))
    index.insert(np.random.default_rng(0).standard_normal((TOKENS, DIM), np.float32), np.arange(TOKENS))
    with scratch() as directory:
        path = Path(directory) / "dci-a.kv"
        save_indexes(path, {(0, 0, 0): index, (0, 0, 1): DciIndex(DIM, index.settings)}, IDENTITY)
        return path.read_bytes()


def patched(name: str, which: int, position: int, value: int) -> bytes:
    """Return the file with one number of an array of a tree replaced, and valid checksums."""
    header, rest = FILES.parts(seed())
    arrays = bytearray(rest)
    entry = header["indexes"][which]["arrays"][name]
    dtype, size = np.dtype(entry[0]), int(np.prod(entry[1]))
    if size:
        at = entry[2] + position % size * dtype.itemsize
        arrays[at : at + dtype.itemsize] = (value % (1 << 8 * dtype.itemsize)).to_bytes(dtype.itemsize, "little")
        entry[3] = zlib.crc32(arrays[entry[2] : entry[2] + size * dtype.itemsize])
    return FILES.file(written(header), bytes(arrays))


def check(data: bytes) -> None:
    """Check that any bytes give valid trees or a refusal."""
    with scratch() as directory:
        path = Path(directory) / "dci-a.kv"
        path.write_bytes(data)
        with bounded(), refusal():
            for index in load_indexes(path, IDENTITY).values():
                assert fault_of(index.tree) is None
                assert 0 <= len(index) <= TOKENS
        assert path.read_bytes() == data


PATCHES = st.builds(patched, st.sampled_from(Tree._fields), st.integers(0, 1), st.integers(0, 4000), NUMBERS | st.just(-1))


def _headers() -> st.SearchStrategy[bytes]:
    header, arrays = FILES.parts(seed())
    return documents([header]).map(lambda other: FILES.file(written(other), arrays))


TARGET = Target("spill-index", st.deferred(lambda: mutated([seed()])) | st.deferred(_headers) | PATCHES, check)


def test_the_seed_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(seed())
    assert [len(index) for index in load_indexes(tmp_path / "a", IDENTITY).values()] == [TOKENS, 0]
    header, arrays = FILES.parts(seed())
    assert FILES.file(written(header), arrays)[:20] == seed()[:20]


@given(TARGET.inputs)
@settings(max_examples=examples(150))
@example(FILES.file(b"[" * 100_000, b""))
@example(FILES.file(b"[]", b""))
@example(FILES.file(written({"identity": IDENTITY, "indexes": [], "bytes": 1 << 62}), b""))
def test_any_bytes(data: bytes) -> None:
    check(data)
