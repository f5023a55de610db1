"""What `kv bench` found; the same dataclasses feed the table, the JSON and the pictures.

Of policies: one row a policy (or a beta), all measured or all modelled, never mixed. Of tasks, all *measured*: answers,
attention, time, bytes and memory, a row for each policy, budget and context.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from llmcache.errors import DataError
from llmcache.kv.pipeline.timeline import STAGES, Timeline

SCHEMA, TASK_SCHEMA = "llmcache.kv-bench/1", "llmcache.kv-task/1"
MEASURED, MODELLED = KINDS = ("measured", "modelled")


@dataclass(frozen=True)
class Observed:
    """What only a run on this machine has, over its decode steps: times ns, bytes and pages in all.

    `steps_ns`: each decode step. `device`: what commands to the *emulated* device took, modelled and wall time apart;
    None without one. `timeline`: the spans of the last step.
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
    """One policy: times (ns) and bytes of one decode step, a token of every sequence; medians where it is measured.

    `stages_ns`: evaluate, fetch, compute, update, each as long as any resource was busy with it. `exposed_ns`: what of
    the token's time nothing computes. `beta`: Mc / Ms; None if nothing is on the SSD. `moved_bytes`: by link.
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
        """Returns how many times as fast it is as `other`."""
        return other.token_ns / self.token_ns


@dataclass(frozen=True)
class Marks:
    """Where a sweep of beta should have its minimum: at `rule`, f_c / f_s, or at `m0` where memory ends before it.

    `f_c`, `f_s`: bytes/s of keys.
    """

    f_c: float
    f_s: float
    m0: float | None

    @property
    def rule(self) -> float:
        """Beta by equation (1). Source: hillinfer.txt, section 3.3."""
        return self.f_c / self.f_s

    @property
    def expected(self) -> float:
        """The smaller of both."""
        return self.rule if self.m0 is None else min(self.rule, self.m0)


@dataclass(frozen=True)
class Bench:
    """A whole benchmark. `conditions` names everything that was set; `marks`: rows are a sweep of beta."""

    kind: str
    conditions: Mapping[str, Any]
    rows: tuple[Row, ...]
    marks: Marks | None = None
    notes: tuple[str, ...] = field(default=())

    def speedups(self, row: Row) -> dict[str, float]:
        """Returns how many times as fast as each other policy `row` is; nothing in a sweep, whose rows are of one policy."""
        return {other.policy: row.speedup_over(other) for other in self.rows if other.policy != row.policy}

    def document(self) -> dict[str, Any]:
        """Returns it as JSON-ready values."""
        rows = [{**asdict(row), "speedup_over": self.speedups(row)} for row in self.rows]
        marks = self.marks
        told = None if marks is None else {**asdict(marks), "rule": marks.rule, "expected": marks.expected}
        return {
            "schema": SCHEMA, "kind": self.kind, "conditions": dict(self.conditions), "rows": rows, "marks": told,
            "notes": list(self.notes),
        }  # fmt: skip


# Tasks

STOCK = "stock"
"""Name of the row of transformers' own cache."""
LOADING, QUERY, UPDATE, DECODING = PARTS = ("loading", "query", "update", "decoding")
"""Of the time of a token: fetching what is chosen, choosing it, tables and index, and the rest (the model, and putting
rows side by side). Source: icecache.txt, figure 7c, which has loading, query, decoding and others."""
MOST = 0.5
"""Share of right answers from which on the full cache counts as one that answers."""


@dataclass(frozen=True)
class Answers:
    """Answers: `right` and `asked` of each context, in their order; `depths`: where in it the answer lies, 0..1.

    `kept`: of `right`, those that transformers' own cache has right too.
    """

    right: tuple[int, ...]
    asked: tuple[int, ...]
    depths: tuple[float, ...] | None = None
    kept: tuple[int, ...] | None = None

    @property
    def questions(self) -> int:
        """How many."""
        return sum(self.asked)

    @property
    def share(self) -> float:
        """Share of right answers, 0 .. 1."""
        return sum(self.right) / self.questions

    @property
    def error(self) -> float:
        """Standard error of the share: over contexts, whose answers are alike; with one context, over its questions."""
        if len(self.asked) < 2:
            return math.sqrt(self.share * (1 - self.share) / self.questions)
        off = [right - self.share * asked for right, asked in zip(self.right, self.asked, strict=True)]
        count = len(off)
        return math.sqrt(sum(one * one for one in off) * count / (count - 1)) / self.questions

    def by_depth(self) -> dict[float, float]:
        """Returns the share of right answers at each depth, ascending; empty without depths."""
        found: dict[float, list[int]] = {}
        for right, asked, depth in zip(self.right, self.asked, self.depths or [], strict=False):
            sums = found.setdefault(depth, [0, 0])
            sums[0] += right
            sums[1] += asked
        return {depth: right / asked for depth, (right, asked) in sorted(found.items())}


