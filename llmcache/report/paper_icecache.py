"""IceCache (ICLR 2026) recomputed: what its tables and figures claim, asked of a small model that recalls.

The paper's models and data sets are not downloaded: their tables stand on the page as the paper prints them, and ours not
among them (`llmcache/papers/icecache.toml`). `tools/bench papers` has measured the answers of the recall model, and times
of a model with random weights; `llmcache kv bench --task … --model DIR` asks a model of the user's the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from llmcache.kv.bench.results import PARTS, QUERY, STOCK, TaskBench, TaskRow, read_task
from llmcache.report import kv_task, theme
from llmcache.report.html import Cell, Facts, Fold, HtmlBlock, Table, Text
from llmcache.report.judge import Measure, Measures, Paper, judge, read_paper
from llmcache.report.reproduce import Reproduction, Tell, machine_words, measurements, picture

ICE, REUSE = "icecache", "icecache-reuse"
OURS = (ICE, "icecache-dci", "icecache-pages")
"""Variants whose answers are judged: `auto` scores exactly at these lengths; the paper's own is the last."""
RIVALS = ("quest", "h2o", "window")
TASKS = {"passkey": "figure 6", "recall": "tables 1, 2 and 5", "chain": "tables 3 and 6", "needle": "table 4"}
"""What claims about a task are about."""
TIMES = "figures 1, 7 and 8"
Length = Mapping[str, Any]
"""A cache at a length of context, as `kv.bench.lengths` writes it: times, memory, shares of transformers' own cache."""


# Answers: figure 6 and tables 1 to 6


def row_of(bench: TaskBench, policy: str, budget: int | None = None, context: int | None = None) -> TaskRow:
    """Returns the row of a policy; None: its largest budget, the longest context."""
    at = bench.contexts[-1] if context is None else context
    rows = [row for row in bench.at(at) if row.policy == policy and budget in (None, row.budget)]
    return max(rows, key=lambda row: row.budget or 0)


def _words(rows: Sequence[TaskRow]) -> str:
    return ", ".join(f"{row.name} {row.answers.share:.3f} ± {row.answers.error:.3f}" for row in rows)


def _budgets(bench: TaskBench) -> list[int]:
    return sorted({row.budget for row in bench.rows if row.budget is not None})


def every_passkey(bench: TaskBench, policy: str) -> Measure:
    """Measures how many passkeys are found, at every depth, context and budget."""
    rows = [row for row in bench.rows if row.policy == policy]
    right, asked = sum(sum(row.answers.right) for row in rows), sum(row.answers.questions for row in rows)
    least = min(rows, key=lambda row: row.answers.share)
    at = f"{least.context:,} tokens and a budget of {least.budget}"
    return Measure(f"{right} of {asked}; least: {least.answers.share:.1%} at {at}", {"share": right / asked})


def kept(bench: TaskBench, policy: str) -> Measure:
    """Measures how much of the full cache's answers the largest budget keeps, at the context where it keeps least."""
    rows = [row_of(bench, policy, context=context) for context in bench.contexts]
    fulls = [bench.stock(row.context).answers.share for row in rows]
    relative = min(row.answers.share / full if full else 0.0 for row, full in zip(rows, fulls, strict=True))
    return Measure(f"{relative:.1%} of the full cache's ({_words(rows)})", {"relative": relative})


def quarter(bench: TaskBench, policy: str) -> Measure:
    """Measures by how much a budget of 64 answers better than the best other policy with 256."""
    own, others = row_of(bench, policy, 64), [row_of(bench, rival, 256) for rival in RIVALS]
    lead = own.answers.share - max(row.answers.share for row in others)
    return Measure(f"{_words([own])}; {_words(others)}", {"lead": lead})


def outperforms(bench: TaskBench, policy: str) -> Measure:
    """Measures by how much it answers better than each other policy at each equal budget."""
    leads = {
        f"{rival} {budget}": row_of(bench, policy, budget).answers.share - row_of(bench, rival, budget).answers.share
        for budget in _budgets(bench)
        for rival in RIVALS
    }
    words = "lead over " + ", ".join(f"{name} {lead:+.3f}" for name, lead in leads.items())
    return Measure(words, leads | {"share_ahead": sum(lead > 0 for lead in leads.values()) / len(leads)})


