"""Benchmarks: targets and their limits, recorded results, a quick run of a benchmark, the patterns of the zoo, and the run
of all benchmarks.
"""

from __future__ import annotations

import importlib
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcache.errors import UsageError
from llmcache.kv.bench.results import STOCK
from llmcache.kv.bench.task import Candidate, CollectedAnswers
from tools.bench import all as suite
from tools.bench import harness, kv, kvmodels, machine, mount, patterns, results, zoo
from tools.bench.__main__ import main
from tools.bench.all import NAMES, SuiteEntry, of_json
from tools.bench.patterns import MB, PAGE, WARMUP, Space
from tools.bench.results import Target, exit_code, worst
from tools.bench.runner import client

RECORDED = sorted(one.stem for one in results.DIRECTORY.glob("*.json"))


def target(value: float, sense: str = "<=") -> Target:
    return Target("a", "what", value, sense, 1.0)


@pytest.mark.parametrize(("sense", "passed"), [("<=", [1, 1, 0]), ("<", [1, 0, 0]), (">=", [0, 1, 1]), (">", [0, 0, 1])])
def test_a_target_is_met_up_to_its_limit_and_never_by_a_value_that_is_not_finite(sense: str, passed: list[int]) -> None:
    assert [target(value, sense).passed for value in (0.9, 1.0, 1.1)] == [bool(one) for one in passed]
    for value in (math.nan, math.inf, -math.inf):
        found = target(value, sense).to_json()
        assert found["value"] is None and found["passed"] is False and target(value).shown == "-"
        assert not of_json(json.loads(json.dumps(found))).passed and exit_code([target(value)]) == 1


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_results_have_the_schema_and_targets_of_the_benchmark(name: str) -> None:
    bench: Any = importlib.import_module(f"tools.bench.{name}")
    document = results.read(results.DIRECTORY / f"{name}.json")
    assert name in NAMES and document["schema"] == bench.SCHEMA and document["machine"]["cpus"] and not document.get("quick")
    targets = [target.name for target in harness.targets_of(bench, document)]
    assert targets and len(set(targets)) == len(targets), "a name is a key"


def test_the_worst_case_decides_a_target() -> None:
    cases = [("one", 0.5), ("two", 1.2), ("three", 0.9)]
    (found,) = worst("b", "words", cases, "<=", 1.0)
    assert (found.name, found.value, found.passed) == ("b", 1.2, False)
    assert found.what == "words (two; worst of 3, 1 missed)"
    (found,) = worst("b", "words", cases, ">=", 1.0)
    assert found.value == 0.5
    (found,) = worst("b", "words", [("none", math.nan), ("three", 3.0)], "<=", 1.0)
    assert math.isnan(found.value), "a case without a value is worse than any"
    assert not list(worst("b", "words", [], "<=", 1.0))


def test_sides_run_in_turns_that_alternate() -> None:
    assert [*harness.turns("ab", 3)] == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_results_are_recorded_from_a_commit_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "commit", lambda: "abcdef12-dirty")
    with pytest.raises(UsageError, match="changes") as caught:
        harness.check_commit(results.DIRECTORY, force=False)
    assert "--force" in str(caught.value.hint)
    harness.check_commit(results.DIRECTORY, force=True)
    harness.check_commit(tmp_path, force=False)
    monkeypatch.setattr(machine, "commit", lambda: "abcdef12")
    harness.check_commit(results.DIRECTORY, force=False)


def test_quick_run_of_kv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.json"
    code = harness.run(kv, ["--quick", "--repeat", "2", "--dir", str(tmp_path), "--json", str(path)])
    found = json.loads(path.read_text())
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "the scratch directory is gone"
    targets = {target.name: target.value for target in harness.targets_of(kv, found)}
    assert code == exit_code(harness.targets_of(kv, found)) and found["store"]["tokens"] == kv.SPILLED // 16
    assert found["store"]["prefill"]["kv_bytes"] == found["store"]["tokens"] * kv.SHAPE.token_bytes
    fetch, memory = found["store"]["fetch"], found["store"]["memory"]
    assert len(fetch["seconds"]) == len(fetch["plain_seconds"]) == 2 and fetch["bytes"] == 2 * 1024 * fetch["request_bytes"]
    assert (targets["gather"], targets["store memory"]) == (fetch["figure"], memory["peak_bytes"] / 2**20)
    assert "KvStore.gather" in capsys.readouterr().out


# Targets of failed runs


