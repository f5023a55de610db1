"""IceCache (ICLR 2026) recomputed: the claims of its tables and figures, measured with a small recall model.

The paper's models and data sets are not downloaded, so its tables are shown as printed (`icecache.toml`). `llmcache kv bench
--task … --model DIR` measures any model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmcache.kv.bench.results import PARTS, QUERY, STOCK, TaskBench, TaskRow, read_task
from llmcache.papers.judge import Ours, Paper, Values, judge, read_paper
from llmcache.papers.reproduce import Blocks, Progress, Reproduction, machine_words, measurements, picture
from llmcache.report import kv_task, theme
from llmcache.report.html import Cell, Facts, Fold, HtmlBlock, Table, Text

ICE, REUSE = "icecache", "icecache-reuse"
JUDGED = (ICE, "icecache-dci", "icecache-pages")
"""Variants whose answers are judged: `auto` scores exactly at these lengths; the paper's own is the last."""
RIVALS = ("quest", "h2o", "window")
TASKS = {"passkey": "figure 6", "recall": "tables 1, 2 and 5", "chain": "tables 3 and 6", "needle": "table 4"}
"""Topics of the claims about each task."""
TIMES = "figures 1, 7 and 8"
Length = Mapping[str, Any]
"""A cache at one context length, from `tools/bench papers`: times, memory, and both relative to transformers' own cache."""


# Answers: figure 6 and tables 1 to 6


def row_of(bench: TaskBench, policy: str, budget: int | None = None, context: int | None = None) -> TaskRow:
    """Return the row of a policy, by default with its largest budget at the longest context."""
    at = bench.contexts[-1] if context is None else context
    rows = [row for row in bench.at(at) if row.policy == policy and budget in (None, row.budget)]
    return max(rows, key=lambda row: row.budget or 0)


def _answers(rows: Sequence[TaskRow]) -> Values:
    shares = {f"{row.name} at {row.context:,}, share": row.answers.share for row in rows}
    return shares | {f"{row.name} at {row.context:,}, ±": row.answers.error for row in rows}


def _budgets(bench: TaskBench) -> list[int]:
    return sorted({row.budget for row in bench.rows if row.budget is not None})


def every_passkey(bench: TaskBench, policy: str) -> Values:
    rows = [row for row in bench.rows if row.policy == policy]
    right, asked = sum(sum(row.answers.right) for row in rows), sum(row.answers.questions for row in rows)
    return {"share": right / asked, "asked": asked, "least_share": min(row.answers.share for row in rows)}


def kept(bench: TaskBench, policy: str) -> Values:
    """Return the share of the full cache's right answers that the largest budget keeps, at the worst context."""
    rows = [row_of(bench, policy, context=context) for context in bench.contexts]
    fulls = [bench.stock(row.context).answers.share for row in rows]
    relative = min(row.answers.share / full if full else 0.0 for row, full in zip(rows, fulls, strict=True))
    return {"relative": relative, **_answers(rows)}


def quarter(bench: TaskBench, policy: str) -> Values:
    own, others = row_of(bench, policy, 64), [row_of(bench, rival, 256) for rival in RIVALS]
    return {"lead": own.answers.share - max(row.answers.share for row in others), **_answers([own, *others])}


def outperforms(bench: TaskBench, policy: str) -> Values:
    leads = {
        f"{rival} {budget}": row_of(bench, policy, budget).answers.share - row_of(bench, rival, budget).answers.share
        for budget in _budgets(bench)
        for rival in RIVALS
    }
    return leads | {"share_ahead": sum(lead > 0 for lead in leads.values()) / len(leads)}


def near_exact(bench: TaskBench, policy: str) -> Values:
    losses = {
        str(budget): row_of(bench, ICE, budget).answers.share - row_of(bench, policy, budget).answers.share
        for budget in _budgets(bench)
    }
    return losses | {"worst": max(losses.values())}


ANSWERS: dict[str, dict[str, Callable[[TaskBench, str], Values]]] = {
    "passkey": {"every-passkey": every_passkey},
    "recall": {
        "keeps-99": kept,
        "quarter-of-the-budget": quarter,
        "outperforms": outperforms,
        "near-top-k": near_exact,
    },
    "chain": {"long-generation": kept},
    "needle": {"needles": kept},
}
"""Functions that compute our values, by task and claim."""


# Time and memory: figures 1, 7 and 8, with random weights


def length_values(rows: Sequence[Length]) -> dict[str, dict[str, Values]]:
    """Return the values for the claims about time and memory.

    Differs from the paper, which counts the GPU's memory and has its index in host memory.
    """
    by_policy = {
        name: sorted((row for row in rows if row["policy"] == name), key=lambda row: int(row["tokens"]))
        for name in (ICE, REUSE, STOCK)
    }
    tpot_ns = {name: [row["speed"]["tpot_ns"] for row in ordered] for name, ordered in by_policy.items()}
    last = by_policy[ICE][-1]
    parts = last["speed"]["parts_ns"]
    order = sorted(PARTS, key=lambda part: -parts[part])
    leading = len({*order[:2]} & {"query", "decoding"})
    places = {"query_place": order.index(QUERY) + 1, "decoding_place": order.index("decoding") + 1}
    grown, whole = (tpot_ns[name][-1] - tpot_ns[name][0] for name in (ICE, STOCK))
    memory = {"kv_share": last["kv_share"], "share_with_index": last["share_with_index"], "times": last["times_stock"]}
    reuse = {"ratio": tpot_ns[REUSE][-1] / tpot_ns[ICE][-1], "reuse_ns": tpot_ns[REUSE][-1], "plain_ns": tpot_ns[ICE][-1]}
    growth = {"ratio": grown / whole if whole > 0 else 1e9, "grown_ns": grown, "full cache grown_ns": whole}
    return {
        "memory-and-time": {ICE: memory},
        "breakdown": {ICE: {**{f"{part}_ns": ns for part, ns in parts.items()}, "leading": leading, **places}},
        "slower-growth": {ICE: growth},
        "reuse-is-faster": {REUSE: reuse},
    }


