"""The figure of a trace (`llmcache plot`): blocks over time, as in figures 1 and 2 of io_caching.

Two passes over a trace of any length need memory proportional to the figure: `survey` finds files and times, `AccessGrid`
counts per cell.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from llmcache.cache.classify import Classification, classify
from llmcache.cache.plan import Progress
from llmcache.cache.routing import MoeUses
from llmcache.errors import DataError, UsageError, printable
from llmcache.model.modelfile import Models
from llmcache.report.classify import expert_blocks, names_line
from llmcache.report.html import Cell, Facts, Fold, HtmlBlock, Section, Table, html_page
from llmcache.report.output import Written, form_of, write_target
from llmcache.report.theme import CLASS_COLOURS, FAINT, INK, OP_COLOURS, PAPER, captioned, embedded, style
from llmcache.trace.formats import open_trace
from llmcache.trace.record import Trace, TraceFile, TraceReader
from llmcache.units import BLOCK_BYTES, format_duration, format_size, shortened

OPS = ("read", "write", "map")
"""Names of the op codes 0, 1, 2 of a trace."""
MOST_BANDS = 16
# of the height: a hot file of ten blocks stays visible next to a model, and 16 bands have room for names
LEAST_SHARE = 0.062
WORTH_A_BAND = 0.01  # of all accesses, or of all blocks: without --files, smaller files (libraries, locales) are left out
BATCH_ROWS = 1 << 18
EDGE = 1e-6  # of a cell: keeps rounding errors at an edge from counting the neighboring cell

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class FileSpan:
    """Accesses of a file within blocks `first` .. `end` - 1."""

    file: int
    first: int
    end: int
    accesses: int


@dataclass(frozen=True)
class Survey:
    """Times in ns, number of rows, and accessed files by id."""

    t0_ns: int
    t1_ns: int
    rows: int
    spans: tuple[FileSpan, ...]

    @property
    def accesses(self) -> int:
        return sum(span.accesses for span in self.spans)


@dataclass(frozen=True)
class Band:
    """A file's range in a figure: blocks `first` .. `end` - 1 at heights `bottom` .. `top` (0..1)."""

    file: int
    first: int
    end: int
    bottom: float
    top: float

    def height(self, block: float) -> float:
        return self.bottom + (block - self.first) / (self.end - self.first) * (self.top - self.bottom)


def survey(batches: Iterable[Trace], only: frozenset[int] | None = None) -> Survey:
    """Return the summary for the files `only` (None: all); DataError if there are no accesses."""
    spans: dict[int, FileSpan] = {}
    t0_ns, t1_ns, rows = -1, 0, 0
    for batch in batches:
        keep = chosen(batch, only)
        if not keep.any():
            continue
        t_ns = batch.t_ns[keep]
        t0_ns = int(t_ns[0]) if t0_ns < 0 else t0_ns
        t1_ns, rows = int(t_ns[-1]), rows + len(t_ns)
        for span in _spans(batch.file[keep], batch.first[keep].astype(np.int64), batch.count[keep].astype(np.int64)):
            spans[span.file] = _joined(spans.get(span.file), span)
    if not spans:
        raise DataError("rows: the trace has no accesses to draw", "inspect the trace with: llmcache info FILE")
    return Survey(t0_ns, t1_ns, rows, tuple(spans[file] for file in sorted(spans)))


def chosen(batch: Trace, only: frozenset[int] | None) -> NDArray[np.bool_]:
    if only is None:
        return np.ones(len(batch), bool)
    return np.isin(batch.file, np.array(sorted(only), np.uint32))


def _spans(file: NDArray[np.uint32], first: Counts, count: Counts) -> Iterable[FileSpan]:
    order = np.argsort(file, kind="stable")
    file, first, count = file[order], first[order], count[order]
    starts = np.flatnonzero(np.concatenate(([True], file[1:] != file[:-1])))
    lowest = np.minimum.reduceat(first, starts)
    highest = np.maximum.reduceat(first + count, starts)
    sums = np.add.reduceat(count, starts)
    for place, start in enumerate(starts):
        yield FileSpan(int(file[start]), int(lowest[place]), int(highest[place]), int(sums[place]))


def _joined(known: FileSpan | None, new: FileSpan) -> FileSpan:
    if known is None:
        return new
    first, end = min(known.first, new.first), max(known.end, new.end)
    return FileSpan(new.file, first, end, known.accesses + new.accesses)


