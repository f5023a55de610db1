"""What eviction and lost bits do to answers: the decoder against itself, directions on the recall model, bad model files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.edram.accuracy import EXPERIMENTS, Accuracies, Decoder, Setup, Variant, custom, evaluate, harm, run
from llmcache.edram.accuracy.weights import Config, parse_tensors, read_model
from llmcache.edram.aerp import AerpSettings
from llmcache.edram.constants import KELLE_INTERVALS, PAPER
from llmcache.edram.flips import CellSettings, FlipRates, iso_failure
from llmcache.edram.refresh import account
from llmcache.edram.refresh.watching import recorder_for, watch
from llmcache.errors import DataError, LlmcacheError, UsageError
from llmcache.kv.tasks import RECALL_MODEL, Questions, recall
from tests.unit.edram_parts import random_decoder

EXACT = CellSettings("exact")
Floats = NDArray[np.float32]


def decoded(decoder: Decoder, ids: NDArray[np.int64], first: int, settings: AerpSettings, cells: CellSettings) -> Floats:
    """The logits of the tokens from `first` on, computed one by one over a cache."""
    prompt, _ = decoder.prompt(ids[:first])
    cache = decoder.cache(prompt, settings, cells)
    return np.array([decoder.step(int(token), cache) for token in ids[first:]])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_cache_that_keeps_all_gives_the_logits_of_dense_attention(kv_heads: int) -> None:
    decoder, ids = random_decoder(kv_heads=kv_heads), np.random.default_rng(0).integers(0, 50, 60)
    dense = decoder.prompt(ids)[1][30:]
    np.testing.assert_allclose(decoded(decoder, ids, 30, AerpSettings(60, 4, 8), EXACT), dense, atol=1e-4)
    stored = decoded(decoder, ids, 30, AerpSettings(60, 4, 8), CellSettings("fp16"))
    assert 1e-6 < np.abs(stored - dense).max() < 0.05


def test_recomputing_changes_logits_by_rounding_only() -> None:
    decoder, ids = random_decoder(), np.random.default_rng(1).integers(0, 50, 90)
    prompt, _ = decoder.prompt(ids[:60])
    assert (decoder.cache(prompt, AerpSettings(24, 4, 8, recompute="prefill"), EXACT)[0].x_index >= 0).any()
    none, *others = (
        decoded(decoder, ids, 60, AerpSettings(24, 4, 8, recompute=how), CellSettings("fp16"))
        for how in ("none", "prefill", "decode")
    )
    for other in others:
        assert 0 < np.abs(other - none).max() < 0.1


@pytest.fixture(scope="module")
def accuracies() -> Accuracies:
    decoder, questions = Decoder.load(RECALL_MODEL), recall(np.random.default_rng(5), 5, 400, pairs=48, questions=14)
    setup = Setup(400 + 28)
    variants = {"intervals": EXPERIMENTS["intervals"](setup)[3:6]}
    variants["budgets"] = EXPERIMENTS["budgets"](setup)[2:6]
    variants["uniform"] = custom(setup, ["uniform=1e-4", "uniform=1e-2", "uniform=5e-2"])
    variants["halves"] = [setup.losing("halves", FlipRates.uniform(1e-3), "fp16")]
    return run(decoder, questions, setup, variants)


def test_the_model_answers_over_a_cache_that_keeps_all(accuracies: Accuracies) -> None:
    assert accuracies.baseline.mean > 0.95 and (accuracies.sequences, accuracies.questions) == (5, 14)


def test_the_order_of_harm_is_that_of_2drp() -> None:
    """At equal rates, paired by text: high bits over low bits, high scores over low scores, uniform over 2DRP."""
    setup, slow = Setup(400 + 28), KELLE_INTERVALS.scaled(8)
    asked = recall(np.random.default_rng(6), 10, 400, pairs=48, questions=14)
    variants = [
        *EXPERIMENTS["sided"](setup),
        setup.losing("2drp", FlipRates.of_intervals(slow)),
        setup.losing("iso-failure", iso_failure(slow)),
    ]
    found = evaluate(Decoder.load(RECALL_MODEL), asked, variants)
    for more, less in (("msb 0.03", "lsb 0.03"), ("hst 0.03", "lst 0.03"), ("iso-failure", "2drp")):
        difference = harm(found[more], found[less])
        assert difference.mean > 3 * difference.error, f"{more} over {less}: {difference}"


def test_losing_more_bits_harms_more_and_halves_do_not_bear_what_integers_bear(accuracies: Accuracies) -> None:
    harms = [accuracies.row(f"uniform={rate}").harm.mean for rate in ("1e-4", "1e-2", "5e-2")]
    assert harms[0] < 0.05 < harms[1] < harms[2]
    assert accuracies.row("halves").harm.mean > 2


def test_a_smaller_budget_answers_less_and_scores_choose_better_than_recency(accuracies: Accuracies) -> None:
    names = ("N'=256", "N'=128", "N'=256, recent only", "N'=128, recent only")
    found = [accuracies.row(name).accuracy.mean for name in names]
    assert found[0] > found[1] and found[2] > found[3] and found[0] > found[2] and found[1] > found[3]


def test_equal_power_loses_fewer_bits_than_equal_failure(accuracies: Accuracies) -> None:
    both, equal = accuracies.row("1050 us: 2DRP"), accuracies.row("1050 us: uniform, iso-failure")
    assert both.lost_bits == pytest.approx(equal.lost_bits, rel=0.05)
    power = accuracies.row("1050 us: uniform, iso-power")
    assert power.lost_bits < both.lost_bits / 3


def test_it_is_plain_data_with_labels(accuracies: Accuracies) -> None:
    data = json.loads(json.dumps(accuracies.to_json()))
    assert data["schema"] == "llmcache.edram-accuracy/1" and (data["accuracy"], data["losses"]) == ("measured", "modelled")
    assert set(data["rows"][0]) == {"experiment", "variant", "accuracy", "harm_nats", "rates", "stored_bytes", "lost_bits"}
    with pytest.raises(KeyError):
        accuracies.row("nothing")


def test_variants_share_their_draws_and_seeds_differ_by_sequence() -> None:
    decoder, questions = random_decoder(), Questions(*(np.random.default_rng(2).integers(0, 50, (2, n)) for n in (20, 3, 3)))
    cells = CellSettings(rates=FlipRates.uniform(0.05))
    found = evaluate(decoder, questions, [Variant(name, AerpSettings(40, 2, 4), cells) for name in ("a", "b")])
    assert (found["a"].loss == found["b"].loss).all() and harm(found["a"], found["b"]).mean == 0
    assert found["a"].lost_bits[0] != found["a"].lost_bits[1]


def test_halves_that_are_no_number_cost_a_guess() -> None:
    decoder, questions = random_decoder(), Questions(*(np.random.default_rng(2).integers(0, 50, (1, n)) for n in (20, 3, 3)))
    cells = CellSettings("fp16", FlipRates.uniform(0.2), nonfinite="keep")
    found = evaluate(decoder, questions, [Variant("nan", AerpSettings(40, 2, 4), cells)])["nan"]
    assert found.loss == pytest.approx(np.log(50)) and found.stored_bytes.tolist() == [2 * 2 * 2 * 4 * 8 * 26]


def test_a_live_run_is_recorded_and_accounted_for() -> None:
    decoder, ids = random_decoder(), np.random.default_rng(3).integers(0, 50, 80)
    prompt, _ = decoder.prompt(ids[:40])
    cache = decoder.cache(prompt, AerpSettings(24, 4, 8, recompute="prefill"), CellSettings())
    recorder = recorder_for(cache[0])
    for token in ids[40:]:
        watch(recorder, cache)
        recorder.end_step(2e6)
        decoder.step(int(token), cache)
    found = recorder.finish("live", "modelled: 2 ms a step")
    pairs, x_rows = (found.column(kind, "high") + found.column(kind, "low") for kind in ("kv", "x"))
    assert (pairs > 0).all() and x_rows[0] > 0 and (np.diff(x_rows) <= 0).all()
    assert (2 * (2 * 8 * pairs + 32 * x_rows))[0] == sum(
        layer.stored_bytes for layer in decoder.cache(prompt, AerpSettings(24, 4, 8, recompute="prefill"), CellSettings())
    )
    for rule in ("ticks", "floor"):
        energies = account(found, KELLE_INTERVALS, PAPER.refresh_j_per_byte, rule=rule)
        assert energies.joules == pytest.approx(sum(group.joules for group in energies.groups), rel=1e-9)
        assert energies.joules > 0


def tensors(**entries: Any) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(64)


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        (b"", "model.safetensors"),
        (struct.pack("<Q", 1 << 40) + b"{}", "model.safetensors"),
        (struct.pack("<Q", 2) + b"{]", "model.safetensors"),
        (tensors(a={"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}), "a"),
        (tensors(a={"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}), "a"),
        (tensors(a={"dtype": "F32", "shape": [2]}), "a"),
        (tensors(a=3), "a"),
    ],
)
def test_damaged_weights_are_named(raw: bytes, names: str) -> None:
    with pytest.raises(DataError, match=f"^{names}: "):
        parse_tensors(raw)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model_type": "gemma"}, "model_type"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"use_sliding_window": True}, "rope_parameters"),
    ],
)
def test_models_that_are_not_supported_are_named(change: dict[str, Any], names: str) -> None:
    data = json.loads((RECALL_MODEL / "config.json").read_text())
    assert Config.parse(data).kv_heads == 2
    with pytest.raises(DataError, match=f"^{names}: "):
        Config.parse(data | change)


def test_directories_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^model: "):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LlmcacheError):
        read_model(tmp_path)
    decoder = random_decoder()
    with pytest.raises(DataError, match="missing in the model"):
        Decoder(decoder.config, {})


def test_budgets_below_the_sinks_are_refused() -> None:
    from llmcache.edram.accuracy.experiments import budgets

    with pytest.raises(UsageError, match=r"^budgets: "):
        budgets(Setup(100), [4])
