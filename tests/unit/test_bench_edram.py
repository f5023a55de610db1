"""tools/bench/edram: its sweep is as large as it says, its bar is judged, its results in the tree are judged."""

from __future__ import annotations

import json
from pathlib import Path

from tools.bench.edrambench import CONFIGURATIONS, SCHEMA, SWEEP_BAR_S, axes, bars, cases, document

RESULTS = Path(__file__).parents[2] / "tools/bench/results/edram.json"


def test_the_sweep_is_as_large_as_it_says() -> None:
    assert len(axes()) == CONFIGURATIONS


def test_the_median_of_the_sweep_is_judged() -> None:
    told = document({"sweep": [1.0, 4.9, 9.0], "evaluate": [9.0]}, {})
    (bar,) = told["bars"]
    assert (bar["value"], bar["limit"], bar["passed"]) == (4.9, SWEEP_BAR_S, True)
    assert not document({"sweep": [5.1]}, {})["bars"][0]["passed"]


def test_the_results_in_the_tree_are_of_this_benchmark() -> None:
    told = json.loads(RESULTS.read_text())
    assert (told["schema"], told["configurations"]) == (SCHEMA, CONFIGURATIONS)
    assert [row["case"] for row in told["cases"]] == list(cases())
    assert [bar.to_json() for bar in bars(told)] == told["bars"]
