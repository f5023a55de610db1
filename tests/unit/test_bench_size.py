"""tools/bench/size: the knee in passes over budgets, and formula against simulator on small loops."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.units import BLOCK_BYTES
from tools.bench.errors import BenchError
from tools.bench.knee import find_knee
from tools.bench.size_simulated import Begin, Case, stalls_begin

BUDGETS = [70.0, 80.0, 88.0, 94.0, 100.0, 106.0, 112.0, 125.0]
SMALL = Case("small", 2000 * BLOCK_BYTES, 500 * BLOCK_BYTES * 10, 10**8)  # 500 blocks come in time: S = 1500


def passes(knee: float, plateau_s: float, slope: float) -> list[tuple[float, float]]:
    return [(size, plateau_s + max(0.0, knee - size) * slope) for size in BUDGETS]


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
    "points", [[(size, 1.0) for size in BUDGETS], [(size, size) for size in BUDGETS], [(1.0, 2.0), (2.0, 1.0)]]
)
def test_without_a_falling_line_there_is_no_knee(points: list[tuple[float, float]]) -> None:
    with pytest.raises(BenchError):
        find_knee(points)


def test_lru_stalls_until_the_whole_loop_fits() -> None:
    assert stalls_begin("lru", SMALL).simulated_blocks == 2000


def test_the_simulator_agrees_with_the_formula() -> None:
    found = stalls_begin("belady", SMALL)
    assert SMALL.formula_blocks == found.expected_blocks == 1500
    assert abs(found.difference) <= 0.01


def test_the_mounts_policy_pays_its_window() -> None:
    case = Case("window", 500 * 10**6, 10**9, 4 * 10**8)
    found = stalls_begin("llmcache", case)
    assert found.expected_blocks > 1.05 * case.formula_blocks
    assert abs(found.difference) <= 0.01


def test_a_difference_is_a_share_of_the_formula() -> None:
    assert Begin(SMALL, "lru", 1575).difference == pytest.approx(0.05)
    assert Begin(SMALL, "lru", 1575).to_json()["kind"] == "modelled"


def test_the_command_says_whether_they_agree() -> None:
    script = Path(__file__).resolve().parents[2] / "tools" / "bench" / "size"
    for policy, code, said in (("belady", 0, "pass"), ("lru", 1, "FAIL")):
        command = [sys.executable, str(script), "--policies", policy, "--modes", ""]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert result.returncode == code, result.stderr
        assert said in result.stdout and "modelled" in result.stdout
