"""Fuzz target: spill files and their page tables: open, restore, read, and continue writing."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcache.errors import DataError
from llmcache.kv.spill import KvShape, SpillFile, SpillReader
from llmcache.kv.spill.layout import EXTENTS_AT, Commit, pack
from llmcache.kv.tiers.table import SCHEMA, Tables, snapshot_of
from tests.conftest import examples
from tests.fuzz.mutations import documents, mutated, written
from tests.fuzz.target import Target, bounded, refusal, scratch
from tests.unit.kv_parts import append, ids, restored

SHAPE = KvShape("tiny", layers=1, kv_heads=1, head_dim=2, page_tokens=2)


def spill_bytes(shape: KvShape = SHAPE, closed: bool = True) -> bytes:
    """Return a file of two sequences, one of them truncated and continued; `closed`, or as after a kill."""
    with scratch() as directory:
        path = Path(directory) / "a.kv"
        file = SpillFile.create(path, shape, extent_pages=1, direct=False)
        append(file, 0, ids(0, 7))
        file.flush()
        file.truncate(0, 1)
        append(file, 0, ids(2, 3))
        append(file, 1, ids(50, 2))
        if closed:
            file.close()
        data = path.read_bytes()
        file.close()
        return data


def header_of(identity: bytes, version: int = 1) -> bytes:
    """Return a header block with a valid checksum for any identity."""
    crc = zlib.crc32(identity, zlib.crc32(struct.pack("<II", version, len(identity))))
    return (struct.pack("<8sIII", b"LLMCKV\r\n", version, len(identity), crc) + identity).ljust(4096, b"\0")[:4096]


def repaired(data: bytes) -> bytes:
    """Return `data` with valid checksums in the header and in all records."""
    out = bytearray(data)
    if len(out) >= 4096:
        version, length = struct.unpack_from("<II", out, 8)
        out[:4096] = header_of(bytes(out[20 : 20 + min(length, 4000)]), version)
    for at in range(4096, len(out) - 63, 64):
        if bytes(out[at : at + 4]) in (b"PAGE", b"EXTN", b"DONE"):
            out[at + 60 : at + 64] = struct.pack("<I", zlib.crc32(out[at : at + 60]))
    return bytes(out)


def check(data: bytes) -> None:
    """Check for any bytes: read, restore, and open for writing."""
    with scratch() as directory:
        path = Path(directory) / "a.kv"
        path.write_bytes(data)
        with bounded(), refusal():
            with SpillReader.open(path, direct=False) as file:
                read_all(file, len(data))
            snapshot_of(path, file.shape)
        assert path.read_bytes() == data, "reading changes nothing"
        _write_on(path, data)


def read_all(file: SpillReader, size: int) -> None:
    """Check that all declared pages are readable or reported damaged, and that none overlap or lie beyond the end."""
    shape = file.shape
    taken: set[int] = set()
    for sequence in file.sequences:
        pages, tokens = file.pages(sequence), file.length(sequence)
        assert 0 <= tokens <= pages * shape.page_tokens
        with refusal():
            found, positions = file.tokens(sequence)
            assert len(found) == len(positions) == tokens
        for layer in range(min(shape.layers, 4)):
            assert file.pages(sequence, layer) == pages
            for kind in (0, 1):
                with refusal():
                    assert len(file.read_slots(sequence, layer, list(range(pages)), kind)) == pages
            for pages_there, offset in file.key_ranges(sequence, layer):
                assert offset >= EXTENTS_AT and offset + len(pages_there) * shape.key_slot_bytes <= size
                slots = {offset + number * shape.key_slot_bytes for number in range(len(pages_there))}
                assert not slots & taken
                taken |= slots


def _write_on(path: Path, data: bytes) -> None:
    """Check that a file opened for writing accepts pages and has them, and all others, after reopening."""
    with bounded(), refusal():
        try:
            file = SpillFile.open(path, SHAPE, direct=False)
        except DataError:
            assert path.read_bytes() == data, "a refused file is not changed"
            raise
        with file:
            expected = {sequence: file.pages(sequence) for sequence in file.sequences}
            for sequence in (0, 5):
                file.truncate(sequence, whole_pages := file.length(sequence) // SHAPE.page_tokens)
                append(file, sequence, ids(0, 5))
                expected[sequence] = whole_pages + 3
        with SpillReader.open(path, SHAPE, direct=False) as again:
            assert {sequence: again.pages(sequence) for sequence in again.sequences} == expected


def check_tables(text: bytes) -> None:
    """Check that any bytes as page tables give existing pages or a refusal."""
    with scratch() as directory:
        path = Path(directory) / "a.kv"
        path.write_bytes(SEEDS[0])
        Tables.path(path).write_bytes(text)
        with bounded(), refusal():
            found = snapshot_of(path, SHAPE)
            assert found.ids.shape == found.positions.shape and len(found.ids) == len(found.sequences) > 0
            for runs in found.sequences:
                assert sum(pages for _, pages in runs) == SHAPE.pages_of(found.ids.shape[1])
                assert all(0 < pages <= found.streams[stream] for stream, pages in runs)
        assert path.read_bytes() == SEEDS[0] and Tables.path(path).read_bytes() == text


SEEDS = [spill_bytes(), spill_bytes(closed=False)]
IDENTITY = {**SHAPE.to_json(), "extent_pages": 1}
TABLES = [
    {"schema": SCHEMA, "saved": True, "sequences": [[[0, 3]], [[0, 1], [1, 1]]]},
    {"schema": SCHEMA, "saved": False, "sequences": [[[0, -1]], [[0, 1], [1, -1]]]},
]
HEADERS = st.builds(
    lambda identity, seed: header_of(written(identity)) + seed[4096:], documents([IDENTITY]), st.sampled_from(SEEDS)
)
TARGET = Target("spill", mutated(SEEDS, repaired) | HEADERS, check)
PAGE_TABLES = Target(
    "spill-tables", documents(TABLES).map(written) | mutated([written(one) for one in TABLES]), check_tables
)


def with_records(*records: tuple[int, bytes]) -> bytes:
    data = bytearray(SEEDS[0])
    for at, record in records:
        data[at : at + 64] = record
    return bytes(data)


def huge(**changes: Any) -> bytes:
    """Return a file whose header has other numbers."""
    return header_of(written(IDENTITY | changes)) + SEEDS[0][4096:]


def test_the_seeds_are_read() -> None:
    for seed in SEEDS:
        assert repaired(seed) == seed
        check(seed)
    for document in TABLES:
        check_tables(written(document))


@given(TARGET.inputs)
@settings(max_examples=examples(150))
@example(header_of(b"[" * 4000) + SEEDS[0][4096:])
@example(huge(layers=(1 << 24) - 1))
@example(huge(page_tokens=(1 << 24) - 1, kv_heads=(1 << 24) - 1, head_dim=(1 << 24) - 1))
@example(huge(extent_pages=1 << 20))
@example(huge(extent_pages=1.5))
@example(huge(model=["tiny"]))
@example(with_records((4096, pack(Commit((1 << 32) - 1, 0))), (6144, pack(Commit((1 << 32) - 1, 0)))))
@example(with_records((4096, pack(Commit(5, 0))), (6144, pack(Commit(4, 0)))))
@example(with_records((4096, pack(Commit(1 << 31, 1 << 60))), (6144, bytes(64))))
def test_any_bytes(data: bytes) -> None:
    check(data)


def test_an_extent_after_a_gap_in_its_chain_is_free(tmp_path: Path) -> None:
    """Regression: an extent after a lost one was taken for the first of its chain.

    A crash lost the record of a chain's first extent but not the next two. They were used as the first, and data written
    to them was lost on reopening.
    """
    path = tmp_path / "a.kv"
    file = SpillFile.create(path, SHAPE, extent_pages=1, direct=False)
    append(file, 0, ids(0, 6))
    image = bytearray(path.read_bytes())
    file.close()
    image[EXTENTS_AT : EXTENTS_AT + 64] = bytes(64)
    path.write_bytes(image)
    with SpillFile.open(path, SHAPE, direct=False) as file:
        assert file.sequences == []
        append(file, 0, ids(50, 6))
    with SpillReader.open(path, SHAPE, direct=False) as again:
        assert restored(again, 0) == list(range(50, 56))


@given(PAGE_TABLES.inputs)
@settings(max_examples=examples(150))
@example(b"[" * 100_000)
@example(written({"schema": SCHEMA, "saved": True, "sequences": [[[0, 1 << 62]]]}))
@example(written({"schema": SCHEMA, "saved": True, "sequences": [[[0, 1]] * 1000] * 2}))
def test_any_page_tables(text: bytes) -> None:
    check_tables(text)
