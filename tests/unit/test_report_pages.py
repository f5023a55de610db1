"""Pages: every block escapes what it is given and loads nothing; that of `llmcache simulate --report`, and its curves."""

from __future__ import annotations

import base64
import itertools
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from llmcache.cache.plan import plan_of
from llmcache.cache.policies import POLICIES
from llmcache.cache.results import Simulation
from llmcache.cache.simulate import simulate_all
from llmcache.report.html import Badge, Facts, Fold, HtmlBlock, Picture, Section, Table, Text, html_page, printable
from llmcache.report.lines import Panel, bandwidth_lines, latency_figure, policy_line, ratio_figure
from llmcache.report.simulate_page import report_page
from llmcache.report.theme import (
    BANDWIDTH_LOOKS,
    CLASS_COLOURS,
    OP_COLOURS,
    POLICY_LOOKS,
    bandwidth_look,
    embedded,
    figure_bytes,
    style,
)
from llmcache.trace.record import Provenance
from tests.unit.report_parts import Page, check_alone
from tests.unit.report_parts import unlaid as unlaid
from tests.unit.simulation_parts import loop, saved, trace_of

pytestmark = pytest.mark.usefixtures("unlaid")

EVIL = "<script>alert('1')</script> & \"two\"\n\x1b"
SHOWN = "<script>alert('1')</script> & \"two\"??"


def page_of(blocks: Sequence[HtmlBlock], title: str = "Title") -> tuple[Page, str]:
    source = html_page(title, "lead", [Section("one", blocks)])
    return Page(source), source


