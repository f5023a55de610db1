"""Counts of accesses in cells: against counting block by block, over batches, at the edges of bands."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.errors import DataError
from llmcache.report.grid import EDGE, LEAST_SHARE, AccessGrid, Band, FileSpan, bands, survey
from llmcache.trace.record import Trace
from tests.unit.report_parts import recorded
from tests.unit.simulation_parts import Row, rows, trace_of


def filled(trace: Trace, by_time: bool, width: int, height: int, batch: int) -> tuple[AccessGrid, tuple[Band, ...]]:
    found = survey(trace.batches(batch))
    places = bands(found.spans)
    grid = AccessGrid(found, places, by_time, width, height)
    for part in trace.batches(batch):
        grid.add(part)
    return grid, places


def test_the_survey_tells_what_each_file_has() -> None:
    trace = recorded()
    for batch in (7, 10**6):
        found = survey(trace.batches(batch))
        assert (found.rows, found.accesses, found.timed) == (len(trace), trace.accesses, True)
        assert found.spans == (FileSpan(0, 0, 1000, 5000), FileSpan(1, 0, 20, 200), FileSpan(2, 0, 400, 1200))
    assert [span.file for span in survey(trace.batches(), frozenset({2})).spans] == [2]
    with pytest.raises(DataError, match="rows"):
        survey(trace.batches(), frozenset({9}))


def test_bands_fill_the_height_and_a_small_file_is_seen() -> None:
    made = bands([FileSpan(4, 0, 10**6, 5), FileSpan(2, 100, 110, 7)])
    assert [(band.file, band.first, band.end) for band in made] == [(2, 100, 110), (4, 0, 10**6)]
    assert made[0].bottom == 0 and made[0].top == made[1].bottom and made[1].top == pytest.approx(1)
    assert made[0].top > 0.9 * LEAST_SHARE
    assert made[1].height(0) == made[1].bottom and made[1].height(10**6) == pytest.approx(1)
    assert [band.file for band in bands([FileSpan(number, 0, 9, number) for number in range(5)], most=2)] == [3, 4]


@given(rows(), st.booleans(), st.integers(1, 40))
def test_every_block_is_counted_in_its_cell(accesses: list[Row], by_time: bool, batch: int) -> None:
    trace = trace_of(accesses)
    by_time = by_time and len(trace) > 1
    grid, places = filled(trace, by_time, 16, 24, batch)
    expected = np.zeros((3, 24, 16), np.int64)
    before, last_ns = 0, int(trace.t_ns[-1])
    for number, (file, first, count, op) in enumerate(accesses):
        passed = int(trace.t_ns[number]) / last_ns if by_time else before / trace.accesses
        before += count
        band = next(band for band in places if band.file == file)
        last = int(np.ceil(band.top * 24)) - 1
        cells: set[int] = set()
        for block in range(first, first + count):
            low = int(band.height(block) * 24 + EDGE)
            high = int(np.ceil(band.height(block + 1) * 24 - EDGE)) - 1
            cells |= {min(cell, last) for cell in range(low, max(low, high) + 1)}
        for cell in cells:
            expected[op, cell, min(int(passed * 16), 15)] += 1
    assert np.array_equal(grid.counts(), expected)


def test_cells_of_a_plain_loop_are_exact() -> None:
    trace = trace_of([(0, first, 10, 0) for _ in range(4) for first in range(0, 40, 10)])
    grid, _ = filled(trace, False, 16, 4, 5)
    assert np.array_equal(grid.counts()[0], np.tile(np.eye(4, dtype=np.int64), 4))
    assert not grid.counts()[1:].any()


def test_batches_do_not_change_the_picture() -> None:
    for by_time in (True, False):
        whole, _ = filled(recorded(), by_time, 50, 60, 10**6)
        parts, _ = filled(recorded(), by_time, 50, 60, 3)
        assert np.array_equal(whole.counts(), parts.counts())


def test_files_without_a_band_are_left_out() -> None:
    trace = recorded()
    found = survey(trace.batches())
    grid = AccessGrid(found, bands(found.spans, most=1), True, 10, 10)
    grid.add(trace)
    assert grid.counts()[2].any() and not grid.counts()[:2].any()
