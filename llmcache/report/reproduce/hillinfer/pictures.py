"""Pictures like hillinfer's figures 2, 3, 9, 10 and 11b, from our numbers; what the paper says is drawn apart, as marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmcache.kv.planning import SYSTEMS
from llmcache.report.reproduce.hillinfer.figure2 import BATCH, CONTEXT, GIB, GPU_GB, PC_GB, SAID, Memory
from llmcache.report.reproduce.hillinfer.figure3 import Transfers
from llmcache.report.reproduce.hillinfer.figure10 import LEAST, MOST, OUTPUT_TOKENS
from llmcache.report.reproduce.hillinfer.figure11 import STEPS, Sweep
from llmcache.report.reproduce.hillinfer.readings import BASELINES, Point
from llmcache.report.theme import FAINT, KV_LOOKS, MUTED, Look, grid_of, legend_below

SYSTEM_LOOKS = {name: KV_LOOKS[name] for name in ("full", "h2o", "prefetch", "leoam", "hillinfer")}
_BESIDE = (-0.24, -0.08, 0.08, 0.24)
"""Where the four baselines stand beside each other, so that none hides another."""
_TWO = (Look("#0072b2", "-", "o", 2.2), Look("#d55e00", (0, (5, 1)), "s", 2.0))


def memory_figure(data: Memory) -> Figure:
    """Returns figure 2: GiB over context and over batch, the paper's numbers as crosses. Call it in `theme.style()`."""
    figure, axes = grid_of(2)
    panels = (
        (data.by_context, f"batch {BATCH}", "context (tokens)", CONTEXT),
        (data.by_batch, f"context {CONTEXT:,}", "batch", BATCH),
    )
    for place, (rows, title, label, said_at) in zip(axes, panels, strict=True):
        for look, (model, row) in zip(_TWO, rows.items(), strict=True):
            place.plot(list(row), [use.total / GIB for use in row.values()], label=model, **look.line())
            place.plot(
                [said_at],
                [SAID[model]],
                "x",
                color=look.colour,
                markersize=9,
                markeredgewidth=2,
                label=f"{model}: the paper",
            )
        for limit, name in ((GPU_GB, "RTX 4090"), (PC_GB, "a typical PC, all memory")):
            _level(place, limit, name)
        place.set_xscale("log", base=2)
        place.set_xticks(list(next(iter(rows.values()))), [f"{value:,}" for value in next(iter(rows.values()))])
        place.set_ylim(bottom=0)
        place.set_xlabel(label)
        place.set_ylabel("memory, modelled (GiB)")
        place.set_title(title)
    legend_below(figure, axes)
    return figure


def _level(place: Axes, value: float, name: str) -> None:
    place.axhline(value, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    place.annotate(
        f"{name}: {value} GB",
        (0, value),
        xycoords=("axes fraction", "data"),
        xytext=(3, 3),
        textcoords="offset points",
        fontsize=7.5,
        color=MUTED,
    )


def transfer_figure(found: Sequence[Transfers]) -> Figure:
    """Returns figure 3a, one panel for each of `found`: seconds over context. Call it in `theme.style()`."""
    figure, axes = grid_of(len(found))
    for place, data in zip(axes, found, strict=True):
        for look, (share, row) in zip(_TWO, data.seconds.items(), strict=True):
            place.plot(list(row), list(row.values()), label=f"{share:.0%} of the KV cache", **look.line())
        contexts = list(next(iter(data.seconds.values())))
        place.set_xticks(contexts, [f"{context // 1024} K" for context in contexts])
        place.set_ylim(bottom=0)
        place.set_xlabel("context (tokens)")
        place.set_ylabel(f"seconds, {data.kind}")
        place.set_title(f"{data.kind}: {'one layer' if data.layers == 1 else f'{data.layers} layers'}")
    legend_below(figure, axes)
    return figure


def speedup_figure(points: Mapping[str, Sequence[Point]], titles: Mapping[str, str]) -> Figure:
    """Returns figure 10: speed-ups end to end at every point, one panel a reading. Call it in `theme.style()`."""
    figure, axes = grid_of(len(points))
    for place, (name, found) in zip(axes, points.items(), strict=True):
        place.axhspan(LEAST, MOST, color=FAINT, zorder=0, label=f"the paper: {LEAST} to {MOST}x")
        place.axhline(1, color=MUTED, linewidth=0.8, zorder=1)
        for shift, baseline in zip(_BESIDE, BASELINES, strict=True):
            values = [point.speedup(baseline, OUTPUT_TOKENS) for point in found]
            line = SYSTEM_LOOKS[baseline].line() | {"linestyle": "none", "markersize": 6.5}
            places = [number + shift for number in range(len(found))]
            place.plot(places, values, label=f"over {SYSTEMS[baseline].title}", **line)
        place.set_yscale("log", base=2)
        place.set_yticks([0.25, 0.5, 1, 2, 4, 8, 16], ["0.25", "0.5", "1", "2", "4", "8", "16"])
        place.minorticks_off()
        place.set_xticks(range(len(found)), [_name(point) for point in found], rotation=60, ha="right", fontsize=7.5)
        place.set_ylabel("HillInfer's speed-up, modelled")
        place.set_title(titles[name])
    legend_below(figure, axes)
    return figure


def _name(point: Point) -> str:
    return f"{point.model} {point.context // 1024} K"


def latency_figure(points: Mapping[str, Sequence[Point]], titles: Mapping[str, str], model: str) -> Figure:
    """Returns figure 9 for one model: seconds per token over context, one panel a reading. Call it in `theme.style()`."""
    figure, axes = grid_of(len(points))
    for place, (name, found) in zip(axes, points.items(), strict=True):
        own = [point for point in found if point.model == model]
        contexts = [point.context for point in own]
        for system, look in SYSTEM_LOOKS.items():
            values = [point.latencies[system].token_ns / 1e9 for point in own]
            place.plot(contexts, values, label=SYSTEMS[system].title, **look.line())
        place.set_xscale("log", base=2)
        place.set_yscale("log")
        place.set_xticks(contexts, [f"{context // 1024} K" for context in contexts])
        place.minorticks_off()
        place.set_xlabel("context (tokens)")
        place.set_ylabel(f"s per decode step, {model}, modelled")
        place.set_title(titles[name])
        place.yaxis.set_major_formatter("{x:g}")
    legend_below(figure, axes)
    return figure


def sweep_figure(data: Sweep) -> Figure:
    """Returns figure 11b: ms per token over beta, in multiples of fc / fs. Call it in `theme.style()`."""
    figure, (place,) = grid_of(1)
    for look, (name, times) in zip(_TWO, data.token_ns.items(), strict=True):
        place.plot(list(STEPS), [time / 1e6 for time in times], label=name, **look.line())
    place.axvline(1, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    place.set_xscale("log", base=2)
    place.set_xticks(list(STEPS), [f"{step:g}" for step in STEPS])
    place.minorticks_off()
    place.set_ylim(bottom=0)
    place.set_xlabel(f"beta, in multiples of fc/fs ({data.rule:.3g})")
    place.set_ylabel("ms per decode step, modelled")
    place.set_title("Qwen-7B, 8 K: latency by the ratio of the pools")
    legend_below(figure, [place])
    return figure
