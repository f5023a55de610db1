"""The table of a model's layers: what was read of each, what came from storage, in the order of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table

from llmcache.cache.constants import BLOCK_BYTES
from llmcache.cache.layers import Layer
from llmcache.report.tables import fit, plain_table
from llmcache.units import format_size, shortened

MOST_ROWS = 100
LEAST_NAME = 20  # letters of a layer that other columns make room for
FIRST_TO_GO = ("blocks missed", "place", "read", "missed")


def layer_tables(layers: Sequence[Layer], width: int) -> Iterator[str | Table]:
    """Yields, for each file, a heading, a table, and a line about the layers that had no place in it."""
    for path, group in groupby(layers, lambda layer: layer.path):
        of_file = list(group)
        ordered = any(layer.place is not None for layer in of_file)
        yield f"layers of {path}, in the order {'of a pass' if ordered else 'of the file: none came round twice'}:"
        yield table(of_file[:MOST_ROWS], width)
        if len(of_file) > MOST_ROWS:
            yield f"and {len(of_file) - MOST_ROWS} more, which --json lists"


def table(layers: Sequence[Layer], width: int) -> Table:
    """The layers as they come, in at most `width` columns; `missed` is of the accesses of which the trace tells it."""
    missed = [_missed(layer) for layer in layers]
    columns = {
        "place": ["-" if layer.place is None else str(layer.place) for layer in layers],
        "size": [format_size(layer.size_bytes) for layer in layers],
        "read": [format_size(layer.accesses * BLOCK_BYTES) for layer in layers],
        "blocks missed": [blocks for blocks, _, _ in missed],
        "missed": [size for _, size, _ in missed],
        "misses": [ratio for _, _, ratio in missed],
    }
    room = fit(columns, width, LEAST_NAME, FIRST_TO_GO)
    made = plain_table("layer", *columns)
    for cells in zip([shortened(layer.name, room) for layer in layers], *columns.values(), strict=True):
        made.add_row(*cells)
    return made


def _missed(layer: Layer) -> tuple[str, str, str]:
    if layer.miss_ratio is None:
        return "-", "-", "-"
    return str(layer.missed), format_size(layer.missed * BLOCK_BYTES), f"{layer.miss_ratio:.1%}"
