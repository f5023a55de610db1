"""Kelle recomputed, for programs: base units, what the paper says apart from what is ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from llmcache import __version__
from llmcache.edram.constants import PROFILES
from llmcache.edram.systems import SYSTEMS
from llmcache.report.reproduce.kelle.paper import AVERAGED, NOT_RECOMPUTED, PAPER, TASKS
from llmcache.report.reproduce.kelle.rows import ARITHMETIC, MODELLED, Row

SCHEMA = "llmcache.reproduce.kelle/1"
KINDS = {
    "chip": f"{ARITHMETIC}, and public ones",
    "algorithm": ARITHMETIC,
    "averages": MODELLED,
    "table 7": MODELLED,
    "table 8": MODELLED,
    "table 9": MODELLED,
    "experiments": MODELLED,
}
TITLES = {
    "chip": "Table 1, area and power of the chip",
    "algorithm": "Intervals, recomputation, capacities",
    "averages": "Speed-up and efficiency on average (section 8.1)",
    "table 7": "Budgets N' (table 7)",
    "table 8": "Refresh intervals (table 8)",
    "table 9": "Batch sizes (table 9)",
    "experiments": "Sections 3 and 8.3, and the chip's powers at work",
}


def document(rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Returns everything as JSON-ready values."""
    return {
        "schema": SCHEMA,
        "kind": MODELLED,
        "llmcache_version": __version__,
        "paper": PAPER,
        "averaged_over": {"models": list(AVERAGED), "tasks": list(TASKS)},
        "profiles": {name: dataclasses.asdict(profile) for name, profile in PROFILES.items()},
        "systems": {name: dataclasses.asdict(system) for name, system in SYSTEMS.items()},
        "claims": [row.as_json(about, KINDS[about]) for about, of in rows.items() for row in of],
        "not_recomputed": [{"where": where, "what": what, "why": why} for where, what, why in NOT_RECOMPUTED],
    }
