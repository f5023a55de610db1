"""Inputs derived from valid ones: flipped bits, replaced numbers, lost or exchanged pieces, JSON with wrong types.

`Repeated` makes expensive inputs of pieces repeated many times. Positions are drawn as fractions of the input, so that
shrinking an example moves the damage to the beginning and reduces it.
"""

from __future__ import annotations

import copy
import json
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from hypothesis import strategies as st

_POSITIONS = 1 << 20
_POWERS = (7, 8, 15, 16, 31, 32, 53, 60, 62, 63)
_EDGES = [*range(10), 15, 16, 31, 32, 63, 64, *(2**bits + near for bits in _POWERS for near in (-1, 0))]
NUMBERS = st.sampled_from([*_EDGES, 2**64 - 1, 2**64 - 8, 2**64 - 4096]) | st.integers(0, 2**64 - 1)

Edit = tuple[Any, ...]
"""The arguments of `_edit` after `nonzero`: operation, position and its operands."""


def mutated(seeds: Sequence[bytes], repair: Callable[[bytes], bytes] | None = None) -> st.SearchStrategy[bytes]:
    """Generate damaged `seeds` and random bytes.

    `repair` fixes checksums in half of the inputs, so that damage gets past them.
    """
    damaged = st.builds(_apply, st.sampled_from(list(seeds)), st.lists(_edits(list(seeds)), max_size=6))
    if repair is not None:
        damaged |= damaged.map(repair)
    with_prefix = st.builds(lambda seed, tail: seed[:16] + tail, st.sampled_from(list(seeds)), st.binary(max_size=200))
    return damaged | damaged | with_prefix | st.binary(max_size=300)


def _apply(seed: bytes, edits: list[Edit]) -> bytes:
    data = bytearray(seed)
    # Most of some files is padding, so half of the damage goes to nonzero bytes.
    nonzero = [position for position, byte in enumerate(seed) if byte]
    for edit in edits:
        _edit(data, nonzero, *edit)
    return bytes(data)


def _edits(seeds: list[bytes]) -> st.SearchStrategy[Edit]:
    position = st.tuples(st.integers(0, _POSITIONS - 1), st.booleans())
    width = st.sampled_from([8, 4, 2, 1])
    order = st.sampled_from(["little", "big"])
    size = st.sampled_from([1, 2, 4, 8, 16, 64, 300])
    return st.one_of(
        st.tuples(st.just("flip"), position, st.integers(0, 7)),
        st.tuples(st.just("number"), position, NUMBERS, width, order),
        st.tuples(st.just("cut"), position),
        st.tuples(st.just("take"), position, size),
        st.tuples(st.just("put"), position, st.binary(min_size=1, max_size=20)),
        st.tuples(st.just("splice"), position, size, st.integers(0, _POSITIONS - 1), st.sampled_from(seeds)),
    )


def _at(position: tuple[int, bool], data: bytearray, nonzero: Sequence[int]) -> int:
    share, in_nonzero = position
    if in_nonzero and nonzero:
        return min(nonzero[share * len(nonzero) // _POSITIONS], len(data))
    return share * (len(data) + 1) // _POSITIONS


def _edit(data: bytearray, nonzero: Sequence[int], operation: str, position: tuple[int, bool], *more: Any) -> None:
    at = _at(position, data, nonzero)
    if operation == "flip":
        data[at : at + 1] = bytes(byte ^ 1 << more[0] for byte in data[at : at + 1])
    elif operation == "number":
        value, width, order = more
        at = min(at - at % width, len(data))
        data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, order)
    elif operation == "cut":
        del data[at:]
    elif operation == "take":
        del data[at : at + more[0]]
    elif operation == "put":
        data[at:at] = more[0]
    else:
        size, start, other = more
        begin = start * (len(other) + 1) // _POSITIONS
        data[at : at + size] = other[begin : begin + size]


def _deep(levels: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind == "list" else {"a": value}
    return value


ODD = [
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *(2**31, 2**32 - 1, 2**32, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400),
    *("", "a", "0", "F32", "/", "../../etc/passwd", "\0", "\ud800", "é\n\x1b[2J", "x" * 5000),
    *([], {}, [[]], [None], [0, 0], [0, 2**60], ["a", 1], {"": None}, _deep(50, "list"), _deep(50, "object")),
]
"""Values that a field does not expect."""


def documents(good: Sequence[Any], values: Sequence[Any] = ODD) -> st.SearchStrategy[Any]:
    """Generate JSON values: those of `good` with parts at any depth replaced by `values`, removed, added or renamed."""
    change = st.tuples(st.integers(0, _POSITIONS - 1), st.sampled_from(["replace", "remove", "add", "rename"]))
    changes = st.lists(st.tuples(change, st.sampled_from(list(values))), min_size=1, max_size=4)
    return st.builds(_changed, st.sampled_from(list(good)), changes) | st.sampled_from(list(values))


def _changed(good: Any, changes: list[tuple[tuple[int, str], Any]]) -> Any:
    box = [copy.deepcopy(good)]
    for (share, operation), value in changes:
        positions = list(_positions(box))
        container, key = positions[share * len(positions) // _POSITIONS]
        _change(container, key, operation, copy.deepcopy(value))
        if not box:
            return value
    return box[0]


def _positions(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value below `value`."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    found = [(value, key) for key in keys]
    for key in keys:
        found += _positions(value[key])
    return found


def _change(container: Any, key: Any, operation: str, value: Any) -> None:
    if operation == "remove":
        del container[key]
    elif operation == "add" and isinstance(container, list):
        container.insert(key, value)
    elif operation in ("add", "rename") and isinstance(container, dict):
        old = container[key] if operation == "add" else container.pop(key)
        container[value if isinstance(value, str) else "other"] = old
    else:
        container[key] = value


def written(document: Any) -> bytes:
    """Return `document` as JSON; infinities and lone surrogates are written as Python reads them."""
    return json.dumps(document).encode()


class Headed:
    """Files with a magic, a version, a JSON header with length and checksum, and data from a boundary on."""

    start = struct.Struct("<8sIII")

    def __init__(self, magic: bytes, boundary: int) -> None:
        self.magic, self.boundary = magic, boundary

    def parts(self, data: bytes) -> tuple[Any, bytes]:
        """Return the header of a valid file, and the data after it."""
        end = self.start.size + self.start.unpack_from(data)[2]
        return json.loads(data[self.start.size : end]), data[end + -end % self.boundary :]

    def file(self, header: bytes, rest: bytes) -> bytes:
        """Return a file with this header and a valid checksum."""
        head = self.start.pack(self.magic, 1, len(header), zlib.crc32(header)) + header
        return head + bytes(-len(head) % self.boundary) + rest


Pieces = list[tuple[bytes, int]]


class Repeated:
    """`read(offset, size)` over pieces with repetition counts, each stored once; it counts the bytes read."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = [(piece, count) for piece, count in pieces if piece and count]
        self.ends = list(accumulate(len(piece) * count for piece, count in self.pieces))
        self.size = self.ends[-1] if self.ends else 0
        self.total_bytes = 0

    def __call__(self, offset: int, size: int) -> bytes:
        found = b""
        end = min(offset + size, self.size)
        while offset < end:
            index = bisect_right(self.ends, offset)
            piece, count = self.pieces[index]
            at = (offset - self.ends[index] + len(piece) * count) % len(piece)
            length = min(end, self.ends[index]) - offset
            found += (piece * (1 + (at + length) // len(piece)))[at : at + length]
            offset += length
        self.total_bytes += len(found)
        return found
