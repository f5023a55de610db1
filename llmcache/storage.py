"""Reading storage to measure it: several requests under way at a time, each noted when it is done."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence


def timed_reads(
    fd: int, request_bytes: int, order: Sequence[int], readers: int, enough: Callable[[int, float], bool]
) -> list[tuple[float, int]]:
    """Reads requests of an open file, `order` again and again, until `enough`; returns when each was done, s, and its bytes.

    `enough(begun, seconds)`: told how many requests were begun, and for how long. The list is in order of time. OSError: a
    read failed. `fd` may have O_DIRECT.
    """
    places, failures = itertools.count(), list[OSError]()
    completed: list[tuple[float, int]] = []
    stop = threading.Event()
    begin = time.monotonic()

    def reader() -> None:
        with mmap.mmap(-1, request_bytes) as buffer:  # aligned, as O_DIRECT needs it
            while not stop.is_set():
                place = next(places)
                if enough(place, time.monotonic() - begin):
                    return
                try:
                    size = os.preadv(fd, [buffer], order[place % len(order)] * request_bytes)
                except OSError as error:
                    failures.append(error)
                    stop.set()
                else:
                    completed.append((time.monotonic() - begin, size))

    threads = [threading.Thread(target=reader) for _ in range(readers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()  # Ctrl-C: the caller closes the descriptor, which nobody may read any more by then
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]
    return sorted(completed)
