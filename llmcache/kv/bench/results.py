"""What a benchmark of KV policies found: one row a policy (or a beta), all measured or all modelled, never mixed.

The same dataclasses feed the table, the JSON and the pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llmcache.errors import DataError
from llmcache.kv.pipeline.timeline import STAGES, Timeline

SCHEMA = "llmcache.kv-bench/1"
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
    """Where a sweep of beta should have its minimum: at `rule`, f_c / f_s, or at `m0` where memory ends before it."""

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

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, f_c and f_s in bytes/s of keys."""
        return {**asdict(self), "rule": self.rule, "expected": self.expected}


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
        marks = None if self.marks is None else self.marks.to_json()
        return {
            "schema": SCHEMA, "kind": self.kind, "conditions": dict(self.conditions), "rows": rows, "marks": marks,
            "notes": list(self.notes),
        }  # fmt: skip


def read_bench(told: object, source: str) -> Bench:
    """Returns the benchmark in `told`, what `document` gave; DataError, naming `source` and the field, if it is none."""
    if not isinstance(told, dict) or told.get("schema") != SCHEMA:
        found = told.get("schema") if isinstance(told, dict) else None
        raise DataError(f"{source}: schema: {found!r}, {SCHEMA} is needed", "write it with 'llmcache kv bench --json'")
    try:
        if told["kind"] not in KINDS:
            raise ValueError(f"kind: {told['kind']!r}, one of {', '.join(KINDS)} is needed")
        marks = told["marks"]
        if not told["rows"]:
            raise ValueError("rows: none")
        return Bench(
            told["kind"],
            told["conditions"],
            tuple(_row(row) for row in told["rows"]),
            None if marks is None else Marks(marks["f_c"], marks["f_s"], marks["m0"]),
            tuple(told["notes"]),
        )
    except KeyError as error:
        raise DataError(f"{source}: {error.args[0]}: missing", "write it with 'llmcache kv bench --json'") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{source}: {error}", "write it with 'llmcache kv bench --json'") from error


def _row(told: dict[str, Any]) -> Row:
    observed = told["observed"]
    values = {name: told[name] for name in Row.__dataclass_fields__ if name != "observed"}
    row = Row(**values, observed=None if observed is None else _observed(observed))
    _check_numbers("stages_ns", {stage: row.stages_ns.get(stage) for stage in STAGES})
    _check_numbers("", {name: values[name] for name in ("token_ns", "exposed_ns", "idle_share")})
    _check_numbers("", {"beta": 0 if row.beta is None else row.beta})
    _check_numbers("moved_bytes", row.moved_bytes)
    return row


def _check_numbers(field: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{field}{': ' * bool(field)}{name}: {value!r} is not a number")


def _observed(told: dict[str, Any]) -> Observed:
    values = {name: told[name] for name in Observed.__dataclass_fields__}
    Timeline.from_json(told["timeline"])
    return Observed(**{**values, "steps_ns": tuple(told["steps_ns"])})
