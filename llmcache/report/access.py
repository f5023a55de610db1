"""The picture of a trace: which blocks are accessed when, as in figures 1 and 2 of io_caching.

Reads, writes and page faults of mappings have a colour each, classes shade the blocks they cover, and the right edge
names files, or tensors and layers where they are known. Drawn from counts per cell, however long the trace is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from llmcache.report.grid import OPS, AccessGrid, Band, Survey
from llmcache.report.theme import CLASS_COLOURS, FAINT, INK, OP_COLOURS, PAPER
from llmcache.units import shortened

FAINTEST = 0.5  # opacity of a cell with one run; the fullest has 1
LEAST_LABEL_GAP = 0.032  # of the height, between names at the right edge
MOST_LETTERS = 30  # of a file's name
CLASS_NAMES = {"SEQ": "sequential", "LOOP": "loop", "HOT": "hot"}
KINDS = tuple(CLASS_NAMES)
"""Where classes lie on each other (one of the reads, one of the writes), the later one is shown."""
TINT = 0.2  # opacity of a class behind the accesses
STRIP = (1.004, 0.016)  # where the strip of classes begins at the right, and its width, in widths of the picture


@dataclass(frozen=True)
class Shade:
    """Blocks `first` .. `end` - 1 of a file belong to `kind` (SEQ, LOOP or HOT)."""

    file: int
    first: int
    end: int
    kind: str


@dataclass(frozen=True)
class Landmark:
    """A name for blocks `first` .. `end` - 1 of a file: a layer, or a tensor outside of the layers."""

    file: int
    first: int
    end: int
    name: str


@dataclass(frozen=True)
class AccessPicture:
    """Everything that a picture of accesses shows. `names`: label of each file by id."""

    title: str
    survey: Survey
    bands: Sequence[Band]
    grid: AccessGrid
    names: dict[int, str]
    shades: Sequence[Shade] = ()
    landmarks: Sequence[Landmark] = ()


def access_figure(picture: AccessPicture, width: float = 10.5, height: float = 5.6) -> Figure:
    """Returns the picture as a figure of `width` x `height` inches. Call it in `theme.style()`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.add_subplot(), picture)
    return figure


def draw(axes: Axes, picture: AccessPicture) -> None:
    """Draw `picture` into `axes`, with a legend below."""
    by_time = picture.grid.by_time
    right = (picture.survey.t1_ns - picture.survey.t0_ns) / 1e9 if by_time else float(picture.survey.accesses)
    if picture.shades:
        _shade(axes, right, class_rows(picture.bands, picture.shades, picture.grid.height))
    image = pixels(picture.grid.counts())
    axes.imshow(image, extent=(0, right, 0, 1), origin="lower", aspect="auto", interpolation="nearest", zorder=3)
    axes.set_xlim(0, right)
    axes.set_ylim(0, 1)
    axes.set_title(picture.title)
    axes.set_xlabel("time (s)" if by_time else "accesses so far (4 KiB blocks)")
    if not by_time:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylabel("block number in its file (4 KiB blocks)")
    _block_ticks(axes, picture.bands)
    _right_edge(axes, picture)
    _legend(axes, picture)


def pixels(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns `counts` (ops x height x width) as colours (height x width x 4, 0..1); empty cells are transparent.

    A cell takes the colour of the op it has most of; the more runs, the more opaque.
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
    """Returns the class of each of `height` rows of cells, from the bottom (index in `KINDS`, -1: none).

    Every shade gets a row at least; a class that is later in `KINDS` goes before the others.
    """
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
        rows[covered] = np.maximum(rows[covered], KINDS.index(shade.kind))
    return rows


def _shade(axes: Axes, right: float, rows: NDArray[np.int64]) -> None:
    """Tint the rows by class, and draw a strip of classes at the right edge.

    In the strip a class also has its own width, so that it is read without colours: SEQ is narrow, HOT is wide.
    """
    colours = np.array([(*to_rgb(CLASS_COLOURS[kind]), 1.0) for kind in KINDS] + [(0.0, 0.0, 0.0, 0.0)])
    tints = colours[rows][:, np.newaxis]
    strip = np.repeat(tints, len(KINDS), axis=1)
    strip[np.arange(len(KINDS)) > rows[:, np.newaxis]] = 0
    tints = tints * (1, 1, 1, TINT)
    axes.imshow(tints, extent=(0, right, 0, 1), origin="lower", aspect="auto", interpolation="nearest", zorder=1)
    begin, width = STRIP
    edge = (right * begin, right * (begin + width), 0, 1)
    image = axes.imshow(strip, extent=edge, origin="lower", aspect="auto", interpolation="nearest", zorder=2)
    image.set_clip_on(False)


def _block_ticks(axes: Axes, bands: Sequence[Band]) -> None:
    """Label block numbers: as many per band as fit, and a line between bands."""
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
    """Returns the first block of `band` and round numbers above it."""
    room = max(1, int((band.top - band.bottom) / 0.11))
    rough = max(1.0, (band.end - band.first) / room)
    power = 10 ** int(np.floor(np.log10(rough)))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    above = range((band.first // step + 1) * step, band.end, step)
    return [band.first, *above] if room > 1 else [band.first]


def _right_edge(axes: Axes, picture: AccessPicture) -> None:
    """Name files, or the landmarks in them, at the right; names that would overlap are left out, files go first.

    A file with landmarks has its own name inside, at the top of its band.
    """
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
    """Returns height and name of the landmarks in the picture: those tall enough for a name before the others."""
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
    handles = [Patch(color=OP_COLOURS[op], label=op) for op, there in zip(OPS, present, strict=True) if there]
    kinds = {shade.kind for shade in picture.shades}
    handles += [
        Patch(color=colour, alpha=0.55, label=f"{CLASS_NAMES[kind]} ({kind})")
        for kind, colour in CLASS_COLOURS.items()
        if kind in kinds
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(handles))
