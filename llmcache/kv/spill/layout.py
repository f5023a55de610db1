"""The format of spill files: shapes, records with checksums, extents, and chains of pages.

    0     header: magic, version, length, CRC, then the identity as JSON
    4096  two commit records, written alternately: the epoch, and how many pages were on disk at its end
    8192  extents of equal size. Each belongs to a layer of a sequence (or to its tokens) and contains
          a table of entries (the first describes the extent), the keys of its pages, the values of its pages

A page has a checksum for each part, which consists of whole blocks of keys or of values, so that single rows can be
read without the rest of the page. Keys and values are separate, so that scoring reads only keys, in long runs. In an
interleaved file, each part of a page's keys is followed by the same part of its values, so that a row takes one read
instead of two. The size of a page's entry depends on the number of checksums. An entry never crosses a sector of 512
bytes, which a disk writes atomically.
"""

from __future__ import annotations

import functools
import json
import math
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Bytes, Int64s
from llmcache.errors import DataError
from llmcache.units import BLOCK_BYTES

MAGIC = b"LLMCKV\r\n"
VERSION = 3  # older files keep their format. Version 1: one part per page, entries of 64 bytes. Version 2: not interleaved.
RECORD_BYTES = 64
ENTRY_BYTES = (RECORD_BYTES, 128, 256, 512)  # possible sizes of a page's entry
MOST_PARTS = 60  # parts of the keys, or of the values, of a page: the largest entry fits the checksums of both
KEYS, VALUES = 0, 1  # sides of a page, and of an extent
COMMITS_AT = (4096, 6144)
EXTENTS_AT = 8192
EXTENT_TOKENS = 1024  # default size of an extent of a layer: 2 MiB of keys for 8 heads of 128 fp16 numbers
LARGEST_EXTENT = 1 << 40

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # the bits: numpy has no such type
}
"""Names of the types of keys and values, and the numpy type that carries them."""
_HEADER = struct.Struct("<8sIII")


