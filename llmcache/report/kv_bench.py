"""Output of `llmcache kv bench` and figures of `llmcache kv plot`; measured and modelled values are never in one table.

A sweep is drawn as latency over beta (hillinfer.txt, section 4.4 and figure 11b).
"""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from llmcache.documents import read_json
from llmcache.errors import DataError
from llmcache.kv.bench.results import MEASURED, TASK_SCHEMA, Bench, Row, TaskBench, read_bench, read_task
from llmcache.kv.pipeline.timeline import COMPUTE, DEVICE, RESOURCES, STAGES, Timeline
from llmcache.report import kv_task, output, theme
from llmcache.report.html import Facts, Section, html_page
from llmcache.report.html import Table as PageTable
from llmcache.report.output import Written, form_of, plain_table, write_target
from llmcache.units import format_duration, format_size

OURS = "hillinfer"
_REASONS = {"scoring": {"score", "index", "query"}, "fetch": {"fetch"}, "moves, spill": {"move", "spill"}}
"""Columns of the table, with the reasons for transfers that each sums up; the JSON has every tier and reason separately."""
_TITLES = {COMPUTE: "accelerator", DEVICE: "computational SSD"}
_KIND_TEXTS = {
    "measured": "measured on this machine, with a synthetic stream of keys and values",
    "modelled": "modelled for another machine, nothing was run",
}


def show(bench: Bench | TaskBench, as_json: bool) -> None:
    if isinstance(bench, TaskBench):
        kv_task.show(bench, as_json)
    else:
        output.show(as_json, bench.document, _parts(bench))


def _parts(bench: Bench) -> Iterator[str | Table]:
    yield f"One decode step ({_KIND_TEXTS[bench.kind]})"
    yield "; ".join(f"{name} {value}" for name, value in conditions(bench))
    if (marks := bench.marks) is not None:
        bound = "" if marks.m0 is None else f", memory is full at {marks.m0:.3g}"
        yield f"beta: {marks.rule:.3g} by the rule f_c / f_s{bound}, expected minimum at {marks.expected:.3g}"
    yield from bench.notes
    headings, *rows = latency_cells(bench)
    yield plain_table(*headings, rows=rows)
    yield from speedup_lines(bench)
    if bench.kind == MEASURED:
        yield traffic_table(bench)
        yield from device_lines(bench)


def kind_of(bench: Bench) -> str:
    """Return "measured" or "modelled", with the emulated parts of the machine."""
    taking_part = {name for row in bench.rows if row.observed is not None for name in row.observed.timeline["emulated"]}
    emulated = [_TITLES.get(name, name) for name in RESOURCES if name in taking_part]
    return f"{bench.kind}, with an emulated {' and '.join(emulated)}" if emulated else bench.kind


def conditions(bench: Bench, notes: bool = False) -> list[tuple[str, str]]:
    settings = [(name, "synthetic" if isinstance(value, dict) else value) for name, value in bench.conditions.items()]
    settings += [("note", note) for note in bench.notes if notes]
    return [(name.replace("_", " "), str(value)) for name, value in settings if value is not None]


def latency_cells(bench: Bench) -> Iterator[list[str]]:
    """Yield headings, then rows: time by stage alone, time not hidden by computation, relative time."""
    yield ["policy", "beta", "per token", *STAGES, "exposed", "idle", "vs fastest"]
    fastest = min(row.token_ns for row in bench.rows)
    for row in bench.rows:
        times = (row.token_ns, *(row.stages_ns[stage] for stage in STAGES), row.exposed_ns)
        beta = "-" if row.beta is None else f"{row.beta:.3g}"
        relative = f"{row.idle_share:.1%}", f"{row.token_ns / fastest:.2f}x"
        yield [row.title, beta, *map(format_duration, times), *relative]


def speedup_lines(bench: Bench) -> Iterator[str]:
    baselines = [row for row in bench.rows if row.policy.partition("-")[0] != OURS]
    for row in bench.rows:
        if row not in baselines and baselines:
            times = ", ".join(f"{row.speedup_over(one):.2f}x over {one.title}" for one in baselines)
            yield f"speed-up of {row.title}: {times}"