def worth_a_band(spans: Sequence[FileSpan]) -> tuple[FileSpan, ...]:
    """Return the `spans` with a share `WORTH_A_BAND` of all accesses or blocks."""
    accesses = WORTH_A_BAND * sum(span.accesses for span in spans)
    blocks = WORTH_A_BAND * sum(span.end - span.first for span in spans)
    return tuple(span for span in spans if span.accesses >= accesses or span.end - span.first >= blocks)


def bands(spans: Sequence[FileSpan]) -> tuple[Band, ...]:
    """Return a band for each of the `MOST_BANDS` most accessed files, by id from the bottom."""
    kept = sorted(sorted(spans, key=lambda span: (-span.accesses, span.file))[:MOST_BANDS], key=lambda span: span.file)
    shares = np.array([span.end - span.first for span in kept], float)
    shares = np.maximum(shares / shares.sum(), LEAST_SHARE)
    tops = np.cumsum(shares / shares.sum())
    bottoms = np.concatenate(([0.0], tops[:-1]))
    return tuple(
        Band(span.file, span.first, span.end, float(bottom), float(top))
        for span, bottom, top in zip(kept, bottoms, tops, strict=True)
    )


class AccessGrid:
    """Counts the runs that cover each cell, separately for each op. Columns are times, or numbers of accessed blocks."""

    def __init__(self, found: Survey, places: Sequence[Band], by_time: bool, width: int = 420, height: int = 300) -> None:
        self.width, self.height, self.by_time = width, height, by_time
        self._survey = found
        self._accesses = 0
        self._files = np.array([band.file for band in places], np.int64)
        self._first = np.array([band.first for band in places], float)
        self._scale = np.array([(band.top - band.bottom) / (band.end - band.first) for band in places]) * height
        self._bottom = np.array([band.bottom for band in places]) * height
        self._top = np.array([band.top for band in places]) * height
        # One row more than cells: the mark that ends a run is above its last cell.
        self._marks = np.zeros((len(OPS), height + 1, width), np.int64)

    def add(self, batch: Trace, only: frozenset[int] | None = None) -> None:
        """Count `batch`; batches must come in the order of `survey`."""
        keep = chosen(batch, only)
        columns = self._columns(batch.t_ns[keep], batch.count[keep])
        file = batch.file[keep].astype(np.int64)
        place = np.searchsorted(self._files, file)
        place = np.minimum(place, len(self._files) - 1)
        shown = self._files[place] == file
        columns = columns[shown]
        first, count = batch.first[keep][shown].astype(float), batch.count[keep][shown].astype(float)
        low, high = self._heights(place[shown], first, count)
        for op in range(len(OPS)):
            does = batch.op[keep][shown] == op
            self._marks[op] += self._sum(low[does], columns[does]) - self._sum(high[does] + 1, columns[does])

    def _columns(self, t_ns: NDArray[np.uint64], count: NDArray[np.uint32]) -> Counts:
        found = self._survey
        if self.by_time:
            passed = (t_ns - np.uint64(found.t0_ns)).astype(float) / (found.t1_ns - found.t0_ns)
        else:
            before = np.cumsum(count, dtype=np.int64) - count + self._accesses
            passed = before / found.accesses
            self._accesses += int(count.sum(dtype=np.int64))
        columns: Counts = np.minimum(passed * self.width, self.width - 1).astype(np.int64)
        return columns

    def _heights(self, place: Counts, first: NDArray[np.float64], count: NDArray[np.float64]) -> tuple[Counts, Counts]:
        base, scale = self._bottom[place], self._scale[place]
        last = np.ceil(self._top[place]).astype(np.int64) - 1
        low = np.floor(base + (first - self._first[place]) * scale + EDGE).astype(np.int64)
        high = np.ceil(base + (first + count - self._first[place]) * scale - EDGE).astype(np.int64) - 1
        low = np.minimum(low, last)
        return low, np.minimum(np.maximum(high, low), last)

    def _sum(self, rows: Counts, columns: Counts) -> Counts:
        flat: Counts = np.bincount(rows * self.width + columns, minlength=(self.height + 1) * self.width)
        return flat.reshape(self.height + 1, self.width)

    def counts(self) -> Counts:
        """Return runs per cell (int64, ops x height x width), row 0 at the bottom."""
        return np.cumsum(self._marks, axis=1)[:, : self.height, :]


