"""Synthetic streams: sparse as the paper assumes, local in time, and the same for any division into parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcache.errors import UsageError
from llmcache.kv.pipeline import attention
from llmcache.kv.workload import StreamSpec, SyntheticStream

SPEC = StreamSpec(layers=2, kv_heads=2, heads=4, head_dim=64, context=4096)
SHARE = 0.2  # hillinfer.txt, section 1: less than 20 % of the tokens matter


def weights(made: SyntheticStream, layer: int, step: int) -> NDArray[np.float32]:
    """Return the attention weights of a step [heads, tokens]."""
    spec = made.spec
    keys = made.keys_values(layer, range(spec.context + step))[0]
    found: NDArray[np.float32] = attention(made.queries(layer, step), keys, keys)[1][0]
    return found


def mass(found: NDArray[np.float32], share: float = SHARE) -> float:
    """Return the share of attention of the `share` of tokens with the most attention, for the head with the least."""
    most = np.sort(found, axis=1)[:, ::-1][:, : int(share * found.shape[1])]
    return float(most.sum(axis=1).min())


def test_few_tokens_have_most_of_the_attention() -> None:
    made = SyntheticStream(SPEC)
    for layer, step in ((0, 0), (1, 17), (0, 40)):
        found = weights(made, layer, step)
        assert mass(found) > 0.85, "a fifth of the tokens"
        assert mass(found, 0.05) > 0.5


def test_important_tokens_change_slowly_and_then_completely() -> None:
    made = SyntheticStream(SPEC)
    chosen = [
        [set(np.argsort(head)[::-1][:400].tolist()) for head in weights(made, 1, step)[:, : SPEC.context]]
        for step in (4, 5, 5 + 2 * 32)
    ]
    near, far = (np.mean([len(a & b) / 400 for a, b in zip(chosen[0], others, strict=True)]) for others in chosen[1:])
    assert near > 0.75 > 0.6 > far


def test_a_part_of_a_stream_equals_that_of_the_whole() -> None:
    made = SyntheticStream(replace(SPEC, batch=2, seed=5))
    keys, values = made.keys_values(1, range(1000))
    assert keys.shape == (2, 2, 1000, 64) and keys.dtype == np.float16
    assert not np.array_equal(keys[0], keys[1]) and not np.array_equal(keys, values)
    for part in (range(1), range(127, 129), range(300, 777)):
        again = SyntheticStream(made.spec).keys_values(1, part)
        assert np.array_equal(again[0], keys[:, :, part.start : part.stop])
        assert np.array_equal(again[1], values[:, :, part.start : part.stop])
    assert not np.array_equal(made.keys_values(0, range(1000))[0], keys), "layers differ"
    assert not np.array_equal(SyntheticStream(replace(SPEC, batch=2)).keys_values(1, range(1000))[0], keys), "seeds differ"


def test_an_invalid_head_dim_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^head_dim: "):
        replace(SPEC, head_dim=30)
