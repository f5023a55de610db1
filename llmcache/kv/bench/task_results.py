"""What tasks found: answers, attention, time, bytes and memory, a row for each policy, budget and context. *Measured*."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from llmcache.errors import DataError

SCHEMA = "llmcache.kv-task/1"
STOCK = "stock"
"""Name of the row of transformers' own cache."""
LOADING, QUERY, UPDATE, DECODING = PARTS = ("loading", "query", "update", "decoding")
"""Of the time of a token: fetching what is chosen, choosing it, tables and index, and the rest (the model, and putting
rows side by side). Source: icecache.txt, figure 7c, which has loading, query, decoding and others."""
MOST = 0.5
"""Share of right answers from which on the full cache counts as one that answers."""
_HINT = "write it with 'llmcache kv bench --task … --json'"


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
class Memory:
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
    memory: Memory
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
        about = {"schema": SCHEMA, "kind": "measured", "task": self.task, "conditions": dict(self.conditions)}
        return {**about, "rows": rows}


def mean_of(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and its standard error; NaN of a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def read_task(told: Mapping[str, Any], source: str) -> TaskBench:
    """Returns the results in `told`, what `document` gave; DataError, naming `source` and the field, if it has none."""
    try:
        rows = tuple(_row(row) for row in told["rows"])
        found = TaskBench(told["task"], dict(told["conditions"]), rows)
    except KeyError as error:
        raise DataError(f"{source}: {error.args[0]}: missing", _HINT) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{source}: {error}", _HINT) from error
    if not rows:
        raise DataError(f"{source}: rows: none", _HINT)
    if lacking := [at for at in found.contexts if not any(row.policy == STOCK for row in found.at(at))]:
        raise DataError(f"{source}: rows: none of '{STOCK}' at {lacking[0]} tokens", _HINT)
    return found


def _row(told: Mapping[str, Any]) -> TaskRow:
    answers, speed, attention = told["answers"], dict(told["speed"]), told["attention"]
    optional = {"depths": answers["depths"], "kept": answers.get("kept")}
    optional |= {name: told.get(name) for name in ("losses", "divergences")}
    given = {name: None if side is None else tuple(_numbers(name, side)) for name, side in optional.items()}
    right, asked = _numbers("right", answers["right"]), _numbers("asked", answers["asked"])
    if not sum(asked) or {len(right)} != {len(side) for side in (asked, given["depths"], given["kept"]) if side is not None}:
        raise ValueError("answers: right, asked, depths and kept are not of the same contexts")
    _numbers("speed", [speed[name] for name in ("tt2t_ns", "tpot_ns", "prefill_ns")])
    _numbers("parts_ns", [speed["parts_ns"][part] for part in PARTS])
    _numbers("memory", list(told["memory"].values()))
    return TaskRow(
        policy=str(told["policy"]),
        title=str(told["title"]),
        context=int(told["context"]),
        budget=None if told["budget"] is None else int(told["budget"]),
        answers=Answers(tuple(right), tuple(asked), given["depths"], given["kept"]),
        speed=Speed(**speed),
        memory=Memory(**told["memory"]),
        moved_bytes=dict(told["moved_bytes"]),
        spilled_bytes=int(told["spilled_bytes"]),
        hit_ratio=float(told["hit_ratio"]),
        attention=None if attention is None else Attention(**attention),
        losses=given["losses"],
        divergences=given["divergences"],
    )


def _numbers(name: str, values: Sequence[Any]) -> Sequence[Any]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}: {value!r} is not a number")
    return values
