"""Cut the serialized state of a sequence (llama.cpp's llama_state_seq_get_data) at token boundaries, and join it again.

A state consists of a header and one part for each attention cache (two with sliding windows). All numbers are
little-endian, u32 where no type is given. The header has a magic number and flags; in the state of a whole context, it
has the length and the name of the architecture instead. A part has:

- number of streams (1), number of cells
- for each cell: position (i32), number of sequences (1), sequence (0, i32)
- whether values are transposed, number of layers
- for each layer, the keys: type (i32), bytes of a token's row (u64), rows
- for each layer, the values: the same; if they are transposed: type (i32), bytes of an element, number of elements, and
  for each element a line with all tokens

Source: llama_kv_cache::state_write and llama_context::state_seq_write_data, as of llama-cpp-python 0.3.36. The state has
no version number, so `read_state` verifies that it matches this layout to the byte and that each cache has the positions
0 to n - 1 once. Other states (recurrent layers, several positions for a token, windows that dropped tokens) raise `Uncut`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Bytes

MAGIC = 0xAF143CD8
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_MOST_LAYERS = 512  # LLAMA_MAX_LAYERS
_MOST_PARTS = 2
_LARGEST = 1 << 28  # limit of row bytes and of elements, to reject damaged numbers
_KEYS = struct.Struct("<iQ")
_COLUMNS = struct.Struct("<iII")
Places = list[tuple[NDArray[np.uint8], NDArray[np.intp] | None]]
"""For each strip of a state: its lines [lines, tokens, cell bytes], and the order of its tokens (None: ascending)."""


class Strip(NamedTuple):
    """Keys or values of one layer: `lines` lines with `cell_bytes` for each token; 1 line unless they are transposed."""

    kind: int  # ggml_type
    cell_bytes: int
    lines: int

    @property
    def token_bytes(self) -> int:
        return self.cell_bytes * self.lines

    def lines_in(self, data: Bytes, at: int, tokens: int) -> NDArray[np.uint8]:
        """Return a view [lines, tokens, cell_bytes] of the strip at offset `at` of `data`."""
        return data[at : at + tokens * self.token_bytes].reshape(self.lines, tokens, self.cell_bytes)


@dataclass(frozen=True)
class AttentionCache:
    """The strips of keys and values for each layer, and whether values are transposed."""

    transposed: bool
    keys: tuple[Strip, ...]
    values: tuple[Strip, ...]


@dataclass(frozen=True)
class StateLayout:
    """The layout of a state, independent of the number of tokens."""

    parts: tuple[AttentionCache, ...]

    @property
    def token_bytes(self) -> int:
        return sum(strip.token_bytes for part in self.parts for strip in (*part.keys, *part.values))

    def to_json(self) -> list[list[object]]:
        return [[part.transposed, list(part.keys), list(part.values)] for part in self.parts]

    @classmethod
    def from_json(cls, data: object) -> StateLayout:
        try:
            parts = tuple(
                AttentionCache(transposed, tuple(map(_strip, keys)), tuple(map(_strip, values)))
                for transposed, keys, values in data  # type: ignore[attr-defined]
            )
        except TypeError as error:
            raise ValueError(f"layout: {error}") from None
        if not 0 < len(parts) <= _MOST_PARTS or any(type(part.transposed) is not bool for part in parts):
            raise ValueError("layout: unknown parts")
        for part in parts:
            whole = part.keys if part.transposed else part.keys + part.values
            if not 0 < len(part.keys) == len(part.values) <= _MOST_LAYERS or any(strip.lines != 1 for strip in whole):
                raise ValueError("layout: unknown layers")
        return cls(parts)

    def strips(self, tokens: int) -> Iterator[tuple[bytes, Strip]]:
        """Yield the strips of a state of `tokens` tokens, each after the bytes that precede it."""
        head = struct.pack("<II", MAGIC, 0)
        for part in self.parts:
            cells = np.zeros(tokens, _CELL)
            cells["position"], cells["sequences"] = np.arange(tokens), 1
            head += struct.pack("<II", 1, tokens) + cells.tobytes()
            head += struct.pack("<II", part.transposed, len(part.keys))
            for strip in part.keys:
                yield head + _KEYS.pack(strip.kind, strip.cell_bytes), strip
                head = b""
            for strip in part.values:
                yield _COLUMNS.pack(*strip) if part.transposed else _KEYS.pack(strip.kind, strip.cell_bytes), strip


def _strip(numbers: object) -> Strip:
    strip = Strip(*numbers)  # type: ignore[misc]
    if any(type(number) is not int for number in strip) or not 0 <= strip.kind < 1 << 31:
        raise ValueError("layout: a strip has no valid type")
    if not (0 < strip.cell_bytes < _LARGEST and 0 < strip.lines < _LARGEST):
        raise ValueError("layout: a strip has no bytes, or too many")
    return strip


class Uncut(Exception):
    """A state cannot be cut at token boundaries; the message is the reason."""


class State:
    """A verified state of `tokens` tokens, in the form of llama.cpp."""

    def __init__(self, layout: StateLayout, tokens: int, places: Places) -> None:
        self.layout, self.tokens = layout, tokens
        self._places = places

    def block(self, start: int, end: int, out: Bytes) -> None:
        """Fill `out` [(end - start) * layout.token_bytes] with the tokens from `start` to `end`, strip by strip."""
        at = 0
        for lines, order in self._places:
            rows = lines[:, start:end] if order is None else lines[:, order[start:end]]
            out[at : at + rows.size].reshape(rows.shape)[...] = rows
            at += rows.size


def read_state(data: Bytes, architecture: str | None = None) -> State:
    """Parse the state `data`; raise Uncut if it cannot be cut at token boundaries.

    With `architecture`, `data` is the state of a whole context (llama_state_get_data) of a model of that architecture.
    """
    head = struct.pack("<II", MAGIC, 0)
    if architecture is not None:
        head = struct.pack("<I", len(architecture.encode())) + architecture.encode()
    try:
        if data[: len(head)].tobytes() != head:
            raise Uncut(f"unknown header {data[: len(head)].tobytes().hex()}")
        at, parts, places, tokens = len(head), [], [], None
        while at < len(data):
            part, count, found, at = _read_part(data, at)
            if tokens not in (None, count):
                raise Uncut(f"one part has {tokens} tokens, another one {count}")
            tokens = count
            parts.append(part)
            places += found
    except struct.error:
        raise Uncut("truncated") from None
    if not tokens:
        raise Uncut("no tokens")
    return State(StateLayout(tuple(parts)), tokens, places)


def _read_part(data: Bytes, at: int) -> tuple[AttentionCache, int, Places, int]:
    streams, tokens = struct.unpack_from("<II", data.data, at)
    at += 8
    if streams != 1 or not tokens or at + tokens * _CELL.itemsize > len(data):
        raise Uncut(f"{streams} streams, {tokens} cells")
    cells = data[at : at + tokens * _CELL.itemsize].view(_CELL)
    at += tokens * _CELL.itemsize
    if (cells["sequences"] != 1).any() or (cells["sequence"] != 0).any():
        raise Uncut("the cells belong to several sequences")
    order: NDArray[np.intp] | None = None
    if (cells["position"] != np.arange(tokens)).any():
        order = np.argsort(cells["position"], kind="stable")
        if (cells["position"][order] != np.arange(tokens)).any():
            raise Uncut("positions are missing, as with a sliding window")
    transposed, layers = struct.unpack_from("<II", data.data, at)
    at += 8
    if transposed > 1 or not 0 < layers < _MOST_LAYERS:
        raise Uncut(f"{layers} layers, transposed flag {transposed}")
    keys: list[Strip] = []
    values: list[Strip] = []
    places: Places = []
    for strips, form in ((keys, _KEYS), (values, _COLUMNS if transposed else _KEYS)):
        for _ in range(layers):
            kind, cell_bytes, *lines = form.unpack_from(data.data, at)
            strip = Strip(kind, cell_bytes, *(lines or [1]))
            at += form.size
            if not (0 < strip.cell_bytes < _LARGEST and 0 < strip.lines < _LARGEST) or kind < 0:
                raise Uncut(f"a strip with rows of {strip.cell_bytes} bytes and {strip.lines} lines")
            if at + tokens * strip.token_bytes > len(data):
                raise Uncut("truncated within a layer")
            places.append((strip.lines_in(data, at, tokens), order))
            strips.append(strip)
            at += tokens * strip.token_bytes
    return AttentionCache(bool(transposed), tuple(keys), tuple(values)), tokens, places, at


class Joined:
    """A state of `tokens` tokens that is joined from blocks; `data` [bytes] has the form of llama.cpp.

    Several threads may call `put` at the same time for different tokens.
    """

    def __init__(self, layout: StateLayout, tokens: int) -> None:
        self.layout, self.tokens = layout, tokens
        heads = list(layout.strips(tokens))
        self.data: Bytes = np.empty(sum(len(head) + tokens * strip.token_bytes for head, strip in heads), np.uint8)
        self._lines: list[NDArray[np.uint8]] = []
        at = 0
        for head, strip in heads:
            self.data[at : at + len(head)] = np.frombuffer(head, np.uint8)
            self._lines.append(strip.lines_in(self.data, at + len(head), tokens))
            at += len(head) + tokens * strip.token_bytes

    def put(self, start: int, block: Bytes, tokens: int | None = None) -> None:
        """Copy the first `tokens` (None: all) of a block to position `start`; ValueError if they do not fit."""
        per_token = self.layout.token_bytes
        block_tokens, rest = divmod(len(block), per_token)
        tokens = block_tokens if tokens is None else tokens
        if rest or tokens > block_tokens or start + tokens > self.tokens:
            raise ValueError(f"block: {len(block)} bytes of {per_token} per token do not fit {tokens} tokens at {start}")
        at = 0
        for lines in self._lines:
            size = block_tokens * lines.shape[0] * lines.shape[2]
            rows = block[at : at + size].reshape(lines.shape[0], block_tokens, lines.shape[2])
            lines[:, start : start + tokens] = rows[:, :tokens]
            at += size
