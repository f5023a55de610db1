"""Replays traces through policies at many cache sizes: hits, bytes from storage, modelled latency and stalls.

A trace is read twice: once for its block ids, once for all cells of the grid together, in memory that does not grow
with the trace. Where the cells' states do not fit in memory together, they take turns, one more reading each.

Differs for offline policies (Belady), which must see the future: they get the whole trace in one call, 25 bytes for each
row, and are refused where the trace is known to lack accesses.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from llmcache.cache.grid import (
    BATCH_ROWS,
    Cell,
    CurveCell,
    Interrupted,
    PolicyCell,
    Stop,
    ahead,
    parts_of,
    replay,
    state_bytes,
)
from llmcache.cache.latency import FetchModel, check_times
from llmcache.cache.models import UNKNOWN, Models
from llmcache.cache.plan import CacheSize, Plan, Progress, resolved
from llmcache.cache.policies import policy_class
from llmcache.cache.policies.belady import why_not_exact
from llmcache.cache.results import Result, Simulation, Summary, TraceCurve, merged
from llmcache.errors import DataError
from llmcache.trace.formats import open_trace
from llmcache.trace.record import WRITE, BlockSpace, Trace, TraceFile, TraceReader
from llmcache.units import BLOCK_BYTES


@dataclass
class TraceRun:
    """Runs `plan` on one trace. Cells whose states together need more than `memory_bytes` take turns."""

    plan: Plan
    name: str
    source: Trace | TraceReader
    models: Models
    pool: Executor
    stop: Stop
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
        """Returns the rows; `Interrupted` once `stop` is set, DataError where the trace does not serve the plan."""
        plan = self.plan
        seers = [name for name in plan.policies if policy_class(name).offline]
        if seers and (reason := why_not_exact(self.source.provenance)) is not None:
            raise DataError(
                f"provenance: {seers[0]} cannot be exact on '{self.name}': {reason}",
                f"leave {seers[0]} out of --policy",
            )
        space = BlockSpace.of(self._seen(self.source.batches(BATCH_ROWS)))
        if plan.period_ns is not None and self._rows > 1:
            check_times(self._first_ns, self._last_ns)
        sizes = resolved(plan.sizes, space.footprint)
        # First references stall whatever the cache: LRU of everything misses nothing else.
        cold = None if plan.period_ns is None else PolicyCell(policy_class("lru")(space.blocks, space.blocks), plan.meter())
        curve = CurveCell(space.blocks) if plan.curves else None
        firsts: list[Cell] = [cell for cell in (cold, curve) if cell is not None]
        self._in_all = self._rows * (len(firsts) + len(plan.policies) * len(sizes))
        todo = [(policy, size) for policy in plan.policies for size in sizes]
        results: list[Result] = []
        summary = None
        while summary is None or todo:
            cells = self._next_cells(todo, space, sum(map(state_bytes, firsts)))
            online = [cell for _, cell in cells if not cell.policy.offline]
            offline = [cell for _, cell in cells if cell.policy.offline]
            parts = parts_of(self.source.batches(BATCH_ROWS), space)
            replay(parts, [*firsts, *online], offline, self.pool, self.stop, self._advance)
            summary = summary or self._summary(space, cold)
            results += [Result.of(summary, plan.model, cell, size) for size, cell in cells]
            firsts = []
        curves = () if curve is None else (TraceCurve(self.name, curve.distances.curve()),)
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
        """Takes from `todo` what fits in memory, one at least, and returns it as (size in bytes, cell)."""
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
            cold_stalls=tuple(cold.meter.stalls()) if cold is not None and cold.meter is not None else (),
        )


ModelsOf = Callable[[Sequence[TraceFile]], Models]
Source = str | Path | Trace | TraceReader

MEMORY_SHARE = 0.25  # of the machine's memory, for the states of all cells that run at the same time
SIGNALS_S = 0.5  # one that comes just before the main thread waits is only handled after that


def no_models(_files: Sequence[TraceFile]) -> Models:
    """Nothing is known of models."""
    return UNKNOWN


def simulate(
    source: Source,
    policies: Sequence[str],
    cache_sizes_bytes: Sequence[CacheSize],
    model: FetchModel | None = None,
    *,
    period_ns: int | None = None,
    jobs: int | None = None,
) -> list[Result]:
    """Returns a row for each policy and size (bytes, or `Share`s of the footprint) on one trace.

    `source` is a path in any format, a `Trace` or an open `TraceReader`; `jobs` threads, by default one per core.
    """
    plan = Plan(tuple(policies), tuple(cache_sizes_bytes), model or FetchModel(), period_ns)
    return list(simulate_all([source], plan, jobs=jobs).results)


def simulate_all(
    sources: Sequence[Source],
    plan: Plan,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    models: ModelsOf = no_models,
) -> Simulation:
    """Returns the plan's rows for all traces, which share `jobs` threads (default: one per core).

    `models` looks at those of a file table.
    """
    for name in plan.policies:
        policy_class(name)  # an unknown name is refused before anything is read
    sources = list(dict.fromkeys(sources))
    threads = jobs or len(os.sched_getaffinity(0))
    at_once = min(threads, len(sources))
    stop = Stop()
    # After Ctrl-C or the first error the others end with the batch that they are at.
    with ExitStack() as at_end:
        at_end.enter_context(_ctrl_c_sets(stop))
        pool = at_end.enter_context(ThreadPoolExecutor(threads))
        drivers = at_end.enter_context(ThreadPoolExecutor(at_once))
        at_end.callback(setattr, stop, "is_set", True)

        def one(source: Source) -> Simulation:
            if stop.is_set:
                raise Interrupted
            with _opened(source) as (name, trace):
                memory_bytes = int(MEMORY_SHARE * psutil.virtual_memory().total / at_once)
                return TraceRun(plan, name, trace, models(trace.files), pool, stop, progress, memory_bytes).run()

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
def _ctrl_c_sets(stop: Stop) -> Iterator[None]:
    """Has Ctrl-C set `stop`, and raises KeyboardInterrupt at the end; the second one raises it at once.

    Raised where it comes, it could leave a lock of a future taken for good, or be lost in a weak reference's callback.
    """
    came = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            signal.default_int_handler(number, frame)
        came = stop.is_set = True

    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


@contextmanager
def _opened(source: Source) -> Iterator[tuple[str, Trace | TraceReader]]:
    """Yields what a trace is called in the results, and the trace."""
    if isinstance(source, str | Path):
        with open_trace(source) as reader:
            yield str(source), reader
    else:
        yield str(source.path) if isinstance(source, TraceReader) else "trace", source
