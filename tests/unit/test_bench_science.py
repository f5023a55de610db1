"""The benchmarks of simulator, tracer, sizing, papers and commands: the arithmetic of their bars, and generated traces."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.errors import DataError, EnvironmentProblem
from llmcache.units import BLOCK_BYTES
from tools.bench import demotime, size, startup, testtime, trace
from tools.bench.__main__ import main
from tools.bench.clients import simulator
from tools.bench.size import LoopCase, find_knee, stalls_begin

# simulate, edram


def test_the_large_trace_is_a_loop_with_a_hot_set() -> None:
    parts = list(simulator.large(12_000_000))
    first, count = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    assert count.sum() >= 12_000_000
    loop = count == simulator.LARGE_RUN
    assert 0.85 < loop.mean() < 0.95
    steps = np.diff(first[loop]) % simulator.LARGE_BLOCKS
    assert set(steps.tolist()) == {simulator.LARGE_RUN}
    assert first[~loop].min() >= simulator.LARGE_BLOCKS


# trace


def test_chance_of_pairs() -> None:
    assert trace.chance([2.0] * 5, [1.0] * 5) == 1 / 32
    assert trace.chance([1.0] * 5, [2.0] * 5) == 1.0
    assert trace.chance([2.0, 1.0], [1.0, 2.0]) == 0.75


# size

BUDGETS = [70.0, 80.0, 88.0, 94.0, 100.0, 106.0, 112.0, 125.0]
SMALL = LoopCase("small", 2000 * BLOCK_BYTES, 500 * BLOCK_BYTES * 10, 10**8)  # 500 blocks come in time: S = 1500


def passes(knee: float, plateau_s: float, slope: float) -> list[tuple[float, float]]:
    return [(budget, plateau_s + max(0.0, knee - budget) * slope) for budget in BUDGETS]


@given(st.floats(85, 110), st.floats(0.1, 10), st.floats(0.001, 1))
def test_a_clean_knee_is_found_where_it_is(knee: float, plateau_s: float, slope: float) -> None:
    found = find_knee(passes(knee, plateau_s, slope))
    assert found.cache_bytes == pytest.approx(knee, rel=1e-6)
    assert found.plateau_s == pytest.approx(plateau_s)


@pytest.mark.parametrize("disturbed", range(len(BUDGETS)))
def test_one_disturbed_budget_moves_the_knee_little(disturbed: int) -> None:
    points = passes(100, 1.0, 0.01)
    points[disturbed] = (points[disturbed][0], points[disturbed][1] * 1.08)
    assert find_knee(points).cache_bytes == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    "points", [[(budget, 1.0) for budget in BUDGETS], [(budget, budget) for budget in BUDGETS], [(1.0, 2.0), (2.0, 1.0)]]
)
def test_without_a_falling_line_there_is_no_knee(points: list[tuple[float, float]]) -> None:
    with pytest.raises(EnvironmentProblem):
        find_knee(points)


def test_the_simulator_agrees_with_the_formula() -> None:
    found = stalls_begin("belady", SMALL)
    assert found["formula_blocks"] == found["expected_blocks"] == 1500 and abs(found["difference"]) <= 0.01


def test_the_mounts_policy_pays_its_window() -> None:
    case = LoopCase("window", 500 * 10**6, 10**9, 4 * 10**8)
    found = stalls_begin("llmcache", case)
    assert found["expected_blocks"] > 1.05 * case.formula_blocks and abs(found["difference"]) <= 0.01


def test_the_command_says_whether_they_agree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(size, "CASES", (SMALL,))
    for policy, code, said in (("belady", 0, "pass"), ("lru", 1, "FAIL")):
        assert main(["size", "--policies", policy, "--modes", ""]) == code
        told = capsys.readouterr().out
        assert said in told and "modelled" in told


# papers, startup, demotime, testtime


def test_every_command_is_timed() -> None:
    found = list(startup.commands())
    assert {(), ("size",), ("kv",), ("kv", "bench"), ("edram", "sweep")} <= set(found) and len(found) == len(set(found))
    rows = [{"command": "llmcache x --help", "seconds": [0.1, 0.4, 9.0]}, {"command": "llmcache --help", "seconds": [0.1]}]
    rows.append({"command": "llmcache size --bw 100 --loop 70M", "seconds": [0.2]})
    slowest, answer = startup.bars({"commands": rows})
    assert (slowest.value, slowest.passed, answer.value) == (0.4, False, 0.2) and "x --help" in slowest.what


@pytest.mark.parametrize(
    ("last", "seconds", "code"),
    [
        ("==== 6093 passed in 517.23s (0:08:37) ====", 517.23, 0),
        ("=== 1 failed, 6092 passed, 3 skipped in 500.00s (0:08:20) ===", 500.0, 1),
        ("6 passed, 1 error in 2.50s", 2.5, 1),
    ],
)
def test_times_of_finished_runs(tmp_path: Path, last: str, seconds: float, code: int) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"tests/unit/test_x.py .... [ 1%]\n==== 2 passed in 1.00s ====\n{last}\n")
    run = testtime.of_log(log)
    assert (run["seconds"], run["exit_code"], run["log"]) == (seconds, code, "run.log")
    suite_bar, flakes = testtime.bars({"runs": [run] * 5 + [{**run, "seconds": 900.0, "busy": 2}] * 5})
    assert suite_bar.passed and flakes.passed == (code == 0)
    assert not testtime.bars({"runs": [run] * 9})[1].passed, "ten runs are asked for"
    assert not testtime.bars({"runs": [{**run, "exit_code": 0}] * 10 + [{**run, "exit_code": 1}]})[1].passed
    log.write_text("collected 6093 items\n")
    with pytest.raises(DataError, match="--log"):
        testtime.of_log(log)


def test_the_last_demo_counts() -> None:
    runs = [{"seconds": 500.0, "exit_code": 0}, {"seconds": 60.0, "exit_code": 0}]
    assert all(bar.passed for bar in demotime.bars({"runs": runs}))
    assert [bar.passed for bar in demotime.bars({"runs": runs[:1]})] == [False, True]
    assert [bar.passed for bar in demotime.bars({"runs": [{**runs[1], "exit_code": 1}]})] == [True, False]
    done = demotime.timed([sys.executable, "-c", "print('one'); print('two'); raise SystemExit(4)"])
    assert (done["exit_code"], done["said"]) == (4, "two") and done["seconds"] > 0
