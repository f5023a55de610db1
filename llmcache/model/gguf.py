"""Parser of GGUF headers, versions 2 and 3. It makes few reads and reads little beyond the end of the header.

Layout: magic, version, tensor count, key count; keys with typed values; tensor infos; padding; tensor data. Only the keys in
`_WANTED` are parsed. Source: docs/gguf.md of ggml; tensor types, whose numbers are part of the format, from ggml.h (enum
ggml_type) and ggml-common.h (the block structs) of llama.cpp.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmcache.errors import DataError
from llmcache.model.tensors import (
    LONGEST_NAME,
    MOST_TENSORS,
    ModelLayout,
    Tensor,
    bounded,
    check_tensors,
    is_expert,
    quoted,
)

# Tensor types by number: (name, values per block, bytes per block).
GGML_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    # Repacked variants, found in files of 2024. Later versions of llama.cpp repack at load time instead.
    31: ("Q4_0_4_4", 32, 18), 32: ("Q4_0_4_8", 32, 18), 33: ("Q4_0_8_8", 32, 18), 36: ("IQ4_NL_4_4", 32, 18),
    37: ("IQ4_NL_4_8", 32, 18), 38: ("IQ4_NL_8_8", 32, 18),
}  # fmt: skip

ReadAt = Callable[[int, int], bytes]
"""`read(offset, size)` returns up to `size` bytes of the file at `offset`."""

# The largest real headers (tokenizers of 260,000 words) have 15 MB. The limit ends the parsing of a file of zeros.
HEADER_LIMIT = 64 * 2**20
_SMALLEST_READ = 64 * 2**10
_LARGEST_READ = 2**20


class HeaderCursor:
    """A position in a header; every read advances it. Reads beyond the file or the header limit raise DataError."""

    def __init__(self, read: ReadAt, file_bytes: int) -> None:
        self._read = read
        self._limit = min(file_bytes, HEADER_LIMIT)
        self._file_bytes = file_bytes
        self._buffer = b""
        self._buffer_start = 0
        self.position = 0
        self.byte_order = "<"

    def take(self, size: int) -> bytes:
        start = self._fill(size)
        self.position += size
        return self._buffer[start : start + size]

    def number(self, code: str) -> int:
        kind = self.byte_order + code
        return int(struct.unpack(kind, self.take(struct.calcsize(kind)))[0])

    def u32(self) -> int:
        return self.number("I")

    def u64(self) -> int:
        return self.number("Q")

    def text(self, longest: int) -> str:
        length = self.u64()
        if length > longest:
            raise DataError(f"a name of {length} bytes at byte {self.position - 8} (at most {longest} are allowed)")
        return self.take(length).decode("utf-8", "replace")

    def skip(self, size: int) -> None:
        if size > self._limit - self.position:
            raise self._too_short(size)
        self.position += size

    def skip_texts(self, count: int) -> None:
        """Skip `count` strings, reading only their lengths: tokenizers have hundreds of thousands."""
        unpack_from = struct.Struct(self.byte_order + "Q").unpack_from
        while count:
            start = self._fill(8)
            buffer, last = self._buffer, len(self._buffer) - 8
            offset = start
            while count and offset <= last:
                offset += 8 + unpack_from(buffer, offset)[0]
                count -= 1
            self.skip(offset - start)

    def _fill(self, size: int) -> int:
        """Fill the buffer with at least `size` bytes from the position on; return the position's index in the buffer."""
        start = self.position - self._buffer_start
        if start >= 0 and start + size <= len(self._buffer):
            return start
        if size > self._limit - self.position:
            raise self._too_short(size)
        # Read as much as all previous reads together: few reads for a long header, at most twice the bytes of a short one.
        ahead = min(max(self.position, _SMALLEST_READ), _LARGEST_READ)
        self._buffer = self._read(self.position, min(max(size, ahead), self._limit - self.position))
        self._buffer_start = self.position
        while len(self._buffer) < size:
            more = self._read(self.position + len(self._buffer), size - len(self._buffer))
            if not more:
                raise self._too_short(size)
            self._buffer += more
        return 0

    def _too_short(self, size: int) -> DataError:
        if self.position + size <= self._file_bytes:
            return DataError(f"the header needs more than {HEADER_LIMIT} bytes, which no model needs")
        return DataError(
            f"the file ends inside its header: {size} bytes are needed at byte {self.position} of {self._file_bytes}",
            "the file is incomplete: copy or download it again",
        )


MAGIC = b"GGUF"

# Value types of the format, by number; 8 is a string, 9 an array.
_FIXED_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_INTEGER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}
_STRING, _ARRAY = 8, 9

_EXPERTS_USED = ".expert_used_count"  # preceded by the name of the architecture
_WANTED = ("general.alignment", "split.no", "split.count", _EXPERTS_USED)
_MOST_KEYS = 2**16
_MOST_DIMENSIONS = 8
_DEEPEST_ARRAY = 4
# Real files have a few dozen arrays, and tokenizers of 260,000 words. A damaged or sparse file could have as many as fit
# the header limit, and the client that opens it would wait for the parser.
_MOST_ARRAYS = 2**14
_MOST_TEXTS = 2**22


