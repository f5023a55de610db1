"""A pool of threads for compiled loops, which release the GIL."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

Job = Callable[[], None]
SHARES = 4  # average number of batches of jobs per thread: few enough for a low overhead, and enough to balance the load


def processors() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="llmcache-kernel")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has none of the threads, and would wait forever


def run_all(jobs: Iterable[Job], threads: int | None = None) -> None:
    """Run `jobs` on `threads` threads (None: one per CPU), wait for all, and raise the first error."""
    jobs = list(jobs)
    threads = min(len(jobs), threads or processors())
    if threads <= 1:
        _run(jobs)
        return
    # Submit jobs in batches, because the overhead of a submission is about the time of a small job.
    share = -(-len(jobs) // (SHARES * threads))
    running = [_pool(threads).submit(_run, jobs[first : first + share]) for first in range(0, len(jobs), share)]
    wait(running)  # even if one fails: no job may write after the return
    for done in running:
        done.result()


def _run(jobs: list[Job]) -> None:
    for job in jobs:
        job()
