"""What reports write and show: files that are whole or not there, progress on stderr, tables for terminals."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmcache.errors import UsageError, printable
from llmcache.files import Output, writing
from llmcache.units import shortened

FORMS = ("png", "svg", "html")
UNBOUND = 400
"""Of a console: a table is as wide as its columns, so that on a narrow terminal its lines wrap, but no figure is cut."""


def show(
    as_json: bool,
    document: Callable[[], object],
    parts: Iterable[str | Table],
    width: int | None = UNBOUND,
) -> None:
    """Prints an answer on stdout: its `document` as JSON, or its `parts`, which are lines and tables.

    `width`: letters that a table may have; None for what the terminal has.
    """
    if as_json:
        print(json.dumps(document(), indent=1))
        return
    console = _PrintableConsole(highlight=False, markup=False, width=width)
    for part in parts:
        console.print(part, soft_wrap=width is None or isinstance(part, str))


class _PrintableConsole(Console):
    """Shows what files, traces and models are called, and cannot be steered by it: lines, cells, headings and titles."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)


@dataclass(frozen=True)
class Written:
    """A file that has been written."""

    path: Path
    size_bytes: int

    def show(self, schema: str) -> None:
        """Print it on stdout as the JSON document called `schema`."""
        print(json.dumps({"schema": schema, "path": str(self.path), "size_bytes": self.size_bytes}))


def form_of(option: str, path: str, force: bool) -> str:
    """Returns "png", "svg" or "html" by the ending of `path`; UsageError, naming `option`, for another.

    Also as `check_target`.
    """
    form = Path(path).suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UsageError(f"{option}: '{path}' must end in .png, .svg or .html", "the ending says what is written")
    check_target(option, path, force)
    return form


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


def trimmed(text: str) -> str:
    """Returns a number and its unit without zeros that say nothing: "60 MB" of "60.0 MB", "1.5 GB"."""
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def plain_table(first: str, *figures: str, gap: int = 2) -> Table:
    """Returns a table without lines, `gap` spaces between columns, whose cells are never broken."""
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    made.add_column(first, no_wrap=True)
    for heading in figures:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def fit(columns: dict[str, list[str]], width: int, least: int, first_to_go: Iterable[str]) -> int:
    """Takes columns away, as they are named, until a table of `width` has room for one more of `least`; returns its room.

    `columns`: the cells below each heading, as text; two spaces follow each.
    """

    def room() -> int:
        return width - sum(max(map(len, [heading, *cells])) + 2 for heading, cells in columns.items())

    for heading in first_to_go:
        if room() < least:
            del columns[heading]
    return room()


def fitted_table(
    first: str, names: Iterable[str], columns: dict[str, list[str]], width: int, least: int, first_to_go: Iterable[str]
) -> Table:
    """Returns `names` and `columns` as a plain table of `width`; columns go as by `fit`, and names lose their middle."""
    room = fit(columns, width, least, first_to_go)
    made = plain_table(first, *columns)
    for cells in zip((shortened(name, room) for name in names), *columns.values(), strict=True):
        made.add_row(*cells)
    return made


def titled_table(title: str, first: str, *figures: str) -> Table:
    """Returns a table with lines and a title."""
    made = Table(title=title, title_justify="left")
    made.add_column(first)
    for heading in figures:
        made.add_column(heading, justify="right")
    return made