def comparison(times: dict[str, float], **changes: Any) -> dict[str, Any]:
    """Return the results of some sides, three steps each; the second step takes twice the time."""
    runs = [{"side": side, "seconds": [[each, 2 * each, each]], "storage_bytes_per_step": 1} for side, each in times.items()]
    about = {"case": "a", "name": "A loop", "loop_bytes": 10**9, "cache_bytes": 75 * 10**7, "read_bps": 10**9}
    about |= {"clients": 2, "compute_s": 0.1, "bound_s": 0.5, "sides": list(times), "runs": runs}
    return {**about, "problems": {side: ["hung"] if side == "kernel" else [] for side in times}, **changes}


def judged(*measured: dict[str, Any]) -> dict[str, Target]:
    return {one.name: one for one in mount.targets({"results": list(measured)})}


def test_a_case_that_fails_over_the_mount_misses_its_targets() -> None:
    measured = comparison({"kernel": 3.0, "kernel-128": 1.0, "mount": 0.4})
    assert all(one.passed for one in judged(measured).values()), "the kernel's hang is not its fault"
    failed = comparison({"kernel": 1.0}, sides=["kernel", "mount"], problems={"mount": ["hung", "1 MiB wrong"]})
    found = judged(measured, failed)
    assert found["problems"].value == 2 and math.isnan(found["larger.fuse"].value)
    assert not any(one.passed for one in found.values())


@pytest.mark.parametrize(
    ("case", "mode", "name", "failed"),
    [
        ("a", "mount", "larger.fuse", "kernel"),
        ("b", "mount", "fits.fuse", "kernel-128"),
        ("c", "inplace", "cold.inplace", "kernel-128"),
        ("h", "inplace", "server.inplace", "kernel-128"),
    ],
)
def test_a_comparison_with_a_failed_side_misses_its_target(case: str, mode: str, name: str, failed: str) -> None:
    sides = ["direct", "kernel", "kernel-128", mode]
    measured = comparison({side: 0.4 if side == mode else 1.0 for side in sides if side != failed}, case=case, sides=sides)
    measured["problems"] = dict.fromkeys(sides, ())
    found = judged(measured)[name]
    assert math.isnan(found.value) and not found.passed


@pytest.mark.parametrize(("token_bytes", "passed"), [(30e6, True), (32e6, False)])
def test_a_server_may_read_a_little_more_than_the_page_cache(token_bytes: float, passed: bool) -> None:
    measured = comparison({"kernel": 1.0, "inplace": 1.0}, case="h")
    for run in measured["runs"]:
        run["storage_bytes_per_step"] = 20e6 if run["side"] == "kernel" else token_bytes
    found = judged(measured)
    assert found["server.inplace"].passed and found["server.bytes"].passed == passed


def test_losses_are_compared_with_half_of_the_best_press_each_relative_to_its_own_full_cache() -> None:
    full = {
        Candidate(STOCK, None): CollectedAnswers(losses=[2.0, 3.0]),
        Candidate(kvmodels.PRESS_FULL, None): CollectedAnswers(losses=[2.5, 3.5]),
    }
    pressed = {
        Candidate(one, 64): CollectedAnswers(losses=[2.5 + above, 3.5 + above])
        for above, one in enumerate(kvmodels.PRESSES, 1)
    }

    def over(first: float, second: float) -> float:
        own = {Candidate(kvmodels.OWN, 64): CollectedAnswers(losses=[2 + first, 3 + second])}
        return kvmodels.excess({**full, **pressed, **own}, 64, kvmodels.PRESSES, kvmodels.HALF)

    assert over(0.5, 0.5) == pytest.approx(0) and over(0.25, 0.25) == pytest.approx(-0.25)
    assert over(0.75, 1.25) == pytest.approx(0.5 - 0.25), "less a standard error"
    below = {Candidate(policy, 64): CollectedAnswers(losses=[1.9, 2.9]) for policy in (kvmodels.OWN, kvmodels.ORACLE)}
    assert kvmodels.excess({**full, **below}, 64) == pytest.approx(0), "a tenth of less than nothing is no more"


# The zoo: patterns, and the targets of mounts


