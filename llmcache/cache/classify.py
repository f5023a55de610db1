"""Classes of a whole trace: what of which file was read once, in a loop, or again and again; in one pass over it.

    found = classify_file(path, lambda files: ModelHeaders((), files))
    found.rows, found.totals, found.size_command

Source: io_caching, section 3.3 and figure 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.assembling import Found, classes_of
from llmcache.cache.classes import READ_OP, WRITE_OP, Classification, LockedLoop, TraceClasses
from llmcache.cache.detector import LOOP, SEQ, Detector, Trail
from llmcache.cache.layers import Layers
from llmcache.cache.models import UNKNOWN, Models, Named
from llmcache.cache.routing import Mixtures, Slice
from llmcache.cache.streams import WINDOW
from llmcache.errors import DataError
from llmcache.units import BLOCK_BYTES

if TYPE_CHECKING:
    from llmcache.trace.record import Provenance, Trace, TraceFile

N = TypeVar("N", bound=Named)
_WRITE = 1  # trace.record.WRITE, which brings pyarrow along


@dataclass
class _Seen:
    """What the batches say beside the classes."""

    files: dict[int, TraceFile] = field(default_factory=dict)
    accesses: int = 0
    begin_ns: int | None = None
    end_ns: int = 0
    tier: str = ""
    lost_events: int = 0
    provenance: Provenance | None = None

    def note(self, batch: Trace) -> None:
        self.files.update((file.id, file) for file in batch.files)
        self.tier, self.lost_events = batch.provenance.tier, batch.provenance.lost_events
        self.provenance = batch.provenance
        if len(batch):
            self.accesses += batch.accesses
            self.begin_ns = int(batch.t_ns[0]) if self.begin_ns is None else self.begin_ns
            self.end_ns = int(batch.t_ns[-1])


def classify(batches: Iterable[Trace], models: Models = UNKNOWN) -> TraceClasses:
    """Returns the classes of everything that `batches` access, in the order of time; DataError for an empty trace."""
    seen = _Seen()
    everything: dict[tuple[int, bool, str], Found] = {}

    def forget(file: Hashable, write: bool, trail: Trail) -> None:
        loops = 0
        for found in classes_of(trail, detector.now):
            loops += found.kind == LOOP
            key = (cast(int, file), write, f"{found.kind} {loops if found.kind == LOOP else 0}")
            everything[key] = _folded(everything[key], found) if key in everything else found

    detector = Detector(forget)
    layers, mixtures = Layers(models), Mixtures(models)
    for batch in batches:
        seen.note(batch)
        mixtures.note(batch)
        layers.note(batch)
        for run in runs(batch):
            detector.note_many(*run)
    if seen.begin_ns is None or seen.provenance is None:
        raise DataError("rows: the trace has none", "record it again, or look at it with: llmcache info FILE")
    detector.finish()
    for key, write, trail in detector.trails():
        forget(key, write, trail)
    by_file: dict[tuple[int, bool], list[Found]] = {}
    for (file, write, _), found in everything.items():
        by_file.setdefault((file, write), []).append(found)
    rows: list[Classification] = []
    for (file, write), classes in by_file.items():
        named, slices = models(seen.files[file]), mixtures.slices(file)
        for found in _fitting(classes, seen.files[file]):
            rows.append(_row(seen.files[file], write, found, seen.accesses, named, slices))
    rows.sort(key=lambda row: (-row.accesses, row.path, row.op, row.kind, row.pieces))
    return TraceClasses(
        rows=tuple(rows),
        accesses=seen.accesses,
        begin_ns=seen.begin_ns,
        end_ns=seen.end_ns,
        tier=seen.tier,
        lost_events=seen.lost_events,
        layers=layers.found(),
        locked=tuple(_locked(rows, seen)),
        mixtures=mixtures.found(seen.provenance),
    )


def classify_file(path: str, models: Callable[[Sequence[TraceFile]], Models]) -> TraceClasses:
    """Returns the classes of the trace at `path`, in any format; `models` looks at those of a file table."""
    from llmcache.trace.formats import open_trace

    with open_trace(path) as reader:
        return classify(reader.batches(), models(reader.files))


def _locked(rows: Sequence[Classification], seen: _Seen) -> Iterator[LockedLoop]:
    """What a mount kept locked of files that are read in loops; where read() or another process showed it, less of it."""
    from llmcache.trace.record.meta import locked_bytes

    by_file = {} if seen.provenance is None else locked_bytes(seen.provenance)
    for number, size_bytes in sorted(by_file.items()):
        shown = sum(row.size_bytes for row in rows if (row.file, row.kind, row.op) == (number, LOOP, READ_OP))
        hidden = min(size_bytes, seen.files[number].size_bytes - shown) if number in seen.files else 0
        if shown and hidden > 0:
            yield LockedLoop(seen.files[number].path, hidden)


def runs(batch: Trace) -> Iterator[tuple[int, int, int, int, int, int, bool]]:
    """Yields (first time, last time, file, first block, blocks, accesses, whether written) of each run of `batch`.

    Rows that go on where the one before ended, or repeat it, are one run: what 1 KiB requests make of a scan.
    """
    if not len(batch):
        return
    first, end = batch.first.astype(np.int64), batch.end.astype(np.int64)
    write = batch.op == _WRITE
    same = (batch.file[1:] == batch.file[:-1]) & (write[1:] == write[:-1])
    # A long run that comes again as it was is a pass of its own.
    repeats = (first[1:] == first[:-1]) & (end[1:] == end[:-1]) & (batch.count[1:] < WINDOW)
    starts = np.concatenate(([0], np.flatnonzero(~(same & (repeats | (first[1:] == end[:-1])))) + 1))
    lasts = np.concatenate((starts[1:], [len(batch)])) - 1
    accesses: NDArray[np.int64] = np.add.reduceat(batch.count.astype(np.int64), starts)
    columns = (
        batch.t_ns[starts],
        batch.t_ns[lasts],
        batch.file[starts],
        first[starts],
        end[lasts] - first[starts],
        accesses,
        write[starts],
    )
    yield from zip(*(column.tolist() for column in columns), strict=True)


def _folded(before: Found, found: Found) -> Found:
    """A file that was forgotten, as there were too many, and came again."""
    return replace(
        found,
        accesses=before.accesses + found.accesses,
        blocks=max(before.blocks, found.blocks),
        passes=before.passes + found.passes,
        since=before.since,
    )


def _fitting(classes: list[Found], file: TraceFile) -> list[Found]:
    """What was forgotten counts anew each time it comes; a file has no more blocks than it has."""
    rest = [found for found in classes if found.kind != SEQ]
    left = -(-file.size_bytes // BLOCK_BYTES) - sum(found.blocks for found in rest)
    if not file.size_bytes or not rest:
        return classes
    once = [replace(found, blocks=min(found.blocks, max(0, left))) for found in classes if found.kind == SEQ]
    if left <= 0:
        rest[0] = replace(rest[0], accesses=rest[0].accesses + sum(found.accesses for found in once))
        return rest
    return rest + once


def _row(
    file: TraceFile, write: bool, found: Found, in_all: int, named: Sequence[Named], slices: Sequence[Slice] | None
) -> Classification:
    pieces = _pieces(found)
    period = found.period
    return Classification(
        file=file.id,
        path=file.path,
        op=WRITE_OP if write else READ_OP,
        kind=found.kind,
        pieces=pieces,
        size_bytes=_clipped(found.blocks * BLOCK_BYTES, file),
        accesses=found.accesses,
        share=found.accesses / in_all,
        passes=found.passes,
        since_ns=found.since.ns,
        last_ns=found.last.ns,
        period_ns=None if period is None else period.ns,
        period_blocks=None if period is None else period.blocks,
        regularity=found.regularity,
        active=found.active if found.kind == LOOP else None,
        order=found.order,
        stride_blocks=found.stride,
        tensors=tuple(tensor.name for tensor in _inside(named, pieces)),
        experts=None if slices is None else _experts(slices, pieces),
    )


def _experts(slices: Sequence[Slice], pieces: Sequence[tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of the experts, by layer, of which a slice is in `pieces`."""
    numbers: dict[str, set[int]] = {}
    for slice_ in _inside(slices, pieces):
        numbers.setdefault(slice_.layer, set()).add(slice_.number)
    return {layer: tuple(sorted(found)) for layer, found in numbers.items()}


