"""`llmcache doctor`: what this machine offers to each part of llmcache, and what to do about what it lacks.

One file per area, each with one function that returns its `Check`s; `examine` asks them all. Nothing is probed in a second
way here: what is found comes from the code that the commands themselves decide by.
"""

from __future__ import annotations

import importlib
import os

from llmcache.doctor.report import LIMITED, Check, Diagnosis
from llmcache.errors import UsageError

AREAS = ("mounting", "memory", "tracing", "machine", "packages")
_OF_DIRECTORY = ("mounting", "machine")  # findings on the storage of the directory that is asked about
_REMEDY = "pip install . in the source directory, or tools/test"


def examine(directory: str | None) -> Diagnosis:
    """What was found on this machine, with the storage of `directory` measured if one is named (takes up to 25 s).

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
