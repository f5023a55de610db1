"""tools/bench/all: one after the other, whatever fails; every bar on one page; what holds the other bars exists."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tools.bench import allbench, held, papersbench, results, startupbench, suite, suitereport, timebench
from tools.bench.bars import Bar, with_bars
from tools.bench.cgroup import Usage
from tools.bench.demo import same_answers
from tools.bench.errors import BenchError
from tools.bench.experiment import Experiment, Outcome, Run
from tools.bench.readme import TABLES
from tools.bench.runner import ClientRun, Step
from tools.bench.suite import BENCHMARKS, NAMES, Benchmark

ROOT = Path(__file__).parents[2]
MACHINE = {
    "cpu": "a processor", "cpus": 4, "memory_bytes": 8 << 30, "kernel": "6.1", "python": "3.11", "commit": "abc",
    "device": {"name": "vda", "read_ahead_kb": 128, "scheduler": "none"}, "versions": {"numpy": "2.0"},
}  # fmt: skip
PROGRAM = """
import json, sys
from pathlib import Path
value = {value}
if value is None:
    sys.exit("broken")
path = Path(sys.argv[sys.argv.index("--json") + 1])
bar = dict(issue=2, name="x", what="the <bar> of {name}", value=value, sense="<=", limit=1.0, command="x", kind="measured")
bar |= dict(unit="s", passed=value <= 1)
path.write_text(json.dumps(dict(schema="x/1", machine={machine}, words=sys.argv[1:], bars=[bar])))
sys.exit(0 if value <= 1 else 1)
"""


@pytest.fixture
def rooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of three benchmarks: one that reaches its bar, one that breaks, one that does not reach it."""
    benchmarks = []
    for name, value in (("good", 0.5), ("broken", None), ("slow", 2.0)):
        program = tmp_path / "tools" / "bench" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(textwrap.dedent(PROGRAM).format(name=name, value=value, machine=MACHINE))
        benchmarks.append(Benchmark(name, f"about {name}", ("--long",)))
    benchmarks.append(Benchmark("asked", "long", quick=None, asked=True))
    for module in (suite, suitereport):
        monkeypatch.setattr(module, "BENCHMARKS", tuple(benchmarks))
    monkeypatch.setattr(suite, "NAMES", tuple(one.name for one in benchmarks))
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "busy_share", lambda: 0.5)
    return tmp_path / "out"


def words_of(out: Path, name: str) -> Any:
    return results.read(out / f"{name}.json")["words"][:-2]


def test_what_fails_stops_nothing_and_is_shown(rooted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert allbench.main(["-o", str(rooted)]) == allbench.FAILED
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


def test_half_of_a_benchmark_is_none(rooted: Path, tmp_path: Path) -> None:
    program = tmp_path / "tools" / "bench" / "good"
    program.write_text(program.read_text().replace("dict(schema", "dict(complete=False, schema"))
    assert allbench.main(["-o", str(rooted), "--only", "good"]) == allbench.FAILED and not (rooted / "good.json").exists()
    assert "before its end" in results.read(rooted / "all.json")["runs"][0]["error"]
    assert results.read(rooted / "good.partial.json")["bars"]


def test_codes_are_of_what_was_asked_for(rooted: Path) -> None:
    assert allbench.main(["-o", str(rooted), "--only", "good"]) == 0
    assert allbench.main(["-o", str(rooted), "--only", "slow"]) == 1, "one bar is not reached"
    assert allbench.main(["-o", str(rooted), "--skip", "broken,good,slow"]) == 1, "the results that are there are shown"
    assert allbench.main(["--from", str(rooted)]) == allbench.FAILED, "broken has none"


def test_nothing_is_replaced_without_force(rooted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert allbench.main(["-o", str(rooted), "--only", "good", "--quick"]) == 0
    before = (rooted / "good.json").read_text()
    assert words_of(rooted, "good") == ["--quick"] and "quick look" in (rooted / "all.html").read_text()
    assert allbench.main(["-o", str(rooted), "--only", "good"]) == 2 and (rooted / "good.json").read_text() == before
    assert "--force" in capfd.readouterr().err
    assert allbench.main(["-o", str(rooted), "--only", "good", "--force"]) == 0 and words_of(rooted, "good") == ["--long"]


def test_a_run_that_was_cut_off_goes_on(rooted: Path) -> None:
    assert allbench.main(["-o", str(rooted), "--skip", "broken"]) == 1
    first = results.read(rooted / "all.json")["started"]
    kept = (rooted / "good.json").read_text()
    (rooted / "slow.json").unlink()
    assert allbench.main(["-o", str(rooted), "--skip", "broken", "--resume"]) == 1
    assert (rooted / "good.json").read_text() == kept and (rooted / "slow.json").exists()
    assert results.read(rooted / "all.json")["started"] == first


def test_what_was_there_before_the_run_is_done_again(rooted: Path) -> None:
    assert allbench.main(["-o", str(rooted), "--only", "good"]) == 0
    document = results.read(rooted / "good.json")
    document["run"]["started"] = "2000-01-01T00:00:00+00:00"
    results.write(rooted / "good.json", document)
    assert allbench.main(["-o", str(rooted), "--only", "good", "--resume"]) == 0
    assert results.read(rooted / "good.json")["run"]["started"] > "2001"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--only", "nothing"], "nothing"),
        (["--only", "good", "--skip", "slow"], "--only and --skip"),
        (["--resume"], "--resume"),
        (["--resume", "--quick"], "--quick and --resume"),
        (["--from", "nowhere"], "nowhere"),
        (["--from", "nowhere", "--quick"], "--from"),
        (["--quick", "-o", str(results.DIRECTORY)], "-o"),
    ],
)
def test_bad_usage_is_named(rooted: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str) -> None:
    assert allbench.main([*words, *([] if "-o" in words else ["-o", str(rooted)])]) == 2
    said = capsys.readouterr().err
    assert named in said and "hint: " in said and not rooted.exists()


