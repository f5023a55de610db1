"""Scores of tokens: queries times keys, for every head of every sequence, by as many threads as there are processors.

Source: hillinfer.txt, section 3.2, "Hierarchical Importance Evaluation" and Algorithm 1, lines 5 and 10; the paper does
not say how the query heads of one key head (GQA) are combined: the largest product counts, or their sum.

All that the compiled loops contain is in this file: numba keeps them by its date alone. Types of numbers, as they see them:
float32, uint16 for the bits of a half, int16 for those of a bfloat16, int8.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from llmcache.arrays import Floats
from llmcache.kv.kernels.threads import Job, processors, run_all

MAX, SUM = 0, 1
QUERIES = (1, 2, 4)
"""How many queries a loop takes at a time: a key is widened once for all of them."""
COMBINE = {"max": MAX, "sum": SUM}
JOB_BYTES = 1 << 19
"""Keys that are worth a thread's while: below it, handing them over takes as long as scoring them."""
FEW_BYTES = 2 * JOB_BYTES
"""Keys of all heads that the caller scores itself."""

_CARRIERS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.float32),
    np.dtype(np.float16): np.dtype(np.uint16),
    np.dtype(np.uint16): np.dtype(np.int16),
    np.dtype(np.int8): np.dtype(np.int8),
}
# Sums in any order (several lanes), products contracted: infinities and NaN keep their meaning.
_MATH = {"reassoc", "contract", "nsz"}


def widens_halves() -> bool:
    """True if the processor widens halves itself; else it is done by shifts, which any can."""
    return platform.machine() == "aarch64" or bool(llvm.get_host_cpu_features().get("f16c", False))


def _half(builder: Any, bits: Any) -> Any:
    if widens_halves():
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
    return _half_by_shifts(builder, bits)


def _half_by_shifts(builder: Any, bits: Any) -> Any:
    """Exponent and mantissa moved to their places, the difference of the biases multiplied in (subnormals too)."""
    word, single = ir.IntType(32), ir.FloatType()
    wide = builder.zext(bits, word)
    magnitude = builder.and_(wide, word(0x7FFF))
    moved = builder.bitcast(builder.shl(magnitude, word(13)), single)
    finite = builder.bitcast(builder.fmul(moved, single(2.0**112)), word)
    special = builder.or_(builder.shl(magnitude, word(13)), word(0x7F800000))
    is_special = builder.icmp_unsigned(">=", magnitude, word(0x7C00))
    sign = builder.shl(builder.and_(wide, word(0x8000)), word(16))
    return builder.bitcast(builder.or_(builder.select(is_special, special, finite), sign), single)


def _bfloat(builder: Any, bits: Any) -> Any:
    word = ir.IntType(32)
    return builder.bitcast(builder.shl(builder.zext(bits, word), word(16)), ir.FloatType())


_WIDEN: dict[Any, Callable[[Any, Any], Any]] = {
    types.uint16: _half,
    types.int16: _bfloat,
    types.int8: lambda builder, value: builder.sitofp(value, ir.FloatType()),
    types.float32: lambda builder, value: value,
}


@intrinsic  # type: ignore[untyped-decorator]
def widened(typing_context: Any, value: Any) -> Any:
    """Is `value` as float32."""
    widen = _WIDEN[value]
    return types.float32(value), lambda context, builder, signature, values: widen(builder, values[0])


@intrinsic  # type: ignore[untyped-decorator]
def widened_by_shifts(typing_context: Any, value: Any) -> Any:
    """Is `value`, the bits of a half, as float32, on any processor."""
    return types.float32(value), lambda context, builder, signature, values: _half_by_shifts(builder, values[0])


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typing_context: Any, value: Any) -> Any:
    """Is the bits of a float32."""
    return types.uint32(value), lambda context, builder, signature, values: builder.bitcast(values[0], ir.IntType(32))


@intrinsic  # type: ignore[untyped-decorator]
def single_of(typing_context: Any, value: Any) -> Any:
    """Is the float32 that has the bits `value`, a uint32."""
    return types.float32(value), lambda context, builder, signature, values: builder.bitcast(values[0], ir.FloatType())


@functools.cache
def loop_for(dim: int, count: int) -> Callable[..., None]:
    """Returns the loop over keys of `dim` numbers and 1, 2 or 4 queries: constants in it, so that it unrolls, without what
    more queries would need.

    Its arguments: keys (flat, of one head from `start` on), start, numbers from one page to the next, pages, tokens a
    page, queries [count, dim] float32, combine (MAX, SUM), whether to add to what is in `out`, out [pages * tokens] float32.
    """

    def loop(keys, start, stride, pages, tokens, queries, combine, again, out):  # type: ignore[no-untyped-def]
        for page in range(pages):
            for token in range(tokens):
                at = np.uint64(start + page * stride + token * dim)
                a = b = c = d = np.float32(0)
                for j in range(dim):
                    key = widened(keys[at + np.uint64(j)])
                    a += key * queries[0, j]
                    if count > 1:
                        b += key * queries[1, j]
                    if count > 2:
                        c += key * queries[2, j]
                        d += key * queries[3, j]
                row = page * tokens + token
                if count > 1:
                    a = max(a, b) if combine == MAX else a + b
                if count > 2:
                    a = max(a, max(c, d)) if combine == MAX else a + (c + d)
                if again:
                    a = max(a, out[row]) if combine == MAX else a + out[row]
                out[row] = a

    compiler: Any = numba.njit
    compiled: Callable[..., None] = compiler(nogil=True, cache=True, fastmath=_MATH, error_model="numpy")(loop)
    return compiled


