"""The layout of structures as a compiled BPF object describes them in its BTF: an independent reading of the file."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_INT, _PTR, _ARRAY, _STRUCT, _UNION, _ENUM = 1, 2, 3, 4, 5, 6
_TYPEDEF, _VOLATILE, _CONST, _RESTRICT = 8, 9, 10, 11
_FUNC_PROTO, _VAR, _DATASEC, _DECL_TAG, _ENUM64 = 13, 14, 15, 17, 19


def sections(path: Path) -> dict[str, bytes]:
    """Contents of the sections of a 64-bit little-endian ELF file, by name."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    entries = [struct.unpack_from("<IIQQQQIIQQ", data, table + size * number) for number in range(count)]
    start = entries[names][4]
    found = {}
    for entry in entries:
        at = start + entry[0]
        found[data[at : data.index(b"\0", at)].decode()] = data[entry[4] : entry[4] + entry[5]]
    return found


def machine(path: Path) -> int:
    """The ELF machine number."""
    return int(struct.unpack_from("<H", path.read_bytes(), 0x12)[0])


@dataclass(frozen=True)
class Field:
    """A member of a structure, in bytes."""

    offset: int
    size: int


class Btf:
    """The types in a .BTF section."""

    def __init__(self, raw: bytes) -> None:
        magic, _, _, header, type_offset, type_size, text_offset, text_size = struct.unpack_from("<HBBIIIII", raw)
        assert magic == 0xEB9F
        self._text = raw[header + text_offset : header + text_offset + text_size]
        self._types: list[tuple[str, int, int, int, bytes]] = [("void", 0, 0, 0, b"")]
        at, end = header + type_offset, header + type_offset + type_size
        while at < end:
            name, info, size = struct.unpack_from("<III", raw, at)
            kind, count = info >> 24 & 31, info & 0xFFFF
            each = {_INT: 4, _ARRAY: 12, _VAR: 4, _DECL_TAG: 4}.get(kind)
            per = {_STRUCT: 12, _UNION: 12, _ENUM: 8, _FUNC_PROTO: 8, _DATASEC: 12, _ENUM64: 12}.get(kind, 0)
            extra = each if each is not None else per * count
            self._types.append((self._name(name), kind, count, size, raw[at + 12 : at + 12 + extra]))
            at += 12 + extra

    def _name(self, at: int) -> str:
        return self._text[at : self._text.index(b"\0", at)].decode()

    def size(self, number: int) -> int:
        """Bytes that a value of type `number` takes."""
        _, kind, _, size, extra = self._types[number]
        if kind in (_INT, _STRUCT, _UNION, _ENUM, _ENUM64):
            return size
        if kind == _PTR:
            return 8
        if kind == _ARRAY:
            element, _, count = struct.unpack("<III", extra)
            return self.size(element) * int(count)
        assert kind in (_TYPEDEF, _VOLATILE, _CONST, _RESTRICT), kind
        return self.size(size)

    def structure(self, name: str) -> tuple[int, dict[str, Field]]:
        """Size of `struct name`, and its members."""
        _, _, count, size, extra = next(found for found in self._types if found[:2] == (name, _STRUCT))
        members = [struct.unpack_from("<III", extra, 12 * index) for index in range(count)]
        return size, {self._name(text): Field(bits // 8, self.size(kind)) for text, kind, bits in members}
