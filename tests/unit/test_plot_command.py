"""The `llmcache plot` command and its figure: cells, bands of files, names, caption, bad input."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.report.plot import (
    EDGE,
    AccessGrid,
    Band,
    Shade,
    bands,
    caption,
    chosen_files,
    conditions,
    picture_of,
    survey,
)
from llmcache.trace.record import MAP, Provenance, Trace, TraceFile
from tests.unit.command_parts import called
from tests.unit.gguf_bytes import Gguf
from tests.unit.report_parts import COPY, MODEL, TOKENIZER, Page, check_alone, recorded
from tests.unit.report_parts import unlaid as unlaid
from tests.unit.simulation_parts import Row, rows, saved, trace_of

pytestmark = pytest.mark.usefixtures("unlaid")

BLOCK = 4096


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return saved(recorded(), tmp_path)


def run(*args: str | Path) -> CompletedProcess[str]:
    return called("plot", *args)


def page_of(target: Path, *args: str | Path) -> Page:
    done = run(*args, "-o", target, "--force")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    source = target.read_text()
    assert source.startswith("<!DOCTYPE html>")
    page = Page(source)
    check_alone(page, source)
    return page


def test_an_svg_has_text_and_embedded_images(trace: str, tmp_path: Path) -> None:
    target = tmp_path / "out.svg"
    assert run(trace, "-o", target).returncode == 0
    root = ET.parse(target).getroot()
    texts = [text for text in root.itertext() if text.strip()]
    axes = {"time (s)", "block number in the file (4 KiB blocks)", "read", "write", "page fault (map)", "loop (LOOP)"}
    assert any("Source: synthetic" in text for text in texts) and {TOKENIZER, MODEL, COPY} | axes <= set(texts)
    images = [node for node in root.iter() if node.tag.endswith("}image")]
    links = [value for node in images for name, value in node.attrib.items() if name.endswith("href")]
    assert len(links) == len(images) > 0 and all(link.startswith("data:image/png;base64,") for link in links)


def test_a_page_has_the_figure_the_classes_and_the_conditions(trace: str, tmp_path: Path) -> None:
    page = page_of(tmp_path / "out.html", trace)
    assert page.tags["img"] == 1 and page.tags["table"] == 1
    assert f"{MODEL}: blocks 0 to 999, 5,000 accesses, LOOP" in str(page.images[0]["alt"])
    assert "trace.parquet (synthetic)" in page.text and TOKENIZER in page.text and "run <it>" in page.text
    assert "LOOP" in page.text and COPY in page.text and "period (s)" in page.text and "clockinvented" in page.text
    bare = page_of(tmp_path / "bare.html", trace, "--no-classes", "--files", "*.gguf")
    assert bare.tags["table"] == 0 and "LOOP" not in bare.text
    alt = str(bare.images[0]["alt"])
    assert MODEL in alt and COPY not in alt and TOKENIZER not in alt and "5,000 blocks" in bare.text


def test_layers_are_named_from_disk_and_from_a_copy(tmp_path: Path) -> None:
    content = Gguf()
    for layer in range(4):
        content.tensor(f"blk.{layer}.attn_q.weight", [100 * BLOCK // 4], 0, layer * 100 * BLOCK)
    content.data_bytes = 400 * BLOCK
    model = tmp_path / "model.gguf"
    model.write_bytes(content.file())
    size = model.stat().st_size
    blocks = -(-size // BLOCK)
    rows = [(first, min(40, blocks - first)) for _ in range(4) for first in range(0, blocks, 40)]
    first, count = zip(*rows, strict=True)
    times = [number * 10**8 for number in range(len(rows))]

    def path_of(seen_as: str) -> str:
        files, ops = [TraceFile(0, seen_as, 1, 0, 0, size)], [MAP] * len(rows)
        read = Trace.build(times, [0] * len(rows), first, count, ops, files=files, provenance=Provenance("bpf"))
        return saved(read, tmp_path, f"{len(seen_as)}.parquet")

    gone, here = path_of("/gone/model.gguf"), path_of(str(model))
    target = tmp_path / "out.svg"
    for args, named in (([gone], False), ([gone, "--model", model], True)):
        assert run(*args, "-o", target, "--force").returncode == 0
        texts = list(ET.parse(target).getroot().itertext())
        assert [f"blk.{layer}" in texts for layer in range(4)] == [named] * 4
    page = page_of(tmp_path / "out.html", here)
    assert "blk.0-3.attn_q.weight (4)" in page.text or "blk.0-3 (4)" in page.text


def test_files_are_replaced_only_with_force(trace: str, tmp_path: Path) -> None:
    target = tmp_path / "out.PNG"
    target.write_text("precious")
    done = run(trace, "-o", target)
    assert done.returncode == 2 and "-o: " in done.stderr and "--force" in done.stderr and target.read_text() == "precious"
    assert run(trace, "-o", target, "--force").returncode == 0
    data = target.read_bytes()
    assert data.startswith(b"\x89PNG") and not list(tmp_path.glob("new-*"))
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 500


def test_bad_input_is_named_and_leaves_no_files(trace: str, tmp_path: Path) -> None:
    nothing = Trace.build([], [], [], [], files=[], provenance=Provenance("x"))
    empty, foreign = saved(nothing, tmp_path, "empty.parquet"), tmp_path / "foreign.parquet"
    foreign.write_text("no Parquet")
    png = tmp_path / "out.png"
    cases: list[tuple[list[str | Path], int, str]] = [
        ([trace, "-o", tmp_path / "out.pdf"], 2, "-o: "),
        ([trace, "-o", tmp_path / "png"], 2, ".png, .svg or .html"),
        ([trace, "-o", "/nowhere/out.png"], 2, "-o: '/nowhere' is not a directory"),
        ([trace], 2, "-o"),
        ([trace, "-o", png, "--files", "*.safetensors"], 2, "--files: no file"),
        ([trace, "-o", png, "--model", tmp_path / "none.gguf"], 2, "--model"),
        ([trace, "-o", png, "--model", trace], 5, "--model"),
        ([foreign, "-o", png], 5, "foreign.parquet"),
        ([empty, "-o", png], 5, "rows"),
        ([tmp_path / "none.parquet", "-o", png], 2, "none.parquet"),
        ([trace, "-o", "/proc/out.png"], 3, "cannot write '/proc/out.png'"),
    ]
    for args, code, named in cases:
        done = run(*args)
        assert (done.returncode, done.stdout) == (code, "") and named in done.stderr and "Traceback" not in done.stderr
    assert not png.exists() and not list(tmp_path.glob("new-*"))


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    bad = '/a/<script>alert("$x^{$")</script>\n\x07模型.bin'
    files = [TraceFile(0, bad, 1, 1, 0, 0)]
    path = saved(Trace.build([1, 2], [0, 0], [0, 2**40], [1, 2**31], files=files, provenance=Provenance("x")), tmp_path)
    page = page_of(tmp_path / "out.html", path)
    assert '<script>alert("$x^{$")</script>\\n\\x07模型.bin' in page.text and "\x07" not in page.text
    assert run(path, "-o", tmp_path / "out.svg").returncode == 0
    ET.parse(tmp_path / "out.svg")


def filled(trace: Trace, by_time: bool, width: int, height: int, batch: int) -> tuple[AccessGrid, tuple[Band, ...]]:
    found = survey(trace.batches(batch))
    places = bands(found.spans)
    grid = AccessGrid(found, places, by_time, width, height)
    for part in trace.batches(batch):
        grid.add(part)
    return grid, places


@given(rows(), st.booleans(), st.integers(1, 40))
def test_each_block_is_counted_in_its_cell(accesses: list[Row], by_time: bool, batch: int) -> None:
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


def of_files(rows: list[Row], name: str) -> Trace:
    """Return a trace of `rows` over as many files as they use, each named by `name` with its number."""
    files = [TraceFile(number, name.format(number), 0, 0, 0, 0) for number in range(1 + max(row[0] for row in rows))]
    return Trace.build(list(range(len(rows))), *zip(*rows, strict=True), files=files, provenance=Provenance("test"))


def test_files_with_few_accesses_are_left_out_unless_requested() -> None:
    rows = [(0, 0, 1000, 2)] * 9 + [(1, 0, 5, 0)] * 20 + [(2, 0, 12, 0)] + [(number, 0, 5, 0) for number in range(3, 9)]
    trace = of_files(rows, "/f{}")
    shades = [Shade(number, 0, 5, "LOOP" if number == 0 else "SEQ") for number in range(9)]
    picture = picture_of(trace, "t", shades=shades)
    assert [band.file for band in picture.bands] == [0, 1, 2]  # most accesses; 1.1 % of them; 1.1 % of the blocks
    description = caption(picture, trace)
    assert (
        "Not shown: 6 more files with 0.3% of the accesses, each below 1% of" in description and "--files '*'" in description
    )
    assert {shade.file for shade in picture.shades} == {0, 1, 2}
    many = of_files([(file % 20, 0, 10, 0) for file in range(200)], "/f{}\n")
    picture = picture_of(many, "t")
    assert len(picture.bands) == 16 and picture.names[0] == "/f0\\n"
    assert "Not shown: 4 more files with 20.0% of the accesses (choose files with --files GLOB)" in caption(picture, many)
    everything = picture_of(trace, "t", only=chosen_files(trace.files, "*"))
    assert len(everything.bands) == 9 and "not shown" not in dict(conditions(everything, trace))
