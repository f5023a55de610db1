"""A command called in this process: what it prints and its exit code, without the second that a process takes to begin."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmcache import cli


def ended(main: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """What a program whose `main` exits with its code has printed, as subprocess.run tells it."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as end:
            assert isinstance(end.code, int)
            return subprocess.CompletedProcess([], end.code, out.getvalue(), error.getvalue())
    raise AssertionError("it went on")


def called(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """What `llmcache` with these words prints."""
    return ended(lambda: cli.run(cli.app, "llmcache", [*map(str, words)]))


def keys(document: Any) -> Iterator[str]:
    """Every key of a JSON document, at any depth."""
    if isinstance(document, dict):
        yield from document
    entries = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    for entry in entries:
        yield from keys(entry)
