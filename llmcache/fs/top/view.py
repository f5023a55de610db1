"""A sample as lines of text: fits 80 columns, uses more, and as many rows as there are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from llmcache.fs import waits
from llmcache.fs.top import strip
from llmcache.fs.top.sample import Flow, HeatFile, Layer, Loop, Sample
from llmcache.units import format_duration, format_rate, format_size, printable

LEAST_WIDTH = 80
_NAME = 25
_LEAST_ROWS = 3  # of a file, to be worth telling
_NS = 1e9
_TITLE = "bold"
_ZEROS = re.compile(r"\.0+(?= )")


def lines(sample: Sample, width: int, rows: int | None = None, hint: str = "") -> list[Text]:
    """The view, `width` columns wide (80 at least) and at most `rows` lines long; `hint` stands in its first line."""
    width = max(LEAST_WIDTH, width)
    found = [_head(sample, width, hint), *_memory(sample, width), Text(), *_flows(sample), *_waits(sample)]
    found += [Text(), *_loops(sample.loops, width, None if rows is None else max(2, (rows - len(found)) // 3))]
    left = None if rows is None else rows - len(found) - 1
    if sample.heat and (left is None or left >= 2):
        found += [Text(), *_heat(sample, width, left)]
    return found if rows is None else found[:rows]


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
    figures = Text("       ")
    names = ((strip.PINNED, "pinned", 0), (strip.WINDOW, "window", 1), (strip.PAGES, "pages", 2))
    for character, name, place in names:
        figures.append(character, strip.STYLES[character]).append(f" {name} {format_size(parts[place][0])}   ")
    figures.append(f"{strip.FREE} free {format_size(budget.free_bytes)}")
    found = [Text("budget ").append_text(bar).append(f" {total}"), figures]
    if budget.limit_bytes < budget.budget_bytes:
        limit = f"memory pressure: {format_size(budget.limit_bytes)} of {total} may be used"
        found.append(Text(f"       {limit}", "bold red"))
    return found


def _flows(sample: Sample) -> list[Text]:
    total, last = sample.total, sample.interval
    heads = f"{'since mount':>12}{_span(last):>13}"
    found = [Text(f"{'':13}{heads}   {'':14}{heads}", _TITLE)]
    rows = (
        ("to readers", "read_bytes", "byte hit ratio", "hit_ratio"),
        ("from storage", "storage_read_bytes", "prefetch late", "late_ratio"),
        ("fetched", "fetched_bytes", "prefetch wasted", "wasted_ratio"),
    )
    for left, amount, right, ratio in rows:
        moved = format_size(getattr(total, amount))
        rate = "-" if last is None else format_rate(last.per_s(getattr(last, amount)))
        shares = [_percent(None if flow is None else getattr(flow, ratio)) for flow in (total, last)]
        found.append(Text(f"{left:13}{moved:>12}{rate:>13}   {right:15}{shares[0]:>11}{shares[1]:>13}"))
    for name, amount in (("written", "storage_written_bytes"), ("read again", "refault_bytes")):
        if getattr(total, amount):
            rate = "-" if last is None else format_rate(last.per_s(getattr(last, amount)))
            found.append(Text(f"{name:13}{format_size(getattr(total, amount)):>12}{rate:>13}"))
    return found


def _waits(sample: Sample) -> list[Text]:
    """How long readers waited for storage: for data on its way, and for data that nobody had fetched ahead."""
    heads = f"{'waits':13}{'since mount':>12}{'half within':>13}{'99 % within':>14}{'in all':>15}"
    found = [Text(f"{heads}{_span(sample.interval):>13}", _TITLE)]
    for name, key in (("late", "late_waits"), ("on demand", "demand_waits")):
        counted = getattr(sample.total, key)
        within = [_within(waits.quantile_s(counted, share)) for share in (0.5, 0.99)]
        count = sum(counted["counts"])
        spent = format_duration(counted["sum_s"] * _NS) if count else "-"
        row = f"{name:13}{count:>12}{within[0]:>13}{within[1]:>14}{spent:>15}"
        found.append(Text(f"{row}{_share_of_time(sample.interval, key):>13}"))
    return found


def _share_of_time(flow: Flow | None, key: str) -> str:
    """Readers that waited, on average, as a share of one reader's time."""
    return _percent(getattr(flow, key)["sum_s"] / flow.seconds if flow is not None and flow.seconds > 0 else None)


def _within(upper_s: float | None) -> str:
    if upper_s is None:
        return "-"
    return "> 3 s" if upper_s == float("inf") else _ZEROS.sub("", format_duration(upper_s * _NS))


def _loops(loops: Sequence[Loop], width: int, rows: int | None) -> list[Text]:
    if not loops:
        return [Text("no loop yet: nothing is open that is a model, or was read twice")]
    room = width - _NAME - 37
    found = [Text(f"{'loop':{_NAME}}{'size':>9}{'period':>9}{'pinned':>8}{'passes':>8}   {'readers':{room}}", _TITLE)]
    told = loops if rows is None or len(loops) < rows else loops[: max(1, rows - 2)]
    for loop in told:
        period = "-" if loop.period_s is None else _coarse(loop.period_s)
        share = _percent(loop.pinned_bytes / loop.size_bytes if loop.size_bytes else None, 0)
        passes = "guessed" if loop.guessed and not loop.passes else str(loop.passes)
        row = f"{_fit(loop.path.lstrip('/'), _NAME)}{format_size(loop.size_bytes):>9}{period:>9}{share:>8}{passes:>8}   "
        found.append(Text(row).append_text(strip.readers(loop.readers, room)))
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
    room = width - _NAME - 9 - 8 - 12 - 3
    legend = Text(f"   {strip.STREAMED} streamed  ", "not bold").append(f"{strip.COLD} cold", "dim")
    title = Text(f"{_fit(file.path.lstrip('/'), _NAME)}{'size':>9}{'pinned':>8}{'read':>12}", _TITLE)
    found = [title.append_text(legend)]
    layers = file.layers if rows is None else strip.fold(file.layers, max(1, rows - 1))
    found += [_layer(layer, room) for layer in layers]
    if file.left_out_layers and (rows is None or len(found) < rows):
        found.append(Text(f"and {file.left_out_layers} more layers", "dim"))
    return found


def _layer(layer: Layer, room: int) -> Text:
    share = _percent(layer.pinned_bytes / layer.size_bytes if layer.size_bytes else None, 0)
    row = f"{_fit(layer.name or 'whole file', _NAME)}{format_size(layer.size_bytes):>9}{share:>8}{_ago(layer.age_s):>12}   "
    return Text(row).append_text(strip.heat(layer, room))


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
