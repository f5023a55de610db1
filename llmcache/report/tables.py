"""Tables for terminals: what a row is about on the left, its figures on the right."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table


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


def titled_table(title: str, first: str, *figures: str) -> Table:
    """Returns a table with lines and a title."""
    made = Table(title=title, title_justify="left")
    made.add_column(first)
    for heading in figures:
        made.add_column(heading, justify="right")
    return made
