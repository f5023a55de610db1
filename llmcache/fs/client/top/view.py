"""A sample as lines of text: fits 60 columns, uses more, and as many rows as there are.

Below 80 columns names are shorter, and what stands side by side elsewhere stands one above the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Span, Text

from llmcache.errors import printable
from llmcache.fs.client.top import strip
from llmcache.fs.client.top.sample import Flow, HeatFile, Layer, Loop, Sample
from llmcache.fs.engine import waits
from llmcache.units import format_duration, format_rate, format_size

LEAST_WIDTH, USUAL_WIDTH = 60, 80
_NAME, _SHORT_NAME = 25, 15
_LEAST_ROWS = 3  # of a file, to be worth telling
_NS = 1e9
_TITLE = "bold"
_ZEROS = re.compile(r"\.0+(?= )")


def lines(sample: Sample, width: int, rows: int | None = None, hint: str = "") -> list[Text]:
    """The view, `width` columns wide (60 at least) and at most `rows` lines long; `hint` stands in its first line."""
    width = max(LEAST_WIDTH, width)
    found = [_head(sample, width, hint), *_memory(sample, width), Text(), *_flows(sample, width), *_waits(sample, width)]
    found += [Text(), *_loops(sample.loops, width, None if rows is None else max(2, (rows - len(found)) // 3))]
    left = None if rows is None else rows - len(found) - 1
    if sample.heat and (left is None or left >= 2):
        found += [Text(), *_heat(sample, width, left)]
    return found if rows is None else found[:rows]


def _is_narrow(width: int) -> bool:
    return width < USUAL_WIDTH


def _head(sample: Sample, width: int, hint: str) -> Text:
    about = f" {printable(sample.budget.mode)}, up {_whole(sample.uptime_s)}"
    room = width - len(about) - len(hint) - 1
    left = Text(_fit(sample.mount, min(room, cell_len(printable(sample.mount)))), _TITLE).append(about, "not bold")
    return left.append(" " * max(1, width - left.cell_len - len(hint))).append(hint, "dim")


def _memory(sample: Sample, width: int) -> list[Text]:
    """The budget as a bar and in figures; one line more under memory pressure."""
    budget = sample.budget
    total = format_size(budget.budget_bytes)
    parts = ((budget.pinned_bytes, strip.PINNED), (budget.window_bytes, strip.WINDOW), (budget.other_bytes, strip.PAGES))
    used = sum(amount for amount, _ in parts)
    bar = strip.bar(parts, max(budget.budget_bytes, used), width - len(total) - 8)
    names = zip((*parts, (budget.free_bytes, strip.FREE)), ("pinned", "window", "pages", "free"), strict=True)
    told = [
        Text(f"{character} {name} {format_size(amount)}", spans=[Span(0, 1, strip.STYLES[character])])
        for (amount, character), name in names
    ]
    step = 2 if _is_narrow(width) else 4
    figures = [Text("       ").append_text(Text("   ").join(told[at : at + step])) for at in range(0, 4, step)]
    found = [Text("budget ").append_text(bar).append(f" {total}"), *figures]
    if budget.limit_bytes < budget.budget_bytes:
        limit = f"memory pressure: {format_size(budget.limit_bytes)} of {total} may be used"
        found.append(Text(f"       {limit}", "bold red"))
    return found


def _flows(sample: Sample, width: int) -> list[Text]:
    total, last = sample.total, sample.interval
    heads = f"{'since mount':>12}{_span(last):>13}"

    def bytes_row(name: str, amount: str) -> str:
        rate = "-" if last is None else format_rate(last.per_s(getattr(last, amount)))
        return f"{name:{left_width}}{format_size(getattr(total, amount)):>12}{rate:>13}"

    def ratio_row(name: str, ratio: str) -> str:
        shares = [_percent(None if flow is None else getattr(flow, ratio)) for flow in (total, last)]
        return f"{name:15}{shares[0]:>11}{shares[1]:>13}"

    narrow = _is_narrow(width)
    left_width = 14 if narrow else 13
    amounts = (("to readers", "read_bytes"), ("from storage", "storage_read_bytes"), ("fetched", "fetched_bytes"))
    ratios = (("byte hit ratio", "hit_ratio"), ("prefetch late", "late_ratio"), ("prefetch wasted", "wasted_ratio"))
    left, right = [bytes_row(*each) for each in amounts], [ratio_row(*each) for each in ratios]
    title = f"{'':{left_width}}{heads}"
    if narrow:
        found = [Text(title, _TITLE), *map(Text, left), *map(Text, right)]
    else:
        found = [Text(f"{title}   {'':14}{heads}", _TITLE)]
        found += [Text(f"{one}   {other}") for one, other in zip(left, right, strict=True)]
    written = (("written", "storage_written_bytes"), ("read again", "refault_bytes"))
    return found + [Text(bytes_row(name, amount)) for name, amount in written if getattr(total, amount)]


def _waits(sample: Sample, width: int) -> list[Text]:
    """How long readers waited for storage: for data on its way, and for data that nobody had fetched ahead."""
    if _is_narrow(width):
        widths, heads = (10, 9, 9, 9, 10, 13), ("waits", "count", "half <", "99 % <", "in all")
    else:
        widths, heads = (13, 12, 13, 14, 15, 13), ("waits", "since mount", "half within", "99 % within", "in all")
    found = [Text(_row(widths, *heads, _span(sample.interval)), _TITLE)]
    for name, key in (("late", "late_waits"), ("on demand", "demand_waits")):
        counted = getattr(sample.total, key)
        within = [_within(waits.quantile_s(counted, share)) for share in (0.5, 0.99)]
        count = sum(counted["counts"])
        spent = format_duration(counted["sum_s"] * _NS) if count else "-"
        found.append(Text(_row(widths, name, str(count), *within, spent, _share_of_time(sample.interval, key))))
    return found


def _row(widths: Sequence[int], name: str, *cells: str) -> str:
    """A name, then cells to the right of their columns."""
    return _fit(name, widths[0]) + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))


def _share_of_time(flow: Flow | None, key: str) -> str:
    """Readers that waited, on average, as a share of one reader's time."""
    return _percent(getattr(flow, key)["sum_s"] / flow.seconds if flow is not None and flow.seconds > 0 else None)


