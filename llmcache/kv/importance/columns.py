"""Column sums of attention: how much all queries of a prefill, together, look at each key.

The matrix of attention is never there as a whole: four rows of it at a time, each as the softmax has it, are added up.
Compiled, rather than products of matrices: these wait for threads of their own, which, where the processors are busy,
took 25 times as long (4096 queries of 32 heads, measured). Its loops call nothing outside this file but `single_of`.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from numba import njit

from llmcache.arrays import Floats
from llmcache.kv.kernels.scores import single_of
from llmcache.kv.kernels.threads import Job, processors, run_all

ROWS = 4
"""Rows that are made at a time: a key is loaded once for all of them."""
_LOG2_E = np.float32(1.4426950408889634)
# 2^x on [0, 1), fitted at Chebyshev nodes: relative error 1.7e-7.
_C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in (0.69315135, 0.24016416, 0.05580045, 0.00901669, 0.00186718))


def column_sums(
    queries: Floats, keys: Floats, start: int = 0, first: int = 0, *, scale: float | None = None, threads: int | None = None
) -> Floats:
    """Returns the sums [kv_heads, tokens], float32, of the columns of softmax(queries keys^T scale), causal.

    `queries` [heads, rows, dim] float32 stand at the positions from `start` on; `keys` [kv_heads, tokens, dim] float32 at
    those from 0 on, up to the last query's; the query heads of a key head are added up (GQA). `first`: what stands before
    it is padding, neither asks nor is looked at. `scale`: None for 1/sqrt(dim). ValueError names what does not fit.

    Source: Zhang et al., H2O, NeurIPS 2023, section 4.1 (accumulated attention); kelle.txt, section 4.1.
    """
    _check(queries, keys, start, first)
    kv_heads, tokens, _ = keys.shape
    group = len(queries) // kv_heads
    scaled = np.ascontiguousarray(queries) * np.float32(1 / math.sqrt(keys.shape[2]) if scale is None else scale)
    keys = np.ascontiguousarray(keys)
    begin = max(start, first)
    # Later rows are longer: of every thread's share, so that all end at about one time.
    parts = max(1, min(-(-2 * (threads or processors()) // len(queries)), (tokens - begin) // (16 * ROWS)))
    sums = np.zeros((parts, len(queries), tokens), np.float32)
    jobs: list[Job] = []
    for head, rows in enumerate(scaled):
        for part in range(parts):
            place = (begin - first, part, parts)
            of_head = keys[head // group, first:]
            jobs.append(partial(_add_rows, rows[begin - start :], of_head, *place, sums[part, head, first:]))
    run_all(jobs, threads)
    found: Floats = sums.sum(axis=0).reshape(kv_heads, group, tokens).sum(axis=1)
    return found


def _check(queries: Floats, keys: Floats, start: int, first: int) -> None:
    if keys.ndim != 3 or keys.dtype != np.float32:
        raise ValueError(f"keys: {keys.dtype} {keys.shape}, float32 [kv_heads, tokens, dim] is needed")
    kv_heads, tokens, dim = keys.shape
    if queries.ndim != 3 or queries.shape[2] != dim or not queries.shape[0] or queries.shape[0] % kv_heads:
        raise ValueError(f"queries: shape {queries.shape}, [a multiple of {kv_heads}, rows, {dim}] is needed")
    if queries.dtype != np.float32:
        raise ValueError(f"queries: type {queries.dtype}, float32 is needed")
    if start < 0 or start + queries.shape[1] != tokens:
        raise ValueError(f"start: {start}, with {queries.shape[1]} queries it ends at {tokens} keys")
    if not 0 <= first <= tokens:
        raise ValueError(f"first: {first}, it lies between 0 and {tokens}")


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _add_rows(queries, keys, begin, part, parts, sums):  # type: ignore[no-untyped-def]
    """Adds the softmax of every `parts`-th four rows of `queries`, from `part` on; the first row stands at `begin`."""
    logits = np.empty((ROWS, len(keys)), np.float32)
    dim = keys.shape[1]
    for top in range(part * ROWS, len(queries), parts * ROWS):
        count = min(ROWS, len(queries) - top)
        last = top + count - 1  # made again where there are fewer than four, in vain
        one, two, three, four = queries[top], queries[min(top + 1, last)], queries[min(top + 2, last)], queries[last]
        for key in range(begin + top + count):
            a = b = c = d = np.float32(0)
            for j in range(dim):
                number = keys[key, j]
                a += one[j] * number
                b += two[j] * number
                c += three[j] * number
                d += four[j] * number
            logits[0, key], logits[1, key], logits[2, key], logits[3, key] = a, b, c, d
        for row in range(count):
            _add_softmax(logits[row, : begin + top + row + 1], sums)


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def _add_softmax(logits, sums):  # type: ignore[no-untyped-def]
    """Adds the softmax of `logits` to `sums`; overwrites `logits`."""
    most = logits[0]
    for i in range(logits.size):
        most = max(most, logits[i])
    total = np.float32(0)
    for i in range(logits.size):
        # 2^x, x <= 0: the whole part goes to the exponent, the rest through a polynomial.
        x = max((logits[i] - most) * _LOG2_E, np.float32(-126))
        whole = np.floor(x)
        rest = x - whole
        power = np.float32(1) + rest * (_C1 + rest * (_C2 + rest * (_C3 + rest * (_C4 + rest * _C5))))
        power *= single_of(np.uint32(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23)))
        logits[i] = power
        total += power
    share = np.float32(1) / total
    for i in range(logits.size):
        sums[i] += logits[i] * share