# The reproduction


def reproduce(quick: bool, progress: Progress) -> Reproduction:
    paper, measured = read_paper("icecache"), measurements("icecache")
    contents = {
        "blank": [{"where": where, "what": what, "why": why} for where, what, why in paper.data["blank"]],
        "measured_here": {"kind": "measured", **{key: one for key, one in measured.items() if key != "schema"}},
    }
    return Reproduction("icecache", paper, judge(paper, ours(measured)), contents, lambda: _blocks(paper, measured))


def _benches(measured: Mapping[str, Any]) -> dict[str, TaskBench]:
    return {name: read_task(one, f"icecache.json: {name}") for name, one in measured["tasks"].items()}


def ours(measured: Mapping[str, Any]) -> Ours:
    found: dict[str, dict[str, dict[str, Values]]] = {}
    for task, bench in _benches(measured).items():
        # The exact scan is not compared with itself.
        found[TASKS[task]] = {
            name: {variant: values(bench, variant) for variant in JUDGED if name != "near-top-k" or variant != ICE}
            for name, values in ANSWERS[task].items()
        }
    rows = measured["lengths"]["rows"]
    return found | ({TIMES: length_values(rows)} if rows else {})


# The page


def _blocks(paper: Paper, measured: Mapping[str, Any]) -> Blocks:
    titles = {about: section["title"] for section in paper.sections for about in section.get("about", ())}
    blocks: dict[str, list[HtmlBlock]] = {title: [] for title in titles.values()}
    for printed in paper.data["printed"]:
        table = Table(printed["caption"], printed["columns"], printed["rows"], printed["digits"])
        blocks[printed["section"]].append(table)
    facts = machine_words(measured)
    for task, bench in _benches(measured).items():
        blocks[titles[TASKS[task]]] += [*_pictures(bench), Fold("All numbers", [kv_task.page_table(bench)])]
        facts.append((task, ", ".join(f"{what} {value}" for what, value in kv_task.facts(bench))))
    if rows := measured["lengths"]["rows"]:
        blocks[titles[TIMES]] += _times(paper, rows)
    for name, why in measured["missing"].items():
        blocks[titles[TASKS.get(name, TIMES)]].append(Text(f"Not measured: {name} ({why})."))
    blank = Table("Parts of the paper that are not measured", ["where", "what", "why"], paper.data["blank"])
    return {**blocks, "Not measured": [blank], "Conditions": [Facts(facts)]}


def _pictures(bench: TaskBench) -> list[HtmlBlock]:
    alt, conditions = kv_task.alt_text(bench), kv_task.caption(bench)
    depths = kv_task.depth_figure(bench) if bench.task == "passkey" else None
    if depths is not None:
        return [theme.embedded(depths, f"Right answers by depth. {alt}", conditions)]
    if len(_budgets(bench)) <= 1:
        return []
    return [theme.embedded(kv_task.figure_of(bench, ["accuracy"]), alt, conditions)]


def _times(paper: Paper, rows: Sequence[Length]) -> list[HtmlBlock]:
    panels: dict[str, dict[str, theme.Curve]] = {"Time per token (ms)": {}, "Keys, values and index in memory (MiB)": {}}
    looks = kv_task.looks_of(row["policy"] for row in rows)
    for row in rows:
        memory = (row["memory"]["kv_bytes"] + row["memory"]["index_bytes"]) / (1 << 20)
        for curves, value in zip(panels.values(), (row["speed"]["tpot_ns"] / 1e6, memory), strict=True):
            curves.setdefault(row["title"], (looks[row["policy"]], {}))[1][row["tokens"]] = value
    figure = theme.curves_figure(panels, "context (tokens)", "", doubling=True)
    times = "; ".join(f"{row['title']} {row['speed']['tpot_ns'] / 1e6:.0f} ms at {row['tokens']:,}" for row in rows)
    head = ["tokens", "cache", "per token (ms)", "relative to full", *(f"{part} (ms)" for part in PARTS)]
    cells: list[list[Cell]] = [
        [
            f"{row['tokens']:,}", row["title"], row["speed"]["tpot_ns"] / 1e6, row["times_stock"],
            *(row["speed"]["parts_ns"][part] / 1e6 for part in PARTS), 100 * row["kv_share"], 100 * row["share_with_index"],
        ]
        for row in rows
    ]  # fmt: skip
    columns = [*head, "KV in memory (%)", "with index (%)"]
    return [picture(paper, "growth", figure, values=times), Table("By context (measured)", columns, cells, digits=2)]
