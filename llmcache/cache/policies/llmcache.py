"""The policy of a mount: replayed by `steering` on its access log, by `reuse` and `hotset` (experts) on any other trace."""

from __future__ import annotations

import json
import reprlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmcache.arrays import Flags, Int64s
from llmcache.cache.hotset import HotSet
from llmcache.cache.policies.base import Policy
from llmcache.cache.policies.reuse import Reuse
from llmcache.cache.steering import HIT, Steering
from llmcache.errors import DataError
from llmcache.model.modelfile import UNKNOWN, Models
from llmcache.model.tensors import Experts, ModelLayout
from llmcache.trace.record import BlockSpace, Provenance, TraceFile
from llmcache.units import BLOCK_BYTES

SCHEME, SCHEME_1_0 = (
    "llmcache.mount/2",
    "llmcache.mount/1",
)  # extra["mount"] of logs of mounts (mount.daemon.logwriter)
_MOST_EXTENTS = 1 << 22  # of all spaces of a log at a time: eight times the maximum of a mount
# exceptions caused by events of invalid types
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class LLMCache(Policy):
    """The policy of llmcachefs: loops by period, experts by popularity and recency, and never much worse than LRU.

    On the access log of an arena mount, with its budget as the capacity, it gives the mount's own hits, misses and
    evictions. On other traces, `Reuse` caches blocks, and `HotSet` whole experts of MoE models whose files still exist.
    Without `describe`, no files are known.

    Source: io_caching section 4.1 (classes, loops by period); `hotset` for experts.
    """

    name = "llmcache"
    title = "llmcache"

    def __init__(self, capacity: int, blocks: int) -> None:
        super().__init__(capacity, blocks)
        everything = BlockSpace(np.array([0]), np.array([blocks]))  # one file
        self._source: Recorded | Cut = Cut(everything, (), capacity, UNKNOWN)

    def describe(self, space: BlockSpace, files: Sequence[TraceFile], provenance: Provenance, models: Models) -> None:
        """Set the facts on files from a mount's log, or from the file table. DataError for a damaged log."""
        if Recorded.fits(provenance):
            self._source = Recorded(space, provenance, self.capacity)
        else:
            self._source = Cut(space, files, self.capacity, models)

    def _run(self, first: Int64s, count: Int64s, hits: Int64s) -> None:
        hits[:] = self._source.replay(first, count)

    def _resident(self) -> Flags:
        held = np.zeros(self.blocks, np.bool_)
        held[self._source.resident()] = True
        return held

    @property
    def evictions(self) -> int:
        """Return the number of blocks evicted; unwanted blocks were never inserted."""
        return self._source.evictions


