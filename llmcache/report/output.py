"""Output of reports: files that are written atomically, progress on stderr, tables for terminals."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmcache.errors import UsageError, broken, printable
from llmcache.files import Output, writing
from llmcache.units import shortened

FORMS = ("png", "svg", "html")
UNBOUND = 400
"""Width of a table in a file or a pipe: wide enough for all columns."""


def show(as_json: bool, document: Callable[[], object], parts: Iterable[str | Table]) -> None:
    """Print the `document` of a result as JSON, or its `parts`, which are lines and tables.

    On a terminal, a table that is too wide is printed as several.
    """
    if as_json:
        print(json.dumps(document(), indent=1))
        return
    width = output_width()
    console = _PrintableConsole(highlight=False, markup=False, width=UNBOUND)
    for part in parts:
        if isinstance(part, str):
            console.print("\n".join(_wrapped(printable(line), width) for line in part.split("\n")), soft_wrap=True)
            continue
        if isinstance(part.title, str):
            console.print(_wrapped(printable(part.title), width), soft_wrap=True)
            part.title = None
        for number, table in enumerate(_fitted(part, console, width)):
            if number:
                console.print()
            console.print(table)


def output_width() -> int:
    """Return the columns of the terminal, or of $COLUMNS; UNBOUND without a terminal."""
    console = Console()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else UNBOUND


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    label = re.match(r" *\S+(?: \S+)* {2,}| *", line)
    indent = label.end() if label is not None and label.end() <= width // 2 else 0
    return "\n".join(broken(line, width, indent or 2))


def _fitted(table: Table, console: Console, width: int) -> Iterator[Table]:
    """Yield `table`, or several tables of at most `width`, each with its key columns."""

    def fits(some: Table) -> bool:
        return console.measure(some).maximum <= width

    if fits(table):
        yield table
        return
    keys, count = table.keys if isinstance(table, KeyedTable) else 1, len(table.columns)
    for lines, gap in ((2, 2), (2, 1), (3, 1)):
        if fits(whole := _narrowed(table, range(count), lines, gap)):
            yield whole
            return
    for parts in range(2, count - keys + 1):
        size = -(-(count - keys) // parts)
        places = [[*range(keys), *range(start, min(start + size, count))] for start in range(keys, count, size)]
        split = [_narrowed(table, chosen, 3, 2) for chosen in places]
        if size == 1 or all(map(fits, split)):
            yield from split
            return
    yield table


def _narrowed(table: Table, places: Sequence[int], lines: int, gap: int) -> Table:
    columns = [table.columns[place] for place in places]
    top, right, bottom, left = table.padding
    made = Table(
        box=table.box,
        pad_edge=table.pad_edge,
        padding=(top, min(right, gap), bottom, left),
    )
    for column in columns:
        room = max((len(line) for cell in column.cells for line in str(cell).split("\n")), default=0)
        heading = _in_lines(str(column.header), room, lines)
        made.add_column(heading, justify=column.justify, no_wrap=column.no_wrap, vertical="bottom")
    for row, *cells in zip(table.rows, *(column.cells for column in columns), strict=True):
        made.add_row(*cells, style=row.style, end_section=row.end_section)
    return made


def _in_lines(heading: str, room: int, lines: int) -> str:
    for width in range(max(1, room, *map(len, heading.split(" "))), len(heading)):
        broken = textwrap.wrap(heading, width, break_on_hyphens=False)
        if len(broken) <= lines:
            return "\n".join(broken)
    return heading


class KeyedTable(Table):
    """A table whose first `keys` columns name its rows: if it is split, each part contains them."""

    keys = 1


class _PrintableConsole(Console):
    """Prints names from files, traces and models without control characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)


@dataclass(frozen=True)
class Written:
    """A file that has been written."""

    path: Path
    size_bytes: int

    def show(self, schema: str) -> None:
        print(json.dumps({"schema": schema, "path": str(self.path), "size_bytes": self.size_bytes}))


def form_of(option: str, path: str, force: bool) -> str:
    """Return "png", "svg" or "html"; UsageError, naming `option`, for another extension, or from `check_target`."""
    form = Path(path).suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UsageError(f"{option}: '{path}' must end in .png, .svg or .html", "the extension selects the format")
    check_target(option, path, force)
    return form


def check_target(option: str, path: str | os.PathLike[str], force: bool) -> None:
    """Raise a UsageError, naming `option`, if `path` may not be written. Call it before long work."""
    Output(path, force, option)


def write_target(option: str, path: str | os.PathLike[str], data: bytes, force: bool) -> Written:
    """Write `data` to `path` atomically. UsageError as for `check_target`; MissingRequirement if there is no space."""
    output = Output(path, force, option)
    with output as temporary, writing(output.path):
        temporary.write_bytes(data)
    return Written(output.path, len(data))


class Progress:
    """A progress bar for each trace (a `cache.plan.Progress`)."""

    def __init__(self, shown: bars.Progress) -> None:
        self._shown = shown
        self._traces: dict[str, bars.TaskID] = {}
        self._compiling: bars.TaskID | None = None

    def __call__(self, trace: str, done: int, in_all: int) -> None:
        if trace not in self._traces:
            self._traces[trace] = self._shown.add_task(trace.replace("[", r"\["), total=in_all)
        self._shown.update(self._traces[trace], completed=done, total=in_all)

    def compiling(self, begins: bool) -> None:
        """Show that policies are being compiled until called with False."""
        if self._compiling is None:
            self._compiling = self._shown.add_task("compiling (once per installation)", total=None)
        self._shown.update(self._compiling, visible=begins)


@contextmanager
def progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    columns = ("{task.description}", bars.BarColumn(), bars.TaskProgressColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as shown:
        yield Progress(shown)


def progress_line(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def trimmed(text: str) -> str:
    """Return a number without trailing zeros: "60 MB" for "60.0 MB"."""
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def plain_table(
    *headings: str, rows: Iterable[Iterable[str]] = (), title: str | None = None, left: Iterable[str] = (), gap: int = 2,
    keys: int = 1,
) -> KeyedTable:  # fmt: skip
    """Return a table without lines, whose cells are never broken.

    Columns other than the first and those in `left` are aligned right. `keys`: as in `KeyedTable`.
    """
    made = KeyedTable(box=None, pad_edge=False, padding=(0, gap, 0, 0), title=title)
    made.keys = keys
    left = {headings[0], *left}
    for heading in headings:
        made.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for cells in rows:
        made.add_row(*cells)
    return made


def fit(columns: dict[str, list[str]], width: int, least: int, first_to_go: Iterable[str]) -> int:
    """Remove columns until one of width `least` fits; return the room for it."""

    def room() -> int:
        return width - sum(max(map(len, [heading, *cells])) + 2 for heading, cells in columns.items())

    for heading in first_to_go:
        if room() < least:
            del columns[heading]
    return room()


def fitted_table(
    first: str, names: Iterable[str], columns: dict[str, list[str]], width: int, least: int, first_to_go: Iterable[str]
) -> Table:
    """Return a plain table of `width`; columns are dropped as in `fit`."""
    room = fit(columns, width, least, first_to_go)
    rows = zip((shortened(name, room) for name in names), *columns.values(), strict=True)
    return plain_table(first, *columns, rows=rows)