def _within(upper_s: float | None) -> str:
    if upper_s is None:
        return "-"
    return "> 3 s" if upper_s == float("inf") else _ZEROS.sub("", format_duration(upper_s * _NS))


def _loops(loops: Sequence[Loop], width: int, rows: int | None) -> list[Text]:
    if not loops:
        return [Text("no loop yet: no model is open, and nothing was read twice")]
    columns = (_SHORT_NAME, 8, 8, 7, 8) if _is_narrow(width) else (_NAME, 9, 9, 8, 8)
    room = width - sum(columns) - 3
    found = [Text(f"{_row(columns, 'loop', 'size', 'period', 'pinned', 'passes')}   {'readers':{room}}", _TITLE)]
    told = loops if rows is None or len(loops) < rows else loops[: max(1, rows - 2)]
    for loop in told:
        period = "-" if loop.period_s is None else _coarse(loop.period_s)
        share = _percent(loop.pinned_bytes / loop.size_bytes if loop.size_bytes else None, 0)
        passes = "guessed" if loop.guessed and not loop.passes else str(loop.passes)
        row = _row(columns, loop.path.lstrip("/"), format_size(loop.size_bytes), period, share, passes)
        found.append(Text(f"{row}   ").append_text(strip.readers(loop.readers, room)))
    if len(told) < len(loops):
        found.append(Text(f"and {len(loops) - len(told)} more", "dim"))
    return found


def _heat(sample: Sample, width: int, rows: int | None) -> list[Text]:
    """The files in `rows` lines: as many as get some lines each, these alike."""
    told = len(sample.heat) if rows is None else max(1, min(len(sample.heat), rows // _LEAST_ROWS))
    more = len(sample.heat) - told + sample.left_out_files
    left = rows - 1 if rows is not None and more and rows > _LEAST_ROWS else rows
    found: list[Text] = []
    for number, file in enumerate(sample.heat[:told]):
        found += _layers(file, width, None if left is None else (left - len(found)) // (told - number))
    if more:
        found.append(Text(f"and {more} more {'file' if more == 1 else 'files'}", "dim"))
    return found


def _layers(file: HeatFile, width: int, rows: int | None) -> list[Text]:
    columns = (_SHORT_NAME if _is_narrow(width) else _NAME, 9, 8, 12)
    room = width - sum(columns) - 3
    legend = Text(f"   {strip.STREAMED} streamed", "not bold")
    if not _is_narrow(width):
        legend.append(f"  {strip.COLD} cold", "dim")
    found = [Text(_row(columns, file.path.lstrip("/"), "size", "pinned", "read"), _TITLE).append_text(legend)]
    layers = file.layers if rows is None else strip.fold(file.layers, max(1, rows - 1))
    found += [_layer(layer, columns, room) for layer in layers]
    if file.left_out_layers and (rows is None or len(found) < rows):
        found.append(Text(f"and {file.left_out_layers} more layers", "dim"))
    return found


def _layer(layer: Layer, columns: Sequence[int], room: int) -> Text:
    share = _percent(layer.pinned_bytes / layer.size_bytes if layer.size_bytes else None, 0)
    row = _row(columns, layer.name or "whole file", format_size(layer.size_bytes), share, _ago(layer.age_s))
    return Text(f"{row}   ").append_text(strip.heat(layer, room))


def _ago(age_s: float | None) -> str:
    """Coarse: figures that change with every look cannot be read."""
    if age_s is None:
        return "-"
    if age_s < 1.5:
        return "now"
    return f"{round(age_s)} s ago" if age_s < 59.5 else f"{_coarse(age_s)} ago"


def _coarse(seconds: float) -> str:
    """In one unit."""
    if seconds < 59.5:
        return format_duration(seconds * _NS)
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{round(minutes / 60)} h"


def _whole(seconds: float) -> str:
    return f"{round(seconds)} s" if seconds < 59.5 else format_duration(seconds * _NS)


def _span(flow: Flow | None) -> str:
    return "" if flow is None else f"last {flow.seconds:.1f} s"


def _percent(ratio: float | None, digits: int = 1) -> str:
    return "-" if ratio is None else f"{100 * ratio:.{digits}f} %"


def _fit(text: str, width: int) -> str:
    """`text` in `width` columns: of a long one, its end, which is where names of models differ."""
    text = printable(text)
    if cell_len(text) > width:
        while cell_len(text) > width - 1:
            text = text[1:]
        text = f"…{text}"
    return set_cell_size(text, width)
