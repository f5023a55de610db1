"""HTML pages: every block escapes its input and loads nothing; the page of `llmcache simulate --report` and its curves."""

from __future__ import annotations

import base64
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from llmcache.cache.plan import plan_of
from llmcache.cache.results import Simulation
from llmcache.cache.simulate import simulate_all
from llmcache.report import theme
from llmcache.report.html import Badge, Facts, Fold, HtmlBlock, Picture, Section, Table, Text, html_page
from llmcache.report.simulate_page import report_page
from llmcache.trace.record import Provenance
from tests.unit.report_parts import Page, check_alone
from tests.unit.report_parts import unlaid as unlaid
from tests.unit.simulation_parts import loop, saved, trace_of

pytestmark = pytest.mark.usefixtures("unlaid")

EVIL = "<script>alert('1')</script> & \"two\"\n\x1b"
SHOWN = "<script>alert('1')</script> & \"two\"\\n\\x1b"


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


# `llmcache simulate --report`


@pytest.fixture
def simulation(tmp_path: Path) -> Simulation:
    one = saved(trace_of(loop(200, 5, 16) + loop(20, 3, 5, op=1)), tmp_path, "one <b>.parquet")
    two = saved(trace_of(loop(50, 9, 5), provenance=Provenance("mount", lost_events=4)), tmp_path, "two.parquet")
    return simulate_all([one, two], plan_of("lru,llmcache", "10%,50%,100%", "100,1000", "0.01", True, "50us"), jobs=2)


def texts_of(page: Page) -> list[list[str]]:
    """Return the texts of each SVG on the page."""
    found = []
    for image in page.images:
        form, _, data = str(image["src"]).partition(";base64,")
        assert form == "data:image/svg+xml"
        found.append([text for text in ET.fromstring(base64.b64decode(data)).itertext() if text.strip()])
    return found


@pytest.mark.parametrize(("values", "label"), [((1.2, 4.5), "3"), ((0.003, 7e6), "1000"), ((4, 70), "20")])
def test_ticks_of_logarithmic_axes_are_plain_numbers(values: tuple[float, float], label: str) -> None:
    """Minor ticks have labels too if the values span less than about a decade."""
    with theme.style():
        figure, (panel,) = theme.grid_of(1)
        panel.plot(values, values)
        theme.logarithmic(panel, "xy")
    ticks = [
        element.text for element in ET.fromstring(theme.figure_bytes(figure, "svg")).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert label in ticks and not any("$" in (tick or "") for tick in ticks), ticks


def test_a_page_has_figures_and_rows_of_every_trace(simulation: Simulation) -> None:
    source = report_page(simulation)
    page = Page(source)
    check_alone(page, source)
    assert page.tags["h1"] == 1 and page.tags["h2"] == 3 and page.tags["figcaption"] == 6
    assert "one <b>.parquet" in page.text and not page.tags["b"]
    assert "(source: synthetic)" in page.text and "(source: mount, 4 accesses lost)" in page.text
    one_hits, one_latency, one_curve, two_hits, *_ = texts_of(page)
    assert all({"LRU", "llmcache"} <= set(texts) for texts in (one_hits, two_hits)) and "LRU" in one_curve
    assert {"Fetch latency, LRU", "Fetch latency, llmcache", "100 MB/s", "1000 MB/s"} <= set(one_latency)
    assert "fetch latency (s, modelled)" in one_latency and "(s, modelled)" in page.text
    row = next(row for row in simulation.results if row.policy == "llmcache" and row.cache_blocks == 100)
    assert all(f"{value:,.3f}" in page.text for value in (row.hit_ratio, row.latencies[1].latency_s))


def test_the_smallest_simulation_has_a_page(tmp_path: Path) -> None:
    path = saved(trace_of([(0, 0, 1, 1)]), tmp_path)
    page = Page(report_page(simulate_all([path], plan_of("lru", "auto", None, None, True))))
    assert page.tags["img"] == 3 and "no reads" in page.text


def test_hit_curves_are_steps_at_the_size_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
