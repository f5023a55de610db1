"""Figures of curves over cache size, as figures 4 and 5 of io_caching.

A line is level from each known size to the next, because a slope would suggest values that were never computed. The
functions that draw must be called in `theme.style()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import ArrayLike, NDArray

from llmcache.report.theme import MUTED, POLICY_LOOKS, Look, bandwidth_look, grid_of, legend_below, logarithmic

MANY_POINTS = 16  # with more, only some points have a marker
WIDE_RANGE = 200  # ratio of largest to smallest size above which the axis is logarithmic
UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "KB"))


@dataclass(frozen=True)
class Line:
    """A curve over cache sizes `sizes_bytes` (ascending).

    `marked`: indices of the points with a marker; None for evenly spaced ones.
    """

    label: str
    look: Look
    sizes_bytes: NDArray[np.float64]
    values: NDArray[np.float64]
    marked: tuple[int, ...] | None = None

    def filled(self, sizes_bytes: NDArray[np.float64], values: NDArray[np.float64]) -> Line:
        between = (sizes_bytes > self.sizes_bytes[0]) & (sizes_bytes < self.sizes_bytes[-1])
        sizes = np.concatenate((self.sizes_bytes, sizes_bytes[between]))
        order = np.argsort(sizes, kind="stable")
        marked = tuple(np.flatnonzero(order < len(self.values)).tolist())
        return replace(
            self, sizes_bytes=sizes[order], values=np.concatenate((self.values, values[between]))[order], marked=marked
        )


@dataclass(frozen=True)
class Panel:
    """Axes with the lines of one trace. `marks`: sizes in bytes with a name. `linear`: never use a logarithmic axis of
    sizes.
    """

    title: str
    lines: Sequence[Line]
    marks: Sequence[tuple[float, str]] = ()
    linear: bool = False


def policy_line(policy: str, title: str, sizes_bytes: ArrayLike, values: ArrayLike) -> Line:
    return Line(title, POLICY_LOOKS[policy], np.asarray(sizes_bytes, float), np.asarray(values, float))


def bandwidth_lines(bandwidths: Sequence[int], sizes_bytes: ArrayLike, latencies_s: Sequence[ArrayLike]) -> list[Line]:
    """Return a curve for each of `bandwidths` (bytes/s), slowest first."""
    sizes = np.asarray(sizes_bytes, float)
    by_speed = sorted(zip(bandwidths, latencies_s, strict=True), key=lambda item: item[0])
    return [
        Line(f"{bandwidth / 1e6:g} MB/s", bandwidth_look(place), sizes, np.asarray(values, float))
        for place, (bandwidth, values) in enumerate(by_speed)
    ]


def ratio_figure(panels: Sequence[Panel], ylabel: str) -> Figure:
    """Draw ratios (0..1), a panel for each trace."""
    figure, axes = grid_of(len(panels))
    for place, panel in zip(axes, panels, strict=True):
        _draw(place, panel)
        place.set_ylim(-0.02, 1.02)
        place.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        place.set_ylabel(ylabel)
    legend_below(figure, axes)
    return figure


def latency_figure(panels: Sequence[Panel], comparable: bool = False) -> Figure:
    """Draw latencies (s), a panel for each trace. `comparable`: all panels share one scale."""
    figure, axes = grid_of(len(panels))
    longest = max(float(line.values.max()) for panel in panels for line in panel.lines)
    for place, panel in zip(axes, panels, strict=True):
        _draw(place, panel)
        place.set_ylim(bottom=0, top=1.05 * longest if comparable and longest else None)
        place.set_ylabel("fetch latency (s, modelled)")
    legend_below(figure, axes)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    largest = max(float(line.sizes_bytes[-1]) for line in panel.lines)
    smallest = min(float(line.sizes_bytes[line.sizes_bytes > 0].min()) for line in panel.lines)
    factor, unit = next(((f, name) for f, name in UNITS if largest >= f), UNITS[-1])
    for order, line in enumerate(panel.lines):
        every = max(1, len(line.values) // MANY_POINTS)
        # Markers of different lines are at different points, so that overlapping lines stay distinct.
        marked = (order % every, every) if line.marked is None else list(line.marked)
        look = {"drawstyle": "steps-post", "markevery": marked, **line.look.line()}
        axes.plot(line.sizes_bytes / factor, line.values, label=line.label, **look)
    falls = panel.lines[0].values[-1] < panel.lines[0].values[0]
    for size, name in panel.marks:
        axes.axvline(size / factor, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
        axes.annotate(
            name,
            (size / factor, 1 if falls else 0),  # away from the ends of the lines
            xycoords=("data", "axes fraction"),
            xytext=(-3, -4 if falls else 4),
            textcoords="offset points",
            ha="right",
            va="top" if falls else "bottom",
            rotation=90,
            fontsize=7.5,
            color=MUTED,
        )
    if largest / smallest > WIDE_RANGE and not panel.linear:
        logarithmic(axes, "x")
    else:
        axes.set_xlim(left=0)
    axes.set(title=panel.title, xlabel=f"cache size ({unit})")
