"""icecache recomputed, for programs: base units; paper and measured stay apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmcache import __version__
from llmcache.kv.bench.lengths import SMALL
from llmcache.report.claims import Judged
from llmcache.report.reproduce.icecache.measured import Measured
from llmcache.report.reproduce.icecache.paper import BLANK, PAPER
from llmcache.report.reproduce.icecache.times import share_of_stock

SCHEMA = "llmcache.reproduce.icecache/1"
_ANSWERS = "measured here: the recall model"
KINDS = {
    "figure 6": _ANSWERS,
    "tables 1, 2 and 5": _ANSWERS,
    "tables 3 and 6": _ANSWERS,
    "table 4": _ANSWERS,
    "figures 1, 7 and 8": "measured here: random weights, prompts by chance, no GPU",
}


def document(found: Measured, claims: Mapping[str, Sequence[Judged]]) -> dict[str, Any]:
    """Returns everything as JSON-ready values."""
    rows = [] if found.lengths is None else [row.document(stock) for row, stock in share_of_stock(found.lengths)]
    return {
        "schema": SCHEMA,
        "llmcache_version": __version__,
        "paper": PAPER,
        "blank": [{"where": where, "what": what, "why": why} for where, what, why in BLANK],
        "measured_here": {
            "kind": "measured",
            "tasks": {name: bench.document() for name, bench in found.tasks.items()},
            "lengths": {"shape": SMALL, "synthetic_prompt": True, "rows": rows},
            "missing": dict(found.missing),
        },
        "claims": [
            {"about": about, "kind": KINDS[about], **claim.as_json()} for about, judged in claims.items() for claim in judged
        ],
    }