def whole_blocks(size_bytes: int) -> int:
    """Return `size_bytes` rounded up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True)
class KvShape:
    """The identity of a spill file. `value_dim` 0 stands for `head_dim`."""

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "float16"
    page_tokens: int = 16
    value_dim: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or any("\ud800" <= character <= "\udfff" for character in self.model):
            raise ValueError(f"model: must be a string of valid Unicode, not {self.model!r}")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("layers", "kv_heads", "head_dim", "page_tokens", "value_dim"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 1 << 24:
                raise ValueError(f"{name}: must be a whole number of at least 1, not {value!r}")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @property
    def slot_sizes(self) -> tuple[int, int]:
        per_dim = self.kv_heads * self.page_tokens * self.numpy_dtype.itemsize
        return whole_blocks(per_dim * self.head_dim), whole_blocks(per_dim * self.value_dim)

    @property
    def key_slot_bytes(self) -> int:
        return self.slot_sizes[KEYS]

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.head_dim + self.value_dim) * self.numpy_dtype.itemsize

    def forms(self, *lead: int) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        return [((*lead, dim), self.numpy_dtype) for dim in (self.head_dim, self.value_dim)]

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def aligned(size_bytes: int) -> Bytes:
    """Return an uninitialized buffer that is aligned for O_DIRECT."""
    raw = np.empty(size_bytes + BLOCK_BYTES, np.uint8)
    skip = -raw.ctypes.data % BLOCK_BYTES
    return raw[skip : skip + size_bytes]


def view_slots(shape: KvShape, slots: Bytes, side: int) -> NDArray[Any]:
    """Return the keys (`side` 0) or values (1) [pages, kv_heads, page_tokens, dim] in `slots` [pages, slot bytes]."""
    form, dtype = shape.forms(len(slots), shape.kv_heads, shape.page_tokens)[side]
    return slots[:, : math.prod(form[1:]) * dtype.itemsize].view(dtype).reshape(form)


def slots_of(shape: KvShape, rows: NDArray[Any], side: int) -> Bytes:
    """Return `rows` [kv_heads, tokens, dim] as slots [pages, slot bytes], padded with zeros."""
    heads, tokens, dim = rows.shape
    full, rest = divmod(tokens, shape.page_tokens)
    slots = aligned(shape.pages_of(tokens) * shape.slot_sizes[side]).reshape(-1, shape.slot_sizes[side])
    slots[:] = 0
    into = view_slots(shape, slots, side)
    into[:full] = rows[:, : tokens - rest].reshape(heads, full, shape.page_tokens, dim).swapaxes(0, 1)
    if rest:
        into[full, :, :rest] = rows[:, tokens - rest :]
    return slots


def check_rows(shape: KvShape, keys: NDArray[Any], values: NDArray[Any], *lead: int) -> None:
    """Raise ValueError if the arrays are not keys and values [*lead, kv_heads, tokens, dim]."""
    tokens = keys.shape[-2] if keys.ndim > 1 else 0
    forms = shape.forms(*lead, shape.kv_heads, tokens)
    for name, found, (form, dtype) in zip(("keys", "values"), (keys, values), forms, strict=True):
        if found.shape != form or not tokens or found.dtype != dtype:
            raise ValueError(f"{name}: must be {dtype} {form}, not {found.dtype} {found.shape}")


class PageEntry(NamedTuple):
    """Page `page` of its chain, with `tokens` tokens, appended in `epoch`; checksums of its parts, keys first."""

    sequence: int
    layer: int
    page: int
    tokens: int
    epoch: int
    crcs: tuple[int, ...]


class ExtentEntry(NamedTuple):
    """The owner of an extent, which is the `ordinal`-th of `layer` of `sequence`."""

    sequence: int
    layer: int
    ordinal: int


class Commit(NamedTuple):
    """At the end of `epoch`, `pages` entries of this and earlier epochs were on disk."""

    epoch: int
    pages: int


Record = TypeVar("Record", PageEntry, ExtentEntry, Commit)
_KINDS: dict[type[Any], bytes] = {PageEntry: b"PAGE", ExtentEntry: b"EXTN", Commit: b"DONE"}


def pack(record: PageEntry | ExtentEntry | Commit, size: int = RECORD_BYTES) -> bytes:
    """Return a record as `size` bytes."""
    words: Sequence[int]
    if isinstance(record, Commit):
        words = (record.epoch, record.pages & 0xFFFFFFFF, record.pages >> 32)  # 64 bits
    elif isinstance(record, PageEntry):
        words = (*record[:-1], *record.crcs)
    else:
        words = record
    body = struct.pack(f"<4s{len(words)}I", _KINDS[type(record)], *words).ljust(size - 4, b"\0")
    return body + struct.pack("<I", zlib.crc32(body))


def unpack(kind: type[Record], data: bytes, crcs: int = 0) -> Record | None:
    """Return the record in `data` with `crcs` page checksums; None if it is missing, torn or damaged."""
    own = len(kind._fields) - 1 if kind is PageEntry else 3
    if data[:4] != _KINDS[kind] or len(data) < 8 + 4 * (own + crcs) or data[-4:] != struct.pack("<I", zlib.crc32(data[:-4])):
        return None
    words = struct.unpack_from(f"<{own + crcs}I", data, 4)
    if kind is PageEntry:
        return kind(*words[:own], words[own:])  # type: ignore[call-arg]
    return kind(words[0], words[1] | words[2] << 32) if kind is Commit else kind(*words)


@dataclass(frozen=True)
class ExtentPlan:
    """The layout of an extent with `slots` pages; `sizes` are the bytes of the keys and of the values of a page.

    `parts`: the number of equal parts of each side, which have one checksum each. `direct`: parts are whole blocks.
    `interleaved`: each part of keys is followed by the part of values.
    """

    slots: int
    sizes: tuple[int, int]
    parts: tuple[int, int]
    direct: bool
    interleaved: bool = False

    @property
    def entry_bytes(self) -> int:
        return next(size for size in ENTRY_BYTES if 28 + 4 * sum(self.parts) <= size)

    @property
    def table_bytes(self) -> int:
        return whole_blocks(self.entry_at(self.slots))

    def entry_at(self, slot: int) -> int:
        """Return the offset of an entry in the extent; slot -1 is the entry of the extent."""
        return (slot + 1) * self.entry_bytes

    def part_bytes(self, side: int) -> int:
        return self.sizes[side] // self.parts[side]

    def step_bytes(self, side: int) -> int:
        return (sum(self.sizes) if self.interleaved else self.sizes[side]) // self.parts[side]

    def slot_at(self, side: int, slot: int) -> int:
        before = self.part_bytes(KEYS) if side and self.interleaved else side * self.slots * self.sizes[KEYS]
        return self.table_bytes + before + slot * self.parts[side] * self.step_bytes(side)

    @functools.cached_property
    def geometry(self) -> Int64s:
        """int64 [2, 4] of keys and values: parts of a page, bytes of a part, offset of the first in an extent, distance."""
        sides = (KEYS, VALUES)
        rows = [(self.parts[side], self.part_bytes(side), self.slot_at(side, 0), self.step_bytes(side)) for side in sides]
        return np.array(rows, np.int64)

    def end_at(self, slot: int) -> int:
        return self.slot_at(VALUES, slot) + (self.parts[VALUES] - 1) * self.step_bytes(VALUES) + self.part_bytes(VALUES)


def parts_of(slot_bytes: int) -> int:
    """Return the number of parts of a side of a page: one per block, or fewer if an entry is too small."""
    blocks = slot_bytes // BLOCK_BYTES
    return next(blocks // size for size in range(1, blocks + 1) if blocks % size == 0 and blocks // size <= MOST_PARTS)


class Layout:
    """The layout of a file with `extent_pages` pages of a layer in an extent; `parts` of each side: None for `parts_of`.

    `interleaved` has no effect unless both sides have equally many parts.
    """

    def __init__(
        self, shape: KvShape, extent_pages: int, parts: Sequence[int] | None = None, interleaved: bool = False
    ) -> None:
        if type(extent_pages) is not int or not 1 <= extent_pages <= 1 << 20:
            raise ValueError(f"extent_pages: must be from 1 to {1 << 20}, not {extent_pages!r}")
        sizes = shape.slot_sizes
        of_keys, of_values = map(parts_of, sizes) if parts is None else parts
        for size, count in zip(sizes, (of_keys, of_values), strict=True):
            if type(count) is not int or not 1 <= count <= MOST_PARTS or size % (count * BLOCK_BYTES):
                raise ValueError(
                    f"parts: must be from 1 to {MOST_PARTS} and divide {size} bytes into whole blocks, not {count!r}"
                )
        self.shape = shape
        self.extent_pages = extent_pages
        self.of_layer = ExtentPlan(
            extent_pages, sizes, (of_keys, of_values), True, bool(interleaved) and of_keys == of_values
        )
        # Ids and positions take 8 bytes a token, so an extent fits more pages of them, but it must fit one.
        slot = 8 * shape.page_tokens
        least = whole_blocks(2 * RECORD_BYTES) + 2 * slot
        self.extent_bytes = whole_blocks(max(self.of_layer.end_at(extent_pages - 1), least))
        slots = max(1, (self.extent_bytes - BLOCK_BYTES - RECORD_BYTES) // (RECORD_BYTES + 2 * slot))
        if self.extent_bytes > LARGEST_EXTENT:
            raise ValueError(
                f"extent_pages: an extent of {self.extent_bytes} bytes is more than the limit of {LARGEST_EXTENT}"
            )
        self.of_tokens = ExtentPlan(slots, (slot, slot), (1, 1), False)
        self.table_bytes = max(self.of_layer.table_bytes, self.of_tokens.table_bytes)

    def plan(self, layer: int) -> ExtentPlan:
        """Return the plan of the extents of `layer`; `shape.layers` stands for the tokens."""
        return self.of_tokens if layer == self.shape.layers else self.of_layer

    def at(self, extent: int) -> int:
        return EXTENTS_AT + extent * self.extent_bytes

    def header(self) -> bytes:
        plan = self.of_layer
        fields_ = {"extent_pages": self.extent_pages, "parts": plan.parts, "interleaved": plan.interleaved}
        fields_ |= self.shape.to_json()
        identity = json.dumps(fields_, sort_keys=True).encode()
        if _HEADER.size + len(identity) > BLOCK_BYTES:
            raise ValueError(f"model: a name of {len(self.shape.model)} characters is too long for the header")
        crc = zlib.crc32(identity, zlib.crc32(struct.pack("<II", VERSION, len(identity))))
        return (_HEADER.pack(MAGIC, VERSION, len(identity), crc) + identity).ljust(BLOCK_BYTES, b"\0")


def read_header(block: bytes, path: Path) -> Layout:
    """Return the layout in a file's first block; DataError: no spill file, a newer version, or damaged."""
    if len(block) < _HEADER.size or block[:8] != MAGIC:
        raise DataError(f"{path}: magic: not a spill file of llmcache", "name a file that llmcache has written")
    _, version, length, crc = _HEADER.unpack_from(block)
    if version > VERSION:
        hint = "open it with a newer llmcache, or spill the context again"
        raise DataError(f"{path}: version: must be at most {VERSION} for this llmcache, not {version}", hint)
    identity = block[_HEADER.size : _HEADER.size + length]
    if crc != zlib.crc32(identity, zlib.crc32(struct.pack("<II", version, length))) or version < 1:
        raise DataError(f"{path}: header: wrong checksum", "the file is damaged: spill the context again")
    try:
        found: dict[str, Any] = json.loads(identity)
        names = {field.name for field in fields(KvShape)}
        parts, interleaved = found["parts"] if version > 1 else (1, 1), version > 2 and found["interleaved"]
        return Layout(KvShape(**{name: found[name] for name in names}), found["extent_pages"], parts, interleaved)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: header: {error}", "the file is damaged: spill the context again") from None


