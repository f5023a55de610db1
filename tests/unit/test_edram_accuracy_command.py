"""`llmcache edram accuracy`: its table, its JSON, the run it records, and options that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmcache import cli
from llmcache.edram.refresh import read_run
from llmcache.kv.tasks import RECALL_MODEL

SMALL = ["--sequences", "2", "--context", "100", "--pairs", "8", "--questions", "4"]


def called(*arguments: str, command: str = "edram accuracy") -> int:
    with pytest.raises(SystemExit) as ended:
        cli.run(cli.app, "llmcache", [*command.split(), *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_json_has_what_was_asked_for_and_says_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--flips", "uniform=1e-3", "--flips", "2drp", "--experiment", "sided", "--json", *SMALL]
    assert called("--model", str(RECALL_MODEL), *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["accuracy"], found["losses"]) == ("llmcache.edram-accuracy/1", "measured", "modelled")
    names = [(row["experiment"], row["variant"]) for row in found["rows"]]
    assert names[:1] == [("sided", "msb 0.03")] and names[-2:] == [("flips", "uniform=1e-3"), ("flips", "2drp")]
    assert found["sequences"] == 2 and found["questions"] == 4 and found["baseline"]["mean"] > 0.8


def test_a_run_is_recorded_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    options = ["--flips", "none", "--record", str(path), "--budget", "40", "--step", "20ms", *SMALL]
    assert called("--model", str(RECALL_MODEL), *options) == 0
    table = capsys.readouterr().out
    assert "measured" in table and "modelled" in table and "none" in table
    run = read_run(path)
    assert run.steps == 8 and run.clock == "modelled: 20.0 ms a step" and run.settings["budget"] == 40
    assert (run.column("kv", "high") + run.column("kv", "low") == 2 * 2 * 2 * 40).all()
    assert called("--model", str(RECALL_MODEL), *options) == 2
    assert called(str(path), command="edram report") == 0
    assert "HST MSB" in capsys.readouterr().out


def test_kv_bench_asks_the_same_of_flips(capsys: pytest.CaptureFixture[str]) -> None:
    assert called("--flips", "none", "--flips", "uniform=0.3", "--json", command="kv bench") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["harm_nats"]["mean"] == 0 and rows[1]["harm_nats"]["mean"] > 1
    assert rows[1]["accuracy"]["mean"] < rows[0]["accuracy"]["mean"]


def test_kv_bench_records_what_kelle_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "run.json")
    options = ["--context", "1k", "--layers", "1", "--steps", "3", "--budget", "128", "--path", str(tmp_path)]
    assert called("--policy", "kelle", "--edram-run", path, *options, command="kv bench") == 0
    assert f"written: {path}" in capsys.readouterr().err
    run = read_run(path)
    assert run.steps == 3 and run.durations_ns is None and run.settings["policy"] == "kelle"
    assert called(path, command="edram report") == 5
    assert called(path, "--step", "20ms", command="edram report") == 0
    assert called("--policy", "kelle", "--edram-run", path, *options, command="kv bench") == 2
    assert called("--policy", "kelle", "--edram-run", path, *options, "--force", command="kv bench") == 0
    assert called("--flips", "2drp", "--edram-run", path + "2", command="kv bench") == 2
    assert called("--policy", "h2o", "--edram-run", path + "2", *options, command="kv bench") == 2
    assert "only Kelle's runs" in capsys.readouterr().err and [file.name for file in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--model", "/nowhere"], "model"),
        (["--model", str(RECALL_MODEL), "--experiment", "sided,all"], "--experiment"),
        (["--model", str(RECALL_MODEL), "--flips", "1e-3"], "flips"),
        (["--model", str(RECALL_MODEL), "--curve", "45us"], "points"),
        (["--model", str(RECALL_MODEL), "--record", "x.json", "--budget", "4"], "--budget"),
        (["--model", str(RECALL_MODEL), "--record", "x.json", "--step", "fast"], "--step"),
        (["--model", str(RECALL_MODEL), "--record", "x.json", "--step", "0ms"], "--step: '0ms'"),
        (["--model", str(RECALL_MODEL), "--context", "100", "--pairs", "64"], "--context: 100 tokens"),
    ],
)
def test_options_that_cannot_be_are_named(options: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(*options) == 2
    shown = capsys.readouterr().err
    assert f"error: {names}" in shown
