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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import numpy as np

from llmcache.cache.cachesizes import CacheSize
from llmcache.cache.curves import Curve
from llmcache.cache.grid import Interrupted, Stop
from llmcache.cache.latency import FetchModel
from llmcache.cache.models import UNKNOWN, Models
from llmcache.cache.plan import Plan, Progress
from llmcache.cache.policies import policy_class
from llmcache.cache.results import Result, Simulation, merged
from llmcache.cache.tracerun import TraceRun
from llmcache.trace.formats import open_trace
from llmcache.trace.record import Trace, TraceFile, TraceReader

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


def miss_ratio_curve(source: Source, policy: str, sizes: Sequence[CacheSize], jobs: int | None = None) -> Curve:
    """Returns the curve of any policy at `sizes`; `lru_curve` has all sizes at once, for LRU."""
    rows = sorted(simulate(source, [policy], sizes, jobs=jobs), key=lambda row: row.cache_blocks)
    columns = ([getattr(row, name) for row in rows] for name in ("cache_blocks", "hits", "read_hits"))
    blocks, hits, read_hits = (np.array(column, np.int64) for column in columns)
    return Curve(policy, blocks, hits, read_hits, rows[0].accesses, rows[0].reads)


def lru_curve(source: Source) -> Curve:
    """Returns the hits of LRU at every size, from one pass."""
    return simulate_all([source], Plan((), (), curves=True)).curves[0].curve


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
                run = TraceRun(
                    plan,
                    name,
                    trace,
                    models(trace.files),
                    pool=pool,
                    stop=stop,
                    progress=progress,
                    memory_bytes=int(MEMORY_SHARE * _memory_bytes() / at_once),
                )
                return run.run()

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


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
