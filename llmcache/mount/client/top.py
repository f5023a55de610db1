"""`llmcache top`: sample a mount repeatedly, and show the samples on a terminal, as text or as JSON.

On a terminal, the view uses the alternate screen, and keys are neither buffered nor echoed. Both are restored at any end
(`q`, Ctrl-C, a signal, an error).
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.text import Span, Text

from llmcache.errors import MountProblem, UsageError, printable
from llmcache.mount.client import control
from llmcache.mount.client.mountpoint import ask
from llmcache.mount.client.operation import loop_notes
from llmcache.mount.stats import (
    FileHeat,
    HeatMap,
    LayerExperts,
    LayerHeat,
    LoopStats,
    MountStats,
    Waits,
    from_json,
    hit_ratio,
    to_json,
)
from llmcache.units import format_duration, format_percent, format_rate, format_size

Ask = Callable[[str, dict[str, Any]], dict[str, Any]]

SCHEMA = "llmcache.top/1"
MEMORY_S = 60.0
HEAT_SHARE = 0.05  # the largest share of time that requests of the heat of large models may take
WIDTH = 80
LEAST_PAUSE_S = 0.1
TICK_S = 0.1  # interval of the checks for a new size of the terminal
_NAME = 25
_LEAST_ROWS = 3  # a file with fewer rows is not shown
_NS = 1e9
_TITLE = "bold"
_ZEROS = re.compile(r"\.0+(?= )")
# Fields that are summed for the layers of one row.
_SUMS = ("tensors", "size_bytes", "pinned_bytes", "window_bytes", "pages_bytes", "streamed_bytes", "cold_bytes")
PINNED, PARTLY, LITTLE, WINDOW, PAGES, STREAMED, COLD, FREE = "█", "▓", "▒", "▸", "▪", "░", "·", "·"
STYLES = {PINNED: "green", PARTLY: "green", LITTLE: "green", WINDOW: "yellow", PAGES: "cyan", STREAMED: "", COLD: "dim"}
_NINTHS, _CELLS = 9, 16
_PINNED_FROM, _PARTLY_FROM = 7, 4


@dataclass(frozen=True)
class Budget:
    """Use of the memory. `limit_bytes`: the budget, or less under memory pressure, without the daemon's own memory.

    `window_bytes`: streamed extents, and data not dropped yet; `other_bytes`: single pages (headers, embedding rows, small
    and written files); `free_bytes`: the unused part of the limit.
    """

    mode: str
    budget_bytes: int
    limit_bytes: int
    pinned_bytes: int
    window_bytes: int
    other_bytes: int
    free_bytes: int
    daemon_bytes: int

    @classmethod
    def of(cls, stats: MountStats) -> Budget:
        other, free = min(stats.pages_bytes, stats.window_bytes), max(0, stats.limit_bytes - stats.resident_bytes)
        sizes = (stats.budget_bytes, stats.limit_bytes, stats.pinned_bytes, stats.window_bytes - other, other, free)
        return cls(stats.mode, *sizes, stats.daemon_bytes)


@dataclass(frozen=True)
class MountTraffic:
    """Bytes transferred in `seconds`, and the waits of readers in that time. Ratios (0..1) are None if unknown.

    `hit_ratio`: by bytes; outside mode arena, hits on resident data are counted at the end of each pass. `late_ratio`,
    `wasted_ratio`: the shares of prefetched bytes that a reader waited for, and that were dropped unread.
    """

    seconds: float
    read_bytes: int
    hit_bytes: int
    storage_read_bytes: int
    storage_written_bytes: int
    fetched_bytes: int
    useful_bytes: int
    late_bytes: int
    wasted_bytes: int
    refault_bytes: int
    read_bytes_per_s: float
    storage_read_bytes_per_s: float
    storage_written_bytes_per_s: float
    fetched_bytes_per_s: float
    refault_bytes_per_s: float
    hit_ratio: float | None
    late_ratio: float | None
    wasted_ratio: float | None
    late_waits: Waits
    demand_waits: Waits

    @classmethod
    def between(cls, before: MountStats | None, now: MountStats) -> MountTraffic:
        """Without `before`, return the traffic since the mount's start."""
        seconds = now.uptime_s - (before.uptime_s if before else 0.0)
        counters = {name: getattr(now, key) - (getattr(before, key) if before else 0) for name, key in _COUNTERS.items()}
        rated = ("read_bytes", "storage_read_bytes", "storage_written_bytes", "fetched_bytes", "refault_bytes")
        useful, late, wasted = (
            getattr(now.prefetch, fate) - (getattr(before.prefetch, fate) if before else 0)
            for fate in ("useful_bytes", "late_bytes", "wasted_bytes")
        )
        prefetched = useful + late + wasted
        rates: dict[str, Any] = {f"{name}_per_s": counters[name] / seconds if seconds > 0 else 0.0 for name in rated}
        return cls(
            seconds=seconds,
            **counters,
            useful_bytes=useful,
            late_bytes=late,
            wasted_bytes=wasted,
            **rates,
            hit_ratio=hit_ratio(now.mode, counters["hit_bytes"], counters["read_bytes"]),
            late_ratio=late / prefetched if prefetched else None,
            wasted_ratio=wasted / prefetched if prefetched else None,
            late_waits=now.waits.late.since(before.waits.late) if before else now.waits.late,
            demand_waits=now.waits.demand.since(before.waits.demand) if before else now.waits.demand,
        )

    def document(self) -> dict[str, Any]:
        """`median_s` and `p99_s` are None without waits, and beyond the last bound."""
        document: dict[str, Any] = to_json(self)
        for name in ("late_waits", "demand_waits"):
            for key, share in (("median_s", 0.5), ("p99_s", 0.99)):
                upper = getattr(self, name).quantile_s(share)
                document[name][key] = None if upper == float("inf") else upper
        return document


