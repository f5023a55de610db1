"""The detector on arbitrary input: bounded memory, each access counted once, and classes that do not depend on row cuts."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.cache.classify import Classification, classify, runs
from llmcache.cache.detector import MAX_CELLS, MAX_REGIONS, MAX_STRIDES, Detector, Trail
from llmcache.cache.streams import MAX_STREAMS
from llmcache.papers.traces import SHAPES
from llmcache.trace.record import Provenance, Trace, TraceFile

LEAST_BYTES = 128 << 10  # a read-ahead window; smaller ranges may be reported or not
Row = tuple[int, int, int, int, int]
"""Time, file, first block, blocks, op."""

ACCESSES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.one_of(st.integers(0, 300), st.integers(0, 1 << 50)),
        st.one_of(st.integers(1, 40), st.integers(1, 1 << 31)),
        st.booleans(),
    ),
    max_size=300,
)


def trace_of(rows: Iterable[Row], files: Iterable[TraceFile]) -> Trace:
    columns = np.array(list(rows), np.int64).reshape(-1, 5).T
    return Trace.build(*columns, files=list(files), provenance=Provenance("test"))


def rows_of(trace: Trace) -> list[Row]:
    columns = (trace.t_ns, trace.file, trace.first, trace.count, trace.op)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def table(classes: Iterable[Classification], offset: int = 0) -> dict[tuple[int, str, str], int]:
    """Return bytes by file, op and class, without small amounts."""
    found: dict[tuple[int, str, str], int] = {}
    for row in classes:
        key = row.file - offset, row.op, row.kind
        found[key] = found.get(key, 0) + row.size_bytes
    return {key: size for key, size in found.items() if size >= LEAST_BYTES}


@functools.cache
def table_of(name: str) -> dict[tuple[int, str, str], int]:
    return table(classify(SHAPES[name]().batches()).rows)


def merged(first: Trace, second: Trace, source: random.Random) -> Trace:
    """Interleave two traces; the files of the second get numbers after those of the first."""
    offset = len(first.files)
    files = [TraceFile(file.id + offset, file.path, 2, file.inode, 0, file.size_bytes) for file in second.files]
    others = [(t_ns, file + offset, begin, count, op) for t_ns, file, begin, count, op in rows_of(second)]
    remaining = [iter(rows_of(first)), iter(others)]
    order = sorted((source.random(), which) for which, trace in enumerate((first, second)) for _ in range(len(trace)))
    rows = [(number * 10_000, *next(remaining[which])[1:]) for number, (_, which) in enumerate(order)]
    return trace_of(rows, [*first.files, *files])


def assert_similar(one: dict[tuple[int, str, str], int], other: dict[tuple[int, str, str], int]) -> None:
    """Check that two tables have the same keys, with sizes that differ by at most a window or 2 %."""
    edge = {key for key in one.keys() ^ other.keys() if max(one.get(key, 0), other.get(key, 0)) < 2 * LEAST_BYTES}
    assert one.keys() - edge == other.keys() - edge
    for key in one.keys() & other.keys():
        assert abs(one[key] - other[key]) <= max(LEAST_BYTES, 0.02 * one[key]), key


@given(ACCESSES)
def test_each_access_is_counted_once_and_in_its_range(accesses: list[tuple[int, int, int, bool]]) -> None:
    detector = Detector()
    for number, (file, first, count, write) in enumerate(accesses):
        detector.record_run(number, number, file, first, count, count, write)
    detector.finish()
    total = 0
    for (file, write), trail in detector.trails.items():
        ranges = [(first, first + count) for name, first, count, wrote in accesses if (name, wrote) == (file, write)]
        places = list(trail.places())
        total += trail.forgotten[1] + sum(place.accesses for place in places)
        for place in places:
            assert min(first for first, _ in ranges) <= place.first < place.end <= max(end for _, end in ranges)
            assert 0 < place.blocks <= place.end - place.first
            assert place.since <= place.last <= detector.now
    assert total == sum(count for _, _, count, _ in accesses)


def is_bounded(trail: Trail) -> bool:
    streams, cells = len(trail.streams) <= MAX_STREAMS, len(trail.scattered) <= MAX_CELLS
    regions, strides = len(trail.sweeps.regions) <= MAX_REGIONS, len(trail.strides) <= MAX_STRIDES
    strided = sum(len(sweeps.regions) for sweeps in trail.strides.values()) <= MAX_REGIONS
    return streams and cells and regions and strides and strided


@pytest.mark.parametrize("kind", ["random", "short runs", "long runs", "strides", "columns", "hot everywhere"])
def test_metadata_is_bounded(kind: str) -> None:
    source = random.Random(kind)
    detector = Detector()
    for number in range(4000):
        first, count = {
            "random": (source.randrange(1 << 40), 1),
            "short runs": (source.randrange(1 << 30), 5),
            "long runs": (source.randrange(1 << 20) * 100, 90),
            "strides": (number % 50 * 1000 + number // 50 * source.randrange(40, 44), 1),
            "columns": (number % 100 * 300 + number // 100, 1),
            "hot everywhere": (source.randrange(40_000) * 64, 1),
        }[kind]
        detector.record_run(number, number, 0, first, count, count, False)
        if number % 500 == 0:
            assert is_bounded(detector.trails[0, False])


@pytest.mark.parametrize("name", ["ai_notes", "claude", "write_loops", "multi_loop"])
def test_the_classes_do_not_depend_on_how_rows_are_cut(name: str) -> None:
    trace = SHAPES[name]()
    source = random.Random(name)
    parts: list[Row] = []
    for t_ns, file, first, count, op in rows_of(trace):
        at = 0
        while at < count:
            step = min(count - at, source.choice((1, 3, 30, 100)))
            parts.append((t_ns + at, file, first + at, step, op))
            at += step
    parts.sort(key=lambda row: row[0])
    again = trace_of(parts, trace.files)
    assert_similar(table_of(name), table(classify(again.batches(rows=997)).rows))


@pytest.mark.parametrize(("one", "other"), [("ai_notes", "ai_translate")])
def test_a_simultaneous_application_does_not_change_classes(one: str, other: str) -> None:
    """With two simultaneous applications, the files of each get the same classes as if it ran alone."""
    first, second = SHAPES[one](), SHAPES[other]()
    offset = len(first.files)
    together = classify(merged(first, second, random.Random(one)).batches()).rows
    assert_similar(table_of(one), table(row for row in together if row.file < offset))
    assert_similar(table_of(other), table((row for row in together if row.file >= offset), offset))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(1, 40), st.integers(0, 2)), min_size=1))
def test_runs_hold_all_accesses_in_order(rows: list[tuple[int, int, int, int]]) -> None:
    files = [TraceFile(number, str(number), 0, 0, 0, 0) for number in range(2)]
    trace = trace_of([(number, *row) for number, row in enumerate(rows)], files)
    found = list(runs(trace))
    assert sum(accesses for *_, accesses, _ in found) == trace.accesses
    begins = [begin for begin, *_ in found]
    assert begins == sorted(begins)
    for begin, until, file, first, count, accesses, write in found:
        part = [row for at, row in enumerate(rows) if begin <= at <= until]
        assert {(row[0], row[3] == 1) for row in part} == {(file, write)}
        assert {block for row in part for block in range(row[1], row[1] + row[2])} == set(range(first, first + count))
        assert accesses == sum(row[2] for row in part)
