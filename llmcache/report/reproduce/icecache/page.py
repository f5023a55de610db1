"""icecache recomputed, as a page: the paper's tables as it prints them, and beside them, never among them, what is ours."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence

from llmcache.kv.bench.task_results import PARTS, TaskBench
from llmcache.report import kv_task, kv_task_figures
from llmcache.report.claims import Judged, claims_table, rules_table, verdicts_table
from llmcache.report.html import Block, Cell, Facts, Fold, Section, Table, Text, html_page
from llmcache.report.reproduce.icecache.measured import OURS, Measured
from llmcache.report.reproduce.icecache.paper import BLANK, FIGURE7, FIGURE7C, PAPER, TABLE1, TABLE2, TABLE3, TABLE4, TABLE6
from llmcache.report.reproduce.icecache.pictures import growth_figure
from llmcache.report.reproduce.icecache.times import Rows, share_of_stock
from llmcache.report.theme import embedded

MEASURED = "measured here"
LEAD = (
    "What the paper says of answers, time and memory, beside what a small model and this processor give. “Paper” are its "
    "own numbers, of its models on its GPUs; where nothing stands beside them, they could not be measured here. “Measured "
    "here” are the answers of a model of 460 000 parameters that was trained to recall, and times of a model with random "
    "weights: they tell what choosing and spilling cost, not how the paper's models answer. Every verdict is computed from "
    "the numbers beside it."
)
OWN_MODEL = (
    "The same harness asks a model of yours, with its tokenizer, in English: "
    "llmcache kv bench --task passkey --model DIR --policy icecache,quest,window --budget 64,128,256 --context 8k,32k "
    "--plot passkey.html; likewise --task recall and --task needle."
)
_NOT_HERE = "not here"
_NOTE = (
    "Three things differ from the paper. Without a GPU there is no second memory: what the policy keeps to choose by (all "
    "keys where it scans exactly) lies in the same one, and counts in the last column. Pages come from an SSD, not by PCIe "
    "from the host, and keys drawn by chance are scattered, so that loading takes most. And the model has four layers, of "
    "which reuse lets the first two attend to everything, as in the paper's models of 32 and more: here half of them."
)


def page(found: Measured, claims: Mapping[str, Sequence[Judged]]) -> str:
    """Returns the page."""
    sections = [
        Section("Verdicts", [verdicts_table(claims, OURS), Text(OWN_MODEL)]),
        Section("Passkeys (the paper's figure 6)", _task(found, claims, "passkey", "figure 6", "Section 5.2")),
        Section(
            "Answers (tables 1, 2 and 5)", [*_averages(), *_task(found, claims, "recall", "tables 1, 2 and 5", "The text")]
        ),
        Section(
            "Long generation (tables 3 and 6)", [*_long(), *_task(found, claims, "chain", "tables 3 and 6", "Section 5.4")]
        ),
        Section("Needles (table 4)", [_ruler(), *_task(found, claims, "needle", "table 4", "Section 5.5")]),
        Section("Memory and time (figures 1, 7 and 8)", _times(found, claims)),
        Section("What stays blank", [Table("Not measured here", ["where", "what", "why"], [list(row) for row in BLANK])]),
        Section("Conditions", [_conditions(found)]),
    ]
    return html_page(f"Recomputed: {PAPER['title']}", LEAD, sections)


def _task(found: Measured, claims: Mapping[str, Sequence[Judged]], name: str, about: str, where: str) -> list[Block]:
    bench = found.tasks.get(name)
    if bench is None:
        return [Text(f"Not measured. {found.missing[name]}")]
    blocks: list[Block] = []
    for claim in claims[about]:  # claims differ in the variants that they are of
        titles = {variant: OURS.get(variant, variant) for variant in claim.findings}
        blocks.append(claims_table(f"{where}: {claim.name}", [claim], titles, MEASURED))
    blocks.append(Fold("When a claim counts as confirmed", [rules_table(claims[about])]))
    return [*blocks, *_pictures(bench), Fold("The numbers", [kv_task.page_table(bench)])]


def _pictures(bench: TaskBench) -> list[Block]:
    told, under = kv_task.alt_text(bench), kv_task.caption(bench)
    depths = kv_task_figures.depth_figure(bench) if bench.task == "passkey" else None
    if depths is not None:
        return [embedded(depths, f"Right answers by depth. {told}", under)]
    if len({row.budget for row in bench.rows}) <= 2:
        return []
    part = kv_task_figures.parts_of(bench)[0]
    return [embedded(kv_task_figures.part_figure(bench, part), told, under)]


def _averages() -> list[Block]:
    columns = ["method", "budget", "Llama-3.1-8B (paper)", "Mistral-7B (paper)", "measured here"]
    rows: list[list[Cell]] = [
        [name, _budget(budget), _blank(one), _blank(other), _NOT_HERE] for name, budget, one, other in TABLE1
    ]
    others: list[list[Cell]] = [[name, _budget(budget), one, other, _NOT_HERE] for name, budget, one, other in TABLE2]
    names = ["method", "budget", "Qwen3-32B (paper)", "LongChat-7B (paper)", "measured here"]
    return [
        Table("Averages over LongBench, tables 1 and 5, as the paper prints them", columns, rows, digits=1),
        Table("Averages over LongBench, table 2, as the paper prints them", names, others, digits=1),
        Text("What follows is another task: 64 pairs of key and value in noise, half of which are asked for."),
    ]


def _long() -> list[Block]:
    gsm: list[list[Cell]] = [[name, budget, value, _NOT_HERE] for name, budget, value in TABLE3]
    bench: list[list[Cell]] = [[name, done, right, _NOT_HERE] for name, done, right in TABLE6]
    return [
        Table(
            "GSM8K, table 3, as the paper prints it",
            ["method", "budget", "right (%, paper)", "measured here"],
            gsm,
            digits=1,
        ),
        Table("LongGenBench, table 6", ["method", "completed (%, paper)", "accuracy (paper)", "measured here"], bench),
        Text(
            "What follows is another task: a chain of 32 questions, each decided by the answer before it, so that one wrong "
            "answer leads astray; with a budget of a tenth of the context, as table 3 has it."
        ),
    ]


def _ruler() -> Block:
    columns = [
        "method",
        "k tokens",
        "single needle (%, paper)",
        "several keys (%, paper)",
        "questions (%, paper)",
        "measured here",
    ]
    rows: list[list[Cell]] = [[*row, _NOT_HERE] for row in TABLE4]
    return Table("RULER, table 4, as the paper prints it", columns, rows, digits=1)


def _times(found: Measured, claims: Mapping[str, Sequence[Judged]]) -> list[Block]:
    seconds: list[list[Cell]] = [
        [name, _NOT_HERE if second is None else second, _NOT_HERE if token is None else token]
        for name, second, token in FIGURE7
    ]
    parts = ", ".join(f"{part} {value:g} s" for part, value in FIGURE7C.items())
    blocks: list[Block] = [
        Table(
            "Seconds at 36 k tokens on an A100 (paper, text of section 5.3.2)", ["method", "2nd token", "a token"], seconds
        ),
        Text(f"Of IceCache's 0.11 s a token the paper tells: {parts}."),
    ]
    if found.lengths is None:
        return [*blocks, Text(f"Not measured here. {found.missing['lengths']}")]
    for claim in claims["figures 1, 7 and 8"]:
        blocks.append(claims_table(claim.name, [claim], {name: name for name in claim.findings}, MEASURED))
    blocks.append(Fold("When a claim counts as confirmed", [rules_table(claims["figures 1, 7 and 8"])]))
    blocks.append(Text(_NOTE))
    under = "Measured on this processor: random weights, a prompt of keys and values drawn by chance, budget 256."
    told = "; ".join(f"{row.title} {row.speed.tpot_ns / 1e6:.0f} ms at {row.tokens:,}" for row in found.lengths)
    return [
        *blocks,
        embedded(growth_figure(found.lengths), f"Time of a token by context: {told}.", under),
        _lengths(found.lengths),
    ]


def _lengths(rows: Rows) -> Block:
    columns = [
        "tokens",
        "cache",
        "a token (ms)",
        "times full",
        *(f"{part} (ms)" for part in PARTS),
        "KV in memory (%)",
        "with index (%)",
    ]
    cells: list[list[Cell]] = [
        [
            f"{row.tokens:,}", row.title, row.speed.tpot_ns / 1e6, row.times(full),
            *(row.speed.parts_ns[part] / 1e6 for part in PARTS), 100 * row.kv_share(full), 100 * row.share_with_index(full),
        ]
        for row, full in share_of_stock(rows)
    ]  # fmt: skip
    return Table(f"By context ({MEASURED})", columns, cells, digits=2)


def _budget(budget: int | None) -> str:
    return "all" if budget is None else str(budget)


def _blank(value: float) -> Cell:
    return "not printed" if math.isnan(value) else value


def _conditions(found: Measured) -> Block:
    facts = [
        ("processor", f"{platform.machine()}, Linux {platform.release()}"),
        ("python", platform.python_version()),
        ("not measured", ", ".join(found.missing) or "nothing is missing of what can be measured"),
    ]
    for name, bench in found.tasks.items():
        facts.append((name, ", ".join(f"{what} {value}" for what, value in kv_task.facts(bench))))
    return Facts(facts)
