"""Accuracy under eviction and lost bits on the recall model, bad model files, and the command."""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.arrays import Floats, Int64s
from llmcache.errors import DataError
from llmcache.kv.tasks import RECALL_MODEL, recall
from llmcache.papers.edram import accuracy as edram_accuracy
from llmcache.papers.edram.accuracy import (
    EXPERIMENTS,
    Accuracies,
    AccuracySetup,
    custom,
    evaluate,
    harm,
    run,
)
from llmcache.papers.edram.aerp import AerpSettings
from llmcache.papers.edram.constants import KELLE_INTERVALS
from llmcache.papers.edram.decoder import Config, Decoder, parse_tensors
from llmcache.papers.edram.flips import CellSettings, FlipRates, iso_failure
from llmcache.papers.edram.refresh import read_run
from llmcache.papers.edram.retention import paper_curve
from tests.unit.command_parts import called

EXACT = CellSettings("exact")


def decoded(decoder: Decoder, ids: Int64s, first: int, settings: AerpSettings, cells: CellSettings) -> Floats:
    """Return the logits of the tokens from `first` on, computed one by one over a cache."""
    prompt, _ = decoder.prompt(ids[:first])
    cache = decoder.cache(prompt, settings, cells)
    return np.array([decoder.step(int(token), cache) for token in ids[first:]])


def test_a_cache_without_eviction_gives_the_logits_of_dense_attention() -> None:
    decoder, ids = Decoder.load(RECALL_MODEL), recall(np.random.default_rng(0), 1, 60, pairs=8, questions=4).ids[0]
    dense = decoder.prompt(ids)[1][30:]
    np.testing.assert_allclose(decoded(decoder, ids, 30, AerpSettings(60, 4, 8), EXACT), dense, atol=1e-4)
    stored = decoded(decoder, ids, 30, AerpSettings(60, 4, 8), CellSettings("fp16"))
    assert 1e-3 < np.abs(stored - dense).max() < 0.05


@pytest.fixture(scope="module")
def accuracies() -> Accuracies:
    decoder, questions = Decoder.load(RECALL_MODEL), recall(np.random.default_rng(5), 3, 400, pairs=48, questions=14)
    setup = AccuracySetup(400 + 28, "int16", paper_curve())
    variants = {"budgets": EXPERIMENTS["budgets"](setup)[2:6]}
    variants["uniform"] = custom(setup, ["uniform=1e-4", "uniform=1e-2", "uniform=5e-2"])
    variants["halves"] = [setup.losing("halves", FlipRates.uniform(1e-3), "fp16")]
    return run(decoder, questions, setup, variants)


def test_lost_bits_harm_in_the_order_that_2drp_assumes() -> None:
    """At equal rates, paired by text: high bits harm more than low, high scores more than low, uniform more than 2DRP."""
    setup, slow = AccuracySetup(300 + 28, "int16", paper_curve()), KELLE_INTERVALS.scaled(8)
    asked = recall(np.random.default_rng(6), 6, 300, pairs=48, questions=14)
    variants = [
        *EXPERIMENTS["sided"](setup),
        setup.losing("2drp", FlipRates.of_intervals(slow, setup.curve)),
        setup.losing("iso-failure", iso_failure(slow, setup.curve)),
    ]
    found = evaluate(Decoder.load(RECALL_MODEL), asked, variants)
    for more, less in (("msb 0.03", "lsb 0.03"), ("hst 0.03", "lst 0.03"), ("iso-failure", "2drp")):
        difference = harm(found[more], found[less])
        assert difference.mean > 3 * difference.error, f"{more} over {less}: {difference}"


def test_smaller_budgets_and_more_lost_bits_lower_the_accuracy(accuracies: Accuracies) -> None:
    assert accuracies.baseline.mean > 0.95 and (accuracies.sequences, accuracies.questions) == (3, 14)
    rows = {row.variant: row for row in accuracies.rows}
    harms = [rows[f"uniform={rate}"].harm.mean for rate in ("1e-4", "1e-2", "5e-2")]
    assert harms[0] < 0.05 < harms[1] < harms[2]
    assert rows["halves"].harm.mean > 2  # fp16 tolerates less than integers
    names = ("N'=256", "N'=128", "N'=256, recent only", "N'=128, recent only")
    found = [rows[name].accuracy.mean for name in names]
    assert found[0] > found[1] and found[2] > found[3] and found[0] > found[2] and found[1] > found[3]


