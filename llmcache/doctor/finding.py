"""What was found: one line of the report, and the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from llmcache.errors import EXIT_OK, EnvironmentProblem

SCHEMA = "llmcache.doctor/1"
OK, LIMITED, FAILED, SKIPPED = "ok", "limited", "failed", "skipped"
"""Statuses: as good as it gets; works, but less of something; a mount is impossible; was not asked for."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `found` is for people, `facts` has the same in base units (bytes, bytes/s).

    Whatever is not OK has a `remedy`: ValueError without one.
    """

    area: str
    name: str
    status: str
    found: str
    remedy: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status != OK and not self.remedy:
            raise ValueError(f"{self.name} is {self.status} and has no remedy")


@dataclass(frozen=True)
class Report:
    """All findings, in the order in which they are shown."""

    findings: tuple[Finding, ...]

    def count(self, status: str) -> int:
        """Findings of one status."""
        return sum(finding.status == status for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 if a mount is possible, 3 (environment) if something that it needs has failed."""
        return EnvironmentProblem.exit_code if self.count(FAILED) else EXIT_OK

    def document(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        counts = {status: self.count(status) for status in (OK, LIMITED, FAILED, SKIPPED)}
        return {"schema": SCHEMA, "mountable": not counts[FAILED], **counts, "findings": [asdict(f) for f in self.findings]}
