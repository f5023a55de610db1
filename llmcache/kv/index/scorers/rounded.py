"""Rounded: every key is scored, from a byte a number: less memory than the keys themselves, nearly all of the best found."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.index.dci.transforms import single
from llmcache.kv.index.scorers.base import Floats, Grown, ScorerSettings
from llmcache.kv.index.scorers.exact import Exact
from llmcache.kv.spill.shape import KvShape

STEPS = 127
"""Steps from nothing to the largest number of a key."""


class Rounded(Exact):
    """Keeps keys rounded to int8, with a scale for each key; keys of int8 stay as they are.

    An error is at most half a step in each number, so keys may change places only where their scores are close: of 64
    or 256 best among 32 Ki keys of 128 halves, normally distributed, 0.99 are found (measured).
    """

    name = "rounded"

    def __init__(self, shape: KvShape, first: int = 0, settings: ScorerSettings | None = None) -> None:
        super().__init__(shape, first, settings)
        self._keys = Grown((shape.kv_heads, shape.page_tokens, shape.head_dim), np.dtype(np.int8))
        self._scales = Grown((shape.kv_heads, shape.page_tokens), np.dtype(np.float32))

    def _add(self, keys: NDArray[Any], scales: Floats | None) -> None:
        super()._add(*((keys, scales) if scales is not None else rounded(keys)))


def rounded(keys: NDArray[Any]) -> tuple[NDArray[np.int8], Floats]:
    """Returns finite keys [..., dim] (float32, float16, bits of bfloat16) as int8, and their scales [...], above 0."""
    wide = single(keys)
    scales: Floats = np.maximum(np.abs(wide).max(axis=-1), np.finfo(np.float32).tiny * STEPS) / np.float32(STEPS)
    return np.rint(wide / scales[..., None]).astype(np.int8), scales
