"""Refresh accounting: closed forms, bounds, flows between groups, and damaged recorded runs."""

from __future__ import annotations

import functools
import json
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.errors import DataError, UsageError
from llmcache.papers.edram.constants import EDRAM_4MB, KELLE_INTERVALS, MIB, PAPER, RefreshIntervals
from llmcache.papers.edram.refresh import RULES, EdramRun, RunRecorder, account, parse_run, read_run

DIM = 64
HALF = 2 * DIM  # bytes of one half of a key and a value


def still(rows: int, steps: int, step_ns: float) -> EdramRun:
    """Return a run of a constant set of `rows` pairs, half of them in each score group."""
    recorder = RunRecorder(HALF)
    for _ in range(steps):
        recorder.observe(0, "kv", np.arange(rows), np.arange(rows) % 2 == 0)
        recorder.end_step(step_ns)
    return recorder.finish("still", "modelled: a constant")


@pytest.mark.parametrize("rule", RULES)
def test_a_full_array_draws_the_power_of_table_1(rule: str) -> None:
    """A pass takes 1.14 mJ: 25.33 W at 45 us, 1.082 W at the intervals of section 7.1 (harmonic mean 1.05 ms)."""
    run = still(4 * MIB // (2 * HALF), 100, 1e8)  # 10 s
    for intervals, watts, mean_ns in ((RefreshIntervals.uniform(45e3), 25.33, 45e3), (KELLE_INTERVALS, 1.082, 1_053_658.5)):
        found = account(run, intervals, EDRAM_4MB.refresh_j / EDRAM_4MB.capacity_bytes, rule=rule)
        assert found.watts == pytest.approx(watts, rel=1e-3) == pytest.approx(PAPER.refresh_w(4 * MIB, mean_ns), rel=1e-3)
        assert found.mean_interval_ns == pytest.approx(mean_ns, rel=1e-3) and intervals.mean_ns == pytest.approx(mean_ns)


def changing(steps: int = 60, seed: int = 0) -> EdramRun:
    """Return a run whose rows are added, evicted, and moved between groups."""
    random = np.random.default_rng(seed)
    recorder = RunRecorder(HALF, 256)
    ids, at = np.full(20, -1), 0
    for _ in range(steps):
        for place in random.integers(0, 20, 3):
            ids[place], at = at, at + 1
        if random.random() < 0.3:
            ids[random.integers(0, 20)] = -1
        recorder.observe("a", "kv", ids.reshape(2, 10), random.random((2, 10)) < 0.5)
        recorder.observe("a", "x", np.where(np.arange(5) <= at % 5, ids[:5], -1), random.random(5) < 0.5)
        recorder.end_step(float(random.integers(1, 4_000_000)))
    return recorder.finish("changing", "modelled: random")


def test_only_bytes_within_the_capacity_are_refreshed() -> None:
    run = still(8, 10, 1e7)
    every, half = account(run, KELLE_INTERVALS, 1e-12), account(run, KELLE_INTERVALS, 1e-12, capacity_bytes=8 * HALF)
    assert half.pinned_share == 0.5 and every.pinned_share == 1
    assert half.joules == pytest.approx(every.joules / 2)
    assert half.mean_interval_ns == pytest.approx(every.mean_interval_ns)
    assert account(run, KELLE_INTERVALS, 1e-12, capacity_bytes=1e9).joules == every.joules


def test_appends_evictions_and_promotions_are_counted() -> None:
    recorder = RunRecorder(HALF)
    for ids, high in (([1, 2, -1], [1, 0, 0]), ([1, 3, 4], [1, 1, 0]), ([-1, 3, 4], [0, 1, 1])):
        recorder.observe(0, "kv", np.array(ids), np.array(high, np.bool_))
        recorder.end_step()
    run = recorder.finish("", "")
    rows = [(f.high, f.low, f.appended, f.evicted, f.promoted) for f in run.flows["kv"]]
    assert rows == [(1, 1, 2, 0, 0), (2, 1, 2, 1, 0), (2, 0, 0, 1, 1)]


def test_a_saved_run_is_read_back_unchanged(tmp_path: Path) -> None:
    for run in (changing(), replace(changing(), lives=None)):
        path = tmp_path / f"run{run.lives is not None}.json"
        run.save(path)
        assert read_run(path) == run
        with pytest.raises(UsageError, match=r"^run: .* exists"):
            run.save(path)
        run.save(path, force=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["runFalse.json", "runTrue.json"]


def test_a_run_without_the_data_that_a_rule_needs_is_refused() -> None:
    untimed = replace(changing(), durations_ns=None)
    with pytest.raises(DataError, match=r"^steps.duration_ns: "):
        account(untimed, KELLE_INTERVALS, 1e-12)
    assert account(untimed.with_step(2e6, "modelled: 2 ms"), KELLE_INTERVALS, 1e-12).seconds == pytest.approx(0.12)
    with pytest.raises(UsageError, match=r"^step_ns: "):
        untimed.with_step(0, "")
    with pytest.raises(DataError, match=r"^lives: "):
        account(replace(changing(), lives=None), KELLE_INTERVALS, 1e-12, rule="floor")
    for rule, capacity, named in (("floor", 100, "rule"), ("ticks", 0, "capacity_bytes")):
        with pytest.raises(UsageError, match=rf"^{named}: "):
            account(changing(), KELLE_INTERVALS, 1e-12, rule=rule, capacity_bytes=capacity)


@pytest.mark.parametrize(
    ("place", "value", "names"),
    [
        (("schema",), "llmcache.edram-run/2", "schema"),
        (("steps", "high_kv"), [1], "steps.low_kv"),
        (("steps", "high_kv", 0), 1.5, "steps.high_kv"),
        (("steps", "appended_x", 3), 9999, "steps.high_x"),
        (("steps", "duration_ns", 0), float("nan"), "steps.duration_ns"),
        (("lives", 0, "kind"), "q", "lives"),
        (("lives", 0, "count"), 99, "lives"),
        (("lives", 0, "path"), [[True, 10**6]], "lives.path"),
    ],
)
def test_wrong_values_in_a_run_are_named(place: tuple[str | int, ...], value: Any, names: str) -> None:
    data = json.loads(json.dumps(changing().to_json()))
    functools.reduce(operator.getitem, place[:-1], data)[place[-1]] = value
    with pytest.raises(DataError, match=rf"^{names}\b") as caught:
        parse_run(data)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000])
def test_files_that_are_not_runs_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(DataError):
        read_run(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_run(tmp_path / "none.json")
