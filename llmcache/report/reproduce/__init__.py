"""Papers recomputed: what each claims beside what our policies and models give, as one page and one JSON document.

`REPRODUCTIONS` is what `llmcache reproduce NAME` knows; each is imported only when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from llmcache.errors import UsageError

# name: (module with `reproduce(quick, progress)`, what it recomputes)
REPRODUCTIONS: dict[str, tuple[str, str]] = {
    "io-caching": (
        "llmcache.report.reproduce.io_caching.run",
        "Rethinking I/O Caching for LLM Inference (2025): figures 1, 2, 4, 5 and section 4.2",
    ),
}

Progress = Callable[[str], None]
"""Is told in words what begins."""


@dataclass(frozen=True)
class Row:
    """A claim in short, for the terminal."""

    claim: str
    section: str
    verdicts: dict[str, str]


class Reproduction(Protocol):
    """A paper recomputed."""

    def document(self) -> dict[str, Any]:
        """Returns everything for programs, ready for JSON; `schema` names the layout."""

    def page(self) -> str:
        """Returns everything for people, as one HTML file."""

    def rows(self) -> list[Row]:
        """Returns the claims and their verdicts in short."""


def reproduce(name: str, quick: bool, progress: Progress) -> Reproduction:
    """Returns the paper called `name`, recomputed; UsageError if there is none. `quick`: with fewer cache sizes."""
    if name not in REPRODUCTIONS:
        raise UsageError(f"NAME: there is no reproduction called '{name}'", f"one of: {', '.join(REPRODUCTIONS)}")
    found: Reproduction = importlib.import_module(REPRODUCTIONS[name][0]).reproduce(quick, progress)
    return found
