"""Benchmarks: bars are reached on their side, recorded ones are those of the bench beside them; a quick run of one; and all,
one after the other, whatever fails, with every bar on one page.
"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from llmcache.errors import DataError
from llmcache.kv.bench.results import STOCK
from llmcache.kv.bench.task import Candidate, Told
from tools.bench import all as suite
from tools.bench import harness, kvmodels, kvstore, mount, results, testtime
from tools.bench.__main__ import main
from tools.bench.all import NAMES, SuiteEntry
from tools.bench.kv import SHAPE
from tools.bench.results import Bar, exit_code, of_json

RECORDED = sorted(one.stem for one in results.DIRECTORY.glob("*.json") if one.stem != "all")


def bar(value: float, sense: str = "<=") -> Bar:
    return Bar("a", "what", value, sense, 1.0)


@pytest.mark.parametrize(("sense", "passed"), [("<=", [1, 1, 0]), ("<", [1, 0, 0]), (">=", [0, 1, 1]), (">", [0, 0, 1])])
def test_a_bar_is_reached_on_its_side_and_by_no_number_that_is_none(sense: str, passed: list[int]) -> None:
    assert [bar(value, sense).passed for value in (0.9, 1.0, 1.1)] == [bool(one) for one in passed]
    for value in (math.nan, math.inf, -math.inf):
        told = bar(value, sense).to_json()
        assert told["value"] is None and told["passed"] is False and bar(value).shown == "-"
        assert not of_json(json.loads(json.dumps(told))).passed and exit_code([bar(value)]) == 1


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_is_of_the_benchmark_and_judged_by_it(name: str) -> None:
    bench: Any = importlib.import_module(f"tools.bench.{name}")
    told = results.read(results.DIRECTORY / f"{name}.json")
    assert told["schema"] == bench.SCHEMA and told["machine"]["cpus"] and not told.get("quick") and told["bars"]
    assert [bar.to_json() for bar in harness.bars_of(bench, told)] == told["bars"]
    assert len({bar["name"] for bar in told["bars"]}) == len(told["bars"]), "a name is a key"


def test_a_quick_run_of_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store.json"
    code = harness.run(kvstore, ["--quick", "--rounds", "2", "--dir", str(tmp_path), "--json", str(path)])
    told = json.loads(path.read_text())
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "the scratch directory is gone"
    assert code == (0 if all(bar["passed"] for bar in told["bars"]) else 1) and told["tokens"] == kvstore.TOKENS // 16
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


@pytest.mark.parametrize(
    ("case", "mode", "compared", "failed"),
    [
        ("a", "mount", "kernel", "kernel"),
        ("b", "mount", "plain", "kernel-128"),
        ("c", "inplace", "best", "kernel-128"),
        ("h", "inplace", "kernel", "kernel-128"),
    ],
)
def test_nothing_is_better_than_what_was_not_measured(case: str, mode: str, compared: str, failed: str) -> None:
    sides = ["direct", "kernel", "kernel-128", mode]
    measured = comparison({side: 0.4 if side == mode else 1.0 for side in sides if side != failed}, case=case, sides=sides)
    bars = {one.name.rpartition(".")[2]: one for one in mount.judge(measured, mode)}
    assert math.isnan(bars[compared].value) and not bars[compared].passed


@pytest.mark.parametrize(("token_bytes", "passed"), [(30e6, True), (32e6, False)])
def test_a_server_may_read_a_little_more_than_the_page_cache(token_bytes: float, passed: bool) -> None:
    measured = comparison({"kernel": 1.0, "inplace": 1.0}, case="h")
    for run in measured["runs"]:
        run["storage_bytes_per_step"] = 20e6 if run["side"] == "kernel" else token_bytes
    bars = {one.name.rpartition(".")[2]: one for one in mount.judge(measured, "inplace")}
    assert bars["kernel"].passed and bars["bytes"].passed == passed


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
        ("=== 1 failed, 6092 passed, 3 skipped in 500.00s (0:08:20) ===", 500.0, 1),
        ("6 passed, 1 error in 2.50s", 2.5, 1),
        ("==== 6093 passed in 517.23s (0:08:37) ====", 517.23, 0),
    ],
)
def test_times_of_finished_runs(tmp_path: Path, last: str, seconds: float, code: int) -> None:
    log = tmp_path / "run.log"
    log.write_text(f"tests/unit/test_x.py .... [ 1%]\n==== 2 passed in 1.00s ====\n{last}\n")
    run = testtime.of_log(log)
    assert (run["seconds"], run["exit_code"]) == (seconds, code)
    suite_bar, flakes = testtime.bars({"runs": [run] * 5 + [{**run, "seconds": 900.0, "busy": 2}] * 5})
    assert suite_bar.passed and flakes.passed == (code == 0)
    assert not testtime.bars({"runs": [run] * 9})[1].passed, "ten runs are asked for"
    log.write_text("collected 6093 items\n")
    with pytest.raises(DataError, match="--log"):
        testtime.of_log(log)


# All of them

MACHINE = {
    "cpu": "a processor", "cpus": 4, "memory_bytes": 8 << 30, "kernel": "6.1", "python": "3.11", "commit": "abc",
    "device": {"name": "vda", "read_ahead_kb": 128, "scheduler": "none"}, "versions": {"numpy": "2.0"},
}  # fmt: skip
PROGRAM = """
import json, sys
from pathlib import Path
value = dict(good=0.5, slow=2.0).get(sys.argv[1])
if value is None:
    sys.exit("broken")
