"""A decode step as a Gantt chart: which resource did what when, a panel for each policy of a saved benchmark."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from llmcache.errors import DataError
from llmcache.kv.bench.results import Bench, Row
from llmcache.kv.pipeline.timeline import RESOURCES, STAGES, Span, Timeline
from llmcache.report import theme
from llmcache.report.kv_bench import kind_of

STAGE_COLOURS: dict[str, str] = {"evaluate": "#e69f00", "fetch": "#56b4e9", "compute": "#0072b2", "update": "#cc79a7"}
"""From Okabe and Ito; also apart in grey."""

_HEIGHT = 0.72  # of a bar, where resources are 1 apart
_NS_PER_MS = 1e6


def timeline_figure(bench: Bench, source: str) -> Figure:
    """Returns a panel for each policy, all to one scale; DataError if `bench` has no timelines (modelled ones have none)."""
    shown = [(row, Timeline.from_json(dict(row.observed.timeline))) for row in bench.rows if row.observed is not None]
    if not shown:
        raise DataError(f"{source}: rows: {bench.kind} ones have no timeline", "draw a run of '--profile measured'")
    with theme.style():
        figure = Figure(figsize=(9.0, 0.9 + 1.75 * len(shown)), layout="constrained")
        longest = max(_end(timeline) for _, timeline in shown)
        panels: list[Axes] = []
        for place, (row, timeline) in enumerate(shown):
            panel = figure.add_subplot(len(shown), 1, place + 1, sharex=panels[0] if panels else None)
            _draw(panel, row, timeline)
            panels.append(panel)
        for panel in panels:
            panel.label_outer()
        panels[-1].set_xlim(0, longest * 1.01)
        panels[-1].set_xlabel(f"time of one decode step (ms, {kind_of(bench)})")
        handles = [Patch(color=STAGE_COLOURS[stage], label=stage) for stage in STAGES]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    return figure


def _end(timeline: Timeline) -> float:
    return max((span.end_ns for span in timeline.spans), default=1) / _NS_PER_MS


def _draw(panel: Axes, row: Row, timeline: Timeline) -> None:
    for resource_place, resource in enumerate(RESOURCES):
        for stage in STAGES:
            bars = [_bar(span) for span in timeline.spans if (span.resource, span.stage) == (resource, stage)]
            panel.broken_barh(bars, (resource_place - _HEIGHT / 2, _HEIGHT), color=STAGE_COLOURS[stage], linewidth=0)
    names = [f"{name} (emulated)" if name in timeline.emulated else name for name in RESOURCES]
    panel.set_yticks(range(len(RESOURCES)), names)
    panel.set_ylim(len(RESOURCES) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
    panel.set_title(f"{row.title}: {row.idle_share:.0%} of the time nothing computes")


def _bar(span: Span) -> tuple[float, float]:
    return span.begin_ns / _NS_PER_MS, (span.end_ns - span.begin_ns) / _NS_PER_MS


def alt_text(bench: Bench) -> str:
    """Returns in words what the chart shows."""
    parts = [f"{row.title}: idle {row.idle_share:.0%}" for row in bench.rows if row.observed is not None]
    return f"Gantt chart of one decode step by resource ({', '.join(RESOURCES)}). " + "; ".join(parts) + "."
