"""Replay traces through policies at many cache sizes: hits, bytes from storage, modelled latency and stalls.

A trace is read once for its block ids, and once for each group of cells whose states fit in memory together. Offline
policies (Belady) receive the whole trace in one call, 25 bytes per row. A batch is submitted to the pool only when all cells
have finished the one before, so a cell's state has one user at a time. Kernels run without the GIL.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

import numpy as np
import psutil

from llmcache.arrays import Flags, Int64s, Uint64s
from llmcache.cache.curves import StackDistances
from llmcache.cache.plan import CacheSize, Plan, Progress, resolved, why_not_exact
from llmcache.cache.policies import policy_class
from llmcache.cache.policies.base import Policy
from llmcache.cache.results import FetchLatency, Result, Simulation, Summary, TraceCurve, merged
from llmcache.cache.sizing import FetchModel
from llmcache.cache.stalls import StallMeter, Stalls
from llmcache.errors import DataError
from llmcache.model.modelfile import UNKNOWN, Models
from llmcache.trace.formats import open_trace
from llmcache.trace.record import WRITE, BlockSpace, Trace, TraceFile, TraceReader
from llmcache.units import BLOCK_BYTES

BATCH_ROWS = 1 << 17

T = TypeVar("T")


class Interrupted(Exception):
    """The replay was interrupted; its counts are incomplete."""


class CancelFlag:
    """Stops the threads of a replay. Without a lock, because a signal handler may set it."""

    is_set = False


@dataclass(frozen=True)
class PlacedRuns:
    """Some rows of a trace: arrays of one length, one entry per run; `first` is a dense id, `reads` is False for a write."""

    t_ns: Uint64s
    first: Int64s
    count: Int64s
    reads: Flags

    def __len__(self) -> int:
        return len(self.first)


Feed = Callable[[PlacedRuns], None]
"""Processes the next rows of a trace."""


class PolicyCell:
    """A policy at one size, with its counts in blocks."""

    def __init__(self, policy: Policy, meter: StallMeter | None) -> None:
        self.policy = policy
        self.meter = meter
        self.hits = 0
        self.read_hits = 0

    def feed(self, part: PlacedRuns) -> None:
        hits = self.policy.replay(part.first, part.count)
        self.hits += int(hits.sum())
        self.read_hits += int(hits[part.reads].sum())
        if self.meter is not None:
            self.meter.add(part.t_ns, np.where(part.reads, part.count - hits, 0))

    def stalls(self) -> tuple[Stalls, ...]:
        return () if self.meter is None else tuple(self.meter.stalls())

    def result(self, summary: Summary, model: FetchModel, cache_bytes: int) -> Result:
        hits, read_hits = self.hits, self.read_hits
        missed = summary.reads - read_hits
        latencies = tuple(FetchLatency(bw, model.latency_s(summary.reads, missed, bw)) for bw in model.storage_bandwidths)
        return Result(
            trace=summary.trace,
            policy=self.policy.name,
            title=self.policy.title,
            cache_bytes=cache_bytes,
            cache_blocks=cache_bytes // BLOCK_BYTES,
            accesses=summary.accesses,
            hits=hits,
            hit_ratio=hits / summary.accesses,
            byte_hit_ratio=read_hits / summary.reads if summary.reads else None,
            reads=summary.reads,
            writes=summary.writes,
            read_hits=read_hits,
            write_hits=hits - read_hits,
            read_bytes=summary.reads * BLOCK_BYTES,
            write_bytes=summary.writes * BLOCK_BYTES,
            storage_read_bytes=missed * BLOCK_BYTES,
            evictions=self.policy.evictions,
            bw=latencies[0].bw,
            latency_s=latencies[0].latency_s,
            latencies=latencies,
            stalls=self.stalls(),
        )


def state_bytes(value: object, depth: int = 4) -> int:
    """Return the bytes of all arrays in `value`, its attributes, and their tuples."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    inside = value if isinstance(value, tuple | list) else getattr(value, "__dict__", {}).values()
    return sum(state_bytes(each, depth - 1) for each in inside) if depth else 0


def ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """Yield `items`; a thread produces each of them while the caller uses the one before."""
    reader = ThreadPoolExecutor(1)
    waiting = reader.submit(next, items, None)
    try:
        while (item := waiting.result()) is not None:
            waiting = reader.submit(next, items, None)
            yield item
    finally:
        # Not joined: an abandoned generator may be garbage-collected while another thread starts, which holds a lock
        # that a join needs.
        reader.shutdown(wait=False)
        if not waiting.cancel():
            wait([waiting])


