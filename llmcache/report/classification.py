"""What `llmcache classify` prints: a table for people, JSON for programs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain

from rich.console import Console
from rich.table import Table

from llmcache.cache.classes import Classification, TraceClasses
from llmcache.errors import printable
from llmcache.report.experts import expert_tables
from llmcache.report.layers import layer_tables
from llmcache.report.tables import fit
from llmcache.units import format_duration, format_size, shortened

SHOWN_NAMES = 3  # groups of tensors in a row of the table
LEAST_FILE = 28  # letters of a file that other columns make room for
FIRST_TO_GO = ("blocks", "times", "op", "period")  # from a table that is too wide
_UNBOUND = 400
_LAYER = re.compile(r"(.*?(?:blk|layers?|h|blocks?))\.([0-9]+)\..*")


def show(found: TraceClasses, trace: str, min_bytes: int, as_json: bool) -> None:
    """Prints the classes of `trace` on stdout; rows below `min_bytes` are summed up in one line."""
    if as_json:
        print(json.dumps(found.document(trace, min_bytes), indent=1))
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNBOUND  # whatever reads it wants the names whole
    lost = f", {found.lost_events} accesses lost" if found.lost_events else ""
    duration = format_duration(found.end_ns - found.begin_ns)
    console.print(f"{trace}: {found.accesses} blocks accessed in {duration}; {printable(found.tier)}{lost}", soft_wrap=True)
    rows = [row for row in found.rows if row.size_bytes >= min_bytes]
    if rows:
        console.print(table(rows, console.width))
    smaller = [row for row in found.rows if row.size_bytes < min_bytes]
    if smaller:
        size, share = sum(row.size_bytes for row in smaller), sum(row.share for row in smaller)
        less = f"and {len(smaller)} smaller than {format_size(min_bytes)}"
        console.print(f"{less}: {format_size(size)}, {share:.1%} of the accesses (--min-bytes 0 shows them)", soft_wrap=True)
    for part in chain(layer_tables(found.layers, console.width), expert_tables(found.mixtures, console.width)):
        console.print(part, soft_wrap=isinstance(part, str))
    for line in summary(found):
        console.print(line, soft_wrap=True)


def table(rows: Sequence[Classification], width: int) -> Table:
    """The classes, largest share of the accesses first, in at most `width` columns (60 at least).

    Where that is too narrow, columns go, tensors stand below their file, and a path loses its middle.
    """
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
    files = [f"{row.path}{_notes(row)}" for row in rows]
    beside = any(tensors) and max(map(len, files)) + 2 + max(map(len, tensors)) <= room
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, justify="left" if name in ("class", "op") else "right", no_wrap=True)
    made.add_column("file", overflow="fold")
    if beside:
        columns |= {"file": files, "tensors": tensors}
        made.add_column("tensors")
    else:
        columns["file"] = [_in_lines(row, names, room) for row, names in zip(rows, tensors, strict=True)]
    for cells in zip(*columns.values(), strict=True):
        made.add_row(*cells)
    return made


def _in_lines(row: Classification, tensors: str, room: int) -> str:
    """The file of `row`, with what is to be said of it on the same line if there is room, and its tensors below."""
    notes = _notes(row)
    lines = [shortened(row.path, room - len(notes)) + notes]
    if len(row.path) + len(notes) > room and room - len(notes) < LEAST_FILE:
        lines = [shortened(row.path, room), shortened(notes.strip(), room)]
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
        notes.append(f"{len(row.pieces)} places")
    if row.order not in (None, "ascending"):
        notes.append("downwards" if row.order == "descending" else "in another order")
    if row.active is False:
        notes.append("over before the end")
    return f" ({', '.join(notes)})" if notes else ""


def names_line(row: Classification) -> str:
    """Returns in short what is known to be in a row: its tensors, and which experts' slices."""
    return "; ".join(part for part in (_tensors(row.tensors), _experts(row.experts or {})) if part)


def _experts(experts: Mapping[str, tuple[int, ...]]) -> str:
    """Returns numbers of experts as ranges; how many they are where the layers are more than a few."""
    if len(experts) > SHOWN_NAMES:
        return f"{sum(map(len, experts.values()))} experts of {len(experts)} layers"
    return ", ".join(f"experts {_ranges(numbers)} of {layer}" for layer, numbers in experts.items())


def _tensors(names: Sequence[str]) -> str:
    """Returns tensor names: layers as a range, the others one by one; the first few."""
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
    """ "0-3,7" for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def summary(found: TraceClasses) -> list[str]:
    """What the classes come to, as section 3.3 of io_caching sums up a workload, and what to ask `llmcache size`."""
    totals = found.totals
    reads = (
        f"loops {format_size(totals.loop_bytes)}, hot {format_size(totals.hot_bytes)}, once {format_size(totals.once_bytes)}"
    )
    shares = f"{totals.loop_share:.1%} loops, {totals.hot_share:.1%} hot, {totals.once_share:.1%} once"
    lines = [f"read: {reads}; of all accesses {shares}"]
    lines += [
        f"also in the loop: {format_size(each.size_bytes)} of {each.path} that its mount keeps locked, read without faults"
        for each in found.locked
    ]
    if totals.write_loop_bytes or totals.write_once_bytes:
        writes = f"loops {format_size(totals.write_loop_bytes)}, once {format_size(totals.write_once_bytes)}"
        lines.append(f"written: {writes}")
    if found.size_command is not None:
        lines.append(f"how large a cache that needs: {found.size_command} --bw RATE")
    else:
        lines.append("no read loops: a cache saves what is hot, and nothing else")
    return lines
