"""Papers recomputed: what each claims beside what our policies and models give, as one page and one JSON document.

`REPRODUCTIONS` is what `llmcache reproduce NAME` knows; each is imported only when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from llmcache.errors import UsageError

if TYPE_CHECKING:
    from llmcache.report.claims import Judged

# name: (module with `reproduce(quick, progress)`, what it recomputes)
REPRODUCTIONS: dict[str, tuple[str, str]] = {
    "io-caching": (
        "llmcache.report.reproduce.io_caching.run",
        "Rethinking I/O Caching for LLM Inference (2025): figures 1, 2, 4, 5 and section 4.2",
    ),
    "hillinfer": (
        "llmcache.report.reproduce.hillinfer.run",
        "HillInfer, KV eviction with a SmartSSD (ACL submission): figures 2, 3, 8, 9, 10, 11",
    ),
    "icecache": (
        "llmcache.report.reproduce.icecache.run",
        "IceCache, trees of keys for long contexts (ICLR 2026): figures 1, 6, 7, 8 and the tables' claims",
    ),
    "kelle": (
        "llmcache.report.reproduce.kelle.run",
        "Kelle: Co-design KV Caching and eDRAM for Efficient LLM Serving in Edge Computing (2025): tables, text, figures",
    ),
}

Progress = Callable[[str], None]
"""Is told in words what begins."""


class Reproduction(Protocol):
    """A paper recomputed."""

    @property
    def claims(self) -> Mapping[str, Sequence[Judged]]:
        """The paper's claims with what our numbers say of them, by what they are about."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """How the numbers came about (modelled, measured here), by what the claims are about."""

    def document(self) -> dict[str, Any]:
        """Returns everything for programs, ready for JSON; `schema` names the layout."""

    def page(self) -> str:
        """Returns everything for people, as one HTML file."""


def check_name(name: str) -> None:
    """UsageError unless a paper called `name` can be recomputed."""
    if name not in REPRODUCTIONS:
        raise UsageError(f"NAME: there is no reproduction called '{name}'", f"one of: {', '.join(REPRODUCTIONS)}, all")


def reproduce(name: str, quick: bool, progress: Progress) -> Reproduction:
    """Returns the paper called `name`, recomputed; UsageError if there is none. `quick`: with fewer cache sizes."""
    check_name(name)
    found: Reproduction = importlib.import_module(REPRODUCTIONS[name][0]).reproduce(quick, progress)
    return found
