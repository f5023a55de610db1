"""Tables for terminals: what a row is about on the left, its figures on the right."""

from __future__ import annotations

from rich.table import Table


def plain_table(first: str, *figures: str, gap: int = 2) -> Table:
    """Returns a table without lines, `gap` spaces between columns, whose cells are never broken."""
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    made.add_column(first, no_wrap=True)
    for heading in figures:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def titled_table(title: str, first: str, *figures: str) -> Table:
    """Returns a table with lines and a title."""
    made = Table(title=title, title_justify="left")
    made.add_column(first)
    for heading in figures:
        made.add_column(heading, justify="right")
    return made