# Counters of MountTraffic, and their names in MountStats.
_COUNTERS = {
    "read_bytes": "read_bytes",
    "hit_bytes": "hit_bytes",
    "storage_read_bytes": "backing_read_bytes",
    "storage_written_bytes": "backing_write_bytes",
    "fetched_bytes": "stored_bytes",
    "refault_bytes": "refault_bytes",
}


@dataclass(frozen=True)
class LoopState:
    """One loop, with the path and the name of its first file."""

    path: str
    name: str
    stats: LoopStats

    def document(self) -> dict[str, Any]:
        loop = self.stats
        names = ("period_s", "pinned_bytes", "window_bytes", "passes", "guessed", "readers")
        return {
            "path": self.path,
            "name": self.name,
            "size_bytes": loop.size_bytes,
            **{name: getattr(loop, name) for name in names},
            "left": bool(loop.left),
            "unused_bytes": loop.unused_bytes or 0,
            "steered_pass_bytes": loop.steered_pass_bytes,
            "lru_pass_bytes": loop.lru_pass_bytes,
            "copied": to_json(loop.copied),
        }


@dataclass(frozen=True)
class Sample:
    """One sample. `interval`: the traffic of at least a whole pass, if possible; None in the first one."""

    mount: str
    unix_s: float
    uptime_s: float
    budget: Budget
    total: MountTraffic
    interval: MountTraffic | None
    loops: tuple[LoopState, ...]
    heat: tuple[FileHeat, ...]
    left_out_files: int

    def document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "mount": self.mount,
            "unix_s": self.unix_s,
            "uptime_s": self.uptime_s,
            "budget": to_json(self.budget),
            "total": self.total.document(),
            "interval": None if self.interval is None else self.interval.document(),
            "loops": [loop.document() for loop in self.loops],
            "heat": [_heat_document(file) for file in self.heat],
            "left_out_files": self.left_out_files,
        }


