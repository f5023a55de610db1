"""Latency against beta, the ratio of the pools of processor and device, with where the rule and memory put it.

Source: hillinfer.txt, section 4.4 and figure 11b.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmcache.errors import DataError
from llmcache.kv.bench.results import Bench, Marks, Row
from llmcache.report import theme
from llmcache.report.kv_bench import kind_of

_NS_PER_MS = 1e6
TOKEN, EVALUATE = theme.Look("#0072b2", "-", "o", 2.2, 5), theme.Look("#e69f00", (0, (5, 1)), "s", 1.6)


def beta_figure(bench: Bench, source: str) -> Figure:
    """Returns latency and evaluation by beta; DataError if `bench` is no sweep."""
    rows = sorted((row for row in bench.rows if row.beta is not None), key=lambda row: row.beta or 0.0)
    if bench.marks is None or len(rows) < 2:
        raise DataError(f"{source}: marks: no sweep of beta", "write one with 'llmcache kv bench --sweep-beta --json'")
    with theme.style():
        figure, (panel,) = theme.grid_of(1)
        betas = [row.beta for row in rows if row.beta is not None]
        panel.plot(betas, [row.token_ns / _NS_PER_MS for row in rows], label="a token", **TOKEN.line())
        panel.plot(
            betas, [row.stages_ns["evaluate"] / _NS_PER_MS for row in rows], label="its evaluation", **EVALUATE.line()
        )
        _mark(panel, bench.marks)
        panel.set_xscale("log", base=2)
        panel.set_xticks(betas, [f"{beta:.3g}" for beta in betas])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.set_xlabel("beta: keys and values in the processor's pool / in the device's")
        panel.set_ylabel(f"ms per decode step ({kind_of(bench)})")
        panel.set_title(f"{rows[0].title}: latency by the ratio of the pools")
        panel.legend()
    return figure


def _mark(panel: Axes, marks: Marks) -> None:
    panel.axvline(marks.rule, color=theme.INK, linestyle=(0, (4, 2)), linewidth=1.2, label=f"f_c / f_s = {marks.rule:.3g}")
    if marks.m0 is not None:
        panel.axvline(marks.m0, color=theme.MUTED, linestyle=(0, (1, 1)), linewidth=1.4, label=f"M0 = {marks.m0:.3g}")


def best(bench: Bench) -> Row:
    """Returns the row with the least latency."""
    return min(bench.rows, key=lambda row: row.token_ns)


def alt_text(bench: Bench) -> str:
    """Returns in words what the picture shows."""
    points = ", ".join(f"{row.beta:.3g}: {row.token_ns / _NS_PER_MS:.3g} ms" for row in bench.rows if row.beta is not None)
    expected = "" if bench.marks is None else f" The rule expects the least at {bench.marks.expected:.3g}."
    return f"Latency of a decode step by beta: {points}.{expected}"
