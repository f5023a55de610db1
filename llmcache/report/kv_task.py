"""What `llmcache kv bench --task` prints and draws: a table for people, JSON for programs, a picture or a page."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from llmcache import __version__
from llmcache.kv.bench import task_question
from llmcache.kv.bench.task_results import PARTS, TaskBench, TaskRow, mean_of
from llmcache.report import kv_task_figures, theme
from llmcache.report.files import check_target, write_target
from llmcache.report.html import Block, Cell, Facts, Section, html_page
from llmcache.report.html import Table as PageTable
from llmcache.report.plot import LETTERS_PER_INCH, form_of
from llmcache.report.tables import plain_table
from llmcache.units import format_duration, format_size

OPTION = "--plot"
WIDE = 400
LEAD = (
    "A real model answers questions about long contexts with transformers' own cache and with spilled ones. Everything is "
    "measured on the machine named below; the computational SSD is not used."
)


def answer(
    options: task_question.TaskOptions, plot: str | None, force: bool, as_json: bool, tell: Callable[[str], None]
) -> None:
    """Runs the task, prints it and draws it; UsageError names the option that is wrong, before anything runs."""
    if plot is not None:
        form_of(plot, OPTION)
        check_target(OPTION, plot, force)
    bench = task_question.run(options, tell)
    if plot is not None:
        write_target(OPTION, plot, drawn(bench, form_of(plot)), force)
    show(bench, as_json)


def show(bench: TaskBench, as_json: bool) -> None:
    """Prints `bench` on stdout."""
    if as_json:
        print(json.dumps({**bench.document(), "llmcache_version": __version__}, indent=1))
        return
    console = Console(highlight=False, markup=False, width=WIDE)
    console.print(f"Task {bench.task} (measured on this machine)", soft_wrap=True)
    console.print("; ".join(f"{name} {value}" for name, value in facts(bench)), soft_wrap=True)
    for context in bench.contexts:
        console.print(f"\n{context:,} tokens")
        console.print(answers_table(bench, context))
        console.print(speed_table(bench, context))


def facts(bench: TaskBench) -> list[tuple[str, str]]:
    """Returns what was set, as names and values."""
    told = {name: ", ".join(map(str, one)) if isinstance(one, list) else str(one) for name, one in bench.conditions.items()}
    return list(told.items())


def answers_table(bench: TaskBench, context: int) -> Table:
    """Answers, attention and memory at a context."""
    losses = ["loss above full", "divergence"] if bench.stock(context).losses else []
    made = plain_table(
        "cache", *losses, "right", "of full's", "questions", "top-k found", "attention", "KV in memory", "of full", "index",
        "spilled",
    )  # fmt: skip
    full = bench.stock(context).memory.kv_bytes
    for row in bench.at(context):
        nats = (bench.above(row), row.divergences and mean_of(row.divergences))
        told = [f"{one[0]:.4f} ± {one[1]:.4f}" for one in nats if one]
        made.add_row(row.name, *told, *_answers(row, bench.kept(row), full))
    return made


def _answers(row: TaskRow, kept: float | None, full_bytes: int) -> Iterator[str]:
    yield f"{row.answers.share:.1%} ± {row.answers.error:.1%}"
    yield "-" if kept is None else f"{kept:.1%}"
    yield f"{row.answers.questions}"
    yield "-" if row.attention is None else f"{row.attention.recall:.1%}"
    yield "-" if row.attention is None else f"{row.attention.mass:.1%}"
    yield format_size(row.memory.kv_bytes)
    yield f"{row.memory.kv_bytes / full_bytes:.1%}"
    yield format_size(row.memory.index_bytes)
    yield format_size(row.spilled_bytes)


def speed_table(bench: TaskBench, context: int) -> Table:
    """Times of one sequence at a context, and what a step moves."""
    rows = bench.at(context)
    links = list(dict.fromkeys(link for row in rows for link in row.moved_bytes))
    made = plain_table("cache", "2nd token", "a token", *PARTS, "of full", *(f"{link} a step" for link in links))
    full_ns = bench.stock(context).speed.tpot_ns
    for row in rows:
        times = (row.speed.tt2t_ns, row.speed.tpot_ns, *(row.speed.parts_ns[part] for part in PARTS))
        moved = (format_size(round(row.moved_bytes.get(link, 0))) for link in links)
        made.add_row(row.name, *map(format_duration, times), f"{row.speed.tpot_ns / full_ns:.2f}x", *moved)
    return made


def drawn(bench: TaskBench, form: str) -> bytes:
    """Returns `bench` as a file of `form`: png, svg or html."""
    if form == "html":
        return page(bench).encode()
    figure = kv_task_figures.figure_of(bench)
    lines = textwrap.wrap(caption(bench), int(figure.get_figwidth() * LETTERS_PER_INCH))
    with theme.style():
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color=theme.MUTED)
    return theme.figure_bytes(figure, form)


def caption(bench: TaskBench) -> str:
    """Returns the conditions as one paragraph."""
    return "Measured. " + "; ".join(f"{name}: {value}" for name, value in facts(bench)) + "."


def page(bench: TaskBench) -> str:
    """Returns `bench` as an HTML page, a picture for each of the paper's figures that it has data for."""
    sections = [Section("Answers, attention, memory", [page_table(bench)]), *sections_of(bench)]
    sections.append(Section("Conditions", [Facts(facts(bench))]))
    return html_page(f"llmcache kv bench --task {bench.task}", LEAD, sections)


def sections_of(bench: TaskBench) -> list[Section]:
    """Returns a section for each picture."""
    told = alt_text(bench)
    found = [
        Section(
            f"{part.name.capitalize()} (like the paper's {part.like})",
            [theme.embedded(kv_task_figures.part_figure(bench, part), told, caption(bench))],
        )
        for part in kv_task_figures.parts_of(bench)
    ]
    depths = kv_task_figures.depth_figure(bench)
    if depths is not None:
        picture: list[Block] = [theme.embedded(depths, f"Right answers by depth. {told}", caption(bench))]
        found.insert(0, Section("Right answers by depth and context (like the paper's figure 6)", picture))
    return found


def alt_text(bench: TaskBench) -> str:
    """Returns in words what the pictures show."""
    rows = bench.at(bench.contexts[-1])
    told = ", ".join(f"{row.name} {row.answers.share:.0%} at {row.speed.tpot_ns / 1e6:.3g} ms a token" for row in rows)
    return f"At {bench.contexts[-1]:,} tokens: {told}."


def page_table(bench: TaskBench) -> PageTable:
    """Returns all rows as a table of a page."""
    columns = [
        "cache", "context", "right (%)", "± (%)", "questions", "top-k found (%)", "attention (%)", "2nd token (ms)",
        "a token (ms)", *(f"{part} (ms)" for part in PARTS), "KV in memory (KiB)", "index (KiB)",
    ]  # fmt: skip
    rows: list[list[Cell]] = [
        [
            row.name, row.context, 100 * row.answers.share, 100 * row.answers.error, row.answers.questions,
            "-" if row.attention is None else 100 * row.attention.recall,
            "-" if row.attention is None else 100 * row.attention.mass,
            row.speed.tt2t_ns / 1e6, row.speed.tpot_ns / 1e6, *(row.speed.parts_ns[part] / 1e6 for part in PARTS),
            row.memory.kv_bytes / 1024, row.memory.index_bytes / 1024,
        ]
        for row in bench.rows
    ]  # fmt: skip
    return PageTable(f"Measured, task {bench.task}", columns, rows, digits=2)
