"""Tables of hillinfer's page: a machine number by number, transfers, and what ran on this machine."""

from __future__ import annotations

from llmcache.kv.bench.results import Bench
from llmcache.kv.planning.hardware import NUMBERS, Hardware
from llmcache.report.html import Cell, Table
from llmcache.report.reproduce.hillinfer.figure3 import Transfers
from llmcache.units import format_duration, format_rate, format_size


def machine_table(machine: Hardware) -> Table:
    """Returns every number of `machine` with where it comes from."""
    rows: list[list[Cell]] = [
        [
            name.removesuffix("_per_s").removesuffix("_bytes").replace("_", " "),
            _value(name, getattr(machine, name)),
            machine.origins[name].kind,
            machine.origins[name].text,
        ]
        for name in NUMBERS
    ]
    return Table(machine.title, ["number", "value", "origin", "source"], rows)


def _value(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return f"{value / (1 << 30):.1f} GiB" if value >= 1 << 30 else format_size(value)
    if name.endswith("_bytes_per_s"):
        return format_rate(value)
    if name.endswith("_ns"):
        return format_duration(value)
    return f"{value:.3g} operations/s" if name.endswith("_flops") else f"{value:,.0f} requests/s"


def transfer_table(data: Transfers) -> Table:
    """Returns the seconds of every share and context."""
    contexts = list(next(iter(data.seconds.values())))
    rows: list[list[Cell]] = [[f"{share:.0%}", *row.values()] for share, row in data.seconds.items()]
    layers = "one layer" if data.layers == 1 else f"{data.layers} layers"
    return Table(f"Seconds, {layers} ({data.kind})", ["share", *(f"{context:,}" for context in contexts)], rows)


def bench_table(bench: Bench, caption: str) -> Table:
    """Returns the rows of a benchmark: times, idle share, bytes from the SSD, hits."""
    columns = ["system", "beta", "ms a step", "evaluate (ms)", "fetch (ms)", "idle (%)", "MB from SSD to host", "hits (%)"]
    rows: list[list[Cell]] = [
        [
            row.title,
            "-" if row.beta is None else f"{row.beta:.3g}",
            row.token_ns / 1e6,
            row.stages_ns["evaluate"] / 1e6,
            row.stages_ns["fetch"] / 1e6,
            100 * row.idle_share,
            sum(size for link, size in row.moved_bytes.items() if link.startswith("ssd to cpu")) / 1e6,
            "-" if row.observed is None else f"{100 * row.observed.hit_ratio:.0f}",
        ]
        for row in bench.rows
    ]
    return Table(caption, columns, rows, digits=1)
