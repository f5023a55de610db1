"""A printed number beside ours: what the paper says, what follows from its constants, and the rule that judges both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcache.report.claims import Finding, Judged, Verdict, graded

ARITHMETIC, MODELLED = "computed from the paper's own numbers", "modelled"


@dataclass(frozen=True)
class Rule:
    """When a number counts as confirmed: `verdict(paper, ours)`, the same in `words`, and a `label` for tables.

    `told`: how both numbers are said beside each other.
    """

    label: str
    words: str
    verdict: Callable[[float, float], Verdict]
    told: str = "{ours} where {paper} is printed"


def within(exact: float, near: float) -> Rule:
    """Returns the rule for numbers that should agree: confirmed within the share `exact`, partly within `near`."""

    def verdict(paper: float, ours: float) -> Verdict:
        away = abs(ours - paper) / abs(paper)
        # What is printed is rounded: a number on the edge is inside.
        return graded(away <= exact + 1e-9, away <= near + 1e-9)

    label = f"{100 * exact:.3g} %, {100 * near:.3g} %" if exact else f"equal, {100 * near:.3g} %"
    confirmed = f"within {100 * exact:.3g} % of the printed number" if exact else "if equal to the printed number"
    return Rule(label, f"confirmed {confirmed}, partly within {100 * near:.3g} %", verdict)


def _gained(paper: float, ours: float) -> Verdict:
    away = abs(ours / paper - 1)
    return graded(away <= 0.05 * (1 + 1e-9), away <= 0.4 and 0.5 <= (ours - 1) / (paper - 1) <= 2)


EXACT = within(0.0, 0.05)
"""For arithmetic without rounding."""
PRINTED = within(0.01, 0.05)
"""For arithmetic: the digits that are printed."""
CLOSE = within(0.05, 0.25)
"""For what is modelled: it has no factor that could be fitted."""
GAIN = Rule(
    "gain",
    "confirmed within 5 % of the printed factor; partly within 40 % if the gain (the factor less 1) is half to twice the "
    "printed one",
    _gained,
)
"""For factors that are modelled: a factor of 1 is no part of a gain, however near."""
AT_MOST = Rule(
    "at most",
    "confirmed if ours is not above the printed number",
    lambda paper, ours: graded(ours <= paper, False),
    "{ours} where at most {paper} is expected",
)
AT_LEAST = Rule(
    "at least",
    "confirmed if ours is not below the printed number",
    lambda paper, ours: graded(ours >= paper, False),
    "{ours} where at least {paper} is expected",
)
EVERY = Rule(
    "share",
    "the share of the cases in which it holds: confirmed if all, partly if most",
    lambda paper, ours: graded(ours >= paper, ours > 0.5 * paper),
    "{ours} of the cases where {paper} (all) is expected",
)


def bounded(words: str) -> Rule:
    """Returns the rule for a printed number that cannot be above ours, which is a bound; `words` say why."""
    told = f"confirmed unless the printed number is above the bound: {words}"
    return Rule("bound", told, lambda paper, ours: graded(paper <= ours, False), "at most {ours} where {paper} is printed")


@dataclass(frozen=True)
class Row:
    """A number of the paper with ours, by variant (profile of energies, mode of recomputation).

    `quote`: the paper's words; `why`: what explains the difference, or what the agreement rests on.
    """

    name: str
    section: str
    quote: str
    unit: str
    paper: float
    ours: Mapping[str, float]
    rule: Rule
    why: str

    def verdict(self, variant: str) -> Verdict:
        """Returns what the rule says of `variant`."""
        return self.rule.verdict(self.paper, self.ours[variant])

    def delta(self, variant: str) -> float:
        """Returns by which share our number is above the printed one; 0 where that is 0."""
        return self.ours[variant] / self.paper - 1 if self.paper else 0.0

    def judged(self) -> Judged:
        """Returns the row as a claim with findings; the last of them says why."""
        last = list(self.ours)[-1]
        findings = {}
        for variant, value in self.ours.items():
            ours, paper = (f"{number(one)}{self.unit}" for one in (value, self.paper))
            told = f"{self.rule.told.format(ours=ours, paper=paper)} ({self.delta(variant):+.1%})"
            told += f". {self.why}" if variant == last and self.why else ""
            findings[variant] = Finding(self.verdict(variant), told, {"paper": self.paper, "ours": value})
        return Judged(self.name, self.section, self.quote, self.rule.words, findings)

    def as_json(self, about: str, kind: str) -> dict[str, Any]:
        """Returns the row for a JSON document: what the paper says and what is ours stay apart."""
        return {
            "about": about,
            "kind": kind,
            "name": self.name,
            "paper": {"section": self.section, "quote": self.quote, "value": self.paper, "unit": self.unit.strip()},
            "rule": self.rule.words,
            "why": self.why,
            "findings": {
                variant: {"value": value, "delta": self.delta(variant), "verdict": self.verdict(variant).value}
                for variant, value in self.ours.items()
            },
        }


def number(value: float) -> str:
    """Returns `value` with three digits and all before the point, thousands apart: "19,456", "0.0302", "5.20e-05"."""
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.2e}"
    if abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.1f}".removesuffix(".0") if abs(value) < 1000 else f"{value:,.0f}"


def single(value: float) -> dict[str, float]:
    """Returns the findings of a row that has but one variant."""
    return {"ours": value}


Rows = Sequence[Row]
