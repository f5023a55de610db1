"""The report for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.text import Text

from llmcache.doctor.finding import FAILED, LIMITED, OK, SKIPPED, Finding, Report

_MARKS = {OK: ("ok", "green"), LIMITED: ("limited", "yellow"), FAILED: ("FAILED", "bold red"), SKIPPED: ("skipped", "dim")}


def show(report: Report, as_json: bool) -> None:
    """Prints `report` on stdout."""
    if as_json:
        print(json.dumps(report.document(), indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in _lines(report):
        console.print(line)


def _lines(report: Report) -> Iterator[Text]:
    for area, findings in groupby(report.findings, lambda finding: finding.area):
        yield Text(area, "bold")
        for finding in findings:
            yield from _finding(finding)
    yield Text(summary(report))


def _finding(finding: Finding) -> Iterator[Text]:
    word, style = _MARKS[finding.status]
    yield Text.assemble("  ", (f"{word:<8}", style), f"{finding.name:<17}{finding.found}")
    if finding.remedy is not None:
        yield Text(f"  {'':<8}{'':<17}> {finding.remedy}")


def summary(report: Report) -> str:
    """One line: whether a mount is possible, and how much is less than it could be."""
    failed, limited = report.count(FAILED), report.count(LIMITED)
    verdict = f"a mount is not possible: {failed} failed" if failed else "a mount is possible"
    return f"{verdict}; {limited} limited" if limited else verdict