def parts_of(batches: Iterable[Trace], space: BlockSpace) -> Iterator[PlacedRuns]:
    """Yield the batches with their runs mapped to `space`."""
    for batch in ahead(iter(batches)):
        yield PlacedRuns(batch.t_ns, space.place(batch), batch.count.astype(np.int64), batch.op != WRITE)


def _joined(parts: Sequence[PlacedRuns]) -> PlacedRuns:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((part.t_ns, part.first, part.count, part.reads) for part in parts), strict=True)
    return PlacedRuns(*(np.concatenate(column) for column in columns))


def replay(
    parts: Iterator[PlacedRuns],
    online: Sequence[Feed],
    offline: Sequence[Feed],
    pool: Executor,
    stop: CancelFlag,
    advance: Callable[[int], None],
) -> None:
    """Feed every part to all cells; `offline` ones get all rows at once, at the end.

    `advance` is called with the completed rows times cells. Raises `Interrupted` once `stop` is set.
    """
    # time of each cell's last part: the slowest start first, so that no thread is idle at the end
    seconds = dict.fromkeys(online, 0.0)

    def timed(feed: Feed, part: PlacedRuns) -> None:
        start = time.perf_counter()
        feed(part)
        seconds[feed] = time.perf_counter() - start

    kept: list[PlacedRuns] = []
    waiting: list[Future[None]] = []
    rows = 0
    for part in parts:
        _finish(waiting, stop)
        advance(rows * len(online))
        slowest_first = sorted(online, key=seconds.__getitem__, reverse=True)
        waiting, rows = [pool.submit(timed, feed, part) for feed in slowest_first], len(part)
        if offline:
            kept.append(part)
    _finish(waiting, stop)
    advance(rows * len(online))
    if offline and kept:
        whole = _joined(kept)
        kept.clear()
        for future in [pool.submit(feed, whole) for feed in offline]:
            _finish([future], stop)
            advance(len(whole))


def _finish(futures: Iterable[Future[None]], stop: CancelFlag) -> None:
    """Wait for all `futures` even if one fails, so that no cell is in use; then raise the first error."""
    done = [future.exception() for future in futures]
    for error in done:
        if error is not None:
            raise error
    if stop.is_set:
        raise Interrupted


