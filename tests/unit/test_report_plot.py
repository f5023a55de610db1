"""The picture of a trace: what is counted in its cells, which files have a band, how it is drawn, what its caption says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from llmcache.cache.classify import Classification
from llmcache.report.plot import (
    CLASSES,
    EDGE,
    LEAST_SHARE,
    MOST_ROWS,
    AccessGrid,
    Band,
    FileSpan,
    Landmark,
    Shade,
    access_figure,
    alt_text,
    bands,
    caption,
    chosen_files,
    class_rows,
    classes_table,
    conditions,
    picture_of,
    pixels,
    shades_of,
    survey,
)
from llmcache.report.theme import OP_COLOURS, embedded, figure_bytes, style
from llmcache.trace.record import Provenance, Trace, TraceFile
from tests.unit.report_parts import MODEL, recorded
from tests.unit.simulation_parts import Row, loop, rows, trace_of


def filled(trace: Trace, by_time: bool, width: int, height: int, batch: int) -> tuple[AccessGrid, tuple[Band, ...]]:
    found = survey(trace.batches(batch))
    places = bands(found.spans)
    grid = AccessGrid(found, places, by_time, width, height)
    for part in trace.batches(batch):
        grid.add(part)
    return grid, places


def test_bands_fill_the_height_and_a_small_file_is_seen() -> None:
    made = bands([FileSpan(4, 0, 10**6, 5), FileSpan(2, 100, 110, 7)])
    assert [(band.file, band.first, band.end) for band in made] == [(2, 100, 110), (4, 0, 10**6)]
    assert made[0].bottom == 0 and made[0].top == made[1].bottom and made[1].top == pytest.approx(1)
    assert made[0].top > 0.9 * LEAST_SHARE


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


SHADES = [Shade(0, 0, 1000, "LOOP"), Shade(1, 0, 20, "HOT"), Shade(2, 0, 400, "SEQ"), Shade(2, 0, 200, "LOOP")]


def drawn(trace: Trace, **options: object) -> Figure:
    with style():
        figure = access_figure(picture_of(trace, "some trace", **options))  # type: ignore[arg-type]
        figure.draw_without_rendering()
    return figure


def test_pixels_take_the_colour_of_the_most_frequent_op() -> None:
    counts = np.zeros((3, 2, 2), np.int64)
    counts[:, 0, 0], counts[0, 0, 1], counts[2, 1, 1] = (1, 5, 2), 1, 100
    image = pixels(counts)
    assert np.allclose(image[0, 0, :3], to_rgb(OP_COLOURS["write"]))
    assert np.allclose(image[0, 1, :3], to_rgb(OP_COLOURS["read"]))
    assert np.allclose(image[1, 1, :3], to_rgb(OP_COLOURS["map"]))
    assert image[1, 0, 3] == 0
    assert 0.5 < image[0, 1, 3] < image[0, 0, 3] < image[1, 1, 3] == 1


def test_classes_cover_their_rows_and_the_later_kind_wins() -> None:
    places = [Band(0, 0, 100, 0, 0.5), Band(1, 0, 1000, 0.5, 1)]
    shades = [Shade(0, 0, 100, "SEQ"), Shade(0, 50, 60, "LOOP"), Shade(1, 999, 1000, "HOT"), Shade(7, 0, 9, "HOT")]
    rows = class_rows(places, shades, 20)
    seq, looped, hot = range(len(CLASSES))
    assert rows.tolist() == [seq] * 5 + [looped] + [seq] * 4 + [-1] * 9 + [hot]
    assert class_rows(places, [Shade(0, 100, 200, "HOT")], 20).max() == -1  # beyond what was accessed


def test_names_do_not_overlap() -> None:
    many = drawn(recorded(), landmarks=[Landmark(0, 5 * n, 5 * n + 5, f"blk.{n}") for n in range(200)])
    crowd = of_files([(0, 0, 5000, 2)] + [(number, 0, 2, 0) for number in range(1, 40)], "/lib/{}")
    for figure in (many, drawn(crowd, only=chosen_files(crowd.files, "*"))):
        places = figure.axes[0].child_axes[0].get_yticks()
        assert 15 < len(places) <= 32 and np.diff(places).min() >= 0.032
    long = drawn(trace_of(loop(9, 3, 3)), landmarks=[Landmark(0, 0, 9, "x" * 99)])
    assert len(long.axes[0].child_axes[0].get_yticklabels()[0].get_text()) <= 31


def test_captions_tell_the_conditions() -> None:
    trace = recorded(lost=7)
    picture = picture_of(trace, "t", shades=SHADES)
    facts = dict(conditions(picture, trace))
    assert facts["source"] == "synthetic" and facts["lost events"] == "7" and facts["files"] == "3"
    assert facts["accesses"].startswith("6,400 blocks of 4 KiB") and facts["duration"] == "3.23 s"
    assert "note" not in facts and "not shown" not in facts and "LOOP" in facts["classes"]
    told = caption(picture, trace)
    assert told.startswith("Source: synthetic; 6,400 blocks of 4 KiB (26.2 MB) in 3.23 s; 7 events lost. A cell: ")
    assert f"{MODEL}: blocks 0 to 999, 5,000 accesses, LOOP" in alt_text(picture)
    timeless = trace_of(loop(9, 2, 3), step_ns=0, provenance=Provenance("csv", note="Ends with a point."))
    assert " in " not in caption(picture_of(timeless, "t"), timeless).split(". A cell")[0]
    assert ("note", "Ends with a point.") in conditions(picture_of(timeless, "t"), timeless)


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


def test_classes_become_shades_and_a_table() -> None:
    assert shades_of([row(1, 0.5)]) == [Shade(0, 0, 10, "LOOP"), Shade(0, 20, 30, "LOOP")]
    table = classes_table([row(1, 0.5), replace(row(2, 0.25), file=7)], {0})
    assert "1 more with 25.0% of the accesses" in table.caption
    assert list(table.rows[0]) == ["LOOP", "read", "/f1", 0.08192, "0 to 29", 2, 3, 1.0, 50.0]
    unknown = Classification(0, "/f", "write", "SEQ", (), 4096, 1, 1.0, 1, 0, 0)
    assert list(classes_table([unknown], {0}).rows[0])[4:8] == ["", 0, 1, ""]
    table = classes_table([row(1, 0.5, ("blk.0.w", "blk.1.w")), row(2, 0.1)], {0})
    assert table.columns[-1] == "tensors" and [cells[-1] for cells in table.rows] == ["blk.0-1 (2)", ""]
    many = classes_table([row(number, 1 / 200) for number in range(200)], {0})
    assert len(many.rows) == MOST_ROWS and f"{200 - MOST_ROWS} more with 50.0% of the accesses" in many.caption


def test_pictures_with_images_are_png_on_pages_and_files_are_the_same_each_time() -> None:
    figure = drawn(recorded(), shades=SHADES)
    assert embedded(figure, "alt", "caption").form == "png"
    assert figure_bytes(figure, "png").startswith(b"\x89PNG")
    once, again = (figure_bytes(drawn(recorded(), shades=SHADES), "svg") for _ in range(2))
    assert once == again
