"""Builds small valid and invalid GGUF headers, independently of the writer in tools/make_model.py."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from llmcache.model.gguf import ReadAt

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


@dataclass
class Gguf:
    """A GGUF file under construction; `tensors` are (name, shape, type, offset in the data)."""

    keys: list[bytes] = field(default_factory=list)
    tensors: list[tuple[str, list[int], int, int]] = field(default_factory=list)
    data_bytes: int = 0
    version: int = 3
    order: str = "<"
    alignment: int = 32
    counts: tuple[int, int] | None = None

    def number(self, kind: int, value: float) -> bytes:
        """Encode `value` as the format's number type `kind`."""
        return struct.pack(self.order + _FORMATS[kind], value)

    def text(self, text: str) -> bytes:
        """Encode `text`, preceded by its length."""
        raw = text.encode()
        return self.number(U64, len(raw)) + raw

    def key(self, name: str, kind: int, value: float | str) -> Gguf:
        """Add a key with a number or a string."""
        raw = self.text(value) if isinstance(value, str) else self.number(kind, value)
        return self.raw_key(name, kind, raw)

    def raw_key(self, name: str, kind: int, raw: bytes) -> Gguf:
        """Add a key with the encoded value `raw`, which may be invalid."""
        self.keys.append(self.text(name) + self.number(U32, kind) + raw)
        return self

    def array(self, name: str, kind: int, raw_items: list[bytes], count: int | None = None) -> Gguf:
        """Add an array; `count` may differ from the number of items."""
        count = len(raw_items) if count is None else count
        return self.raw_key(name, ARRAY, self.number(U32, kind) + self.number(U64, count) + b"".join(raw_items))

    def tensor(self, name: str, shape: list[int], kind: int, offset: int) -> Gguf:
        """Add a tensor info."""
        self.tensors.append((name, shape, kind, offset))
        return self

    def header(self) -> bytes:
        """Return the header without padding."""
        tensors, keys = self.counts or (len(self.tensors), len(self.keys))
        out = b"GGUF" + self.number(U32, self.version) + self.number(U64, tensors) + self.number(U64, keys)
        out += b"".join(self.keys)
        for name, shape, kind, offset in self.tensors:
            out += self.text(name) + self.number(U32, len(shape)) + b"".join(self.number(U64, n) for n in shape)
            out += self.number(U32, kind) + self.number(U64, offset)
        return out

    def file(self) -> bytes:
        """Return the file: header, padding and `data_bytes` zero bytes."""
        header = self.header()
        return header + bytes(-len(header) % self.alignment) + bytes(self.data_bytes)


class Reads:
    """A `read(offset, size)` function over bytes in memory that counts its calls and bytes."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.calls = 0
        self.furthest = 0
        self.total_bytes = 0

    def __call__(self, offset: int, size: int) -> bytes:
        piece = self.content[offset : offset + size]
        self.calls += 1
        self.total_bytes += len(piece)
        self.furthest = max(self.furthest, offset + len(piece))
        return piece


def reading(content: bytes) -> tuple[ReadAt, int]:
    """Return the arguments for `read_layout`: a reader of `content`, and its size."""
    return Reads(content), len(content)
