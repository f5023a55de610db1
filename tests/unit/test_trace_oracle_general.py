"""libCacheSim's format: conversion of objects to runs of blocks and back, with the next access of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmcache.errors import DataError
from llmcache.papers.traces import SHAPES
from llmcache.trace.formats import convert, open_trace
from llmcache.trace.formats.oracle_general import RECORD
from llmcache.trace.record import GAP, Trace, TraceFile
from tests.unit.simulation_parts import plain_belady
from tests.unit.trace_parts import trace


def write(path: Path, *records: tuple[int, int, int, int]) -> Path:
    np.array(list(records), RECORD).tofile(path)
    return path


def read(path: Path) -> Trace:
    with open_trace(path) as reader:
        return reader.read()


def test_sizes_are_rounded_up_and_objects_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "t.oracleGeneral"
    loaded = read(write(path, (5, 7, 4097, 4), (5, 3, 0, -1), (6, 8, 4096, -1), (9, 7, 1, -1), (9, 99, 8192, -1)))
    # In the order of ids: 3 (1 block), a gap of 3 (ids 4 to 6), 7 (2 blocks), 8 (1), the largest possible gap, 99 (2).
    assert loaded.first.tolist() == [4, 0, 6, 4, 7 + GAP]
    assert loaded.count.tolist() == [2, 1, 1, 1, 2]
    assert loaded.t_ns.tolist() == [5 * 10**9, 5 * 10**9, 6 * 10**9, 9 * 10**9, 9 * 10**9]
    assert [file.size_bytes for file in loaded.files] == [(9 + GAP) * 4096]
    assert loaded.provenance.tier == "oracleGeneral"
    loaded = read(write(path, (0, 2**64 - 1, 1, -1), (0, 0, 2**32 - 1, -1), (0, 2**63, 1, -1)))
    assert loaded.first.tolist() == [2**20 + 2 * GAP + 1, 0, 2**20 + GAP], "64-bit ids are mapped"
    assert loaded.count.tolist() == [1, 2**20, 1]


def test_errors_name_the_field(tmp_path: Path) -> None:
    path, good = tmp_path / "t.oracleGeneral", (5, 1, 1, -1)
    for records, message in (
        ([good, (4, 2, 1, -1)], "time: record 1 has 4"),
        ([(5, 1, 1, -3)], "next: record 0 has -3"),
        ([], "rows: .* has no accesses"),
    ):
        with pytest.raises(DataError, match=message):
            read(write(path, *records))
    path.write_bytes(write(path, good, good).read_bytes()[:-1])
    with pytest.raises(DataError, match=r"size: .* has 47 bytes, not a multiple of 24"):
        read(path)


def test_each_block_becomes_a_record_with_its_second(tmp_path: Path) -> None:
    trace(t_ns=(0, 10**9, 2 * 10**9 - 1, 7 * 10**9)).save(tmp_path / "t.parquet")
    convert(tmp_path / "t.parquet", tmp_path / "t.oracleGeneral")
    records = np.fromfile(tmp_path / "t.oracleGeneral", RECORD)
    assert records["time"].tolist() == [0, 0, 0, 1, 1, 1, 7, 7, 7]
    assert set(records["size"].tolist()) == {4096}
    trace(t_ns=(0, 0, 0, 2**32 * 10**9)).save(tmp_path / "late.parquet")
    with pytest.raises(DataError, match="t_ns: 4294967296000000000 ns is beyond 32 bits of seconds"):
        convert(tmp_path / "late.parquet", tmp_path / "late.oracleGeneral")
    assert not (tmp_path / "late.oracleGeneral").exists()


def test_the_next_access_is_found_across_chunks(tmp_path: Path) -> None:
    """Two passes over 400,000 blocks: every block is accessed again, more than one chunk later."""
    rows, size = 20, 20_000
    first = np.tile(np.arange(rows) * size, 2)
    made = trace(np.arange(2 * rows), 0, first, size, files=[TraceFile(0, "/x", 0, 0, 0, 0)])
    made.save(tmp_path / "t.parquet")
    convert(tmp_path / "t.parquet", tmp_path / "t.oracleGeneral")
    following = np.fromfile(tmp_path / "t.oracleGeneral", RECORD)["next"]
    half = rows * size
    assert np.array_equal(following[:half], np.arange(half) + half + 1) and (following[half:] == -1).all()


def test_libcachesim_reads_the_written_file(tmp_path: Path) -> None:
    """Its misses with Belady's rule depend on every next access, and match those counted here."""
    libcachesim = pytest.importorskip("libcachesim")
    SHAPES["ai_translate"]().save(tmp_path / "t.parquet")
    convert(tmp_path / "t.parquet", tmp_path / "t.oracleGeneral")
    reader = libcachesim.TraceReader(str(tmp_path / "t.oracleGeneral"), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    capacity = 300
    ratio = libcachesim.Belady(cache_size=capacity * 4096).process_trace(reader)[0]
    ids = np.fromfile(tmp_path / "t.oracleGeneral", RECORD)["object"].tolist()
    assert round(ratio * len(ids)) == len(ids) - plain_belady(ids, capacity)