@dataclass(frozen=True)
class Attention:
    """How well tokens are chosen, means over steps, layers and query heads, against the attention over everything.

    `recall`: of as many middle tokens with the largest weights as were chosen, the share that was. `mass`: the share of
    all weights that fell on what was attended to, sink and window included.
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
    """Bytes in memory for one sequence at the end: pages of keys and values, and what the policy keeps beside them."""

    kv_bytes: int
    index_bytes: int


@dataclass(frozen=True)
class TaskRow:
    """One cache at one context. `budget`: None where everything is attended to. `moved_bytes`: of a step, by link.

    `losses`: of each text, the mean of -log p over its next tokens; `divergences`: that of the Kullback-Leibler divergence
    from what the full cache gives, which is less than a difference of losses a matter of chance; both in nats, and None
    unless the task is `loss`.
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
        """Title and budget."""
        return self.title if self.budget is None else f"{self.title} {self.budget}"


@dataclass(frozen=True)
class TaskBench:
    """All rows of a task; `conditions` names everything that was set."""

    task: str
    conditions: Mapping[str, Any]
    rows: tuple[TaskRow, ...]

    @property
    def contexts(self) -> list[int]:
        """The contexts, ascending."""
        return sorted({row.context for row in self.rows})

    def stock(self, context: int) -> TaskRow:
        """Returns the row of transformers' own cache at a context."""
        return next(row for row in self.rows if row.policy == STOCK and row.context == context)

    def kept(self, row: TaskRow) -> float | None:
        """Returns the share of the full cache's right answers that `row` has; None unless the full cache answers most."""
        full = self.stock(row.context).answers
        return None if row.answers.kept is None or full.share < MOST else sum(row.answers.kept) / sum(full.right)

    def above(self, row: TaskRow) -> tuple[float, float] | None:
        """Returns by how much the loss of `row` is above the full cache's, in nats a token, and its standard error.

        None unless the task is `loss`; the error of one text is NaN.
        """
        full = self.stock(row.context).losses
        if row.losses is None or full is None:
            return None
        return mean_of([one - other for one, other in zip(row.losses, full, strict=True)])

    def at(self, context: int) -> list[TaskRow]:
        """Returns the rows of a context."""
        return [row for row in self.rows if row.context == context]

    def document(self) -> dict[str, Any]:
        """Returns it as JSON-ready values, with what follows from them."""
        rows = []
        for row in self.rows:
            told = asdict(row)
            told["answers"] |= {"questions": row.answers.questions, "share": row.answers.share, "error": row.answers.error}
            told |= {"kept": self.kept(row), "above": self.above(row)}
            rows.append(told)
        about = {"schema": TASK_SCHEMA, "kind": "measured", "task": self.task, "conditions": dict(self.conditions)}
        return {**about, "rows": rows}


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and its standard error; NaN of a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


# Reading what was written


def read_bench(told: object, source: str) -> Bench:
    """Returns the benchmark in `told`, what `document` gave; DataError, naming `source` and the field, if it is none."""
    with _written_by("llmcache kv bench --json", source):
        if not isinstance(told, dict) or told.get("schema") != SCHEMA:
            found = told.get("schema") if isinstance(told, dict) else None
            raise ValueError(f"schema: must be '{SCHEMA}', not {found!r}")
        bench: Bench = _read(Bench, told, "benchmark")
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


def read_task(told: Mapping[str, Any], source: str) -> TaskBench:
    """Returns the results in `told`, what `document` gave; DataError, naming `source` and the field, if it has none."""
    with _written_by("llmcache kv bench --task … --json", source):
        bench: TaskBench = _read(TaskBench, told, "results")
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


def _read(kind: Any, told: Any, name: str) -> Any:
    """A value of type `kind` from what `asdict` and JSON have made of it; an error tells which field is not of its type.

    Fields that have a default may be missing, and there may be more than the dataclass has: what follows from them.
    """
    inside = get_args(kind)
    if type(None) in inside:
        return None if told is None else _read(inside[0], told, name)
    if isinstance(kind, type) and is_dataclass(kind):
        types = get_type_hints(kind)
        needed = [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]
        given = {field: told[field] for field in types if field in needed or field in told}
        return kind(**{field: _read(types[field], value, field) for field, value in given.items()})
    if get_origin(kind) is tuple:
        return tuple(_read(inside[0], value, name) for value in told)
    if get_origin(kind) is Mapping:
        return {key: _read(inside[1], value, f"{name}: {key}") for key, value in told.items()}
    if kind in (int, float) and (isinstance(told, bool) or not isinstance(told, int | float)):
        raise ValueError(f"{name}: {told!r} is not a number")
    return told


@contextmanager
def _written_by(command: str, source: str) -> Iterator[None]:
    """Makes of what is wrong with a document that `command` writes a DataError that names `source` and the field."""
    try:
        yield
    except KeyError as error:
        raise DataError(f"{source}: {error.args[0]}: missing", f"create it with '{command}'") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{source}: {error}", f"create it with '{command}'") from error
