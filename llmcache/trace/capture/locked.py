"""Which recorded files a mount keeps locked in memory, so that mapped pages of them are read without a fault.

A mount of mode steer locks what it keeps of a loop: after the first touch no tier sees those pages again, and a recording
has only what the mount streams. How much that is, is asked for when a file is first seen and again at the end; the
smaller number was locked all the time, and goes into the trace beside its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llmcache.errors import LlmcacheError
from llmcache.trace.record import TraceFile
from llmcache.units import format_size

Ask = Callable[[TraceFile], int]


def nothing_locked(_file: TraceFile) -> int:
    """Returns 0: where nobody is asked."""
    return 0


class Locked:
    """What `ask` says of the files of a recording: bytes that are locked. `by_file` holds the result, by id."""

    def __init__(self, ask: Ask = nothing_locked) -> None:
        self.by_file: dict[int, int] = {}
        self.remarks: list[str] = []
        self._ask = ask
        self._before: dict[int, int] = {}

    def begin(self, files: Iterable[TraceFile]) -> None:
        """Ask about files that are new."""
        for file in files:
            if file.id not in self._before:
                self._before[file.id] = self._bytes(file)

    def finish(self, files: Iterable[TraceFile]) -> None:
        """Ask again about those of which something was locked, and make the remarks for people."""
        for file in files:
            if before := self._before.get(file.id, 0):
                self._note(file, min(before, self._bytes(file)))

    def _note(self, file: TraceFile, size_bytes: int) -> None:
        if size_bytes:
            self.by_file[file.id] = size_bytes
            self.remarks.append(
                f"{file.path}: its mount (llmcachefs, mode steer) keeps {format_size(size_bytes)} of the loop locked, read "
                "without faults: mapped, they are not in the trace; llmcache classify adds them to the loop"
            )

    def _bytes(self, file: TraceFile) -> int:
        try:
            return self._ask(file)
        except LlmcacheError as error:
            self.remarks.append(f"{file.path}: how much of it its mount keeps locked is not known: {error.message}")
            return 0
