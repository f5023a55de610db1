"""Files that a report is written to: whole or not there, never in place of another unasked."""

from __future__ import annotations

import os

from llmcache.trace.record.output import Output, problem


def check_target(option: str, path: str | os.PathLike[str], force: bool) -> None:
    """UsageError, naming `option`, if a file may not be written to `path`. Ask before hours of work."""
    Output(path, force, option)


def write_target(option: str, path: str | os.PathLike[str], data: bytes, force: bool) -> None:
    """Write `data` to `path` as a whole; errors as `check_target`, and EnvironmentProblem if there is no room."""
    output = Output(path, force, option)
    with output as temporary:
        try:
            temporary.write_bytes(data)
        except OSError as error:
            raise problem(output.path, error) from error