def traffic_table(bench: Bench) -> Table:
    """Return the bytes of a step over the SSD link by reason, the tokens in memory, and pages moved."""
    links = [f"link: {name}" for name in _REASONS]
    rows = []
    for row in bench.rows:
        if (seen := row.observed) is not None:
            inside = {link: size for link, size in row.moved_bytes.items() if "device" in link}
            over = [(link.partition(", ")[2], size) for link, size in row.moved_bytes.items() if link not in inside]
            by_reason = [format_size(sum(size for reason, size in over if reason in why)) for why in _REASONS.values()]
            pages = [str(count) for count in (seen.pages_up, seen.pages_down)]
            again = f"{seen.ping_pong_pages} ({seen.ping_pong_share:.1%})"
            shares = [str(seen.attended_tokens), f"{seen.hit_ratio:.1%}"]
            rows.append([row.title, *shares, *by_reason, format_size(sum(inside.values())), *pages, again])
    headings = ("policy", "attended", "in memory", *links, "inside device", "pages up", "pages down", "ping-pong")
    return plain_table(*headings, rows=rows)


def device_lines(bench: Bench) -> Iterator[str]:
    for row in bench.rows:
        if row.observed is not None and row.observed.device is not None:
            device = row.observed.device
            yield (
                f"emulated device of {row.title} ({device['profile']}): {device['commands']} commands in all steps, "
                f"{format_duration(device['modelled_ns'])} modelled, {format_duration(device['wall_ns'])} of wall time"
            )


_NS_PER_MS = 1e6
TOKEN, EVALUATE = theme.Look("#0072b2", "-", "o", 2.2, 5), theme.Look("#e69f00", (0, (5, 1)), "s", 1.6)


def beta_figure(bench: Bench, source: str) -> Figure:
    """Draw latency over beta; DataError if `bench` is no sweep."""
    rows = sorted((row for row in bench.rows if row.beta is not None), key=lambda row: row.beta or 0.0)
    if bench.marks is None or len(rows) < 2:
        raise DataError(f"{source}: marks: not a sweep of beta", "create one with 'llmcache kv bench --sweep-beta --json'")
    with theme.style():
        figure, (panel,) = theme.grid_of(1)
        betas = [row.beta for row in rows if row.beta is not None]
        panel.plot(betas, [row.token_ns / _NS_PER_MS for row in rows], label="token", **TOKEN.line())
        panel.plot(betas, [row.stages_ns["evaluate"] / _NS_PER_MS for row in rows], label="evaluation", **EVALUATE.line())
        marks, rule = bench.marks, f"f_c / f_s = {bench.marks.rule:.3g}"
        panel.axvline(marks.rule, color=theme.INK, linestyle=(0, (4, 2)), linewidth=1.2, label=rule)
        if marks.m0 is not None:
            panel.axvline(marks.m0, color=theme.MUTED, linestyle=(0, (1, 1)), linewidth=1.4, label=f"M0 = {marks.m0:.3g}")
        label = "beta: keys and values in the processor's pool / in the device's pool"
        theme.powers_of_2(panel, betas, map("{:.3g}".format, betas), label)
        panel.set(ylim=(0, None), ylabel=f"decode step (ms, {bench.kind})")
        panel.set_title(f"{rows[0].title}: latency over the ratio of the pools")
        panel.legend()
    return figure


STAGE_COLOURS: dict[str, str] = {"evaluate": "#e69f00", "fetch": "#56b4e9", "compute": "#0072b2", "update": "#cc79a7"}
"""From Okabe and Ito; also distinct in gray."""

_HEIGHT = 0.72  # of a bar; resources are 1 apart