# The figure

FAINTEST = 0.5  # opacity of a cell with one run; the fullest has 1
LEAST_LABEL_GAP = 0.032  # of the height, between names at the right edge
MOST_LETTERS = 30  # of a file's name
CLASS_NAMES = {"SEQ": "sequential", "LOOP": "loop", "HOT": "hot"}
OP_NAMES = {"read": "read", "write": "write", "map": "page fault (map)"}
CLASSES = tuple(CLASS_NAMES)
"""If classes overlap (one of the reads, one of the writes), the later one in this order is shown."""
TINT = 0.2  # opacity of a class behind the accesses
STRIP = (1.004, 0.016)  # begin and width of the strip of classes at the right edge, in widths of the figure


@dataclass(frozen=True)
class Shade:
    """Blocks `first` .. `end` - 1 of a file belong to a class."""

    file: int
    first: int
    end: int
    kind: str


@dataclass(frozen=True)
class Landmark:
    """A name for blocks `first` .. `end` - 1 of a file."""

    file: int
    first: int
    end: int
    name: str


@dataclass(frozen=True)
class AccessPicture:
    """All data of a figure."""

    title: str
    survey: Survey
    bands: Sequence[Band]
    grid: AccessGrid
    names: dict[int, str]
    shades: Sequence[Shade] = ()
    landmarks: Sequence[Landmark] = ()


def access_figure(picture: AccessPicture, width: float = 10.5, height: float = 5.6) -> Figure:
    """Draw the figure. Call it in `theme.style()`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    by_time = picture.grid.by_time
    right = (picture.survey.t1_ns - picture.survey.t0_ns) / 1e9 if by_time else float(picture.survey.accesses)
    if picture.shades:
        _shade(axes, right, class_rows(picture.bands, picture.shades, picture.grid.height))
    image = pixels(picture.grid.counts())
    axes.imshow(image, extent=(0, right, 0, 1), origin="lower", aspect="auto", interpolation="nearest", zorder=3)
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1)
    axes.set(title=picture.title, xlabel="time (s)" if by_time else "accesses (4 KiB blocks)")
    if not by_time:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylabel("block number in the file (4 KiB blocks)")
    _block_ticks(axes, picture.bands)
    _right_edge(axes, picture)
    _legend(axes, picture)
    return figure


def pixels(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `counts` (ops x height x width) as colors (height x width x 4, 0..1).

    A cell has the color of its most frequent op; more runs make it more opaque.
    """
    total = counts.sum(axis=0)
    colours = np.array([to_rgb(OP_COLOURS[op]) for op in OPS])
    image = np.zeros((*total.shape, 4))
    image[..., :3] = colours[counts.argmax(axis=0)]
    fullest = np.log1p(max(int(total.max()), 2))
    strength = FAINTEST + (1 - FAINTEST) * np.log1p(total) / fullest
    image[..., 3] = np.where(total > 0, strength, 0)
    return image


def class_rows(bands: Sequence[Band], shades: Sequence[Shade], height: int) -> NDArray[np.int64]:
    """Return the class of each row of cells, from the bottom (index in `CLASSES`, -1: none)."""
    rows = np.full(height, -1, np.int64)
    placed = {band.file: band for band in bands}
    for shade in shades:
        band = placed.get(shade.file)
        if band is None or shade.end <= band.first or shade.first >= band.end:
            continue
        top = int(np.ceil(band.top * height))
        low = min(int(band.height(max(shade.first, band.first)) * height), top - 1)
        high = min(int(np.ceil(band.height(min(shade.end, band.end)) * height - 1e-6)), top)
        covered = slice(low, max(high, low + 1))
        rows[covered] = np.maximum(rows[covered], CLASSES.index(shade.kind))
    return rows


