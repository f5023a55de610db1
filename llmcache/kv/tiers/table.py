"""Pages and tokens of sequences: which physical page each page of each sequence is, and where it lies in the spill file.

All sequences of a batch have equally many pages, and two of them share a page only at the same place of both: copy on
write, by counting. A page is known by its number, which all layers share; numbers are used again once no sequence refers
to them. A stream is a sequence of the spill file: pages are only ever added to its end, so a sequence goes on in the
stream that its last whole page ends, if nobody else has, and in a stream of its own otherwise. So whatever a sequence has
of a stream is a beginning of it.

A spill file alone tells of sequences that were never forked: sequence i is stream i. Else a small JSON file beside it does:
which pages of which streams each sequence is made of (`Tables`). The last run of a sequence is open while it is only added
to: whatever its stream holds from there on belongs to it, so the tables need not be written for every page. They are
written before what they tell of changes: a page that is named and not there (yet) is cut off when it is restored; one that
is there and not named is taken away.
"""

from __future__ import annotations

import itertools
import json
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmcache import files
from llmcache.arrays import Int64s
from llmcache.errors import DataError
from llmcache.kv.spill import KvShape, SpillReader
from llmcache.kv.spill.raw import explained
from llmcache.kv.tiers.config import StoreConfig, Traffic, Victims
from llmcache.kv.tiers.pool import Pool

NOWHERE = -1
Runs = list[tuple[int, int]]
OPEN = -1
"""Pages of a run that takes all that there are in its stream."""
SCHEMA = "llmcache.kv.tables/1"

_HINT = "they are damaged: compute the context again"
_NAME = re.compile("[0-9a-f]*")


