"""Output of `llmcache classify`, as tables and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median

from rich.table import Table

from llmcache.cache.classify import Classification, TraceClasses
from llmcache.cache.layers import Layer
from llmcache.cache.routing import ExpertLayer, MoeUses
from llmcache.errors import printable
from llmcache.report import output
from llmcache.report.html import Cell, HtmlBlock, Text
from llmcache.report.html import Table as PageTable
from llmcache.report.output import fit, fitted_table, plain_table
from llmcache.units import BLOCK_BYTES, format_duration, format_size, shortened

SHOWN_NAMES = 3  # groups of tensors in a row of the table
LEAST_FILE = 28  # least width of the file column; other columns are dropped for it
FIRST_TO_GO = ("blocks", "times", "op", "period")  # columns to drop from a table that is too wide
_LAYER = re.compile(r"(.*?(?:blk|layers?|h|blocks?))\.([0-9]+)\..*")


def show(found: TraceClasses, trace: str, min_bytes: int, as_json: bool) -> None:
    width = output.output_width()
    output.show(as_json, lambda: found.document(trace, min_bytes), _parts(found, trace, min_bytes, width))


def _parts(found: TraceClasses, trace: str, min_bytes: int, width: int) -> Iterator[str | Table]:
    lost = f", {found.lost_events} accesses lost" if found.lost_events else ""
    duration = format_duration(found.duration_ns)
    yield f"{trace}: {found.accesses} block accesses in {duration}; source: {found.tier}{lost}"
    if rows := [row for row in found.rows if row.size_bytes >= min_bytes]:
        yield table(rows, width)
    if smaller := [row for row in found.rows if row.size_bytes < min_bytes]:
        size, share = sum(row.size_bytes for row in smaller), sum(row.share for row in smaller)
        less = f"not shown (--min-bytes): {len(smaller)} row{'s' if len(smaller) > 1 else ''} below {format_size(min_bytes)}"
        yield f"{less}, {format_size(size)} in total, {share:.1%} of the accesses"
    yield from layer_tables(found.layers, width)
    yield from expert_tables(found.moe_models, width)
    yield from summary(found)


def table(rows: Sequence[Classification], width: int) -> Table:
    """Return the classes, largest share of the accesses first, at most `width` (60 at least) columns wide."""
    columns: dict[str, list[str]] = {
        "class": [row.kind for row in rows],
        "op": [row.op for row in rows],
        "size": [format_size(row.size_bytes) for row in rows],
        "blocks": [_blocks(row) for row in rows],
        "times": [str(row.passes) for row in rows],
        "period": [_period(row) for row in rows],
        "share": [f"{row.share:.1%}" for row in rows],
    }
    room = fit(columns, width, LEAST_FILE, FIRST_TO_GO)
    tensors = [names_line(row) for row in rows]
    files = [f"{printable(row.path)}{_notes(row)}" for row in rows]
    has_tensor_column = any(tensors) and max(map(len, files)) + 2 + max(map(len, tensors)) <= room
    made = plain_table(*columns, left=("op",))
    made.add_column("file", overflow="fold")
    if has_tensor_column:
        columns |= {"file": files, "tensors": tensors}
        made.add_column("tensors")
    else:
        columns["file"] = [_in_lines(row, names, room) for row, names in zip(rows, tensors, strict=True)]
    for cells in zip(*columns.values(), strict=True):
        made.add_row(*cells)
    return made


def _in_lines(row: Classification, tensors: str, room: int) -> str:
    path, notes = printable(row.path), _notes(row)
    lines = [shortened(path, room - len(notes)) + notes]
    if len(path) + len(notes) > room and room - len(notes) < LEAST_FILE:
        lines = [shortened(path, room), shortened(notes.strip(), room)]
    if tensors:
        lines.append(tensors if len(tensors) <= room else f"{tensors[: room - 1]}…")
    return "\n".join(lines)


def _blocks(row: Classification) -> str:
    if not row.pieces:
        return "-"
    return f"{row.first_block}-{row.last_block}"


def _period(row: Classification) -> str:
    if row.period_ns is None:
        return "-"
    return format_duration(row.period_ns) if row.period_ns else f"{row.period_blocks} blocks"


def _notes(row: Classification) -> str:
    notes = []
    if row.stride_blocks:
        notes.append(f"every {row.stride_blocks} blocks")
    elif len(row.pieces) > 1:
        notes.append(f"{len(row.pieces)} ranges")
    if row.order not in (None, "ascending"):
        notes.append("descending" if row.order == "descending" else "mixed order")
    if row.active is False:
        notes.append("ended early")
    return f" ({', '.join(notes)})" if notes else ""


def names_line(row: Classification) -> str:
    return "; ".join(part for part in (_tensors(row.tensors), _experts(row.experts or {})) if part)


def _experts(experts: Mapping[str, tuple[int, ...]]) -> str:
    if len(experts) > SHOWN_NAMES:
        return f"{sum(map(len, experts.values()))} experts in {len(experts)} layers"
    return ", ".join(f"experts {_ranges(numbers)} of {layer}" for layer, numbers in experts.items())


def _tensors(names: Sequence[str]) -> str:
    layers: dict[str, list[int]] = {}
    others: list[str] = []
    for name in names:
        match = _LAYER.fullmatch(name)
        if match:
            layers.setdefault(match[1], []).append(int(match[2]))
        else:
            others.append(name)
    shown = [f"{stem}.{_ranges(sorted(set(numbers)))} ({len(numbers)})" for stem, numbers in layers.items()]
    shown += others
    more = len(shown) - SHOWN_NAMES
    return ", ".join(shown[:SHOWN_NAMES]) + (f", {more} more" if more > 0 else "")


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def summary(found: TraceClasses) -> list[str]:
    """Return the totals of the classes (io_caching, section 3.3), and a matching `llmcache size` command."""
    totals = found.totals
    reads = (
        f"loops {format_size(totals.loop_bytes)}, hot {format_size(totals.hot_bytes)}, once {format_size(totals.once_bytes)}"
    )
    shares = f"loops {totals.loop_share:.1%}, hot {totals.hot_share:.1%}, once {totals.once_share:.1%}"
    lines = [f"read: {reads}", f"share of all accesses: {shares}"]
    lines += [
        f"also in the loop: {format_size(each.size_bytes)} of {each.path}, locked by its mount and read without faults"
        for each in found.locked
    ]
    if totals.write_loop_bytes or totals.write_once_bytes:
        writes = f"loops {format_size(totals.write_loop_bytes)}, once {format_size(totals.write_once_bytes)}"
        lines.append(f"written: {writes}")
    if found.size_command is not None:
        lines += ["size a cache for these loops with:", f"  {found.size_command} --bw RATE"]
    else:
        lines.append("no read loops: a cache saves only the reads of hot blocks")
    return lines


MOST_LAYERS = 100
LEAST_LAYER = 20  # least width of the layer column; other columns are dropped for it
LAYERS_FIRST_TO_GO = ("blocks missed", "place", "read", "missed")


def layer_tables(layers: Sequence[Layer], width: int) -> Iterator[str | Table]:
    for path, group in groupby(layers, lambda layer: layer.path):
        of_file = list(group)
        ordered = any(layer.place is not None for layer in of_file)
        yield f"layers of {path}, {'in the order of a pass' if ordered else 'in file order (no layer was read twice)'}:"
        yield layer_table(of_file[:MOST_LAYERS], width)
        if len(of_file) > MOST_LAYERS:
            yield f"and {len(of_file) - MOST_LAYERS} more layers (--json lists them)"


def layer_table(layers: Sequence[Layer], width: int) -> Table:
    """Return the layers in their order; `missed` counts accesses with a known result."""
    missed = [_missed(layer) for layer in layers]
    columns = {
        "place": ["-" if layer.place is None else str(layer.place) for layer in layers],
        "size": [format_size(layer.size_bytes) for layer in layers],
        "read": [format_size(layer.accesses * BLOCK_BYTES) for layer in layers],
        "blocks missed": [blocks for blocks, _, _ in missed],
        "missed": [size for _, size, _ in missed],
        "misses": [ratio for _, _, ratio in missed],
    }
    return fitted_table("layer", [layer.name for layer in layers], columns, width, LEAST_LAYER, LAYERS_FIRST_TO_GO)


def _missed(layer: Layer) -> tuple[str, str, str]:
    if layer.miss_ratio is None:
        return "-", "-", "-"
    return str(layer.missed), format_size(layer.missed * BLOCK_BYTES), f"{layer.miss_ratio:.1%}"


MOST_EXPERT_LAYERS = 8  # layers up to which the terminal shows each in a row of its own
LEAST_NAME = 12  # least width of the first column; other columns are dropped for it
EXPERTS_FIRST_TO_GO = ("visits", "experts")
CACHES_TO_GO = ("12%", "5%", "30%")
COUNTS = ("experts", "used", "visits", "uses")
EXPERT_COLUMNS = (*COUNTS, "top tenth", "top quarter", "again")


def expert_tables(mixtures: Sequence[MoeUses], width: int) -> Iterator[str | Table]:
    for mixture in mixtures:
        yield f"experts of {mixture.model}:"
        yield _layers(mixture.layers, width)
        yield f"hit ratio of a cache of whole experts, by its share of the {format_size(mixture.size_bytes)} of all experts:"
        yield _caches(mixture, width)
        yield from _remarks(mixture)


def expert_blocks(mixture: MoeUses) -> Iterator[HtmlBlock]:
    """Yield the tables as HTML blocks, with all layers."""
    caption = f"Experts of {mixture.model}. Top tenth, top quarter: percentage of the uses that go to the most used tenth "
    caption += "and quarter of the experts. Again: percentage of the experts of a visit that the next visit uses again."
    rows: list[list[Cell]] = [
        [layer.name, layer.experts, layer.used, layer.visits, layer.uses, *map(_percent, _figures(layer)[len(COUNTS) :])]
        for layer in mixture.layers
    ]
    yield PageTable(caption, ["layer", *EXPERT_COLUMNS], rows, digits=1)
    caches: list[list[Cell]] = [
        [cache.share * 100, cache.size_bytes / 1e6, cache.experts, cache.lru * 100, cache.belady * 100]
        for cache in mixture.caches
    ]
    columns = ["cache, of all experts (%)", "size (MB)", "experts", "LRU hits (%)", "Belady hits, the maximum (%)"]
    yield PageTable("Hits of a cache of whole experts, as a percentage of the uses", columns, caches, digits=1)
    yield from (Text(remark, note=True) for remark in _remarks(mixture))


def _layers(layers: Sequence[ExpertLayer], width: int) -> Table:
    figures = list(zip(*(_figures(layer) for layer in layers), strict=True))
    names = [layer.name for layer in layers]
    if len(layers) > MOST_EXPERT_LAYERS:
        names = [f"{place} of {len(layers)}" for place in ("minimum", "median", "maximum")]
        figures = [_spread(column) for column in figures]
    columns = {
        heading: [f"{cell:.0f}" if heading in COUNTS else _share(cell) for cell in column]
        for heading, column in zip(EXPERT_COLUMNS, figures, strict=True)
    }
    return fitted_table("layer", names, columns, width, LEAST_NAME, EXPERTS_FIRST_TO_GO)


def _figures(layer: ExpertLayer) -> tuple[float | None, ...]:
    return (layer.experts, layer.used, layer.visits, layer.uses, layer.top(10), layer.top(4), layer.again)


def _spread(figures: Sequence[float | None]) -> tuple[float | None, ...]:
    known = [figure for figure in figures if figure is not None]
    return (min(known), median(known), max(known)) if known else (None, None, None)


def _caches(mixture: MoeUses, width: int) -> Table:
    columns = {
        f"{cache.share:.0%}": [format_size(cache.size_bytes), _share(cache.lru), _share(cache.belady)]
        for cache in mixture.caches
    }
    return fitted_table("", ("size", "LRU", "Belady"), columns, width, LEAST_NAME, CACHES_TO_GO)


def _remarks(mixture: MoeUses) -> Iterator[str]:
    if not mixture.equal:
        yield "experts differ in size: the caches count experts of the mean size, so hit ratios are approximate"
    if mixture.incomplete is not None:
        yield f"uses may be missing from the trace: {mixture.incomplete}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _percent(value: float | None) -> Cell:
    return "" if value is None else value * 100