def check_identity(found: KvShape, wanted: KvShape, path: Path) -> None:
    """Raise DataError with each field in which a file's identity differs."""
    mine, theirs = wanted.to_json(), found.to_json()
    differ = [f"{name}: {theirs[name]!r}, not {mine[name]!r}" for name in mine if mine[name] != theirs[name]]
    if differ:
        raise DataError(
            f"{path}: spill file of another model ({'; '.join(differ)})", "name another file, or spill the context again"
        )


class PageRun(NamedTuple):
    """`pages` adjacent pages; the first is page `first` of its chain, at `slot` of `extent`."""

    first: int
    pages: int
    extent: int
    slot: int


@dataclass
class PageChain:
    """The pages of one layer (or the tokens) of one sequence."""

    sequence: int
    layer: int
    plan: ExtentPlan
    extents: array[int] = field(default_factory=lambda: array("q"))
    crcs: tuple[array[int], array[int]] = field(default_factory=lambda: (array("I"), array("I")))
    """Checksums of the parts of keys and of values, in the order of pages."""
    epochs: array[int] = field(default_factory=lambda: array("I"))
    last_tokens: int = 0
    lost: int = 0  # number of pages before a failed sync lost some; 0 if none were lost

    @property
    def pages(self) -> int:
        return len(self.epochs)

    def tokens_of(self, page: int, page_tokens: int) -> int:
        return self.last_tokens if page == self.pages - 1 else page_tokens

    def add(self, entry: PageEntry) -> None:
        of_keys = self.plan.parts[KEYS]
        self.crcs[KEYS].extend(entry.crcs[:of_keys])
        self.crcs[VALUES].extend(entry.crcs[of_keys:])
        self.epochs.append(entry.epoch)
        self.last_tokens = entry.tokens

    def entry(self, page: int, page_tokens: int) -> PageEntry:
        of_sides = zip(self.crcs, self.plan.parts, strict=True)
        crcs = tuple(crc for of_side, parts in of_sides for crc in of_side[page * parts : (page + 1) * parts])
        return PageEntry(self.sequence, self.layer, page, self.tokens_of(page, page_tokens), self.epochs[page], crcs)

    def cut(self, pages: int, page_tokens: int) -> None:
        if pages < self.pages:
            for of_side, parts in zip(self.crcs, self.plan.parts, strict=True):
                del of_side[pages * parts :]
            del self.epochs[pages:]
            self.last_tokens = page_tokens if pages else 0

    def runs(self, pages: list[int], longest: int = 1 << 30) -> Iterator[PageRun]:
        """Yield `pages`, in the given order, as runs of at most `longest` pages that are adjacent in the file."""
        start = 0
        while start < len(pages):
            ordinal, slot = divmod(pages[start], self.plan.slots)
            end = start + 1
            limit = min(len(pages), start + min(longest, self.plan.slots - slot))
            while end < limit and pages[end] == pages[end - 1] + 1:
                end += 1
            yield PageRun(pages[start], end - start, self.extents[ordinal], slot)
            start = end
