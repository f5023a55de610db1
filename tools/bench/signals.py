"""SIGTERM and Ctrl-C become one KeyboardInterrupt; more of them cannot interrupt the cleaning up."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for the first signal in the body; later ones only say that cleaning up goes on."""
    seen = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            print("still unmounting and removing cgroups ...", file=sys.stderr, flush=True)
            return
        seen = True
        raise KeyboardInterrupt

    old = {number: signal.signal(number, handle) for number in HANDLED}
    try:
        yield
    finally:
        for number, action in old.items():
            signal.signal(number, action)