def test_an_interrupt_waits_until_the_benchmark_has_cleaned_up(rooted: Path, tmp_path: Path) -> None:
    slow = tmp_path / "tools" / "bench" / "slow"
    slow.write_text(
        "import signal, sys, time\nfrom pathlib import Path\n"
        f"def end(*_): time.sleep(0.3); Path({str(tmp_path / 'cleaned')!r}).touch(); sys.exit(3)\n"
        f"signal.signal(signal.SIGTERM, end)\nPath({str(tmp_path / 'began')!r}).touch()\ntime.sleep(600)\n"
    )
    code = f"from tools.bench import suite; from pathlib import Path; suite.ROOT = Path({str(tmp_path)!r})\n"
    code += "from tools.bench.signals import one_interrupt\n"
    code += f"with one_interrupt(): suite.run(suite.Benchmark('slow', ''), Path({str(tmp_path)!r}), False, None)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "began").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    assert (tmp_path / "cleaned").exists() and not list(tmp_path.glob(".slow*"))


def test_the_results_in_the_tree_make_the_page(tmp_path: Path) -> None:
    found = suitereport.read(results.DIRECTORY)
    text = suitereport.page(found)
    for _, bar in found.bars:
        assert bar.what.split(":")[0].split("'")[0] in text
    assert text.count("NOT reached") >= sum(not bar.passed for _, bar in found.bars) and 'src="http' not in text
    assert "A bar is" in text and "ssue" not in text  # a reader of the project knows none
    suitereport.write(found, tmp_path)
    assert json.loads((tmp_path / "all.json").read_text())["schema"] == suitereport.SCHEMA


def test_the_page_in_the_tree_is_of_the_results_beside_it() -> None:
    whole = results.read(results.DIRECTORY / "all.json")
    found = suitereport.read(results.DIRECTORY, started=whole["started"])
    again = "tools/bench/all --from tools/bench/results"
    assert whole["bars"] == json.loads(json.dumps(found.document()["bars"])), again
    assert (results.DIRECTORY / "all.html").read_text() == suitereport.page(found), again


def test_every_benchmark_has_its_program_and_its_table() -> None:
    assert {*NAMES, "all"} == set(TABLES)
    for name in NAMES:
        assert os.access(ROOT / "tools" / "bench" / name, os.X_OK), name
    programs = {one.name for one in (ROOT / "tools" / "bench").iterdir() if one.is_file() and not one.suffix}
    assert programs == {*NAMES, "all"}
    assert [one.name for one in BENCHMARKS if one.asked] == ["kvmodels", "testtime"]


