"""Output of `llmcache kv bench --task`: a table, JSON, a figure or a page.

The figures follow icecache's figures 1, 6, 7 and 8; all values are *measured* on the machine of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import PercentFormatter
from rich.table import Table

from llmcache import __version__
from llmcache.kv.bench.results import DECODING, LOADING, PARTS, QUERY, UPDATE, TaskBench, TaskRow, mean_of
from llmcache.report import output, theme
from llmcache.report.html import Cell, Facts, Section, html_page
from llmcache.report.html import Table as PageTable
from llmcache.report.output import plain_table
from llmcache.units import format_duration, format_size

PART_COLOURS: dict[str, str] = {LOADING: "#56b4e9", QUERY: "#e69f00", UPDATE: "#cc79a7", DECODING: "#0072b2"}
"""The same as in the Gantt chart of a decode step."""
_MS, _MIB = 1e6, 1 << 20
_VARIANTS: tuple[tuple[theme.Dash, str], ...] = (((0, (1, 1.2)), "s"), ((0, (5, 1.5)), "^"), ((0, (3, 1, 1, 1)), "D"))


def look_of(policy: str) -> theme.Look:
    return theme.KV_LOOKS[policy.split("-")[0]]


def looks_of(policies: Iterable[str]) -> dict[str, theme.Look]:
    """Return looks; variants of a policy differ in dash and marker."""
    looks: dict[str, theme.Look] = {}
    for policy in dict.fromkeys(policies):
        before = sum(look_of(other).colour == look_of(policy).colour for other in looks)
        dash, marker = _VARIANTS[(before - 1) % len(_VARIANTS)]
        looks[policy] = replace(look_of(policy), dash=dash, marker=marker) if before else look_of(policy)
    return looks


def tradeoff(axes: Axes, bench: TaskBench) -> None:
    rows = bench.at(bench.contexts[-1])
    looks = looks_of(row.policy for row in rows)
    titles = {row.title for row in rows}
    for row in rows:
        look = looks[row.policy]
        at = ((row.memory.kv_bytes + row.memory.index_bytes) / _MIB, row.speed.tpot_ns / _MS)
        label = row.title if row.title in titles else None  # once per policy
        titles.discard(row.title)
        axes.scatter(*at, marker=look.marker, color=look.colour, zorder=look.front, label=label)
        text = f"{row.answers.share:.0%}" + ("" if row.budget is None else f" ({row.budget})")
        axes.annotate(text, at, xytext=(5, 3), textcoords="offset points", fontsize=6, color=look.colour)
    theme.logarithmic(axes, "x")
    axes.margins(x=0.2)
    axes.set(ylim=(0, None), xlabel="keys, values and index in memory (MiB)", ylabel="time per token (ms)")
    axes.set_title(f"Memory and time, {bench.contexts[-1]:,} tokens; right answers (budget)")
    axes.legend(fontsize=7)


def second_token(axes: Axes, bench: TaskBench) -> None:
    rows = bench.at(bench.contexts[-1])
    times = [row.speed.tt2t_ns / _MS for row in rows]
    axes.barh(range(len(rows)), times, color=[look_of(row.policy).colour for row in rows], height=0.7)
    _names(axes, rows)
    axes.set(xlabel="time to second token (ms)", title="Time to second token")


def per_token(axes: Axes, bench: TaskBench) -> None:
    full, rows = bench.stock(bench.contexts[-1]).answers.share, bench.at(bench.contexts[-1])
    left = np.zeros(len(rows))
    for part in PARTS:
        widths = np.array([row.speed.parts_ns[part] / _MS for row in rows])
        axes.barh(range(len(rows)), widths, left=left, color=PART_COLOURS[part], label=part, height=0.7)
        left += widths
    for place, row in enumerate(rows):
        text = f"{row.answers.share / full:.0%}" if full else "-"
        axes.annotate(text, (float(left[place]), place), xytext=(3, -3), textcoords="offset points", fontsize=7)
    _names(axes, rows)
    axes.set(xlabel="time per token (ms)", title="Time per token; right answers vs. full cache")
    axes.set_xlim(right=1.35 * float(left.max()))
    axes.legend(fontsize=7, loc="lower right")


def scaling(axes: Axes, bench: TaskBench) -> None:
    largest = max((row.budget for row in bench.rows if row.budget is not None), default=None)
    lines: dict[str, list[TaskRow]] = {}
    for row in sorted(bench.rows, key=lambda row: row.context):
        if row.budget in (None, largest):
            lines.setdefault(row.policy, []).append(row)
    looks = looks_of(lines)
    for policy, rows in lines.items():
        times = [row.speed.tpot_ns / _MS for row in rows]
        axes.plot([row.context for row in rows], times, label=rows[0].name, **looks[policy].line())
    theme.powers_of_2(axes, bench.contexts, map("{:,}".format, bench.contexts), "context (tokens)")
    axes.set(ylim=(0, None), ylabel="time per token (ms)", title="Time per token over context")
    axes.legend(fontsize=7)


def accuracy(axes: Axes, bench: TaskBench) -> None:
    rows = bench.at(bench.contexts[-1])
    for policy, look in looks_of(row.policy for row in rows if row.budget is not None).items():
        own = sorted((row for row in rows if row.policy == policy), key=lambda row: row.budget or 0)
        axes.errorbar(
            [row.budget or 0 for row in own],
            [row.answers.share for row in own],
            [row.answers.error for row in own],
            label=own[0].title,
            capsize=2,
            **look.line(),
        )
    full = bench.stock(bench.contexts[-1])
    axes.axhline(full.answers.share, color=look_of(full.policy).colour, linestyle=(0, (1, 1.2)), label=full.title)
    budgets = sorted({row.budget for row in rows if row.budget is not None})
    if budgets:
        theme.powers_of_2(axes, budgets, map(str, budgets), "token budget")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set(ylim=(-0.02, 1.04), xlabel="token budget", ylabel="right answers")
    axes.set_title(f"Right answers over budget ({bench.task}, {bench.contexts[-1]:,} tokens)")
    axes.legend(fontsize=7)


PANELS: dict[str, tuple[str, Callable[[Axes, TaskBench], None]]] = {
    "accuracy": ("Right answers over budget (as in table 1 of the paper)", accuracy),
    "tradeoff": ("Memory and time (as in figure 1 of the paper)", tradeoff),
    "second token": ("Time to second token (as in figure 7a of the paper)", second_token),
    "per token": ("Time per token (as in figures 7b and 7c of the paper)", per_token),
    "scaling": ("Time per token over context (as in figure 8 of the paper)", scaling),
}
"""Panels by name: the title on a page, and the function that draws it; depths are separate (see `depth_figure`)."""


def panels_of(bench: TaskBench) -> list[str]:
    return [name for name in PANELS if name != "scaling" or len(bench.contexts) > 1]


def figure_of(bench: TaskBench, panels: Sequence[str]) -> Figure:
    with theme.style():
        figure, axes = theme.grid_of(len(panels), columns=3)
        for place, name in zip(axes, panels, strict=True):
            PANELS[name][1](place, bench)
    return figure


def depth_figure(bench: TaskBench) -> Figure | None:
    """Draw right answers by depth and context (figure 6); None without depths."""
    names = list(dict.fromkeys(row.name for row in bench.rows if row.answers.depths and row.budget is not None))
    if not names:
        return None
    with theme.style():
        figure, axes = theme.grid_of(len(names), columns=3)
        for place, name in zip(axes, names, strict=True):
            image = _depths(place, [row for row in bench.rows if row.name == name])
        bar = figure.colorbar(image, ax=axes, shrink=0.6, format=PercentFormatter(1.0, decimals=0))
        bar.set_label("right answers")
    return figure


def _depths(axes: Axes, rows: Sequence[TaskRow]) -> AxesImage:
    rows = sorted(rows, key=lambda row: row.context)
    found = [row.answers.by_depth() for row in rows]
    depths = sorted({depth for one in found for depth in one})
    table = np.array([[one.get(depth, np.nan) for depth in depths] for one in found])
    axes.grid(visible=False)
    image = axes.imshow(table, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    axes.set_xticks(range(0, len(depths), 4), [f"{depth:.0%}" for depth in depths[::4]])
    axes.set_yticks(range(len(rows)), [f"{row.context:,}" for row in rows])
    axes.set(xlabel="depth of the answer", ylabel="context (tokens)", title=rows[0].name)
    return image


def _names(axes: Axes, rows: Sequence[TaskRow]) -> None:
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


LEAD = (
    "A real model answers questions about long contexts with the cache of transformers and with spilling caches. All values "
    "are measured on the machine named below. No computational SSD is used."
)


def show(bench: TaskBench, as_json: bool) -> None:
    output.show(as_json, lambda: {**bench.document(), "llmcache_version": __version__}, _parts(bench))


def _parts(bench: TaskBench) -> Iterator[str | Table]:
    yield f"Task {bench.task} (measured on this machine)"
    yield "; ".join(f"{name} {value}" for name, value in facts(bench))
    for context in bench.contexts:
        yield f"\n{context:,} tokens"
        rows = [(row.name, cells_of(bench, row)) for row in bench.at(context)]
        for part in (0, 1):
            yield plain_table("cache", *rows[0][1][part], rows=[[name, *cells[part].values()] for name, cells in rows])


def facts(bench: TaskBench) -> list[tuple[str, str]]:
    settings = {
        name: ", ".join(map(str, one)) if isinstance(one, list) else str(one) for name, one in bench.conditions.items()
    }
    return list(settings.items())


Cells = dict[str, str]
"""Cells of a row by column."""


def cells_of(bench: TaskBench, row: TaskRow) -> tuple[Cells, Cells]:
    """Return a row's cells: answers, attention and memory; times and bytes moved."""
    full, kept, moved = bench.stock(row.context), bench.kept(row), row.moved_bytes
    nats = {"loss above full": bench.above(row), "divergence": row.divergences and mean_of(row.divergences)}
    answers = {
        **{name: f"{one[0]:.4f} ± {one[1]:.4f}" for name, one in nats.items() if one},
        "right": f"{row.answers.share:.1%} ± {row.answers.error:.1%}",
        "still right": "-" if kept is None else f"{kept:.1%}",
        "questions": f"{row.answers.questions}",
        "top-k found": "-" if row.attention is None else f"{row.attention.recall:.1%}",
        "attention": "-" if row.attention is None else f"{row.attention.mass:.1%}",
        "KV in memory": format_size(row.memory.kv_bytes),
        "vs full": f"{row.memory.kv_bytes / full.memory.kv_bytes:.1%}",
        "index": format_size(row.memory.index_bytes),
        "spilled": format_size(row.spilled_bytes),
    }
    times = {
        "2nd token": row.speed.tt2t_ns,
        "per token": row.speed.tpot_ns,
        **{part: row.speed.parts_ns[part] for part in PARTS},
    }
    links = dict.fromkeys(link for other in bench.rows for link in other.moved_bytes)
    return answers, {
        **{name: format_duration(taken) for name, taken in times.items()},
        "vs full": f"{row.speed.tpot_ns / full.speed.tpot_ns:.2f}x",
        **{f"{link} per step": format_size(round(moved.get(link, 0))) for link in links},
    }


