"""`llmcache doctor`: checks of this machine for each part of llmcache, and suggested fixes.

The checks call the functions that the commands use for their own decisions, so doctor and the commands agree.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from llmcache.doctor.check import FAILED, LIMITED, OK, SKIPPED, Check
from llmcache.errors import EXIT_OK, MissingRequirement, UsageError, broken

AREAS = {"mounting": "mount", "memory": "memory", "tracing": "trace", "machine": "machine", "packages": "packages"}
"""Files of this package, and the names of their areas in the report."""
_OF_DIRECTORY = ("mounting", "machine")  # areas that depend on DIR
_REMEDY = "pip install . in the source directory, or tools/test"
SCHEMA = "llmcache.doctor/1"
_INDENT = 28
_STYLES = {OK: ("ok", "green"), LIMITED: ("limited", "yellow"), FAILED: ("FAILED", "bold red"), SKIPPED: ("skipped", "dim")}


@dataclass(frozen=True)
class Diagnosis:
    """All checks by area, in the order in which they are shown."""

    areas: dict[str, list[Check]]

    def count(self, status: str) -> int:
        return sum(check.status == status for checks in self.areas.values() for check in checks)

    @property
    def exit_code(self) -> int:
        return MissingRequirement.exit_code if self.count(FAILED) else EXIT_OK

    def document(self) -> dict[str, Any]:
        counts = {status: self.count(status) for status in (OK, LIMITED, FAILED, SKIPPED)}
        findings = [{"area": area, **asdict(check)} for area, checks in self.areas.items() for check in checks]
        return {"schema": SCHEMA, "mountable": not counts[FAILED], **counts, "findings": findings}


def examine(directory: str | None, pid: int | None = None) -> Diagnosis:
    """Check this machine, or process `pid`; measure the storage of `directory` (takes up to 30 s).

    UsageError if `directory` is not a directory.
    """
    if pid is not None:
        from llmcache.doctor.engine import examine as examine_engine

        return Diagnosis({"engine": examine_engine(pid)})
    if directory is not None and not os.path.isdir(directory):
        raise UsageError(f"DIR: {directory} is not a directory", "give a directory on the storage to measure")
    return Diagnosis(dict(_area(file, directory) for file in AREAS))


def _area(file: str, directory: str | None) -> tuple[str, list[Check]]:
    """A missing library becomes a check, so that the other areas are still shown."""
    try:
        module = importlib.import_module(f"llmcache.doctor.{file}")
    except ImportError as error:
        return file, [Check(file, LIMITED, f"cannot be examined: {error}", _REMEDY)]
    return AREAS[file], module.examine(directory) if file in _OF_DIRECTORY else module.examine()


def show(diagnosis: Diagnosis, as_json: bool) -> None:
    """Print `diagnosis` on stdout."""
    if as_json:
        print(json.dumps(diagnosis.document(), indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    room = max(20, console.width - _INDENT) if console.is_terminal else sys.maxsize
    for area, checks in diagnosis.areas.items():
        console.print(Text(area, "bold"))
        for check in checks:
            word, style = _STYLES[check.status]
            found = broken(check.found, room, 0)
            console.print(Text.assemble("  ", (f"{word:<8}", style), f"{check.name:<18}{found[0]}"))
            below = found[1:]
            if check.remedy is not None:
                below += broken(f"> {check.remedy}", room)
            for line in below:
                console.print(Text(f"{'':<{_INDENT}}{line}"))
    if "mount" not in diagnosis.areas:
        return
    failed, limited = diagnosis.count(FAILED), diagnosis.count(LIMITED)
    verdict = f"a mount is not possible: {failed} failed" if failed else "a mount is possible"
    console.print(Text(f"{verdict}; {limited} limited" if limited else verdict))
