"""What a recording is asked to be."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmcache.errors import UsageError
from llmcache.trace.capture.tiers import AUTO
from llmcache.trace.record.opening import PARQUET


@dataclass(frozen=True)
class Options:
    """The options of `llmcache trace`. `seconds`: None until the target ends; `glob`: None for all files."""

    output: str
    seconds: float | None = None
    follow: bool = True
    writes: bool = True
    block: bool = False
    rerefs_s: float | None = None
    coalesce: bool = True
    glob: str | None = None
    tier: str = AUTO
    force: bool = False
    live: bool = True

    def __post_init__(self) -> None:
        """UsageError, naming the option, for what cannot be."""
        if Path(self.output).suffix.lower() != PARQUET:
            raise UsageError(f"-o: '{self.output}' must end in {PARQUET}", "llmcache convert makes other formats of it")
        if self.seconds is not None and self.seconds <= 0:
            raise UsageError("-d: the duration must be more than 0", "leave it out to record until the process ends")
        if self.rerefs_s is not None and self.rerefs_s <= 0:
            raise UsageError("--mmap-rerefs: the interval must be more than 0", "for example: --mmap-rerefs 1s")

    @property
    def matches(self) -> Callable[[str], bool] | None:
        """Says whether a path is wanted; None if all are. A glob without a slash is for the file name alone."""
        glob = self.glob
        if glob is None:
            return None
        return lambda path: fnmatch.fnmatchcase(path if "/" in glob else os.path.basename(path), glob)


def default_output(pid: int, command: str) -> str:
    """Returns the name of the trace if none is given: after the program and its process."""
    program = os.path.basename(command.split(" ", 1)[0]) or "process"
    return f"{program}-{pid}{PARQUET}"