path = Path(sys.argv[sys.argv.index("--json") + 1])
bar = dict(name="x", what="the <bar> of " + sys.argv[1], value=value, sense="<=", limit=1.0, unit="s", passed=value <= 1)
path.write_text(json.dumps(dict(schema="x/1", machine={machine}, words=sys.argv[2:], bars=[bar])))
sys.exit(0 if value <= 1 else 1)
"""


@pytest.fixture
def rooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of three benchmarks: one that reaches its bar, one that breaks, one that does not reach it."""
    program = tmp_path / "tools" / "bench" / "__main__.py"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM.format(machine=MACHINE))
    benchmarks = [SuiteEntry(name, f"about {name}", ("--long",)) for name in ("good", "broken", "slow")]
    benchmarks.append(SuiteEntry("asked", "long", quick=None, asked=True))
    monkeypatch.setattr(suite, "BENCHMARKS", tuple(benchmarks))
    monkeypatch.setattr(suite, "NAMES", tuple(one.name for one in benchmarks))
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr("psutil.cpu_percent", lambda _seconds: 50.0)
    return tmp_path / "out"


def words_of(out: Path, name: str) -> Any:
    return results.read(out / f"{name}.json")["words"][:-2]


def test_what_fails_stops_nothing_and_is_shown(rooted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["-o", str(rooted)]) == suite.FAILED
    assert sorted(one.name for one in rooted.iterdir()) == ["all.html", "all.json", "good.json", "slow.json"]
    told = results.read(rooted / "all.json")
    assert [(bar["benchmark"], bar["passed"]) for bar in told["bars"]] == [("good", True), ("slow", False)]
    errors = {run["benchmark"]: run["error"] for run in told["runs"]}
    assert "exit code 1" in errors["broken"] and errors["good"] is None and words_of(rooted, "good") == ["--long"]
    page = (rooted / "all.html").read_text()
    assert "the &lt;bar&gt; of slow" in page and "NOT reached" in page and "1 of 2 bars" in page
    assert "machine was busy" in page and "Without results: broken, asked" in page
    said = capfd.readouterr()
    assert said.out == "" and "broken FAILED" in said.err and "BUSY" in said.err


def test_codes_are_of_what_was_asked_for_and_nothing_is_replaced_without_force(
    rooted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert suite.main(["-o", str(rooted), "--only", "good", "--quick"]) == 0
    before = (rooted / "good.json").read_text()
    assert words_of(rooted, "good") == ["--quick"] and "quick look" in (rooted / "all.html").read_text()
    assert suite.main(["-o", str(rooted), "--only", "good"]) == 2 and (rooted / "good.json").read_text() == before
    assert "--force" in capfd.readouterr().err
    assert suite.main(["-o", str(rooted), "--only", "good", "--force"]) == 0 and words_of(rooted, "good") == ["--long"]
    assert suite.main(["-o", str(rooted), "--only", "slow"]) == 1, "one bar is not reached"
    assert suite.main(["--from", str(rooted)]) == suite.FAILED, "broken has none"


def test_a_run_that_was_cut_off_goes_on(rooted: Path) -> None:
    assert suite.main(["-o", str(rooted), "--only", "good,slow"]) == 1
    first = results.read(rooted / "all.json")["started"]
    kept = (rooted / "good.json").read_text()
    (rooted / "slow.json").unlink()
    assert suite.main(["-o", str(rooted), "--only", "good,slow", "--resume"]) == 1
    assert (rooted / "good.json").read_text() == kept and (rooted / "slow.json").exists()
    assert results.read(rooted / "all.json")["started"] == first


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--only", "nothing"], "nothing"),
        (["--resume", "--quick"], "--quick and --resume"),
        (["--from", "nowhere", "--quick"], "--from"),
        (["--quick", "-o", str(results.DIRECTORY)], "-o"),
    ],
)
def test_bad_usage_is_named(rooted: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str) -> None:
    assert suite.main([*words, *([] if "-o" in words else ["-o", str(rooted)])]) == 2
    said = capsys.readouterr().err
    assert named in said and "hint: " in said and not rooted.exists()


def test_the_page_in_the_tree_is_of_the_results_beside_it() -> None:
    told = results.read(results.DIRECTORY / "all.json")
    found = suite.whole(results.DIRECTORY, {}, told["started"])
    again = "tools/bench all --from tools/bench/results"
    assert told == json.loads(json.dumps(found)), again
    text = (results.DIRECTORY / "all.html").read_text()
    assert text == suite.page(found), again
    assert 'src="http' not in text


def test_the_launcher_lists_and_runs_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in NAMES)
    assert main(["nothing"]) == 2 and "hint: " in capsys.readouterr().err
