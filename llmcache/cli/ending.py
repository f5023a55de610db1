"""Ending in order on SIGTERM and SIGHUP, as on Ctrl-C: what is temporary, gigabytes of spill files, is removed then too."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """While it lasts, a signal that would kill the process ends it by SystemExit instead, with 128 + its number.

    Signals that are ignored (`nohup`) or handled already stay so. In the main thread only.
    """
    changed = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
