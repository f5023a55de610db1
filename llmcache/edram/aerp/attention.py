"""Attention of one token over the slots of each head, and the column sums of a prompt: where scores come from."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Scores = NDArray[np.float64]


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
    Source: kelle.txt, section 4.1.1, the formula of the pre-filling stage. With GQA the sum is over the group's heads.
    """
    _, weights, products = attend_prompt(queries, keys, keys[:, :, :0])
    return weights if score == "softmax" else products


def attend_prompt(queries: Floats, keys: Floats, values: Floats) -> tuple[Floats, Scores, Scores]:
    """Returns causal attention of a prompt [n, heads, dim], and its column sums of weights and of products [kv_heads, n].

    Fused kernels do not hand their weights out, which is why this one is here. Arguments as `column_sums`.
    """
    tokens, heads, dim = queries.shape
    out = np.zeros((tokens, heads, values.shape[2]), np.float32)
    weights, products = np.zeros((keys.shape[1], tokens)), np.zeros((keys.shape[1], tokens))
    by_head = [np.ascontiguousarray(rows.swapaxes(0, 1)) for rows in (queries, keys, values)]
    _attend_prompt(*by_head, np.float32(1 / math.sqrt(dim)), out, weights, products)
    return out, weights, products


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _attend_prompt(queries, keys, values, scale, out, weights, products):  # type: ignore[no-untyped-def]
    group = queries.shape[0] // keys.shape[0]
    row = np.empty(queries.shape[1], np.float32)
    for head in range(queries.shape[0]):
        own = head // group
        for query in range(queries.shape[1]):
            largest = np.float32(-np.inf)
            for token in range(query + 1):
                product = np.float32(0)
                for i in range(queries.shape[2]):
                    product += queries[head, query, i] * keys[own, token, i]
                row[token] = product * scale
                largest = max(largest, row[token])
                products[own, token] += row[token]
            below = 0.0
            for token in range(query + 1):
                row[token] = np.exp(row[token] - largest)
                below += row[token]
            share = np.float32(1 / below)
            for token in range(query + 1):
                weight = row[token] * share
                weights[own, token] += weight
                for i in range(values.shape[2]):
                    out[query, head, i] += weight * values[own, token, i]


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
