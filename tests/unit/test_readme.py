"""Tables, figures and the picture of README.md and docs/ are those of the JSON in the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.bench import readme, results
from tools.bench.readme import PICTURE, TABLES, UnknownFigure, fill, pages
from tools.bench.results import Bar, Document, with_bars

TEXT = "".join(page.read_text() for page in pages())


def document(_name: str = "kvstore") -> Document:
    return with_bars({}, [Bar("gather", "bandwidth", 0.7, ">=", 0.8), Bar("m", "memory", 3, "<", 4, "emulated")])


def test_tables_figures_and_the_picture_are_the_recorded_ones() -> None:
    assert readme.main([]) == 0, "python -m tools.bench.readme --write"


def test_every_recorded_benchmark_has_its_table_once() -> None:
    shown = re.findall(r"<!-- results:(\w+) -->", TEXT)
    beside = {"demotime", "startup", "papers", "testtime"}  # of us, not of what users do
    assert sorted(shown) == sorted({path.stem for path in results.DIRECTORY.glob("*.json")} - beside)
    assert set(shown) <= set(TABLES)


def test_no_line_begins_with_the_marker_of_a_figure() -> None:
    assert not re.findall(r"^\s*<!-- figure:", TEXT, re.MULTILINE), "Markdown would take the line for HTML"


def test_what_is_marked_is_replaced_and_nothing_else() -> None:
    text = "a\n<!-- results:kvstore -->\nold\n<!-- /results -->\nb <!-- figure:kvstore.gather -->9<!-- /figure --> c\n"
    text += "<!-- limit:kvstore.m -->8<!-- /limit -->, <!-- limit:kvstore.gather -->7<!-- /limit -->\n"
    table = "| what | figure | bar |\n|---|---:|---:|\n| bandwidth | 0.7 | >= 0.8: **not reached** |\n"
    table += "| *emulated*: memory | 3 | < 4 |\n"
    filled = fill(text, document)
    limits = text.replace("8", "< 4").replace("7", ">= 0.8: **not reached**")
    assert filled == limits.replace("old\n", table).replace("9", "0.7")
    assert fill(filled, document) == filled


@pytest.mark.parametrize(
    "marker", ["results:nothing", "figure:nothing.gather", "figure:kvstore.nothing", "limit:kvstore.nothing"]
)
def test_unknown_markers_are_named(marker: str) -> None:
    kind = marker.partition(":")[0]
    with pytest.raises(UnknownFigure, match="nothing"):
        fill(f"<!-- {marker} -->{chr(10) if kind == 'results' else 1}<!-- /{kind} -->", document)


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    written = [tmp_path / name for name in ("README.md", "docs/page.md", PICTURE)]
    for page in written[:2]:
        page.write_text("a <!-- figure:kvstore.gather -->1<!-- /figure -->\n")
    assert readme.main([], tmp_path) == 1 and "-->1<" in written[0].read_text()
    assert readme.main(["--write"], tmp_path) == 0 == readme.main([], tmp_path)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(written)
    assert all("-->1<" not in page.read_text() for page in written[:2])