def test_every_issue_has_bars_or_what_holds_them() -> None:
    assert {one.issue for one in held.HELD} <= set(held.ISSUES)
    for one in held.HELD:
        assert bool(one.tests) != bool(one.by_hand), one.what
        for test in one.tests:
            file, _, function = test.partition("::")
            assert (ROOT / file).is_file() and (not function or f"def {function}(" in (ROOT / file).read_text()), test


def test_machines_that_differ_are_all_shown() -> None:
    documents = [with_bars({"machine": {**MACHINE, **change}}, []) for change in ({}, {"commit": "x"}, {"kernel": "5"})]
    assert [one["kernel"] for one in suitereport.machines(documents)] == ["6.1", "5"]


def test_every_command_is_timed() -> None:
    found = list(startupbench.commands())
    assert {(), ("size",), ("kv",), ("kv", "bench"), ("edram", "sweep")} <= set(found) and len(found) == len(set(found))
    rows = [{"command": "llmcache x --help", "seconds": [0.1, 0.4, 9.0]}, {"command": "llmcache --help", "seconds": [0.1]}]
    rows.append({"command": "llmcache size --bw 100 --loop 70M", "seconds": [0.2]})
    slowest, size = startupbench.bars({"commands": rows})
    assert (slowest.value, slowest.passed, size.value, size.issue) == (0.4, False, 0.2, 3) and "x --help" in slowest.what


def test_the_papers_figures_are_judged() -> None:
    def claims(share: float, lost: float) -> list[Bar]:
        accuracy = {"hillinfer": {"values": {"full": 1.0, "at_0.2": 1.0 - lost}}}
        speed_ups = {papersbench.READING: {"values": {"share_in_range": share, "share": share}}}
        found = {"speed-up-range": speed_ups, "order": speed_ups, "comparable-accuracy": accuracy}
        return papersbench.bars({"claims": found})

    assert [bar.passed for bar in claims(1.0, 0.0)] == [True] * 3
    assert [bar.passed for bar in claims(0.9, 0.02)] == [False] * 3
    assert [bar.kind for bar in claims(1.0, 0.0)] == ["modelled", "modelled", "measured"]


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
    run = timebench.of_log(log)
    assert (run["seconds"], run["exit_code"], run["log"]) == (seconds, code, "run.log")
    suite_bar, flakes = timebench.suite_bars({"runs": [run] * 5 + [{**run, "seconds": 900.0, "busy": 2}] * 5})
    assert suite_bar.passed and flakes.passed == (code == 0)
    assert not timebench.suite_bars({"runs": [run] * 9})[1].passed, "ten runs are asked for"
    assert not timebench.suite_bars({"runs": [{**run, "exit_code": 0}] * 10 + [{**run, "exit_code": 1}]})[1].passed
    with timebench.load(1) as (busy,):
        assert busy.poll() is None
    assert busy.poll() is not None
    log.write_text("collected 6093 items\n")
    with pytest.raises(BenchError, match="--log"):
        timebench.of_log(log)


@pytest.mark.parametrize(
    ("crcs", "same"), [([[1, 2, 3], [1, 2, 3]], True), ([[1, 2], [1, 2, 3]], True), ([[1, 2, 3], [1, 3]], False)]
)
def test_a_run_that_was_cut_off_has_no_wrong_bytes(crcs: list[list[int]], same: bool) -> None:
    def run_of(own: list[int]) -> Run:
        return Run("mount", 0, [ClientRun(steps=[Step(1.0, 0, crc) for crc in own])], Usage(0, 0, 0, 0, 0, 0, 0, 0))

    shape = Experiment("a", "x", Path("x"), 1, 1, lambda _side, _path: [], 3, 1)
    assert same_answers(Outcome(shape, 1.0, None, [run_of(own) for own in crcs])) == same


def test_the_last_demo_counts() -> None:
    runs = [{"seconds": 500.0, "exit_code": 0}, {"seconds": 60.0, "exit_code": 0}]
    assert all(bar.passed for bar in timebench.demo_bars({"runs": runs}))
    assert [bar.passed for bar in timebench.demo_bars({"runs": runs[:1]})] == [False, True]
    assert [bar.passed for bar in timebench.demo_bars({"runs": [{**runs[1], "exit_code": 1}]})] == [True, False]
    done = timebench.timed([sys.executable, "-c", "print('one'); print('two'); raise SystemExit(4)"])
    assert (done["exit_code"], done["said"]) == (4, "two") and done["seconds"] > 0