def _heat_document(file: FileHeat) -> dict[str, Any]:
    return {
        "path": file.path,
        "name": file.shown_name,
        "size_bytes": file.size_bytes,
        "layers": [_layer_document(layer) for layer in file.layers],
        "left_out_layers": file.left_out_layers,
    }


def _layer_document(layer: LayerHeat) -> dict[str, Any]:
    names = ("name", *_SUMS, "age_s", "cells")
    experts = layer.experts or LayerExperts()
    return {name: getattr(layer, name) for name in names} | {"experts": experts.count, "experts_kept": experts.kept}


def loops_of(stats: MountStats) -> tuple[LoopState, ...]:
    """Return all loops: active ones first, then the largest."""
    found = [LoopState(file.path, file.shown_name, loop) for file in stats.files for loop in file.loops]
    return tuple(sorted(found, key=lambda loop: (not loop.stats.readers, -loop.stats.size_bytes, loop.path)))


def _age(file: FileHeat) -> float:
    """Return tens of seconds, so that active files keep their order."""
    return min((layer.age_s // 10 for layer in file.layers if layer.age_s is not None), default=float("inf"))


def strip_bar(parts: Iterable[tuple[int, str]], total: int, width: int) -> Text:
    """Return a bar that shows (amount, character) `parts` of `total`."""
    text = Text()
    done, cells = 0, 0
    for amount, character in parts:
        done += amount
        end = min(width, round(width * done / total)) if total else 0
        text.append(character * (end - cells), STYLES[character])
        cells = max(cells, end)
    return text.append(FREE * (width - cells), STYLES[COLD])


def readers_strip(places: Iterable[float], width: int) -> Text:
    """Return a line that marks the position (0..1) of each reader."""
    cells = ["─"] * width
    for place in places:
        cells[max(0, min(width - 1, int(place * width)))] = "●"
    text = Text("".join(cells), "dim")
    for at, cell in enumerate(cells):
        if cell == "●":
            text.stylize("not dim yellow", at, at + 1)
    return text


def heat_strip(layer: LayerHeat, width: int) -> Text:
    """Return the strip of a layer."""
    cells = {kind: stretch(digits, width) for kind, digits in layer.cells.items()}
    characters = [_character({kind: digits[at] for kind, digits in cells.items()}) for at in range(width)]
    return Text.assemble(*((character, STYLES[character]) for character in characters))


def _character(ninths: dict[str, int]) -> str:
    if ninths["window"]:
        return WINDOW
    if pinned := ninths["pinned"]:
        return PINNED if pinned >= _PINNED_FROM else PARTLY if pinned >= _PARTLY_FROM else LITTLE
    if ninths["pages"]:
        return PAGES
    return COLD if ninths["cold"] > _NINTHS // 2 else STREAMED


def stretch(digits: str, width: int) -> list[int]:
    """Resample digits to `width`; each is the largest of those that it covers."""
    bounds = [(cell * len(digits) // width, -(-(cell + 1) * len(digits) // width)) for cell in range(width)]
    return [max(map(int, digits[low : max(high, low + 1)])) for low, high in bounds]


def merge(layers: Sequence[LayerHeat]) -> LayerHeat:
    """Merge adjacent layers into one."""
    if len(layers) == 1:
        return layers[0]
    ages = [layer.age_s for layer in layers if layer.age_s is not None]
    experts = [layer.experts for layer in layers if layer.experts is not None]
    return LayerHeat(
        name=f"{layers[0].name}–{layers[-1].name}",
        age_s=min(ages, default=None),
        cells={kind: _joined(layers, kind) for kind in layers[0].cells},
        experts=LayerExperts(sum(each.kept for each in experts), sum(each.count for each in experts)),
        **{name: sum(getattr(layer, name) for layer in layers) for name in _SUMS},
    )


def _joined(layers: Sequence[LayerHeat], kind: str) -> str:
    digits = [digit for layer in layers for digit in stretch(layer.cells[kind], _CELLS)]
    count = len(layers)
    return "".join(str(-(-sum(digits[at : at + count]) // count)) for at in range(0, len(digits), count))


def fold(layers: Sequence[LayerHeat], rows: int) -> list[LayerHeat]:
    """Merge adjacent layers into at most `rows` rows."""
    if len(layers) <= rows:
        return list(layers)
    total = sum(layer.size_bytes for layer in layers) or 1
    found: list[list[LayerHeat]] = [[] for _ in range(rows)]
    done = 0
    for layer in layers:
        middle = done + layer.size_bytes / 2
        found[min(rows - 1, int(rows * middle / total))].append(layer)
        done += layer.size_bytes
    return [merge(part) for part in found if part]


class Watcher:
    """Takes samples of the mount on a path."""

    def __init__(self, mount: str, asks: Ask = ask, clock: Callable[[], float] = time.monotonic) -> None:
        self.mount = mount
        self._ask = asks
        self._clock = clock
        self._past: deque[MountStats] = deque()  # without files, of which there may be thousands
        self._heat: HeatMap | None = None
        self._heat_due_s = 0.0

    def sample(self) -> Sample:
        """Raise MountProblem if there is no mount, or the reply is invalid."""
        try:
            with control.reply_errors(self.mount):
                stats = from_json(MountStats, self._ask(self.mount, {"op": "stats"}))
                before = self._past[-1] if self._past else stats
                if stats.uptime_s < before.uptime_s or stats.helper_pid != before.helper_pid:
                    self._past.clear()  # the path has a new mount
                    self._heat = None
                return self._sample(stats, self._heat_map())
        except MountProblem as error:
            if not self._past:
                raise
            raise MountProblem(f"{self.mount} can no longer be watched: {error.message}", error.hint) from error

    def _sample(self, stats: MountStats, heat: HeatMap) -> Sample:
        base = self._base(stats)
        found = Sample(
            mount=self.mount,
            unix_s=time.time(),
            uptime_s=stats.uptime_s,
            budget=Budget.of(stats),
            total=MountTraffic.between(None, stats),
            interval=None if base is None else MountTraffic.between(base, stats),
            loops=loops_of(stats),
            heat=tuple(sorted((file for file in heat.files if file.layers), key=lambda file: (_age(file), file.path))),
            left_out_files=heat.left_out_files,
        )
        self._past.append(replace(stats, files=()))
        while self._past[0].uptime_s < stats.uptime_s - MEMORY_S:
            self._past.popleft()
        return found

    def _heat_map(self) -> HeatMap:
        """Request it at most for HEAT_SHARE of the time."""
        began = self._clock()
        if self._heat is None or began >= self._heat_due_s:
            self._heat = from_json(HeatMap, self._ask(self.mount, {"op": "heat"}))
            self._heat_due_s = began + (self._clock() - began) / HEAT_SHARE
        return self._heat

    def _base(self, now: MountStats) -> MountStats | None:
        """Return the latest stats that are at least a period of every active loop old."""
        periods = [loop.period_s or 0.0 for file in now.files for loop in file.loops if loop.readers]
        back_s = now.uptime_s - max(periods, default=0.0)
        whole = [past for past in self._past if past.uptime_s <= back_s]
        if whole:
            return whole[-1]
        return self._past[0] if self._past else None


def lines(sample: Sample, width: int, rows: int | None = None, hint: str = "") -> list[Text]:
    """Return at most `rows` lines of `width` columns (at least 80), with `hint` in the first line."""
    width = max(WIDTH, width)
    found = [_head(sample, width, hint), *_memory(sample, width), Text(), *_flows(sample), *_wait_rows(sample)]
    found += [Text(), *_loops(sample.loops, width, None if rows is None else max(2, (rows - len(found)) // 3))]
    left = None if rows is None else rows - len(found) - 1
    if sample.heat and (left is None or left >= 2):
        found += [Text(), *_heat(sample, width, left)]
    return found if rows is None else found[:rows]


def _head(sample: Sample, width: int, hint: str) -> Text:
    uptime = f"{round(sample.uptime_s)} s" if sample.uptime_s < 59.5 else format_duration(sample.uptime_s * _NS)
    about = f" {printable(sample.budget.mode)}, up {uptime}"
    room = width - len(about) - len(hint) - 1
    left = Text(_fit(sample.mount, min(room, cell_len(printable(sample.mount)))), _TITLE).append(about, "not bold")
    return left.append(" " * max(1, width - left.cell_len - len(hint))).append(hint, "dim")


def _memory(sample: Sample, width: int) -> list[Text]:
    budget = sample.budget
    total = format_size(budget.budget_bytes)
    parts = ((budget.pinned_bytes, PINNED), (budget.window_bytes, WINDOW), (budget.other_bytes, PAGES))
    used = sum(amount for amount, _ in parts)
    bar = strip_bar(parts, max(budget.budget_bytes, used), width - len(total) - 8)
    names = zip((*parts, (budget.free_bytes, FREE)), ("pinned", "window", "pages", "free"), strict=True)
    amounts = [
        Text(f"{character} {name} {format_size(amount)}", spans=[Span(0, 1, STYLES[character])])
        for (amount, character), name in names
    ]
    figures = Text("       ").append_text(Text("   ").join(amounts))
    found = [Text("budget ").append_text(bar).append(f" {total}"), figures]
    if budget.limit_bytes < budget.budget_bytes:
        limit = f"memory pressure: {format_size(budget.limit_bytes)} of {total} may be used"
        found.append(Text(f"       {limit}", "bold red"))
    return found


def _flows(sample: Sample) -> list[Text]:
    total, last = sample.total, sample.interval
    heads = f"{'since mount':>12}{_span(last):>13}"

    def bytes_row(name: str, amount: str) -> str:
        rate = "-" if last is None else format_rate(getattr(last, f"{amount}_per_s"))
        return f"{name:13}{format_size(getattr(total, amount)):>12}{rate:>13}"

    def ratio_row(name: str, ratio: str) -> str:
        shares = [format_percent(None if flow is None else getattr(flow, ratio)) for flow in (total, last)]
        return f"{name:15}{shares[0]:>11}{shares[1]:>13}"

    amounts = (("to readers", "read_bytes"), ("from storage", "storage_read_bytes"), ("fetched", "fetched_bytes"))
    ratios = (("byte hit ratio", "hit_ratio"), ("prefetch late", "late_ratio"), ("prefetch wasted", "wasted_ratio"))
    rows = zip((bytes_row(*each) for each in amounts), (ratio_row(*each) for each in ratios), strict=True)
    found = [Text(f"{'':13}{heads}   {'':14}{heads}", _TITLE), *(Text("   ".join(row)) for row in rows)]
    written = (("written", "storage_written_bytes"), ("refaults", "refault_bytes"))
    return found + [Text(bytes_row(name, amount)) for name, amount in written if getattr(total, amount)]


def _wait_rows(sample: Sample) -> list[Text]:
    widths, heads = (13, 12, 13, 14, 15, 13), ("waits", "since mount", "half within", "99 % within", "in all")
    found = [Text(_row(widths, *heads, _span(sample.interval)), _TITLE)]
    for name, key in (("late", "late_waits"), ("on demand", "demand_waits")):
        waits: Waits = getattr(sample.total, key)
        within = [_within(waits.quantile_s(share)) for share in (0.5, 0.99)]
        count = sum(waits.counts)
        spent = format_duration(waits.sum_s * _NS) if count else "-"
        found.append(Text(_row(widths, name, str(count), *within, spent, _share_of_time(sample.interval, key))))
    return found


def _row(widths: Sequence[int], name: str, *cells: str) -> str:
    return _fit(name, widths[0]) + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))


def _share_of_time(flow: MountTraffic | None, key: str) -> str:
    """With several readers, the share can exceed 100 %."""
    return format_percent(getattr(flow, key).sum_s / flow.seconds if flow is not None and flow.seconds > 0 else None)


def _within(upper_s: float | None) -> str:
    if upper_s is None:
        return "-"
    return "> 3 s" if upper_s == float("inf") else _ZEROS.sub("", format_duration(upper_s * _NS))


def _loops(loops: Sequence[LoopState], width: int, rows: int | None) -> list[Text]:
    if not loops:
        return [Text("no loop yet: no model is open, and no file was read twice")]
    columns = (_NAME, 9, 9, 8, 8)
    room = width - sum(columns) - 3
    found = [Text(f"{_row(columns, 'loop', 'size', 'period', 'pinned', 'passes')}   {'readers':{room}}", _TITLE)]
    blocks = [_loop(loop, columns, room) for loop in loops]
    ends = list(accumulate(map(len, blocks)))
    shown = len(blocks) if rows is None or ends[-1] < rows else max(1, sum(end <= rows - 2 for end in ends))
    found += [line for block in blocks[:shown] for line in block]
    if shown < len(blocks):
        found.append(Text(f"and {len(blocks) - shown} more", "dim"))
    return found


def _loop(loop: LoopState, columns: Sequence[int], room: int) -> list[Text]:
    stats = loop.stats
    period = "-" if stats.period_s is None else _coarse(stats.period_s)
    share = format_percent(stats.pinned_bytes / stats.size_bytes if stats.size_bytes else None, 0)
    passes = "guessed" if stats.guessed and not stats.passes else str(stats.passes)
    row = _row(columns, loop.name, format_size(stats.size_bytes), period, share, passes)
    found = [Text(f"{row}   ").append_text(readers_strip(stats.readers, room))]
    return found + [Text(f"  {printable(note)}", "dim") for note in loop_notes(stats)]


def _heat(sample: Sample, width: int, rows: int | None) -> list[Text]:
    count = len(sample.heat) if rows is None else max(1, min(len(sample.heat), rows // _LEAST_ROWS))
    more = len(sample.heat) - count + sample.left_out_files
    left = rows - 1 if rows is not None and more and rows > _LEAST_ROWS else rows
    found: list[Text] = []
    for number, file in enumerate(sample.heat[:count]):
        found += _layers(file, width, None if left is None else (left - len(found)) // (count - number))
    if more:
        found.append(Text(f"and {more} more {'file' if more == 1 else 'files'}", "dim"))
    return found


def _layers(file: FileHeat, width: int, rows: int | None) -> list[Text]:
    columns = (_NAME, 9, 8, 12)
    room = width - sum(columns) - 3
    legend = Text(f"   {STREAMED} streamed", "not bold").append(f"  {COLD} cold", "dim")
    found = [Text(_row(columns, file.shown_name, "size", "pinned", "read"), _TITLE).append_text(legend)]
    layers = file.layers if rows is None else fold(file.layers, max(1, rows - 1))
    found += [_layer(layer, columns, room) for layer in layers]
    if file.left_out_layers and (rows is None or len(found) < rows):
        found.append(Text(f"and {file.left_out_layers} more layers", "dim"))
    return found


def _layer(layer: LayerHeat, columns: Sequence[int], room: int) -> Text:
    share = format_percent(layer.pinned_bytes / layer.size_bytes if layer.size_bytes else None, 0)
    name = layer.name or "whole file"
    if layer.experts is not None and layer.experts.count:
        name = f"{name} {layer.experts.kept}/{layer.experts.count}"
    row = _row(columns, name, format_size(layer.size_bytes), share, _ago(layer.age_s))
    return Text(f"{row}   ").append_text(heat_strip(layer, room))


def _ago(age_s: float | None) -> str:
    """Return an age, coarse, because figures that always change are hard to read."""
    if age_s is None:
        return "-"
    if age_s < 1.5:
        return "now"
    return f"{round(age_s)} s ago" if age_s < 59.5 else f"{_coarse(age_s)} ago"


def _coarse(seconds: float) -> str:
    if seconds < 59.5:
        return format_duration(seconds * _NS)
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{round(minutes / 60)} h"


def _span(flow: MountTraffic | None) -> str:
    return "" if flow is None else f"last {flow.seconds:.1f} s"


def _fit(text: str, width: int) -> str:
    """Keep the end of a long text, where names of models differ."""
    text = printable(text)
    if cell_len(text) > width:
        while cell_len(text) > width - 1:
            text = text[1:]
        text = f"…{text}"
    return set_cell_size(text, width)


def show(mount: str, *, pause_s: float, count: int | None, once: bool, as_json: bool) -> None:
    """Watch a mount, `count` times or until `q`, Ctrl-C or its end; as text if `once` or if stdout is not a terminal.

    MountProblem: there is no mount. UsageError: the pause is too short.
    """
    if pause_s < LEAST_PAUSE_S:
        raise UsageError(f"INTERVAL: {pause_s:g} s is too short: the minimum is {LEAST_PAUSE_S:g} s")
    watcher = Watcher(mount)
    count = 1 if once else count
    with suppress(KeyboardInterrupt):
        if as_json:
            for sample in _samples(watcher, pause_s, count):
                print(json.dumps(sample.document()), flush=True)
        elif once or not sys.stdout.isatty() or Console().is_dumb_terminal:
            _print_text(watcher, pause_s, count or 1)
        else:
            _show_screen(watcher, pause_s, count)


def _samples(watcher: Watcher, pause_s: float, count: int | None) -> Iterator[Sample]:
    watcher.sample()
    for _ in repeat(None) if count is None else range(count):
        time.sleep(pause_s)
        yield watcher.sample()


def _print_text(watcher: Watcher, pause_s: float, count: int) -> None:
    # Not rich's default width: if stdout is not a terminal, it is that of stderr's terminal.
    console = Console(file=sys.stdout, highlight=False, width=shutil.get_terminal_size((WIDTH, 0)).columns)
    for number, sample in enumerate(_samples(watcher, pause_s, count)):
        if number:
            console.print()
        for line in lines(sample, console.width):
            line.rstrip()
            console.print(line, no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)
        sys.stdout.flush()


def _show_screen(watcher: Watcher, pause_s: float, count: int | None) -> None:
    console = Console(file=_whole_stdout(), highlight=False)
    keys = [sys.stdin.fileno()] if sys.stdin.isatty() else []
    sample = watcher.sample()  # before the screen is switched, so that an error is visible
    size, due, left = None, time.monotonic() + pause_s, count
    with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if size != console.size:
                size = console.size
                texts = lines(sample, *size, f"every {pause_s:g} s, q quits")
                for text in texts:
                    text.no_wrap, text.overflow = True, "crop"
                live.update(Group(*texts), refresh=True)
            ready, _, _ = select.select(keys, [], [], max(0.0, min(TICK_S, due - time.monotonic())))
            if ready and b"q" in (os.read(keys[0], 512).lower() or b"q"):  # at the end of stdin, too
                return
            if time.monotonic() >= due:
                left = None if left is None else left - 1
                if left == 0:
                    return
                sample, size, due = watcher.sample(), None, time.monotonic() + pause_s


def _whole_stdout() -> TextIO:
    """Return stdout with a buffer, even with PYTHONUNBUFFERED: without one, a signal can cut a write short."""
    file = sys.stdout
    return open(file.fileno(), "w", encoding=file.encoding, errors=file.errors, closefd=False)


@contextmanager
def _keys() -> Iterator[None]:
    """Ctrl-C works as usual; Ctrl-Z is ignored."""
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    stops = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # stopping would leave the alternate screen on
    tty.setcbreak(fd)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, stops)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
