"""Scorers, one file each; the table below is what policies, the benchmark and the tests use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from llmcache.errors import UsageError

if TYPE_CHECKING:
    from llmcache.kv.index.scorers.base import Scorer

__all__ = ["SCORERS", "scorer_class"]

# name: module:class, imported when it is asked for (compiled loops take a while to load).
SCORERS: dict[str, str] = {
    "exact": "exact:Exact",
    "rounded": "rounded:Rounded",
    "dci": "dci:Dci",
    "quest": "quest:Quest",
    "auto": "auto:Auto",
}


def scorer_class(name: str) -> type[Scorer]:
    """Returns the class of the scorer called `name`; UsageError for a name that is not in `SCORERS`."""
    if name not in SCORERS:
        raise UsageError(f"scorer: there is no scorer {name!r}", f"one of: {', '.join(SCORERS)}")
    module, _, attribute = SCORERS[name].partition(":")
    found: type[Scorer] = getattr(importlib.import_module(f"llmcache.kv.index.scorers.{module}"), attribute)
    return found
