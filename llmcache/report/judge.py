"""What papers claim, as rows of data, and the one judge that sets our numbers beside them.

A paper is a file of `llmcache/papers`: its words, where they stand, and the rule of the verdict. How ours is got is code:
named values per claim and variant, which know nothing of verdicts. The judge computes each verdict from these values by the
rule of the row, and tells them by their names, so that a page, a table and a JSON document say the same.

    [[claim."figure 10"]]                # what it is about: claims are judged, counted and shown by that
    name = "up-to-8.56"
    section = "abstract"
    quote = "up to 8.56× speedup over baselines"
    rule = "the largest is within 10 % of 8.56; partly: at least 4.21"     # the same in words
    confirmed = "away <= 0.1"            # of our values; `and` binds closer than `or`
    partly = "most >= 4.21"

A claim of a number has `paper`, its `unit`, `why` it differs, and names one of the paper's `[rule]` in place of the
conditions, which are then of `paper`, `ours`, `away` (the relative difference) and `gained` (how much of the gain over 1).
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

from llmcache.units import format_duration, format_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAPERS = Path(__file__).resolve().parents[1] / "papers"
OURS = "ours"
"""The variant of a claim that has but one."""
_TERM = re.compile(r"(\w+) (<=|>=|<|>) (\S+)")
_HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}

Values = Mapping[str, float]
"""Our answer to a claim, by name: in base units, which a name says (`_bytes`, `_ns`); shares are of 1."""
Ours = Mapping[str, Mapping[str, Mapping[str, Values] | Values | float]]
"""Ours, by what it is about and claim: values by variant; where a number is printed, a number or one by variant."""


class Verdict(Enum):
    """What our numbers say of a claim."""

    CONFIRMED = "confirmed"
    PARTLY = "partly"
    NOT_CONFIRMED = "not confirmed"


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper with its rule in words, and when that counts as confirmed, or as partly so.

    `paper`: the number that is printed, in `unit`; None where only words are. `told`: how ours is said beside it.
    """

    about: str
    name: str
    section: str
    quote: str
    rule: str
    confirmed: str
    partly: str = ""
    told: str = "{ours}; the paper has {paper}"
    paper: float | None = None
    unit: str = ""
    why: str = ""

    def verdict(self, values: Values) -> Verdict:
        """Returns what the rule says of `values`; KeyError for a value that it names and there is not."""
        if holds(self.confirmed, values):
            return Verdict.CONFIRMED
        return Verdict.PARTLY if self.partly and holds(self.partly, values) else Verdict.NOT_CONFIRMED


@dataclass(frozen=True)
class Finding:
    """What our numbers say of a claim, for one variant of what it speaks of."""

    verdict: Verdict
    words: str
    values: Values


@dataclass(frozen=True)
class Judged:
    """A claim with its findings, by variant."""

    claim: Claim
    findings: Mapping[str, Finding]

    def as_json(self, kind: str) -> dict[str, Any]:
        """Returns claim and findings for a JSON document; what the paper says and what is ours stay apart."""
        claim = self.claim
        paper: dict[str, Any] = {"section": claim.section, "quote": claim.quote}
        named: dict[str, Any] = {"about": claim.about, "kind": kind, "name": claim.name, "paper": paper, "rule": claim.rule}
        findings: dict[str, Any] = {}
        if claim.paper is not None:
            paper |= {"value": claim.paper, "unit": claim.unit.strip()}
            named["why"] = claim.why
        for variant, found in self.findings.items():
            if claim.paper is None:
                own: dict[str, Any] = {"ours": found.words, "values": dict(found.values)}
            else:
                own = {"value": found.values["ours"], "delta": found.values["ours"] / claim.paper - 1}
            findings[variant] = {"verdict": found.verdict.value, **own}
        return {**named, "findings": findings}


@dataclass(frozen=True)
class Paper:
    """A file of `llmcache/papers`: who wrote what, how ours is got by what claims are about, and the claims.

    `rules`: of claims of numbers, by name, as fields of `Claim`. `data`: whatever else the file has.
    """

    facts: Mapping[str, str]
    lead: str
    kinds: Mapping[str, str]
    variants: Mapping[str, str]
    sections: Sequence[Mapping[str, Any]]
    claims: Sequence[Claim]
    rules: Mapping[str, Mapping[str, str]]
    data: Mapping[str, Any]


