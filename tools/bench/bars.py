"""The bars of the mount benchmark: what each case has to reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .experiment import Outcome

# above this, a faster disk is not asked for
COLD_LIMIT_BPS = 2e9


@dataclass(frozen=True)
class Verdict:
    """One bar: the measured value, the limit, and which side of it is good."""

    what: str
    value: float
    sense: str
    limit: float

    @property
    def passed(self) -> bool:
        """Return whether the bar is reached."""
        return self.value <= self.limit if self.sense == "<=" else self.value >= self.limit

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "passed": self.passed}


def judge(outcome: Outcome) -> list[Verdict]:
    """Return the verdicts on an outcome; the first is always that nothing went wrong over the mount."""
    bars = {"a": _larger, "b": _fits, "c": _cold, "d": _readers, "e": _sizes}
    problems = len(outcome.problems("mount"))
    return [Verdict("hangs, wrong bytes, failures", problems, "<=", 0), *bars[outcome.experiment.case](outcome)]


def _larger(outcome: Outcome) -> Iterator[Verdict]:
    mine = outcome.median_s("mount")
    yield Verdict("time / bound", mine / outcome.bound_s(), "<=", 1.15)
    yield Verdict("time / kernel", mine / outcome.median_s("kernel"), "<=", 0.5)


def _fits(outcome: Outcome) -> Iterator[Verdict]:
    limit = 0.95 if outcome.experiment.name.startswith("llama") else 0.9
    yield Verdict("speed / plain file", outcome.median_s("kernel") / outcome.median_s("mount"), ">=", limit)


def _cold(outcome: Outcome) -> Iterator[Verdict]:
    size = outcome.experiment.loop_bytes
    direct = min(COLD_LIMIT_BPS, size / outcome.median_s("direct"))
    yield Verdict("bandwidth / O_DIRECT", size / outcome.median_s("mount") / direct, ">=", 0.8)


def _readers(outcome: Outcome) -> Iterator[Verdict]:
    # readers at different places of the loop share the pins but not what is streamed
    bound = max(outcome.compute_s, outcome.bound_s() * outcome.experiment.clients)
    yield Verdict("time / bound of readers apart", outcome.median_s("mount") / bound, "<=", 1.15)
    yield Verdict("time / kernel", outcome.median_s("mount") / outcome.median_s("kernel"), "<=", 1.05)


def _sizes(outcome: Outcome) -> Iterator[Verdict]:
    each = outcome.experiment
    # no cliff: near the bound, with an allowance of a tenth of a full read for loops that nearly fit
    allowance = 0.1 * each.loop_bytes / (each.read_bps or 1e9)
    yield Verdict("time / (bound + 10 % of a full read)", outcome.median_s("mount") / (outcome.bound_s() + allowance),
                  "<=", 1.15)  # fmt: skip