def drawn(bench: TaskBench, form: str) -> bytes:
    if form == "html":
        return page(bench).encode()
    return theme.captioned(figure_of(bench, panels_of(bench)), caption(bench), form)


def caption(bench: TaskBench) -> str:
    return "Measured. " + "; ".join(f"{name}: {value}" for name, value in facts(bench)) + "."


def page(bench: TaskBench) -> str:
    alt, conditions = alt_text(bench), caption(bench)
    sections = [Section("Answers and memory", [page_table(bench)])]
    if (depths := depth_figure(bench)) is not None:
        title = "Right answers by depth and context (as in figure 6 of the paper)"
        sections.append(Section(title, [theme.embedded(depths, f"Right answers by depth. {alt}", conditions)]))
    for name in panels_of(bench):
        sections.append(Section(PANELS[name][0], [theme.embedded(figure_of(bench, [name]), alt, conditions)]))
    sections.append(Section("Conditions", [Facts(facts(bench))]))
    return html_page(f"llmcache kv bench --task {bench.task}", LEAD, sections)


def alt_text(bench: TaskBench) -> str:
    rows = bench.at(bench.contexts[-1])
    results = ", ".join(f"{row.name} {row.answers.share:.0%} at {row.speed.tpot_ns / 1e6:.3g} ms per token" for row in rows)
    return f"At {bench.contexts[-1]:,} tokens: {results}."


def page_table(bench: TaskBench) -> PageTable:
    cells = [(row, *cells_of(bench, row)) for row in bench.rows]
    rows: list[list[Cell]] = [[row.name, row.context, *one.values(), *other.values()] for row, one, other in cells]
    return PageTable(f"Measured, task {bench.task}", ["cache", "context", *cells[0][1], *cells[0][2]], rows)
