"""Scores of tokens: queries times keys, for every head of every sequence, by as many threads as there are processors.

Source: hillinfer.txt, section 3.2, "Hierarchical Importance Evaluation" and Algorithm 1, lines 5 and 10; the paper does
not say how the query heads of one key head (GQA) are combined: the largest product counts, or their sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.kernels.compiled import MAX, QUERIES, SUM, loop_for
from llmcache.kv.kernels.threads import Job, processors, run_all

COMBINE = {"max": MAX, "sum": SUM}
JOB_BYTES = 1 << 19
"""Keys that are worth a thread's while: below it, handing them over takes as long as scoring them."""

_CARRIERS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.float32),
    np.dtype(np.float16): np.dtype(np.uint16),
    np.dtype(np.uint16): np.dtype(np.int16),
    np.dtype(np.int8): np.dtype(np.int8),
}
Floats = NDArray[np.float32]


def score(
    queries: Floats,
    keys: NDArray[Any],
    scales: Floats | None = None,
    *,
    combine: str = "max",
    threads: int | None = None,
) -> Floats:
    """Returns the scores [batch, kv_heads, tokens], float32, of `keys` [batch, kv_heads, tokens, dim].

    `queries` [batch, heads, dim] float32; heads is a multiple of kv_heads (GQA), and those of one key head follow each
    other. `keys`: float32, float16, uint16 (the bits of bfloat16), or int8 with `scales` [batch, kv_heads, tokens],
    which are positive.
    `combine`: "max" or "sum" over the queries of a key head. ValueError names the argument that does not fit.
    """
    if keys.ndim != 4:
        raise ValueError(f"keys: shape {keys.shape}, [batch, kv_heads, tokens, dim] is needed")
    grouped = _grouped(queries, keys)
    # One page of all tokens: split where a thread's share ends.
    batch, heads, tokens, dim = keys.shape
    out = np.empty((batch, heads, tokens), np.float32)
    _check_scales(scales, keys, out.shape)
    rows = _walkable(keys)
    flat = _flat(rows)
    share = _share(tokens, dim * keys.itemsize, batch * heads, threads)
    jobs: list[Job] = []
    for b in range(batch):
        for h in range(heads):
            start = _start(rows, b, h)
            for first in range(0, tokens, share):
                part = slice(first, min(tokens, first + share))
                place = (flat, start + first * dim, 0, 1, part.stop - first)
                own = None if scales is None else scales[b, h, part]
                jobs.append(partial(_score_rows, place, grouped[b, h], COMBINE[combine], out[b, h, part], own))
    run_all(jobs, threads)
    return out


def score_pages(
    queries: Floats,
    pages: NDArray[Any],
    scales: Floats | None = None,
    *,
    combine: str = "max",
    threads: int | None = None,
) -> Floats:
    """Returns the scores [kv_heads, pages * page_tokens] of `pages` [pages, kv_heads, page_tokens, dim].

    As they come from a spill file: nothing is copied. `queries` [heads, dim], `scales` [pages, kv_heads, page_tokens];
    the rest as `score`. Rows of a partial page that hold no token score 0.
    """
    if pages.ndim != 4:
        raise ValueError(f"pages: shape {pages.shape}, [pages, kv_heads, page_tokens, dim] is needed")
    count, heads, tokens, dim = pages.shape
    grouped = _grouped(queries[None], pages)[0]
    out = np.empty((heads, count, tokens), np.float32)
    _check_scales(scales, pages, (count, heads, tokens))
    rows = _walkable(pages)
    flat, stride = _flat(rows), rows.strides[0] // rows.itemsize
    share = _share(count, tokens * dim * pages.itemsize, heads, threads)
    jobs: list[Job] = []
    for h in range(heads):
        for first in range(0, count, share):
            part = slice(first, min(count, first + share))
            place = (flat, _start(rows, first, h), stride, part.stop - first, tokens)
            own = None if scales is None else scales[part, h]
            jobs.append(partial(_score_rows, place, grouped[h], COMBINE[combine], out[h, part], own))
    run_all(jobs, threads)
    return out.reshape(heads, -1)


def _score_rows(
    place: tuple[NDArray[Any], int, int, int, int], queries: Floats, combine: int, out: Floats, scales: Floats | None
) -> None:
    """Scores one stretch of one head: 4 queries at a time while there are as many, then 2, then 1."""
    flat = out.reshape(-1)
    done = 0
    while done < len(queries):
        count = max(size for size in QUERIES if size <= len(queries) - done)
        loop = loop_for(queries.shape[1], count)
        loop(*place, queries[done : done + count], combine, done > 0, flat)
        done += count
    if scales is not None:
        out *= scales


def _grouped(queries: Floats, keys: NDArray[Any]) -> Floats:
    """`queries` [batch, heads, dim] as [batch, kv_heads, queries a key head, dim]."""
    if keys.dtype not in _CARRIERS:
        raise ValueError(f"keys: type {keys.dtype}, one of {', '.join(map(str, _CARRIERS))} is needed")
    kv_heads, dim = keys.shape[1], keys.shape[3]
    if queries.ndim != 3 or queries.shape[2] != dim or not queries.shape[1] or queries.shape[1] % kv_heads:
        raise ValueError(f"queries: shape {queries.shape}, [batch, a multiple of {kv_heads}, {dim}] is needed")
    if queries.dtype != np.float32:
        raise ValueError(f"queries: type {queries.dtype}, float32 is needed")
    return np.ascontiguousarray(queries).reshape(len(queries), kv_heads, -1, dim)


def _check_scales(scales: Floats | None, keys: NDArray[Any], shape: tuple[int, ...]) -> None:
    if (scales is None) == (keys.dtype == np.int8):
        raise ValueError(f"scales: they belong to int8 keys and only to these, the type is {keys.dtype}")
    if scales is not None and scales.shape != shape:
        raise ValueError(f"scales: shape {scales.shape}, {shape} is needed")


def _walkable(rows: NDArray[Any]) -> NDArray[Any]:
    """`rows`, copied only if the loops cannot walk over them: tokens of a head side by side, all else forward."""
    size = rows.itemsize
    side_by_side = rows.strides[2:] == (rows.shape[3] * size, size)
    forward = all(stride >= 0 and stride % size == 0 for stride in rows.strides)
    return rows if side_by_side and forward else np.ascontiguousarray(rows)


def _flat(rows: NDArray[Any]) -> NDArray[Any]:
    """All numbers from the first of `rows` to its last, one after the other, as the compiled loops take them."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(rows.shape, rows.strides, strict=True)) // rows.itemsize
    flat = np.lib.stride_tricks.as_strided(rows, (span if rows.size else 0,), (rows.itemsize,))
    carried: NDArray[Any] = flat.view(_CARRIERS[rows.dtype])
    return carried


def _start(rows: NDArray[Any], first: int, second: int) -> int:
    return (first * rows.strides[0] + second * rows.strides[1]) // rows.itemsize


def _share(count: int, size_bytes: int, heads: int, threads: int | None) -> int:
    """How many of `count` units of `size_bytes` one job takes: heads first, and a head in parts where they are too few."""
    parts = -(-(threads or processors()) // max(1, heads))
    return max(1, -(-count // parts), JOB_BYTES // max(1, size_bytes))