def test_blocks_escape_and_a_page_loads_nothing() -> None:
    table = Table(EVIL, [EVIL], [[EVIL], [Badge(EVIL, "good")]])
    picture, fold = Picture(b"x", "png", EVIL, EVIL), Fold(EVIL, [Text(EVIL)])
    page, source = page_of([Text(EVIL), Text(EVIL, note=True), Facts([(EVIL, EVIL)]), table, picture, fold])
    check_alone(page, source)
    assert page.text.count(SHOWN) == 11 and page.images[0]["alt"] == SHOWN
    (policy,) = (value for tag, name, value in page.attributes if tag == "meta" and value.startswith("default-src"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


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


# `llmcache simulate --report`

SIZES = np.array([1e6, 2e6, 4e6])


@pytest.fixture
def simulation(tmp_path: Path) -> Simulation:
    one = saved(trace_of(loop(200, 5, 16) + loop(20, 3, 5, op=1)), tmp_path, "one <b>.parquet")
    two = saved(trace_of(loop(50, 9, 5), provenance=Provenance("mount", lost_events=4)), tmp_path, "two.parquet")
    return simulate_all([one, two], plan_of("lru,llmcache", "10%,50%,100%", "100,1000", "0.01", True, "50us"), jobs=2)


def texts_of(page: Page) -> list[list[str]]:
    """The texts of each SVG of the page."""
    found = []
    for image in page.images:
        form, _, data = str(image["src"]).partition(";base64,")
        assert form == "data:image/svg+xml"
        found.append([text for text in ET.fromstring(base64.b64decode(data)).itertext() if text.strip()])
    return found


def test_a_page_has_pictures_and_rows_of_every_trace_and_says_what_is_modelled(simulation: Simulation) -> None:
    source = report_page(simulation)
    page = Page(source)
    check_alone(page, source)
    assert page.tags["h1"] == 1 and page.tags["h2"] == 3 and page.tags["figcaption"] == 6
    assert "one <b>.parquet" in page.text and not page.tags["b"]
    assert "(source: synthetic)" in page.text and "(source: mount, 4 accesses lost)" in page.text
    one_hits, one_latency, one_curve, two_hits, *_ = texts_of(page)
    for texts in (one_hits, two_hits):
        assert {"Hit ratio", "hit ratio", "LRU", "llmcache", "footprint"} <= set(texts)
    assert any(text.startswith("cache size (") for text in one_hits)
    assert {"Fetch latency, LRU", "Fetch latency, llmcache", "100 MB/s", "1000 MB/s"} <= set(one_latency)
    assert "data fetch latency, modelled (s)" in one_latency
    assert {"Miss ratio at all sizes", "miss ratio", "LRU"} <= set(one_curve)
    row = next(row for row in simulation.results if row.policy == "llmcache" and row.cache_blocks == 100)
    for value in (row.hit_ratio, row.latencies[1].latency_s):
        assert f"{value:,.3f}" in page.text
    assert "(s, modelled)" in page.text and "reads, modelled: misses at the bandwidth of storage and 50.0 µs" in page.text
    assert "to the GPU at 20 GB/s" in page.text and "Known: LRU at all sizes, the others at the marks" in page.text
    lru = [row.hit_ratio for row in simulation.results if row.policy == "lru"]
    assert f"LRU {lru[0]:.3f} to {lru[2]:.3f}" in str(page.images[0]["alt"])


def test_the_smallest_simulation_has_a_page(tmp_path: Path) -> None:
    path = saved(trace_of([(0, 0, 1, 1)]), tmp_path)
    page = Page(report_page(simulate_all([path], plan_of("lru", "auto", None, None, True))))
    assert page.tags["img"] == 3 and "nothing is read" in page.text


def test_the_line_of_lru_falls_where_its_loop_does_not_fit_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(trace_of(loop(500, 10, 50)), tmp_path)
    drawn = simulate_all([path], plan_of("lru,sieve", "10%,60%,100%", "500", None, False, drawn=True))
    figures: list[Figure] = []

    def kept(figure: Figure, *words: str) -> Text:
        figures.append(figure)
        return Text("")

    monkeypatch.setattr("llmcache.report.simulate_page.embedded", kept)
    report_page(drawn)
    hits, latency, _ = figures
    lines = [line for axes in hits.axes + latency.axes for line in axes.lines if len(np.asarray(line.get_xdata())) > 2]
    assert len(lines) == 4 and {line.get_drawstyle() for line in lines} == {"steps-post"}  # no slope between two points
    line = hits.axes[0].lines[0]
    sizes, ratios = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert ratios[sizes < 499 * 4096 / 1e6].max() == 0 and ratios[-1] == 0.9
    marked = line.get_markevery()
    assert isinstance(marked, list) and sizes[marked] == pytest.approx([50 * 4096e-6, 300 * 4096e-6, 500 * 4096e-6])
    seconds = np.asarray(latency.axes[0].lines[0].get_ydata())
    assert seconds[:-2] == pytest.approx(5000 * 4096 * (1 / 500e6 + 1 / 20e9))
    whole = simulate_all([path], plan_of("sieve", "10%", None, None, False, drawn=True))
    assert whole.curves == ()  # LRU is not drawn


def test_lines_are_the_values_in_the_unit_of_the_axis_which_is_logarithmic_where_it_is_wide() -> None:
    line, wide = (policy_line("lru", "LRU", sizes, [0.1, 0.2, 0.9]) for sizes in (SIZES, [1e6, 1e8, 1e9]))
    panels = [Panel("some", [line], [(3e6, "footprint")]), Panel("x", [wide]), Panel("x", [wide], linear=True)]
    with style():
        some, log, linear = (ratio_figure([panel], "hit ratio").axes[0] for panel in panels)
    assert (some.get_xlabel(), some.get_ylabel()) == ("cache size (MB)", "hit ratio")
    assert np.asarray(some.lines[0].get_xdata()).tolist() == [1, 2, 4]
    assert np.asarray(some.lines[0].get_ydata()).tolist() == [0.1, 0.2, 0.9]
    assert np.asarray(some.lines[1].get_xdata()).tolist() == [3, 3] and some.texts[0].get_text() == "footprint"
    assert [axes.get_xscale() for axes in (some, log, linear)] == ["linear", "log", "linear"]
    assert log.get_xlabel() == "cache size (GB)"


def test_latencies_of_one_trace_have_one_scale_and_slow_storage_comes_first() -> None:
    slow, fast = [4.0, 3.0, 2.0], [2.0, 1.0, 0.5]
    lines = bandwidth_lines([10**9, 10**8], SIZES, [fast, slow])
    assert [line.label for line in lines] == ["100 MB/s", "1000 MB/s"]
    assert lines[0].values.tolist() == slow and lines[0].look == BANDWIDTH_LOOKS[0]
    panels = [Panel("a", lines), Panel("b", bandwidth_lines([10**8], SIZES, [fast]))]
    with style():
        tops = {both: [axes.get_ylim() for axes in latency_figure(panels, comparable=both).axes] for both in (False, True)}
    assert tops[True][0] == tops[True][1] == pytest.approx((0, 4.2)) and tops[False][1][1] < 2.2


def test_no_two_lines_look_the_same_and_what_stands_side_by_side_differs_in_grey() -> None:
    assert set(POLICY_LOOKS) == set(POLICIES)
    assert len({look.colour for look in POLICY_LOOKS.values()}) == len(POLICY_LOOKS)
    assert len({(str(look.dash), look.marker) for look in POLICY_LOOKS.values()}) == len(POLICY_LOOKS)
    many = [bandwidth_look(place) for place in range(12)]
    assert len({(look.colour, look.marker) for look in many}) == 12
    greys = {name: np.dot((0.299, 0.587, 0.114), to_rgb(colour)) for name, colour in (OP_COLOURS | CLASS_COLOURS).items()}
    assert min(abs(greys[a] - greys[b]) for a, b in itertools.combinations(OP_COLOURS, 2)) > 0.08
    assert abs(greys["read"] - greys["write"]) > 0.3 and abs(greys["LOOP"] - greys["HOT"]) > 0.2


def test_pictures_of_lines_are_light_and_the_same_each_time() -> None:
    def made() -> Figure:
        with style():
            return ratio_figure([Panel("p", [policy_line("arc", "ARC", SIZES, [0, 0, 1])])], "y")

    once, again = (figure_bytes(made(), "svg") for _ in range(2))
    assert once == again and b"fill: #ffffff" in once  # a background of their own, which dark pages need
    with style():
        assert embedded(made(), "a", "c").form == "svg"
