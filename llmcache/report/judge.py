"""What papers claim, as rows of data, and the one judge that sets our numbers beside them.

A paper is a file of `llmcache/papers`: its words, where they stand, and the rule of the verdict. How ours is got is code:
a measure per claim and variant, which knows nothing of verdicts. The judge computes each verdict from the measured values
by the rule of the row, so that a page, a table and a JSON document say the same.

    [[claim."figure 10"]]                # what it is about: claims are judged, counted and shown by that
    name = "up-to-8.56"
    section = "abstract"
    quote = "up to 8.56× speedup over baselines"
    rule = "the largest is within 10 % of 8.56; partly: at least 4.21"     # the same in words
    confirmed = "away <= 0.1"            # of the values of the measure; `and` binds closer than `or`
    partly = "most >= 4.21"

A claim of a number has `paper`, its `unit`, `why` it differs, and names one of the paper's `[rule]` in place of the
conditions, which are then of `paper`, `ours`, `away` (the relative difference) and `gained` (how much of the gain over 1).
"""

from __future__ import annotations

import operator
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from llmcache.report.html import Badge, Cell, Table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAPERS = Path(__file__).resolve().parents[1] / "papers"
OURS = "ours"
"""The variant of a claim that has but one."""
_TERM = re.compile(r"(\w+) (<=|>=|<|>) (\S+)")
_HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


class Verdict(Enum):
    """What our numbers say of a claim."""

    CONFIRMED = "confirmed"
    PARTLY = "partly"
    NOT_CONFIRMED = "not confirmed"

    @property
    def badge(self) -> Badge:
        """Returns how a page shows it."""
        return Badge(self.value, {"confirmed": "good", "partly": "fair", "not confirmed": "bad"}[self.value])


@dataclass(frozen=True)
class Measure:
    """Our answer to a claim: in words, and as numbers in base units for the rule and for programs."""

    words: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Rule:
    """When a claim counts as confirmed, or as partly so: conditions on the values of a measure, and the same in words.

    `told`: how a number is said beside the printed one.
    """

    words: str
    confirmed: str
    partly: str = ""
    told: str = "{ours} where {paper} is printed"

    def verdict(self, values: Mapping[str, float]) -> Verdict:
        """Returns what the rule says of `values`; KeyError for a value that it names and there is not."""
        if holds(self.confirmed, values):
            return Verdict.CONFIRMED
        return Verdict.PARTLY if self.partly and holds(self.partly, values) else Verdict.NOT_CONFIRMED


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper with its rule. `paper`: the number that is printed, in `unit`; None where only words are."""

    about: str
    name: str
    section: str
    quote: str
    rule: Rule
    paper: float | None = None
    unit: str = ""
    why: str = ""


@dataclass(frozen=True)
class Finding:
    """What our numbers say of a claim, for one variant of what it speaks of."""

    verdict: Verdict
    words: str
    values: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Returns the finding for a JSON document."""
        if "delta" in self.values:
            return {"value": self.values["ours"], "delta": self.values["delta"], "verdict": self.verdict.value}
        return {"verdict": self.verdict.value, "ours": self.words, "values": dict(self.values)}


@dataclass(frozen=True)
class Judged:
    """A claim with its findings, by variant."""

    claim: Claim
    findings: Mapping[str, Finding]

    def as_json(self, kind: str) -> dict[str, Any]:
        """Returns claim and findings for a JSON document; what the paper says and what is ours stay apart."""
        claim = self.claim
        paper: dict[str, Any] = {"section": claim.section, "quote": claim.quote}
        more: dict[str, Any] = {}
        if claim.paper is not None:
            paper |= {"value": claim.paper, "unit": claim.unit.strip()}
            more = {"why": claim.why}
        findings = {variant: finding.as_json() for variant, finding in self.findings.items()}
        named = {"about": claim.about, "kind": kind, "name": claim.name}
        return {**named, "paper": paper, "rule": claim.rule.words, **more, "findings": findings}


@dataclass(frozen=True)
class Paper:
    """A file of `llmcache/papers`: who wrote what, how ours is got by what claims are about, and the claims."""

    facts: Mapping[str, str]
    lead: str
    kinds: Mapping[str, str]
    variants: Mapping[str, str]
    sections: Sequence[Mapping[str, Any]]
    claims: Sequence[Claim]
    rules: Mapping[str, Rule]
    data: Mapping[str, Any]


Ours = Measure | float
Measures = Mapping[str, Mapping[str, Ours | Mapping[str, Ours]]]
"""Ours: by what it is about, claim and variant (if there are several); a number where a number is printed."""


def read_paper(name: str) -> Paper:
    """Returns the paper in `llmcache/papers/NAME.toml`."""
    data = tomllib.loads((PAPERS / f"{name}.toml").read_text())
    rules = {key: Rule(**rule) for key, rule in data.pop("rule", {}).items()}
    claims = [_claim(about, row, rules) for about, rows in data.pop("claim").items() for row in rows]
    for about, like in data.pop("also", {}).items():
        claims += [replace(one, about=about) for one in claims if one.about == like]
    facts, lead, kinds, sections = (data.pop(key) for key in ("paper", "lead", "kinds", "section"))
    return Paper(facts, lead, kinds, data.pop("variants", {}), sections, claims, rules, data)


