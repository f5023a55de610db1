"""Helpers that run a command in the test's process, which avoids starting an interpreter, or only parse its arguments."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from llmcache import cli
from llmcache.cli.mount import command as mount_command

HEAVY = {"numpy", "numba", "pyarrow", "matplotlib", "rich", "torch", "transformers", "mfusepy", "psutil"}
"""Packages that no command may import before it uses them."""


def ended(main: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """Return the exit code and output of `main`, which must raise SystemExit, in the form of `subprocess.run`."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as end:
            assert isinstance(end.code, int)
            return subprocess.CompletedProcess([], end.code, out.getvalue(), error.getvalue())
    raise AssertionError("main() returned without SystemExit")


def called(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `llmcache` with these arguments."""
    return ended(lambda: cli.run(cli.app, "llmcache", [*map(str, words)]))


def loaded(code: str, *args: str) -> set[str]:
    """Return the modules that a Python program has imported when it ends."""
    code = f"import atexit, sys\natexit.register(lambda: print(*sys.modules))\n{code}"
    root = Path(cli.__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True, cwd=root)
    return set(result.stdout.splitlines()[-1].split())


def parsed(program: str, *args: str) -> click.Context:
    """Return the click context of a call without running the command; raises a usage error for bad arguments."""
    command: click.Command = mount_command if program == "llmcachefs" else cli.app
    context, name, left = click.Context(command, info_name=program), program, list(args)
    while isinstance(command, click.Group) and left and not left[0].startswith("-"):
        word, below, left = command.resolve_command(context, left)
        assert word is not None and below is not None
        command, context, name = below, click.Context(below, parent=context, info_name=word), word
    return command.make_context(name, left, parent=context.parent)


def keys(document: Any) -> Iterator[str]:
    """Yield every key of a JSON document, at any depth."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key
            yield from keys(value)
    elif isinstance(document, list):
        for entry in document:
            yield from keys(entry)
