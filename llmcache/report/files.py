"""Files that a report is written to: whole or not there, never in place of another unasked."""

from __future__ import annotations

import os
from pathlib import Path

from llmcache.errors import EnvironmentProblem, UsageError


def check_target(option: str, path: str | os.PathLike[str], force: bool) -> Path:
    """Returns `path`; UsageError, naming `option`, if nothing can or may be written there. Ask before hours of work."""
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{option}: '{target}' is a directory", "name a file")
    if target.exists() and not force:
        raise UsageError(f"{option}: '{target}' exists", "--force replaces it")
    if not target.parent.is_dir():
        raise UsageError(f"{option}: there is no directory '{target.parent}'", "make it first")
    return target


def write_target(option: str, path: str | os.PathLike[str], data: bytes, force: bool) -> None:
    """Write `data` under a temporary name, then give it the name `path`; errors as `check_target` and EnvironmentProblem."""
    target = check_target(option, path, force)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    except OSError as error:
        reason = error.strerror or str(error)
        problem = EnvironmentProblem(f"{option}: cannot write '{target}': {reason}", "name a place that has room")
        raise problem from error
    finally:
        temporary.unlink(missing_ok=True)