def _claim(about: str, row: dict[str, Any], rules: Mapping[str, Rule]) -> Claim:
    conditions = {key: row.pop(key) for key in ("confirmed", "partly") if key in row}
    words = row.pop("rule")
    return Claim(rule=Rule(words, **conditions) if conditions else rules[words], about=about, **row)


def holds(condition: str, values: Mapping[str, float]) -> bool:
    """Whether `condition` is true of `values`; ValueError if it is none. What it compares is a value, or a number."""
    return any(all(_compared(term, values) for term in part.split(" and ")) for part in condition.split(" or "))


def _compared(term: str, values: Mapping[str, float]) -> bool:
    found = _TERM.fullmatch(term.strip())
    if found is None:
        raise ValueError(f"condition: '{term}' is not understood")
    name, sign, other = found.groups()
    return bool(_HOLDS[sign](values[name], values[other] if other in values else float(other)))


def judge(paper: Paper, measures: Measures, facts: Mapping[str, object] | None = None) -> dict[str, list[Judged]]:
    """Returns the claims with what `measures` say of them, by what they are about; those without a measure are left out.

    `facts`: numbers that the reasons name. KeyError where a claim about something measured has no measure of its own.
    """
    found: dict[str, list[Judged]] = {}
    for about in paper.kinds:
        if about in measures:
            claims = [claim for claim in paper.claims if claim.about == about]
            found[about] = [_judged(claim, measures[about][claim.name], facts or {}) for claim in claims]
    return found


def _judged(claim: Claim, found: Ours | Mapping[str, Ours], facts: Mapping[str, object]) -> Judged:
    """Returns `claim` with a finding for each variant; the last of them says why."""
    ours = found if isinstance(found, Mapping) else {OURS: found}
    why, last = claim.why.format(**facts), list(ours)[-1]
    findings = {}
    for variant, one in ours.items():
        if isinstance(one, Measure):
            findings[variant] = Finding(claim.rule.verdict(one.values), one.words, one.values)
        else:
            findings[variant] = _number(claim, one, why if variant == last else "")
    return Judged(replace(claim, why=why), findings)


def _number(claim: Claim, ours: float, why: str) -> Finding:
    paper = claim.paper
    assert paper is not None, f"{claim.name}: a number, but none is printed"
    # What is printed is rounded: a number on the edge is inside.
    values = {"paper": paper, "ours": ours, "away": abs(ours - paper) / abs(paper) - 1e-9}
    values["gained"] = (ours - 1) / (paper - 1) if paper != 1 else 0.0
    verdict = claim.rule.verdict(values)
    delta = ours / paper - 1
    words = claim.rule.told.format(ours=f"{number(ours)}{claim.unit}", paper=f"{number(paper)}{claim.unit}")
    words += f" ({delta:+.1%})" + (f". {why}" if why else "")
    return Finding(verdict, words, {"paper": paper, "ours": ours, "delta": delta})


def number(value: float) -> str:
    """Returns `value` with three digits and all before the point, thousands apart: "19,456", "0.0302", "5.20e-05"."""
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.2e}"
    if abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.1f}".removesuffix(".0") if abs(value) < 1000 else f"{value:,.0f}"


def counted(claims: Mapping[str, Sequence[Judged]]) -> Counter[Verdict]:
    """Returns how many findings there are of each verdict."""
    return Counter(one.verdict for judged in claims.values() for each in judged for one in each.findings.values())


def verdicts_table(claims: Mapping[str, Sequence[Judged]], titles: Mapping[str, str]) -> Table:
    """Returns how many claims have which verdict, a row for each variant (by `titles`)."""
    rows: list[list[Cell]] = []
    for about, judged in claims.items():
        found = [(titles.get(variant, ""), one) for each in judged for variant, one in each.findings.items()]
        for title in dict.fromkeys(title for title, _ in found):
            counts = Counter(one.verdict for named, one in found if named == title)
            rows.append([about, title, *(counts[verdict] for verdict in Verdict)])
    return Table("Findings by verdict", ["claims about", "judged for", *(verdict.value for verdict in Verdict)], rows)


def claims_table(caption: str, judged: Sequence[Judged], titles: Mapping[str, str], kind: str) -> Table:
    """Returns the claims: the paper's words, then a row for each variant (`titles`) with verdict and number.

    `kind` says how our numbers came about (modelled, measured) and heads their column.
    """
    columns = ["paper", "section", "with", "verdict", f"ours ({kind})"]
    return Table(caption, columns, [row for one in judged for row in _rows(one, titles)])


def _rows(judged: Judged, titles: Mapping[str, str]) -> Iterator[list[Cell]]:
    paper: list[Cell] = [f"“{judged.claim.quote}”", judged.claim.section]
    for variant, finding in judged.findings.items():
        yield [*paper, "" if variant == OURS else titles.get(variant, variant), finding.verdict.badge, finding.words]
        paper = ["", ""]


def rules_table(judged: Sequence[Judged]) -> Table:
    """Returns when each claim counts as confirmed."""
    rows: list[list[Cell]] = [[one.claim.name, one.claim.rule.words] for one in judged]
    return Table("When a claim counts as confirmed", ["claim", "rule"], rows)
