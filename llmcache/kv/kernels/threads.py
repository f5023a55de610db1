"""One pool of threads for all loops: they hold no GIL, so it is as good as a pool of processes and shares the arrays."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]


def processors() -> int:
    """Returns how many processors this process may use."""
    return len(os.sched_getaffinity(0))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="llmcache-kernel")


def run_all(jobs: Iterable[Job], threads: int | None = None) -> None:
    """Runs `jobs` on `threads` threads (None: one a processor) and returns when all are done; raises what one raises."""
    jobs = list(jobs)
    threads = min(len(jobs), threads or processors())
    if threads <= 1:
        for job in jobs:
            job()
        return
    for done in [_pool(threads).submit(job) for job in jobs]:
        done.result()
