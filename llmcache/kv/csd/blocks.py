"""Score blocks: the scores of up to n neighbouring tokens as they cross the link, 4n bytes and a header.

Source: hillinfer.txt, section 3.2 (<Token pos, Score>) and 4.4 ("2n half-precision floating-point values (i.e., 4n
bytes)"). Differs from the paper: a half cannot tell positions above 2048 apart, so a block carries 16-bit offsets and
its header the position they count from: still 4n bytes. Scores beyond the range of halves become its ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from llmcache.kv.kernels.compiled import bits_of, single_of, widened

BLOCK_TOKENS = 1024
MOST_TOKENS = 1 << 16
"""What 16 bits can tell apart."""
HEADER_BYTES = 16
"""On the link: head (4), position of the first token (8), tokens (4)."""

_SCORE, _OFFSET = 1, 0


@dataclass(frozen=True)
class ScoreBlock:
    """Scores, float32 [tokens], of the tokens at `positions`, int64 [tokens], for key head `head`."""

    head: int
    positions: NDArray[np.int64]
    scores: NDArray[np.float32]


def encode(scores: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    """Writes the scores of neighbouring tokens to `out` [tokens, 2]: offsets, and scores rounded to halves."""
    _encode(scores, out)


def decode(head: int, base: int, data: NDArray[np.uint16]) -> ScoreBlock:
    """Returns the block in `data` [tokens, 2], whose first token is at `base`."""
    positions, scores = np.empty(len(data), np.int64), np.empty(len(data), np.float32)
    _decode(data, base, positions, scores)
    return ScoreBlock(head, positions, scores)


@numba.njit(inline="always")
def _narrowed(value):  # type: ignore[no-untyped-def]
    """Bits of the half nearest to a float32, ties to even; the largest half in place of an infinity."""
    bits = bits_of(value)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    size = bits & np.uint32(0x7FFFFFFF)
    if size > np.uint32(0x7F800000):
        return np.uint16(sign | np.uint32(0x7E00))
    if size >= np.uint32(0x477FF000):
        return np.uint16(sign | np.uint32(0x7BFF))
    if size < np.uint32(0x38800000):  # subnormal: adding 0.5 moves its bits to the end of the mantissa, rounded
        moved = bits_of(single_of(np.uint32(size)) + np.float32(0.5))
        return np.uint16(sign | (moved - np.uint32(0x3F000000)))
    odd = (size >> np.uint32(13)) & np.uint32(1)
    return np.uint16(sign | ((size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)))


@numba.njit(nogil=True, cache=True)
def _encode(scores, out):  # type: ignore[no-untyped-def]
    for i in range(scores.size):
        out[i, _OFFSET] = i
        out[i, _SCORE] = _narrowed(scores[i])


@numba.njit(nogil=True, cache=True)
def _decode(data, base, positions, scores):  # type: ignore[no-untyped-def]
    for i in range(len(data)):
        positions[i] = base + data[i, _OFFSET]
        scores[i] = widened(data[i, _SCORE])
