"""AERP: its settings, the storage rule, recomputation, and what the paper's formulas say of small cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.edram.aerp import AerpLayer, AerpSettings, LayerShape, Slots, column_sums
from llmcache.edram.flips import NO_FLIPS, CellSettings, FlipRates
from tests.unit.edram_parts import Stream


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("budget", {"budget": 4, "sinks": 4}),
        ("budget", {"budget": 3, "sinks": 4}),
        ("sinks", {"budget": 3, "sinks": -1}),
        ("window", {"budget": 30, "window": -1}),
        ("score", {"budget": 30, "score": "rows"}),
        ("score_bits", {"budget": 30, "score_bits": 17}),
        ("recompute", {"budget": 30, "recompute": "all"}),
        ("max_x", {"budget": 30, "max_x": -1}),
    ],
)
def test_a_setting_that_cannot_be_is_named(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        AerpSettings(**values)


@pytest.mark.parametrize(("name", "sizes"), [("heads", (4, 3, 8)), ("kv_heads", (4, 0, 8)), ("head_dim", (4, 4, 0))])
def test_a_shape_that_cannot_be_is_named(name: str, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        LayerShape(*sizes)


def test_x_pays_for_more_than_half_of_the_heads_of_mha_and_never_for_gqa() -> None:
    mha, llama3, qwen2 = LayerShape(32, 32, 128, 4096), LayerShape(32, 8, 128, 4096), LayerShape(28, 4, 128, 3584)
    assert not mha.x_pays(16) and mha.x_pays(17)
    assert not llama3.x_pays(8) and not qwen2.x_pays(4)
    assert not LayerShape(4, 2, 32, 128).x_pays(2)  # as large as keys and values: nothing is saved


def test_row_sums_are_one_and_column_sums_tell_tokens_apart() -> None:
    """Equation 3 as printed sums row n: 1 for every token. The formula of the prefill sums column N."""
    queries = np.random.default_rng(0).standard_normal((40, 2, 8), np.float32)
    sums = column_sums(queries, queries)
    assert sums.sum() == pytest.approx(2 * 40) and sums.std() > 0.1


def test_column_sums_are_those_of_numpy() -> None:
    tokens = 300
    random = np.random.default_rng(1)
    queries, keys = random.standard_normal((tokens, 2, 4), np.float32), random.standard_normal((tokens, 1, 4), np.float32)
    products = np.einsum("nhd,md->hnm", queries.astype(np.float64), keys[:, 0]) / 2
    products[:, np.triu(np.ones((tokens, tokens), np.bool_), 1)] = -np.inf
    weights = np.exp(products - products.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(column_sums(queries, keys)[0], weights.sum((0, 1)), rtol=1e-4)
    products[np.isinf(products)] = 0
    np.testing.assert_allclose(column_sums(queries, keys, "logit")[0], products.sum((0, 1)), rtol=1e-3, atol=1e-3)


def test_of_equal_scores_a_prompt_keeps_the_newer_and_a_step_drops_the_oldest() -> None:
    slots = Slots(AerpSettings(6, sinks=1, window=1), 1)
    assert slots.fill(np.ones((1, 9))).tolist() == [[0, 4, 5, 6, 7, 8]]
    placed = slots.add(np.zeros((1, 7)))
    assert placed.evicted.tolist() == [4] and slots.positions.tolist() == [[0, 9, 5, 6, 7, 8]]


def test_without_a_window_a_token_of_the_lowest_score_is_not_kept_at_all() -> None:
    slots = Slots(AerpSettings(2, sinks=0, window=0), 1)
    slots.fill(np.ones((1, 2)))
    placed = slots.add(np.array([[1.0, 1.0, 0.5]]))
    assert placed.slots.tolist() == [-1] and placed.evicted.tolist() == [2]
    assert slots.positions.tolist() == [[0, 1]]


def test_a_window_of_the_whole_budget_keeps_sinks_and_the_last() -> None:
    slots = Slots(AerpSettings(6, sinks=2, window=64), 3)
    slots.fill(np.random.default_rng(0).random((3, 4)))
    for _ in range(20):
        slots.add(np.random.default_rng(1).random((3, slots.count + 1)))
    assert (np.sort(slots.positions, axis=1) == [0, 1, 20, 21, 22, 23]).all()


def test_a_second_prompt_is_refused() -> None:
    slots = Slots(AerpSettings(6, sinks=2), 1)
    slots.fill(np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"^sums: "):
        slots.fill(np.ones((1, 3)))


def test_what_is_no_number_does_not_decide_who_stays() -> None:
    slots = Slots(AerpSettings(4, sinks=1, window=1), 1)
    slots.fill(np.array([[5.0, 1.0, 2.0, 3.0]]))
    assert slots.add(np.full((1, 5), np.nan)).evicted.tolist() == [1]
    assert np.isfinite(slots.scores).all()


def test_four_bits_cannot_tell_close_scores_apart_and_drop_the_older() -> None:
    scores = np.array([[9.0, 0.32, 0.31, 8.0]])
    evicted = []
    for bits in (0, 4):
        slots = Slots(AerpSettings(4, sinks=0, window=0, score_bits=bits), 1)
        slots.fill(scores)
        evicted.append(int(slots.add(np.array([[0.0, 0.0, 0.0, 0.0, 5.0]])).evicted[0]))
    assert evicted == [2, 1]


def test_recomputed_keys_have_the_rotation_of_their_original_positions() -> None:
    shape = LayerShape(4, 4, 8, channels=32)
    stream = Stream.of(shape, 40, seed=3)
    keys, values = stream.kv()
    layer = AerpLayer(AerpSettings(16, sinks=2, window=4, recompute="prefill"), shape, stream.project, CellSettings("exact"))
    layer.prefill(keys, values, column_sums(stream.queries, keys), stream.x)
    assert layer.inputs is not None and layer.inputs.standing_in.any()
    heads, slots = np.nonzero(layer.slots.used & ~layer.in_kv)
    positions = layer.slots.positions[heads, slots]
    np.testing.assert_allclose(layer.keys.readings[heads, slots], keys[positions, heads], rtol=1e-5, atol=1e-5)
    elsewhere, _ = stream.project(stream.x, np.arange(40) + 1)
    assert np.abs(layer.keys.readings[heads, slots] - elsewhere[positions, heads]).max() > 0.1


@pytest.mark.parametrize("how", ["int16", "fp16"])
def test_recomputing_changes_outputs_by_rounding_only_and_no_choice(how: Any) -> None:
    shape = LayerShape(4, 4, 8, channels=32)
    stream = Stream.of(shape, 90, seed=5)
    stream.x[:] = stream.x.astype(np.float16)
    keys, values = stream.kv()
    found = []
    for recompute in ("none", "prefill", "decode"):
        layer = AerpLayer(AerpSettings(24, 2, 6, recompute=recompute), shape, stream.project, CellSettings(how))
        layer.prefill(keys[:60], values[:60], column_sums(stream.queries[:60], keys[:60]), stream.x[:60])
        outputs = [layer.step(stream.queries[t], keys[t], values[t], stream.x[t]) for t in range(60, 90)]
        found.append((np.array(outputs), np.sort(layer.slots.positions)))
    for changed, positions in found[1:]:
        np.testing.assert_allclose(changed, found[0][0], atol=0.03)
        assert (positions == found[0][1]).all()


def test_x_rows_save_bytes_at_first_and_are_freed_with_their_last_head() -> None:
    shape = LayerShape(4, 4, 8, channels=32)
    stream = Stream.of(shape, 400, seed=8)
    keys, values = stream.kv()
    stored = []
    for recompute in ("none", "prefill"):
        layer = AerpLayer(AerpSettings(24, 2, 6, recompute=recompute), shape, stream.project, CellSettings("exact"))
        layer.prefill(keys[:60], values[:60], column_sums(stream.queries[:60], keys[:60]), stream.x[:60])
        before = layer.stored_bytes
        for t in range(60, 400):
            layer.step(stream.queries[t], keys[t], values[t], stream.x[t])
        stored.append((before, layer.stored_bytes))
    assert stored[1][0] < stored[0][0] == stored[0][1]
    assert layer.inputs is not None
    left = layer.inputs.positions[layer.inputs.used]
    assert set(left) == set(layer.slots.positions[layer.slots.used & ~layer.in_kv])


def test_recomputing_needs_projections_and_x() -> None:
    with pytest.raises(ValueError, match=r"^recompute: "):
        AerpLayer(AerpSettings(30, recompute="prefill"), LayerShape(1, 1, 4, 8))
    stream = Stream.of(LayerShape(1, 1, 4, 6), 3, seed=0)
    layer = AerpLayer(AerpSettings(30, recompute="decode"), stream.shape, stream.project)
    keys, values = stream.kv()
    with pytest.raises(ValueError, match=r"^x: "):
        layer.prefill(keys, values, np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"^keys: "):
        layer.prefill(keys[:, :, :2], values, np.ones((1, 3)))


def lossy(seed: int, rates: FlipRates, sticky: bool = True) -> tuple[AerpLayer, list[NDArray[np.float32]]]:
    """An MHA layer with x rows, in cells that lose bits, after 20 steps; and its outputs."""
    shape = LayerShape(4, 4, 8, channels=32)
    stream = Stream.of(shape, 80, seed=5)
    keys, values = stream.kv()
    cells = CellSettings(rates=rates, seed=seed, sticky=sticky)
    layer = AerpLayer(AerpSettings(24, 2, 6, recompute="decode"), shape, stream.project, cells)
    layer.prefill(keys[:60], values[:60], column_sums(stream.queries[:60], keys[:60]), stream.x[:60])
    return layer, [layer.step(stream.queries[t], keys[t], values[t], stream.x[t]) for t in range(60, 80)]


def test_lost_bits_are_those_of_the_seed() -> None:
    rates = FlipRates.uniform(0.02)
    first, again, other = (np.array(lossy(seed, rates)[1]) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()
    intact = np.array(lossy(1, NO_FLIPS)[1])
    low = np.array(lossy(1, FlipRates(lst_lsb=1e-3))[1])
    assert 0 < np.abs(low - intact).mean() < 0.01 * np.abs(first - intact).mean()


def test_what_is_recomputed_comes_from_what_is_left_of_x() -> None:
    layer, _ = lossy(1, FlipRates.uniform(0.02))
    assert layer.inputs is not None and layer.inputs.lost_bits > 0 and layer.lost_bits > layer.inputs.lost_bits
    layer._settle()
    inputs, heads_slots = layer.inputs, np.nonzero(layer.slots.used & ~layer.in_kv)
    assert len(heads_slots[0])
    rows = inputs._cells.readings[inputs.used]
    keys, _ = Stream.of(layer.shape, 1, seed=5).project(rows, inputs.positions[inputs.used])
    by_position = dict(zip(inputs.positions[inputs.used].tolist(), keys, strict=True))
    for head, slot in zip(*heads_slots, strict=True):
        wanted = by_position[int(layer.slots.positions[head, slot])][head]
        np.testing.assert_allclose(layer.keys.readings[head, slot], wanted, rtol=1e-4, atol=1e-4)


def test_high_scores_are_protected_tokens_and_those_from_the_median_up() -> None:
    layer, _ = lossy(1, FlipRates.uniform(0.02))
    slots, high = layer.slots, layer.high_scores()
    for head, (positions, scores) in enumerate(zip(slots.positions, slots.scores, strict=True)):
        for slot, (position, score) in enumerate(zip(positions, scores, strict=True)):
            # As of the token to come, number 80: the window of 6 begins behind number 74.
            assert high[head, slot] == (position < 2 or position > 74 or score >= np.median(scores))
    assert layer.inputs is not None
    votes = layer.x_high_scores(high)
    for index in np.nonzero(layer.inputs.standing_in)[0]:
        retaining = high[slots.positions == layer.inputs.positions[index]]
        assert votes[index] == (2 * retaining.sum() >= len(retaining))


def test_by_score_alone_a_new_token_has_a_low_one() -> None:
    layer, _ = lossy(1, FlipRates.uniform(0.02))
    layer.cells = CellSettings(protect=False)
    newest = layer.slots.positions == layer.slots.newest
    assert newest.any(axis=1).all() and not layer.high_scores()[newest].any()
