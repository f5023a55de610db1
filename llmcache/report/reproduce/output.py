"""What `llmcache reproduce` writes and prints: a page and a JSON file in a directory, the claims on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from llmcache.errors import UsageError
from llmcache.report.claims import Judged, Verdict
from llmcache.report.files import check_target, write_target
from llmcache.report.reproduce import Reproduction, check_name, reproduce

OPTION = "-o"
ENDINGS = ("html", "json")
COLOURS = {Verdict.CONFIRMED: "green", Verdict.PARTLY: "yellow", Verdict.NOT_CONFIRMED: "red"}


@dataclass(frozen=True)
class Wanted:
    """What is asked for. `directory`: where page and JSON go; None: nowhere."""

    name: str
    directory: str | None
    quick: bool = False
    as_json: bool = False
    force: bool = False

    @property
    def targets(self) -> list[Path]:
        """Returns the files to write: page, then JSON."""
        return [] if self.directory is None else [Path(self.directory) / f"{self.name}.{ending}" for ending in ENDINGS]


def run(wanted: Wanted) -> None:
    """Recompute, write and print what is `wanted`. UsageError for an unknown name, or where nothing may be written."""
    check_name(wanted.name)
    prepare(wanted)
    done = reproduce(wanted.name, wanted.quick, tell)
    text = write(wanted, done.page(), done.document())
    if wanted.as_json:
        sys.stdout.write(text)
    else:
        show(done, wanted.targets)


def write(wanted: Wanted, page: str, document: dict[str, Any]) -> str:
    """Write page and JSON where they are wanted; returns the JSON."""
    text = json.dumps(document, indent=1) + "\n"
    for target, data in zip(wanted.targets, (page, text), strict=bool(wanted.targets)):
        write_target(OPTION, target, data.encode(), wanted.force)
    return text


def prepare(wanted: Wanted) -> None:
    """Make the directory and ask for every file, before there is any work to lose."""
    if wanted.directory is None:
        return
    try:
        Path(wanted.directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{OPTION}: cannot make '{wanted.directory}': {error.strerror}", "name a directory") from error
    for target in wanted.targets:
        check_target(OPTION, target, wanted.force)


def tell(what: str) -> None:
    """Say on stderr what begins, if somebody looks."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr)


def show(done: Reproduction, written: Sequence[Path]) -> None:
    """Print every claim with its verdicts and numbers, and which files were `written`."""
    console = Console(highlight=False, markup=False)
    for about, judged in done.claims.items():
        console.rule(f"{about} ({done.kinds[about]})", align="left")
        for claim in judged:
            console.print(f"“{claim.quote}” ({claim.section})")
            console.print(Padding(_findings(claim), (0, 0, 1, 2)))
    for target in written:
        console.print(f"written: {target}", soft_wrap=True)


def _findings(claim: Judged) -> Table:
    made = Table.grid(padding=(0, 2, 0, 0))
    for name, finding in claim.findings.items():
        made.add_row(name, Text(finding.verdict.value, COLOURS[finding.verdict]), finding.ours)
    return made