class Recorded:
    """The rows of an arena mount's access log, each with the mount's verdict.

    If the capacity differs from the mount's budget, its budget changes are scaled in proportion.
    """

    def __init__(self, places: BlockSpace, provenance: Provenance, capacity: int) -> None:
        self._places = places
        self.core = Steering(capacity * BLOCK_BYTES, judges_use=provenance.extra.get("mount") != SCHEME_1_0)
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
        extra = provenance.extra
        return extra.get("mount") in (SCHEME, SCHEME_1_0) and extra.get("mode") == "arena" and not provenance.lost_events

    def replay(self, first: Int64s, count: Int64s) -> Int64s:
        """Return the hit blocks of each row; DataError if rows and provenance do not match."""
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
            raise _damaged(f"row {self._row}: no event names file {file}")
        key, base, extent_bytes = self._files[file]
        extent = base + block * BLOCK_BYTES // extent_bytes
        try:
            if self.core.is_single(key, extent):
                self.core.page(key, extent, length)
                return 0
            return length if self.core.reference(key, extent) == HIT else 0
        except _DAMAGE as error:
            raise _damaged(f"row {self._row}: space {reprlib.repr(key)} has no extent {extent}") from error

    def _catch_up(self) -> None:
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
        elif event[0] == "limit":
            self.core.limit(event[1] * self._capacity // self._budget)
        else:
            more = [max(0, int(count)) for _, _, count in event[3]] if event[0] == "space" else []
            if more and sum(space.count for space in self.core.spaces.values()) + sum(more) > _MOST_EXTENTS:
                raise ValueError(f"more than {_MOST_EXTENTS} extents")
            self.core.apply(event)

    @property
    def evictions(self) -> int:
        return self.core.evicted_blocks

    def resident(self) -> Int64s:
        files = {(key, base): file for file, (key, base, _) in self._files.items()}
        return _sorted(_resident_ids(self.core, self._places, files))


@dataclass
class _Use:
    """The latest use of an expert: whether it hit, and for each slice, by number, the end of the blocks read since."""

    hit: bool
    ends: dict[int, int] = field(default_factory=dict)


@dataclass
class _FileExperts:
    """The experts of one file; expert n has the key `first` + n."""

    file: int
    experts: Experts
    first: int
    uses: dict[int, _Use] = field(default_factory=dict)

    def blocks(self, expert: int) -> int:
        return -(-self.experts.bytes_of(expert) // BLOCK_BYTES)


class Cut:
    """Replays any trace: `Reuse` caches blocks, and experts of MoE models whose file still exists are cached as in mounts.

    An expert is loaded whole when its first block misses, and its other blocks miss too in the same use. Dense tensors come
    first.
    """

    def __init__(self, places: BlockSpace, files: Sequence[TraceFile], capacity: int, models: Models) -> None:
        self._places = places
        self._capacity = capacity
        self._reuse = Reuse(capacity, places.blocks)
        self._models: dict[int, _FileExperts] = {}
        self._hot = HotSet()
        self._keys, self._uses = 0, 0  # number of all experts, and of their uses
        self._expert_blocks, self._expert_room = 0, capacity - 1
        self._evictions = 0  # of experts
        for file in files:
            if (found := models.experts(file)) is not None:
                self._add(file, found[1], models.header(file))

    def _add(self, file: TraceFile, experts: Experts, header: ModelLayout | None) -> None:
        self._models[file.id] = _FileExperts(file.id, experts, self._keys)
        self._keys += experts.count
        self._hot.token_uses += experts.token_uses
        regions = header.regions() if header is not None else ()
        dense = sum(region.end - region.first_byte for region in regions if region.role == "loop" and not region.sparse)
        self._expert_room = max(0, self._expert_room - -(-dense // BLOCK_BYTES))

    def replay(self, first: Int64s, count: Int64s) -> Int64s:
        if not self._models:
            return self._reuse.replay(first, count)
        files, blocks = self._places.locate(first)
        hits = np.zeros(len(first), np.int64)
        pending: list[tuple[int, int, int]] = []  # row, first id and length of the parts outside experts
        runs = zip(first.tolist(), files.tolist(), blocks.tolist(), count.tolist(), strict=True)
        for row, (start, file, block, length) in enumerate(runs):
            model = self._models.get(file)
            if model is None:
                pending.append((row, start, length))
                continue
            end = block + length
            while block < end:
                number, until = _slice_at(model.experts, block, end)
                if number is None:
                    pending.append((row, start, until - block))
                else:
                    if not (hit := self._used(model, number, block, until)):
                        self._flush(pending, hits)
                        self._fit()
                    hits[row] += (until - block) * hit
                start += until - block
                block = until
        self._flush(pending, hits)
        return hits

    def _flush(self, pending: list[tuple[int, int, int]], hits: Int64s) -> None:
        if pending:
            rows, first, count = np.array(pending, np.int64).T.copy()
            np.add.at(hits, rows, self._reuse.replay(first, count))
            pending.clear()

    def _used(self, model: _FileExperts, number: int, block: int, until: int) -> bool:
        expert = model.experts.expert_of[number]
        use = model.uses.get(expert)
        if use is None or block < use.ends.get(number, 0):
            key = model.first + expert
            use = model.uses[expert] = _Use(key in self._hot)
            self._hot.use(key)
            self._uses += 1
            if self._uses % max(1, self._hot.token_uses) == 0:
                self._hot.retire(range(self._keys))
            if not use.hit:
                self._hot.keep(key)
                self._expert_blocks += model.blocks(expert)
        use.ends[number] = until
        return use.hit

    def _fit(self) -> None:
        while self._expert_blocks > self._expert_room and (key := self._hot.least()) is not None:
            model = next(one for one in self._models.values() if one.first <= key < one.first + one.experts.count)
            self._hot.drop(key)
            blocks = model.blocks(key - model.first)
            self._expert_blocks -= blocks
            self._evictions += blocks
        self._reuse.resize(self._capacity - self._expert_blocks)

    @property
    def evictions(self) -> int:
        return self._reuse.evictions + self._evictions

    def resident(self) -> Int64s:
        held = [self._reuse.resident()]
        for model in self._models.values():
            for expert in range(model.experts.count):
                if model.first + expert in self._hot:
                    for offset, size in model.experts.ranges(expert):
                        ends = offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES)
                        held.append(self._places.within(model.file, *ends))
        return _sorted(held)


def _slice_at(experts: Experts, block: int, end: int) -> tuple[int | None, int]:
    offset = block * BLOCK_BYTES
    number = bisect_right(experts.starts, offset) - 1
    if number < 0 or offset >= experts.starts[number] + experts.sizes[number]:
        if number + 1 < len(experts.starts):
            end = min(end, max(block + 1, experts.starts[number + 1] // BLOCK_BYTES))
        return None, end
    return number, min(end, max(block + 1, (experts.starts[number] + experts.sizes[number]) // BLOCK_BYTES))


def _resident_ids(core: Steering, places: BlockSpace, files: dict[tuple[str, int], int]) -> list[Int64s]:
    found = []
    for space in core.spaces.values():
        for extent in space.held:
            part = space.part_of(extent)
            first = (extent - part.base) * space.extent_bytes // BLOCK_BYTES
            found.append(places.within(files[space.key, part.base], first, first + space.blocks(extent)))
    return found


def _sorted(parts: list[Int64s]) -> Int64s:
    return np.unique(np.concatenate([np.empty(0, np.int64), *parts]))


def _damaged(what: str) -> DataError:
    hint = "a log can only be replayed whole, not a slice of it and not several in one; if it is whole, it is damaged"
    return DataError(f"provenance: not the complete access log of an arena mount: {what}", hint)