def _shade(axes: Axes, right: float, rows: NDArray[np.int64]) -> None:
    """Tint the rows by class, and draw a strip of classes whose widths differ too."""
    colours = np.array([(*to_rgb(CLASS_COLOURS[kind]), 1.0) for kind in CLASSES] + [(0.0, 0.0, 0.0, 0.0)])
    tints = colours[rows][:, np.newaxis]
    strip = np.repeat(tints, len(CLASSES), axis=1)
    strip[np.arange(len(CLASSES)) > rows[:, np.newaxis]] = 0
    tints = tints * (1, 1, 1, TINT)
    axes.imshow(tints, extent=(0, right, 0, 1), origin="lower", aspect="auto", interpolation="nearest", zorder=1)
    begin, width = STRIP
    edge = (right * begin, right * (begin + width), 0, 1)
    image = axes.imshow(strip, extent=edge, origin="lower", aspect="auto", interpolation="nearest", zorder=2)
    image.set_clip_on(False)


def _block_ticks(axes: Axes, bands: Sequence[Band]) -> None:
    places: list[float] = []
    labels: list[str] = []
    for band in bands:
        for block in _round_blocks(band):
            at = band.height(block)
            if not places or at - places[-1] >= LEAST_LABEL_GAP:
                places.append(at)
                labels.append(f"{block:,}")
        if band.bottom > 0:
            axes.axhline(band.bottom, color=INK, linewidth=0.8, zorder=4)
    axes.set_yticks(places, labels)
    axes.grid(axis="y", visible=False)


