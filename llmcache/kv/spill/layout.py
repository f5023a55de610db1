"""Where things lie in a spill file, and the 64-byte records that say so, each with a checksum of its own.

    0     header: magic, version, length, CRC, then the identity as JSON
    4096  two commit records, written in turns: the epoch and how many pages were on the disk at its end
    8192  extents, all of one size. Each belongs to one layer of one sequence (or to its tokens) and holds
          a table of entries (the first is the extent's own), the keys of its pages, the values of its pages

Keys and values lie apart, so that scoring reads nothing but keys, in long runs. Records never cross a sector of 512
bytes: a disk writes each whole or not at all.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from llmcache.errors import DataError
from llmcache.kv.spill.shape import BLOCK_BYTES, KvShape, whole_blocks

MAGIC = b"LLMCKV\r\n"
VERSION = 1
RECORD_BYTES = 64
COMMITS_AT = (4096, 6144)
EXTENTS_AT = 8192
EXTENT_TOKENS = 1024
"""What an extent of a layer holds unless told otherwise: 2 MiB of keys for 8 heads of 128 halves."""
LARGEST_EXTENT = 1 << 40

_HEADER = struct.Struct("<8sIII")
_RECORD = struct.Struct("<4s9I20sI")
_PAGE, _EXTENT, _COMMIT = b"PAGE", b"EXTN", b"DONE"


class PageEntry(NamedTuple):
    """One page: entry `page` of its chain, with `tokens` filled, checksums of its two slots, appended in `epoch`."""

    sequence: int
    layer: int
    page: int
    tokens: int
    epoch: int
    key_crc: int
    value_crc: int


class ExtentEntry(NamedTuple):
    """Whose an extent is: the `ordinal`-th of `layer` of `sequence`."""

    sequence: int
    layer: int
    ordinal: int


class Commit(NamedTuple):
    """After `epoch`, `pages` entries of this or earlier epochs were on the disk."""

    epoch: int
    pages: int


def _pack(kind: bytes, values: tuple[int, ...]) -> bytes:
    body = _RECORD.pack(kind, *values, *(0,) * (9 - len(values)), b"", 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def _unpack(kind: bytes, data: bytes) -> tuple[int, ...] | None:
    """The numbers in a record; None if it was never written, torn or damaged."""
    if len(data) != RECORD_BYTES or data[:4] != kind:
        return None
    found = _RECORD.unpack(data)
    return found[1:10] if zlib.crc32(data[:-4]) == found[-1] else None


def pack_page(entry: PageEntry) -> bytes:
    """Returns the record of a page."""
    return _pack(_PAGE, entry)


def unpack_page(data: bytes) -> PageEntry | None:
    """Returns the page that a record tells of; None if the record is none."""
    found = _unpack(_PAGE, data)
    return None if found is None else PageEntry(*found[:7])


def pack_extent(entry: ExtentEntry) -> bytes:
    """Returns the record of an extent."""
    return _pack(_EXTENT, entry)


def unpack_extent(data: bytes) -> ExtentEntry | None:
    """Returns whose an extent is; None if the record is none."""
    found = _unpack(_EXTENT, data)
    return None if found is None else ExtentEntry(*found[:3])


def pack_commit(commit: Commit) -> bytes:
    """Returns the record of a commit."""
    return _pack(_COMMIT, (commit.epoch, commit.pages & 0xFFFFFFFF, commit.pages >> 32))


def unpack_commit(data: bytes) -> Commit | None:
    """Returns the commit that a record tells of; None if the record is none."""
    found = _unpack(_COMMIT, data)
    return None if found is None else Commit(found[0], found[1] | found[2] << 32)


@dataclass(frozen=True)
class ExtentPlan:
    """How an extent of one kind is divided: `slots` pages; `direct`: their slots are whole blocks."""

    slots: int
    table_bytes: int
    key_slot_bytes: int
    value_slot_bytes: int
    direct: bool

    def entry_at(self, slot: int) -> int:
        """Returns where the entry of `slot` begins in the extent; the extent's own is slot -1."""
        return (slot + 1) * RECORD_BYTES

    def key_at(self, slot: int) -> int:
        """Returns where the keys of `slot` begin in the extent."""
        return self.table_bytes + slot * self.key_slot_bytes

    def value_at(self, slot: int) -> int:
        """Returns where the values of `slot` begin in the extent."""
        return self.key_at(self.slots) + slot * self.value_slot_bytes


