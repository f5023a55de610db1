"""The reference attention: what the formula says, also for grouped heads and half precision."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.kv.pipeline.attention import attention, widened

RANDOM = np.random.default_rng(3)
QUERIES = RANDOM.standard_normal((2, 4, 8)).astype(np.float32)
KEYS, VALUES = (RANDOM.standard_normal((2, 2, 11, dim)).astype(np.float32) for dim in (8, 5))


def test_it_is_the_softmax_of_scaled_products_for_each_head() -> None:
    out, weights = attention(QUERIES, KEYS, VALUES)
    assert out.shape == (2, 4, 5) and weights.shape == (2, 4, 11) and out.dtype == np.float32
    for b in range(2):
        for head in range(4):
            logits = KEYS[b, head // 2].astype(np.float64) @ QUERIES[b, head] / 8**0.5
            share = np.exp(logits) / np.exp(logits).sum()
            np.testing.assert_allclose(weights[b, head], share, rtol=1e-5)
            np.testing.assert_allclose(out[b, head], share @ VALUES[b, head // 2], rtol=1e-4, atol=1e-6)


def test_types_of_keys_and_values_are_widened_not_rounded_again() -> None:
    bits = (KEYS.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(widened(bits), (bits.astype(np.uint32) << 16).view(np.float32))
    narrow = [side.astype(np.float16) for side in (KEYS, VALUES)]
    once, again = attention(QUERIES, *narrow), attention(QUERIES, *(side.astype(np.float32) for side in narrow))
    assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))


def test_large_logits_do_not_overflow() -> None:
    out, weights = attention(1e4 * QUERIES, KEYS, VALUES)
    assert np.isfinite(out).all() and weights.max() == 1


@pytest.mark.parametrize(
    ("keys", "values", "name"),
    [
        (KEYS[:, :, :, :7], VALUES, "keys"),
        (KEYS[:1], VALUES, "keys"),
        (np.repeat(KEYS, 3, axis=1)[:, :3], VALUES, "keys"),
        (KEYS, VALUES[:, :, :10], "values"),
        (KEYS[:, :, :0], VALUES[:, :, :0], "keys: no tokens"),
    ],
)
def test_shapes_that_do_not_fit_are_named(keys: NDArray[np.float32], values: NDArray[np.float32], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        attention(QUERIES, keys, values)
