"""Page of `llmcache simulate --report`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from llmcache.cache.curves import Curve
from llmcache.cache.policies import policy_class
from llmcache.cache.results import CURVE_POINTS, Result, Simulation, Summary
from llmcache.cache.sizing import FetchModel
from llmcache.report.html import Cell, Facts, Fold, HtmlBlock, Section, Table, html_page
from llmcache.report.lines import Line, Panel, bandwidth_lines, latency_figure, policy_line, ratio_figure
from llmcache.report.output import write_target
from llmcache.report.simulate import latency_note
from llmcache.report.theme import embedded, style
from llmcache.units import BLOCK_BYTES, format_rate, format_size

MODELLED = "modelled from the misses"
LEAD = (
    "Hits and bytes are counted exactly, block by block, from the recorded accesses. Latencies and stalls are modelled from "
    "the misses. A block has 4 KiB; 1 MB is 10⁶ bytes."
)


def write_report(path: str, simulation: Simulation, force: bool) -> None:
    """Write the page of `simulation` to `path`; errors as `output.write_target`."""
    write_target("--report", path, report_page(simulation).encode(), force)


def report_page(simulation: Simulation) -> str:
    sections = [Section(summary.trace, list(_trace(simulation, summary))) for summary in simulation.traces]
    sections.append(Section("Conditions", [_conditions(simulation)]))
    return html_page("llmcache simulate", LEAD, sections)


def _trace(simulation: Simulation, summary: Summary) -> Iterable[HtmlBlock]:
    rows = [result for result in simulation.results if result.trace == summary.trace]
    exact = next((item.curve for item in simulation.curves if item.trace == summary.trace), None)
    yield _facts(summary)
    if rows:
        yield _hit_ratios(summary, rows, exact)
        yield _latencies(simulation.model, summary, rows, exact)
    if exact is not None:
        yield _curve(summary, exact, rows)
    if any(result.stalls for result in rows):
        yield _stalls(summary, rows)
    if rows:
        yield Fold("All rows", [_table(rows)])


def _facts(summary: Summary) -> HtmlBlock:
    facts = [
        ("source", summary.tier),
        ("rows", f"{summary.rows:,}"),
        ("accesses", f"{summary.accesses:,} blocks: {summary.reads:,} reads, {summary.writes:,} writes"),
        ("footprint", f"{summary.footprint_blocks:,} blocks, {format_size(summary.footprint_bytes)}"),
    ]
    return Facts(facts + ([("lost events", f"{summary.lost_events:,}")] if summary.lost_events else []))


def _by_policy(rows: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for row in sorted(rows, key=lambda row: row.cache_bytes):
        found.setdefault(row.policy, []).append(row)
    return {row.policy: found[row.policy] for row in rows}


def _ratio_line(rows: Sequence[Result], exact: Curve | None) -> Line:
    sizes, ratios = [row.cache_bytes for row in rows], [row.hit_ratio for row in rows]
    line = policy_line(rows[0].policy, rows[0].title, sizes, ratios)
    if exact is None or exact.policy != rows[0].policy:
        return line
    drawn = exact.thinned(CURVE_POINTS)
    return line.filled(np.asarray(drawn.sizes * BLOCK_BYTES, float), drawn.hit_ratio())


def _known(rows: Sequence[Result], exact: Curve | None) -> str:
    policies = list(dict.fromkeys(row.policy for row in rows))
    whole = [] if exact is None or exact.policy not in policies else [f"{policy_class(exact.policy).title} at all sizes"]
    others = ["the others"] if whole and len(policies) > 1 else [] if whole else ["all"]
    return ", ".join(whole + [f"{name} at the markers, drawn level up to the next" for name in others])


def _hit_ratios(summary: Summary, rows: Sequence[Result], exact: Curve | None) -> HtmlBlock:
    lines = [_ratio_line(of_policy, exact) for of_policy in _by_policy(rows).values()]
    with style():
        figure = ratio_figure([Panel("Hit ratio", lines, _marks(summary, rows))], "hit ratio")
    results = "; ".join(f"{line.label} {line.values[0]:.3f} to {line.values[-1]:.3f}" for line in lines)
    alt = f"Hit ratio over cache size, one line for each policy, from the smallest to the largest cache: {results}."
    conditions = f"Hit ratio of reads and writes in {_named(summary)}, counted by replay"
    return embedded(figure, alt, f"{conditions}. Computed points: {_known(rows, exact)}.")


def _named(summary: Summary) -> str:
    """Return the trace with its source: counts from a synthetic trace are not measurements."""
    lost = f", {summary.lost_events:,} accesses lost" if summary.lost_events else ""
    return f"{summary.trace} (source: {summary.tier}{lost})"


def _marks(summary: Summary, rows: Sequence[Result]) -> list[tuple[float, str]]:
    largest = max((row.cache_bytes for row in rows), default=summary.footprint_bytes)
    return [(summary.footprint_bytes, "footprint")] if summary.footprint_bytes <= largest else []


def _latencies(model: FetchModel, summary: Summary, rows: Sequence[Result], exact: Curve | None) -> HtmlBlock:
    panels = []
    for of_policy in _by_policy(rows).values():
        bandwidths = [latency.bw for latency in of_policy[0].latencies]
        values = np.array([[latency.latency_s for latency in row.latencies] for row in of_policy]).T
        lines = bandwidth_lines(bandwidths, [row.cache_bytes for row in of_policy], list(values))
        if exact is not None and exact.policy == of_policy[0].policy:
            drawn = exact.thinned(CURVE_POINTS)
            missed = [summary.reads - int(hits) for hits in drawn.read_hits]
            known = bandwidth_lines(
                bandwidths,
                drawn.sizes * BLOCK_BYTES,
                [[model.latency_s(summary.reads, blocks, bandwidth) for blocks in missed] for bandwidth in bandwidths],
            )
            lines = [line.filled(all_.sizes_bytes, all_.values) for line, all_ in zip(lines, known, strict=True)]
        panels.append(Panel(f"Fetch latency, {of_policy[0].title}", lines))
    with style():
        figure = latency_figure(panels, comparable=True)
    results = "; ".join(
        f"{panel.title} {panel.lines[0].values[0]:.3g} to {panel.lines[-1].values[-1]:.3g} s" for panel in panels
    )
    alt = (
        f"Latency over cache size, one line for each bandwidth, from slowest and smallest to fastest and largest: {results}."
    )
    conditions = f"Modelled time of all reads in {_named(summary)}: {latency_note(model)}. Writes take no time"
    return embedded(figure, alt, f"{conditions}. Computed points: {_known(rows, exact)}.")


def _curve(summary: Summary, exact: Curve, rows: Sequence[Result]) -> HtmlBlock:
    curve = exact.thinned(CURVE_POINTS)
    lines = [policy_line(curve.policy, policy_class(curve.policy).title, curve.sizes * BLOCK_BYTES, curve.miss_ratio())]
    with style():
        figure = ratio_figure([Panel("Miss ratio at all sizes", lines, _marks(summary, rows), linear=True)], "miss ratio")
    alt = f"Miss ratio of {lines[0].label} over cache size: {lines[0].values[0]:.3f} to {lines[0].values[-1]:.3f}."
    many = f"{len(curve.sizes):,} of {len(exact.sizes):,} sizes are drawn; all values are exact"
    return embedded(figure, alt, f"Miss-ratio curve of {_named(summary)}, counted in one pass. {many}.")


def _stalls(summary: Summary, rows: Sequence[Result]) -> HtmlBlock:
    cells: list[list[Cell]] = [
        ["first reads (no cache avoids them)", "", format_rate(one.bw), one.stalled_slices, one.slices, one.stall_s]
        for one in summary.cold_stalls
    ]
    cells += [
        [row.title, format_size(row.cache_bytes), format_rate(one.bw), one.stalled_slices, one.slices, one.stall_s]
        for row in rows
        for one in row.stalls
    ]
    columns = ["policy", "cache", "storage", "stalled slices", "all slices", "stall (s)"]
    return Fold("Stalls", [Table(f"Slices of T that miss more than storage delivers in T ({MODELLED})", columns, cells)])


def _table(rows: Sequence[Result]) -> Table:
    bandwidths = [latency.bw for latency in rows[0].latencies]
    columns = ["policy", "cache (MB)", "hits", "hit ratio", "byte hit ratio", "from storage (MB)", "evictions"]
    columns += [f"latency at {format_rate(bandwidth)} (s, modelled)" for bandwidth in bandwidths]
    cells: list[list[Cell]] = [
        [
            row.title,
            row.cache_bytes / 1e6,
            row.hits,
            row.hit_ratio,
            "no reads" if row.byte_hit_ratio is None else row.byte_hit_ratio,
            row.storage_read_bytes / 1e6,
            row.evictions,
            *(latency.latency_s for latency in row.latencies),
        ]
        for row in rows
    ]
    return Table("Counted, except for the modelled latency", columns, cells)


def _conditions(simulation: Simulation) -> HtmlBlock:
    model = simulation.model
    facts = [
        ("storage", ", ".join(format_rate(bandwidth) for bandwidth in model.storage_bandwidths)),
        ("latency", latency_note(model)),
        ("bypass", "none: a missed block is always inserted"),
    ]
    period = [] if simulation.period_ns is None else [("T", f"{simulation.period_ns / 1e9:g} s")]
    return Facts(facts + period)
