"""`llmcache kv bench`: printed results were run and add up; measured and modelled values are never mixed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmcache import cli
from llmcache.errors import DataError, LlmcacheError, UsageError
from llmcache.kv.bench.results import Bench, Marks, Observed, Row, read_bench
from llmcache.kv.bench.synthetic import Accelerator, PolicySession, Setup
from llmcache.kv.pipeline import Span, Timeline
from llmcache.kv.planning.latency import Variant
from llmcache.kv.spill import SpillReader
from llmcache.kv.workload import StreamSpec
from llmcache.report import kv_bench
from tests.unit.forked_device import FORKED
from tests.unit.forked_device import forked as forked
from tests.unit.report_parts import unlaid as unlaid

pytestmark = pytest.mark.usefixtures("unlaid")

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
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@FORKED
def test_a_measured_run_of_all_policies(tmp_path: Path, model: str) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    document = bench(
        "--model", model, "--context", "1k", "--steps", "3", "--compute", "3ms", "--path", str(spill), "--threads", "2",
        "--policy", "full,prefetch,hillinfer,hillinfer-no-app", "--block", "64",
    )  # fmt: skip
    assert list(spill.iterdir()) == [], "the spill file was removed"
    assert document["kind"] == "measured" and document["conditions"]["stream"]["synthetic"]
    assert "emulated, 3.00 ms per layer" in document["conditions"]["compute"]
    rows = {row["policy"]: row for row in document["rows"]}
    assert list(rows) == ["full", "prefetch", "hillinfer", "hillinfer-no-app"]
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
    document = bench(
        "--model", model, "--context", "2k", "--steps", "1", "--compute", "1ms", "--path", str(tmp_path), "--threads", "2",
        "--policy", "hillinfer-no-app", "--sweep-beta", "--ram", "350k", "--layers", "1", "--device", "file",
    )  # fmt: skip
    marks = document["marks"]
    whole = 2048 * 2 * 2 * 16 * 4
    assert marks["m0"] == pytest.approx(350_000 / (whole - 350_000)) and marks["rule"] == marks["f_c"] / marks["f_s"]
    betas = [row["beta"] for row in document["rows"]]
    assert betas == sorted(betas) and max(betas) <= marks["expected"] * 1.05, "limited by memory"
    assert {row["policy"] for row in document["rows"]} == {"hillinfer-no-app"}


def test_switches_disable_designs_and_a_file_replaces_the_device(tmp_path: Path, model: str) -> None:
    document = bench(
        "--model", model, "--context", "512", "--steps", "1", "--compute", "cpu", "--path", str(tmp_path), "--threads", "2",
        "--policy", "hillinfer", "--no-hie", "--no-bkp", "--no-app", "--device", "file", "--beta", "auto", "--exact",
        "--ram", "100k",
    )  # fmt: skip
    (row,) = document["rows"]
    assert row["policy"] == "hillinfer-no-hie-no-bkp-no-app" and row["title"].endswith("without HIE, BKP, APP")
    whole = 512 * 2 * 2 * 2 * 16 * 4
    assert row["observed"]["device"] is None and 0 < row["beta"] <= 1.05 * 100_000 / (whole - 100_000), "limited by M0"
    assert row["observed"]["timeline"]["emulated"] == [] and "this processor" in document["conditions"]["compute"]
    assert document["conditions"]["exact"] is True


@pytest.mark.parametrize(("policy", "interleaved"), [("mass", True), ("prefetch", False)])
def test_a_spill_file_has_the_layout_of_the_policy(tmp_path: Path, policy: str, interleaved: bool) -> None:
    setup = Setup(StreamSpec(1, 2, 4, 16, 512), Accelerator(), tmp_path, steps=1)
    with PolicySession(setup, Variant(policy)) as session:
        session.prefill()
        (path,) = tmp_path.rglob("*.kv")
        with SpillReader.open(path, setup.spec.shape) as file:
            assert file.interleaved == interleaved


def test_the_paper_profile_is_only_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcache.kv.bench.synthetic.compare", None)
    document = bench("--profile", "paper", "--context", "16k", "--batch", "8", "--policy", "full,hillinfer,hillinfer-no-app")
    assert document["kind"] == "modelled" and all(row["observed"] is None for row in document["rows"])
    full, hillinfer, without = document["rows"]
    assert hillinfer["token_ns"] < without["token_ns"] < full["token_ns"]
    swept = bench("--profile", "paper", "--context", "32k", "--batch", "8", "--policy", "hillinfer", "--sweep-beta")
    betas = [row["beta"] for row in swept["rows"]]
    assert max(betas) == pytest.approx(swept["marks"]["m0"]) and len(set(betas)) == len(betas)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--policy lru", "--policy: there is no policy 'lru'"),
        ("--policy full,full", "--policy: "),
        ("--policy=", "--policy: "),
        ("--policy hillinfer-no-x", "--policy: "),
        ("--policy full-no-app", "--policy: "),
        ("--policy window --profile paper", "--policy: 'window' has no latency model"),
        ("--context 1k,2k", "--context: takes one value without --task, not 1024,2048"),
        ("--alpha 0.2 --budget 64", "--budget"),
        ("--csd floppy", "--csd"),
        ("--path /nowhere", "--path"),
        ("--budget 16", "token_budget: must be at least .*, not 16"),
        ("--ram 1k", "cpu_pages"),
        ("--context 1000M --layers 1000", "--path: /tmp: spill files need"),
    ],
)
def test_invalid_options_are_refused_by_name(words: str, named: str) -> None:
    plain = ["--policy", "full,hillinfer", "--context", "1k", "--steps", "2", "--path", "/tmp", "--compute", "1ms"]
    with pytest.raises(LlmcacheError, match=named):
        CliRunner().invoke(cli.app, ["kv", "bench", *plain, *words.split()], catch_exceptions=False)


def test_a_run_is_plotted_at_once_if_possible(tmp_path: Path) -> None:
    picture = tmp_path / "beta.svg"
    args = ["kv", "bench", "--profile", "paper", "--policy", "hillinfer", "--batch", "8", "--plot", str(picture)]
    result = CliRunner().invoke(cli.app, [*args, "--sweep-beta"])
    assert result.exit_code == 0 and "Modelled." in picture.read_text() and "f_c / f_s" in result.stdout
    for wrong in ([*args, "--sweep-beta"], [*args[:-1], str(tmp_path / "a.png")], [*args[:-1], "a.txt", "--sweep-beta"]):
        with pytest.raises(UsageError, match="--plot: "):
            CliRunner().invoke(cli.app, wrong, catch_exceptions=False)
    assert list(tmp_path.iterdir()) == [picture]


# Reports of made-up results

MS = 1_000_000


def timeline() -> dict[str, Any]:
    made = Timeline(["compute"])
    for layer in range(3):
        made.add(Span("cpu", "evaluate", layer, 7, 10 * layer * MS, (10 * layer + 4) * MS))
        made.add(Span("compute", "compute", layer, 7, (10 * layer + 5) * MS, (10 * layer + 9) * MS))
    return made.to_json()


def observed() -> Observed:
    device = {"emulated": True, "profile": "smartssd", "commands": 9, "modelled_ns": 4 * MS, "wall_ns": 7 * MS}
    return Observed((30 * MS, 29 * MS, 31 * MS), MS, 512, 0.75, 12, 11, 3, 0.25, device, timeline())


def row(policy: str, token_ms: float, beta: float | None = 1.0, seen: Observed | None = None) -> Row:
    stages = {"evaluate": 12.0 * MS, "fetch": 3.0 * MS, "compute": 12.0 * MS, "update": 1.0 * MS}
    links = {
        "ssd to cpu, fetch": 5e6, "cpu to ssd, fetch": 1e6, "ssd to cpu, score": 1e5, "ssd to cpu, index": 2e5,
        "cpu to ssd, spill": 7e3, "ssd to device, score": 8e7, "device to ssd, spill": 1e7,
    }  # fmt: skip
    return Row(policy, policy.title(), token_ms * MS, stages, (token_ms - 12) * MS, 1 - 12 / token_ms, links, beta, seen)


MEASURED = Bench(
    "measured", {"context": 2048, "stream": {"synthetic": True}, "alpha": None},
    (row("full", 90, seen=observed()), row("hillinfer", 30, seen=replace(observed(), device=None))), notes=("a note",),
)  # fmt: skip
SWEEP = Bench(
    "modelled", {"machine": "the paper's"},
    tuple(row("hillinfer", ms, beta) for beta, ms in ((0.5, 50), (1.0, 30), (2.0, 24), (4.0, 27))), Marks(8e9, 4e9, 3.0),
)  # fmt: skip


def test_a_saved_benchmark_is_read_back_unchanged() -> None:
    for saved in (MEASURED, SWEEP):
        data = json.loads(json.dumps(saved.document()))
        assert read_bench(data, "run.json").document() == saved.document()
    assert MEASURED.document()["rows"][1]["speedup_over"] == {"full": 3.0}
    assert SWEEP.document()["rows"][0]["speedup_over"] == {}, "all rows are of one policy"
    assert SWEEP.document()["marks"]["expected"] == 2.0 and Marks(8e9, 1e9, 3.0).expected == 3.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema": "llmcache.size/1"}, "schema"),
        ({"kind": "guessed"}, "kind"),
        ({"rows": []}, "rows: the document has none"),
        ({"rows": [{**asdict(row("full", 90)), "token_ns": "soon"}]}, "token_ns: 'soon'"),
        ({"rows": [{**asdict(MEASURED.rows[0]), "observed": {**asdict(observed()), "timeline": {}}}]}, "emulated: missing"),
    ],
)
def test_an_invalid_benchmark_is_refused_with_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(DataError, match=f"^run.json: .*{field}") as caught:
        read_bench({**MEASURED.document(), **change}, "run.json")
    assert caught.value.hint


@pytest.mark.parametrize(("found", "form"), [(MEASURED, "svg"), (SWEEP, "png")])
def test_every_format_is_plotted_from_the_saved_file(found: Bench, form: str, tmp_path: Path) -> None:
    run, output = tmp_path / "run.json", tmp_path / f"picture.{form}"
    run.write_text(json.dumps(found.document()))
    kv_bench.plot(str(run), str(output), force=False)
    data = output.read_bytes()
    assert data.startswith(b"\x89PNG" if form == "png" else b"<?xml")
    with pytest.raises(UsageError, match=r"exists|there"):
        kv_bench.plot(str(run), str(output), force=False)
    kv_bench.plot(str(run), str(output), force=True)
    assert output.read_bytes() == data, "plots are reproducible"


def test_captions_name_the_emulated_resources() -> None:
    real, both = (replace(observed(), timeline=Timeline(kinds).to_json()) for kinds in ([], ["device", "compute"]))
    rows = row("full", 90, seen=real), row("hillinfer", 30, seen=both)
    assert kv_bench.kind_of(replace(MEASURED, rows=rows[:1])) == "measured" and kv_bench.kind_of(SWEEP) == "modelled"
    kind = "measured, with an emulated accelerator and computational SSD"
    page = kv_bench.drawn(replace(MEASURED, rows=rows), "run.json", "html").decode()
    assert f"All values are {kind}." in page and f"M{kind[1:]}." in page
