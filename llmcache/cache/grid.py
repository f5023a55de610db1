"""Replays one trace through a grid of caches: every batch is read once and goes to all cells, which run in threads.

Concurrency: one thread reads batches, one places them, the workers of a pool take (cell, batch) pairs. A cell gets its
batches one after the other: the next batch is handed out only when all cells are done with the last one, and is placed
in the meantime. So a cell's state has one user at a time, and three batches are in memory. Kernels hold no GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from llmcache.arrays import Flags, Int64s, Uint64s
from llmcache.cache.curves import StackDistances
from llmcache.cache.latency import StallMeter
from llmcache.cache.policies.base import Policy
from llmcache.trace.record import WRITE, BlockSpace, Trace

BATCH_ROWS = 1 << 17

T = TypeVar("T")


class Interrupted(Exception):
    """The replay was asked to stop; what it counted is of no use."""


class Stop:
    """Asks the threads of a replay to stop once `is_set`. Without a lock: a signal handler may set it."""

    is_set = False


@dataclass(frozen=True)
class PlacedRuns:
    """Some rows of a trace as the cells take them: arrays of one length, one entry per run.

    `t_ns` uint64; `first` (dense id of the first block) and `count` (blocks) int64; `reads` bool, False for a write.
    """

    t_ns: Uint64s
    first: Int64s
    count: Int64s
    reads: Flags

    def __len__(self) -> int:
        return len(self.first)


class Cell(Protocol):
    """Something that a trace is replayed through."""

    def feed(self, part: PlacedRuns) -> None:
        """Takes the next rows."""


class PolicyCell:
    """A policy at one size, and what it has counted so far, in blocks."""

    def __init__(self, policy: Policy, meter: StallMeter | None = None) -> None:
        self.policy = policy
        self.meter = meter
        self.hits = 0
        self.read_hits = 0

    def feed(self, part: PlacedRuns) -> None:
        """See `Cell.feed`."""
        hits = self.policy.replay(part.first, part.count)
        self.hits += int(hits.sum())
        self.read_hits += int(hits[part.reads].sum())
        if self.meter is not None:
            self.meter.add(part.t_ns, np.where(part.reads, part.count - hits, 0))


class CurveCell:
    """The LRU curve of all sizes."""

    def __init__(self, blocks: int) -> None:
        self.distances = StackDistances(blocks)

    def feed(self, part: PlacedRuns) -> None:
        """See `Cell.feed`."""
        self.distances.feed(part.first, part.count, part.reads)


def state_bytes(value: object, depth: int = 4) -> int:
    """Bytes of the arrays of a cell, of what it has, and of their tuples."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    inside = value if isinstance(value, tuple | list) else getattr(value, "__dict__", {}).values()
    return sum(state_bytes(each, depth - 1) for each in inside) if depth else 0


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields `items`, each of which is made by a thread while the one before it is in use."""
    with ThreadPoolExecutor(1) as reader:
        waiting = reader.submit(next, items, None)
        while (item := waiting.result()) is not None:
            waiting = reader.submit(next, items, None)
            yield item


def parts_of(batches: Iterable[Trace], space: BlockSpace) -> Iterator[PlacedRuns]:
    """Yields the batches as parts, their runs placed in `space`."""
    for batch in ahead(iter(batches)):
        yield PlacedRuns(batch.t_ns, space.place(batch), batch.count.astype(np.int64), batch.op != WRITE)


def joined(parts: Sequence[PlacedRuns]) -> PlacedRuns:
    """Returns the rows of all parts in one, as an offline policy needs them."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((part.t_ns, part.first, part.count, part.reads) for part in parts), strict=True)
    return PlacedRuns(*(np.concatenate(column) for column in columns))


def replay(
    parts: Iterator[PlacedRuns],
    online: Sequence[Cell],
    offline: Sequence[Cell],
    pool: Executor,
    stop: Stop,
    advance: Callable[[int], None],
) -> None:
    """Feeds every part to all cells; `offline` ones get all rows at once, at the end.

    Memory: three parts; with offline cells the whole trace, 25 bytes per row. `advance` is told the rows times cells done.
    `Interrupted` once `stop` is set, when the running batch is done.
    """
    seconds = dict.fromkeys(online, 0.0)  # each cell's last part: the slowest start first, lest a thread idle at the end

    def feed(cell: Cell, part: PlacedRuns) -> None:
        start = time.perf_counter()
        cell.feed(part)
        seconds[cell] = time.perf_counter() - start

    kept: list[PlacedRuns] = []
    waiting: list[Future[None]] = []
    rows = 0
    for part in parts:
        _finish(waiting, stop)
        advance(rows * len(online))
        slowest_first = sorted(online, key=seconds.__getitem__, reverse=True)
        waiting, rows = [pool.submit(feed, cell, part) for cell in slowest_first], len(part)
        if offline:
            kept.append(part)
    _finish(waiting, stop)
    advance(rows * len(online))
    if offline and kept:
        whole = joined(kept)
        kept.clear()
        for future in [pool.submit(cell.feed, whole) for cell in offline]:
            _finish([future], stop)
            advance(len(whole))


def _finish(futures: Iterable[Future[None]], stop: Stop) -> None:
    """Waits for all `futures` even if one fails, so that no cell is in use any more; then raises what failed."""
    done = [future.exception() for future in futures]
    for error in done:
        if error is not None:
            raise error
    if stop.is_set:
        raise Interrupted
