"""One pool of threads for all loops: they hold no GIL, so it is as good as a pool of processes and shares the arrays."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

Job = Callable[[], None]
SHARES = 4
"""How many shares of the jobs each thread gets in the mean: few enough to be cheap, enough to end at about one time."""


def processors() -> int:
    """Returns how many processors this process may use."""
    return len(os.sched_getaffinity(0))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="llmcache-kernel")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of these threads, and would wait for them for ever


def run_all(jobs: Iterable[Job], threads: int | None = None) -> None:
    """Runs `jobs` on `threads` threads (None: one a processor) and returns when all are done; raises what one raises."""
    jobs = list(jobs)
    threads = min(len(jobs), threads or processors())
    if threads <= 1:
        _run(jobs)
        return
    # Handing a job over costs about as much as a small one takes, so many go together.
    share = -(-len(jobs) // (SHARES * threads))
    running = [_pool(threads).submit(_run, jobs[first : first + share]) for first in range(0, len(jobs), share)]
    wait(running)  # all of them, even if one fails: none may write any more where the caller goes on
    for done in running:
        done.result()


def _run(jobs: list[Job]) -> None:
    for job in jobs:
        job()
