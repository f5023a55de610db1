"""What `llmcache edram plot` does: pictures of a saved model or sweep, as a page, or one of them as PNG or SVG."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from llmcache.errors import UsageError
from llmcache.report.edram_figures import (
    AXES,
    energy_figure,
    lines_left_out,
    ratio_bars,
    refresh_figure,
    roofline_figure,
    sweep_figure,
    varied_most,
)
from llmcache.report.edram_saved import Row, Saved, read
from llmcache.report.edram_text import percent
from llmcache.report.files import Written, check_target, write_target
from llmcache.report.html import Section, html_page
from llmcache.report.theme import embedded, figure_bytes, style

OPTION = "-o"
FORMS = ("png", "svg", "html")
LEAD = (
    "Modelled: latency and energy of an accelerator that exists on paper only, from the constants of the Kelle paper and of "
    "the profile that is named; nothing is measured, and nothing is fitted to the paper's results."
)


@dataclass(frozen=True)
class Wanted:
    """What is asked for. `what`: the picture, where the form is no page; None: the first that there is."""

    source: str
    output: str
    what: str | None = None
    force: bool = False


@dataclass(frozen=True)
class Drawing:
    """A picture that a document offers: how it is called, how it is drawn, and what can be read from it."""

    title: str
    draw: Callable[[], Figure]
    alt: str


def plot(wanted: Wanted) -> Written:
    """Draw what is `wanted`, and return the file.

    UsageError for an ending that is no form, an unknown picture, a file that exists.
    """
    form = Path(wanted.output).suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UsageError(f"{OPTION}: '{wanted.output}' must end in .png, .svg or .html", "the ending says what is written")
    check_target(OPTION, wanted.output, wanted.force)
    found = read(wanted.source)
    offered = drawings(found)
    chosen = wanted.what or next(iter(offered))
    if chosen not in offered:
        raise UsageError(f"--what: there is no picture '{chosen}' of this document", f"one of: {', '.join(offered)}")
    if form == "html":
        data = page(found, offered).encode()
    else:
        _warn(found)
        with style():
            data = figure_bytes(offered[chosen].draw(), form)
    return write_target(OPTION, wanted.output, data, wanted.force)


def _warn(found: Saved) -> None:
    """Says on stderr what a picture without a caption leaves out."""
    if found.is_sweep and (left_out := lines_left_out(found.rows)):
        print(f"llmcache: {left_out:,} are not drawn: sweep less at a time", file=sys.stderr)


def drawings(found: Saved) -> dict[str, Drawing]:
    """Returns the pictures that `found` has the data for, by name."""
    rows, baseline = found.rows, found.baseline
    if found.is_sweep:
        along = varied_most(rows)
        title = "Speed-up and efficiency" + (f" over {AXES[along]}" if along else "")
        return {"sweep": Drawing(title, lambda: sweep_figure(rows, baseline), _told(rows[:8]))}
    offered = {
        "energy": Drawing("Energy by component", lambda: energy_figure(rows), _told(rows)),
        "speedup": Drawing("Speed-up and energy efficiency", lambda: ratio_bars(rows, baseline), _told(rows)),
    }
    if refreshed := [row for row in rows if row.mean_interval_ns is not None]:
        shares = "; ".join(f"{row.system}, {row.profile} {percent(row['refresh_share'])}" for row in refreshed)
        offered["refresh"] = Drawing("Share of refresh", lambda: refresh_figure(rows), f"Refresh of all energy: {shares}.")
    if found.roofs:
        points = "; ".join(
            f"{roof.system}, {name}: {rate / 1e9:.0f} G/s at {place:.3g} operations per byte"
            for roof in found.roofs
            for name, place, rate in roof.points
        )
        offered["roofline"] = Drawing("Roofline of the last decode step", lambda: roofline_figure(found.roofs), points)
    return offered


def page(found: Saved, offered: dict[str, Drawing]) -> str:
    """Returns all pictures as one HTML page."""
    first = found.rows[0]
    work = f"context {first['context']:,.0f}, decode {first['decode']:,.0f}, batch {first['batch']:g}"
    caption = f"Modelled. {_conditions(found, f'{first.model}, {first.workload}: {work}')}"
    sections = []
    for drawing in offered.values():
        with style():
            sections.append(Section(drawing.title, [embedded(drawing.draw(), drawing.alt, caption)]))
    return html_page("llmcache edram: the accelerator model", LEAD, sections)


def _conditions(found: Saved, told: str) -> str:
    profiles = ", ".join(dict.fromkeys(row.profile for row in found.rows))
    which = f"{len(found.rows):,} configurations" if found.is_sweep else told
    left_out = lines_left_out(found.rows) if found.is_sweep else 0
    more = f" {left_out:,} more are not drawn: sweep less at a time." if left_out else ""
    return f"{which}; profiles: {profiles}; against {found.baseline}.{more}"


def _told(rows: Sequence[Row]) -> str:
    return "; ".join(
        f"{row.system}, {row.profile}: speed-up {row['speedup']:.2f}, efficiency {row['efficiency']:.2f}" for row in rows
    )
