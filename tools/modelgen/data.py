"""Random tensor data, made piece by piece: a model larger than memory can be generated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_PIECE_BYTES = 8 * 2**20

Q8_0_VALUES, Q8_0_BYTES = 32, 34
# Uniform int8 has a standard deviation of 73; weights should have 0.02, so that activations stay finite.
_SCALE = np.frombuffer(np.float16(0.02 / 73).tobytes(), np.uint8)

# bfloat16 with random sign, mantissa and two low exponent bits: magnitudes from 2**-7 to 2**-3.
_BF16_RANDOM, _BF16_BASE, BF16_ONE = 0x81FF, 0x3C00, 0x3F80


def _generator(seed: int, index: int) -> np.random.Generator:
    """A generator for tensor `index`: the same data whatever was generated before it."""
    return np.random.Generator(np.random.SFC64([seed, index]))


def q8_0(seed: int, index: int, values: int) -> Iterator[bytes]:
    """Q8_0 blocks (a float16 scale, 32 int8) of `values` random values; quantised from nothing, hence fast."""
    random = _generator(seed, index)
    blocks = values // Q8_0_VALUES
    step = _PIECE_BYTES // Q8_0_BYTES
    for start in range(0, blocks, step):
        count = min(step, blocks - start)
        piece = np.frombuffer(bytearray(random.bytes(count * Q8_0_BYTES)), np.int8)
        np.maximum(piece, -127, out=piece)  # quantisers never write -128
        piece.view(np.uint8).reshape(count, Q8_0_BYTES)[:, :2] = _SCALE
        yield piece.tobytes()


def bf16(seed: int, index: int, values: int) -> Iterator[bytes]:
    """`values` random bfloat16 numbers."""
    random = _generator(seed, index)
    step = _PIECE_BYTES // 2
    for start in range(0, values, step):
        piece = np.frombuffer(random.bytes(2 * min(step, values - start)), np.uint16)
        yield ((piece & _BF16_RANDOM) | _BF16_BASE).tobytes()


def f32(seed: int, index: int, values: int) -> bytes:
    """`values` random float32 numbers, as large as those of trained routers."""
    return (0.02 * _generator(seed, index).standard_normal(values)).astype("<f4").tobytes()


def f32_ones(values: int) -> bytes:
    """`values` times 1.0 as float32."""
    return np.ones(values, np.float32).tobytes()


def bf16_ones(values: int) -> bytes:
    """`values` times 1.0 as bfloat16."""
    return np.full(values, BF16_ONE, np.uint16).tobytes()
