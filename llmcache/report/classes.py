"""The classes of a trace as a picture and a page show them: blocks to shade, names along a file, a table."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import groupby

from llmcache.cache.classes import Classification
from llmcache.cache.constants import BLOCK_BYTES
from llmcache.cache.models import Models
from llmcache.report.access import Landmark, Shade
from llmcache.report.classification import names_line
from llmcache.report.html import Cell, Table
from llmcache.trace.record import TraceFile

MOST_ROWS = 100
COLUMNS = ["class", "op", "file", "size (MB)", "blocks", "places", "times", "period (s)", "share (%)"]


def shades_of(rows: Sequence[Classification]) -> list[Shade]:
    """Returns the blocks of every class whose places are known."""
    return [Shade(row.file, first, last + 1, row.kind) for row in rows for first, last in row.pieces]


def landmarks_of(files: Sequence[TraceFile], names: Models) -> list[Landmark]:
    """Returns which blocks each layer (or tensor outside of the layers) has, in the files that `names` knows."""
    marks: list[Landmark] = []
    for file in files:
        for layer, group in groupby(names(file), key=lambda tensor: tensor.layer):
            tensors = list(group)
            end = tensors[-1].offset + tensors[-1].size_bytes
            marks.append(Landmark(file.id, tensors[0].offset // BLOCK_BYTES, -(-end // BLOCK_BYTES), layer))
    return marks


def classes_table(rows: Sequence[Classification], files: Container[int]) -> Table:
    """Returns the classes of `files` as a table of at most `MOST_ROWS` rows, whose caption says what is left out."""
    shown = [row for row in rows if row.file in files][:MOST_ROWS]
    rest = [row for row in rows if row not in shown]
    names = [names_line(row) for row in shown]
    caption = "Classes, largest share of all accesses first (see: llmcache classify)"
    if rest:
        caption += f"; {len(rest):,} more with {sum(row.share for row in rest):.1%} of the accesses are left out"
    columns = COLUMNS + (["tensors"] if any(names) else [])
    cells = [_cells(row) + ([name] if any(names) else []) for row, name in zip(shown, names, strict=True)]
    return Table(caption, columns, cells, digits=2)


def _cells(row: Classification) -> list[Cell]:
    return [
        row.kind,
        row.op,
        row.path,
        row.size_bytes / 1e6,
        f"{row.first_block:,} to {row.last_block:,}" if row.pieces else "",
        len(row.pieces),
        row.passes,
        row.period_ns / 1e9 if row.period_ns else "",
        row.share * 100,
    ]
