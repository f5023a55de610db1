"""The README's tables and figures are those of the JSON in the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.bench import readme
from tools.bench.readme import FIGURES, README, TABLES, UnknownFigure, fill, missed_table
from tools.bench.results import Bar, Document, with_bars


def document(_name: str = "kvstore") -> Document:
    return with_bars({}, [Bar("gather", "bandwidth", 0.7, ">=", 0.8), Bar("m", "memory", 3, "<", 4, "emulated")])


def test_tables_and_figures_are_the_recorded_ones() -> None:
    assert fill(README.read_text()) == README.read_text(), "python -m tools.bench.readme --write"


def test_every_recorded_benchmark_has_its_table() -> None:
    shown = set(re.findall(r"<!-- results:(\w+) -->", README.read_text()))
    assert {"mount", "policies", "simulate", "size", "trace", "kv", "kvpipeline", "kvstore", "kvindex"} <= shown
    assert {"kvtransformers", "edram", "all"} <= shown <= set(TABLES)


def test_no_line_begins_with_the_marker_of_a_figure() -> None:
    assert not re.findall(r"^\s*<!-- figure:", README.read_text(), re.MULTILINE), "Markdown would take the line for HTML"


@pytest.mark.parametrize("name", sorted({name.partition(".")[0] for name in FIGURES}))
def test_figures_are_of_recorded_benchmarks(name: str) -> None:
    for key in (key for key in FIGURES if key.startswith(f"{name}.")):
        assert re.search(r"\d", FIGURES[key](readme.recorded(name)))


def test_what_is_marked_is_replaced_and_nothing_else() -> None:
    text = "a\n<!-- results:kvstore -->\nold\n<!-- /results -->\nb <!-- figure:kvstore.gather -->9<!-- /figure --> c\n"
    table = "| what | figure | bar |\n|---|---:|---:|\n| bandwidth | 0.7 | >= 0.8: **not reached** |\n"
    table += "| *emulated*: memory | 3 | < 4 |\n"
    filled = fill(text, document)
    assert filled == text.replace("old\n", table).replace("9", "0.7")
    assert fill(filled, document) == filled


def test_bars_that_are_not_reached_are_told() -> None:
    bars = [{**one, "benchmark": "kvstore"} for one in document()["bars"]]
    table = missed_table({"bars": bars})
    assert table.startswith("Reached: 1 of 2 bars.\n")
    assert table.endswith("| bandwidth | measured | 0.7 | >= 0.8 |\n") and "memory" not in table
    assert missed_table({"bars": bars[1:]}) == "Reached: 1 of 1 bars.\n"


@pytest.mark.parametrize(
    "text",
    [
        "<!-- results:nothing -->\n<!-- /results -->",
        "a <!-- figure:nothing.gather -->1<!-- /figure -->",
        "a <!-- figure:kvstore.nothing -->1<!-- /figure -->",
    ],
)
def test_unknown_markers_are_named(text: str) -> None:
    with pytest.raises(UnknownFigure, match="nothing"):
        fill(text, document)


def test_the_command_writes_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "README.md"
    path.write_text("a <!-- figure:kvstore.gather -->1<!-- /figure -->\n")
    monkeypatch.setattr(readme, "README", path)
    assert readme.main([]) == 1 and "-->1<" in path.read_text()
    assert readme.main(["--write"]) == 0 == readme.main([])
    assert [entry.name for entry in tmp_path.iterdir()] == ["README.md"] and "-->1<" not in path.read_text()
