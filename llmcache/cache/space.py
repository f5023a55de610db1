"""A loop space: the facts and the plan of one file, or of all shards of one model, whose extents are numbered in a row.

The clock of `learner` is the time (ns) in modes steer and inplace; it counts references in arena and in the simulator, where
only fetches are recorded. The caller holds the lock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from llmcache.cache.loops import LoopLearner
from llmcache.units import BLOCK_BYTES

LARGE_EXTENT = 1 << 20
SMALL_EXTENT = 128 << 10
LARGE_FILE_BYTES = 32 << 20  # files of at least this size have large extents
LEAST_LOOP_BYTES = 4 << 20  # smaller files are hot (tokenizers), model or not; larger ones can turn out to loop
EXTENTS_MAX = 1 << 18  # per space: state and plans grow with the extents. Beyond 256 GiB extents become larger
LARGEST_EXTENT = 4 << 20  # the largest that is fetched whole; a space of more than 1 TiB is read page by page
HUGE_BYTES = 2 << 20  # size of a huge page, and of the extents of a large file in mode inplace


def extent_bytes_for(size_bytes: int, most: int = EXTENTS_MAX, large: int = LARGE_EXTENT) -> int:
    """Return the extent size (bytes) with which a space has at most `most` extents."""
    least = large if size_bytes >= LARGE_FILE_BYTES else SMALL_EXTENT
    return least * max(1, -(-size_bytes // (least * most)))


class Part(Protocol):
    """One file of a loop space: its extents are `base` .. `base + count - 1`."""

    size_bytes: int
    base: int
    count: int


@dataclass
class SpacePart:
    """A `Part` without more facts."""

    size_bytes: int
    base: int
    count: int


@dataclass(frozen=True)
class SpacePlan:
    """The part of a plan that concerns one space.

    `pin` and `unpin` are the changes to the wanted extents. `extents` take part in the loop, and `pinned` of them are
    wanted; the others are streamed through a window of `window_bytes`.
    """

    pinned_bytes: int = 0
    window_bytes: int = 0
    pin: Sequence[int] = ()
    unpin: Sequence[int] = ()
    extents: int = 0
    pinned: int = 0

    @property
    def streamed(self) -> int:
        return self.extents - self.pinned

    def convoy(self, extent_bytes: int) -> tuple[int, int]:
        """Return the ranks within which readers are a convoy, and the ranks from one miss of a reader to its next."""
        streamed = max(1, self.streamed)
        kept = max(2, self.window_bytes // 2 // extent_bytes)
        return kept * self.extents // streamed if self.extents else 1, 3 * -(-self.extents // streamed)


class Space:
    """Facts of one loop space, and its current plan.

    `kind`: "loop", or for extents that are all single: "hot" (small files), "written" or "paged". `single` extents are
    read by pages and never pinned; `hot` ones are single too, and have a reserved share of the budget. `wanted` extents
    are to be pinned. `held` are those that mode arena and the simulator have pinned.
    """

    def __init__(self, key: str, extent_bytes: int, parts: Iterable[Part], kind: str = "loop") -> None:
        self.key = key
        self.kind = kind
        self.number = 0  # in the order in which the spaces were added
        self.extent_bytes = extent_bytes
        self.parts = tuple(parts)
        self.count = sum(part.count for part in self.parts)
        self.size_bytes = BLOCK_BYTES * sum(-(-part.size_bytes // BLOCK_BYTES) for part in self.parts)
        self.single = bytearray([kind != "loop"]) * self.count
        self.hot: set[int] = set(range(self.count) if kind == "hot" else ())
        self.learner = LoopLearner(self.count)
        self.wanted = bytearray(self.count)
        self.held: set[int] = set()
        self.pages: dict[int, int] = {}  # hot extent -> number of its bytes read, in arena
        self.open = True  # a client has a file of it open, or the user requested that it stays
        self.convoy = 0  # steps by which the window is widened, because readers drift apart
        self.user_pinned = False  # pinned before all other spaces, open or not
        self.left = False  # left to LRU, which reads less: nothing is pinned
        self.last = 0  # clock of the last reference
        self.plan = SpacePlan()

    def bytes_in_loop(self, learner: LoopLearner) -> int:
        if not learner.looping:
            return 0
        return max(0, self.size_bytes - (self.single.count(1) + learner.use.unused.count(1)) * self.extent_bytes)

    @property
    def loop_bytes(self) -> int:
        return self.bytes_in_loop(self.learner)

    @property
    def visible(self) -> int:
        return self.single.count(0) - self.learner.use.unused.count(1)

    def blocks(self, extent: int) -> int:
        part = self.part_of(extent)
        size = min(self.extent_bytes, part.size_bytes - (extent - part.base) * self.extent_bytes)
        return max(0, -(-size // BLOCK_BYTES))

    def part_of(self, extent: int) -> Part:
        if not 0 <= extent < self.count:
            raise IndexError(f"extent: must be from 0 to {self.count - 1}, not {extent}")
        return self.parts[bisect_right(self.parts, extent, key=attrgetter("base")) - 1]

    def set_predicted_order(self, guess: Iterable[int]) -> None:
        self.learner.set_predicted_order(guess)

    def make_single(self, extents: Iterable[int]) -> None:
        """Have extents read by pages from now on; the plan no longer pins them."""
        single, wanted, unused = self.single, self.wanted, self.learner.use.unused
        for extent in extents:
            single[extent] = 1
            wanted[extent] = unused[extent] = 0

    def adopt(self, plan: SpacePlan) -> None:
        self.plan = plan
        for extent in plan.unpin:
            self.wanted[extent] = 0
        for extent in plan.pin:
            self.wanted[extent] = 1

    def resize(self, count: int) -> None:
        self.count = count
        self.single, self.wanted = bytearray(b"\1") * count, bytearray(count)
        self.learner.resize(count)
