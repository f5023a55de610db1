"""Scores of tokens: products of queries and keys for each head.

Source: hillinfer.txt, section 3.2 and Algorithm 1, lines 5 and 10. The paper does not say how to combine the query
heads of a key head (GQA): `combine` selects the largest product or the sum.

numba's cache depends on the date of this file only, so everything that the loops inline is in it. The loops see keys as
float32, uint16 for the bits of fp16, int16 for those of bfloat16, or int8.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from llmcache.arrays import Bytes, Floats, Int64s
from llmcache.kv.kernels.threads import Job, processors, run_all

MAX, SUM = 0, 1
QUERIES = (1, 2, 4)  # numbers of queries for which there are loops: a key is converted once for all queries of a loop
COMBINE = {"max": MAX, "sum": SUM}
JOB_BYTES = 1 << 19  # bytes of keys in a job: for fewer, the overhead of a thread exceeds the work
FEW_BYTES = 4 * JOB_BYTES  # up to this many bytes of keys, the calling thread does all work
FEW_WEIGHTS = 1 << 20  # up to this many weights over all queries, the calling thread does all work

Place = tuple[NDArray[Any], int, int, int, int, int, int]
"""First arguments of a loop: all keys as a flat array; the first index; distances of pages and of heads; numbers of pages,
of heads, and of tokens in a page. Keys are read in place, all heads of a page together."""
Loop = Callable[..., None]
_CARRIERS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.float32),
    np.dtype(np.float16): np.dtype(np.uint16),
    np.dtype(np.uint16): np.dtype(np.int16),
    np.dtype(np.int8): np.dtype(np.int8),
}
_SERIES = tuple(np.float32(math.log(2) ** power / math.factorial(power)) for power in range(5, -1, -1))
"""Coefficients of 2^x for x from -1/2 to 1/2, without the first."""
# Sums may be reordered (vectorized) and products contracted; infinities and NaN keep their meaning.
_MATH = {"reassoc", "contract", "nsz"}


def widens_halves() -> bool:
    """Return whether the CPU has an instruction that converts fp16."""
    return platform.machine() == "aarch64" or bool(llvm.get_host_cpu_features().get("f16c", False))


def _half(builder: Any, bits: Any) -> Any:
    if widens_halves():
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
    return _half_by_shifts(builder, bits)


def _half_by_shifts(builder: Any, bits: Any) -> Any:
    """Convert fp16: shift exponent and mantissa, then multiply by the difference of the biases (correct for subnormals)."""
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
    """Return `value` as float32."""
    widen = _WIDEN[value]
    return types.float32(value), lambda context, builder, signature, values: widen(builder, values[0])


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typing_context: Any, value: Any) -> Any:
    """Return the bits of a float32."""
    return types.uint32(value), lambda context, builder, signature, values: builder.bitcast(values[0], ir.IntType(32))


@intrinsic  # type: ignore[untyped-decorator]
def single_of(typing_context: Any, value: Any) -> Any:
    """Return the float32 with the bits `value`, a uint32."""
    return types.float32(value), lambda context, builder, signature, values: builder.bitcast(values[0], ir.FloatType())


def _compiled(loop: Any) -> Loop:
    compiler: Any = numba.njit
    compiled: Loop = compiler(nogil=True, cache=True, fastmath=_MATH, error_model="numpy")(loop)
    return compiled


@functools.cache
def loop_for(dim: int, count: int) -> Loop:
    """Return the loop that scores keys of `dim` numbers for 1, 2 or 4 queries.

    Its arguments: a `Place`, queries [heads, count, dim] float32, combine (MAX, SUM), whether to add to `out`, and out
    [heads, pages, tokens] float32.
    """

    def loop(  # type: ignore[no-untyped-def]
        keys, start, stride, head_stride, pages, heads, tokens, queries, combine, accumulate, out
    ):
        for page, head in np.ndindex(pages, heads):
            for token in range(tokens):
                at = np.uint64(start + page * stride + head * head_stride + token * dim)
                a = b = c = d = np.float32(0)
                for j in range(dim):
                    key = widened(keys[at + np.uint64(j)])
                    a += key * queries[head, 0, j]
                    if count > 1:
                        b += key * queries[head, 1, j]
                    if count > 2:
                        c += key * queries[head, 2, j]
                        d += key * queries[head, 3, j]
                if count > 1:
                    a = max(a, b) if combine == MAX else a + b
                if count > 2:
                    a = max(a, max(c, d)) if combine == MAX else a + (c + d)
                if accumulate:
                    before = out[head, page, token]
                    a = max(a, before) if combine == MAX else a + before
                out[head, page, token] = a

    return _compiled(loop)


@functools.cache
def products_for(dim: int, count: int, scaled: bool) -> Loop:
    """Return the loop that computes separate products of keys of `dim` numbers and 1 to 4 queries.

    Its arguments: a `Place`, scales [pages, heads, tokens] float32 (used if `scaled`), queries [heads, count, dim] float32,
    out [heads, count, all] float32, and the first index in `out`.
    """

    def loop(  # type: ignore[no-untyped-def]
        keys, start, stride, head_stride, pages, heads, tokens, scales, queries, out, first
    ):
        for page, head in np.ndindex(pages, heads):
            for token in range(tokens):
                at = np.uint64(start + page * stride + head * head_stride + token * dim)
                a = b = c = d = np.float32(0)
                for j in range(dim):
                    key = widened(keys[at + np.uint64(j)])
                    a += key * queries[head, 0, j]
                    if count > 1:
                        b += key * queries[head, 1, j]
                    if count > 2:
                        c += key * queries[head, 2, j]
                    if count > 3:
                        d += key * queries[head, 3, j]
                row = first + page * tokens + token
                scale = scales[page, head, token] if scaled else np.float32(1)
                out[head, 0, row] = a * scale
                if count > 1:
                    out[head, 1, row] = b * scale
                if count > 2:
                    out[head, 2, row] = c * scale
                if count > 3:
                    out[head, 3, row] = d * scale

    return _compiled(loop)


@functools.cache
def packed_for(dim: int, count: int) -> Loop:
    """Return the loop of `packed_products` for keys of `dim` numbers and 1 to 4 queries.

    Its arguments are those of `products_for`, but keys are bytes, scales are the bits of fp16, and `middles` [heads, count]
    is subtracted from the products.
    """
    quarter = dim // 4

    def loop(  # type: ignore[no-untyped-def]
        keys, start, stride, head_stride, pages, heads, tokens, scales, queries, middles, out, first
    ):
        for page, head in np.ndindex(pages, heads):
            for token in range(tokens):
                at = np.uint64(start + page * stride + head * head_stride + token * quarter)
                a = b = c = d = np.float32(0)
                for j in range(quarter):
                    four = np.int32(keys[at + np.uint64(j)])
                    for part in range(4):
                        level = np.float32((four >> (2 * part)) & 3)
                        a += level * queries[head, 0, part * quarter + j]
                        if count > 1:
                            b += level * queries[head, 1, part * quarter + j]
                        if count > 2:
                            c += level * queries[head, 2, part * quarter + j]
                        if count > 3:
                            d += level * queries[head, 3, part * quarter + j]
                row, scale = first + page * tokens + token, widened(scales[page, head, token])
                out[head, 0, row] = (a - middles[head, 0]) * scale
                if count > 1:
                    out[head, 1, row] = (b - middles[head, 1]) * scale
                if count > 2:
                    out[head, 2, row] = (c - middles[head, 2]) * scale
                if count > 3:
                    out[head, 3, row] = (d - middles[head, 3]) * scale

    return _compiled(loop)


def score(
    queries: Floats, keys: NDArray[Any], scales: Floats | None = None, *, combine: str = "max", threads: int | None = None
) -> Floats:
    """Return the scores [batch, kv_heads, tokens], float32, of `keys` [batch, kv_heads, tokens, dim].

    `queries` [batch, heads, dim] float32; the heads of a key head are adjacent (GQA). `keys`: float32, float16, uint16 (the
    bits of bfloat16), or int8 with positive `scales` [batch, kv_heads, tokens]. ValueError: an argument is invalid.
    """
    if keys.ndim != 4 or len(queries) != len(keys):
        raise ValueError(f"keys: must be [{len(queries)}, kv_heads, tokens, dim], not {keys.shape}")
    if scales is not None and scales.shape != keys.shape[:3]:
        raise ValueError(f"scales: must be {keys.shape[:3]}, not {scales.shape}")
    # The loops take tokens as pages of one token.
    by_token = keys.swapaxes(1, 2)[:, :, :, None]
    of_token = [None] * len(keys) if scales is None else scales.swapaxes(1, 2)[..., None]
    each = zip(queries, by_token, of_token, strict=True)
    return np.stack([score_pages(some, rows, own, combine=combine, threads=threads) for some, rows, own in each])


def score_pages(
    queries: Floats, pages: NDArray[Any], scales: Floats | None = None, *, combine: str = "max", threads: int | None = None
) -> Floats:
    """Return the scores [kv_heads, pages * page_tokens] of `pages` [pages, kv_heads, page_tokens, dim], read in place.

    `queries` [heads, dim], `scales` [pages, kv_heads, page_tokens]; the rest as `score`. Padding scores 0.
    """
    grouped = _grouped(queries, pages, scales)
    count, heads, tokens, _ = pages.shape
    out = np.empty((heads, count, tokens), np.float32)
    jobs: list[Job] = []
    for part, place in _places(pages, threads):
        own = None if scales is None else scales[part].swapaxes(0, 1)
        jobs.append(partial(_score_rows, place, grouped, COMBINE[combine], out[:, part], own))
    run_all(jobs, _threads(pages, threads))
    return out.reshape(heads, -1)


def products(queries: Floats, pages: NDArray[Any], scales: Floats | None = None, *, threads: int | None = None) -> Floats:
    """Return the products [kv_heads, queries of each, pages * page_tokens]; arguments as `score_pages`."""
    grouped, (_, heads, tokens, dim) = _grouped(queries, pages, scales), pages.shape
    of_tokens = np.empty((0, heads, tokens), np.float32) if scales is None else scales
    return _products(lambda count: products_for(dim, count, scales is not None), pages, of_tokens, threads, grouped)


def packed_products(queries: Floats, keys: Bytes, scales: NDArray[np.uint16], *, threads: int | None = None) -> Floats:
    """Return the products [kv_heads, queries of each, pages * page_tokens] of queries and keys of two bits per number.

    `queries` [kv_heads, queries of each, dim] float32. `keys` [pages, kv_heads, page_tokens, dim // 4]: byte j contains,
    from the lowest bits up, the levels 0 to 3 (for -1.5 to 1.5) of the numbers j, j + dim // 4, and so on. `scales`: the
    bits of a factor in fp16 for each key.
    """
    middles = 1.5 * queries.sum(axis=2)
    return _products(partial(packed_for, queries.shape[2]), keys, scales, threads, queries, middles)


def _products(
    loop_of: Callable[[int], Loop], pages: NDArray[Any], scales: NDArray[Any], threads: int | None, *per_query: Floats
) -> Floats:
    tokens, (heads, group) = pages.shape[2], per_query[0].shape[:2]
    out = np.empty((heads, group, len(pages) * tokens), np.float32)
    jobs: list[Job] = []
    for part, place in _places(pages, threads):
        for q in range(0, group, QUERIES[-1]):
            *some, into = (side[:, q : q + QUERIES[-1]] for side in (*per_query, out))
            jobs.append(partial(loop_of(into.shape[1]), *place, scales[part], *some, into, part.start * tokens))
    run_all(jobs, _threads(pages, threads))
    return out


def weights(inside: Floats, around: Floats, scale: float, threads: int | None = None) -> tuple[Floats, Floats]:
    """Return the softmax weights [kv_heads, n] of `inside`, summed over queries, and each query's log-sum-exp.

    The softmax is over the products `inside` [kv_heads, queries of each, n] and `around` [..., m], times `scale`. The
    weights of each query overwrite `inside`. The relative error is 2e-7.
    """
    out, sums = np.empty((inside.shape[0], inside.shape[2]), np.float32), np.empty(inside.shape[:2], np.float32)
    factor = np.float32(scale / math.log(2))
    jobs = [partial(_add_weights, *head, factor) for head in zip(inside, around, out, sums, strict=True)]
    run_all(jobs, 1 if inside.size <= FEW_WEIGHTS else threads)
    return out, sums


def left_out(inside: Floats, chosen: Int64s, threads: int | None = None) -> Floats:
    """Return the share [kv_heads, queries of each] of weights that is not on the chosen tokens.

    `inside` [kv_heads, queries of each, n] are weights; `chosen` [kv_heads, k] is ascending, repeated ones count once.
    """
    out = np.empty(inside.shape[:2], np.float32)
    jobs = [partial(_leave_out, *head) for head in zip(inside, chosen, out, strict=True)]
    run_all(jobs, 1 if inside.size <= FEW_WEIGHTS else threads)
    return out


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz", "nnan"}, error_model="numpy")
def _leave_out(inside, chosen, out):  # type: ignore[no-untyped-def]
    for q in range(inside.shape[0]):
        row, left = inside[q], np.float32(0)
        for i in range(row.size):
            left += row[i]
        for i in range(chosen.size):
            if i == 0 or chosen[i] != chosen[i - 1]:
                left -= row[chosen[i]]
        out[q] = max(np.float32(0), left)


@numba.njit(inline="always")
def single_power(x):  # type: ignore[no-untyped-def]
    """Return 2 to the power of `x`, a float32 of at most 0."""
    x = max(x, np.float32(-126))
    whole = np.int32(math.floor(x + np.float32(0.5)))
    rest = x - np.float32(whole)
    found = np.float32(1.5403530e-4)
    for factor in _SERIES:
        found = found * rest + factor
    return found * single_of(np.uint32((whole + 127) << 23))


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz", "nnan"}, error_model="numpy")
def _add_weights(inside, around, into, sums, scale):  # type: ignore[no-untyped-def]
    for q in range(inside.shape[0]):
        row, others, most = inside[q], around[q], np.float32(-np.inf)
        for i in range(row.size):
            most = max(most, row[i])
        for i in range(others.size):
            most = max(most, others[i])
        total = np.float32(0)
        for i in range(row.size):
            row[i] = single_power((row[i] - most) * scale)
            total += row[i]
        for i in range(others.size):
            total += single_power((others[i] - most) * scale)
        sums[q] = most * scale * np.float32(math.log(2)) + math.log(total)
        share = np.float32(1) / total
        for i in range(row.size):
            row[i] *= share
            into[i] = row[i] if q == 0 else into[i] + row[i]


def _score_rows(place: Place, queries: Floats, combine: int, out: Floats, scales: Floats | None) -> None:
    done, group = 0, queries.shape[1]
    while done < group:
        count = max(size for size in QUERIES if size <= group - done)
        loop = loop_for(queries.shape[2], count)
        loop(*place, queries[:, done : done + count], combine, done > 0, out)
        done += count
    if scales is not None:
        out *= scales


def _grouped(queries: Floats, pages: NDArray[Any], scales: Floats | None) -> Floats:
    if pages.ndim != 4:
        raise ValueError(f"pages: must be [pages, kv_heads, page_tokens, dim], not {pages.shape}")
    if pages.dtype not in _CARRIERS:
        raise ValueError(f"keys: dtype must be one of {', '.join(map(str, _CARRIERS))}, not {pages.dtype}")
    kv_heads, dim = pages.shape[1], pages.shape[3]
    if queries.ndim != 2 or queries.shape[1] != dim or not len(queries) or len(queries) % kv_heads:
        raise ValueError(f"queries: must be [a multiple of {kv_heads}, {dim}], not {queries.shape}")
    if queries.dtype != np.float32:
        raise ValueError(f"queries: dtype must be float32, not {queries.dtype}")
    if (scales is None) == (pages.dtype == np.int8):
        raise ValueError(f"scales: must be given for int8 keys, and only for these, not for {pages.dtype}")
    if scales is not None and scales.shape != pages.shape[:3]:
        raise ValueError(f"scales: must be {pages.shape[:3]}, not {scales.shape}")
    return np.ascontiguousarray(queries).reshape(kv_heads, -1, dim)


def _threads(pages: NDArray[Any], threads: int | None) -> int | None:
    return 1 if pages.nbytes <= FEW_BYTES else threads


def _places(pages: NDArray[Any], threads: int | None) -> Iterator[tuple[slice, Place]]:
    count, heads, tokens, dim = pages.shape
    rows = _walkable(pages)
    flat, stride, head_stride = _flat(rows), rows.strides[0] // rows.itemsize, rows.strides[1] // rows.itemsize
    parts = _threads(pages, threads) or processors()
    share = max(1, -(-count // parts), JOB_BYTES // max(1, heads * tokens * dim * pages.itemsize))
    for first in range(0, count, share):
        part = slice(first, min(count, first + share))
        yield part, (flat, first * stride, stride, head_stride, part.stop - first, heads, tokens)


def _walkable(rows: NDArray[Any]) -> NDArray[Any]:
    size = rows.itemsize
    side_by_side = rows.strides[3] == size and (rows.shape[2] == 1 or rows.strides[2] == rows.shape[3] * size)
    forward = all(stride >= 0 and stride % size == 0 for stride in rows.strides)
    return rows if side_by_side and forward else np.ascontiguousarray(rows)


def _flat(rows: NDArray[Any]) -> NDArray[Any]:
    if rows.flags.c_contiguous:
        flat = rows.reshape(-1)
    else:
        span = 1 + sum((size - 1) * stride for size, stride in zip(rows.shape, rows.strides, strict=True)) // rows.itemsize
        flat = np.lib.stride_tricks.as_strided(rows, (span if rows.size else 0,), (rows.itemsize,))
    return flat.view(_CARRIERS.get(rows.dtype, rows.dtype))
