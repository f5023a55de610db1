"""AERP against a brute-force oracle that keeps everything and masks, slot by slot, over random streams."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcache.edram.aerp import AerpLayer, AerpSettings, LayerShape, attend
from llmcache.edram.flips import CellSettings
from tests.conftest import examples
from tests.property.plain_aerp import PlainAerp
from tests.unit.edram_parts import Stream, column_sums

EXACT = CellSettings("exact")
DIM = 4
RECOMPUTED = AerpSettings(9, sinks=1, window=4, score="logit", per_query=True, recompute="decode")
# What is recomputed is a product of many rows at once, which rounds float32 otherwise than that of a row by itself: up to
# 8e-8 of a key, in scores that are sums over all steps. Nothing else may differ.
ROUNDED = 1e-4

shapes = st.sampled_from([(4, 4), (4, 2), (4, 1), (1, 1), (3, 3)]).flatmap(
    lambda heads: st.builds(LayerShape, st.just(heads[0]), st.just(heads[1]), st.just(DIM), st.sampled_from([6, 16, 24, 40]))
)
policies = st.integers(0, 4).flatmap(
    lambda sinks: st.builds(
        AerpSettings,
        budget=st.integers(sinks + 1, 24),
        sinks=st.just(sinks),
        window=st.integers(0, 10),
        score=st.sampled_from(["softmax", "logit"]),
        score_bits=st.sampled_from([0, 0, 4]),
        per_query=st.booleans(),
        recompute=st.sampled_from(["none", "prefill", "decode"]),
        max_x=st.sampled_from([None, None, 0, 2]),
    )
)


@settings(max_examples=examples(150), deadline=None)
@given(shapes, policies, st.integers(1, 30), st.integers(0, 30), st.integers(0, 2**32 - 1), st.sampled_from([0, 0, 0, 1]))
@example(LayerShape(3, 3, DIM, 16), RECOMPUTED, 8, 16, 1173, 0)  # scores 7e-6 apart
def test_equals_what_keeps_everything_and_masks(
    shape: LayerShape, policy: AerpSettings, prompt: int, steps: int, seed: int, flat: int
) -> None:
    stream = Stream.of(shape, prompt + steps, seed, bool(flat))
    keys, values = stream.kv()
    layer, plain = AerpLayer(policy, shape, stream.project, EXACT), PlainAerp(policy, shape)
    plain.prefill(stream.queries[:prompt], keys[:prompt], values[:prompt])
    sums = column_sums(stream.queries[:prompt], keys[:prompt], policy.score)
    np.testing.assert_allclose(sums, plain.sums, rtol=1e-3, atol=1e-3)
    # From here on with equal sums: what float32 rounds must not decide between tokens that are nearly alike.
    layer.prefill(keys[:prompt], values[:prompt], plain.sums, stream.x[:prompt])
    check_state(layer, plain)
    for t in range(prompt, prompt + steps):
        found = layer.step(stream.queries[t], keys[t], values[t], stream.x[t])
        np.testing.assert_allclose(found, plain.step(stream.queries[t], keys[t], values[t]), rtol=1e-4, atol=1e-5)
        check_state(layer, plain)


def check_state(layer: AerpLayer, plain: PlainAerp) -> None:
    """Slots, scores, formats, bytes; and the invariants of a layer."""
    positions, count = layer.slots.positions, layer.slots.count
    assert [list(row[:count]) for row in positions] == plain.slots
    assert (positions[:, count:] == -1).all()
    for head, scores in enumerate(plain.scores):
        wanted = [scores[p] for p in plain.slots[head]]
        apart = 1e-9 if layer.settings.recompute == "none" else ROUNDED
        np.testing.assert_allclose(layer.slots.scores[head, :count], wanted, rtol=apart, atol=apart)
    assert layer.stored_bytes == plain.stored_bytes()
    inputs = layer.inputs
    assert set(inputs.positions[inputs.standing_in]) == plain.as_x
    assert set(inputs.positions[inputs.used & inputs.waiting]) == plain.waiting
    as_x = layer.slots.used & ~layer.in_kv
    assert set(positions[as_x]) == plain.as_x
    assert (inputs.positions[layer.x_index[:, :-1][as_x]] == positions[as_x]).all()
    retained = [(positions == p).sum() for p in inputs.positions[inputs.standing_in]]
    assert list(inputs.retaining[inputs.standing_in]) == retained


@settings(max_examples=examples(60), deadline=None)
@given(shapes, st.integers(1, 40), st.integers(1, 20), st.integers(0, 8), st.integers(0, 2**32 - 1))
def test_a_budget_for_all_is_dense_attention_bit_for_bit(
    shape: LayerShape, prompt: int, steps: int, spare: int, seed: int
) -> None:
    stream = Stream.of(shape, prompt + steps, seed)
    keys, values = stream.kv()
    layer = AerpLayer(AerpSettings(prompt + steps + spare, sinks=0, window=4), shape, cells=EXACT)
    layer.prefill(keys[:prompt], values[:prompt], column_sums(stream.queries[:prompt], keys[:prompt]))
    for t in range(prompt, prompt + steps):
        by_head = [np.ascontiguousarray(rows[: t + 1].swapaxes(0, 1)) for rows in (keys, values)]
        dense, _, _ = attend(stream.queries[t], by_head[0], by_head[1], t + 1)
        assert (layer.step(stream.queries[t], keys[t], values[t]).view(np.uint32) == dense.view(np.uint32)).all()
