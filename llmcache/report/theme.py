"""The style of all figures: one color, dash and marker per policy and per class.

The colors are from palettes for color-blind readers (Okabe and Ito; Tol). No two policies share dash and marker, so they are
distinct without color.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from llmcache.report.html import Picture

INK = "#1b1d21"
"""Text, axes and LRU."""
FAINT = "#d9dce1"
"""Grid lines and frames."""
PAPER = "#ffffff"
MUTED = "#5c636d"
"""Captions and notes inside figures."""

PAGE_DOTS_PER_INCH = 150
LETTERS_PER_INCH = 17  # of a caption inside a figure
LEGEND_INCHES = 1.35  # width of a legend entry

Dash = str | tuple[int, tuple[float, ...]]


@dataclass(frozen=True)
class Look:
    """A line: color (#rrggbb), dash and marker as in matplotlib, width in points."""

    colour: str
    dash: Dash = "-"
    marker: str = "o"
    width: float = 1.6
    front: int = 2

    def line(self) -> dict[str, Any]:
        shape = {"color": self.colour, "linestyle": self.dash, "marker": self.marker, "linewidth": self.width}
        return shape | {"markersize": 4.5, "markeredgewidth": 0.8, "markeredgecolor": PAPER, "zorder": self.front}


POLICY_LOOKS: dict[str, Look] = {
    "lru": Look(INK, "-", "s", 1.8, 4),
    "clock": Look("#8a8a2e", (0, (1, 1)), "p"),
    "lfu": Look("#cc79a7", (0, (4, 1)), "v"),
    "2q": Look("#117733", (0, (6, 2)), "<"),
    "arc": Look("#009e73", (0, (3, 1, 1, 1)), ">"),
    "sieve": Look("#e69f00", (0, (5, 1)), "h"),
    "s3fifo": Look("#882255", (0, (2, 1)), "8"),
    "wtinylfu": Look("#aa4499", (0, (4, 1, 1, 1, 1, 1)), "P"),
    "lirs": Look("#8c6d1f", (0, (8, 2)), "d"),
    "lecar": Look("#d55e00", (0, (5, 1.5)), "^", 1.8, 5),
    "belady": Look("#8b9099", (0, (1, 1.2)), "", 2.2, 3),
    "algorithm1": Look("#56b4e9", (0, (7, 1.5, 1.5, 1.5)), "D", 2.0, 6),
    "llmcache": Look("#0072b2", "-", "o", 2.4, 7),
}

KV_LOOKS: dict[str, Look] = {
    "stock": Look("#8b9099", (0, (1, 1.2)), "x", 2.0, 3),
    "full": Look(INK, "-", "s", 1.8),
    "h2o": Look("#d55e00", (0, (5, 1.5)), "^", 1.8),
    "prefetch": Look("#cc79a7", (0, (3, 1, 1, 1)), "v", 1.8),
    "leoam": Look("#009e73", (0, (1, 1)), "D", 1.8),
    "hillinfer": Look("#0072b2", "-", "o", 2.4, 5),
    "mass": Look("#117733", "-", "*", 2.4, 7),
    "oracle": Look("#5c636d", (0, (1, 3)), "h", 1.8),
    "icecache": Look("#56b4e9", "-", "P", 2.4, 6),
    "quest": Look("#e69f00", (0, (4, 1)), "p", 1.8),
    "window": Look("#882255", (0, (2, 1)), "<", 1.8),
    "kelle": Look("#332288", (0, (8, 2)), ">", 1.8),
}
"""KV eviction policies; "stock" is transformers' own cache."""

CLASS_COLOURS: dict[str, str] = {"SEQ": "#b4bac2", "LOOP": "#8e44a0", "HOT": "#e3b505"}
"""Sequential, loop and hot, the classes of the paper's figure 1."""

OP_COLOURS: dict[str, str] = {"read": "#084c8d", "write": "#f08a3c", "map": "#1b9e77"}
"""Accesses by operation (`map`: a page fault of a mapping); dark, light and mid in gray."""

BANDWIDTH_LOOKS: tuple[Look, ...] = (
    Look("#3b0f70", "-", "o", 2.0),
    Look("#b5367a", (0, (5, 1)), "s", 1.8),
    Look("#e8703a", (0, (3, 1, 1, 1)), "^", 1.8),
    Look("#d9a514", (0, (1, 1)), "D", 1.8),
    Look("#5c636d", (0, (8, 2)), "v", 1.6),
)
"""Slow to fast storage, dark to light."""

_RC = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9.0,
    "text.parse_math": False,  # a path may contain two dollar signs
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",  # text stays text: small and searchable
    "svg.hashsalt": "llmcache",  # the same data gives the same bytes
}


