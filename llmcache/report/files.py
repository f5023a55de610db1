"""Files that a report is written to: whole or not there, closed to others, never in place of another unasked."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from llmcache.files import Output, writing


@dataclass(frozen=True)
class Written:
    """A file that has been written."""

    path: Path
    size_bytes: int

    def show(self, schema: str) -> None:
        """Print it on stdout as the JSON document called `schema`."""
        print(json.dumps({"schema": schema, "path": str(self.path), "size_bytes": self.size_bytes}))


def check_target(option: str, path: str | os.PathLike[str], force: bool) -> None:
    """UsageError, naming `option`, if a file may not be written to `path`. Ask before hours of work."""
    Output(path, force, option)


def write_target(option: str, path: str | os.PathLike[str], data: bytes, force: bool) -> Written:
    """Write `data` to `path` as a whole, and return what was written.

    Errors as `check_target`, and EnvironmentProblem if there is no room.
    """
    output = Output(path, force, option)
    with output as temporary, writing(output.path):
        temporary.write_bytes(data)
    return Written(output.path, len(data))