def read_gguf(read: ReadAt, file_bytes: int) -> ModelLayout:
    """Return the layout of a GGUF file of `file_bytes` bytes; DataError if the header is damaged."""
    cursor = HeaderCursor(read, file_bytes)
    _read_version(cursor)
    tensor_count, key_count = cursor.u64(), cursor.u64()
    if tensor_count > MOST_TENSORS or key_count > _MOST_KEYS:
        raise DataError(f"the header declares {tensor_count} tensors and {key_count} keys: it is damaged")
    wanted = _read_keys(cursor, key_count)
    alignment = wanted.get("general.alignment", 32)
    if alignment < 1 or alignment > 2**30 or alignment & (alignment - 1):
        raise DataError(f"general.alignment is {alignment}, which is not a power of two")
    infos = list(bounded(_read_tensor(cursor, alignment) for _ in range(tensor_count)))
    header_bytes = -(-cursor.position // alignment) * alignment
    # A file without tensors (the first shard of some models) may end without padding.
    header_bytes = header_bytes if infos else cursor.position
    placed = (replace(info, offset=header_bytes + info.offset) for info in infos)
    tensors = check_tensors(placed, header_bytes, file_bytes)
    return ModelLayout("gguf", header_bytes, tensors, _shard(wanted), wanted.get(_EXPERTS_USED))


def _read_version(cursor: HeaderCursor) -> None:
    if cursor.take(4) != MAGIC:
        raise DataError("not a GGUF file: it does not begin with 'GGUF'")
    raw = cursor.take(4)
    if int.from_bytes(raw, "big") in (2, 3):
        cursor.byte_order = ">"
    elif (version := int.from_bytes(raw, "little")) not in (2, 3):
        raise DataError(f"GGUF version {version} is not supported (2 and 3 are)")


def _read_keys(cursor: HeaderCursor, count: int) -> dict[str, int]:
    wanted: dict[str, int] = {}
    left = _Left()
    for _ in range(count):
        key, value_type = cursor.text(LONGEST_NAME), cursor.u32()
        if key.endswith(_EXPERTS_USED) and value_type in _INTEGER_CODES:
            key = _EXPERTS_USED
        if key not in _WANTED:
            _skip_value(cursor, value_type, left)
            continue
        if value_type not in _INTEGER_CODES:
            raise DataError(f"{key} is not an integer")
        wanted[key] = cursor.number(_INTEGER_CODES[value_type])
    return wanted


@dataclass
class _Left:
    """Number of arrays, and of strings in arrays, that the header may still have."""

    arrays: int = _MOST_ARRAYS
    texts: int = _MOST_TEXTS


def _skip_value(cursor: HeaderCursor, value_type: int, left: _Left, depth: int = 0) -> None:
    if value_type in _FIXED_BYTES:
        cursor.skip(_FIXED_BYTES[value_type])
    elif value_type == _STRING:
        cursor.skip(cursor.u64())
    elif value_type == _ARRAY and depth < _DEEPEST_ARRAY:
        _skip_array(cursor, left, depth)
    else:
        raise DataError(f"unknown value type {value_type} before byte {cursor.position}")


def _skip_array(cursor: HeaderCursor, left: _Left, depth: int) -> None:
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


def _read_tensor(cursor: HeaderCursor, alignment: int) -> Tensor:
    name, dimension_count = cursor.text(LONGEST_NAME), cursor.u32()
    if dimension_count > _MOST_DIMENSIONS:
        raise DataError(f"tensor {quoted(name)} has {dimension_count} dimensions")
    shape = [cursor.u64() for _ in range(dimension_count)]
    type_number, offset = cursor.u32(), cursor.u64()
    if type_number not in GGML_TYPES:
        raise DataError(f"tensor {quoted(name)} has the unknown type {type_number}")
    dtype, block_values, block_bytes = GGML_TYPES[type_number]
    if (shape[0] if shape else 1) % block_values:
        raise DataError(f"tensor {quoted(name)}: rows of {shape[:1]} values are not whole blocks of {dtype}")
    if offset % alignment:
        raise DataError(f"tensor {quoted(name)}: offset {offset} is not a multiple of the alignment {alignment}")
    experts = shape[-1] if len(shape) > 1 and is_expert(name) else 1  # the last dimension
    size_bytes = math.prod(shape) // block_values * block_bytes
    return Tensor(name, offset, size_bytes, dtype, experts if experts and size_bytes % experts == 0 else 1)


def _shard(wanted: dict[str, int]) -> tuple[int, int] | None:
    number, count = wanted.get("split.no", 0), wanted.get("split.count", 0)
    if count <= 1:
        return None
    if not 0 <= number < count:
        raise DataError(f"split.no is {number}, but split.count is {count}")
    return number, count