def style() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws in this style."""
    return mpl.rc_context(_RC)


def bandwidth_look(place: int) -> Look:
    """Return a look (slowest: 0); colors repeat after five, with other markers."""
    turn, number = divmod(place, len(BANDWIDTH_LOOKS))
    return replace(BANDWIDTH_LOOKS[number], marker=BANDWIDTH_LOOKS[(number + turn) % len(BANDWIDTH_LOOKS)].marker)


def grid_of(count: int, columns: int = 2) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels. Call it in `style()`."""
    columns = min(columns, count)
    rows = -(-count // columns)
    width, height = (8.0, 4.2) if columns == 1 else (5.4, 3.3)  # inches of a panel
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    return figure, axes


def powers_of_2(panel: Axes, values: Sequence[float], labels: Iterable[str], label: str) -> None:
    """Make the x axis logarithmic (base 2), with a labelled tick at each of `values`."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(values, list(labels))
    panel.minorticks_off()
    panel.set_xlabel(label)


class PlainLog(LogFormatter):
    """Plain numbers on logarithmic axes, because the style disables mathematical text."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def logarithmic(panel: Axes, axes: str) -> None:
    """Make the axes named in `axes` ("x", "y" or "xy") logarithmic."""
    for name in axes:
        (panel.set_xscale if name == "x" else panel.set_yscale)("log")
        axis = panel.xaxis if name == "x" else panel.yaxis
        axis.set_major_formatter(PlainLog())
        # in decades; on shorter axes, ticks between powers have labels
        axis.set_minor_formatter(PlainLog(minor_thresholds=(2, 0.4)))


Curve = tuple[Look, dict[float, float]]
"""A line, or single marks: its look, and its values by place."""


def curves_figure(
    panels: Mapping[str, Mapping[str, Curve]], along: str, ylabel: str, doubling: bool = False, log: bool = False
) -> Figure:
    """Return a panel for each title. Call it in `style()`.

    `doubling`: places double from one to the next. `log`: the y axis is logarithmic.
    """
    figure, axes = grid_of(len(panels))
    for panel, (title, curves) in zip(axes, panels.items(), strict=True):
        for label, (look, values) in curves.items():
            panel.plot(list(values), list(values.values()), label=label, **look.line())
        places = sorted({place for _, values in curves.values() for place in values})
        if doubling:
            powers_of_2(panel, places, map("{:,.12g}".format, places), along)
        if log:
            logarithmic(panel, "y")
        panel.set(title=title, xlabel=along, ylabel=ylabel, **({} if log else {"ylim": (0, None)}))
    legend_below(figure, axes)
    return figure


def legend_below(figure: Figure, axes: Iterable[Axes], long: bool = False) -> None:
    """Put one legend under all panels. `long`: size columns by the longest label; otherwise by `LEGEND_INCHES`."""
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        inches = 0.6 + 0.075 * max(map(len, handles)) if long else LEGEND_INCHES
        columns = min(len(handles), max(1, int(figure.get_figwidth() / inches)))
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)


def figure_bytes(figure: Figure, form: str, dots_per_inch: int = 130) -> bytes:
    """Return `figure` without a date: the same data, the same bytes."""
    target = io.BytesIO()
    with style(), warnings.catch_warnings():
        # Paths may contain letters that no font here has; figures show a box, and tables of pages show them.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        metadata: Mapping[str, str | None] = {"Date": None, "Creator": "llmcache"} if form == "svg" else {}
        figure.savefig(target, format=form, dpi=dots_per_inch, metadata=dict(metadata))
    return target.getvalue()


def embedded(figure: Figure, alt: str, caption: str) -> Picture:
    """Return lines as SVG, which scales, figures with images as PNG."""
    form = "png" if any(axes.images for axes in figure.axes) else "svg"
    return Picture(figure_bytes(figure, form, PAGE_DOTS_PER_INCH), form, alt, caption)


def captioned(figure: Figure, caption: str, form: str) -> bytes:
    lines = textwrap.wrap(caption, int(figure.get_figwidth() * LETTERS_PER_INCH))
    with style():
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color=MUTED)
    return figure_bytes(figure, form)