def score(
    queries: Floats, keys: NDArray[Any], scales: Floats | None = None, *, combine: str = "max", threads: int | None = None
) -> Floats:
    """Returns the scores [batch, kv_heads, tokens], float32, of `keys` [batch, kv_heads, tokens, dim].

    `queries` [batch, heads, dim] float32; heads is a multiple of kv_heads (GQA), and those of one key head follow each
    other. `keys`: float32, float16, uint16 (the bits of bfloat16), or int8 with `scales` [batch, kv_heads, tokens],
    which are positive.
    `combine`: "max" or "sum" over the queries of a key head. ValueError names the argument that does not fit.
    """
    if keys.ndim != 4 or len(queries) != len(keys):
        raise ValueError(f"keys: shape {keys.shape}, [{len(queries)}, kv_heads, tokens, dim] is needed")
    if scales is not None and scales.shape != keys.shape[:3]:
        raise ValueError(f"scales: shape {scales.shape}, {keys.shape[:3]} is needed")
    # Tokens are pages of one token to the loops.
    by_token = keys.swapaxes(1, 2)[:, :, :, None]
    of_token = [None] * len(keys) if scales is None else scales.swapaxes(1, 2)[..., None]
    each = zip(queries, by_token, of_token, strict=True)
    return np.stack([score_pages(asked, rows, own, combine=combine, threads=threads) for asked, rows, own in each])


def score_pages(
    queries: Floats, pages: NDArray[Any], scales: Floats | None = None, *, combine: str = "max", threads: int | None = None
) -> Floats:
    """Returns the scores [kv_heads, pages * page_tokens] of `pages` [pages, kv_heads, page_tokens, dim].

    As they come from a spill file: nothing is copied. `queries` [heads, dim], `scales` [pages, kv_heads, page_tokens];
    the rest as `score`. Rows of a partial page that hold no token score 0.
    """
    if pages.ndim != 4:
        raise ValueError(f"pages: shape {pages.shape}, [pages, kv_heads, page_tokens, dim] is needed")
    count, heads, tokens, dim = pages.shape
    grouped = _grouped(queries, pages)
    out = np.empty((heads, count, tokens), np.float32)
    if (scales is None) == (pages.dtype == np.int8):
        raise ValueError(f"scales: they belong to int8 keys and only to these, the type is {pages.dtype}")
    if scales is not None and scales.shape != pages.shape[:3]:
        raise ValueError(f"scales: shape {scales.shape}, {pages.shape[:3]} is needed")
    rows = _walkable(pages)
    flat, stride = _flat(rows), rows.strides[0] // rows.itemsize
    threads = 1 if pages.nbytes <= FEW_BYTES else threads
    share = _share(count, tokens * dim * pages.itemsize, heads, threads)
    jobs: list[Job] = []
    for h in range(heads):
        for first in range(0, count, share):
            part = slice(first, min(count, first + share))
            start = first * stride + h * rows.strides[1] // rows.itemsize
            place = (flat, start, stride, part.stop - first, tokens)
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
    """`queries` [heads, dim] as [kv_heads, queries a key head, dim]."""
    if keys.dtype not in _CARRIERS:
        raise ValueError(f"keys: type {keys.dtype}, one of {', '.join(map(str, _CARRIERS))} is needed")
    kv_heads, dim = keys.shape[1], keys.shape[3]
    if queries.ndim != 2 or queries.shape[1] != dim or not len(queries) or len(queries) % kv_heads:
        raise ValueError(f"queries: shape {queries.shape}, [a multiple of {kv_heads}, {dim}] is needed")
    if queries.dtype != np.float32:
        raise ValueError(f"queries: type {queries.dtype}, float32 is needed")
    return np.ascontiguousarray(queries).reshape(kv_heads, -1, dim)


def _walkable(rows: NDArray[Any]) -> NDArray[Any]:
    """`rows`, copied only if the loops cannot walk over them: tokens of a head side by side, all else forward."""
    size = rows.itemsize
    side_by_side = rows.strides[3] == size and (rows.shape[2] == 1 or rows.strides[2] == rows.shape[3] * size)
    forward = all(stride >= 0 and stride % size == 0 for stride in rows.strides)
    return rows if side_by_side and forward else np.ascontiguousarray(rows)


def _flat(rows: NDArray[Any]) -> NDArray[Any]:
    """All numbers from the first of `rows` to its last, one after the other, as the compiled loops take them."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(rows.shape, rows.strides, strict=True)) // rows.itemsize
    flat = np.lib.stride_tricks.as_strided(rows, (span if rows.size else 0,), (rows.itemsize,))
    carried: NDArray[Any] = flat.view(_CARRIERS[rows.dtype])
    return carried


def _share(count: int, size_bytes: int, heads: int, threads: int | None) -> int:
    """How many of `count` units of `size_bytes` one job takes: heads first, and a head in parts where they are too few."""
    parts = -(-(threads or processors()) // max(1, heads))
    return max(1, -(-count // parts), JOB_BYTES // max(1, size_bytes))
