"""The experts of mixtures in a trace: how evenly those of a layer are used, and what caches of whole experts hit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import rich.table

from llmcache.cache.routing import ExpertLayer, MixtureUses
from llmcache.report.html import Block, Cell, Table, Text
from llmcache.report.tables import fit, plain_table
from llmcache.units import format_size, shortened

MOST_ROWS = 8  # layers that the terminal has a line each for
LEAST_NAME = 12  # letters of a layer or a policy that other columns make room for
FIRST_TO_GO = ("visits", "experts")
CACHES_TO_GO = ("12%", "5%", "30%")
COUNTS = ("experts", "used", "visits", "uses")
COLUMNS = (*COUNTS, "top tenth", "top quarter", "again")


def expert_tables(mixtures: Sequence[MixtureUses], width: int) -> Iterator[str | rich.table.Table]:
    """Yields, for each mixture, a heading, a table of its layers or of their spread, one of caches, and remarks."""
    for mixture in mixtures:
        yield f"experts of {mixture.model}:"
        yield _layers(mixture.layers, width)
        yield f"hits of a cache of whole experts, by its part of their {format_size(mixture.size_bytes)}:"
        yield _caches(mixture, width)
        yield from _remarks(mixture)


def expert_blocks(mixture: MixtureUses) -> Iterator[Block]:
    """Yields the same for a page, with all layers."""
    caption = f"Experts of {mixture.model}: shares of the uses (%) that the most used tenth and quarter of a layer's have"
    caption += ", and of the experts of a visit (%) that the next one uses again"
    rows: list[list[Cell]] = [
        [layer.name, layer.experts, layer.used, layer.visits, layer.uses, *map(_percent, _figures(layer)[len(COUNTS) :])]
        for layer in mixture.layers
    ]
    yield Table(caption, ["layer", *COLUMNS], rows, digits=1)
    caches: list[list[Cell]] = [
        [cache.share * 100, cache.size_bytes / 1e6, cache.experts, cache.lru * 100, cache.belady * 100]
        for cache in mixture.caches
    ]
    columns = ["part of their bytes (%)", "size (MB)", "experts", "hits of LRU (%)", "hits at best, Belady (%)"]
    yield Table("Hits of a cache of whole experts, counted in uses", columns, caches, digits=1)
    yield from (Text(remark, note=True) for remark in _remarks(mixture))


def _layers(layers: Sequence[ExpertLayer], width: int) -> rich.table.Table:
    figures = list(zip(*(_figures(layer) for layer in layers), strict=True))
    names = [layer.name for layer in layers]
    if len(layers) > MOST_ROWS:
        names = [f"{place} of {len(layers)}" for place in ("least", "median", "most")]
        figures = [_spread(column) for column in figures]
    columns = {
        heading: [f"{cell:.0f}" if heading in COUNTS else _share(cell) for cell in column]
        for heading, column in zip(COLUMNS, figures, strict=True)
    }
    room = fit(columns, width, LEAST_NAME, FIRST_TO_GO)
    made = plain_table("layer", *columns)
    for cells in zip([shortened(name, room) for name in names], *columns.values(), strict=True):
        made.add_row(*cells)
    return made


def _figures(layer: ExpertLayer) -> tuple[float | None, ...]:
    """As `COLUMNS` has them."""
    return (layer.experts, layer.used, layer.visits, layer.uses, layer.top(10), layer.top(4), layer.again)


def _spread(figures: Sequence[float | None]) -> tuple[float | None, ...]:
    """The least, the median and the most of those that are known."""
    known = [figure for figure in figures if figure is not None]
    return (min(known), median(known), max(known)) if known else (None, None, None)


def _caches(mixture: MixtureUses, width: int) -> rich.table.Table:
    columns = {
        f"{cache.share:.0%}": [format_size(cache.size_bytes), _share(cache.lru), _share(cache.belady)]
        for cache in mixture.caches
    }
    fit(columns, width, LEAST_NAME, CACHES_TO_GO)
    made = plain_table("", *columns)
    for cells in zip(("size", "LRU", "Belady"), *columns.values(), strict=True):
        made.add_row(*cells)
    return made


def _remarks(mixture: MixtureUses) -> Iterator[str]:
    if not mixture.equal:
        yield "experts differ in size: that of the caches is of the mean, their hits approximate"
    if mixture.incomplete is not None:
        yield f"not all uses may be in the trace: {mixture.incomplete}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _percent(value: float | None) -> Cell:
    return "" if value is None else value * 100