class Layout:
    """The places in a file of `shape` whose extents hold `extent_pages` pages of a layer."""

    def __init__(self, shape: KvShape, extent_pages: int) -> None:
        if type(extent_pages) is not int or not 1 <= extent_pages <= 1 << 20:
            raise ValueError(f"extent_pages: {extent_pages!r}, between 1 and {1 << 20} is needed")
        table = whole_blocks((extent_pages + 1) * RECORD_BYTES)
        self.shape = shape
        self.extent_pages = extent_pages
        self.of_layer = ExtentPlan(extent_pages, table, shape.key_slot_bytes, shape.value_slot_bytes, True)
        # Token ids and positions are 8 bytes each: far more pages of them fit, but at least one must.
        slot = 8 * shape.page_tokens
        least = whole_blocks(2 * RECORD_BYTES) + 2 * slot
        self.extent_bytes = whole_blocks(max(self.of_layer.value_at(extent_pages), least))
        slots = (self.extent_bytes - BLOCK_BYTES - RECORD_BYTES) // (RECORD_BYTES + 2 * slot)
        slots = max(1, slots)
        if self.extent_bytes > LARGEST_EXTENT:
            raise ValueError(f"extent_pages: an extent would have {self.extent_bytes} bytes, more than {LARGEST_EXTENT}")
        self.of_tokens = ExtentPlan(slots, whole_blocks((slots + 1) * RECORD_BYTES), slot, slot, False)
        self.table_bytes = max(self.of_layer.table_bytes, self.of_tokens.table_bytes)

    def plan(self, layer: int) -> ExtentPlan:
        """Returns how the extents of `layer` are divided; layer number `shape.layers` stands for the tokens."""
        return self.of_tokens if layer == self.shape.layers else self.of_layer

    def at(self, extent: int) -> int:
        """Returns where extent number `extent` begins in the file."""
        return EXTENTS_AT + extent * self.extent_bytes

    def header(self) -> bytes:
        """Returns the first block of the file."""
        identity = json.dumps({**self.shape.to_json(), "extent_pages": self.extent_pages}, sort_keys=True).encode()
        if _HEADER.size + len(identity) > BLOCK_BYTES:
            raise ValueError(f"model: a name of {len(self.shape.model)} characters does not fit the header")
        crc = zlib.crc32(identity, zlib.crc32(struct.pack("<II", VERSION, len(identity))))
        return (_HEADER.pack(MAGIC, VERSION, len(identity), crc) + identity).ljust(BLOCK_BYTES, b"\0")


def read_header(block: bytes, path: Path) -> Layout:
    """Returns the layout that the first block of a file tells of; DataError if it is none of ours, newer, or damaged."""
    if len(block) < _HEADER.size or block[:8] != MAGIC:
        raise DataError(f"{path}: magic: this is not a spill file of llmcache", "name a file that `llmcache kv` has written")
    _, version, length, crc = _HEADER.unpack_from(block)
    if version > VERSION:
        hint = "open it with a newer llmcache, or spill the context again"
        raise DataError(f"{path}: version: {version}, this llmcache reads up to {VERSION}", hint)
    identity = block[_HEADER.size : _HEADER.size + length]
    if crc != zlib.crc32(identity, zlib.crc32(struct.pack("<II", version, length))) or version < 1:
        raise DataError(f"{path}: header: its checksum is wrong", "the file is damaged: spill the context again")
    try:
        found: dict[str, Any] = json.loads(identity)
        names = {field.name for field in fields(KvShape)}
        return Layout(KvShape(**{name: found[name] for name in names}), found["extent_pages"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: header: {error}", "the file is damaged: spill the context again") from None


def check_identity(found: KvShape, wanted: KvShape, path: Path) -> None:
    """DataError that names every field in which a file's identity differs from what is wanted."""
    mine, theirs = wanted.to_json(), found.to_json()
    differ = [f"{name}: {theirs[name]!r}, not {mine[name]!r}" for name in mine if mine[name] != theirs[name]]
    if differ:
        raise DataError(f"{path}: another model's spill file ({'; '.join(differ)})", "name another file, or spill anew")
