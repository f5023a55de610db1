"""Column sums of attention: how much all queries of a prefill, together, look at each key.

The matrix of attention is never there as a whole: blocks of queries, each row by row as the softmax has it, added up by
a product with the reciprocals of the rows' sums. Products and exponentials are numpy's: both are vectorised there, and
an exponential that numba compiles is not.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.kernels.threads import run_all

Floats = NDArray[np.float32]
BLOCK_NUMBERS = 1 << 21
"""Numbers of the attention matrix that one thread has at a time (8 MiB)."""
_MOST_ROWS = 256


def column_sums(
    queries: Floats,
    keys: Floats,
    start: int = 0,
    first: int = 0,
    *,
    scale: float | None = None,
    threads: int | None = None,
) -> Floats:
    """Returns the sums [kv_heads, tokens], float32, of the columns of softmax(queries keys^T scale), causal.

    `queries` [heads, rows, dim] float32 stand at the positions from `start` on; `keys` [kv_heads, tokens, dim] float32 at
    those from 0 on, up to the last query's; the query heads of a key head are added up (GQA). `first`: what stands before
    it is padding, neither asks nor is looked at. `scale`: None for 1/sqrt(dim). ValueError names what does not fit.

    Source: Zhang et al., H2O, NeurIPS 2023, section 4.1 (accumulated attention); kelle.txt, section 4.1.
    """
    _check(queries, keys, start, first)
    kv_heads, tokens, dim = keys.shape
    grouped = queries.reshape(kv_heads, -1, *queries.shape[1:])
    sums = np.zeros((kv_heads, tokens), np.float32)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    run_all(
        [
            partial(_add_head, grouped[head], keys[head], start, first, np.float32(scale), sums[head])
            for head in range(kv_heads)
        ],
        threads,
    )
    return sums


def _check(queries: Floats, keys: Floats, start: int, first: int) -> None:
    if keys.ndim != 3 or keys.dtype != np.float32:
        raise ValueError(f"keys: {keys.dtype} {keys.shape}, float32 [kv_heads, tokens, dim] is needed")
    kv_heads, tokens, dim = keys.shape
    if queries.ndim != 3 or queries.shape[2] != dim or not queries.shape[0] or queries.shape[0] % kv_heads:
        raise ValueError(f"queries: shape {queries.shape}, [a multiple of {kv_heads}, rows, {dim}] is needed")
    if start < 0 or start + queries.shape[1] != tokens:
        raise ValueError(f"start: {start}, with {queries.shape[1]} queries it ends at {tokens} keys")
    if not 0 <= first <= tokens:
        raise ValueError(f"first: {first}, it lies between 0 and {tokens}")


def _add_head(queries: Floats, keys: Floats, start: int, first: int, scale: np.float32, sums: Floats) -> None:
    """Adds the columns of the query heads [group, rows, dim] of one key head to `sums` [tokens]."""
    step = max(1, min(_MOST_ROWS, BLOCK_NUMBERS // len(keys)))
    for begin in range(max(start, first), len(keys), step):
        end = min(len(keys), begin + step)
        for rows in queries[:, begin - start : end - start]:
            sums[first:end] += _columns(rows * scale, keys[first:end], begin - first)


def _columns(queries: Floats, keys: Floats, begin: int) -> Floats:
    """Column sums [tokens] of the softmax of a block of rows, the first of which stands at `begin`."""
    logits = queries @ keys.T
    for row in range(len(queries) - 1):
        logits[row, begin + row + 1 :] = -np.inf
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    found: Floats = (1 / logits.sum(axis=1)) @ logits
    return found
