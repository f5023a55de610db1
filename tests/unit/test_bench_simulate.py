"""The simulator's benchmark: its traces are what they say, and the results in the tree are judged by them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tools.bench import simulate_traces
from tools.bench.simulatebench import LARGE, MEMORY_BAR, SCHEMA, bars, speeds

RESULTS = Path(__file__).parents[2] / "tools/bench/results/simulate.json"


def test_the_large_trace_is_a_loop_with_a_hot_set() -> None:
    parts = list(simulate_traces.large(12_000_000))
    first, count = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    assert count.sum() >= 12_000_000
    loop = count == simulate_traces.LARGE_RUN
    assert 0.85 < loop.mean() < 0.95
    steps = np.diff(first[loop]) % simulate_traces.LARGE_BLOCKS
    assert set(steps.tolist()) == {simulate_traces.LARGE_RUN}
    assert first[~loop].min() >= simulate_traces.LARGE_BLOCKS


def test_the_other_traces_have_the_blocks_asked_for() -> None:
    assert sum(int(count.sum()) for _, count in simulate_traces.single(100_001)) == 100_001
    assert sum(int(count.sum()) for _, count in simulate_traces.loop(3)) == 3 * simulate_traces.LOOP_BLOCKS


def test_the_results_in_the_tree_are_of_this_benchmark() -> None:
    told = json.loads(RESULTS.read_text())
    assert told["schema"] == SCHEMA
    wanted = [(one.trace, one.name, one.bar or None) for one in speeds()]
    assert [(one["trace"], one["policy"], one["bar"]) for one in told["speeds"]] == wanted
    assert [(one["step"], one["blocks"], one["bar"]) for one in told["memory"]] == [
        ("write", LARGE, MEMORY_BAR), ("simulate", LARGE, MEMORY_BAR),
    ]  # fmt: skip
    assert [bar.to_json() for bar in bars(told)] == told["bars"]
    assert len(told["bars"]) == len([one for one in told["speeds"] if one["bar"]]) + 2
