"""The header of a safetensors file: its length in 8 bytes, then a JSON object of name, dtype, shape and offsets.

Source: the format section of the safetensors README.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeGuard

from llmcache.errors import DataError
from llmcache.fs.layout.cursor import Cursor, ReadAt
from llmcache.fs.layout.shards import shard_name
from llmcache.fs.layout.tensors import ModelLayout, Tensor, check_tensors, is_text, quoted

SUFFIX = ".safetensors"

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
# What PyTorch allows. The product of many more large numbers takes hours.
_MOST_DIMENSIONS = 64
# The reference implementation allows 100 MB, of which Python would make 1 GB of objects; real headers have a few MB.
_LONGEST_JSON = 32 * 2**20


def read_safetensors(read: ReadAt, file_bytes: int, name: str) -> ModelLayout:
    """The layout of a safetensors file of `file_bytes` bytes called `name`; DataError when the header is damaged."""
    cursor = Cursor(read, file_bytes)
    length = cursor.u64()
    if length > _LONGEST_JSON:
        raise DataError(f"not a safetensors file: it announces a header of {length} bytes")
    header_bytes = 8 + length
    entries = _parse(cursor.take(length))
    entries.pop("__metadata__", None)
    tensors = (_tensor(key, entry, header_bytes) for key, entry in entries.items())
    shard = shard_name(name)
    return ModelLayout(
        "safetensors",
        header_bytes,
        check_tensors(tensors, header_bytes, file_bytes),
        (shard.number, shard.count) if shard and shard.count > 1 else None,
    )


def _parse(text: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise DataError("not a safetensors file: its header is not a JSON object")
    return entries


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise DataError("the header has a name twice")
    return entries


def _tensor(name: str, entry: object, header_bytes: int) -> Tensor:
    if not isinstance(entry, dict):
        raise DataError(f"tensor {quoted(name)} is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise DataError(f"tensor {quoted(name)} needs a dtype, a shape and two data_offsets")
    if len(shape) > _MOST_DIMENSIONS:
        raise DataError(f"tensor {quoted(name)} has {len(shape)} dimensions")
    if not (is_text(name) and is_text(dtype)):
        raise DataError(f"tensor {quoted(name)}: its name or dtype {quoted(dtype)} is no text: half a surrogate pair")
    begin, end = offsets
    size_bytes = end - begin
    # An unknown dtype is no obstacle: the offsets say where the tensor is.
    if size_bytes < 0 or (dtype in _BITS and math.prod(shape) * _BITS[dtype] != size_bytes * 8):
        what = f"{quoted(dtype)} of shape {shape}"
        raise DataError(f"tensor {quoted(name)}: {what} does not fill the bytes {begin} to {end}")
    return Tensor(name, header_bytes + begin, size_bytes, dtype)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    """Whether `values` is a list of numbers that can be sizes; bool is an int to Python, but not here."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)