@given(seed=st.integers(0, 1 << 32), size_bytes=st.integers(64 * PAGE * 50, 10 * MB + 64 * PAGE * 50))
def test_patterns_are_pure_aligned_and_within_their_files(seed: int, size_bytes: int) -> None:
    pattern = patterns.generate(seed, size_bytes)
    assert pattern == patterns.generate(seed, size_bytes)
    assert pattern.passes() > WARMUP and 0 < pattern.used_bytes <= size_bytes and pattern.loop_bytes > 0
    for stage in pattern.stages:
        assert len({len(reader.passes) for reader in stage.readers}) == 1, "readers of a stage finish each pass together"
        for touch in (touch for reader in stage.readers for one in reader.passes for touch in one):
            assert 0 <= touch.file < len(pattern.files) and touch.first_byte % PAGE == touch.size_bytes % PAGE == 0
            assert 0 <= touch.first_byte <= touch.first_byte + touch.size_bytes <= size_bytes
        assert json.loads(json.dumps(stage.to_json()))["shared"] is stage.shared


def zoo_result(read: dict[str, list[float]], repeats: int = 1, **changes: Any) -> dict[str, Any]:
    """Return the results of some sides: the MB that each pass reads; a pass takes 1 s and 1 s per 100 MB."""
    runs = [
        {
            "side": side,
            "repeat": number,
            "seconds": [1 + one / 100 for one in each],
            "storage_bytes": [one * MB for one in each],
        }
        for number in range(repeats)
        for side, each in read.items()
    ]
    about = {"name": "A pattern", "share": 0.6, "passes": WARMUP + 2, "loop_bytes": 500 * MB, "rows": None}
    return {**about, "runs": [{**run, "problems": []} for run in runs], **changes}


def zoo_targets(result: dict[str, Any]) -> dict[str, Target]:
    return {one.name: one for one in zoo.targets({"results": [result]})}


def test_a_mount_may_read_a_twentieth_more_than_the_page_cache_and_a_hundredth_of_the_loop() -> None:
    load = [9000.0] * WARMUP
    read = {"page-cache": [*load, 80, 120], "steer": [*load, 60, 160], "arena": [*load, 60, 161]}
    found = zoo_targets(zoo_result(read))
    assert found["bytes.steer"].value == pytest.approx(1) and not found["bytes.arena"].passed
    nothing = zoo_targets(zoo_result({"page-cache": [*load, 0, 0], "steer": [*load, 5, 4], "arena": [*load, 5, 6]}))
    assert nothing["bytes.steer"].passed and not nothing["bytes.arena"].passed
    assert "**1.00**" in zoo.table({"results": [zoo_result(read)]})


def test_an_incomplete_run_misses_its_targets_and_problems_are_counted() -> None:
    complete, short = [100.0] * (WARMUP + 2), [0.0] * (WARMUP + 1)
    assert not zoo_targets(zoo_result({"page-cache": complete, "inplace": short}))["bytes.inplace"].passed
    assert not zoo_targets(zoo_result({"page-cache": short, "inplace": complete}))["bytes.inplace"].passed
    killed = zoo_result({"page-cache": complete, "inplace": complete})
    for run in killed["runs"]:
        run["problems"] = ["1 OOM kills"]
    problems, *others = zoo.targets({"results": [killed]})
    assert problems.value == 1 and all(one.passed for one in others), "those of the page cache are not the mount's"


def test_targets_for_time_need_three_runs_in_place() -> None:
    read = {"page-cache": [100.0] * (WARMUP + 2), "inplace": [111.0] * (WARMUP + 2), "steer": [111.0] * (WARMUP + 2)}
    assert not any("time" in name for name in zoo_targets(zoo_result(read, 2)))
    timed = zoo_targets(zoo_result(read, 3))
    assert timed["time.inplace"].value == pytest.approx(2.11 / 2) and "time.steer" not in timed