class PageTable:
    """Pages of `batch` sequences. `stream`, `place` [numbers]: where a page lies in the file, NOWHERE before it is full."""

    def __init__(self, batch: int) -> None:
        self.pages = 0
        self._table = np.empty((batch, 16), np.int64)
        self._used = np.empty(0, np.int32)
        self._free: list[int] = []
        self.stream = np.empty(0, np.int32)
        self.place = np.empty(0, np.int32)
        self.ends: dict[int, int] = {}

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self._table)

    @property
    def numbers(self) -> int:
        """Page numbers are below it."""
        return len(self._used)

    @property
    def table(self) -> Int64s:
        """Numbers of the pages of all sequences, [batch, pages]."""
        return self._table[:, : self.pages]

    def extend(self, pages: int) -> None:
        """Gives every sequence fresh pages until it has `pages`."""
        if pages > self._table.shape[1]:
            wider = np.empty((self.batch, max(pages, 2 * self._table.shape[1])), np.int64)
            wider[:, : self.pages] = self.table
            self._table = wider
        for page in range(self.pages, pages):
            self._table[:, page] = self._fresh(self.batch)
        self.pages = max(self.pages, pages)

    def _fresh(self, count: int) -> list[int]:
        if len(self._free) < count:
            more = max(64, count, self.numbers)
            # Popped from the end: the lowest first, so that neighbours get neighbouring slots.
            self._free = [*range(self.numbers + more - 1, self.numbers - 1, -1), *self._free]
            self._used = np.concatenate([self._used, np.zeros(more, np.int32)])
            nowhere = np.full(more, NOWHERE, np.int32)
            self.stream, self.place = (np.concatenate([old, nowhere]) for old in (self.stream, self.place))
        found = [self._free.pop() for _ in range(count)]
        self._used[found] = 1
        self.stream[found] = self.place[found] = NOWHERE
        return found

    def settle(self, first: int, end: int) -> None:
        """Gives the pages `first` .. `end` - 1 of every sequence, which are full now, their places in the file."""
        for page in range(first, end):
            for row in self._table:
                number = row[page]
                if self.stream[number] == NOWHERE:
                    self._settle_one(number, int(row[page - 1]) if page else None)

    def _settle_one(self, number: int, before: int | None) -> None:
        stream = NOWHERE if before is None else int(self.stream[before])
        if before is None or self.ends.get(stream) != self.place[before] + 1:
            stream = next(free for free in range(len(self.ends) + 1) if free not in self.ends)
            self.ends[stream] = 0
        self.stream[number], self.place[number] = stream, self.ends[stream]
        self.ends[stream] += 1

    def unsettle(self, page: int) -> None:
        """Takes the places of the last page of every sequence back, as if it were not full."""
        self.stream[self._table[:, page]] = self.place[self._table[:, page]] = NOWHERE
        self._shorten()

    def cut(self, pages: int) -> Int64s:
        """Takes all pages from `pages` on from every sequence; returns the numbers that nobody uses any more."""
        self.pages = min(self.pages, pages)
        return self._recount()

    def choose(self, index: Int64s, partial: bool) -> tuple[Int64s, list[tuple[int, int]]]:
        """Makes sequence i what sequence `index[i]` was. Returns the numbers nobody uses any more, and pages to copy.

        `partial`: the last page is not full, so each sequence needs its own: (from, to) must be copied in every layer.
        """
        chosen = np.empty((len(index), self._table.shape[1]), np.int64)
        chosen[:, : self.pages] = self.table[index]
        self._table = chosen
        copies: list[tuple[int, int]] = []
        if partial:
            seen: set[int] = set()
            for row in chosen:
                number = int(row[self.pages - 1])
                if number in seen:
                    row[self.pages - 1] = self._fresh(1)[0]
                    copies.append((number, int(row[self.pages - 1])))
                seen.add(number)
        return self._recount(), copies

    def _recount(self) -> Int64s:
        used = np.bincount(self.table.reshape(-1), minlength=self.numbers).astype(np.int32)
        gone = np.flatnonzero((used == 0) & (self._used > 0))
        self._used = used
        self._free += gone[::-1].tolist()
        self._shorten()
        return gone

    def _shorten(self) -> None:
        """Lets each stream end behind the last of its pages that is in use; one without any is free."""
        alive = np.flatnonzero((self._used > 0) & (self.stream != NOWHERE))
        ends: dict[int, int] = {}
        for stream in np.unique(self.stream[alive]).tolist():
            ends[stream] = int(self.place[alive[self.stream[alive] == stream]].max()) + 1
        self.ends = ends

    def runs(self, sequence: int, pages: int) -> list[tuple[int, int]]:
        """Returns where the first `pages` pages of a sequence lie, as (stream, pages from its beginning on)."""
        streams = self.stream[self._table[sequence, :pages]]
        bounds = [0, *(np.flatnonzero(np.diff(streams)) + 1).tolist(), pages] if pages else []
        return [(int(streams[a]), b - a) for a, b in itertools.pairwise(bounds)]

    def by_stream(self, numbers: Int64s) -> Iterator[tuple[int, Int64s]]:
        """Yields the pages `numbers` by the stream that they lie in, in the order of their places there."""
        order = numbers[np.lexsort((self.place[numbers], self.stream[numbers]))]
        streams = self.stream[order]
        for stream in np.unique(streams).tolist():
            yield stream, order[streams == stream]

    def places(self, numbers: Int64s) -> Int64s:
        """Returns the places of pages in their streams."""
        return self.place[numbers].astype(np.int64)

    def adopt(self, sequences: list[list[tuple[int, int]]]) -> None:
        """Makes the table of sequences as `runs` has told them, all equally long."""
        shared: dict[tuple[int, int], int] = {}
        for b, runs in enumerate(sequences):
            places = [(stream, place) for stream, pages in runs for place in range(pages)]
            self.extend(len(places))
            for page, (stream, place) in enumerate(places):
                fresh = int(self._table[b, page])
                number = shared.setdefault((stream, place), fresh)
                self._table[b, page] = number
                self.stream[number], self.place[number] = stream, place
        self._recount()


class Tokens:
    """Ids and positions of all tokens of all sequences; room doubles."""

    def __init__(self, batch: int) -> None:
        self.length = 0
        self._room = np.empty((2, batch, 64), np.int64)

    @property
    def sides(self) -> Int64s:
        """Ids and positions as they were given, [2, batch, tokens]."""
        found: Int64s = self._room[:, :, : self.length]
        return found

    def add(self, ids: Int64s, positions: Int64s) -> None:
        """Takes tokens [batch, n] at the end."""
        before, self.length = self.sides, self.length + ids.shape[1]
        if self.length > self._room.shape[2]:
            self._room = np.empty((*before.shape[:2], max(self.length, 2 * self._room.shape[2])), np.int64)
            self._room[:, :, : before.shape[2]] = before
        self._room[:, :, before.shape[2] : self.length] = ids, positions

    def choose(self, index: Int64s) -> None:
        """Makes sequence i what sequence `index[i]` was."""
        self._room = self._room[:, index]


