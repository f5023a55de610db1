"""The picture of a trace: what is counted in its cells, which files have a band, how it is drawn, what its caption says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from llmcache.cache.classify import Classification
from llmcache.report.plot import (
    EDGE,
    AccessGrid,
    Band,
    Landmark,
    Shade,
    access_figure,
    bands,
    caption,
    chosen_files,
    conditions,
    picture_of,
    survey,
)
from llmcache.report.theme import style
from llmcache.trace.record import Provenance, Trace, TraceFile
from tests.unit.report_parts import recorded
from tests.unit.simulation_parts import Row, loop, rows, trace_of


def filled(trace: Trace, by_time: bool, width: int, height: int, batch: int) -> tuple[AccessGrid, tuple[Band, ...]]:
    found = survey(trace.batches(batch))
    places = bands(found.spans)
    grid = AccessGrid(found, places, by_time, width, height)
    for part in trace.batches(batch):
        grid.add(part)
    return grid, places


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


def drawn(trace: Trace, **options: object) -> Figure:
    with style():
        figure = access_figure(picture_of(trace, "some trace", **options))  # type: ignore[arg-type]
        figure.draw_without_rendering()
    return figure


def test_names_do_not_overlap() -> None:
    many = drawn(recorded(), landmarks=[Landmark(0, 5 * n, 5 * n + 5, f"blk.{n}") for n in range(200)])
    crowd = of_files([(0, 0, 5000, 2)] + [(number, 0, 2, 0) for number in range(1, 40)], "/lib/{}")
    for figure in (many, drawn(crowd, only=chosen_files(crowd.files, "*"))):
        places = figure.axes[0].child_axes[0].get_yticks()
        assert 15 < len(places) <= 32 and np.diff(places).min() >= 0.032
    long = drawn(trace_of(loop(9, 3, 3)), landmarks=[Landmark(0, 0, 9, "x" * 99)])
    assert len(long.axes[0].child_axes[0].get_yticklabels()[0].get_text()) <= 31


def of_files(rows: list[Row], name: str) -> Trace:
    """A trace of `rows` over as many files as there are, each called `name` with its number."""
    files = [TraceFile(number, name.format(number), 0, 0, 0, 0) for number in range(1 + max(row[0] for row in rows))]
    return Trace.build(list(range(len(rows))), *zip(*rows, strict=True), files=files, provenance=Provenance("test"))


def test_files_that_hardly_count_are_left_out_until_they_are_asked_for() -> None:
    rows = [(0, 0, 1000, 2)] * 9 + [(1, 0, 5, 0)] * 20 + [(2, 0, 12, 0)] + [(number, 0, 5, 0) for number in range(3, 9)]
    trace = of_files(rows, "/f{}")
    shades = [Shade(number, 0, 5, "LOOP" if number == 0 else "SEQ") for number in range(9)]
    picture = picture_of(trace, "t", shades=shades)
    assert [band.file for band in picture.bands] == [0, 1, 2]  # most accesses; 1.1 % of them; 1.1 % of the blocks
    told = caption(picture, trace)
    assert "Not shown: 6 further files with 0.3% of the accesses, each below 1% of" in told and "--files '*'" in told
    assert {shade.file for shade in picture.shades} == {0, 1, 2}
    many = of_files([(file % 20, 0, 10, 0) for file in range(200)], "/f{}\n")
    picture = picture_of(many, "t")
    assert len(picture.bands) == 16 and picture.names[0] == "/f0?"
    assert "Not shown: 4 further files with 20.0% of the accesses; --files GLOB" in caption(picture, many)
    everything = picture_of(trace, "t", only=chosen_files(trace.files, "*"))
    assert len(everything.bands) == 9 and "not shown" not in dict(conditions(everything, trace))


def row(number: int, share: float, tensors: tuple[str, ...] = ()) -> Classification:
    pieces = ((0, 9), (20, 29))
    return Classification(0, f"/f{number}", "read", "LOOP", pieces, 81920, 9, share, 3, 0, 9, 10**9, tensors=tensors)
