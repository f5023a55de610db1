"""Pages: every block escapes what it is given, tables hold their columns, nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from llmcache.cache.classify import Classification
from llmcache.report.html import Badge, Facts, Fold, HtmlBlock, Picture, Section, Table, Text, html_page, printable
from llmcache.report.plot import COLUMNS, MOST_ROWS, classes_table, shades_of
from tests.unit.report_parts import Page, check_alone

EVIL = "<script>alert('1')</script> & \"two\"\n\x1b"
SHOWN = "<script>alert('1')</script> & \"two\"??"


def page_of(blocks: Sequence[HtmlBlock], title: str = "Title") -> tuple[Page, str]:
    source = html_page(title, "lead", [Section("one", blocks)])
    return Page(source), source


@pytest.mark.parametrize(
    "block",
    [
        Text(EVIL),
        Text(EVIL, note=True),
        Facts([(EVIL, EVIL)]),
        Table(EVIL, [EVIL], [[EVIL], [Badge(EVIL, "good")]]),
        Picture(b"x", "png", EVIL, EVIL),
        Fold(EVIL, [Text(EVIL)]),
    ],
    ids=lambda block: type(block).__name__,
)
def test_blocks_escape(block: HtmlBlock) -> None:
    page, source = page_of([block])
    check_alone(page, source)
    assert SHOWN in page.text
    if isinstance(block, Picture):
        assert page.images[0]["alt"] == SHOWN


def test_title_and_headings_escape_and_link_within_the_page() -> None:
    source = html_page(EVIL, EVIL, [Section(EVIL), Section("two")])
    page = Page(source)
    check_alone(page, source)
    assert page.text.count(SHOWN) == 5  # title, heading, lead, contents, section
    anchors = {value for tag, name, value in page.attributes if (tag, name) == ("section", "id")}
    assert {link.removeprefix("#") for link in page.resources()} == anchors
    assert not page_of([])[0].tags["nav"]


def test_the_page_forbids_other_resources() -> None:
    page, _ = page_of([])
    (policy,) = (value for tag, name, value in page.attributes if tag == "meta" and value.startswith("default-src"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_tables_show_numbers_by_their_type() -> None:
    _, source = page_of([Table("t", ["a", "b", "c"], [["x", 1234567, 0.12345]], digits=2)])
    assert '<td class="number">1,234,567</td><td class="number">0.12</td>' in source
    with pytest.raises(ValueError, match="2 cells under 1 columns"):
        page_of([Table("t", ["a"], [["x", "y"]])])


def test_printable_keeps_all_that_can_be_shown() -> None:
    assert printable("模型 é $x$ …") == "模型 é $x$ …"
    assert printable("a\tb\udc80\x00") == "a?b??"


def row(number: int, share: float, tensors: tuple[str, ...] = ()) -> Classification:
    pieces = ((0, 9), (20, 29))
    return Classification(0, f"/f{number}", "read", "LOOP", pieces, 81920, 9, share, 3, 0, 9, 10**9, tensors=tensors)


def test_classes_become_shades_and_a_table() -> None:
    assert [(shade.first, shade.end, shade.kind) for shade in shades_of([row(1, 0.5)])] == [
        (0, 10, "LOOP"),
        (20, 30, "LOOP"),
    ]
    table = classes_table([row(1, 0.5), replace(row(2, 0.25), file=7)], {0})
    assert "1 more with 25.0% of the accesses" in table.caption
    assert list(table.columns) == COLUMNS
    assert list(table.rows[0]) == ["LOOP", "read", "/f1", 0.08192, "0 to 29", 2, 3, 1.0, 50.0]
    unknown = Classification(0, "/f", "write", "SEQ", (), 4096, 1, 1.0, 1, 0, 0)
    assert list(classes_table([unknown], {0}).rows[0])[4:8] == ["", 0, 1, ""]


def test_a_table_of_classes_names_tensors_and_ends_somewhere() -> None:
    table = classes_table([row(1, 0.5, ("blk.0.w", "blk.1.w")), row(2, 0.1)], {0})
    assert table.columns[-1] == "tensors" and [cells[-1] for cells in table.rows] == ["blk.0-1 (2)", ""]
    many = classes_table([row(number, 1 / 200) for number in range(200)], {0})
    long = Table("", ["", ""], [["", "model.layers.0.self_attn.q_proj.weight"]]).html()
    assert '<td class="long">' in long  # is broken where a line ends, like paths: a wide table is cut off at the window
    assert len(many.rows) == MOST_ROWS and f"{200 - MOST_ROWS} more with 50.0% of the accesses" in many.caption
