"""The protocol between host and *emulated* device: shared memory for data, and a pipe for messages.

A command is its name and arguments; the replies are `Data` in a ring, and finally a dict or an error. Only the device
changes `produced`, and only the host changes `consumed`, each by an aligned store of 8 bytes; the host owns the bytes
between them.

Scores are sent in blocks of up to n adjacent tokens, 4n bytes and a header. Source: hillinfer.txt, sections 3.2 and 4.4.
Differs from the paper: fp16 cannot represent all positions above 2048, so a block contains 16-bit offsets from a position in
its header. Scores outside the range of fp16 are clamped.

For a gather, both ends divide a request into the same batches of pages, with the rows of a batch in the order of heads.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Bytes, Floats, Int64s
from llmcache.kv.kernels.scores import bits_of, single_of
from llmcache.kv.spill import KvShape

RING_BYTES = 1 << 23
WRITE_BYTES = 1 << 22
"""Bytes of keys and values, or of tokens, that one command writes."""
COMMAND_BYTES, COMPLETION_BYTES = 64, 16
"""Bytes of an NVMe command and of a completion on the link."""
HEADER_BYTES = 16
"""Bytes of the header of a score block on the link: head (4), position of the first token (8), tokens (4)."""
BLOCK_TOKENS = 1024
MOST_TOKENS = 1 << 16
"""Largest score block in tokens: offsets have 16 bits."""

_RING_AT = 4096
_OFFSET, _SCORE = 0, 1


class Data(NamedTuple):
    """Data in the ring: `size_bytes` at `at`, which only increases. `head` and `base` describe a score block."""

    at: int
    size_bytes: int
    head: int = 0
    base: int = 0


def receive(pipe: Connection) -> Any:
    """Return a message; EOFError if the other end has ended."""
    try:
        return pipe.recv()
    except OSError as error:  # an incomplete message, or a reset
        raise EOFError(str(error)) from error


@dataclass(frozen=True)
class ScoreBlock:
    """Scores, float32 [tokens], of the tokens at `positions`, int64 [tokens], for key head `head`."""

    head: int
    positions: Int64s
    scores: Floats


class Shared:
    """The memory that both ends map."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _RING_AT + RING_BYTES)
        whole = np.frombuffer(self._map, np.uint8)
        self.counters: NDArray[np.uint64] = whole[:16].view(np.uint64)  # produced, consumed
        self.ring = whole[_RING_AT:]

    @staticmethod
    def make() -> int:
        fd = os.memfd_create("llmcache-csd", os.MFD_CLOEXEC)
        os.ftruncate(fd, _RING_AT + RING_BYTES)
        return fd

    def bytes_of(self, data: Data) -> Bytes:
        """Return a view, which the caller must copy before it calls `consumed`."""
        return self.ring[data.at % RING_BYTES : data.at % RING_BYTES + data.size_bytes]

    def consumed(self, data: Data) -> None:
        self.counters[1] = data.at + data.size_bytes


def shares(shape: KvShape, positions: list[Int64s]) -> Iterator[tuple[Int64s, list[slice]]]:
    """Divide a request for the rows at `positions` (an ascending array for each head) into batches.

    Yields the ascending pages of each batch, and a slice of the requested rows for each head.
    """
    size = shape.page_tokens
    pages = np.unique(np.concatenate(positions) // size)
    starts = np.cumsum([0, *map(len, positions)])
    most = max(1, RING_BYTES // 8 // max(shape.slot_sizes))
    for first in range(0, len(pages), most):
        part = pages[first : first + most]
        ends = (part[0] * size, (part[-1] + 1) * size)
        bounds = [np.searchsorted(of_head, ends) + start for of_head, start in zip(positions, starts, strict=False)]
        yield part, [slice(int(low), int(high)) for low, high in bounds]


def decode(head: int, base: int, data: NDArray[np.uint16]) -> ScoreBlock:
    """Return the block in `data` [tokens, 2], whose first token is at `base`."""
    return ScoreBlock(head, base + data[:, _OFFSET].astype(np.int64), data[:, _SCORE].view(np.float16).astype(np.float32))


@numba.njit(inline="always")
def _narrowed(value):  # type: ignore[no-untyped-def]
    """Return the bits of the nearest fp16 number, ties to even; infinities become the largest number."""
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
def encode(scores, out):  # type: ignore[no-untyped-def]
    """Write offsets and fp16 scores of adjacent tokens to `out` [tokens, 2] uint16."""
    for i in range(scores.size):
        out[i, _OFFSET] = i
        out[i, _SCORE] = _narrowed(scores[i])
