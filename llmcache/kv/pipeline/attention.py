"""Attention of one decode step over gathered keys and values, in float32: the reference for what selections lose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def widened(rows: NDArray[Any]) -> Floats:
    """Returns keys or values as float32; uint16 are the bits of bfloat16."""
    if rows.dtype == np.uint16:
        wide: Floats = (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return rows.astype(np.float32, copy=False)


def attention(queries: Floats, keys: NDArray[Any], values: NDArray[Any]) -> tuple[Floats, Floats]:
    """Returns the outputs [batch, heads, value_dim] and the weights [batch, heads, tokens], which add up to 1.

    `queries` [batch, heads, dim] float32; `keys` [batch, kv_heads, tokens, dim] and `values` likewise, float32, float16
    or the bits of bfloat16; heads is a multiple of kv_heads (GQA). The same rows in the same order give the same bits.
    """
    batch, heads, dim = queries.shape
    if keys.ndim != 4 or keys.shape[0] != batch or keys.shape[3] != dim or heads % keys.shape[1]:
        raise ValueError(f"keys: shape {keys.shape}, [{batch}, a divisor of {heads}, tokens, {dim}] is needed")
    if values.shape[:3] != keys.shape[:3]:
        raise ValueError(f"values: shape {values.shape}, keys have {keys.shape}")
    if not keys.shape[2]:
        raise ValueError("keys: no tokens, at least 1 is needed")
    grouped = queries.reshape(batch, keys.shape[1], -1, dim) * np.float32(1 / math.sqrt(dim))
    # Not by matrix products: these few rows are no work for the threads of a BLAS, which wait by spinning.
    logits: Floats = np.einsum("bhgd,bhtd->bhgt", grouped, widened(keys))
    logits -= logits.max(axis=3, keepdims=True)
    weights = np.exp(logits, out=logits)
    weights /= weights.sum(axis=3, keepdims=True)
    out: Floats = np.einsum("bhgt,bhtd->bhgd", weights, widened(values))
    return out.reshape(batch, heads, -1), weights.reshape(batch, heads, -1)
