"""Pages: every block escapes what it is given, tables hold their columns, nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmcache.report.html import Badge, Facts, Fold, HtmlBlock, Picture, Section, Table, Text, html_page, printable
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
    (policy,) = (value for tag, name, value in page.attributes if tag == "meta" and value.startswith("default-src"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
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


def test_tables_show_numbers_by_their_type() -> None:
    _, source = page_of([Table("t", ["a", "b", "c"], [["x", 1234567, 0.12345]], digits=2)])
    assert '<td class="number">1,234,567</td><td class="number">0.12</td>' in source
    _, source = page_of([Table("t", ["", ""], [["", "model.layers.0.self_attn.q_proj.weight"]])])
    assert '<td class="long">' in source  # broken where a line ends, like paths: a wide table is cut off at the window
    with pytest.raises(ValueError, match="2 cells under 1 columns"):
        page_of([Table("t", ["a"], [["x", "y"]])])


def test_printable_keeps_all_that_can_be_shown() -> None:
    assert printable("模型 é $x$ …") == "模型 é $x$ …"
    assert printable("a\tb\udc80\x00") == "a?b??"
