"""The arithmetic of the tracing benchmark's bars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.tracebench import SCHEMA, bars, chance, ratio

RESULTS = Path(__file__).resolve().parents[2] / "tools" / "bench" / "results" / "trace.json"


def test_ratios_are_of_pairs() -> None:
    assert ratio([2.0, 30.0, 3.0], [1.0, 10.0, 1.0]) == 3.0
    with pytest.raises(ValueError):
        ratio([1.0], [1.0, 2.0])


def test_chance_of_pairs() -> None:
    assert chance([2.0] * 5, [1.0] * 5) == 1 / 32
    assert chance([1.0] * 5, [2.0] * 5) == 1.0
    assert chance([2.0, 1.0], [1.0, 2.0]) == 0.75


def test_the_verdicts_of_the_results_follow_from_their_runs() -> None:
    found = json.loads(RESULTS.read_text())
    assert found["schema"] == SCHEMA
    assert [bar.to_json() for bar in bars(found)] == found["bars"]


def test_a_bar_that_is_missed_is_told() -> None:
    rows = [
        {"tracer": name, "read_bytes": 4096, "ns_per_read": runs} for name, runs in (("llmcache", [2.0]), ("strace", [30.0]))
    ]
    pairs = [{"llmcache": [2.0] * 5, "none": [1.0] * 5, "ratio": 2.0} for _ in range(2)]
    told = bars({"overheads": rows, "pairs": pairs, "rate": [{"events_per_s": 4e5, "lost": 1}], "start_s": [0.6]})
    assert [bar.passed for bar in told] == [False] * 6