def near_exact(bench: TaskBench, policy: str) -> Measure:
    """Measures how many answers fewer it gives than choosing by an exact scan of all keys, at each budget."""
    losses = {
        str(budget): row_of(bench, ICE, budget).answers.share - row_of(bench, policy, budget).answers.share
        for budget in _budgets(bench)
    }
    told = ", ".join(f"budget {budget}: {-loss:+.3f}" for budget, loss in losses.items())
    return Measure(f"against the exact scan, {told}", losses | {"worst": max(losses.values())})


ANSWERS: dict[str, dict[str, Callable[[TaskBench, str], Measure]]] = {
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
"""Measures by task and claim."""


# Time and memory: figures 1, 7 and 8, with random weights


def _of(rows: Sequence[Length], policy: str) -> list[Length]:
    """Returns the rows of a policy, shortest context first."""
    return sorted((row for row in rows if row["policy"] == policy), key=lambda row: int(row["tokens"]))


def memory_and_time(rows: Sequence[Length]) -> Measure:
    """Measures how much of the full cache's memory, index included, and of its time IceCache takes at the longest context.

    Differs from the paper: it counts the memory of the GPU, and its index is in the host's; here there is one memory.
    """
    own = _of(rows, ICE)
    last, faster = own[-1], None
    for row in reversed(own):
        if row["times_stock"] >= 1:
            break
        faster = row["tokens"]
    told = "at no length measured" if faster is None else f"from {faster:,} tokens on"
    pages, whole, times = (float(last[name]) for name in ("kv_share", "share_with_index", "times_stock"))
    words = f"{pages:.1%} of the memory ({whole:.1%} with index), {times:.2f} times the time at {last['tokens']:,}; "
    return Measure(f"{words}faster {told}", {"kv_share": pages, "share_with_index": whole, "times": times})


def breakdown(rows: Sequence[Length]) -> Measure:
    """Measures which parts of a token's time are the largest, at the longest context."""
    parts = _of(rows, ICE)[-1]["speed"]["parts_ns"]
    order = sorted(PARTS, key=lambda part: -parts[part])
    leading = len({*order[:2]} & {"query", "decoding"})
    places = {"query_place": order.index(QUERY) + 1, "decoding_place": order.index("decoding") + 1}
    words = ", ".join(f"{part} {parts[part] / 1e6:.1f} ms" for part in order)
    return Measure(words, {**parts, "leading": leading, **places})


def growth(rows: Sequence[Length]) -> Measure:
    """Measures how much the time of a token grows with the context, against the full cache's."""
    grown = {}
    for name in (ICE, STOCK):
        own = _of(rows, name)
        grown[name] = own[-1]["speed"]["tpot_ns"] - own[0]["speed"]["tpot_ns"]
    ratio = grown[ICE] / grown[STOCK] if grown[STOCK] > 0 else 1e9
    first, last = (pick(row["tokens"] for row in rows) for pick in (min, max))
    words = f"{grown[ICE] / 1e6:+.1f} ms against {grown[STOCK] / 1e6:+.1f} ms from {first:,} to {last:,} tokens"
    return Measure(words, {"ratio": ratio})


def reuse_faster(rows: Sequence[Length]) -> Measure:
    """Measures how long a token takes with the choice of an anchor layer, at the longest context."""
    own, plain = (_of(rows, name)[-1]["speed"]["tpot_ns"] for name in (REUSE, ICE))
    return Measure(f"{own / 1e6:.1f} ms against {plain / 1e6:.1f} ms", {"ratio": own / plain})


def length_measures(rows: Sequence[Length]) -> dict[str, dict[str, Measure]]:
    """Returns what is claimed of time and memory."""
    found = {"memory-and-time": memory_and_time, "breakdown": breakdown, "slower-growth": growth}
    measures = {name: {ICE: measure(rows)} for name, measure in found.items()}
    return measures | {"reuse-is-faster": {REUSE: reuse_faster(rows)}}


# The reproduction


def reproduce(quick: bool, tell: Tell) -> Reproduction:
    """Returns the paper recomputed. `quick` changes nothing: what is measured is saved."""
    paper, measured = read_paper("icecache"), measurements("icecache")
    judged = judge(paper, measures(measured))
    told = {
        "blank": [{"where": where, "what": what, "why": why} for where, what, why in paper.data["blank"]],
        "measured_here": {"kind": "measured", **{key: one for key, one in measured.items() if key != "schema"}},
    }
    return Reproduction("icecache", paper, judged, told, lambda: _blocks(paper, measured))


def _benches(measured: Mapping[str, Any]) -> dict[str, TaskBench]:
    return {name: read_task(one, f"icecache.json: {name}") for name, one in measured["tasks"].items()}


def measures(measured: Mapping[str, Any]) -> Measures:
    """Returns what is measured of every claim; what was not measured is left out."""
    found: dict[str, dict[str, dict[str, Measure]]] = {}
    for task, bench in _benches(measured).items():
        # An exact scan is not compared with itself.
        found[TASKS[task]] = {
            name: {variant: measure(bench, variant) for variant in OURS if name != "near-top-k" or variant != ICE}
            for name, measure in ANSWERS[task].items()
        }
    rows = measured["lengths"]["rows"]
    return found | ({TIMES: length_measures(rows)} if rows else {})


# The page


def _blocks(paper: Paper, measured: Mapping[str, Any]) -> dict[str, list[HtmlBlock]]:
    titles = {about: section["title"] for section in paper.sections for about in section.get("about", ())}
    blocks: dict[str, list[HtmlBlock]] = {title: [] for title in titles.values()}
    for printed in paper.data["printed"]:
        table = Table(printed["caption"], printed["columns"], printed["rows"], printed["digits"])
        blocks[printed["section"]].append(table)
    facts = machine_words(measured)
    for task, bench in _benches(measured).items():
        blocks[titles[TASKS[task]]] += [*_pictures(bench), Fold("The numbers", [kv_task.page_table(bench)])]
        facts.append((task, ", ".join(f"{what} {value}" for what, value in kv_task.facts(bench))))
    if rows := measured["lengths"]["rows"]:
        blocks[titles[TIMES]] += _times(paper, rows)
    for name, why in measured["missing"].items():
        blocks[titles[TASKS.get(name, TIMES)]].append(Text(f"Not measured: {name}. {why}"))
    blank = Table("Not measured", ["where", "what", "why"], paper.data["blank"])
    return {**blocks, "What stays blank": [blank], "Conditions": [Facts(facts)]}


def _pictures(bench: TaskBench) -> list[HtmlBlock]:
    told, under = kv_task.alt_text(bench), kv_task.caption(bench)
    depths = kv_task.depth_figure(bench) if bench.task == "passkey" else None
    if depths is not None:
        return [theme.embedded(depths, f"Right answers by depth. {told}", under)]
    if len(_budgets(bench)) <= 1:
        return []
    return [theme.embedded(kv_task.figure_of(bench, ["accuracy"]), told, under)]


def _times(paper: Paper, rows: Sequence[Length]) -> list[HtmlBlock]:
    told = "; ".join(f"{row['title']} {row['speed']['tpot_ns'] / 1e6:.0f} ms at {row['tokens']:,}" for row in rows)
    head = ["tokens", "cache", "a token (ms)", "times full", *(f"{part} (ms)" for part in PARTS)]
    cells: list[list[Cell]] = [
        [
            f"{row['tokens']:,}", row["title"], row["speed"]["tpot_ns"] / 1e6, row["times_stock"],
            *(row["speed"]["parts_ns"][part] / 1e6 for part in PARTS), 100 * row["kv_share"], 100 * row["share_with_index"],
        ]
        for row in rows
    ]  # fmt: skip
    columns = [*head, "KV in memory (%)", "with index (%)"]
    return [
        picture(paper, "growth", _growth_figure(rows), told=told),
        Table("By context (measured)", columns, cells, digits=2),
    ]


def _growth_figure(rows: Sequence[Length]) -> Figure:
    """Returns time of a token and memory over the context, a line for each cache (figures 8 and 1)."""
    contexts = sorted({row["tokens"] for row in rows})
    figure, axes = theme.grid_of(2)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = _of(rows, policy)
        line = kv_task.look_of(policy).line() | ({"linestyle": ":"} if "-" in policy else {})
        tokens, title = [row["tokens"] for row in own], own[0]["title"]
        axes[0].plot(tokens, [row["speed"]["tpot_ns"] / 1e6 for row in own], label=title, **line)
        memory = [row["memory"]["kv_bytes"] + row["memory"]["index_bytes"] for row in own]
        axes[1].plot(tokens, [size / (1 << 20) for size in memory], label=title, **line)
    titles = {"Time of a token": "time per token (ms)", "Keys, values and index in memory": "MiB"}
    for panel, (title, label) in zip(axes, titles.items(), strict=True):
        theme.powers_of_2(panel, contexts, map("{:,}".format, contexts), "context (tokens)")
        panel.set(ylim=(0, None), ylabel=label, title=title)
    theme.legend_below(figure, axes)
    return figure