def read_paper(name: str) -> Paper:
    """Returns the paper in `llmcache/papers/NAME.toml`."""
    data = tomllib.loads((PAPERS / f"{name}.toml").read_text())
    rules: dict[str, dict[str, str]] = data.pop("rule", {})
    rows = {about: [row | rules.get(row["rule"], {}) for row in rows] for about, rows in data.pop("claim").items()}
    rows |= {about: rows[like] for about, like in data.pop("also", {}).items()}
    claims = [Claim(about=about, **row) for about, of in rows.items() for row in of]
    facts, lead, kinds, sections = (data.pop(key) for key in ("paper", "lead", "kinds", "section"))
    return Paper(facts, lead, kinds, data.pop("variants", {}), sections, claims, rules, data)


def holds(condition: str, values: Values) -> bool:
    """Whether `condition` is true of `values`; ValueError if it is none. What it compares is a value, or a number."""
    return any(all(_compared(term, values) for term in part.split(" and ")) for part in condition.split(" or "))


def _compared(term: str, values: Values) -> bool:
    found = _TERM.fullmatch(term.strip())
    if found is None:
        raise ValueError(f"condition: must be 'NAME <= NUMBER', or the like with <, > or >=, not '{term}'")
    name, sign, other = found.groups()
    return bool(_HOLDS[sign](values[name], values[other] if other in values else float(other)))


def judge(paper: Paper, ours: Ours, facts: Mapping[str, object] | None = None) -> dict[str, list[Judged]]:
    """Returns the claims with what `ours` says of them, by what they are about; what is not measured is left out.

    `facts`: numbers that the reasons name. KeyError where a claim about something measured has no values of its own.
    """
    found: dict[str, list[Judged]] = {}
    for about in paper.kinds:
        if about in ours:
            claims = [replace(claim, why=claim.why.format(**facts or {})) for claim in paper.claims if claim.about == about]
            found[about] = [Judged(claim, _findings(claim, ours[about][claim.name])) for claim in claims]
    return found


def _findings(claim: Claim, ours: Mapping[str, Values] | Values | float) -> dict[str, Finding]:
    if claim.paper is None:
        values = cast("Mapping[str, Values]", ours)
        return {variant: Finding(claim.verdict(own), told(own), own) for variant, own in values.items()}
    numbers = cast("Values", ours) if isinstance(ours, Mapping) else {OURS: ours}
    found = {variant: _number(claim, claim.paper, one) for variant, one in numbers.items()}
    if claim.why:  # the last of them says it
        last = list(found)[-1]
        found[last] = replace(found[last], words=f"{found[last].words}. {claim.why}")
    return found


def _number(claim: Claim, paper: float, ours: float) -> Finding:
    # What is printed is rounded: a number on the edge is inside.
    values = {"paper": paper, "ours": ours, "away": abs(ours - paper) / abs(paper) - 1e-9}
    values["gained"] = (ours - 1) / (paper - 1) if paper != 1 else 0.0
    words = claim.told.format(ours=f"{number(ours)}{claim.unit}", paper=f"{number(paper)}{claim.unit}")
    return Finding(claim.verdict(values), f"{words} ({ours / paper - 1:+.1%})", values)


def alone(variant: str, claims: Mapping[str, Values]) -> dict[str, dict[str, Values]]:
    """Returns our values for claims that have but one `variant`."""
    return {name: {variant: values} for name, values in claims.items()}


def told(values: Values) -> str:
    """Returns `values` by their names, in words: "share in range: 24.0%; kv: 4.29 GB; away: 0.031"."""
    return "; ".join(_told(name.replace("_", " "), value) for name, value in values.items())


def _told(name: str, value: float) -> str:
    if name.endswith(" bytes"):
        return f"{name.removesuffix(' bytes')}: {format_size(value)}"
    if name.endswith(" ns"):
        return f"{name.removesuffix(' ns')}: {format_duration(value)}"
    return f"{name}: {value:.1%}" if "share" in name else f"{name}: {number(value)}"


def number(value: float) -> str:
    """Returns `value` with three digits and all before the point, thousands apart: "19,456", "0.0302", "5.20e-05"."""
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.2e}"
    if abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.1f}".removesuffix(".0") if abs(value) < 1000 else f"{value:,.0f}"
