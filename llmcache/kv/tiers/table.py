"""Page tables: which physical page each page of each sequence is, and where it is in the spill file.

Two sequences share a page only at the same index (copy on write, by reference counts). A page has a number, which is the
same in all layers and is reused when no sequence refers to it. A stream is a sequence of the spill file, to which pages are
only appended. A sequence continues in the stream of its last full page if that page is the last of the stream, and otherwise
in a new stream. So a sequence uses a prefix of each of its streams.

Without forks, sequence i is stream i. With forks, a small JSON file next to the spill file (`Tables`) lists the runs of
pages of each sequence. The last run of a sequence is open while it only grows: it extends to the end of its stream. Tables
are written before the pages they describe change: on a restore, missing pages are cut off, and pages that no table names are
removed.
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
OPEN = -1  # number of pages of a run that extends to the end of its stream
SCHEMA = "llmcache.kv.tables/1"

_HINT = "they are damaged: compute the context again"
_NAME = re.compile("[0-9a-f]*")


class PageTable:
    """The pages of `batch` sequences; by page number, `stream` and `place` in the file, NOWHERE while a page is not full."""

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
        return len(self._table)

    @property
    def numbers(self) -> int:
        return len(self._used)

    @property
    def table(self) -> Int64s:
        return self._table[:, : self.pages]

    def extend(self, pages: int) -> None:
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
            # Popped from the end, lowest first, so that neighboring pages get neighboring slots.
            self._free = [*range(self.numbers + more - 1, self.numbers - 1, -1), *self._free]
            self._used = np.concatenate([self._used, np.zeros(more, np.int32)])
            nowhere = np.full(more, NOWHERE, np.int32)
            self.stream, self.place = (np.concatenate([old, nowhere]) for old in (self.stream, self.place))
        found = [self._free.pop() for _ in range(count)]
        self._used[found] = 1
        self.stream[found] = self.place[found] = NOWHERE
        return found

    def settle(self, first: int, end: int) -> None:
        """Assign places in the file to the pages `first` .. `end` - 1 of every sequence, which are full now."""
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
        self.stream[self._table[:, page]] = self.place[self._table[:, page]] = NOWHERE
        self._shorten()

    def cut(self, pages: int) -> Int64s:
        self.pages = min(self.pages, pages)
        return self._recount()

    def choose(self, index: Int64s, partial: bool) -> tuple[Int64s, list[tuple[int, int]]]:
        """Replace sequence i by sequence `index[i]`. Return the numbers that are now unused, and pages to copy.

        `partial`: each sequence needs its own last page; copy each (from, to) in every layer.
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
        unused = np.flatnonzero((used == 0) & (self._used > 0))
        self._used = used
        self._free += unused[::-1].tolist()
        self._shorten()
        return unused

    def _shorten(self) -> None:
        alive = np.flatnonzero((self._used > 0) & (self.stream != NOWHERE))
        ends: dict[int, int] = {}
        for stream in np.unique(self.stream[alive]).tolist():
            ends[stream] = int(self.place[alive[self.stream[alive] == stream]].max()) + 1
        self.ends = ends

    def runs(self, sequence: int, pages: int) -> list[tuple[int, int]]:
        """Return the first `pages` pages as runs (stream, number of pages from its start)."""
        streams = self.stream[self._table[sequence, :pages]]
        bounds = [0, *(np.flatnonzero(np.diff(streams)) + 1).tolist(), pages] if pages else []
        return [(int(streams[a]), b - a) for a, b in itertools.pairwise(bounds)]

    def by_stream(self, numbers: Int64s) -> Iterator[tuple[int, Int64s]]:
        order = numbers[np.lexsort((self.place[numbers], self.stream[numbers]))]
        streams = self.stream[order]
        for stream in np.unique(streams).tolist():
            yield stream, order[streams == stream]

    def places(self, numbers: Int64s) -> Int64s:
        return self.place[numbers].astype(np.int64)

    def adopt(self, sequences: list[list[tuple[int, int]]]) -> None:
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
    """Ids and positions of all tokens of all sequences."""

    def __init__(self, batch: int) -> None:
        self.length = 0
        self._room = np.empty((2, batch, 64), np.int64)

    @property
    def sides(self) -> Int64s:
        """Ids and positions, [2, batch, tokens]."""
        found: Int64s = self._room[:, :, : self.length]
        return found

    def add(self, ids: Int64s, positions: Int64s) -> None:
        before, self.length = self.sides, self.length + ids.shape[1]
        if self.length > self._room.shape[2]:
            self._room = np.empty((*before.shape[:2], max(self.length, 2 * self._room.shape[2])), np.int64)
            self._room[:, :, : before.shape[2]] = before
        self._room[:, :, before.shape[2] : self.length] = ids, positions

    def choose(self, index: Int64s) -> None:
        self._room = self._room[:, index]