def tensors(**entries: Any) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(64)


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        (struct.pack("<Q", 1 << 40) + b"{}", "model.safetensors"),
        (tensors(a={"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}), "a"),
        (tensors(a={"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}), "a"),
        (tensors(a=3), "a"),
        (struct.pack("<Q", 2) + b"[]", "model.safetensors"),
    ],
)
def test_damaged_weights_are_named(raw: bytes, names: str) -> None:
    with pytest.raises(DataError, match=f"^{names}: "):
        parse_tensors(raw)


def test_unsupported_models_are_refused_by_field() -> None:
    data = json.loads((RECALL_MODEL / "config.json").read_text())
    assert Config.parse(data).kv_heads == 2
    for name, value in (
        ("model_type", "gemma"), ("hidden_size", 0), ("rms_norm_eps", "small"), ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("rope_parameters", {"type": "linear", "factor": 4.0}), ("rope_parameters", "yarn"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"^{name}: "):
            Config.parse(data | {name: value})
    for window in ({"use_sliding_window": True}, {"model_type": "mistral", "sliding_window": 99}):
        with pytest.raises(DataError, match=r"^sliding_window: "):
            Config.parse(data | window)
    mistral = {name: value for name, value in data.items() if name != "sliding_window"} | {"model_type": "mistral"}
    with pytest.raises(DataError, match=r"^sliding_window: "):
        Config.parse(mistral)
    assert Config.parse(mistral | {"sliding_window": None}).kv_heads == 2


SMALL = ["--model", str(RECALL_MODEL), "--sequences", "2", "--context", "100", "--pairs", "8", "--questions", "4"]


def test_a_recorded_run_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    command = ["edram", "accuracy", "--flips", "none", "--record", str(path), "--budget", "40", "--step", "20ms", *SMALL]
    shown = called(*command)
    assert shown.returncode == 0 and all(word in shown.stdout for word in ("measured", "modelled", "none"))
    run = read_run(path)
    assert run.steps == 8 and run.clock == "modelled: 20.0 ms per step" and run.settings["budget"] == 40
    assert (run.column("kv", "high") + run.column("kv", "low") == 2 * 2 * 2 * 40).all()
    assert called(*command).returncode == 2
    assert "HST MSB" in called("edram", "report", path).stdout


def test_kv_bench_evaluates_flips_too(monkeypatch: pytest.MonkeyPatch) -> None:
    few = partial(edram_accuracy.AccuracyOptions, sequences=3, context=400, pairs=48, questions=14)
    monkeypatch.setattr(edram_accuracy, "AccuracyOptions", few)
    found = json.loads(called("kv", "bench", "--flips", "none", "--flips", "uniform=0.3", "--json").stdout)
    assert (found["schema"], found["accuracy"], found["losses"]) == ("llmcache.edram-accuracy/1", "measured", "modelled")
    rows = found["rows"]
    assert rows[0]["harm_nats"]["mean"] == 0 and rows[1]["harm_nats"]["mean"] > 1
    assert rows[1]["accuracy"]["mean"] < rows[0]["accuracy"]["mean"]


def test_kv_bench_records_an_edram_run_of_kelle(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = ["--context", "1k", "--layers", "1", "--steps", "3", "--budget", "128", "--path", str(tmp_path)]
    command = ["kv", "bench", "--policy", "kelle", "--edram-run", str(path), *options]
    assert f"{path} is written" in called(*command).stderr
    run = read_run(path)
    assert run.steps == 3 and run.durations_ns is None and run.settings["policy"] == "kelle"
    assert called("edram", "report", path).returncode == 5
    assert called("edram", "report", path, "--step", "20ms").returncode == 0
    assert called(*command).returncode == 2
    assert called(*command, "--force").returncode == 0
    assert called("kv", "bench", "--flips", "2drp", "--edram-run", tmp_path / "2").returncode == 2
    other = called("kv", "bench", "--policy", "h2o", "--edram-run", tmp_path / "2", *options)
    assert other.returncode == 2 and "only the policy kelle" in other.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
