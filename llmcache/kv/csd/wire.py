"""Between host and *emulated* device: what lies in the memory that both see; messages go over a pipe of multiprocessing.

A command is its name and arguments; what comes back is `Data` in the ring, and in the end a dict or the error. Shared memory
has no name (memfd), so nothing is left behind whoever dies. It holds two counters and a ring for what goes to the host. Only
the device moves `produced` and only the host moves `consumed`, each by one aligned store of 8 bytes; what lies between them
belongs to the host.

Scores cross as blocks, the scores of up to n neighbouring tokens: 4n bytes and a header. Source: hillinfer.txt, section 3.2
(<Token pos, Score>) and 4.4 ("2n half-precision floating-point values (i.e., 4n bytes)"). Differs from the paper: a half
cannot tell positions above 2048 apart, so a block carries 16-bit offsets and its header the position they count from.
Scores beyond the range of halves become its ends.

Where rows are gathered, these alone cross, not the pages that they lie in. Both ends divide a request in the same way, so
that neither has to tell the other what comes when: in shares of pages that fit the ring, and within a share head after head.
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
"""Of keys and values, or of tokens, that one command writes."""
COMMAND_BYTES, COMPLETION_BYTES = 64, 16
"""What NVMe puts on the link for any command and any completion."""
HEADER_BYTES = 16
"""Of a score block, on the link: head (4), position of the first token (8), tokens (4)."""
BLOCK_TOKENS = 1024
MOST_TOKENS = 1 << 16
"""Tokens of a score block: what 16 bits can tell apart."""

_RING_AT = 4096
_OFFSET, _SCORE = 0, 1


class Data(NamedTuple):
    """Data in the ring: `size_bytes` at `at` (ever increasing). `head` and `base`: of a score block."""

    at: int
    size_bytes: int
    head: int = 0
    base: int = 0


def receive(pipe: Connection) -> Any:
    """Returns what the other end has sent; EOFError if it has ended, before a message or amid one."""
    try:
        return pipe.recv()
    except OSError as error:  # half a message, or a reset
        raise EOFError(str(error)) from error


@dataclass(frozen=True)
class ScoreBlock:
    """Scores, float32 [tokens], of the tokens at `positions`, int64 [tokens], for key head `head`."""

    head: int
    positions: Int64s
    scores: Floats


class Shared:
    """The memory that both ends see."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _RING_AT + RING_BYTES)
        whole = np.frombuffer(self._map, np.uint8)
        self.counters: NDArray[np.uint64] = whole[:16].view(np.uint64)  # produced, consumed
        self.ring = whole[_RING_AT:]

    @staticmethod
    def make() -> int:
        """Returns a descriptor of fresh memory, for both ends."""
        fd = os.memfd_create("llmcache-csd", os.MFD_CLOEXEC)
        os.ftruncate(fd, _RING_AT + RING_BYTES)
        return fd

    def bytes_of(self, data: Data) -> Bytes:
        """Returns what `data` tells of; the host must copy it before it is `consumed`."""
        return self.ring[data.at % RING_BYTES : data.at % RING_BYTES + data.size_bytes]

    def consumed(self, data: Data) -> None:
        """Gives the room of `data` and all before it back."""
        self.counters[1] = data.at + data.size_bytes


def shares(shape: KvShape, positions: list[Int64s]) -> Iterator[tuple[Int64s, list[slice]]]:
    """Yields a request for the rows at `positions` (one ascending array a head) in shares.

    Each is pages, ascending, and which of all the rows that were asked for lie in them: a slice for each head.
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
    """Returns the block in `data` [tokens, 2], whose first token is at `base`."""
    return ScoreBlock(head, base + data[:, _OFFSET].astype(np.int64), data[:, _SCORE].view(np.float16).astype(np.float32))


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
def encode(scores, out):  # type: ignore[no-untyped-def]
    """Writes the scores of neighbouring tokens to `out` [tokens, 2] uint16: offsets, and scores rounded to halves."""
    for i in range(scores.size):
        out[i, _OFFSET] = i
        out[i, _SCORE] = _narrowed(scores[i])
