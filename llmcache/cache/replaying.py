"""References to extents out of a trace's runs, for the deterministic core: as a mount recorded or would cut them.

`Recorded` replays the access log of an arena mount: every row is one reference, facts and budget changes come from the
provenance, and verdicts are those of the mount. `Cut` is what a mount would make of any other trace.

Both map runs of dense block ids to files through a `Places`; per reference they are plain Python.
"""

from __future__ import annotations

import json
import reprlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.arbitration import MIN_WINDOW_BYTES
from llmcache.cache.extents import BLOCK_BYTES, LARGE_FILE_BYTES, LARGEST_EXTENT, LEAST_MODEL_BYTES, extent_bytes_for
from llmcache.cache.steering import HIT, Steering
from llmcache.errors import DataError

if TYPE_CHECKING:
    from llmcache.trace.record import Provenance, TraceFile

Ids = NDArray[np.int64]
SCHEME = "llmcache.mount/1"  # extra["mount"] of what llmcache.fs.daemon.logwriter writes
MODEL_ENDINGS = (".gguf", ".safetensors")
_MOST_EXTENTS = 1 << 22  # of all spaces of a log at a time: eight times what a mount has
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # what events of any types come to
WINDOW_SHARE = 8  # of the capacity, inverted: what is read of an extent within the last so many blocks is one visit


class Places(Protocol):
    """What this needs of `llmcache.trace.record.BlockSpace`."""

    def locate(self, ids: Ids) -> tuple[Ids, Ids]:
        """Returns (file, block) of each id."""

    def within(self, file: int, first: int, end: int) -> Ids:
        """Returns the ids of the blocks first .. end - 1 of a file that the trace touches."""

    def end_of(self, file: int) -> int:
        """Returns the block past the last that the trace touches of a file."""


