"""The table of a model's layers: what was read of each, what came from storage, in the order of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table

from llmcache.cache.constants import BLOCK_BYTES
from llmcache.cache.layers import Layer
from llmcache.units import format_size

MOST_ROWS = 100


def layer_tables(layers: Sequence[Layer]) -> Iterator[str | Table]:
    """Yields, for each file, a heading, a table, and a line about the layers that had no place in it."""
    for path, group in groupby(layers, lambda layer: layer.path):
        of_file = list(group)
        ordered = any(layer.place is not None for layer in of_file)
        yield f"layers of {path}, in the order {'of a pass' if ordered else 'of the file: none came round twice'}:"
        yield table(of_file[:MOST_ROWS])
        if len(of_file) > MOST_ROWS:
            yield f"and {len(of_file) - MOST_ROWS} more, which --json lists"


def table(layers: Sequence[Layer]) -> Table:
    """The layers as they come; `missed` is of the accesses of which the trace tells it."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column("layer", overflow="fold")
    for heading in ("place", "size", "read", "blocks missed", "missed", "misses"):
        made.add_column(heading, justify="right", no_wrap=True)
    for layer in layers:
        made.add_row(
            layer.name,
            "-" if layer.place is None else str(layer.place),
            format_size(layer.size_bytes),
            format_size(layer.accesses * BLOCK_BYTES),
            *_missed(layer),
        )
    return made


def _missed(layer: Layer) -> tuple[str, str, str]:
    if layer.miss_ratio is None:
        return "-", "-", "-"
    return str(layer.missed), format_size(layer.missed * BLOCK_BYTES), f"{layer.miss_ratio:.1%}"
