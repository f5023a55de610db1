"""The header of a GGUF file, versions 2 and 3.

Layout: magic, version, tensor count, key count; keys with typed values; tensor infos; padding; tensor data.
Values are skipped, not built: of the keys only the few in `_WANTED` matter here.
Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from llmcache.errors import DataError
from llmcache.fs.layout.cursor import Cursor, ReadAt
from llmcache.fs.layout.ggml_types import GGML_TYPES
from llmcache.fs.layout.tensors import LONGEST_NAME, MOST_TENSORS, ModelLayout, Tensor, bounded, check_tensors, quoted

MAGIC = b"GGUF"

# Value types of the format, by number; 8 is a string, 9 an array.
_FIXED_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_INTEGER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}
_STRING, _ARRAY = 8, 9

_WANTED = ("general.alignment", "split.no", "split.count")
_MOST_KEYS = 2**16
_MOST_DIMENSIONS = 8
_DEEPEST_ARRAY = 4
# Real files have some dozens, and tokenizers of 260 000 words. A damaged or sparse file has as many as fit the header limit,
# and whoever opens it waits.
_MOST_ARRAYS = 2**14
_MOST_TEXTS = 2**22


def read_gguf(read: ReadAt, file_bytes: int) -> ModelLayout:
    """The layout of a GGUF file of `file_bytes` bytes; DataError when the header is damaged."""
    cursor = Cursor(read, file_bytes)
    byte_order = _read_version(cursor)
    tensor_count, key_count = cursor.u64(), cursor.u64()
    if tensor_count > MOST_TENSORS or key_count > _MOST_KEYS:
        raise DataError(f"the header announces {tensor_count} tensors and {key_count} keys: it is damaged")
    wanted = _read_keys(cursor, key_count, byte_order)
    alignment = wanted.get("general.alignment", 32)
    if alignment < 1 or alignment > 2**30 or alignment & (alignment - 1):
        raise DataError(f"general.alignment is {alignment}, which is not a power of two")
    infos = list(bounded(_read_tensor(cursor, alignment) for _ in range(tensor_count)))
    header_bytes = -(-cursor.position // alignment) * alignment
    # A file without tensors (the first shard of some models) need not be padded.
    header_bytes = header_bytes if infos else cursor.position
    placed = (Tensor(t.name, header_bytes + t.offset, t.size_bytes, t.dtype) for t in infos)
    return ModelLayout("gguf", header_bytes, check_tensors(placed, header_bytes, file_bytes), _shard(wanted))


def _read_version(cursor: Cursor) -> str:
    """Checks magic and version; the byte order of the file ("<" or ">")."""
    if cursor.take(4) != MAGIC:
        raise DataError("not a GGUF file: it does not begin with 'GGUF'")
    raw = cursor.take(4)
    for byte_order in "<>":
        version = int(struct.unpack(byte_order + "I", raw)[0])
        if version in (2, 3):
            cursor.set_byte_order(byte_order)
            return byte_order
    version = int(struct.unpack("<I", raw)[0])
    raise DataError(f"GGUF version {version} is not supported (2 and 3 are)")


def _read_keys(cursor: Cursor, count: int, byte_order: str) -> dict[str, int]:
    """The values of the keys in `_WANTED`; all others are skipped."""
    wanted: dict[str, int] = {}
    left = _Left()
    for _ in range(count):
        key, value_type = cursor.text(LONGEST_NAME), cursor.u32()
        if key not in _WANTED:
            _skip_value(cursor, value_type, left)
            continue
        code = _INTEGER_CODES.get(value_type)
        if code is None:
            raise DataError(f"{key} is not an integer")
        wanted[key] = int(struct.unpack(byte_order + code, cursor.take(_FIXED_BYTES[value_type]))[0])
    return wanted


@dataclass
class _Left:
    """How many arrays, and strings in them, may still come before a file has more of them than any model."""

    arrays: int = _MOST_ARRAYS
    texts: int = _MOST_TEXTS


def _skip_value(cursor: Cursor, value_type: int, left: _Left, depth: int = 0) -> None:
    if value_type in _FIXED_BYTES:
        cursor.skip(_FIXED_BYTES[value_type])
    elif value_type == _STRING:
        cursor.skip(cursor.u64())
    elif value_type == _ARRAY and depth < _DEEPEST_ARRAY:
        _skip_array(cursor, left, depth)
    else:
        raise DataError(f"unknown value type {value_type} before byte {cursor.position}")


def _skip_array(cursor: Cursor, left: _Left, depth: int) -> None:
    item_type, count = cursor.u32(), cursor.u64()
    left.arrays -= 1
    left.texts -= count if item_type == _STRING else 0
    if left.arrays < 0 or left.texts < 0:
        raise DataError(f"more arrays or strings before byte {cursor.position} than any model has: the header is damaged")
    if item_type in _FIXED_BYTES:
        cursor.skip(count * _FIXED_BYTES[item_type])
    elif item_type == _STRING:
        cursor.skip_texts(count)
    else:
        for _ in range(count):
            _skip_value(cursor, item_type, left, depth + 1)


def _read_tensor(cursor: Cursor, alignment: int) -> Tensor:
    """The next tensor info; its offset still counts from the start of the data."""
    name, dimension_count = cursor.text(LONGEST_NAME), cursor.u32()
    if dimension_count > _MOST_DIMENSIONS:
        raise DataError(f"tensor {quoted(name)} has {dimension_count} dimensions")
    shape = [cursor.u64() for _ in range(dimension_count)]
    type_number, offset = cursor.u32(), cursor.u64()
    kind = GGML_TYPES.get(type_number)
    if kind is None:
        raise DataError(f"tensor {quoted(name)} has the unknown type {type_number}")
    if (shape[0] if shape else 1) % kind.block_values:
        raise DataError(f"tensor {quoted(name)}: rows of {shape[:1]} values are no whole blocks of {kind.name}")
    if offset % alignment:
        raise DataError(f"tensor {quoted(name)}: offset {offset} is not a multiple of the alignment {alignment}")
    return Tensor(name, offset, math.prod(shape) // kind.block_values * kind.block_bytes, kind.name)


def _shard(wanted: dict[str, int]) -> tuple[int, int] | None:
    number, count = wanted.get("split.no", 0), wanted.get("split.count", 0)
    if count <= 1:
        return None
    if not 0 <= number < count:
        raise DataError(f"split.no is {number} of {count}")
    return number, count
