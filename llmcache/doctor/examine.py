"""Asks all areas."""

from __future__ import annotations

import importlib
import os

from llmcache.doctor.finding import LIMITED, Finding, Report
from llmcache.errors import UsageError

AREAS = ("mounting", "memory", "tracing", "machine", "packages")
_OF_DIRECTORY = ("mounting", "machine")  # findings on the storage of the directory that is asked about
_REMEDY = "pip install . in the source directory, or tools/test"


def examine(directory: str | None) -> Report:
    """The report on this machine, with the storage of `directory` measured if one is named (takes up to 25 s).

    UsageError: `directory` is none.
    """
    if directory is not None and not os.path.isdir(directory):
        raise UsageError(f"DIR: {directory} is not a directory", "name a directory on the storage to measure")
    return Report(tuple(finding for area in AREAS for finding in _ask(area, directory)))


def _ask(area: str, directory: str | None) -> list[Finding]:
    """The findings of one area; a missing library must not keep the others from being seen."""
    try:
        module = importlib.import_module(f"llmcache.doctor.{area}")
    except ImportError as error:
        return [Finding(area, area, LIMITED, f"cannot be examined: {error}", _REMEDY)]
    found: list[Finding] = module.examine(directory) if area in _OF_DIRECTORY else module.examine()
    return found
