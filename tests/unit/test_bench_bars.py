"""Quick runs of benchmarks, and the arithmetic of bars that recorded results (test_bench_results.py) do not show."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.errors import DataError, EnvironmentProblem
from llmcache.kv.bench.lengths import LengthRow
from llmcache.kv.bench.results import STOCK, KvMemory, Row
from llmcache.kv.bench.synthetic import Setup, fixed
from llmcache.kv.bench.task import Candidate, Told
from llmcache.kv.workload import StreamSpec
from llmcache.units import BLOCK_BYTES
from tests.unit.task_parts import of_policies, speed
from tools.bench import (
    kv,
    kvanswers,
    kvindex,
    kvmodels,
    kvpipeline,
    kvstore,
    kvtransformers,
    mount,
    size,
    startup,
    testtime,
    trace,
)
from tools.bench.__main__ import main
from tools.bench.cgroup import Usage
from tools.bench.clients.spill_file import SHAPE
from tools.bench.demo import same_answers
from tools.bench.experiment import Comparison, Experiment, SideRun
from tools.bench.harness import bars_of, run
from tools.bench.runner import ClientRun, ClientStep
from tools.bench.size import LoopCase, find_knee, stalls_begin


def quick_run(bench: Any, path: Path, *words: str) -> Any:
    code = run(bench, ["--quick", *words, "--json", str(path)])
    told = json.loads(path.read_text())
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "the scratch directory is gone"
    assert code == (0 if all(bar["passed"] for bar in told["bars"]) else 1) and told["schema"] == bench.SCHEMA
    return told


# kv, kvstore


def test_a_quick_run_of_kernels_and_spill_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = quick_run(kv, tmp_path / "kv.json", "--repeat", "2", "--dir", str(tmp_path))
    assert told["tokens"] == 4096 and all(len(row["seconds"]) == 2 for row in told["cases"])
    assert told["spill"]["device"]["emulated"]
    assert told["spill"]["device"]["scored_keys"] == 8 * told["spill"]["tokens"] == 8 << 16
    passed = {bar["name"]: bar["passed"] for bar in told["bars"]}
    assert len(passed) == 6 and passed["memory"] and passed["link"] and "top 20%" in capsys.readouterr().out


def test_a_quick_run_of_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = quick_run(kvstore, tmp_path / "store.json", "--rounds", "2", "--dir", str(tmp_path))
    assert told["tokens"] == kvstore.TOKENS // 16
    assert told["prefill"]["kv_bytes"] == told["tokens"] * SHAPE.token_bytes
    fetch, memory = told["fetch"], told["memory"]
    assert len(fetch["seconds"]) == len(fetch["plain_seconds"]) == 2 and fetch["bytes"] == 2 * 1024 * fetch["request_bytes"]
    assert [bar["value"] for bar in told["bars"]] == [fetch["figure"], memory["peak_bytes"] / 2**20]
    assert "GB/s" in capsys.readouterr().out


# kvindex


def test_a_quick_run_of_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvindex, "SIZES", (8192, 65536))
    monkeypatch.setattr(kvindex, "QUERIES", 32)
    monkeypatch.setattr(kvindex, "PAGES", 4)
    told = quick_run(kvindex, tmp_path / "kvindex.json", "--rounds", "1")
    assert [(one["kind"], one["keys"]) for one in told["rows"]] == [
        ("clustered", 1024), ("clustered", 8192), ("gaussian", 1024), ("gaussian", 8192)
    ]  # fmt: skip
    for one in told["rows"]:
        assert {times["runs"] for times in one["times"].values()} == {32} and one["insert"]["runs"] == 4
        assert {one["recall"][name] for name in ("exact", "scan", "scan side by side")} == {1.0}
        assert sum(one["levels"]) == one["keys"]
        assert one["auto"]["why"].startswith(one["auto"]["uses"])
    assert 0 < told["grown"]["recall_grown"] <= 1


# kvpipeline

SETUP = Setup(StreamSpec(layers=4, kv_heads=1, heads=1, head_dim=16, context=64), fixed(1), Path("/"))


def stages(evaluate: float, fetch: float, compute: float) -> Row:
    taken = {"evaluate": evaluate, "fetch": fetch, "update": 0.0, "compute": compute}
    return Row("hillinfer", "HillInfer", sum(taken.values()), taken, 0, 0, {}, None)


def test_the_model_of_the_pipeline_lets_only_the_first_layer_wait_where_computing_takes_longer() -> None:
    hidden = stages(40, 20, 80)  # by layer: 15 to hide, 20 to compute
    assert kvpipeline.to_hide_ns(hidden, SETUP) == 15
    assert kvpipeline.modelled_idle(hidden, SETUP) == pytest.approx(1 - 80 / (15 + 80))
    longer = stages(100, 60, 80)  # 40 to hide
    assert kvpipeline.modelled_idle(longer, SETUP) == pytest.approx(1 - 80 / (40 + 20 + 3 * 40))


# kvanswers, kvtransformers


@pytest.mark.parametrize(("rival", "lead"), [(5, 0.5), (10, 0.0)])
def test_the_lead_is_over_the_best_rival(rival: int, lead: float) -> None:
    found = kvanswers.rivals(of_policies(10, rival).document()["rows"])
    (bar,) = bars_of(kvanswers, {"parts": {"rivals": found}})
    assert found["figure"] == lead and bar.passed == (lead > 0)


@pytest.mark.parametrize(
    ("own_ms", "kv_bytes", "passed"), [(9, 50, "mtf"), (14, 50, "mt"), (16, 50, "m"), (9, 51, "tf"), (16, 51, "")]
)
def test_memory_and_time_have_bars_of_their_own(own_ms: float, kv_bytes: int, passed: str) -> None:
    rows = [
        LengthRow(tokens, policy, policy, speed(10 if policy == STOCK else own_ms), memory, {})
        for tokens in (16384, 32768)
        for policy, memory in [
            (STOCK, KvMemory(1000, 0)),
            *((name, KvMemory(kv_bytes, 100)) for name in kvtransformers.TIMED),
        ]
    ]
    parts = kvtransformers.against_stock(rows)
    assert "".join(bar.name[0] for bar in bars_of(kvtransformers, {"parts": parts}) if bar.passed) == passed
    assert "icecache 15.0%" in parts["memory_with_index"]["what"] or kv_bytes != 50
    assert parts["faster"]["by_policy"]["quest"] == (16384 if own_ms < 10 else None)


# kvmodels


def losses(own: list[float], mass: list[float], product: list[float]) -> dict[Candidate, Told]:
    """Losses above those of the full cache, which has 3 for every text."""
    given = {kvmodels.OWN: own, "oracle": mass, "oracle-product": product}
    told = {Candidate(policy, 64): Told(losses=[3 + one for one in above]) for policy, above in given.items()}
    return told | {Candidate(STOCK, None): Told(losses=[3.0] * len(own))}


def test_the_loss_is_compared_with_the_better_oracle_beyond_its_error() -> None:
    assert kvmodels.excess(losses([0.11] * 3, [0.1] * 3, [0.2] * 3), 64) == pytest.approx(0)
    assert kvmodels.excess(losses([0.21] * 3, [0.4] * 3, [0.1] * 3), 64) == pytest.approx(0.1)
    noisy = kvmodels.excess(losses([0.0, 0.4], [0.1, 0.1], [0.2] * 2), 64)
    assert noisy == pytest.approx(0.2 - 0.11 - 0.2), "a mean of .2 with an error of .2"
    assert kvmodels.excess(losses([0.21], [0.1], [0.1]), 64) == pytest.approx(0.1), "of one text no error is known"


def answers(own: list[bool], full: list[bool]) -> dict[Candidate, Told]:
    told = {Candidate(kvmodels.OWN, 64): Told(), Candidate(STOCK, None): Told()}
    for one, seen in told.items():
        seen.add(np.array([own if one.budget else full]), np.array([full]), None)
    return told


def test_answers_count_where_the_full_cache_has_most_of_them() -> None:
    hard = answers([True, False, False, False], [True, False, False, False])
    easy = answers([True, True, False, True], [True, True, True, False])
    assert kvmodels.kept([hard, easy], 64) == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="answers most of none"):
        kvmodels.kept([hard], 64)


# mount


def comparison(times: dict[str, float], **changes: Any) -> dict[str, Any]:
    """What was measured of some sides: the time of each, and twice that once."""
    runs = [{"side": side, "seconds": [[each, 2 * each, each]], "storage_bytes_per_step": 1} for side, each in times.items()]
    about = {"case": "a", "name": "A loop", "loop_bytes": 10**9, "cache_bytes": 75 * 10**7, "read_bps": 10**9}
    about |= {"clients": 2, "compute_s": 0.1, "bound_s": 0.5, "sides": list(times), "runs": runs}
    return {**about, "problems": {side: ["hung"] if side == "kernel" else [] for side in times}, **changes}


def test_a_case_that_failed_over_the_mount_reaches_nothing() -> None:
    measured = {"kernel": 3.0, "kernel-128": 1.0, "mount": 0.4}
    assert all(bar.passed for bar in mount.bars({"results": [comparison(measured)]})), "the kernel's hang is not its fault"
    hung = {"problems": {"mount": ["hung", "1 MiB wrong"]}}
    failed = comparison({"kernel": 1.0}, sides=["kernel", "mount"], **hung)
    nothing, *others = mount.bars({"results": [failed]})
    assert nothing.value == 2 and len(others) == 2 and not any(bar.passed for bar in (nothing, *others))
    assert math.isnan(mount.storage_bytes(failed, "mount"))


@pytest.mark.parametrize(
    ("case", "mode", "compared", "failed"),
    [("a", "mount", "kernel", "kernel"), ("b", "mount", "plain", "kernel-128"), ("c", "mount", "direct", "direct"),
     ("c", "inplace", "best", "kernel-128"), ("f", "inplace", "kernel", "kernel")],
)  # fmt: skip
def test_nothing_is_better_than_what_was_not_measured(case: str, mode: str, compared: str, failed: str) -> None:
    sides = ["direct", "kernel", "kernel-128", mode]
    measured = comparison({side: 0.4 if side == mode else 1.0 for side in sides if side != failed}, case=case, sides=sides)
    bars = {one.name.rpartition(".")[2]: one for one in mount.judge(measured, mode)}
    assert math.isnan(bars[compared].value) and not bars[compared].passed


@pytest.mark.parametrize(
    ("crcs", "same"), [([[1, 2, 3], [1, 2, 3]], True), ([[1, 2], [1, 2, 3]], True), ([[1, 2, 3], [1, 3]], False)]
)
def test_a_run_that_was_cut_off_has_no_wrong_bytes(crcs: list[list[int]], same: bool) -> None:
    runs = [SideRun("mount", 0, [ClientRun(steps=[ClientStep(1.0, 0, crc) for crc in own])], Usage()) for own in crcs]
    shape = Experiment("a", "x", Path("x"), 1, 1, lambda _side, _path: [], 3, 1)
    assert same_answers(Comparison(shape, 1.0, None, runs)) == same


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
