"""Counts accesses in the cells of a picture: time or accesses across, blocks upwards, one band per file.

Two passes over a trace of any length, in the memory of the picture: `survey` finds what there is, `AccessGrid` counts.
A run is counted in every cell it covers, by marks at its two ends that are summed up when the picture is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import DataError

if TYPE_CHECKING:
    from llmcache.trace.record import Trace

OPS = ("read", "write", "map")
"""Names of the op codes 0, 1, 2 of a trace."""
MOST_BANDS = 16
LEAST_SHARE = 0.062  # of the height: a hot file of ten blocks is seen beside a model, and 16 bands have room for names
WORTH_A_BAND = 0.01  # of all accesses, or of all blocks: without --files what has less (libraries, locales) is left out
BATCH_ROWS = 1 << 18
EDGE = 1e-6  # of a cell: what begins or ends on its edge does not reach into its neighbour by rounding

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class FileSpan:
    """What a trace touches of file `file`: blocks `first` .. `end` - 1 and `accesses` blocks in all."""

    file: int
    first: int
    end: int
    accesses: int


@dataclass(frozen=True)
class Survey:
    """What a trace holds: times in ns (first and last row), its rows, and each file touched, by id."""

    t0_ns: int
    t1_ns: int
    rows: int
    spans: tuple[FileSpan, ...]

    @property
    def accesses(self) -> int:
        """Blocks accessed, repeats included."""
        return sum(span.accesses for span in self.spans)

    @property
    def timed(self) -> bool:
        """Whether rows have times."""
        return self.t1_ns > self.t0_ns


@dataclass(frozen=True)
class Band:
    """A file's place in a picture: blocks `first` .. `end` - 1 lie at heights `bottom` .. `top` (0..1 of the picture)."""

    file: int
    first: int
    end: int
    bottom: float
    top: float

    def height(self, block: float) -> float:
        """Returns the height (0..1 of the picture) at which `block` begins."""
        return self.bottom + (block - self.first) / (self.end - self.first) * (self.top - self.bottom)


def survey(batches: Iterable[Trace], only: frozenset[int] | None = None) -> Survey:
    """Returns what `batches` hold of the files `only` (ids; None: all); DataError if that is nothing."""
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
        raise DataError("rows: there are none to draw", "look at the trace with: llmcache info FILE")
    return Survey(t0_ns, t1_ns, rows, tuple(spans[file] for file in sorted(spans)))


def chosen(batch: Trace, only: frozenset[int] | None) -> NDArray[np.bool_]:
    """Returns which rows of `batch` belong to the files `only` (bool, one per row)."""
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
    """Returns those of `spans` that have a share of all accesses, or of all blocks, from `WORTH_A_BAND` on."""
    accesses = WORTH_A_BAND * sum(span.accesses for span in spans)
    blocks = WORTH_A_BAND * sum(span.end - span.first for span in spans)
    return tuple(span for span in spans if span.accesses >= accesses or span.end - span.first >= blocks)


def bands(spans: Sequence[FileSpan], most: int = MOST_BANDS) -> tuple[Band, ...]:
    """Returns a band for each of the `most` files accessed most, by id from the bottom.

    Heights go by blocks, but none is below `LEAST_SHARE` of the picture before they are made to fill it.
    """
    kept = sorted(sorted(spans, key=lambda span: (-span.accesses, span.file))[:most], key=lambda span: span.file)
    shares = np.array([span.end - span.first for span in kept], float)
    shares = np.maximum(shares / shares.sum(), LEAST_SHARE)
    tops = np.cumsum(shares / shares.sum())
    bottoms = np.concatenate(([0.0], tops[:-1]))
    return tuple(
        Band(span.file, span.first, span.end, float(bottom), float(top))
        for span, bottom, top in zip(kept, bottoms, tops, strict=True)
    )


class AccessGrid:
    """Counts the runs that cover each of `height` x `width` cells, apart for each op."""

    def __init__(self, found: Survey, places: Sequence[Band], by_time: bool, width: int = 420, height: int = 300) -> None:
        """Takes what the trace holds and where its files lie (files without a band are left out).

        `by_time`: columns are times; otherwise they are the blocks accessed so far.
        """
        self.width, self.height, self.by_time = width, height, by_time
        self._survey = found
        self._accesses = 0
        self._files = np.array([band.file for band in places], np.int64)
        self._first = np.array([band.first for band in places], float)
        self._scale = np.array([(band.top - band.bottom) / (band.end - band.first) for band in places]) * height
        self._bottom = np.array([band.bottom for band in places]) * height
        self._top = np.array([band.top for band in places]) * height
        # One more row than cells: the mark that ends a run stands above its last cell.
        self._marks = np.zeros((len(OPS), height + 1, width), np.int64)

    def add(self, batch: Trace, only: frozenset[int] | None = None) -> None:
        """Count the rows of `batch`; the batches of `survey`, in the same order."""
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
        """Returns the lowest and highest cell of each run; every run covers one at least, none leaves its band."""
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
        """Returns runs per cell (int64, ops x height x width), row 0 at the bottom."""
        return np.cumsum(self._marks, axis=1)[:, : self.height, :]
