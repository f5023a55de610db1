"""tools/bench NAME and tools/bench all: one after the other, whatever fails; every bar on one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench import all as suite
from tools.bench import results
from tools.bench.__main__ import main
from tools.bench.all import NAMES, SuiteEntry

ROOT = Path(__file__).parents[2]
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
    monkeypatch.setattr(suite.psutil, "cpu_percent", lambda _seconds: 50.0)
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
    assert suite.main(["-o", str(rooted), "--skip", "broken,good,slow"]) == 1, "the results that are there are shown"
    assert suite.main(["--from", str(rooted)]) == suite.FAILED, "broken has none"


def test_a_run_that_was_cut_off_goes_on(rooted: Path) -> None:
    assert suite.main(["-o", str(rooted), "--skip", "broken"]) == 1
    first = results.read(rooted / "all.json")["started"]
    kept = (rooted / "good.json").read_text()
    (rooted / "slow.json").unlink()
    assert suite.main(["-o", str(rooted), "--skip", "broken", "--resume"]) == 1
    assert (rooted / "good.json").read_text() == kept and (rooted / "slow.json").exists()
    assert results.read(rooted / "all.json")["started"] == first


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--only", "nothing"], "nothing"),
        (["--only", "good", "--skip", "slow"], "--only and --skip"),
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
