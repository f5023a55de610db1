"""Recomputes Kelle: runs the accelerator model for every number that the paper prints, and judges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmcache.report.claims import Judged
from llmcache.report.reproduce import Progress
from llmcache.report.reproduce.kelle import ablations, algorithm, chip, document, headline, page, tables
from llmcache.report.reproduce.kelle.evidence import Evidence
from llmcache.report.reproduce.kelle.rows import Row


@dataclass(frozen=True)
class Findings:
    """Everything recomputed; see `Reproduction`. `rows`: by what they are about."""

    rows: Mapping[str, Sequence[Row]]
    evidence: Evidence

    @cached_property
    def claims(self) -> Mapping[str, Sequence[Judged]]:
        """See `Reproduction.claims`."""
        return {about: [row.judged() for row in rows] for about, rows in self.rows.items()}

    @property
    def kinds(self) -> Mapping[str, str]:
        """See `Reproduction.kinds`."""
        return document.KINDS

    def document(self) -> dict[str, Any]:
        """See `Reproduction.document`."""
        return document.document(self.rows)

    def page(self) -> str:
        """See `Reproduction.page`."""
        return page.page(self.rows, self.evidence)


def reproduce(quick: bool, progress: Progress) -> Findings:
    """Returns the paper recomputed. `quick` changes nothing: it takes a second."""
    evidence = Evidence()
    progress("modelling the accelerator")
    rows = {
        "chip": chip.rows(),
        "algorithm": algorithm.rows(),
        "averages": headline.rows(evidence),
        "table 7": [*tables.table7(evidence), tables.no_eviction(evidence)],
        "table 8": tables.table8(evidence),
        "table 9": tables.table9(evidence),
        "experiments": ablations.rows(evidence),
    }
    return Findings(rows, evidence)
