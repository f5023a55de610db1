"""Results of `kv bench`. Rows of one benchmark are all *measured* or all *modelled*; rows of a task are *measured*."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from llmcache.documents import check_schema, from_json, invalid
from llmcache.kv.pipeline.timeline import STAGES, Timeline

SCHEMA, TASK_SCHEMA = "llmcache.kv-bench/1", "llmcache.kv-task/1"
MEASURED, MODELLED = KINDS = ("measured", "modelled")


@dataclass(frozen=True)
class Observed:
    """Results of a run on this machine: times (ns) of its decode steps, total bytes and pages.

    `device`: time of commands to the *emulated* device, modelled and wall time apart; None without one. `timeline`: the
    spans of the last step.
    """

    steps_ns: tuple[int, ...]
    prefill_ns: int
    attended_tokens: int
    hit_ratio: float
    pages_up: int
    pages_down: int
    ping_pong_pages: int
    ping_pong_share: float
    device: Mapping[str, Any] | None
    timeline: Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One policy: times (ns) and bytes of one decode step, a token of every sequence; medians if measured.

    `stages_ns`: time in which any resource was busy with the stage. `exposed_ns`: time without computation. `beta`:
    Mc / Ms; None if nothing is on the SSD. `moved_bytes`: by link.
    """

    policy: str
    title: str
    token_ns: float
    stages_ns: Mapping[str, float]
    exposed_ns: float
    idle_share: float
    moved_bytes: Mapping[str, float]
    beta: float | None
    observed: Observed | None = None

    def speedup_over(self, other: Row) -> float:
        return other.token_ns / self.token_ns


@dataclass(frozen=True)
class Marks:
    """Expected minimum of a sweep of beta: `rule` = f_c / f_s (bytes/s of keys), or `m0` if memory is the limit."""

    f_c: float
    f_s: float
    m0: float | None

    @property
    def rule(self) -> float:
        """Beta by equation (1). Source: hillinfer.txt, section 3.3."""
        return self.f_c / self.f_s

    @property
    def expected(self) -> float:
        return self.rule if self.m0 is None else min(self.rule, self.m0)


@dataclass(frozen=True)
class Bench:
    """A whole benchmark; `marks`: the rows are a sweep of beta."""

    kind: str
    conditions: Mapping[str, Any]
    rows: tuple[Row, ...]
    marks: Marks | None = None
    notes: tuple[str, ...] = field(default=())

    def speedups(self, row: Row) -> dict[str, float]:
        return {other.policy: row.speedup_over(other) for other in self.rows if other.policy != row.policy}

    def document(self) -> dict[str, Any]:
        rows = [{**asdict(row), "speedup_over": self.speedups(row)} for row in self.rows]
        marks = self.marks
        marks_values = None if marks is None else {**asdict(marks), "rule": marks.rule, "expected": marks.expected}
        return {
            "schema": SCHEMA, "kind": self.kind, "conditions": dict(self.conditions), "rows": rows, "marks": marks_values,
            "notes": list(self.notes),
        }  # fmt: skip


# Tasks

STOCK = "stock"  # policy of the row of transformers' own cache
LOADING, QUERY, UPDATE, DECODING = PARTS = ("loading", "query", "update", "decoding")
"""Parts of the time of a token: fetching the selected tokens, selecting them, updating tables and index, and the rest
(the model, and gathering rows). Source: icecache.txt, figure 7c, which has loading, query, decoding and others.
"""
MOST = 0.5  # share of right answers from which the full cache is a valid reference


@dataclass(frozen=True)
class Answers:
    """Per context, the number of answers that are `right`, and of those `asked`; `depths`: 0..1, position in the context.

    `kept`: number of `right` answers that transformers' own cache has right too.
    """

    right: tuple[int, ...]
    asked: tuple[int, ...]
    depths: tuple[float, ...] | None = None
    kept: tuple[int, ...] | None = None

    @property
    def questions(self) -> int:
        return sum(self.asked)

    @property
    def share(self) -> float:
        return sum(self.right) / self.questions

    @property
    def error(self) -> float:
        """Standard error of the share: over contexts, whose answers are correlated, or over questions for one context."""
        if len(self.asked) < 2:
            return math.sqrt(self.share * (1 - self.share) / self.questions)
        off = [right - self.share * asked for right, asked in zip(self.right, self.asked, strict=True)]
        count = len(off)
        return math.sqrt(sum(one * one for one in off) * count / (count - 1)) / self.questions

    def by_depth(self) -> dict[float, float]:
        found: dict[float, list[int]] = {}
        for right, asked, depth in zip(self.right, self.asked, self.depths or [], strict=False):
            sums = found.setdefault(depth, [0, 0])
            sums[0] += right
            sums[1] += asked
        return {depth: right / asked for depth, (right, asked) in sorted(found.items())}


