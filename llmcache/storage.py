"""Reading storage to measure it: several requests under way at a time, each noted when it is done."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait


def timed_reads(
    fd: int, request_bytes: int, order: Sequence[int], readers: int, enough: Callable[[int, float], bool]
) -> list[tuple[float, int]]:
    """Reads requests of an open file, `order` again and again, until `enough`; returns when each was done, s, and its bytes.

    `enough(begun, seconds)`: told how many requests were begun, and for how long. The list is in order of time. OSError: a
    read failed. `fd` may have O_DIRECT.
    """
    places, stop = itertools.count(), threading.Event()
    completed: list[tuple[float, int]] = []
    begin = time.monotonic()

    def reader() -> None:
        with mmap.mmap(-1, request_bytes) as buffer:  # aligned, as O_DIRECT needs it
            while not stop.is_set():
                place = next(places)
                if enough(place, time.monotonic() - begin):
                    return
                size = os.preadv(fd, [buffer], order[place % len(order)] * request_bytes)
                completed.append((time.monotonic() - begin, size))

    with ThreadPoolExecutor(readers) as pool:
        try:
            reading = [pool.submit(reader) for _ in range(readers)]
            wait(reading, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()  # Ctrl-C: the caller closes the descriptor, which nobody may read any more by then
    for each in reading:
        each.result()
    return sorted(completed)