class Sequences:
    """The batch of a store: its page table, tokens and pools, which all parts of the store share.

    `lengths` [layers]: tokens of each layer. `step`: number of finished steps. `victims`: returns the pages to drop when the
    window advances and the pool is full; None for the oldest.
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
        return self.table.batch

    @property
    def length(self) -> int:
        """Tokens of every sequence, left padding included, without a step in progress."""
        return self.tokens.length

    def bound_pools(self) -> None:
        """Let pools double up to their limit, plus the page being filled and one that is not written yet."""
        bound = self.config.cpu_pages
        for pool in self.pools:
            pool.most = None if bound is None else self.batch * (bound + 2)

    @property
    def middle(self) -> range:
        """The pages between sink and window, without a step in progress."""
        pages = self.length // self.shape.page_tokens
        first = min(pages, self.config.sink_pages)
        return range(first, max(first, pages - self.config.window_pages))

    def check_between_steps(self) -> None:
        if (self.lengths != self.length).any():
            raise ValueError("commit: a step is in progress, end it first")

    def checked(self, layer: int, sequence: int = 0) -> Pool:
        if not 0 <= layer < self.shape.layers:
            raise ValueError(f"layer: must be from 0 to {self.shape.layers - 1}, not {layer}")
        if not 0 <= sequence < self.batch:
            raise ValueError(f"sequence: must be from 0 to {self.batch - 1}, not {sequence}")
        self.pools[layer].extend_to(self.table.numbers)
        return self.pools[layer]

    def checked_pages(self, sequence: int, pages: Int64s | list[int], within: range) -> tuple[Int64s, Int64s]:
        found = np.asarray(pages, np.int64).reshape(-1)
        if len(found) and not (within.start <= found.min() and found.max() < within.stop):
            raise ValueError(f"pages: must be from {within.start} to {within.stop - 1}, not {found.min()} to {found.max()}")
        return found, self.table.table[sequence, found]


@dataclass(frozen=True)
class Tables:
    """The runs of each sequence: (stream, number of pages from its start, or OPEN).

    `saved`: the file is complete, and the last page may be partial. `sidecar`: the caller's name for the file of the last
    save, or "".
    """

    sequences: list[Runs]
    saved: bool = False
    sidecar: str = ""

    @staticmethod
    def plain(batch: int) -> Tables:
        return Tables([[(stream, OPEN)] for stream in range(batch)])

    @property
    def is_plain(self) -> bool:
        alike = all(not runs or (len(runs) == 1 and runs[0][0] == b) for b, runs in enumerate(self.sequences))
        return alike and not self.saved and not self.sidecar

    def opened(self) -> Tables:
        opened = [[*runs[:-1], (runs[-1][0], OPEN)] if runs else [] for runs in self.sequences]
        return replace(self, sequences=opened)

    @staticmethod
    def path(spill: Path) -> Path:
        """Return the path of the tables, which ends with the spill file's name, as `--spill` patterns expect."""
        return spill.with_name(f"tables-{spill.name}")

    def write(self, spill: Path) -> None:
        path = self.path(spill)
        data = {"schema": SCHEMA, "saved": self.saved, "sequences": self.sequences, "beside": self.sidecar}
        with explained(path, "writing page tables"), files.replacing(path) as stream:
            stream.write(json.dumps(data).encode())

    @classmethod
    def read(cls, spill: Path) -> Tables | None:
        path = cls.path(spill)
        try:
            with explained(path, "reading page tables"):
                try:
                    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                except FileNotFoundError:
                    return None
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema: must be '{SCHEMA}', not {reprlib.repr(data['schema'])}")
            if not _NAME.fullmatch(sidecar := data.get("beside", "")):
                raise ValueError(f"beside: {reprlib.repr(sidecar)} is not the name of a file")
            return cls([_checked(runs) for runs in data["sequences"]], bool(data["saved"]), sidecar)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: page tables: {error}", _HINT) from None

    @classmethod
    def remove(cls, spill: Path) -> None:
        with explained(path := cls.path(spill), "removing page tables"):
            files.remove(path)


def _checked(runs: Any) -> Runs:
    """A run starts where its stream does, so a sequence has each stream at most once."""
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
    """The content of a spill file: sequences as runs, ids and positions [batch, tokens], and the pages of each stream."""

    sequences: list[Runs]
    ids: Int64s
    positions: Int64s
    streams: dict[int, int]
    tables: Tables | None


def snapshot_of(path: Path, shape: KvShape) -> Snapshot:
    """Return the content of a spill file; DataError: another model, damaged, or no sequence."""
    with SpillReader.open(path, shape) as file:
        tables = Tables.read(path)
        streams = {stream: file.pages(stream) for stream in file.sequences if file.pages(stream)}
        wanted = Tables.plain(max(streams, default=-1) + 1) if tables is None else tables
        if not wanted.sequences:
            raise DataError(f"{path}: has no sequences to restore", "spill the context again")
        sequences = [_existing(runs, streams) for runs in wanted.sequences]
        tokens = [_length(file, runs) for runs in sequences]
        length = min(tokens)
        if length < max(tokens) or (tables is not None and not tables.saved):
            length -= length % shape.page_tokens
        sequences = [_cut(runs, shape.pages_of(length)) for runs in sequences]
        sides = np.stack([_tokens(file, runs, shape.page_tokens)[:, :length] for runs in sequences], axis=1)
    ids, positions = sides
    return Snapshot(sequences, ids, positions, streams, tables)


def _existing(runs: Runs, streams: dict[int, int]) -> Runs:
    found: Runs = []
    for stream, pages in runs:
        available = streams.get(stream, 0)
        found.append((stream, available if pages == OPEN else min(pages, available)))
        if found[-1][1] < pages:
            break
    return [run for run in found if run[1]]


def _length(file: SpillReader, runs: Runs) -> int:
    size = file.shape.page_tokens
    if not runs:
        return 0
    for stream, pages in runs[:-1]:
        if file.length(stream) < pages * size:
            raise DataError(f"{file.path}: page tables: page {pages - 1} of stream {stream} is not full", _HINT)
    stream, pages = runs[-1]
    return sum(count for _, count in runs[:-1]) * size + min(pages * size, file.length(stream))


def _cut(runs: Runs, pages: int) -> Runs:
    found: Runs = []
    for stream, count in runs:
        found.append((stream, min(count, pages)))
        pages -= found[-1][1]
    return [run for run in found if run[1]]


def _tokens(file: SpillReader, runs: Runs, size: int) -> Int64s:
    parts = [np.stack(file.tokens(stream))[:, : pages * size] for stream, pages in runs]
    return np.concatenate([np.empty((2, 0), np.int64), *parts], axis=1)