@dataclass(frozen=True)
class Attention:
    """Quality of the selection, means over steps, layers and query heads.

    `recall`: share of the k middle tokens with the largest weights among the k selected. `mass`: share of all weights on
    attended tokens, sink and window included.
    """

    recall: float
    mass: float


@dataclass(frozen=True)
class Speed:
    """One sequence, medians over decode steps. `tt2t_ns`: prefill and one step. `parts_ns`: by `PARTS`, of `tpot_ns`."""

    steps: int
    prefill_ns: int
    tt2t_ns: int
    tpot_ns: float
    parts_ns: Mapping[str, float]


@dataclass(frozen=True)
class KvMemory:
    """Bytes in memory for one sequence at the end."""

    kv_bytes: int
    index_bytes: int


@dataclass(frozen=True)
class TaskRow:
    """One cache at one context. `budget`: None if it attends to everything. `moved_bytes`: per step, by link.

    For the task `loss`, in nats: `losses` has the mean of -log p over the next tokens of each text; `divergences` has the
    mean Kullback-Leibler divergence from the full cache, which varies less by chance than a difference of losses.
    """

    policy: str
    title: str
    context: int
    budget: int | None
    answers: Answers
    speed: Speed
    memory: KvMemory
    moved_bytes: Mapping[str, float] = field(default_factory=dict)
    spilled_bytes: int = 0
    hit_ratio: float = 1.0
    attention: Attention | None = None
    losses: tuple[float, ...] | None = None
    divergences: tuple[float, ...] | None = None

    @property
    def name(self) -> str:
        return self.title if self.budget is None else f"{self.title} {self.budget}"


@dataclass(frozen=True)
class TaskBench:
    """All rows of a task."""

    task: str
    conditions: Mapping[str, Any]
    rows: tuple[TaskRow, ...]

    @property
    def contexts(self) -> list[int]:
        return sorted({row.context for row in self.rows})

    def stock(self, context: int) -> TaskRow:
        return next(row for row in self.rows if row.policy == STOCK and row.context == context)

    def kept(self, row: TaskRow) -> float | None:
        """Return the share of the full cache's right answers that `row` has; None without a valid reference (`MOST`)."""
        full = self.stock(row.context).answers
        return None if row.answers.kept is None or full.share < MOST else sum(row.answers.kept) / sum(full.right)

    def above(self, row: TaskRow) -> tuple[float, float] | None:
        """Return the loss of `row` above the full cache's and its standard error, in nats per token; None without losses."""
        full = self.stock(row.context).losses
        if row.losses is None or full is None:
            return None
        return mean_of([one - other for one, other in zip(row.losses, full, strict=True)])

    def at(self, context: int) -> list[TaskRow]:
        return [row for row in self.rows if row.context == context]

    def document(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            values = asdict(row)
            values["answers"] |= {"questions": row.answers.questions, "share": row.answers.share, "error": row.answers.error}
            values |= {"kept": self.kept(row), "above": self.above(row)}
            rows.append(values)
        about = {"schema": TASK_SCHEMA, "kind": "measured", "task": self.task, "conditions": dict(self.conditions)}
        return {**about, "rows": rows}


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error; NaN for a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


# Parsing results


def read_bench(document: object, source: str) -> Bench:
    """Return the benchmark that `Bench.document` wrote; DataError names `source` and the invalid field."""
    with invalid(source, "create it with 'llmcache kv bench --json'"):
        check_schema(document, SCHEMA)
        bench: Bench = from_json(Bench, document)
        if bench.kind not in KINDS:
            raise ValueError(f"kind: must be one of {', '.join(KINDS)}, not {bench.kind!r}")
        if not bench.rows:
            raise ValueError("rows: the document has none")
        for row in bench.rows:
            if lacking := [stage for stage in STAGES if stage not in row.stages_ns]:
                raise ValueError(f"stages_ns: {lacking[0]}: missing")
            if row.observed is not None:
                Timeline.from_json(dict(row.observed.timeline))
        return bench


def read_task(document: Mapping[str, Any], source: str) -> TaskBench:
    """Return the results that `TaskBench.document` wrote; DataError names `source` and the invalid field."""
    with invalid(source, "create it with 'llmcache kv bench --task … --json'"):
        bench: TaskBench = from_json(TaskBench, document)
        if not bench.rows:
            raise ValueError("rows: the document has none")
        for row in bench.rows:
            found = row.answers
            sides = (side for side in (found.asked, found.depths, found.kept) if side is not None)
            if not sum(found.asked) or {len(found.right)} != {len(side) for side in sides}:
                raise ValueError("answers: right, asked, depths and kept have different lengths")
            if lacking := [part for part in PARTS if part not in row.speed.parts_ns]:
                raise ValueError(f"parts_ns: {lacking[0]}: missing")
        if without := [at for at in bench.contexts if not any(row.policy == STOCK for row in bench.at(at))]:
            raise ValueError(f"rows: '{STOCK}' has none at {without[0]} tokens")
        return bench
