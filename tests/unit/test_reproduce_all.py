"""`llmcache reproduce all`: an index of all papers, which the failure of one does not take away."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmcache import cli
from llmcache.errors import EnvironmentProblem
from llmcache.report.claims import Finding, Judged, Verdict
from llmcache.report.reproduce import REPRODUCTIONS, Progress, everything

NAMES = list(REPRODUCTIONS)


@dataclass(frozen=True)
class Made:
    """A paper with a claim that has two variants."""

    name: str

    @property
    def claims(self) -> Mapping[str, Sequence[Judged]]:
        findings = {"a": Finding(Verdict.CONFIRMED, "1 < 2", {"x": 1.0}), "b": Finding(Verdict.PARTLY, "2 = 2")}
        return {"figure 1": [Judged("less", "1", "it is <less>", "less is less", findings)]}

    @property
    def kinds(self) -> Mapping[str, str]:
        return {"figure 1": "modelled"}

    def document(self) -> dict[str, Any]:
        return {"schema": f"llmcache.reproduce.{self.name}/1", "claims": [c.as_json() for c in self.claims["figure 1"]]}

    def page(self) -> str:
        return f"<p>{self.name}</p>"


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.run(cli.app, "llmcache", ["reproduce", "all", *args])
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """Papers that cannot be recomputed, with their errors; all others are made up, and told whether it is quick."""
    errors: dict[str, Exception] = {}

    def reproduce(name: str, quick: bool, progress: Progress) -> Made:
        assert quick
        if name in errors:
            raise errors[name]
        return Made(name)

    monkeypatch.setattr(everything, "reproduce", reproduce)
    return errors


def test_all_papers_and_an_index_are_written(
    failing: dict[str, Exception], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--quick", "-o", str(tmp_path)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{end}" for name in [*NAMES, "all"] for end in ("html", "json")
    }
    told = json.loads((tmp_path / "all.json").read_text())
    assert told["schema"] == "llmcache.reproduce.all/1" and told["quick"] is True and list(told["papers"]) == NAMES
    for name, paper in told["papers"].items():
        assert paper["verdicts"] == {"confirmed": 1, "partly": 1, "not confirmed": 0}
        assert paper["document"] == json.loads((tmp_path / f"{name}.json").read_text())
    page = (tmp_path / "all.html").read_text()
    assert all(f'<a href="{name}.html">' in page for name in NAMES)
    assert page.count("it is &lt;less&gt;") == 2 * len(NAMES)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1 : 1 + len(NAMES)]] == [[name, "1", "1", "0"] for name in NAMES]


def test_one_that_fails_does_not_take_away_the_others(
    failing: dict[str, Exception], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing[NAMES[1]] = EnvironmentProblem("torch is missing", "install it")
    failing[NAMES[2]] = RuntimeError("a bug")
    assert run("--quick", "-o", str(tmp_path)) == 3
    papers = json.loads((tmp_path / "all.json").read_text())["papers"]
    assert papers[NAMES[1]]["error"] == "torch is missing" and papers[NAMES[1]]["hint"] == "install it"
    assert papers[NAMES[2]]["exit_code"] == 1 and "RuntimeError: a bug" in papers[NAMES[2]]["error"]
    assert "document" in papers[NAMES[0]] and "document" in papers[NAMES[3]]
    assert not (tmp_path / f"{NAMES[1]}.html").exists() and (tmp_path / f"{NAMES[3]}.html").exists()
    assert "not recomputed: torch is missing" in (tmp_path / "all.html").read_text()
    told = capsys.readouterr()
    assert "llmcache: error: torch is missing\nhint: install it" in told.err and "Traceback" in told.err
    assert "failed" in told.out


def test_a_bug_alone_is_a_bug(failing: dict[str, Exception], tmp_path: Path) -> None:
    failing[NAMES[0]] = ZeroDivisionError()
    assert run("--quick", "-o", str(tmp_path)) == 1


def test_nothing_begins_where_a_file_would_be_replaced(
    failing: dict[str, Exception], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{NAMES[-1]}.json").write_text("mine")
    assert run("--quick", "-o", str(tmp_path)) == 2
    assert len(list(tmp_path.iterdir())) == 1 and "--force replaces it" in capsys.readouterr().err
    assert run("--quick", "-o", str(tmp_path), "--force") == 0


def test_json_writes_nothing(
    failing: dict[str, Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--quick", "--json") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == everything.SCHEMA
    assert not list(tmp_path.iterdir())