def _round_blocks(band: Band) -> list[int]:
    room = max(1, int((band.top - band.bottom) / 0.11))
    rough = max(1.0, (band.end - band.first) / room)
    power = 10 ** int(np.floor(np.log10(rough)))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    above = range((band.first // step + 1) * step, band.end, step)
    return [band.first, *above] if room > 1 else [band.first]


def _right_edge(axes: Axes, picture: AccessPicture) -> None:
    """Label files, or the landmarks in them; overlapping labels are left out."""
    known = {mark.file for mark in picture.landmarks}
    of_files: list[tuple[float, str]] = []
    taken: list[tuple[float, str]] = []
    for band in picture.bands:
        if band.file in known:
            _name_inside(axes, band, picture.names[band.file])
        else:
            of_files.append(((band.bottom + band.top) / 2, picture.names[band.file]))
    for at, name in of_files + _by_room(picture):
        if all(abs(at - other) >= LEAST_LABEL_GAP for other, _ in taken):
            taken.append((at, name))
    taken.sort()
    names = axes.secondary_yaxis("right")
    names.set_yticks([at for at, _ in taken], [shortened(name, MOST_LETTERS) for _, name in taken])
    names.tick_params(length=0, pad=14, labelcolor=INK, labelsize=8)
    names.spines["right"].set_color(FAINT)


def _by_room(picture: AccessPicture) -> list[tuple[float, str]]:
    found: list[tuple[bool, float, str]] = []
    for band in picture.bands:
        for mark in picture.landmarks:
            first, end = max(mark.first, band.first), min(mark.end, band.end)
            if mark.file == band.file and first < end:
                low, high = band.height(first), band.height(end)
                found.append((high - low < LEAST_LABEL_GAP, (low + high) / 2, mark.name))
    return [(at, name) for _, at, name in sorted(found)]


def _name_inside(axes: Axes, band: Band, name: str) -> None:
    axes.annotate(
        name,
        (0, band.top),
        xytext=(5, -4),
        textcoords="offset points",
        va="top",
        fontsize=7.5,
        bbox={"boxstyle": "round,pad=0.2", "facecolor": PAPER, "alpha": 0.85, "linewidth": 0},
        zorder=5,
    )


def _legend(axes: Axes, picture: AccessPicture) -> None:
    present = picture.grid.counts().sum(axis=(1, 2)) > 0
    handles = [
        Patch(color=OP_COLOURS[op], label=OP_NAMES[op]) for op, is_present in zip(OPS, present, strict=True) if is_present
    ]
    kinds = {shade.kind for shade in picture.shades}
    handles += [
        Patch(color=colour, alpha=0.55, label=f"{CLASS_NAMES[kind]} ({kind})")
        for kind, colour in CLASS_COLOURS.items()
        if kind in kinds
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(handles))


STRIP_TEXT = "tinted; the strip at the right edge is narrow for SEQ, medium for LOOP and wide for HOT"


def chosen_files(files: Sequence[TraceFile], pattern: str | None) -> frozenset[int] | None:
    """Return the files that match the glob `pattern` (None: all); UsageError if none does."""
    if pattern is None:
        return None
    found = frozenset(
        file.id for file in files if fnmatchcase(file.path, pattern) or fnmatchcase(file.path.rsplit("/", 1)[-1], pattern)
    )
    if not found:
        known = ", ".join(file.path for file in files[:5]) + (", …" if len(files) > 5 else "")
        raise UsageError(f"--files: no file of the trace matches '{pattern}'", f"files in the trace: {known}")
    return found


def picture_of(
    source: Trace | TraceReader,
    title: str,
    only: frozenset[int] | None = None,
    by_time: bool = True,
    shades: Sequence[Shade] = (),
    landmarks: Sequence[Landmark] = (),
) -> AccessPicture:
    """Return the figure data of `source`, reading it twice. DataError without rows of the files `only`.

    If `only` is None, files that are not `worth_a_band` are left out. A trace without times is drawn by accesses.
    """
    found = survey(source.batches(BATCH_ROWS), only)
    places = bands(worth_a_band(found.spans) if only is None else found.spans)
    grid = AccessGrid(found, places, by_time and _timed(found, source))
    for batch in source.batches(BATCH_ROWS):
        grid.add(batch, only)
    names = {file.id: printable(file.path) for file in source.files}
    shown = {band.file for band in places}
    shades = [shade for shade in shades if shade.file in shown]
    return AccessPicture(printable(title), found, places, grid, names, shades, landmarks)


def _timed(found: Survey, source: Trace | TraceReader) -> bool:
    """Return whether rows have times; importers give rows without a time the clock "none: …"."""
    return found.t1_ns > found.t0_ns and not source.provenance.clock.startswith("none")


def conditions(picture: AccessPicture, source: Trace | TraceReader) -> list[tuple[str, str]]:
    found, provenance = picture.survey, source.provenance
    facts = [
        ("source", provenance.tier),
        ("rows", f"{found.rows:,}"),
        ("accesses", f"{found.accesses:,} blocks of 4 KiB ({format_size(found.accesses * BLOCK_BYTES)})"),
        ("files", f"{len(found.spans):,}"),
        ("duration", format_duration(found.t1_ns - found.t0_ns) if _timed(found, source) else "the trace has no times"),
        ("clock", provenance.clock),
        ("kernel", provenance.kernel),
        ("lost events", f"{provenance.lost_events:,}" if provenance.lost_events else ""),
        ("command", provenance.command),
        ("note", provenance.note),
        ("one cell", f"{_cell(picture)}, in the color of its most frequent operation"),
        ("classes", STRIP_TEXT if picture.shades else ""),
        ("not shown", _left_out(picture)),
    ]
    return [(name, printable(value)) for name, value in facts if value]


def caption(picture: AccessPicture, source: Trace | TraceReader) -> str:
    """Return the most important of `conditions`."""
    facts = dict(conditions(picture, source))
    text = f"Source: {facts['source']}. {facts['accesses']}"
    text += f" in {facts['duration']}" if picture.grid.by_time else ""
    text += f"; {facts['lost events']} events lost" if "lost events" in facts else ""
    text += f". One cell: {printable(_cell(picture))}."
    return text + (f" Not shown: {facts['not shown']}." if "not shown" in facts else "")


def alt_text(picture: AccessPicture) -> str:
    parts = []
    for band in picture.bands:
        span = next(span for span in picture.survey.spans if span.file == band.file)
        kinds = sorted({shade.kind for shade in picture.shades if shade.file == band.file})
        classes = f", {'/'.join(kinds)}" if kinds else ""
        blocks = f"blocks {span.first:,} to {span.end - 1:,}, {span.accesses:,} accesses"
        parts.append(f"{picture.names[band.file]}: {blocks}{classes}")
    return f"{picture.title}: block number over {'time' if picture.grid.by_time else 'accesses'}. " + "; ".join(parts) + "."


def _cell(picture: AccessPicture) -> str:
    found, grid = picture.survey, picture.grid
    if grid.by_time:
        across = format_duration((found.t1_ns - found.t0_ns) / grid.width)
    else:
        across = f"{max(1, found.accesses // grid.width):,} accesses"
    tallest = max(picture.bands, key=lambda band: band.end - band.first)
    blocks = (tallest.end - tallest.first) / max(1.0, (tallest.top - tallest.bottom) * grid.height)
    name = picture.names[tallest.file].rsplit("/", 1)[-1] or picture.names[tallest.file]
    return f"{across} by {max(1, round(blocks)):,} blocks of {name}"


def _left_out(picture: AccessPicture) -> str:
    shown = {band.file for band in picture.bands}
    rest = [span for span in picture.survey.spans if span.file not in shown]
    if not rest:
        return ""
    share = sum(span.accesses for span in rest) / picture.survey.accesses
    files = f"{len(rest)} more files with {share:.1%} of the accesses"
    if len(shown) == MOST_BANDS:
        return f"{files} (choose files with --files GLOB)"
    return f"{files}, each below {WORTH_A_BAND:.0%} of accesses and blocks (--files '*' shows {MOST_BANDS} files)"


MOST_ROWS = 100
COLUMNS = ["class", "op", "file", "size (MB)", "blocks", "ranges", "times", "period (s)", "share (%)"]


def shades_of(rows: Sequence[Classification]) -> list[Shade]:
    return [Shade(row.file, first, last + 1, row.kind) for row in rows for first, last in row.pieces]


def landmarks_of(files: Sequence[TraceFile], names: Models) -> list[Landmark]:
    marks: list[Landmark] = []
    for file in files:
        for layer, group in groupby(names(file), key=lambda tensor: tensor.layer):
            tensors = list(group)
            end = tensors[-1].offset + tensors[-1].size_bytes
            marks.append(Landmark(file.id, tensors[0].offset // BLOCK_BYTES, -(-end // BLOCK_BYTES), layer))
    return marks


def classes_table(rows: Sequence[Classification], files: Container[int]) -> Table:
    shown = [row for row in rows if row.file in files][:MOST_ROWS]
    rest = [row for row in rows if row not in shown]
    names = [names_line(row) for row in shown]
    caption = "Classes, largest share of all accesses first (see llmcache classify)"
    if rest:
        caption += f"; {len(rest):,} more rows with {sum(row.share for row in rest):.1%} of the accesses are not shown"
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


LEAD = "Block accesses over time, counted from the recorded trace."


def plot(
    trace: str,
    output: str,
    names: Callable[[Sequence[TraceFile]], Models],
    progress: Progress,
    *,
    files: str | None = None,
    classes: bool = True,
    force: bool = False,
) -> Written:
    """Draw the trace in the file `trace` as `output`; `files`: a glob of the files to draw.

    UsageError for an unsupported extension, or an existing output; DataError for the trace.
    """
    form = form_of("-o", output, force)
    with open_trace(trace) as reader:
        data = _drawn(trace, form, reader, files, names(reader.files), progress if classes else None)
    return write_target("-o", output, data, force)


def _drawn(
    trace: str, form: str, reader: TraceReader, pattern: str | None, names: Models, progress: Progress | None
) -> bytes:
    only = chosen_files(reader.files, pattern)
    files = [file for file in reader.files if only is None or file.id in only]
    found: Sequence[Classification] = ()
    mixtures: Sequence[MoeUses] = ()
    if progress is not None:
        classes = classify(_with_progress(reader, trace, progress), names)
        found = [row for row in classes.rows if only is None or row.file in only]
        mixtures = [each for each in classes.moe_models if only is None or only & {*each.files}]
    title = f"{Path(trace).name} ({reader.provenance.tier})"
    picture = picture_of(reader, title, only, shades=shades_of(found), landmarks=landmarks_of(files, names))
    with style():
        figure = access_figure(picture)
    if form == "html":
        drawn = embedded(figure, alt_text(picture), caption(picture, reader))
        return _page(picture, reader, drawn, found, mixtures).encode()
    return captioned(figure, caption(picture, reader), form)


def _with_progress(reader: TraceReader, trace: str, progress: Progress) -> Iterator[Trace]:
    done = 0
    for batch in reader.batches():
        yield batch
        done += len(batch)
        progress(trace, done, reader.rows)


def _page(
    picture: AccessPicture,
    reader: TraceReader,
    drawn: HtmlBlock,
    found: Sequence[Classification],
    mixtures: Sequence[MoeUses],
) -> str:
    sections = [Section("Accesses", [drawn, Fold("Conditions", [Facts(conditions(picture, reader))])])]
    if found:
        sections.append(Section("Classes", [classes_table(found, {band.file for band in picture.bands})]))
    if mixtures:
        sections.append(Section("Experts", [block for mixture in mixtures for block in expert_blocks(mixture)]))
    return html_page(picture.title, LEAD, sections)
