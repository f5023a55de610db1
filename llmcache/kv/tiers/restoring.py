"""What a spill file and its page tables give back after the process that wrote them has ended, or was killed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import DataError
from llmcache.kv.spill import KvShape, Recovery, SpillReader
from llmcache.kv.tiers import tables
from llmcache.kv.tiers.config import StoreConfig
from llmcache.kv.tiers.core import Core
from llmcache.kv.tiers.moving import Mover
from llmcache.kv.tiers.spilling import Spiller
from llmcache.kv.tiers.tables import OPEN, Runs, Tables

Numbers = NDArray[np.int64]
_HINT = "they are damaged: compute the context again"


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
        told = tables.read(path)
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
        sides = [[_tokens(file, runs, shape.page_tokens)[side][:length] for runs in sequences] for side in (0, 1)]
    ids, positions = (np.stack(side) for side in sides)
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


def adopt(core: Core, spiller: Spiller, mover: Mover, found: Found) -> None:
    """Gives a fresh store what was found: the tables, the tokens, and in memory sink, window, tail and the latest pages."""
    size, length = core.shape.page_tokens, found.ids.shape[1]
    core.table.adopt(found.sequences)
    core.tokens.add(found.ids, found.positions)
    core.lengths[:] = length
    full, rest = divmod(length, size)
    partial: list[tuple[int, int]] = []
    if rest:
        numbers = core.table.table[:, full]
        partial = [(int(core.table.stream[number]), int(core.table.place[number])) for number in numbers]
    cuts = {stream: core.table.ends.get(stream, 0) for stream in found.streams}
    spiller.adopt(partial, {stream: end for stream, end in cuts.items() if end < found.streams[stream]})
    bound, sink = core.config.cpu_pages, core.config.sink_pages
    last = 0 if bound is None else max(sink, full - (bound - sink))
    pages = [*range(min(sink, last, core.table.pages)), *range(last, core.table.pages)]
    for layer in range(core.shape.layers):
        mover.bring(layer, core.table.table[:, pages].reshape(-1))
    if rest:
        core.table.unsettle(full)


def config_for(config: StoreConfig, path: Path, found: Found) -> StoreConfig:
    """Returns `config` for the spill file at `path` and as many sequences as were found."""
    return replace(config, path=path, batch=len(found.sequences))


def told_of(core: Core, found: Found, recovery: Recovery) -> Restored:
    """Returns what restoring has to tell."""
    length, size = core.tokens.length, core.shape.page_tokens
    return Restored(length, length % size, 0 if found.saved else size - 1, recovery)
