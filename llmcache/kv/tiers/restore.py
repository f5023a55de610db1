"""What survives a store: the page tables beside its spill file, and what both give back when the process has ended.

A spill file alone tells of sequences that were never forked: sequence i is stream i. Else a small JSON file does: which
pages of which streams each sequence is made of. The last run of a sequence is open while it is only added to: whatever
its stream holds from there on belongs to it, so the tables need not be written for every page. They are written before
what they tell of changes: a page that is named and not there (yet) is cut off when it is restored; one that is there and
not named is taken away.
"""

from __future__ import annotations

import json
import re
import reprlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmcache import files
from llmcache.errors import DataError
from llmcache.kv.spill import KvShape, Recovery, SpillReader
from llmcache.kv.spill.raw import problem
from llmcache.kv.tiers.config import Numbers

Runs = list[tuple[int, int]]
OPEN = -1
"""Pages of a run that takes all that there are in its stream."""
SCHEMA = "llmcache.kv.tables/1"

_HINT = "they are damaged: compute the context again"
_NAME = re.compile("[0-9a-f]*")


@dataclass(frozen=True)
class Tables:
    """Runs of each sequence: (stream, pages from its beginning on, or OPEN).

    `saved`: nothing is missing behind the last page, which may be partial. `beside`: what the caller calls the file of its
    own that belongs to what was saved last ("": none).
    """

    sequences: list[Runs]
    saved: bool = False
    beside: str = ""

    @staticmethod
    def plain(batch: int) -> Tables:
        """Returns the tables of sequences that were never forked."""
        return Tables([[(stream, OPEN)] for stream in range(batch)])

    @property
    def is_plain(self) -> bool:
        """True if the spill file alone tells as much."""
        alike = all(not runs or (len(runs) == 1 and runs[0][0] == b) for b, runs in enumerate(self.sequences))
        return alike and not self.saved and not self.beside

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
        told = {"schema": SCHEMA, "saved": self.saved, "sequences": self.sequences, "beside": self.beside}
        try:
            with files.replacing(path) as stream:
                stream.write(json.dumps(told).encode())
        except OSError as error:
            raise problem(path, "writing page tables", error) from None

    @classmethod
    def read(cls, spill: Path) -> Tables | None:
        """Returns the tables of a spill file, None if there are none; DataError if they are damaged."""
        path = cls.path(spill)
        try:
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if told["schema"] != SCHEMA:
                raise ValueError(f"schema {reprlib.repr(told['schema'])}")
            if not _NAME.fullmatch(beside := told.get("beside", "")):
                raise ValueError(f"a file {reprlib.repr(beside)} beside it")
            return cls([_checked(runs) for runs in told["sequences"]], bool(told["saved"]), beside)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise problem(path, "reading page tables", error) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: page tables: {error}", _HINT) from None

    @classmethod
    def remove(cls, spill: Path) -> None:
        """Takes the tables of a spill file away, if it has any; on the disk when it returns."""
        path = cls.path(spill)
        try:
            files.remove(path)
        except OSError as error:
            raise problem(path, "removing page tables", error) from None


def _checked(runs: Any) -> Runs:
    """`runs` if a sequence can consist of them: a run begins where its stream does, so none has a stream twice."""
    found = [(stream, pages) for stream, pages in runs]
    for place, (stream, pages) in enumerate(found):
        is_open = pages == OPEN and place == len(found) - 1
        if type(stream) is not int or type(pages) is not int or not 0 <= stream < 1 << 32 or (pages < 0 and not is_open):
            raise ValueError(f"a run of {reprlib.repr(pages)} pages of stream {reprlib.repr(stream)}")
    if len({stream for stream, _ in found}) < len(found):
        raise ValueError("a sequence has a stream twice")
    return found


@dataclass(frozen=True)
class Restored:
    """What `KvStore.restore` found: `tokens` of each sequence, `tail_tokens` of them in a last page that is not full.

    `may_be_lost`: at most so many tokens had been appended behind them and never written; 0 after `save`. `recovery`:
    what the spill file dropped: pages that not all layers had, torn entries.
    """

    tokens: int
    tail_tokens: int
    may_be_lost: int
    recovery: Recovery


@dataclass(frozen=True)
class Found:
    """Sequences of one length as runs of streams, their ids and positions [batch, tokens], and the pages of each stream."""

    sequences: list[Runs]
    ids: Numbers
    positions: Numbers
    streams: dict[int, int]
    told: Tables | None

    @property
    def saved(self) -> bool:
        """True if nothing is missing at the end."""
        return self.told is not None and self.told.saved


def look(path: Path, shape: KvShape) -> Found:
    """Returns what a spill file of `shape` holds; DataError if it is another model's, damaged, or has no sequence."""
    with SpillReader.open(path, shape) as file:
        told = Tables.read(path)
        streams = {stream: file.pages(stream) for stream in file.sequences if file.pages(stream)}
        wanted = Tables.plain(max(streams, default=-1) + 1) if told is None else told
        if not wanted.sequences:
            raise DataError(f"{path}: it holds no sequence", "there is nothing to restore: make it anew")
        sequences = [_there(runs, streams) for runs in wanted.sequences]
        tokens = [_length(file, runs) for runs in sequences]
        length = min(tokens)
        if length < max(tokens) or (told is not None and not told.saved):
            length -= length % shape.page_tokens
        sequences = [_cut(runs, shape.pages_of(length)) for runs in sequences]
        pairs = [_tokens(file, runs, shape.page_tokens) for runs in sequences]
    ids, positions = (np.stack([pair[side][:length] for pair in pairs]) for side in (0, 1))
    return Found(sequences, ids, positions, streams, told)


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


def _tokens(file: SpillReader, runs: Runs, size: int) -> tuple[Numbers, Numbers]:
    sides: list[list[Numbers]] = [[np.empty(0, np.int64)], [np.empty(0, np.int64)]]
    for stream, pages in runs:
        for into, found in zip(sides, file.tokens(stream), strict=True):
            into.append(found[: pages * size])
    ids, positions = (np.concatenate(side) for side in sides)
    return ids, positions
