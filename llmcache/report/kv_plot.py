"""Draws a saved benchmark of KV policies: a sweep as latency against beta, a task as answers, times and memory,
any other as the timelines of its policies."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from llmcache.errors import DataError, UsageError
from llmcache.kv.bench.question import Options, run
from llmcache.kv.bench.results import Bench, read_bench
from llmcache.kv.bench.task_results import SCHEMA as TASK_SCHEMA
from llmcache.kv.bench.task_results import read_task
from llmcache.report import kv_beta, kv_task, kv_timeline, theme
from llmcache.report.files import Written, check_target, write_target
from llmcache.report.html import Cell, Facts, Section, Table, html_page
from llmcache.report.kv_bench import conditions, kind_of, show
from llmcache.report.plot import LETTERS_PER_INCH, OPTION, form_of

_LARGEST_BYTES = 1 << 28
_LEAD = "Policies that choose which keys and values a decode step attends to; figures are {kind}."


def plot(run: str, output: str, force: bool) -> Written:
    """Draws the file `run`, what 'llmcache kv bench --json' wrote, as `output` (.png, .svg or .html), and returns that.

    UsageError: `run` cannot be read, `output` has another ending or is there; DataError: `run` is no benchmark.
    """
    form = form_of(output)
    check_target(OPTION, output, force)
    told = load(run)
    if isinstance(told, dict) and told.get("schema") == TASK_SCHEMA:
        return write_target(OPTION, output, kv_task.drawn(read_task(told, run), form), force)
    return write_target(OPTION, output, drawn(read_bench(told, run), run, form), force)


def drawn(bench: Bench, source: str, form: str) -> bytes:
    """Returns the picture of `bench`, which came from `source`, as a file of `form`; DataError if there is none of it."""
    figure = kv_beta.beta_figure(bench, source) if bench.marks is not None else kv_timeline.timeline_figure(bench, source)
    return _page(bench, figure).encode() if form == "html" else _picture(bench, figure, form)


def answer(options: Options, output: str | None, force: bool, as_json: bool, tell: Callable[[str], None]) -> None:
    """Runs what `options` ask for, prints it, and draws it as `output` if one is given.

    UsageError names the option that is wrong, before anything runs.
    """
    if output is not None:
        form_of(output, "--plot")
        check_target("--plot", output, force)
        if options.profile == "paper" and not options.sweep_beta:
            raise UsageError("--plot: what is modelled has no timeline", "draw a sweep, or a run of --profile measured")
    bench = run(options, tell)
    show(bench, as_json)
    if output is not None:
        write_target("--plot", output, drawn(bench, output, form_of(output)), force)


def load(run: str) -> Any:
    """Returns what the JSON file `run` holds; errors as `plot`."""
    try:
        with Path(run).open("rb") as stream:
            raw = stream.read(_LARGEST_BYTES)
    except OSError as error:
        raise UsageError(f"{run}: cannot read it: {error.strerror}", "write it with 'llmcache kv bench --json'") from error
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{run}: not JSON: {error}", "write it with 'llmcache kv bench --json'") from error


def _alt(bench: Bench) -> str:
    return kv_timeline.alt_text(bench) if bench.marks is None else kv_beta.alt_text(bench)


def _caption(bench: Bench) -> str:
    told = "; ".join(f"{name}: {value}" for name, value in _facts(bench))
    kind = kind_of(bench)
    return f"{kind[0].upper()}{kind[1:]}. {told}."


def _facts(bench: Bench) -> list[tuple[str, str]]:
    return [*conditions(bench), *(("note", note) for note in bench.notes)]


def _picture(bench: Bench, figure: Figure, form: str) -> bytes:
    lines = textwrap.wrap(_caption(bench), int(figure.get_figwidth() * LETTERS_PER_INCH))
    with theme.style():
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color=theme.MUTED)
    return theme.figure_bytes(figure, form)


def _page(bench: Bench, figure: Figure) -> str:
    stages = list(bench.rows[0].stages_ns)
    columns = ["policy", "beta", "a token (ms)", *(f"{stage} (ms)" for stage in stages), "idle (%)"]
    rows: list[list[Cell]] = [
        [
            row.title,
            "-" if row.beta is None else f"{row.beta:.3g}",
            row.token_ns / 1e6,
            *(row.stages_ns[stage] / 1e6 for stage in stages),
            100 * row.idle_share,
        ]
        for row in bench.rows
    ]
    what = "Latency against beta" if bench.marks is not None else "One decode step"
    sections = [
        Section(what, [theme.embedded(figure, _alt(bench), _caption(bench))]),
        Section("Figures", [Table(f"{kind_of(bench)}; stages as if each were alone", columns, rows)]),
        Section("Conditions", [Facts(_facts(bench))]),
    ]
    return html_page("llmcache kv bench", _LEAD.format(kind=kind_of(bench)), sections)