def _pieces(found: Found) -> tuple[tuple[int, int], ...]:
    """First and last block of each place; those that follow each other without a gap are one."""
    pieces: list[tuple[int, int]] = []
    for place in found.places:
        if pieces and not found.stride and pieces[-1][1] + 1 == place.first:
            pieces[-1] = pieces[-1][0], place.end - 1
        else:
            pieces.append((place.first, place.end - 1))
    return tuple(pieces)


def _clipped(size_bytes: int, file: TraceFile) -> int:
    """The last block of a file is rarely full."""
    return min(size_bytes, file.size_bytes) if file.size_bytes else size_bytes


def _inside(named: Sequence[N], pieces: Sequence[tuple[int, int]]) -> list[N]:
    """Returns what lies in `pieces` for the most part, or has most of a piece in it; in order of bytes."""
    spans = sorted((first * BLOCK_BYTES, (last + 1) * BLOCK_BYTES) for first, last in pieces)
    found: list[N] = []
    at = 0
    for tensor in named:
        end = tensor.offset + tensor.size_bytes
        while at < len(spans) and spans[at][1] <= tensor.offset:
            at += 1
        inside, whole = 0, False
        for low, high in spans[at:]:
            if low >= end:
                break
            common = min(high, end) - max(low, tensor.offset)
            inside += common
            whole = whole or 2 * common >= high - low
        if whole or 2 * inside >= tensor.size_bytes > 0:
            found.append(tensor)
    return found