class OneFile:
    """Places of ids about which nothing is known: they are the blocks of one file."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks

    def locate(self, ids: Ids) -> tuple[Ids, Ids]:
        """File 0, the id itself."""
        return np.zeros_like(ids), ids

    def within(self, file: int, first: int, end: int) -> Ids:
        """The range itself."""
        return np.arange(first, min(end, self._blocks), dtype=np.int64)

    def end_of(self, file: int) -> int:
        """The number of blocks."""
        return self._blocks


class Recorded:
    """The rows of an arena mount's access log, one after the other, from the first.

    With another capacity than the mount's budget, its budget changes are taken in proportion.
    """

    def __init__(self, places: Places, provenance: Provenance, capacity: int) -> None:
        self._places = places
        self.core = Steering(capacity * BLOCK_BYTES)
        try:
            self._budget = int(provenance.extra["budget_bytes"])
            self._rows = int(provenance.extra["rows"])
            events = json.loads(provenance.extra["events"])
            self._events = [(int(row), list(event)) for row, event in events]
        except (*_DAMAGE, RecursionError) as error:
            raise _damaged(f"events: {error}") from error
        self._capacity = capacity * BLOCK_BYTES
        self._row = self._next = 0
        self._files: dict[int, tuple[str, int, int]] = {}  # id -> space, first extent, bytes of an extent

    @staticmethod
    def fits(provenance: Provenance) -> bool:
        """True for the log of a mount whose references are all in it: mode arena, and no row lost."""
        extra = provenance.extra
        return extra.get("mount") == SCHEME and extra.get("mode") == "arena" and not provenance.lost_events

    def replay(self, first: Ids, count: Ids) -> Ids:
        """Returns the hit blocks of each row; DataError if rows and provenance do not belong together."""
        files, blocks = self._places.locate(first)
        hits = np.zeros(len(first), np.int64)
        for index, (file, block, length) in enumerate(zip(files.tolist(), blocks.tolist(), count.tolist(), strict=True)):
            self._catch_up()
            hits[index] = self._reference(file, block, length)
            self._row += 1
        if self._row == self._rows:
            self._catch_up()
        return hits

    def _reference(self, file: int, block: int, length: int) -> int:
        if file not in self._files:
            raise _damaged(f"row {self._row}: file {file} is in no event")
        key, base, extent_bytes = self._files[file]
        extent = base + block * BLOCK_BYTES // extent_bytes
        try:
            if self.core.is_single(key, extent):
                self.core.page(key, extent, length)
                return 0
            return length if self.core.reference(key, extent) == HIT else 0
        except _DAMAGE as error:
            raise _damaged(f"row {self._row}: no extent {extent} in space {reprlib.repr(key)}") from error

    def _catch_up(self) -> None:
        """Applies the events that happened before the next row."""
        while self._next < len(self._events) and self._events[self._next][0] <= self._row:
            event = self._events[self._next][1]
            self._next += 1
            try:
                self._apply(event)
            except _DAMAGE as error:
                raise _damaged(f"event {reprlib.repr(event)}: {reprlib.repr(error)}") from error

    def _apply(self, event: list[Any]) -> None:
        if event[0] == "file":
            _, file, key, part = event
            space = self.core.spaces[key]
            self._files[file] = (key, space.parts[part].base, space.extent_bytes)
        elif event[0] == "space" and sum(self._counts(event[3])) > _MOST_EXTENTS:
            raise ValueError(f"more than {_MOST_EXTENTS} extents")
        elif event[0] == "limit":
            self.core.limit(event[1] * self._capacity // self._budget)
        else:
            self.core.apply(event)

    def _counts(self, parts: list[Any]) -> Iterator[int]:
        """Yields the extents of all spaces there are, and of `parts` that come."""
        yield from (space.count for space in self.core.spaces.values())
        yield from (max(0, int(count)) for _, _, count in parts)

    @property
    def evictions(self) -> int:
        """Blocks that have left."""
        return self.core.evicted_blocks

    def resident(self) -> Ids:
        """Returns the ids of the blocks that are held, ascending."""
        return _ids_held(self.core, self._places, {(key, base): file for file, (key, base, _) in self._files.items()})


class Cut:
    """Runs of any trace, cut into extents as a mount would.

    The first run that touches an extent is the reference; runs that follow soon belong to the same visit: a mount then
    has the extent in its window. New blocks of a visit share its verdict, blocks of it that come again are hits. Small
    files that are no models are read page by page, and kept (least recently read first out) in what loops leave free.
    Files that are called as models are believed to loop from the start.
    """

    def __init__(self, places: Places, files: Sequence[TraceFile], capacity: int) -> None:
        self._places = places
        self._capacity = capacity
        self._known = {file.id: file for file in files}
        self.core = Steering(capacity * BLOCK_BYTES)
        self._extent_blocks: dict[int, int] = {}  # 0: page by page
        self._visits: OrderedDict[tuple[int, int], list[int]] = OrderedDict()  # -> first, end, hit
        self._visited = 0  # blocks
        self._window = min(MIN_WINDOW_BYTES // BLOCK_BYTES, capacity // WINDOW_SHARE)
        self._pages: OrderedDict[int, None] = OrderedDict()
        self._page_evictions = 0

    def replay(self, first: Ids, count: Ids) -> Ids:
        """Returns the hit blocks of each run."""
        files, blocks = self._places.locate(first)
        hits = np.zeros(len(first), np.int64)
        runs = zip(first.tolist(), files.tolist(), blocks.tolist(), count.tolist(), strict=True)
        for index, (start, file, block, length) in enumerate(runs):
            size = self._extent_blocks.get(file)
            size = self._begin(file) if size is None else size
            hits[index] = self._extents(file, block, length, size) if size else self._single(file, start, block, length)
        return hits

    def _begin(self, file: int) -> int:
        """Takes a file in; returns the blocks of its extents, 0 if it is read page by page."""
        known = self._known.get(file)
        size = max(known.size_bytes if known else 0, self._places.end_of(file) * BLOCK_BYTES)
        extent_bytes = extent_bytes_for(size)
        model = known is not None and known.path.endswith(MODEL_ENDINGS) and size > LEAST_MODEL_BYTES
        model = model and extent_bytes <= LARGEST_EXTENT
        kind = "loop" if known is None or model or size >= LARGE_FILE_BYTES else "hot"
        kind = "paged" if extent_bytes > LARGEST_EXTENT else kind
        count = -(-size // extent_bytes)
        self.core.space(str(file), extent_bytes, [(size, 0, count)], kind)
        if model:  # a mount reads the header; a trace has none, so that order and rows stay unknown
            self.core.guess(str(file), [], [], [(0, count)])
        self._extent_blocks[file] = extent_bytes // BLOCK_BYTES if kind == "loop" else 0
        return self._extent_blocks[file]

    def _extents(self, file: int, block: int, length: int, size: int) -> int:
        hits, end = 0, block + length
        while block < end:
            extent = block // size
            until = min(end, (extent + 1) * size)
            hits += self._visit(file, extent, block, until)
            block = until
        return hits

    def _visit(self, file: int, extent: int, first: int, end: int) -> int:
        visit = self._visits.get((file, extent))
        if visit is None:
            hit = self.core.reference(str(file), extent) == HIT
            self._visits[file, extent] = [first, end, hit]
            self._visited += end - first
            self._shrink()
            return (end - first) * hit
        self._visits.move_to_end((file, extent))
        again = max(0, min(end, visit[1]) - max(first, visit[0]))
        before = visit[1] - visit[0]
        visit[0], visit[1] = min(first, visit[0]), max(end, visit[1])
        self._visited += visit[1] - visit[0] - before
        return again + (end - first - again) * visit[2]

    def _shrink(self) -> None:
        while self._visited > self._window and len(self._visits) > 1:
            _, (first, end, _) = self._visits.popitem(last=False)
            self._visited -= end - first

    def _single(self, file: int, start: int, block: int, length: int) -> int:
        """Pages: least recently read first out, in the room that loops leave."""
        room = self._capacity - self.core.held_blocks
        hits = 0
        for page in range(start, start + length):
            if page in self._pages:
                hits += 1
                self._pages.move_to_end(page)
            else:
                self._pages[page] = None
        self.core.page(str(file), block // (extent_bytes_for(0) // BLOCK_BYTES), length - hits)
        self._trim(room)
        return hits

    def _trim(self, room: int) -> None:
        while len(self._pages) > max(0, room):
            self._pages.popitem(last=False)
            self._page_evictions += 1

    @property
    def evictions(self) -> int:
        """Blocks that have left."""
        return self.core.evicted_blocks + self._page_evictions

    def resident(self) -> Ids:
        """Returns the ids of the blocks that are held, ascending."""
        self._trim(self._capacity - self.core.held_blocks)
        held = _ids_held(self.core, self._places, {(str(file), 0): file for file in self._extent_blocks})
        return np.sort(np.concatenate((held, np.fromiter(self._pages, np.int64))))


def _ids_held(core: Steering, places: Places, files: dict[tuple[str, int], int]) -> Ids:
    found = [np.empty(0, np.int64)]
    for space in core.spaces.values():
        for extent in space.held:
            part = space.part_of(extent)
            first = (extent - part.base) * space.extent_bytes // BLOCK_BYTES
            found.append(places.within(files[space.key, part.base], first, first + space.blocks(extent)))
    return np.sort(np.concatenate(found))


def _damaged(what: str) -> DataError:
    hint = "a log is replayed whole, from its first row: no slice, no concatenation; else it is damaged"
    return DataError(f"provenance: not the access log of an arena mount: {what}", hint)