class Sequences:
    """The batch of a store: its page table, tokens and pools, which all of its parts work on.

    `config`: what it was made from; `batch` there is that of the beginning. `shape`: whose keys and values. `lengths`
    [layers]: tokens each layer has. `traffic`: what moved so far. `step`: steps so far. `victims`: who chooses the pages
    that go down when the window moves on and the pool is full; None: the longest there.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.shape: KvShape = config.shape
        self.table = PageTable(config.batch)
        self.tokens = Tokens(config.batch)
        self.traffic = Traffic()
        self.lengths = np.zeros(config.shape.layers, np.int64)
        self.pools = [Pool(config.shape) for _ in range(config.shape.layers)]
        self.bound_pools()
        self.victims: Victims | None = None
        self.step = 0

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.table.batch

    @property
    def length(self) -> int:
        """Tokens of every sequence, left padding included, whose step is over (`KvStore.commit`)."""
        return self.tokens.length

    def bound_pools(self) -> None:
        """Tells the pools how far to double: the bound, the page that is being filled, and one that is not written yet."""
        bound = self.config.cpu_pages
        for pool in self.pools:
            pool.most = None if bound is None else self.batch * (bound + 2)

    @property
    def middle(self) -> range:
        """Pages that may be chosen now: between sink and window, counted in tokens whose step is over."""
        pages = self.length // self.shape.page_tokens
        first = min(pages, self.config.sink_pages)
        return range(first, max(first, pages - self.config.window_pages))

    def check_between_steps(self) -> None:
        """ValueError if layers have tokens whose step is not over."""
        if (self.lengths != self.length).any():
            raise ValueError("commit: a step is in progress, end it first")

    def checked(self, layer: int, sequence: int = 0) -> Pool:
        """Returns the pool of a layer; ValueError if there is no such layer or sequence."""
        if not 0 <= layer < self.shape.layers:
            raise ValueError(f"layer: must be from 0 to {self.shape.layers - 1}, not {layer}")
        if not 0 <= sequence < self.batch:
            raise ValueError(f"sequence: must be from 0 to {self.batch - 1}, not {sequence}")
        self.pools[layer].know(self.table.numbers)
        return self.pools[layer]

    def checked_pages(self, sequence: int, pages: Int64s | list[int], within: range) -> tuple[Int64s, Int64s]:
        """Returns `pages` as an array, and their numbers; ValueError if one is not `within`."""
        found = np.asarray(pages, np.int64).reshape(-1)
        if len(found) and not (within.start <= found.min() and found.max() < within.stop):
            raise ValueError(f"pages: must be from {within.start} to {within.stop - 1}, not {found.min()} to {found.max()}")
        return found, self.table.table[sequence, found]


@dataclass(frozen=True)
class Tables:
    """Runs of each sequence: (stream, pages from its beginning on, or OPEN).

    `saved`: nothing is missing behind the last page, which may be partial. `sidecar`: what the caller calls the file of its
    own that belongs to what was saved last ("": none).
    """

    sequences: list[Runs]
    saved: bool = False
    sidecar: str = ""

    @staticmethod
    def plain(batch: int) -> Tables:
        """Returns the tables of sequences that were never forked."""
        return Tables([[(stream, OPEN)] for stream in range(batch)])

    @property
    def is_plain(self) -> bool:
        """True if the spill file alone tells as much."""
        alike = all(not runs or (len(runs) == 1 and runs[0][0] == b) for b, runs in enumerate(self.sequences))
        return alike and not self.saved and not self.sidecar

    def opened(self) -> Tables:
        """Returns them with the last run of each sequence open."""
        opened = [[*runs[:-1], (runs[-1][0], OPEN)] if runs else [] for runs in self.sequences]
        return replace(self, sequences=opened)

    @staticmethod
    def path(spill: Path) -> Path:
        """Returns where the tables of a spill file are; the name ends like its own (--spill globs)."""
        return spill.with_name(f"tables-{spill.name}")

    def write(self, spill: Path) -> None:
        """Writes them in place of those that a spill file has; on the disk when it returns."""
        path = self.path(spill)
        told = {"schema": SCHEMA, "saved": self.saved, "sequences": self.sequences, "beside": self.sidecar}
        with explained(path, "writing page tables"), files.replacing(path) as stream:
            stream.write(json.dumps(told).encode())

    @classmethod
    def read(cls, spill: Path) -> Tables | None:
        """Returns the tables of a spill file, None if there are none; DataError if they are damaged."""
        path = cls.path(spill)
        try:
            with explained(path, "reading page tables"):
                try:
                    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                except FileNotFoundError:
                    return None
            if told["schema"] != SCHEMA:
                raise ValueError(f"schema: must be '{SCHEMA}', not {reprlib.repr(told['schema'])}")
            if not _NAME.fullmatch(sidecar := told.get("beside", "")):
                raise ValueError(f"beside: {reprlib.repr(sidecar)} is not the name of a file")
            return cls([_checked(runs) for runs in told["sequences"]], bool(told["saved"]), sidecar)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: page tables: {error}", _HINT) from None

    @classmethod
    def remove(cls, spill: Path) -> None:
        """Takes the tables of a spill file away, if it has any; on the disk when it returns."""
        with explained(path := cls.path(spill), "removing page tables"):
            files.remove(path)


def _checked(runs: Any) -> Runs:
    """`runs` if a sequence can consist of them: a run begins where its stream does, so none has a stream twice."""
    found = [(stream, pages) for stream, pages in runs]
    for place, (stream, pages) in enumerate(found):
        is_open = pages == OPEN and place == len(found) - 1
        if type(stream) is not int or type(pages) is not int or not 0 <= stream < 1 << 32 or (pages < 0 and not is_open):
            raise ValueError(f"invalid run of {reprlib.repr(pages)} pages of stream {reprlib.repr(stream)}")
    if len({stream for stream, _ in found}) < len(found):
        raise ValueError("a sequence has a stream twice")
    return found


@dataclass(frozen=True)
class Snapshot:
    """Sequences of one length as runs of streams, their ids and positions [batch, tokens], and the pages of each stream."""

    sequences: list[Runs]
    ids: Int64s
    positions: Int64s
    streams: dict[int, int]
    told: Tables | None


def look(path: Path, shape: KvShape) -> Snapshot:
    """Returns what a spill file of `shape` holds; DataError if it is another model's, damaged, or has no sequence."""
    with SpillReader.open(path, shape) as file:
        told = Tables.read(path)
        streams = {stream: file.pages(stream) for stream in file.sequences if file.pages(stream)}
        wanted = Tables.plain(max(streams, default=-1) + 1) if told is None else told
        if not wanted.sequences:
            raise DataError(f"{path}: has no sequences to restore", "spill the context again")
        sequences = [_there(runs, streams) for runs in wanted.sequences]
        tokens = [_length(file, runs) for runs in sequences]
        length = min(tokens)
        if length < max(tokens) or (told is not None and not told.saved):
            length -= length % shape.page_tokens
        sequences = [_cut(runs, shape.pages_of(length)) for runs in sequences]
        sides = np.stack([_tokens(file, runs, shape.page_tokens)[:, :length] for runs in sequences], axis=1)
    ids, positions = sides
    return Snapshot(sequences, ids, positions, streams, told)


