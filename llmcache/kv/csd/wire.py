"""Between host and *emulated* device: messages over a socket, data in shared memory, both ends in this file.

Messages keep their borders (SOCK_SEQPACKET); JSON comes in as many as it takes, all but the last marked so. Shared memory
has no name (memfd), so nothing is left behind whoever dies. It holds two counters, a ring for what goes to the host, and a
desk for what comes with a command. Only the device moves `produced` and only the host moves `consumed`, each by one aligned
store of 8 bytes; what lies between them belongs to the host. The desk belongs to the device from a command's beginning to
its end.

Scores cross as blocks, the scores of up to n neighbouring tokens: 4n bytes and a header. Source: hillinfer.txt, section 3.2
(<Token pos, Score>) and 4.4 ("2n half-precision floating-point values (i.e., 4n bytes)"). Differs from the paper: a half
cannot tell positions above 2048 apart, so a block carries 16-bit offsets and its header the position they count from.
Scores beyond the range of halves become its ends.

Where rows are gathered, these alone cross, not the pages that they lie in. Both ends divide a request in the same way, so
that neither has to tell the other what comes when: in shares of pages that fit the ring, and within a share head after head.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from llmcache import errors
from llmcache.arrays import Bytes, Floats, Int64s
from llmcache.kv.kernels.scores import bits_of, single_of, widened
from llmcache.kv.spill import KvShape

RING_BYTES = 1 << 23
DESK_BYTES = 1 << 23
COMMAND_BYTES, COMPLETION_BYTES = 64, 16
"""What NVMe puts on the link for any command and any completion."""
HEADER_BYTES = 16
"""Of a score block, on the link: head (4), position of the first token (8), tokens (4)."""
BLOCK_TOKENS = 1024
MOST_TOKENS = 1 << 16
"""Tokens of a score block: what 16 bits can tell apart."""
SCORE_KEYS = "score_keys"
"""The program that a device can load."""

_RING_AT = 4096
_MESSAGE_BYTES = 1 << 16
_MORE = b"+"
_DATA = struct.Struct("<cQIIQI")
_FULL_NAP_S = 50e-6
_OFFSET, _SCORE = 0, 1


class Data(NamedTuple):
    """Data in the ring: `size_bytes` at `at` (ever increasing). `head`, `base` and `tokens`: of a score block."""

    at: int
    size_bytes: int
    head: int = 0
    base: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class ScoreBlock:
    """Scores, float32 [tokens], of the tokens at `positions`, int64 [tokens], for key head `head`."""

    head: int
    positions: Int64s
    scores: Floats


@dataclass(frozen=True)
class KvRows:
    """Rows of the heads, one head after the other: keys [n, head_dim], values [n, value_dim]; scales [n] only for int8."""

    keys: NDArray[Any]
    values: NDArray[Any]
    key_scales: Floats | None = None
    value_scales: Floats | None = None


class Gone(Exception):
    """The other end is not there any more."""


class Shared:
    """The memory that both ends see."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _RING_AT + RING_BYTES + DESK_BYTES)
        whole = np.frombuffer(self._map, np.uint8)
        self.counters: NDArray[np.uint64] = whole[:16].view(np.uint64)  # produced, consumed
        self.ring = whole[_RING_AT : _RING_AT + RING_BYTES]
        self.desk = whole[_RING_AT + RING_BYTES :]

    @staticmethod
    def make() -> int:
        """Returns a descriptor of fresh memory, for both ends."""
        fd = os.memfd_create("llmcache-csd", os.MFD_CLOEXEC)
        os.ftruncate(fd, _RING_AT + RING_BYTES + DESK_BYTES)
        return fd

    def put(self, arrays: list[NDArray[Any]]) -> None:
        """Lays `arrays` on the desk, one after the other, each on a border of 64 bytes."""
        at = 0
        for array in arrays:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self.desk[at : at + flat.size] = flat
            at += -(-flat.size // 64) * 64

    def take(self, shapes: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[NDArray[Any]]:
        """Returns the arrays on the desk, of the shapes and types they were put with; not copied."""
        found, at = [], 0
        for shape, dtype in shapes:
            size = int(np.prod(shape)) * dtype.itemsize
            found.append(self.desk[at : at + size].view(dtype).reshape(shape))
            at += -(-size // 64) * 64
        return found


class DeviceEnd:
    """The device's end: takes commands, sends data and completions."""

    def __init__(self, end: socket.socket, shared: Shared) -> None:
        self._socket = end
        self.shared = shared

    def next_command(self) -> dict[str, Any]:
        """Returns the next command; raises Gone when the host has ended."""
        message = _receive(self._socket)
        if not message:
            raise Gone
        command: dict[str, Any] = json.loads(message[1:])
        return command

    def room(self, size_bytes: int) -> tuple[int, Bytes]:
        """Returns where in the ring `size_bytes` may be written, and these bytes; waits until the host has read enough."""
        at = int(self.shared.counters[0])
        if at % RING_BYTES + size_bytes > RING_BYTES:
            at += RING_BYTES - at % RING_BYTES
        while at + size_bytes - int(self.shared.counters[1]) > RING_BYTES:
            self._check_host()
            time.sleep(_FULL_NAP_S)
        self.shared.counters[0] = at + size_bytes
        return at, self.shared.ring[at % RING_BYTES : at % RING_BYTES + size_bytes]

    def _check_host(self) -> None:
        try:
            if not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise Gone
        except BlockingIOError:
            return

    def send_data(self, data: Data) -> None:
        """Tells the host of data in the ring."""
        self._socket.send(_DATA.pack(b"B", *data))

    def complete(self, result: dict[str, Any]) -> None:
        """Tells the host that a command is done."""
        _send(self._socket, b"D", result)

    def fail(self, error: errors.LlmcacheError | ValueError) -> None:
        """Tells the host that a command has failed, and why."""
        if isinstance(error, errors.LlmcacheError):
            told = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
        else:
            told = {"kind": "ValueError", "message": str(error), "hint": None}
        _send(self._socket, b"E", told)


class HostEnd:
    """The host's end: sends commands, receives data and completions."""

    def __init__(self, end: socket.socket, shared: Shared, timeout_s: float) -> None:
        self._socket = end
        self._socket.settimeout(timeout_s)
        self.shared = shared

    def send(self, command: dict[str, Any], arrays: list[NDArray[Any]]) -> None:
        """Gives a command; raises Gone when there is no device any more."""
        self.shared.put(arrays)
        try:
            _send(self._socket, b"C", command)
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None

    def receive(self) -> Data | dict[str, Any]:
        """Returns what comes next: data, or the result of a command. Raises what the device raised, TimeoutError, Gone."""
        try:
            message = _receive(self._socket)
        except ConnectionResetError:
            raise Gone from None
        if not message:
            raise Gone
        if message[:1] == b"B":
            return Data(*_DATA.unpack(message)[1:])
        told: dict[str, Any] = json.loads(message[1:])
        if message[:1] == b"E":
            raise _raised(told)
        return told

    def bytes_of(self, data: Data) -> Bytes:
        """Returns what `data` tells of; it must be copied before `consumed`."""
        return self.shared.ring[data.at % RING_BYTES : data.at % RING_BYTES + data.size_bytes]

    def consumed(self, data: Data) -> None:
        """Gives the room of `data` and all before it back."""
        self.shared.counters[1] = data.at + data.size_bytes

    def close(self) -> None:
        """Closes this end; the device sees it."""
        self._socket.close()


def _send(end: socket.socket, kind: bytes, document: dict[str, Any]) -> None:
    """Sends a document, the last of its messages as one of that kind."""
    text, room = json.dumps(document).encode(), _MESSAGE_BYTES - 1
    while len(text) > room:
        end.send(_MORE + text[:room])
        text = text[room:]
    end.send(kind + text)


def _receive(end: socket.socket) -> bytes:
    """Returns the kind of the next message and all that it says; nothing if the other end is not there any more."""
    text = bytearray()
    while (message := end.recv(_MESSAGE_BYTES))[:1] == _MORE:
        text += message[1:]
    return message[:1] + bytes(text) + message[1:] if message else b""


def _raised(told: dict[str, Any]) -> Exception:
    kind: Any = getattr(errors, told["kind"], None)
    return ValueError(told["message"]) if kind is None else kind(told["message"], told["hint"])


def shares(shape: KvShape, positions: list[Int64s]) -> Iterator[tuple[Int64s, list[slice]]]:
    """Yields a request for the rows at `positions` (one ascending array a head) in shares.

    Each is pages, ascending, and which of all the rows that were asked for lie in them: a slice for each head.
    """
    size = shape.page_tokens
    pages = np.unique(np.concatenate(positions) // size)
    starts = np.cumsum([0, *map(len, positions)])
    most = max(1, RING_BYTES // 8 // max(shape.key_slot_bytes, shape.value_slot_bytes))
    for first in range(0, len(pages), most):
        part = pages[first : first + most]
        ends = (part[0] * size, (part[-1] + 1) * size)
        bounds = [np.searchsorted(of_head, ends) + start for of_head, start in zip(positions, starts, strict=False)]
        yield part, [slice(int(low), int(high)) for low, high in bounds]


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
def encode(scores, out):  # type: ignore[no-untyped-def]
    """Writes the scores of neighbouring tokens to `out` [tokens, 2] uint16: offsets, and scores rounded to halves."""
    for i in range(scores.size):
        out[i, _OFFSET] = i
        out[i, _SCORE] = _narrowed(scores[i])


@numba.njit(nogil=True, cache=True)
def _decode(data, base, positions, scores):  # type: ignore[no-untyped-def]
    for i in range(len(data)):
        positions[i] = base + data[i, _OFFSET]
        scores[i] = widened(data[i, _SCORE])
