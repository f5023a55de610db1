"""`llmcache kv bench`: what is printed was run; its parts add up; what cannot be asked for is refused by its option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmcache import cli
from llmcache.errors import EnvironmentProblem, LlmcacheError, UsageError
from llmcache.kv.bench.results import read_bench
from llmcache.kv.bench.synthetic import PolicySession, Setup, Variant, check_space, compare, modelled, workplace
from llmcache.kv.pipeline import Timeline
from llmcache.kv.planning import MODELS, PAPER_PC
from llmcache.kv.workload import StreamSpec

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 100, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def bench(*args: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, ["kv", "bench", "--json", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)
    return told


def test_a_measured_run_of_all_policies(tmp_path: Path, model: str) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    told = bench(
        "--model", model, "--context", "1k", "--steps", "3", "--compute", "3ms", "--path", str(spill), "--threads", "2",
        "--policy", "full,h2o,prefetch,leoam,hillinfer,hillinfer-no-app", "--block", "64",
    )  # fmt: skip
    assert list(spill.iterdir()) == [], "no spill file is left"
    assert told["kind"] == "measured" and told["conditions"]["stream"]["synthetic"]
    rows = {row["policy"]: row for row in told["rows"]}
    assert list(rows) == ["full", "h2o", "prefetch", "leoam", "hillinfer", "hillinfer-no-app"]
    for row in rows.values():
        _check_times(row)
    assert rows["full"]["observed"]["attended_tokens"] == 1024 + 4 + 3
    assert {row["observed"]["attended_tokens"] for name, row in rows.items() if name != "full"} <= set(range(200, 230))
    device = rows["hillinfer"]["observed"]["device"]
    assert device["emulated"] and device["modelled_ns"] > 0 and device["wall_ns"] > 0
    assert rows["prefetch"]["observed"]["device"] is None
    scoring = [rows[name]["moved_bytes"]["ssd to cpu, score"] for name in ("prefetch", "hillinfer")]
    assert scoring[1] < scoring[0], "only score blocks cross the link"
    assert rows["hillinfer"]["moved_bytes"]["ssd to device, score"] > 0
    assert rows["full"]["speedup_over"]["hillinfer"] == pytest.approx(
        rows["hillinfer"]["token_ns"] / rows["full"]["token_ns"]
    )
    read_bench(told, "stdout")


def _check_times(row: dict[str, Any]) -> None:
    timeline = Timeline.from_json(row["observed"]["timeline"])
    (step,) = timeline.steps
    assert timeline.busy_ns(step, "compute") >= 2 * 3_000_000, "two layers of 3 ms"
    assert timeline.emulated >= {"compute"}
    assert len(row["observed"]["steps_ns"]) == 3 and min(row["observed"]["steps_ns"]) >= 2 * 3_000_000
    assert row["exposed_ns"] == row["token_ns"] - row["stages_ns"]["compute"]
    assert 0 < row["idle_share"] < 1 and row["stages_ns"]["fetch"] > 0 and row["beta"] == pytest.approx(1, rel=0.1)
    assert 0 < row["observed"]["hit_ratio"] < 1
    assert row["moved_bytes"]["ssd to cpu, fetch"] > 0


def test_a_sweep_tries_betas_around_the_measured_rule(tmp_path: Path, model: str) -> None:
    told = bench(
        "--model", model, "--context", "2k", "--steps", "1", "--compute", "1ms", "--path", str(tmp_path), "--threads", "2",
        "--policy", "hillinfer-no-app", "--sweep-beta", "--ram", "350k", "--layers", "1", "--device", "file",
    )  # fmt: skip
    marks = told["marks"]
    whole = 2048 * 2 * 2 * 16 * 4
    assert marks["m0"] == pytest.approx(350_000 / (whole - 350_000)) and marks["rule"] == marks["f_c"] / marks["f_s"]
    betas = [row["beta"] for row in told["rows"]]
    assert betas == sorted(betas) and max(betas) <= marks["expected"] * 1.05, "no more than memory holds"
    assert {row["policy"] for row in told["rows"]} == {"hillinfer-no-app"}


def test_switches_leave_designs_out_and_a_file_stands_for_the_device(tmp_path: Path, model: str) -> None:
    told = bench(
        "--model", model, "--context", "512", "--steps", "1", "--compute", "cpu", "--path", str(tmp_path), "--threads", "2",
        "--policy", "hillinfer", "--no-hie", "--no-bkp", "--no-app", "--device", "file", "--beta", "3",
    )  # fmt: skip
    (row,) = told["rows"]
    assert row["policy"] == "hillinfer-no-hie-no-bkp-no-app" and row["title"].endswith("without HIE, BKP, APP")
    assert row["observed"]["device"] is None and row["beta"] == pytest.approx(3, rel=0.2)
    assert row["observed"]["timeline"]["emulated"] == [] and "this processor" in told["conditions"]["compute"]


def test_beta_auto_is_what_the_rule_says_of_measured_speeds(tmp_path: Path, model: str) -> None:
    told = bench(
        "--model", model, "--context", "1k", "--steps", "1", "--compute", "1ms", "--path", str(tmp_path), "--threads", "2",
        "--policy", "full", "--beta", "auto", "--ram", "100k", "--layers", "1", "--device", "file",
    )  # fmt: skip
    whole = 1024 * 2 * 2 * 16 * 4
    assert 0 < told["rows"][0]["beta"] <= 1.05 * 100_000 / (whole - 100_000), "M0 bounds it"


def test_the_paper_profile_is_modelled_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcache.kv.bench.synthetic.compare", None)
    told = bench("--profile", "paper", "--context", "16k", "--batch", "8", "--policy", "full,hillinfer,hillinfer-no-app")
    assert told["kind"] == "modelled" and all(row["observed"] is None for row in told["rows"])
    full, hillinfer, without = told["rows"]
    assert hillinfer["token_ns"] < without["token_ns"] < full["token_ns"]
    swept = bench("--profile", "paper", "--context", "32k", "--batch", "8", "--policy", "hillinfer", "--sweep-beta")
    betas = [row["beta"] for row in swept["rows"]]
    assert max(betas) == pytest.approx(swept["marks"]["m0"]) and len(set(betas)) == len(betas)


def test_the_text_names_what_is_emulated(tmp_path: Path, model: str) -> None:
    args = ["--model", model, "--context", "512", "--steps", "1", "--compute", "1ms", "--path", str(tmp_path)]
    result = CliRunner().invoke(cli.app, ["kv", "bench", *args, "--policy", "hillinfer", "--exact"])
    assert result.exit_code == 0, result.output
    for wanted in ("measured on this", "synthetic stream", "emulated: 1.00 ms a layer", "emulated device (smartssd)"):
        assert wanted in result.stdout
    assert "exact True" in result.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--policy lru", "--policy: there is no 'lru'"),
        ("--policy hillinfer-no-x", "--policy"),
        ("--sweep-beta", "--sweep-beta"),
        ("--policy window --profile paper", "--policy: 'window' has no latency model"),
        ("--profile paper --layers 3", "--layers"),
        ("--policy=", "--policy: '' names none"),
        ("--context none", "--context: 'none'"),
        ("--context=", "--context: ''"),
        ("--context 1k,2k", "--context: '1024,2048' are several"),
        ("--alpha 0", "--alpha: '0'"),
        ("--alpha 1.2", "--alpha: '1.2'"),
        ("--alpha nan", "--alpha: 'nan'"),
        ("--alpha much", "--alpha: 'much'"),
        ("--alpha 0.2 --budget 64", "--budget"),
        ("--beta -1", "--beta: '-1'"),
        ("--beta inf", "--beta: 'inf'"),
        ("--beta 1 --sweep-beta --policy hillinfer", "--beta"),
        ("--csd floppy", "--csd"),
        ("--compute abacus", "--compute"),
        ("--path /nowhere", "--path"),
        ("--model /nowhere/config.json", "--model"),
        ("--ram 0", "--ram: '0'"),
        ("--budget 16", "token_budget: 16"),
        ("--ram 1k", "cpu_pages"),
        ("--context 1000M --layers 1000", "--path: /tmp: .* are needed"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_its_name(words: str, named: str) -> None:
    plain = ["--policy", "full,hillinfer", "--context", "1k", "--steps", "2", "--path", "/tmp", "--compute", "1ms"]
    with pytest.raises(LlmcacheError, match=named):
        CliRunner().invoke(cli.app, ["kv", "bench", *plain, *words.split()], catch_exceptions=False)


def test_a_run_is_drawn_at_once_where_it_can_be(tmp_path: Path) -> None:
    picture = tmp_path / "beta.svg"
    args = ["kv", "bench", "--profile", "paper", "--policy", "hillinfer", "--batch", "8", "--plot", str(picture)]
    result = CliRunner().invoke(cli.app, [*args, "--sweep-beta"])
    assert result.exit_code == 0 and "Modelled." in picture.read_text() and "f_c / f_s" in result.stdout
    for wrong in ([*args, "--sweep-beta"], [*args[:-1], str(tmp_path / "a.png")], [*args[:-1], "a.txt", "--sweep-beta"]):
        with pytest.raises(UsageError, match="--plot: "):
            CliRunner().invoke(cli.app, wrong, catch_exceptions=False)
    assert list(tmp_path.iterdir()) == [picture]


def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    spec = StreamSpec(layers=80, kv_heads=8, heads=8, head_dim=128, context=1 << 24)
    with pytest.raises(EnvironmentProblem, match="needed for spill files"):
        check_space(Setup(spec, modelled(PAPER_PC, MODELS["Qwen-7B"], 1), tmp_path), 3)
    assert list(tmp_path.iterdir()) == []


def test_the_place_of_work_goes_away_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), workplace(tmp_path) as made:
        (made / "x.kv").write_text("x")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="--path"), workplace(tmp_path / "none"):
        pass


def test_an_emulated_accelerator_takes_longer_for_more_weights_and_tokens() -> None:
    layer_ns = modelled(PAPER_PC, MODELS["Qwen-7B"], 8).layer_ns
    least_ns = 1e9 * MODELS["Qwen-7B"].layer_weight_bytes(1) / PAPER_PC.gpu_bytes_per_s
    assert layer_ns is not None and layer_ns(4096) > layer_ns(16) > least_ns
    assert modelled(PAPER_PC, MODELS["Qwen-7B"], 1).title.startswith("emulated")


def test_a_session_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StreamSpec(layers=1, kv_heads=2, heads=2, head_dim=16, context=256, dtype="float32")
    setup = Setup(spec, modelled(PAPER_PC, MODELS["Qwen-7B"], 1), tmp_path, steps=1, warm_up=0)
    with pytest.raises(RuntimeError, match="the policy"), PolicySession(setup, Variant("full")) as session:
        monkeypatch.setattr(session.policy, "select", lambda *_: (_ for _ in ()).throw(RuntimeError("the policy")))
        session.prefill()
        session.decode(0)
    assert list(tmp_path.iterdir()) == []
    assert compare(setup, [Variant("full")]).rows[0].observed is not None
