"""Compiled inner loops of scoring. Everything they contain is in this file: numba keeps them by its date alone.

Types of numbers, as the loops see them: float32, uint16 for the bits of a half, int16 for those of a bfloat16, int8.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

MAX, SUM = 0, 1
QUERIES = (1, 2, 4)
"""How many queries a loop takes at a time: a key is widened once for all of them."""

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


def _njit(function: Callable[..., None]) -> Callable[..., None]:
    compiler: Any = numba.njit
    compiled: Callable[..., None] = compiler(nogil=True, cache=True, fastmath=_MATH, error_model="numpy")(function)
    return compiled


@functools.cache
def loop_for(dim: int, queries: int) -> Callable[..., None]:
    """Returns the loop over keys of `dim` numbers and 1, 2 or 4 queries; `dim` is a constant in it, so it unrolls.

    Its arguments: keys (flat, of one head from `start` on), start, numbers from one page to the next, pages, tokens a
    page, queries [n, dim] float32, combine (MAX, SUM), whether to add to what is in `out`, out [pages * tokens] float32.
    """
    return {1: _one, 2: _two, 4: _four}[queries](dim)


def _one(dim: int) -> Callable[..., None]:
    def loop(keys, start, stride, pages, tokens, queries, combine, again, out):  # type: ignore[no-untyped-def]
        for page in range(pages):
            for token in range(tokens):
                at = np.uint64(start + page * stride + token * dim)
                a = np.float32(0)
                for j in range(dim):
                    a += widened(keys[at + np.uint64(j)]) * queries[0, j]
                row = page * tokens + token
                if again:
                    a = max(a, out[row]) if combine == MAX else a + out[row]
                out[row] = a

    return _njit(loop)


def _two(dim: int) -> Callable[..., None]:
    def loop(keys, start, stride, pages, tokens, queries, combine, again, out):  # type: ignore[no-untyped-def]
        for page in range(pages):
            for token in range(tokens):
                at = np.uint64(start + page * stride + token * dim)
                a = b = np.float32(0)
                for j in range(dim):
                    key = widened(keys[at + np.uint64(j)])
                    a += key * queries[0, j]
                    b += key * queries[1, j]
                row = page * tokens + token
                a = max(a, b) if combine == MAX else a + b
                if again:
                    a = max(a, out[row]) if combine == MAX else a + out[row]
                out[row] = a

    return _njit(loop)


def _four(dim: int) -> Callable[..., None]:
    def loop(keys, start, stride, pages, tokens, queries, combine, again, out):  # type: ignore[no-untyped-def]
        for page in range(pages):
            for token in range(tokens):
                at = np.uint64(start + page * stride + token * dim)
                a = b = c = d = np.float32(0)
                for j in range(dim):
                    key = widened(keys[at + np.uint64(j)])
                    a += key * queries[0, j]
                    b += key * queries[1, j]
                    c += key * queries[2, j]
                    d += key * queries[3, j]
                row = page * tokens + token
                a = max(max(a, b), max(c, d)) if combine == MAX else (a + b) + (c + d)
                if again:
                    a = max(a, out[row]) if combine == MAX else a + out[row]
                out[row] = a

    return _njit(loop)