def _there(runs: Runs, streams: dict[int, int]) -> Runs:
    """`runs` up to the first page that is not there."""
    found: Runs = []
    for stream, pages in runs:
        there = streams.get(stream, 0)
        found.append((stream, there if pages == OPEN else min(pages, there)))
        if found[-1][1] < pages:
            break
    return [run for run in found if run[1]]


def _length(file: SpillReader, runs: Runs) -> int:
    """Tokens in `runs`. DataError if another page than the last is partial."""
    size = file.shape.page_tokens
    if not runs:
        return 0
    for stream, pages in runs[:-1]:
        if file.length(stream) < pages * size:
            raise DataError(f"{file.path}: page tables: page {pages - 1} of stream {stream} is not full", _HINT)
    stream, pages = runs[-1]
    return sum(count for _, count in runs[:-1]) * size + min(pages * size, file.length(stream))


def _cut(runs: Runs, pages: int) -> Runs:
    """The first `pages` pages of `runs`."""
    found: Runs = []
    for stream, count in runs:
        found.append((stream, min(count, pages)))
        pages -= found[-1][1]
    return [run for run in found if run[1]]


def _tokens(file: SpillReader, runs: Runs, size: int) -> Int64s:
    """Ids and positions in `runs`, [2, tokens]."""
    parts = [np.stack(file.tokens(stream))[:, : pages * size] for stream, pages in runs]
    return np.concatenate([np.empty((2, 0), np.int64), *parts], axis=1)
