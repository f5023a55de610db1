"""What `llmcache kv bench` prints: a table for people, JSON for programs; measured and modelled never in one table."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from llmcache.kv.bench.results import MEASURED, Bench, Observed, Row
from llmcache.kv.pipeline.timeline import COMPUTE, DEVICE, RESOURCES, STAGES
from llmcache.report.tables import plain_table
from llmcache.units import format_duration, format_size

OURS = "hillinfer"
_UNBOUND = 400
_REASONS = {"scoring": {"score", "index", "query"}, "fetch": {"fetch"}, "moves, spill": {"move", "spill"}}
"""Columns of the table, and why what they add up has moved; every tier and reason by itself is in the JSON."""
_TITLES = {COMPUTE: "accelerator", DEVICE: "computational SSD"}
_WHAT = {
    "measured": "measured on this machine, with a synthetic stream of keys and values",
    "modelled": "modelled, on a machine that is not here",
}


def show(bench: Bench, as_json: bool) -> None:
    """Prints `bench` on stdout."""
    if as_json:
        print(json.dumps(bench.document(), indent=1))
        return
    # A table is as wide as its columns: on a narrow terminal its lines wrap, but no figure is cut.
    console = Console(highlight=False, markup=False, width=_UNBOUND)
    for line in headlines(bench):
        console.print(line, soft_wrap=True)
    console.print(latency_table(bench))
    for line in speedup_lines(bench):
        console.print(line, soft_wrap=True)
    if bench.kind == MEASURED:
        console.print(traffic_table(bench))
        for line in device_lines(bench):
            console.print(line, soft_wrap=True)


def kind_of(bench: Bench) -> str:
    """Returns whether the figures are measured or modelled, and what of the machine was emulated in any of the rows."""
    taking_part = {name for row in bench.rows if row.observed is not None for name in row.observed.timeline["emulated"]}
    emulated = [_TITLES.get(name, name) for name in RESOURCES if name in taking_part]
    return f"{bench.kind}, with an emulated {' and '.join(emulated)}" if emulated else bench.kind


def conditions(bench: Bench) -> list[tuple[str, str]]:
    """Returns what was set, as names and values, without what was not, nor details of the synthetic stream."""
    told = [(name, "synthetic" if isinstance(value, dict) else value) for name, value in bench.conditions.items()]
    return [(name.replace("_", " "), str(value)) for name, value in told if value is not None]


def headlines(bench: Bench) -> Iterator[str]:
    """What was run, and whether its figures are measured or modelled."""
    yield f"One decode step ({_WHAT[bench.kind]})"
    yield "; ".join(f"{name} {value}" for name, value in conditions(bench))
    if bench.marks is not None:
        marks = bench.marks
        bound = "" if marks.m0 is None else f", memory ends at {marks.m0:.3g}"
        yield f"beta by the rule f_c / f_s = {marks.rule:.3g}{bound}; expected minimum at {marks.expected:.3g}"
    yield from bench.notes


def latency_table(bench: Bench) -> Table:
    """Time by stage, each as if alone; what of it nothing computes; how many times as long as the fastest."""
    made = plain_table("policy", "beta", "a token", *STAGES, "exposed", "idle", "times the fastest")
    fastest = min(row.token_ns for row in bench.rows)
    for row in bench.rows:
        made.add_row(
            row.title,
            "-" if row.beta is None else f"{row.beta:.3g}",
            format_duration(row.token_ns),
            *(format_duration(row.stages_ns[stage]) for stage in STAGES),
            format_duration(row.exposed_ns),
            f"{row.idle_share:.1%}",
            f"{row.token_ns / fastest:.2f}",
        )
    return made


def speedup_lines(bench: Bench) -> Iterator[str]:
    """How many times as fast as each baseline the variants of HillInfer are; nothing where there is nothing to compare."""
    baselines = [row for row in bench.rows if row.policy.partition("-")[0] != OURS]
    for row in bench.rows:
        if row not in baselines and baselines:
            times = ", ".join(f"{row.speedup_over(one):.2f} x {one.title}" for one in baselines)
            yield f"{row.title}: {times} (speed-up)"


def traffic_table(bench: Bench) -> Table:
    """Bytes of a step over the link to the SSD by reason, where chosen tokens were, pages that moved between the pools."""
    links = [f"link: {name}" for name in _REASONS]
    made = plain_table("policy", "attended", "in memory", *links, "inside device", "pages up", "down", "ping-pong")
    for row in bench.rows:
        if row.observed is not None:
            made.add_row(row.title, *_traffic(row, row.observed))
    return made


def _traffic(row: Row, seen: Observed) -> Iterator[str]:
    yield f"{seen.attended_tokens}"
    yield f"{seen.hit_ratio:.1%}"
    reasons = [(link.partition(", ")[2], link, size) for link, size in row.moved_bytes.items()]
    for why in _REASONS.values():
        yield format_size(sum(size for reason, link, size in reasons if reason in why and "device" not in link))
    yield format_size(sum(size for _, link, size in reasons if "device" in link))
    yield f"{seen.pages_up}"
    yield f"{seen.pages_down}"
    yield f"{seen.ping_pong_pages} ({seen.ping_pong_share:.1%})"


def device_lines(bench: Bench) -> Iterator[str]:
    """What the emulated device took: modelled time and wall time apart."""
    for row in bench.rows:
        if row.observed is not None and row.observed.device is not None:
            device = row.observed.device
            yield (
                f"{row.title}: emulated device ({device['profile']}): {device['commands']} commands in all steps, "
                f"modelled {format_duration(device['modelled_ns'])}, wall {format_duration(device['wall_ns'])}"
            )
