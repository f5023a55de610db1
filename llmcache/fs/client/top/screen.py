"""`llmcache top`: the view on a terminal until a key ends it, or as text, or as JSON.

On a terminal: the screen's other buffer, keys unbuffered and unechoed; both are put back however the watching ends
(`q`, Ctrl-C, a signal that ends the process in order, an error, Ctrl-Z and `fg`). Signals that only matter here (the
size has changed, Ctrl-Z) are noted by their handlers and wake the wait for keys through a pipe.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live

from llmcache.errors import UsageError
from llmcache.fs.client.top.sample import Sample
from llmcache.fs.client.top.view import USUAL_WIDTH, lines
from llmcache.fs.client.top.watcher import Watcher

LEAST_PAUSE_S = 0.1


def show(mount: str, *, pause_s: float, count: int | None, once: bool, as_json: bool) -> None:
    """Watches a mount: `count` times or until a key, Ctrl-C or its end; once, or where stdout is no terminal, as text.

    MountProblem: there is no mount, or not any more. UsageError: a pause too short.
    """
    if pause_s < LEAST_PAUSE_S:
        raise UsageError(f"INTERVAL: {pause_s:g} s is less than {LEAST_PAUSE_S:g} s")
    watcher = Watcher(mount)
    count = 1 if once else count
    try:
        if as_json:
            _print_json(watcher, pause_s, count)
        elif once or not sys.stdout.isatty() or Console().is_dumb_terminal:
            _print_text(watcher, pause_s, count or 1)
        else:
            Screen(watcher, pause_s, count).run()
    except KeyboardInterrupt:
        return


def _samples(watcher: Watcher, pause_s: float, count: int | None) -> Iterator[Sample]:
    """Yields samples that have an interval before them."""
    watcher.sample()
    taken = 0
    while count is None or taken < count:
        time.sleep(pause_s)
        yield watcher.sample()
        taken += 1


def _print_json(watcher: Watcher, pause_s: float, count: int | None) -> None:
    for sample in _samples(watcher, pause_s, count):
        print(json.dumps(sample.document()), flush=True)


def _print_text(watcher: Watcher, pause_s: float, count: int) -> None:
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _width())
    for number, sample in enumerate(_samples(watcher, pause_s, count)):
        if number:
            console.print()
        for line in lines(sample, console.width):
            line.rstrip()
            console.print(line, no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)
        sys.stdout.flush()


def _width() -> int:
    """Columns of text that goes to no terminal."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isascii() and columns.isdigit() and int(columns) > 0 else USUAL_WIDTH


class Screen:
    """The view on a terminal."""

    def __init__(self, watcher: Watcher, pause_s: float, count: int | None) -> None:
        self._watcher = watcher
        self._pause_s = pause_s
        self._left = count
        self._console = Console(file=_whole_stdout(), highlight=False)
        self._stopped = False
        self._hint = f"every {pause_s:g} s, q ends"

    def run(self) -> None:
        """Shows samples until `q` or the last of `count`. MountProblem: the mount has ended."""
        sample = self._watcher.sample()  # what goes wrong at once needs no screen
        with ExitStack() as stack:
            wake = stack.enter_context(self._signals())
            while True:
                with _keys(), Live(console=self._console, screen=True, auto_refresh=False) as live:
                    sample, goes_on = self._watch(live, sample, wake)
                if not goes_on:
                    return
                os.kill(os.getpid(), signal.SIGSTOP)  # until `fg`

    def _watch(self, live: Live, sample: Sample, wake: int) -> tuple[Sample, bool]:
        """Until the end, or Ctrl-Z (True)."""
        self._draw(live, sample)
        due = time.monotonic() + self._pause_s
        while True:
            if self._wait(due, wake):
                return sample, False
            if self._stopped:
                self._stopped = False
                return sample, True
            if time.monotonic() >= due:
                if self._left is not None:
                    self._left -= 1
                    if self._left <= 0:
                        return sample, False
                sample = self._watcher.sample()
                due = time.monotonic() + self._pause_s
            self._draw(live, sample)

    def _draw(self, live: Live, sample: Sample) -> None:
        width, height = self._console.size
        texts = lines(sample, width, height, self._hint)
        for text in texts:
            text.no_wrap, text.overflow = True, "crop"
        live.update(Group(*texts), refresh=True)

    def _wait(self, due: float, wake: int) -> bool:
        """Until the next look is due or a signal came; True if `q` was pressed, or no key can come any more."""
        keys = [sys.stdin.fileno()] if sys.stdin.isatty() else []
        ready, _, _ = select.select([*keys, wake], [], [], max(0.0, due - time.monotonic()))
        if wake in ready:
            os.read(wake, 512)
        if keys and keys[0] in ready:
            typed = os.read(keys[0], 512)
            return not typed or b"q" in typed or b"Q" in typed
        return False

    @contextmanager
    def _signals(self) -> Iterator[int]:
        """Gives the descriptor that becomes readable when a signal has come."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        old_wake = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        handlers = {signal.SIGWINCH: self._noted, signal.SIGTSTP: self._noted}
        old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield reading
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_wake)
            os.close(reading)
            os.close(writing)

    def _noted(self, number: int, _frame: FrameType | None) -> None:
        self._stopped = self._stopped or number == signal.SIGTSTP


def _whole_stdout() -> TextIO:
    """stdout, buffered whatever PYTHONUNBUFFERED says: without, the rest of a write that a signal cuts short is lost."""
    file = sys.stdout
    return open(file.fileno(), "w", encoding=file.encoding, errors=file.errors, closefd=False)


@contextmanager
def _keys() -> Iterator[None]:
    """Keys come one by one and are not shown; Ctrl-C and Ctrl-Z do what they always do."""
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