def test_a_second_run_on_the_same_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zoo.alone_in(tmp_path):
        assert harness.run(zoo, ["--dir", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert str(tmp_path) in said and "hint: " in said and not list(tmp_path.iterdir())
    assert harness.run(zoo, ["--dir", str(tmp_path), "--match", "nothing"]) == 2


@pytest.mark.parametrize("how", patterns.HOW)
def test_the_reader_replays_a_stage(tmp_path: Path, how: patterns.How) -> None:
    (tmp_path / "model").write_bytes(bytes(5 * MB))
    loads = patterns.load_once(Space("model", 1000, 4 * MB), how, idle=1, idle_s=0.05)
    forks = patterns.forked_readers(Space("model", 0, 5 * MB), 3, passes=2)
    divided = patterns.divided_loop(Space("model", 0, 5 * MB), passes=2)
    for pattern, copied in ((loads, 4 * MB), (forks, 0), (divided, 0)):
        events = replayed(tmp_path, pattern)
        assert [one["event"] for one in events] == ["load", *["step"] * pattern.passes(), "end"]
        assert events[-1]["anon_bytes"] > copied
    assert replayed(tmp_path, loads)[-2]["seconds"] >= 0.05, "it idles"
    if how != "mmap":
        (tmp_path / "model").write_bytes(bytes(3 * MB))
        with pytest.raises(subprocess.CalledProcessError):
            replayed(tmp_path, loads)


def replayed(place: Path, pattern: patterns.Pattern) -> list[dict[str, Any]]:
    """Return the events of a client that replays a pattern of one stage."""
    (place / "plan").write_text(json.dumps(pattern.stages[0].to_json()))
    command = client("zoo_reader", place / "plan", *(place / name for name in pattern.files))
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


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
path.write_text(json.dumps(dict(schema="x/1", machine={machine}, words=sys.argv[2:], value=value)))
sys.exit(0 if value <= 1 else 1)
"""


@pytest.fixture
def rooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a tree with a benchmark that meets its target, one that breaks, and one that misses its target."""
    program = tmp_path / "tools" / "bench" / "__main__.py"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM.format(machine=MACHINE))
    benchmarks = [SuiteEntry(name, f"about {name}", ("--long",)) for name in ("good", "broken", "slow")]
    benchmarks.append(SuiteEntry("asked", "long", on_request=True))

    def targets_of(name: str, document: dict[str, Any]) -> list[Target]:
        return [Target("x", f"the target of {name}", document["value"], "<=", 1.0, unit="s")]

    monkeypatch.setattr(suite, "targets_of", targets_of)
    monkeypatch.setattr(suite, "BENCHMARKS", tuple(benchmarks))
    monkeypatch.setattr(suite, "NAMES", tuple(one.name for one in benchmarks))
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr("psutil.cpu_percent", lambda _seconds: 50.0)
    return tmp_path / "out"


def words_of(out: Path, name: str) -> Any:
    return results.read(out / f"{name}.json")["words"][:-3]


def test_a_failing_benchmark_does_not_stop_the_others_and_is_shown(rooted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["-o", str(rooted)]) == suite.FAILED
    assert sorted(one.name for one in rooted.iterdir()) == ["all.json", "all.md", "good.json", "slow.json"]
    found = results.read(rooted / "all.json")
    assert [(target["benchmark"], target["passed"]) for target in found["targets"]] == [("good", True), ("slow", False)]
    errors = {run["benchmark"]: run["error"] for run in found["runs"]}
    assert "exit code 1" in errors["broken"] and errors["good"] is None and words_of(rooted, "good") == ["--long"]
    page = (rooted / "all.md").read_text()
    assert "the target of slow" in page and "1 of 2 targets" in page and "busy" in page
    assert "Without results: broken, asked" in page and "exit code 1" in page
    said = capfd.readouterr()
    assert said.out == "" and "broken FAILED" in said.err and "BUSY" in said.err


def test_exit_codes_cover_the_selected_benchmarks_and_results_are_replaced_only_with_force(
    rooted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert suite.main(["-o", str(rooted), "--only", "good", "--quick"]) == 0
    before = (rooted / "good.json").read_text()
    assert words_of(rooted, "good") == ["--quick"] and "quick run" in (rooted / "all.md").read_text()
    assert suite.main(["-o", str(rooted), "--only", "good"]) == 2 and (rooted / "good.json").read_text() == before
    assert "--force" in capfd.readouterr().err
    assert suite.main(["-o", str(rooted), "--only", "good", "--force"]) == 0 and words_of(rooted, "good") == ["--long"]
    assert suite.main(["-o", str(rooted), "--only", "slow"]) == 1, "one target is missed"
    assert suite.main(["--from", str(rooted)]) == suite.FAILED, "broken has none"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--only", "nothing"], "nothing"),
        (["--from", "nowhere", "--quick"], "--from"),
        (["--quick", "-o", str(results.DIRECTORY)], "-o"),
    ],
)
def test_bad_usage_is_named(rooted: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str) -> None:
    assert suite.main([*words, *([] if "-o" in words else ["-o", str(rooted)])]) == 2
    said = capsys.readouterr().err
    assert named in said and "hint: " in said and not rooted.exists()


def test_the_launcher_lists_and_runs_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    found = capsys.readouterr().out
    assert all(name in found for name in NAMES)
    assert main(["nothing"]) == 2 and "hint: " in capsys.readouterr().err
