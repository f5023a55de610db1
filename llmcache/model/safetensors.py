"""Parser of safetensors headers and indexes.

A header is its length in 8 bytes, then a JSON object with the dtype, shape and offsets of each tensor. Source: the format
section of the safetensors README.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TypeGuard

from llmcache.errors import DataError
from llmcache.model.gguf import HeaderCursor, ReadAt
from llmcache.model.tensors import (
    LONGEST_NAME,
    ModelLayout,
    Tensor,
    bounded,
    check_tensors,
    is_expert,
    is_text,
    quoted,
    shard_name,
)

SUFFIX = ".safetensors"

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
# PyTorch's limit. The product of many more large numbers would take hours to compute.
_MOST_DIMENSIONS = 64
# The reference implementation allows 100 MB; real headers have a few MB.
_LONGEST_JSON = 32 * 2**20
_LEAST_BYTES = 8 + len("{}")  # of a file
_METADATA = "__metadata__"
_MOST_METADATA = 2**13
_LONGEST_ENTRY = 2**14  # bytes of a name with escapes, or of the description of a tensor
_LONGEST_DTYPE = 16
_PIECE = 2**16

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING_BODY = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_ENTRY = re.compile(rb"[^}]*+\}")


def begins_safetensors(read: ReadAt, file_bytes: int) -> bool:
    """Return whether the file begins with a plausible header length and an opening brace."""
    if file_bytes <= _LEAST_BYTES or len(first := read(0, 9)) < 9:
        return False
    length = int.from_bytes(first[:8], "little")
    return first[8:] == b"{" and _LEAST_BYTES - 8 <= length <= min(_LONGEST_JSON, file_bytes - 8)


def read_safetensors(read: ReadAt, file_bytes: int, name: str) -> ModelLayout:
    """Return the layout of the safetensors file `name` of `file_bytes` bytes; DataError if the header is damaged."""
    cursor = HeaderCursor(read, file_bytes)
    length = cursor.u64()
    if length > _LONGEST_JSON:
        raise DataError(f"not a safetensors file: it declares a header of {length} bytes")
    header_bytes = 8 + length
    cursor.skip(length)  # raises DataError if the file is shorter
    tensors = bounded(_tensors(_Text(read, 8, header_bytes), header_bytes))
    shard = shard_name(name)
    return ModelLayout(
        "safetensors",
        header_bytes,
        check_tensors(tensors, header_bytes, file_bytes),
        (shard.number, shard.count) if shard and shard.count > 1 else None,
    )


class _Text:
    """Streaming reader of the JSON header, because `json.loads` would create objects of twenty times its size."""

    def __init__(self, read: ReadAt, start: int, end: int) -> None:
        self._read, self._next, self._end = read, start, end
        self._piece, self._place = b"", 0

    def token(self) -> bytes:
        while True:
            found = _SPACE.match(self._piece, self._place)
            assert found is not None  # the pattern matches the empty string, too
            self._place = found.end() + 1
            if self._place <= len(self._piece):
                return self._piece[self._place - 1 : self._place]
            self._place -= 1
            if not self._more():
                return b""

    def expect(self, wanted: bytes) -> None:
        if (found := self.token()) != wanted:
            raise self.wrong(f"{found!r} instead of {wanted!r}")

    def members(self) -> Iterator[None]:
        """Stop after the opening quote of each member's name; the caller must then read the name and the value."""
        token = self.token()
        while token != b"}":
            if token != b'"':
                raise self.wrong(f"{token!r} instead of a name")
            yield
            token = self.token()
            if token == b"}":
                return
            if token != b",":
                raise self.wrong(f"{token!r} after a value")
            token = self.token()
            if token == b"}":
                raise self.wrong("a comma before the end")

    def string(self) -> str:
        while len(self._piece) - self._place < _LONGEST_ENTRY and self._more():
            pass
        found = _STRING_BODY.match(self._piece, self._place, self._place + _LONGEST_ENTRY)
        assert found is not None
        if self._piece[found.end() : found.end() + 1] != b'"':
            raise self.wrong("a name without an end")
        self._place = found.end() + 1
        text: str = self._loaded(b'"' + found[0] + b'"')
        return text

    def skip_string(self) -> None:
        while True:
            found = _STRING_BODY.match(self._piece, self._place)
            assert found is not None
            self._place = found.end()
            if self._piece[self._place : self._place + 1] == b'"':
                self._place += 1
                return
            if not self._more():
                raise self.wrong("a string without an end")

    def entry(self) -> dict[str, Any]:
        while len(self._piece) - self._place < _LONGEST_ENTRY and self._more():
            pass
        found = _ENTRY.match(self._piece, self._place, self._place + _LONGEST_ENTRY)
        if found is None:
            raise self.wrong("an object without an end")
        self._place = found.end()
        entry: dict[str, Any] = self._loaded(b"{" + found[0])
        return entry

    def wrong(self, what: str) -> DataError:
        return DataError(f"not a safetensors file: its header is not valid JSON: {what}")

    def _loaded(self, text: bytes) -> Any:
        try:
            return json.loads(text.decode(), object_pairs_hook=_without_doubles)
        except (ValueError, RecursionError) as error:
            raise DataError(f"not a safetensors file: its header is not valid JSON: {error}") from error

    def _more(self) -> bool:
        piece = self._read(self._next, min(_PIECE, self._end - self._next)) if self._next < self._end else b""
        self._next += len(piece)
        self._piece, self._place = self._piece[self._place :] + piece, 0
        return bool(piece)


