"""Output of `llmcache simulate`, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.table import Table

from llmcache.cache.results import Result, Simulation, Summary, TraceCurve
from llmcache.cache.sizing import FetchModel
from llmcache.cache.stalls import Stalls
from llmcache.report import output
from llmcache.report.output import plain_table, trimmed
from llmcache.units import BLOCK_BYTES, format_duration, format_rate, format_size

_NOTE = "hits: hit ratio of all blocks; reads: hit ratio of the bytes read"


def show(simulation: Simulation, as_json: bool) -> None:
    output.show(as_json, simulation.document, _parts(simulation))


def _parts(simulation: Simulation) -> Iterator[str | Table]:
    for number, summary in enumerate(simulation.traces):
        rows = [row for row in simulation.results if row.trace == summary.trace]
        yield ("\n" if number else "") + headline(summary)
        yield f"{_NOTE}\nlatency by bandwidth (modelled): {latency_note(simulation.model)}"
        yield table(rows)
        if simulation.period_ns is not None:
            length = format_duration(simulation.period_ns)
            yield f"Stalls (modelled): slices of {length} in which misses exceed what storage delivers, and their total wait"
            yield stall_table(summary, rows)
        yield from (curve_line(item) for item in simulation.curves if item.trace == summary.trace)


def latency_note(model: FetchModel) -> str:
    setup = f" plus {format_duration(model.setup_ns)} per missed block" if model.setup_ns else ", no setup time (--setup)"
    gpu = f" plus {format_duration(model.gpu_setup_ns)} per {model.request_bytes} bytes" if model.gpu_setup_ns else ""
    return f"misses at the bandwidth of storage{setup}, then to the GPU at {_rate(model.gpu_bandwidth)}{gpu}"


def headline(summary: Summary) -> str:
    lost = f", {summary.lost_events} accesses lost" if summary.lost_events else ""
    return (
        f"{summary.trace}: {summary.accesses} block accesses ({summary.reads} reads, {summary.writes} writes) to "
        f"{summary.footprint_blocks} distinct blocks ({format_size(summary.footprint_bytes)}); source: {summary.tier}{lost}"
    )


def table(rows: list[Result]) -> Table:
    headings = ("policy", "cache", "hits", "reads", "storage", *(_rate(latency.bw) for latency in rows[0].latencies))
    return plain_table(*headings, rows=([title, *_cells(row)] for title, row in _titled(rows)), gap=1, keys=2)


def _titled(rows: list[Result]) -> Iterator[tuple[str, Result]]:
    for number, row in enumerate(rows):
        yield row.title if number == 0 or rows[number - 1].policy != row.policy else "", row


def _rate(bytes_per_s: int) -> str:
    return trimmed(format_rate(bytes_per_s))


def _cells(row: Result) -> Iterator[str]:
    yield format_size(row.cache_bytes)
    yield f"{row.hit_ratio:.4f}"
    yield "-" if row.byte_hit_ratio is None else f"{row.byte_hit_ratio:.4f}"
    yield format_size(row.storage_read_bytes)
    for latency in row.latencies:
        yield _seconds(latency.latency_s)


def _seconds(seconds: float) -> str:
    """Format like `format_duration`, but in seconds instead of minutes, so that columns stay narrow and comparable."""
    return format_duration(seconds * 1e9) if seconds < 59 else f"{seconds:.0f} s"


def stall_table(summary: Summary, rows: list[Result]) -> Table:
    """Return the slices of T in which storage is too slow, and the total delay."""
    headings = ("policy", "cache", "worst slice", *(_rate(each.bw) for each in rows[0].stalls))
    cells = [["(any cache)", "", *_stall_cells(summary.cold_stalls)]]
    cells += [[title, format_size(row.cache_bytes), *_stall_cells(row.stalls)] for title, row in _titled(rows)]
    return plain_table(*headings, rows=cells, gap=1, keys=2)


def _stall_cells(stalls: tuple[Stalls, ...]) -> Iterator[str]:
    yield format_size(stalls[0].worst_bytes)
    for each in stalls:
        if each.stalled_slices == 0:
            yield "none"
        else:
            yield f"{each.stalled_slices}/{each.slices}, {_seconds(each.stall_s)}"


def curve_line(item: TraceCurve) -> str:
    """Return the maximum of a curve, and the sizes that reach parts of it."""
    curve = item.curve
    best = int(curve.hits[-1])
    if best == 0:
        return f"{curve.policy.upper()} at all sizes: no hits, because no block is accessed twice"
    shares: list[str] = []
    for percent in (50, 90, 100):
        blocks = int(curve.sizes[np.searchsorted(curve.hits, best * percent / 100)])
        shares.append(f"{percent} % {'' if shares else 'of the hits '}need {format_size(blocks * BLOCK_BYTES)}")
    return f"{curve.policy.upper()} at all sizes: hit ratio up to {best / curve.accesses:.4f}; {', '.join(shares)}"
