"""Recomputes hillinfer: asks the models, measures what can be measured here, and judges the claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcache.report.claims import Judged, judge
from llmcache.report.reproduce import Progress
from llmcache.report.reproduce.hillinfer import document, figure2, figure3, figure8, figure10, figure11, here, page
from llmcache.report.reproduce.hillinfer.measured import Measured, measure


@dataclass(frozen=True)
class Findings:
    """Everything recomputed; see `Reproduction`."""

    modelled: document.Modelled
    measured: Measured
    claims: dict[str, list[Judged]]

    @property
    def kinds(self) -> Mapping[str, str]:
        """See `Reproduction.kinds`."""
        return document.KINDS

    def document(self) -> dict[str, Any]:
        """See `Reproduction.document`."""
        return document.document(self.modelled, self.measured, self.claims)

    def page(self) -> str:
        """See `Reproduction.page`."""
        return page.page(self.modelled, self.measured, self.claims)


def reproduce(quick: bool, progress: Progress) -> Findings:
    """Returns the paper recomputed. `quick`: what is measured here is smaller."""
    progress("asking the models")
    modelled = document.modelled()
    measured = measure(quick, progress)
    return Findings(modelled, measured, _judged(modelled, measured))


def _judged(modelled: document.Modelled, measured: Measured) -> dict[str, list[Judged]]:
    """The claims by what they are about; those of what could not be measured are left out."""
    claims = {
        "figure 2": judge(figure2.CLAIMS, modelled.memory),
        "figure 3": judge(figure3.CLAIMS, modelled.transfers),
        "figure 3, the step": judge(figure3.STEP_CLAIMS, modelled.transfers),
    }
    if measured.transfers is not None:
        claims["figure 3, this disk"] = judge(figure3.CLAIMS, measured.transfers)
    if measured.accuracy is not None:
        claims["figure 8"] = judge(figure8.CLAIMS, measured.accuracy)
    claims["figures 9 and 10"] = judge(figure10.CLAIMS, modelled.speedups)
    if measured.systems is not None:
        claims["figures 9 and 10, this machine"] = judge(here.CLAIMS, here.Runs(measured.systems))
    claims["figure 11a and overhead"] = judge(figure11.CLAIMS, modelled.ablation)
    claims["figure 11b"] = judge(figure11.SWEEP_CLAIMS, modelled.sweep)
    if measured.sweep is not None:
        claims["figure 11b, this machine"] = judge(here.SWEEP_CLAIMS, measured.sweep)
    return claims
