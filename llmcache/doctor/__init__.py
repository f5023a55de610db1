"""`llmcache doctor`: what this machine offers to each part of llmcache, and what to do about what it lacks.

One file per area, each with one function that returns its `Check`s; `examine` asks them all. Nothing is probed in a second
way here: what is found comes from the code that the commands themselves decide by.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from llmcache.errors import EXIT_OK, EnvironmentProblem, UsageError

AREAS = ("mounting", "memory", "tracing", "machine", "packages")
_OF_DIRECTORY = ("mounting", "machine")  # findings on the storage of the directory that is asked about
_REMEDY = "pip install . in the source directory, or tools/test"
SCHEMA = "llmcache.doctor/1"
OK, LIMITED, FAILED, SKIPPED = "ok", "limited", "failed", "skipped"
"""Statuses: as good as it gets; works, but less of something; a mount is impossible; was not asked for."""
_STYLES = {OK: ("ok", "green"), LIMITED: ("limited", "yellow"), FAILED: ("FAILED", "bold red"), SKIPPED: ("skipped", "dim")}


@dataclass(frozen=True)
class Check:
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
class Diagnosis:
    """All checks, in the order in which they are shown."""

    findings: tuple[Check, ...]

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


def examine(directory: str | None) -> Diagnosis:
    """What was found on this machine, with the storage of `directory` measured if one is named (takes up to 30 s).

    UsageError: `directory` is none.
    """
    if directory is not None and not os.path.isdir(directory):
        raise UsageError(f"DIR: {directory} is not a directory", "name a directory on the storage to measure")
    return Diagnosis(tuple(check for area in AREAS for check in _checks(area, directory)))


def _checks(area: str, directory: str | None) -> list[Check]:
    """The checks of one area; a missing library must not keep the others from being seen."""
    try:
        module = importlib.import_module(f"llmcache.doctor.{area}")
    except ImportError as error:
        return [Check(area, area, LIMITED, f"cannot be examined: {error}", _REMEDY)]
    found: list[Check] = module.examine(directory) if area in _OF_DIRECTORY else module.examine()
    return found


def show(diagnosis: Diagnosis, as_json: bool) -> None:
    """Prints `diagnosis` on stdout."""
    if as_json:
        print(json.dumps(diagnosis.document(), indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    for area, checks in groupby(diagnosis.findings, lambda check: check.area):
        console.print(Text(area, "bold"))
        for check in checks:
            word, style = _STYLES[check.status]
            console.print(Text.assemble("  ", (f"{word:<8}", style), f"{check.name:<18}{check.found}"))
            if check.remedy is not None:
                console.print(Text(f"{'':<28}> {check.remedy}"))
    failed, limited = diagnosis.count(FAILED), diagnosis.count(LIMITED)
    verdict = f"a mount is not possible: {failed} failed" if failed else "a mount is possible"
    console.print(Text(f"{verdict}; {limited} limited" if limited else verdict))
