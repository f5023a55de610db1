"""Pictures like icecache's figures 8 and 1: time of a token, and memory, over the context; *measured here*."""

from __future__ import annotations

from matplotlib.figure import Figure

from llmcache.report import theme
from llmcache.report.kv_task_figures import look_of
from llmcache.report.reproduce.icecache.times import Rows


def growth_figure(rows: Rows) -> Figure:
    """Returns time of a token and memory over the context, a line for each cache."""
    contexts = sorted({row.tokens for row in rows})
    with theme.style():
        figure, axes = theme.grid_of(2)
        for policy in dict.fromkeys(row.policy for row in rows):
            own = sorted((row for row in rows if row.policy == policy), key=lambda row: row.tokens)
            line = look_of(policy).line() | ({"linestyle": ":"} if "-" in policy else {})
            tokens = [row.tokens for row in own]
            axes[0].plot(tokens, [row.speed.tpot_ns / 1e6 for row in own], label=own[0].title, **line)
            sizes = [(row.memory.kv_bytes + row.memory.index_bytes) / (1 << 20) for row in own]
            axes[1].plot(tokens, sizes, label=own[0].title, **line)
        for place, label, title in zip(
            axes, ("time per token (ms)", "MiB"), ("Time of a token", "Keys, values and index in memory"), strict=True
        ):
            place.set_xscale("log", base=2)
            place.set_xticks(contexts, [f"{context:,}" for context in contexts])
            place.minorticks_off()
            place.set_ylim(bottom=0)
            place.set_xlabel("context (tokens)")
            place.set_ylabel(label)
            place.set_title(title)
        theme.legend_below(figure, axes)
    return figure