@dataclass
class TraceRun:
    """Runs `plan` on one trace. Cells whose states together need more than `memory_bytes` run in groups."""

    plan: Plan
    name: str
    source: Trace | TraceReader
    models: Models
    pool: Executor
    stop: CancelFlag
    progress: Progress | None
    memory_bytes: int
    _rows: int = 0
    _reads: int = 0
    _writes: int = 0
    _first_ns: int = 0
    _last_ns: int = 0
    _done: int = 0
    _in_all: int = 0

    def run(self) -> Simulation:
        """Return the rows; `Interrupted` once `stop` is set, DataError if the trace is unsuitable for the plan."""
        plan = self.plan
        offline_policies = [name for name in plan.policies if policy_class(name).offline]
        if offline_policies and (reason := why_not_exact(self.source.provenance)) is not None:
            raise DataError(
                f"provenance: '{self.name}' is incomplete, so {offline_policies[0]} would not be exact: {reason}",
                f"remove {offline_policies[0]} from --policy",
            )
        space = BlockSpace.of(self._seen(self.source.batches(BATCH_ROWS)))
        if plan.period_ns is not None and self._rows > 1 and self._last_ns <= self._first_ns:
            raise DataError(
                "t_ns: all rows of the trace have the same time, so --t cannot divide them into slices of T",
                "omit --t, or use a trace that has times",
            )
        sizes = resolved(plan.sizes, space.footprint)
        # First references stall with any cache: LRU with room for all blocks misses nothing else.
        cold = None if plan.period_ns is None else PolicyCell(policy_class("lru")(space.blocks, space.blocks), plan.meter())
        distances = StackDistances(space.blocks) if plan.curves else None
        firsts = [] if cold is None else [cold.feed]
        if distances is not None:
            firsts.append(lambda part: distances.feed(part.first, part.count, part.reads))
        self._in_all = self._rows * (len(firsts) + len(plan.policies) * len(sizes))
        todo = [(policy, size) for policy in plan.policies for size in sizes]
        results: list[Result] = []
        summary = None
        while summary is None or todo:
            cells = self._next_cells(todo, space, state_bytes((cold, distances)) if firsts else 0)
            online = [cell.feed for _, cell in cells if not cell.policy.offline]
            offline = [cell.feed for _, cell in cells if cell.policy.offline]
            parts = parts_of(self.source.batches(BATCH_ROWS), space)
            replay(parts, [*firsts, *online], offline, self.pool, self.stop, self._advance)
            summary = summary or self._summary(space, cold)
            results += [cell.result(summary, plan.model, size) for size, cell in cells]
            firsts = []
        curves = () if distances is None else (TraceCurve(self.name, distances.curve()),)
        return Simulation(plan.model, plan.period_ns, (summary,), tuple(results), curves)

    def _seen(self, batches: Iterable[Trace]) -> Iterator[Trace]:
        for batch in ahead(iter(batches)):
            if self.stop.is_set:
                raise Interrupted
            if self._rows == 0 and len(batch):
                self._first_ns = int(batch.t_ns[0])
            if len(batch):
                self._last_ns = int(batch.t_ns[-1])
            self._rows += len(batch)
            writes = int(batch.count[batch.op == WRITE].sum())
            self._writes += writes
            self._reads += batch.accesses - writes
            yield batch

    def _next_cells(self, todo: list[tuple[str, int]], space: BlockSpace, used_bytes: int) -> list[tuple[int, PolicyCell]]:
        cells: list[tuple[int, PolicyCell]] = []
        while todo and (not cells or used_bytes < self.memory_bytes):
            policy, size = todo.pop(0)
            cell = PolicyCell(policy_class(policy)(size // BLOCK_BYTES, space.blocks), self.plan.meter())
            cell.policy.describe(space, self.source.files, self.source.provenance, self.models)
            cells.append((size, cell))
            used_bytes += state_bytes(cell)
        return cells

    def _advance(self, work: int) -> None:
        self._done += work
        if self.progress is not None:
            self.progress(self.name, self._done, self._in_all)

    def _summary(self, space: BlockSpace, cold: PolicyCell | None) -> Summary:
        return Summary(
            trace=self.name,
            rows=self._rows,
            accesses=self._reads + self._writes,
            reads=self._reads,
            writes=self._writes,
            footprint_blocks=space.footprint,
            footprint_bytes=space.footprint * BLOCK_BYTES,
            tier=self.source.provenance.tier,
            lost_events=self.source.provenance.lost_events,
            cold_stalls=() if cold is None else cold.stalls(),
        )


ModelsOf = Callable[[Sequence[TraceFile]], Models]
Source = str | Path | Trace

MEMORY_SHARE = 0.25  # of the machine's memory, for the states of all cells that run at the same time
SIGNALS_S = 0.5  # a signal that arrives just before the main thread waits is handled after this time


def simulate(source: Source, policies: Sequence[str], cache_sizes_bytes: Sequence[CacheSize]) -> list[Result]:
    """Return a row for each policy and size (bytes, or shares of the footprint) on one trace."""
    return list(simulate_all([source], Plan(tuple(policies), tuple(cache_sizes_bytes))).results)


def simulate_all(
    sources: Sequence[Source],
    plan: Plan,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    models: ModelsOf | None = None,
) -> Simulation:
    """Return the plan's rows for all traces, which share `jobs` threads (default: one per core).

    `models` maps a file table to models. Only one source may be a `Trace`, because rows are identified by names.
    """
    sources = list(dict.fromkeys(sources))
    threads = jobs or len(os.sched_getaffinity(0))
    at_once = min(threads, len(sources))
    stop = CancelFlag()
    # After Ctrl-C or the first error, the other traces stop after their current batch.
    with ExitStack() as at_end:
        at_end.enter_context(_ctrl_c_sets(stop))
        pool = at_end.enter_context(ThreadPoolExecutor(threads))
        drivers = at_end.enter_context(ThreadPoolExecutor(at_once))
        at_end.callback(setattr, stop, "is_set", True)

        def one(source: Source) -> Simulation:
            if stop.is_set:
                raise Interrupted
            with nullcontext(source) if isinstance(source, Trace) else open_trace(source) as trace:
                memory_bytes = int(MEMORY_SHARE * psutil.virtual_memory().total / at_once)
                name = "trace" if isinstance(source, Trace) else str(source)
                known = UNKNOWN if models is None else models(trace.files)
                return TraceRun(plan, name, trace, known, pool, stop, progress, memory_bytes).run()

        futures = [drivers.submit(one, source) for source in sources]
        done, left = set[Future[Simulation]](), set(futures)
        while left and all(future.exception() is None for future in done):
            done, left = wait(futures, SIGNALS_S, FIRST_EXCEPTION)
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, Interrupted):
            raise error
    return merged(future.result() for future in futures)


@contextmanager
def _ctrl_c_sets(stop: CancelFlag) -> Iterator[None]:
    """Set `stop` on Ctrl-C, and raise KeyboardInterrupt at the end; a second Ctrl-C raises it at once.

    An exception in the signal handler could leave a lock locked.
    """
    was_interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        if was_interrupted:
            signal.default_int_handler(number, frame)
        was_interrupted = stop.is_set = True

    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if was_interrupted:
            raise KeyboardInterrupt
