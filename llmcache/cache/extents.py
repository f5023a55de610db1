"""How a mount cuts files into extents, and one loop space of them as the deterministic core knows it.

A loop space is a file, or the shards of one model in a row; its extents are numbered through all files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from llmcache.cache.arbitration import Settled, Share
from llmcache.cache.loops import LoopLearner
from llmcache.units import BLOCK_BYTES

LARGE_EXTENT = 1 << 20
SMALL_EXTENT = 128 << 10
LARGE_FILE_BYTES = 32 << 20  # from here on extents are large
LEAST_LOOP_BYTES = 4 << 20  # smaller files are hot (tokenizers), model or not; larger ones may be found to loop
EXTENTS_MAX = 1 << 18  # of one space: state and plans cost by the extent. Beyond 256 GiB extents become larger
LARGEST_EXTENT = 4 << 20  # that is fetched whole, so that a space of more than 1 TiB is read page by page


HUGE_BYTES = 2 << 20  # of a huge page, and of an extent of a large file that is steered in place


def extent_bytes_for(size_bytes: int, most: int = EXTENTS_MAX, large: int = LARGE_EXTENT) -> int:
    """Returns the size of the extents (bytes) into which a loop space of `size_bytes` is cut, at most `most` of them.

    A large one has extents of `large`, or of a multiple."""
    least = large if size_bytes >= LARGE_FILE_BYTES else SMALL_EXTENT
    return least * max(1, -(-size_bytes // (least * most)))


@dataclass(frozen=True)
class Part:
    """One file of a loop space: its extents are `base` .. `base + count - 1`."""

    size_bytes: int
    base: int
    count: int


class Region(Protocol):
    """A part of a model file, and how a decoder reads it: see `llmcache.fs.layout.tensors`."""

    @property
    def first_byte(self) -> int:
        """Where it begins."""

    @property
    def end(self) -> int:
        """The byte behind its last."""

    @property
    def role(self) -> str:
        """ "loop", "hot" or "rows"."""

    @property
    def sparse(self) -> bool:
        """True of tensors of which a token needs only a part: experts."""


class Guess(NamedTuple):
    """What a header says of a file's extents: those that are read page by page, the `hot` of these, and the order of all."""

    single: list[int]
    hot: list[int]
    order: list[int]


def first_guess(regions: Iterable[Region], header_bytes: int, extent_bytes: int, count: int, mixture: bool) -> Guess:
    """The guess for a model file of `count` extents with these `regions`, in the order of computation.

    What lies in extents that are wholly hot, rows or (of a mixture, whose experts come in by themselves) sparse is single.
    """
    single = bytearray(count)
    order: dict[int, None] = {}
    for region in regions:
        order.update(dict.fromkeys(range(region.first_byte // extent_bytes, -(-region.end // extent_bytes))))
        if region.role != "loop" or (region.sparse and mixture):
            for extent in range(-(-region.first_byte // extent_bytes), region.end // extent_bytes):
                single[extent] = 1
    singles = [extent for extent in range(count) if single[extent]]
    return Guess(singles, [extent for extent in singles if extent < -(-header_bytes // extent_bytes)], list(order))


class Space:
    """Facts and state of one loop space. `single` extents are read page by page and never held; `hot` ones are of these."""

    def __init__(self, key: str, extent_bytes: int, parts: Sequence[Part], single: bool) -> None:
        self.key = key
        self.extent_bytes = extent_bytes
        self.parts = tuple(parts)
        self.count = sum(part.count for part in parts)
        self.size_bytes = BLOCK_BYTES * sum(-(-part.size_bytes // BLOCK_BYTES) for part in parts)
        self.single = bytearray([single]) * self.count
        self.hot: set[int] = set()
        self.learner = LoopLearner(self.count)
        self.wanted = bytearray(self.count)
        self.held: set[int] = set()
        self.pages: dict[int, int] = {}  # hot extent -> bytes of it that were read
        self.open = True
        self.convoy = 0
        self.first = False  # as the user wants
        self.last = 0  # clock of the last reference
        self.share = Share(0, 0)
        self.settled = Settled(0, 0, [])

    @property
    def loop_bytes(self) -> int:
        """Bytes that take part in the loop; 0 when nothing loops."""
        if not self.learner.looping:
            return 0
        return max(0, self.size_bytes - self.single.count(1) * self.extent_bytes)

    @property
    def visible(self) -> int:
        """Extents that a whole pass references."""
        return self.single.count(0)

    def blocks(self, extent: int) -> int:
        """Returns the 4 KiB blocks of `extent` (the last one of a file may be short)."""
        part = self.part_of(extent)
        size = min(self.extent_bytes, part.size_bytes - (extent - part.base) * self.extent_bytes)
        return max(0, -(-size // BLOCK_BYTES))

    def part_of(self, extent: int) -> Part:
        """Returns the file that `extent` is in; IndexError beyond the last."""
        for part in self.parts:
            if extent < part.base + part.count:
                return part
        raise IndexError(f"extent {extent} of {self.count}")

    def loop_order(self) -> list[int]:
        """Returns the extents that may be held, in visiting order."""
        return [extent for extent in self.learner.order.extent_at if not self.single[extent]]

    def read_page(self, extent: int, size_bytes: int) -> None:
        """Notes that `size_bytes` of a single extent were read."""
        if extent in self.hot:
            self.pages[extent] = min(self.extent_bytes, self.pages.get(extent, 0) + size_bytes)

    def set_single(self, extents: Iterable[int], hot: Iterable[int]) -> list[int]:
        """Makes `extents` single, `hot` ones among them; returns those that were held until now."""
        self.hot.update(hot)
        dropped = []
        for extent in extents:
            self.single[extent], self.wanted[extent] = 1, 0
            if extent in self.held:
                dropped.append(extent)
        return dropped