def _tensors(text: _Text, header_bytes: int) -> Iterator[Tensor]:
    if text.token() != b"{":
        raise DataError("not a safetensors file: its header is not a JSON object")
    for _ in text.members():
        name = text.string()
        text.expect(b":")
        if name == _METADATA:
            _skip_metadata(text)
            continue
        if text.token() != b"{":
            raise DataError(f"tensor {quoted(name)} is not described by an object")
        yield _tensor(name, text.entry(), header_bytes)
    if rest := text.token():
        raise text.wrong(f"{rest!r} after the end")


def _skip_metadata(text: _Text) -> None:
    """Skip an object of strings: training tools write megabytes of them."""
    text.expect(b"{")
    for number, _ in enumerate(text.members()):
        if number >= _MOST_METADATA:
            raise text.wrong(f"more than {number} strings in {_METADATA}")
        text.skip_string()
        text.expect(b":")
        text.expect(b'"')
        text.skip_string()


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise DataError("the header has the same name twice")
    return entries


def _tensor(name: str, entry: dict[str, Any], header_bytes: int) -> Tensor:
    if len(name) > LONGEST_NAME:
        raise DataError(f"a name of {len(name)} characters (at most {LONGEST_NAME} are allowed)")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise DataError(f"tensor {quoted(name)} needs a dtype, a shape and two data_offsets")
    if len(shape) > _MOST_DIMENSIONS or len(dtype) > _LONGEST_DTYPE:
        raise DataError(f"tensor {quoted(name)} has {len(shape)} dimensions, and a dtype of {len(dtype)} characters")
    if not (is_text(name) and is_text(dtype)):
        raise DataError(f"tensor {quoted(name)}: its name or dtype {quoted(dtype)} is not text (half a surrogate pair)")
    begin, end = offsets
    size_bytes = end - begin
    # An unknown dtype is accepted: the offsets locate the tensor.
    if size_bytes < 0 or (dtype in _BITS and math.prod(shape) * _BITS[dtype] != size_bytes * 8):
        described = f"{quoted(dtype)} of shape {shape}"
        raise DataError(f"tensor {quoted(name)}: {described} does not fill the bytes {begin} to {end}")
    experts = shape[0] if len(shape) > 2 and is_expert(name) else 1  # the first dimension of a fused tensor
    is_divisible = experts > 0 and size_bytes % experts == 0
    return Tensor(name, header_bytes + begin, size_bytes, sys.intern(dtype), experts if is_divisible else 1)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def index_shards(text: bytes) -> tuple[str, ...]:
    """Return the sorted file names of all shards in an index.

    DataError: `text` is not an index, or a name leads out of its directory.
    """
    try:
        weight_map = json.loads(text)["weight_map"]
        names = tuple(sorted({name for name in weight_map.values() if isinstance(name, str)}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError("not a safetensors index: it has no 'weight_map' of tensor names to file names") from error
    for name in names:
        outside = {"", os.pardir} & set(name.split("/"))
        if outside or len(name) > LONGEST_NAME or not is_text(name) or "\0" in name:
            raise DataError(f"weight_map: {quoted(name)} is not the name of a file beside the index")
    return names
