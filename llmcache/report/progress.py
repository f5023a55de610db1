"""What begins, told on stderr to whoever looks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console


class Progress:
    """Told how far each trace is (`cache.plan.Progress`); shows a bar for each."""

    def __init__(self, shown: bars.Progress) -> None:
        self._shown = shown
        self._traces: dict[str, bars.TaskID] = {}
        self._compiling: bars.TaskID | None = None

    def __call__(self, trace: str, done: int, in_all: int) -> None:
        """Takes that `done` of `in_all` rows of `trace` are replayed."""
        if trace not in self._traces:
            self._traces[trace] = self._shown.add_task(trace.replace("[", r"\["), total=in_all)
        self._shown.update(self._traces[trace], completed=done, total=in_all)

    def compiling(self, begins: bool) -> None:
        """Says that policies are being compiled, which a first run waits for, until it is told that they are."""
        if self._compiling is None:
            self._compiling = self._shown.add_task("compiling, once after an installation", total=None)
        self._shown.update(self._compiling, visible=begins)


@contextmanager
def progress() -> Iterator[Progress]:
    """Yields what to tell the progress, which is on stderr and only on a terminal."""
    console = Console(stderr=True)
    columns = ("{task.description}", bars.BarColumn(), bars.TaskProgressColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as shown:
        yield Progress(shown)


def tell(what: str) -> None:
    """Says on stderr what begins, if somebody looks."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr)
