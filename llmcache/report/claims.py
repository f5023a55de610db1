"""A paper's claims beside our numbers: every verdict is computed from data, by a function that belongs to the claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from llmcache.report.html import Badge, Cell, Table

Data = TypeVar("Data", contravariant=True)


class Verdict(Enum):
    """What our numbers say of a claim."""

    CONFIRMED = "confirmed"
    PARTLY = "partly"
    NOT_CONFIRMED = "not confirmed"

    @property
    def kind(self) -> str:
        """Returns how a page colours it."""
        return {"confirmed": "good", "partly": "fair", "not confirmed": "bad"}[self.value]


@dataclass(frozen=True)
class Finding:
    """The answer to a claim: the verdict, our number in words, and the same numbers for programs (base units)."""

    verdict: Verdict
    ours: str
    values: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the finding for a JSON document."""
        return {"verdict": self.verdict.value, "ours": self.ours, "values": dict(self.values)}


@dataclass(frozen=True)
class Claim(Generic[Data]):
    """A sentence of a paper and how it is checked: `check(data, variant)` for each of `variants` of what it speaks of.

    `rule` says in words when it counts as confirmed.
    """

    name: str
    section: str
    quote: str
    rule: str
    check: Callable[[Data, str], Finding]
    variants: Sequence[str]


@dataclass(frozen=True)
class Judged:
    """A claim with its findings, by variant."""

    name: str
    section: str
    quote: str
    rule: str
    findings: Mapping[str, Finding]

    def as_json(self) -> dict[str, Any]:
        """Returns claim and findings for a JSON document; what the paper says and what is ours stay apart."""
        return {
            "name": self.name,
            "paper": {"section": self.section, "quote": self.quote},
            "rule": self.rule,
            "findings": {variant: finding.as_json() for variant, finding in self.findings.items()},
        }


def judge(claims: Sequence[Claim[Data]], data: Data) -> list[Judged]:
    """Returns every claim with what `data` says of it."""
    return [
        Judged(
            claim.name,
            claim.section,
            claim.quote,
            claim.rule,
            {variant: claim.check(data, variant) for variant in claim.variants},
        )
        for claim in claims
    ]


def graded(confirmed: bool, partly: bool) -> Verdict:
    """Returns the verdict for two conditions, the stricter first."""
    if confirmed:
        return Verdict.CONFIRMED
    return Verdict.PARTLY if partly else Verdict.NOT_CONFIRMED


def claims_table(caption: str, judged: Sequence[Judged], titles: Mapping[str, str], label: str) -> Table:
    """Returns the claims as a table: the paper's words, then verdict and number for each variant (`titles`).

    `label` says how our numbers came about (modelled here, measured here) and heads their columns.
    """
    pairs = ((f"{title}: verdict", f"{title} ({label})") for title in titles.values())
    columns = ["paper", "section", *(column for pair in pairs for column in pair)]
    rows: list[list[Cell]] = []
    for claim in judged:
        cells: list[Cell] = [f"“{claim.quote}”", claim.section]
        for variant in titles:
            finding = claim.findings[variant]
            cells += [Badge(finding.verdict.value, finding.verdict.kind), finding.ours]
        rows.append(cells)
    return Table(caption, columns, rows)


def verdicts_table(claims: Mapping[str, Sequence[Judged]], titles: Mapping[str, str]) -> Table:
    """Returns how many claims have which verdict, a row for each variant (by `titles`)."""
    rows: list[list[Cell]] = []
    for about, judged in claims.items():
        for variant in dict.fromkeys(variant for claim in judged for variant in claim.findings):
            counts = Counter(claim.findings[variant].verdict for claim in judged if variant in claim.findings)
            rows.append([about, titles.get(variant, variant), *(counts[verdict] for verdict in Verdict)])
    return Table("Claims by verdict", ["claims about", "judged for", *(verdict.value for verdict in Verdict)], rows)


def rules_table(judged: Sequence[Judged]) -> Table:
    """Returns when each claim counts as confirmed."""
    return Table("When a claim counts as confirmed", ["claim", "rule"], [[claim.name, claim.rule] for claim in judged])
