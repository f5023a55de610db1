"""What benchmarks write: bars are reached on their side, recorded ones are of the bench beside them; a quick run of one."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.errors import DataError
from llmcache.kv.bench.results import STOCK
from llmcache.kv.bench.task import Candidate, Told
from tests.conftest import examples
from tools.bench import harness, kvmodels, kvstore, mount, results, testtime
from tools.bench.clients.spill_file import SHAPE
from tools.bench.harness import run
from tools.bench.results import Bar, bars_of, exit_code, of_json, with_bars

RECORDED = sorted(one.stem for one in results.DIRECTORY.glob("*.json") if one.stem != "all")


def bar(value: float = 1.0, sense: str = "<=", limit: float = 1.0, name: str = "a", kind: str = "measured") -> Bar:
    return Bar(name, "what", value, sense, limit, kind)


@pytest.mark.parametrize(("sense", "passed"), [("<=", [1, 1, 0]), ("<", [1, 0, 0]), (">=", [0, 1, 1]), (">", [0, 0, 1])])
def test_a_bar_is_reached_on_its_side(sense: str, passed: list[int]) -> None:
    assert [bar(value, sense).passed for value in (0.9, 1.0, 1.1)] == [bool(one) for one in passed]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sense", ["<=", ">="])
def test_what_is_no_number_reaches_nothing_and_is_null(value: float, sense: str) -> None:
    told = bar(value, sense).to_json()
    assert told["value"] is None and told["passed"] is False and bar(value).shown == "-"
    assert not of_json(json.loads(json.dumps(told))).passed and exit_code([bar(value)]) == 1


def test_bars_are_read_as_they_were_written() -> None:
    bars = [bar(), bar(2.0, name="b", kind="modelled")]
    told = with_bars({"schema": "x/1"}, bars)
    assert bars_of(json.loads(json.dumps(told))) == bars and [one["passed"] for one in told["bars"]] == [True, False]
    assert (exit_code(bars), exit_code(bars[:1])) == (1, 0)
    with pytest.raises(ValueError, match="twice"):
        with_bars({}, [bar(), bar()])


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e6, 1e6).map(lambda x: float(f"{x:.6g}")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=examples(40))
@given(documents)
def test_short_lists_hold_the_same(document: Any) -> None:
    assert json.loads(results.text(document)) == document == results.rounded(document)


# The recorded documents


def recorded(name: str) -> Any:
    return results.read(results.DIRECTORY / f"{name}.json")


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_is_of_the_benchmark_and_judged_by_it(name: str) -> None:
    bench: Any = importlib.import_module(f"tools.bench.{name}")
    told = recorded(name)
    assert told["schema"] == bench.SCHEMA and told["machine"]["cpus"] and not told.get("quick") and told["bars"]
    assert [bar.to_json() for bar in harness.bars_of(bench, told)] == told["bars"]


# A quick run


def test_a_quick_run_of_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store.json"
    code = run(kvstore, ["--quick", "--rounds", "2", "--dir", str(tmp_path), "--json", str(path)])
    told = json.loads(path.read_text())
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "the scratch directory is gone"
    assert code == (0 if all(bar["passed"] for bar in told["bars"]) else 1) and told["schema"] == kvstore.SCHEMA
    assert told["tokens"] == kvstore.TOKENS // 16
    assert told["prefill"]["kv_bytes"] == told["tokens"] * SHAPE.token_bytes
    fetch, memory = told["fetch"], told["memory"]
    assert len(fetch["seconds"]) == len(fetch["plain_seconds"]) == 2 and fetch["bytes"] == 2 * 1024 * fetch["request_bytes"]
    assert [bar["value"] for bar in told["bars"]] == [fetch["figure"], memory["peak_bytes"] / 2**20]
    assert "KvStore.gather" in capsys.readouterr().out


# What a bar says of a run that failed


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
    [("a", "mount", "kernel", "kernel"), ("b", "mount", "plain", "kernel-128"), ("c", "inplace", "best", "kernel-128")],
)  # fmt: skip
def test_nothing_is_better_than_what_was_not_measured(case: str, mode: str, compared: str, failed: str) -> None:
    sides = ["direct", "kernel", "kernel-128", mode]
    measured = comparison({side: 0.4 if side == mode else 1.0 for side in sides if side != failed}, case=case, sides=sides)
    bars = {one.name.rpartition(".")[2]: one for one in mount.judge(measured, mode)}
    assert math.isnan(bars[compared].value) and not bars[compared].passed


def test_a_loss_is_compared_with_half_of_the_best_press_and_each_with_its_own_full_cache() -> None:
    full = {Candidate(STOCK, None): Told(losses=[2.0, 3.0]), Candidate(kvmodels.PRESS_FULL, None): Told(losses=[2.5, 3.5])}
    pressed = {Candidate(one, 64): Told(losses=[2.5 + above, 3.5 + above]) for above, one in enumerate(kvmodels.PRESSES, 1)}

    def over(first: float, second: float) -> float:
        own = {Candidate(kvmodels.OWN, 64): Told(losses=[2 + first, 3 + second])}
        return kvmodels.excess({**full, **pressed, **own}, 64, kvmodels.PRESSES, kvmodels.HALF)

    assert over(0.5, 0.5) == pytest.approx(0) and over(0.25, 0.25) == pytest.approx(-0.25)
    assert over(0.75, 1.25) == pytest.approx(0.5 - 0.25), "less a standard error"
    below = {Candidate(policy, 64): Told(losses=[1.9, 2.9]) for policy in (kvmodels.OWN, kvmodels.ORACLE)}
    assert kvmodels.excess({**full, **below}, 64) == pytest.approx(0), "a tenth of less than nothing is no more"


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
