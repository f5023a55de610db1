"""Attention of one token over the slots of each head, and the column sums of a prompt: where scores come from."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Scores = NDArray[np.float64]
QUERY_BLOCK = 256
"""Queries of a prompt that are multiplied at a time: bounds memory at 256 rows of weights a head."""


def attend(queries: Floats, keys: Floats, values: Floats, count: int) -> tuple[Floats, Scores, Scores]:
    """Returns the attention of one token over `count` slots: outputs [heads, dim], weights, products [heads, count].

    `queries` [heads, dim], `keys` and `values` [kv_heads, slots, dim], float32, of which the first `count` slots count;
    heads of one key-value head follow each other. Products are scaled by 1/sqrt(dim); sums are float64 in the order of
    the slots, so equal slots give equal bits.
    Source: kelle.txt, equations 1 and 2 (which omit the scale).
    """
    heads, dim = queries.shape
    out = np.empty((heads, values.shape[2]), np.float32)
    weights, products = np.empty((heads, count)), np.empty((heads, count))
    _attend(queries, keys, values, 1 / math.sqrt(dim), out, weights, products)
    return out, weights, products


def column_sums(queries: Floats, keys: Floats, score: Literal["softmax", "logit"] = "softmax") -> Scores:
    """Returns what each token of a prompt gathers from all queries of its group of heads, itself included [kv_heads, n].

    `queries` [n, heads, dim], `keys` [n, kv_heads, dim], float32. "softmax": attention weights, "logit": scaled products.
    In a second pass over the prompt, a block of queries at a time: fused kernels do not hand their weights out.
    Source: kelle.txt, section 4.1.1, the formula of the pre-filling stage. With GQA the sum is over the group's heads.
    """
    tokens, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    sums = np.zeros((kv_heads, tokens))
    grouped = queries.reshape(tokens, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
    columns = np.ascontiguousarray(keys.transpose(1, 2, 0))[:, None]
    for first in range(0, tokens, QUERY_BLOCK):
        last = min(tokens, first + QUERY_BLOCK)
        products = (grouped[:, :, first:last] @ columns[..., :last]) / np.float32(math.sqrt(dim))
        hidden = np.arange(last) > np.arange(first, last)[:, None]
        sums[:, :last] += _gathered(products, hidden, score)
    return sums


def _gathered(products: Floats, hidden: NDArray[np.bool_], score: str) -> Scores:
    if score == "logit":
        total: Scores = np.where(hidden, 0, products).sum(axis=(1, 2), dtype=np.float64)
        return total
    products[..., hidden] = -np.inf
    weights = np.exp(products - products.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    summed: Scores = weights.sum(axis=(1, 2), dtype=np.float64)
    return summed


@njit(cache=True, nogil=True)
def _attend(queries, keys, values, scale, out, weights, products):  # type: ignore[no-untyped-def]
    group = queries.shape[0] // keys.shape[0]
    count = weights.shape[1]
    total = np.empty(values.shape[2])
    for head in range(queries.shape[0]):
        own = head // group
        largest = -np.inf
        for slot in range(count):
            product = 0.0
            for i in range(queries.shape[1]):
                product += np.float64(queries[head, i]) * np.float64(keys[own, slot, i])
            products[head, slot] = product * scale
            largest = max(largest, products[head, slot])
        below = 0.0
        for slot in range(count):
            weights[head, slot] = np.exp(products[head, slot] - largest)
            below += weights[head, slot]
        total[:] = 0
        for slot in range(count):
            weights[head, slot] /= below
            for i in range(values.shape[2]):
                total[i] += weights[head, slot] * values[own, slot, i]
        out[head] = total
