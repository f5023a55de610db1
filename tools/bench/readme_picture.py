"""docs/tokens.svg: tokens per second over the share of a model that fits in memory, of page cache and llmcachefs.

The dense panel is of case (f) of `tools/bench mount`, and of case (a), whose storage is limited, in open markers; the panel
of mixtures is of case (g), and there only if that is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from llmcache.report.theme import INK, MUTED, Look, figure_bytes, grid_of, legend_below, style

from .mount import Result, kernel, mean, mounts, seconds

Document = dict[str, Any]
KERNEL = "page cache"
LIMIT_BPS = 500_000_000  # of the rates that are measured, the one that is drawn
LOOKS = {
    KERNEL: Look(INK, "-", "s", 1.8),
    "inplace": Look("#0072b2", "-", "o", 2.4, 5),
    "steer": Look("#d55e00", "-", "^", 1.8),
}
NAMES = {KERNEL: KERNEL, "inplace": "llmcachefs, in place", "steer": "llmcachefs, steer"}


class SpeedCurve(NamedTuple):
    """What one side did, storage `limited` or not: shares of the model in memory, and tokens per second at each."""

    side: str
    limited: bool
    shares: list[float]
    tokens_per_s: list[float]


def dense(document: Document) -> list[SpeedCurve]:
    """Lines of the dense model, run by llama.cpp; medians."""
    of_llama = [one for one in document["results"] if one["case"] in "af" and one["name"].startswith("llama.cpp")]
    return list(_lines(of_llama, seconds))


def mixture(document: Document) -> list[SpeedCurve]:
    """Lines of the first mixture that is read by a generated routing; means, as tokens use different experts."""
    routed = [one for one in document["results"] if one["case"] == "g" and not one["name"].startswith("llama.cpp")]
    return list(_lines([one for one in routed if one["file"] == routed[0]["file"]], mean))


def _lines(results: list[Result], time_of: Callable[[Result, str], float]) -> Iterator[SpeedCurve]:
    for rate in (None, LIMIT_BPS):
        each = sorted((one for one in results if one["read_bps"] == rate), key=_share)
        for side in (KERNEL, *mounts(each[0])) if each else ():
            times = [time_of(one, kernel(one, time_of) if side == KERNEL else side) for one in each]
            yield SpeedCurve(side, rate is not None, [_share(one) for one in each], [1 / each_s for each_s in times])


def _share(result: Result) -> float:
    return float(result["cache_bytes"] / result["loop_bytes"])


def caption(document: Document) -> str:
    """What the picture shows, and what it cannot show yet."""
    first = next(one for one in document["results"] if one["case"] == "f")
    limited = f"storage at full speed, or limited to {LIMIT_BPS / 1e6:.0f} MB/s (open markers)"
    model = f"llama.cpp with {first['loop_bytes'] / 1e6:.0f} MB of weights"
    shown = f"{model}; {limited}; all sides have the same memory and storage"
    missing = "No mixture of experts is recorded yet; its panel will stand beside this one"
    return shown if mixture(document) else f"{shown}. {missing}"


def drawn(document: Document) -> str:
    """Returns the picture as SVG; the same results give the same text."""
    panels = [("Dense model, llama.cpp", dense(document))]
    if mixture(document):
        panels.append(("Mixture of experts, generated routing", mixture(document)))
    with style():
        figure, axes = grid_of(len(panels))
        for panel, (title, lines) in zip(axes, panels, strict=True):
            _draw(panel, title, lines)
        legend_below(figure, axes)
    return figure_bytes(figure, "svg").decode()


def _draw(panel: Axes, title: str, lines: list[SpeedCurve]) -> None:
    for line in lines:
        look = LOOKS[line.side].line()
        if line.limited:
            look |= {"linestyle": ":", "markerfacecolor": "none", "markeredgecolor": look["color"]}
        panel.plot(line.shares, line.tokens_per_s, label=None if line.limited else NAMES[line.side], **look)
        if line.limited and line.side == KERNEL:
            place = (line.shares[-1], line.tokens_per_s[-1])
            text = f"{LIMIT_BPS / 1e6:.0f} MB/s"
            panel.annotate(text, place, (8, -3), textcoords="offset points", color=MUTED, fontsize=8)
    panel.set(title=title, xlabel="share of the model's loop that fits in memory", ylabel="tokens per second", yscale="log")
    panel.xaxis.set_major_formatter(PercentFormatter(1))
    panel.yaxis.set_major_formatter("{x:g}")
