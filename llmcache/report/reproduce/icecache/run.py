"""Recomputes icecache: measures what can be measured here, and judges the claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcache.report.claims import Judged, judge
from llmcache.report.reproduce import Progress
from llmcache.report.reproduce.icecache import answers, document, page, times
from llmcache.report.reproduce.icecache.measured import Measured, measure


@dataclass(frozen=True)
class Findings:
    """Everything recomputed; see `Reproduction`."""

    measured: Measured
    claims: dict[str, list[Judged]]

    @property
    def kinds(self) -> Mapping[str, str]:
        """See `Reproduction.kinds`."""
        return document.KINDS

    def document(self) -> dict[str, Any]:
        """See `Reproduction.document`."""
        return document.document(self.measured, self.claims)

    def page(self) -> str:
        """See `Reproduction.page`."""
        return page.page(self.measured, self.claims)


def reproduce(quick: bool, progress: Progress) -> Findings:
    """Returns the paper recomputed. `quick`: shorter contexts and fewer of them."""
    measured = measure(quick, progress)
    return Findings(measured, judged(measured))


def judged(measured: Measured) -> dict[str, list[Judged]]:
    """Returns the claims by what they are about; those of what could not be measured are left out."""
    claims: dict[str, list[Judged]] = {}
    if measured.passkey is not None:
        claims["figure 6"] = judge(answers.PASSKEY, measured.passkey)
    if measured.recall is not None:
        claims["tables 1, 2 and 5"] = judge(answers.RECALL, measured.recall)
    if measured.chain is not None:
        claims["tables 3 and 6"] = judge(answers.CHAIN, measured.chain)
    if measured.needle is not None:
        claims["table 4"] = judge(answers.NEEDLE, measured.needle)
    if measured.lengths is not None:
        claims["figures 1, 7 and 8"] = judge(times.CLAIMS, measured.lengths)
    return claims
