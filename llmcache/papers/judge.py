"""Judge the claims of papers by our numbers.

NAME.toml has the claims of a paper. Modules compute our values by claim and variant without reading the rules; `judge` then
applies the rules. The printed values are those that the rules used.

    [[claim."figure 10"]]                # topic
    name = "up-to-8.56"
    section = "abstract"
    quote = "up to 8.56× speedup over baselines"
    rule = "the largest is within 10 % of 8.56; partly: at least 4.21"     # the conditions in words
    confirmed = "away <= 0.1"            # of our values; `and` binds tighter than `or`
    partly = "most >= 4.21"

A claim about a number has `paper`, its `unit`, and `why` ours differs. Instead of conditions it names one of the paper's
`[rule]` entries, whose conditions use `paper`, `ours`, `away` (the relative difference) and `gained` (our gain over 1 as a
share of the paper's).
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

PAPERS = Path(__file__).resolve().parent
OURS = "ours"
"""The variant of a claim that has only one."""
_TERM = re.compile(r"(\w+) (<=|>=|<|>) (\S+)")
_HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}

Values = Mapping[str, float]
"""Our values for a claim, by name: in base units, which the name contains (`_bytes`, `_ns`); shares are 0..1."""
Ours = Mapping[str, Mapping[str, Mapping[str, Values] | Values | float]]
"""Our values by topic and claim: for words, values by variant; for a printed number, a number or one by variant."""


class Verdict(Enum):
    """The verdict of our numbers on a claim."""

    CONFIRMED = "confirmed"
    PARTLY = "partly"
    NOT_CONFIRMED = "not confirmed"


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, its rule in words, and the conditions.

    `paper`: the printed number; None for a claim in words. `template`: for our number next to it.
    """

    about: str
    name: str
    section: str
    quote: str
    rule: str
    confirmed: str
    partly: str = ""
    template: str = "{ours}; the paper has {paper}"
    paper: float | None = None
    unit: str = ""
    why: str = ""

    def verdict(self, values: Values) -> Verdict:
        if holds(self.confirmed, values):
            return Verdict.CONFIRMED
        return Verdict.PARTLY if self.partly and holds(self.partly, values) else Verdict.NOT_CONFIRMED


@dataclass(frozen=True)
class Finding:
    """The verdict on one variant of a claim."""

    verdict: Verdict
    words: str
    values: Values


@dataclass(frozen=True)
class Judged:
    """A claim with its findings by variant."""

    claim: Claim
    findings: Mapping[str, Finding]

    def as_json(self, kind: str) -> dict[str, Any]:
        claim = self.claim
        paper: dict[str, Any] = {"section": claim.section, "quote": claim.quote}
        named: dict[str, Any] = {"about": claim.about, "kind": kind, "name": claim.name, "paper": paper, "rule": claim.rule}
        findings: dict[str, Any] = {}
        if claim.paper is not None:
            paper |= {"value": claim.paper, "unit": claim.unit.strip()}
            named["why"] = claim.why
        for variant, found in self.findings.items():
            if claim.paper is None:
                ours: dict[str, Any] = {"ours": found.words, "values": dict(found.values)}
            else:
                ours = {"value": found.values["ours"], "delta": found.values["ours"] / claim.paper - 1}
            findings[variant] = {"verdict": found.verdict.value, **ours}
        return {**named, "findings": findings}


@dataclass(frozen=True)
class Paper:
    """A file `NAME.toml`: bibliographic data, the kind of our values by topic, and the claims.

    `rules`: for claims about numbers, by name. `data`: the remaining contents of the file.
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
    data = tomllib.loads((PAPERS / f"{name}.toml").read_text())
    rules: dict[str, dict[str, str]] = data.pop("rule", {})
    rows = {about: [row | rules.get(row["rule"], {}) for row in rows] for about, rows in data.pop("claim").items()}
    rows |= {about: rows[like] for about, like in data.pop("also", {}).items()}
    claims = [Claim(about=about, **row) for about, entries in rows.items() for row in entries]
    facts, lead, kinds, sections = (data.pop(key) for key in ("paper", "lead", "kinds", "section"))
    return Paper(facts, lead, kinds, data.pop("variants", {}), sections, claims, rules, data)


def holds(condition: str, values: Values) -> bool:
    """Return whether `condition` is true of `values`; ValueError if it is invalid."""
    return any(all(_compared(term, values) for term in part.split(" and ")) for part in condition.split(" or "))


def _compared(term: str, values: Values) -> bool:
    found = _TERM.fullmatch(term.strip())
    if found is None:
        raise ValueError(f"condition: must be 'NAME <= NUMBER', or the like with <, > or >=, not '{term}'")
    name, sign, other = found.groups()
    return bool(_HOLDS[sign](values[name], values[other] if other in values else float(other)))


def judge(paper: Paper, ours: Ours, facts: Mapping[str, object] | None = None) -> dict[str, list[Judged]]:
    """Return the claims with findings, by topic; topics without measurements are omitted.

    `facts`: numbers for the templates of reasons. KeyError if a claim of a measured topic has no values.
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
        return {variant: Finding(claim.verdict(named), values_text(named), named) for variant, named in values.items()}
    numbers = cast("Values", ours) if isinstance(ours, Mapping) else {OURS: ours}
    found = {variant: _number(claim, claim.paper, one) for variant, one in numbers.items()}
    if claim.why:  # only the last finding contains the reason
        last = list(found)[-1]
        found[last] = replace(found[last], words=f"{found[last].words}. {claim.why}")
    return found


def _number(claim: Claim, paper: float, ours: float) -> Finding:
    # Printed numbers are rounded: a number on the edge is inside.
    values = {"paper": paper, "ours": ours, "away": abs(ours - paper) / abs(paper) - 1e-9}
    values["gained"] = (ours - 1) / (paper - 1) if paper != 1 else 0.0
    words = claim.template.format(ours=f"{number(ours)}{claim.unit}", paper=f"{number(paper)}{claim.unit}")
    return Finding(claim.verdict(values), f"{words} ({ours / paper - 1:+.1%})", values)


def alone(variant: str, claims: Mapping[str, Values]) -> dict[str, dict[str, Values]]:
    return {name: {variant: values} for name, values in claims.items()}


def values_text(values: Values) -> str:
    """Return text such as "share in range: 24.0%; kv: 4.29 GB; away: 0.031"."""
    return "; ".join(_value_text(name.replace("_", " "), value) for name, value in values.items())


def _value_text(name: str, value: float) -> str:
    if name.endswith(" bytes"):
        return f"{name.removesuffix(' bytes')}: {format_size(value)}"
    if name.endswith(" ns"):
        return f"{name.removesuffix(' ns')}: {format_duration(value)}"
    return f"{name}: {value:.1%}" if "share" in name else f"{name}: {number(value)}"


def number(value: float) -> str:
    """Return `value` with three digits: "19,456", "0.0302", "5.20e-05"."""
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.2e}"
    if abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.1f}".removesuffix(".0") if abs(value) < 1000 else f"{value:,.0f}"