def timeline_figure(bench: Bench, source: str) -> Figure:
    """Draw a panel for each policy; DataError without timelines."""
    shown = [(row, Timeline.from_json(dict(row.observed.timeline))) for row in bench.rows if row.observed is not None]
    if not shown:
        raise DataError(f"{source}: rows: a {bench.kind} run has no timeline", "draw a run of '--profile measured'")
    with theme.style():
        figure = Figure(figsize=(9.0, 0.9 + 1.75 * len(shown)), layout="constrained")
        longest = max(max((span.end_ns for span in timeline.spans), default=_NS_PER_MS) for _, timeline in shown)
        panels: list[Axes] = []
        for place, (row, timeline) in enumerate(shown):
            panel = figure.add_subplot(len(shown), 1, place + 1, sharex=panels[0] if panels else None)
            _draw(panel, row, timeline)
            panels.append(panel)
        for panel in panels:
            panel.label_outer()
        panels[-1].set_xlim(0, longest / _NS_PER_MS * 1.01)
        panels[-1].set_xlabel(f"time of one decode step (ms, {kind_of(bench)})")
        handles = [Patch(color=STAGE_COLOURS[stage], label=stage) for stage in STAGES]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    return figure


def _draw(panel: Axes, row: Row, timeline: Timeline) -> None:
    for resource_place, resource in enumerate(RESOURCES):
        for stage in STAGES:
            bars = [
                (span.begin_ns / _NS_PER_MS, (span.end_ns - span.begin_ns) / _NS_PER_MS)
                for span in timeline.spans
                if (span.resource, span.stage) == (resource, stage)
            ]
            panel.broken_barh(bars, (resource_place - _HEIGHT / 2, _HEIGHT), color=STAGE_COLOURS[stage], linewidth=0)
    names = [f"{name} (emulated)" if name in timeline.emulated else name for name in RESOURCES]
    panel.set_yticks(range(len(RESOURCES)), names)
    panel.set_ylim(len(RESOURCES) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
    panel.set_title(f"{row.title}: accelerator idle {row.idle_share:.0%} of the time")


_LEAD = "KV cache policies choose the keys and values that a decode step attends to. All values are {kind}."


def plot(run: str, output: str, force: bool) -> Written:
    """Draw the file `run`, from 'llmcache kv bench --json', as `output` (.png, .svg or .html).

    UsageError: `run` cannot be read, `output` has another extension or exists; DataError: `run` is no benchmark.
    """
    form, document = form_of("-o", output, force), read_json(run, "create one with 'llmcache kv bench --json'")
    is_task = isinstance(document, dict) and document.get("schema") == TASK_SCHEMA
    bench = read_task(document, run) if is_task else read_bench(document, run)
    return write_target("-o", output, drawn(bench, run, form), force)


def drawn(bench: Bench | TaskBench, source: str, form: str) -> bytes:
    """Return the figure of `bench` as a file of `form`; DataError if it has none."""
    if isinstance(bench, TaskBench):
        return kv_task.drawn(bench, form)
    figure = beta_figure(bench, source) if bench.marks is not None else timeline_figure(bench, source)
    return _page(bench, figure).encode() if form == "html" else theme.captioned(figure, _caption(bench), form)


def _alt(bench: Bench) -> str:
    if bench.marks is None:
        parts = [f"{row.title}: idle {row.idle_share:.0%}" for row in bench.rows if row.observed is not None]
        return f"Gantt chart of one decode step by resource ({', '.join(RESOURCES)}). " + "; ".join(parts) + "."
    points = ", ".join(f"{row.beta:.3g}: {row.token_ns / _NS_PER_MS:.3g} ms" for row in bench.rows if row.beta is not None)
    return f"Latency of a decode step over beta: {points}. The rule expects the minimum at {bench.marks.expected:.3g}."


def _caption(bench: Bench) -> str:
    settings = "; ".join(f"{name}: {value}" for name, value in conditions(bench, notes=True))
    kind = kind_of(bench)
    return f"{kind[0].upper()}{kind[1:]}. {settings}."


def _page(bench: Bench, figure: Figure) -> str:
    headings, *rows = latency_cells(bench)
    title = "Latency over beta" if bench.marks is not None else "One decode step"
    sections = [
        Section(title, [theme.embedded(figure, _alt(bench), _caption(bench))]),
        Section("Times", [PageTable(f"{kind_of(bench)}; each stage by itself", headings, rows)]),
        Section("Conditions", [Facts(conditions(bench, notes=True))]),
    ]
    return html_page("llmcache kv bench", _LEAD.format(kind=kind_of(bench)), sections)
