"""Classify a whole trace in one pass: blocks read once, in a loop, or repeatedly without order.

Source: io_caching, section 3.3 and figure 1.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from llmcache.arrays import Int64s
from llmcache.cache.detector import HOT, LOOP, PLACES, SEQ, Class, Detector, Place, Trail, common
from llmcache.cache.layers import Layer, Layers, json_of
from llmcache.cache.loops import Period, is_about
from llmcache.cache.routing import ExpertCounter, MoeUses, Slice
from llmcache.cache.streams import WINDOW, Moment
from llmcache.errors import DataError
from llmcache.model.modelfile import UNKNOWN, Models
from llmcache.model.tensors import Tensor
from llmcache.trace.formats import open_trace
from llmcache.trace.record import WRITE, Provenance, Trace, TraceFile, locked_bytes
from llmcache.units import BLOCK_BYTES

SCHEMA = "llmcache.classify/1"
READ_OP, WRITE_OP = "read", "write"


@dataclass(frozen=True)
class Classification:
    """One class of one file, of its reads (mapped ones included) or its writes.

    `pieces`: (first block, last block), for a LOOP in the order of a pass. `size_bytes` leaves out holes and HOT blocks in
    them. `passes`: of a HOT block, its mean accesses. `regularity`: share (0..1) of a LOOP's intervals that were about as
    long as its period. `stride_blocks`: 0 without holes. `experts`: numbers by layer.
    """

    file: int
    path: str
    op: str
    kind: Class
    pieces: tuple[tuple[int, int], ...]
    size_bytes: int
    accesses: int
    share: float
    passes: int
    since_ns: int
    last_ns: int
    period_ns: int | None = None
    period_blocks: int | None = None
    regularity: float | None = None
    active: bool | None = None
    order: str | None = None
    stride_blocks: int = 0
    tensors: tuple[str, ...] = ()
    experts: Mapping[str, tuple[int, ...]] | None = None

    @property
    def first_block(self) -> int | None:
        return min((first for first, _ in self.pieces), default=None)

    @property
    def last_block(self) -> int | None:
        return max((last for _, last in self.pieces), default=None)

    def row(self) -> dict[str, Any]:
        without = () if self.experts is not None else ("experts",)
        return json_of(self, "period_ns", "since_ns", "last_ns", *without, kind="class", size_bytes="bytes") | {
            "first_block": self.first_block,
            "last_block": self.last_block,
            "period_s": None if self.period_ns is None else self.period_ns / 1e9,
            "since_s": self.since_ns / 1e9,
            "last_s": self.last_ns / 1e9,
        }


@dataclass(frozen=True)
class ClassTotals:
    """Bytes and shares (0..1) of all accesses by class. Source: io_caching section 3.3.

    `loop_at_once_bytes`: the largest total of read loops in use at the same time; with `locked_loop_bytes`, which a mount
    locked in memory without faults, this is N of formula (1).
    """

    loop_bytes: int
    loop_at_once_bytes: int
    locked_loop_bytes: int
    hot_bytes: int
    once_bytes: int
    write_loop_bytes: int
    write_once_bytes: int
    loop_share: float
    hot_share: float
    once_share: float


@dataclass(frozen=True)
class LockedLoop:
    """The part of a file's loop that its mount locked in memory: read without faults, so not in the rows."""

    path: str
    size_bytes: int


@dataclass(frozen=True)
class TraceClasses:
    """The classes of one trace, largest share first. `duration_ns`: from first to last row."""

    rows: tuple[Classification, ...]
    accesses: int
    duration_ns: int
    tier: str
    lost_events: int
    layers: tuple[Layer, ...]
    locked: tuple[LockedLoop, ...]
    moe_models: tuple[MoeUses, ...]

    @property
    def totals(self) -> ClassTotals:
        return ClassTotals(
            loop_bytes=_bytes(self.rows, LOOP, READ_OP),
            loop_at_once_bytes=_at_once(row for row in self.rows if (row.kind, row.op) == (LOOP, READ_OP)),
            locked_loop_bytes=sum(each.size_bytes for each in self.locked),
            hot_bytes=sum(row.size_bytes for row in self.rows if row.kind == HOT),
            once_bytes=_bytes(self.rows, SEQ, READ_OP),
            write_loop_bytes=_bytes(self.rows, LOOP, WRITE_OP),
            write_once_bytes=_bytes(self.rows, SEQ, WRITE_OP),
            loop_share=_share(self.rows, LOOP),
            hot_share=_share(self.rows, HOT),
            once_share=_share(self.rows, SEQ),
        )

    @property
    def size_command(self) -> str | None:
        totals = self.totals
        if not totals.loop_at_once_bytes:
            return None
        loop_bytes = totals.loop_at_once_bytes + totals.locked_loop_bytes
        return f"llmcache size --loop {loop_bytes / 1e6:.10g}M --hot {totals.hot_bytes / 1e6:.10g}M"

    def document(self, trace: str, min_bytes: int = 0) -> dict[str, Any]:
        """Return the JSON document; rows below `min_bytes` are summed up in `smaller`, and count in the totals."""
        smaller = [row for row in self.rows if row.size_bytes < min_bytes]
        return {
            "schema": SCHEMA,
            "trace": trace,
            "tier": self.tier,
            "lost_events": self.lost_events,
            "accesses": self.accesses,
            "duration_s": self.duration_ns / 1e9,
            "block_bytes": BLOCK_BYTES,
            "totals": dict(vars(self.totals)),
            "size_command": self.size_command,
            "rows": [row.row() for row in self.rows if row.size_bytes >= min_bytes],
            "smaller": {
                "rows": len(smaller),
                "bytes": sum(row.size_bytes for row in smaller),
                "share": sum(row.share for row in smaller),
            },
            "layers": [layer.row() for layer in self.layers],
            "locked": [json_of(each, size_bytes="bytes") for each in self.locked],
            **({"mixtures": [each.document() for each in self.moe_models]} if self.moe_models else {}),
        }


def _bytes(rows: Sequence[Classification], kind: Class, op: str) -> int:
    return sum(row.size_bytes for row in rows if row.kind == kind and row.op == op)


def _share(rows: Sequence[Classification], kind: Class) -> float:
    return sum(row.share for row in rows if row.kind == kind)


def _at_once(loops: Iterable[Classification]) -> int:
    events = [event for row in loops for event in ((row.since_ns, -row.size_bytes), (row.last_ns, row.size_bytes))]
    most = level = 0
    # a loop that begins sorts before one that ends then: a trace may have one time for all rows
    for _, change in sorted(events):
        level -= change
        most = max(most, level)
    return most


N = TypeVar("N", Tensor, Slice)


def classify(batches: Iterable[Trace], models: Models = UNKNOWN) -> TraceClasses:
    """Return the classes of all accesses of `batches`, in order of time; DataError for an empty trace."""
    detector = Detector()
    layers, experts = Layers(models), ExpertCounter(models)
    files: dict[int, TraceFile] = {}
    accesses, begin_ns, last = 0, -1, None
    for batch in batches:
        files.update((file.id, file) for file in batch.files)
        if len(batch):
            accesses, last = accesses + batch.accesses, batch
            begin_ns = int(batch.t_ns[0]) if begin_ns < 0 else begin_ns
        experts.count(batch)
        layers.count(batch)
        for run in runs(batch):
            detector.record_run(*run)
    if last is None:
        raise DataError("rows: the trace has no accesses", "record it again, or inspect it with: llmcache info FILE")
    detector.finish()
    rows: list[Classification] = []
    for (number, write), trail in detector.trails.items():
        file = files[number]
        named, slices = models(file), experts.slices(file.id)
        classes = _fitting(classes_of(trail, detector.now), file)
        rows += [_row(file, write, each, accesses, named, slices) for each in classes]
    rows.sort(key=lambda row: (-row.accesses, row.path, row.op, row.kind, row.pieces))
    return TraceClasses(
        rows=tuple(rows),
        accesses=accesses,
        duration_ns=int(last.t_ns[-1]) - begin_ns,
        tier=last.provenance.tier,
        lost_events=last.provenance.lost_events,
        layers=layers.found(),
        locked=tuple(_locked(rows, files, last.provenance)),
        moe_models=experts.found(last.provenance),
    )


def classify_file(path: str, models: Callable[[Sequence[TraceFile]], Models]) -> TraceClasses:
    """Return the classes of the trace at `path`; `models` maps its file table to models."""
    with open_trace(path) as reader:
        return classify(reader.batches(), models(reader.files))


def _locked(rows: Sequence[Classification], files: dict[int, TraceFile], provenance: Provenance) -> Iterator[LockedLoop]:
    for number, size_bytes in sorted(locked_bytes(provenance).items()):
        visible = sum(row.size_bytes for row in rows if (row.file, row.kind, row.op) == (number, LOOP, READ_OP))
        hidden = min(size_bytes, files[number].size_bytes - visible) if number in files else 0
        if visible and hidden > 0:
            yield LockedLoop(files[number].path, hidden)


def runs(batch: Trace) -> Iterator[tuple[int, int, int, int, int, int, bool]]:
    """Yield (first time, last time, file, first block, blocks, accesses, is write) for each run of `batch`.

    A row that continues or repeats the row before belongs to the same run.
    """
    if not len(batch):
        return
    first, end = batch.first.astype(np.int64), batch.end.astype(np.int64)
    write = batch.op == WRITE
    same = (batch.file[1:] == batch.file[:-1]) & (write[1:] == write[:-1])
    # A long run that repeats exactly is a pass of its own.
    repeats = (first[1:] == first[:-1]) & (end[1:] == end[:-1]) & (batch.count[1:] < WINDOW)
    starts = np.concatenate(([0], np.flatnonzero(~(same & (repeats | (first[1:] == end[:-1])))) + 1))
    lasts = np.concatenate((starts[1:], [len(batch)])) - 1
    accesses: Int64s = np.add.reduceat(batch.count.astype(np.int64), starts)
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


def _fitting(classes: list[FileClass], file: TraceFile) -> list[FileClass]:
    """Limit the blocks read once to the size of the file, because forgotten blocks may be counted repeatedly."""
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
    file: TraceFile,
    write: bool,
    found: FileClass,
    all_accesses: int,
    named: Sequence[Tensor],
    slices: Sequence[Slice] | None,
) -> Classification:
    pieces, period = _pieces(found), found.period
    return Classification(
        file=file.id,
        path=file.path,
        op=WRITE_OP if write else READ_OP,
        kind=found.kind,
        pieces=pieces,
        size_bytes=min(found.blocks * BLOCK_BYTES, file.size_bytes or sys.maxsize),  # the last block is rarely full
        accesses=found.accesses,
        share=found.accesses / all_accesses,
        passes=found.passes,
        since_ns=found.since.ns,
        last_ns=found.last.ns,
        period_ns=None if period is None else period.ns,
        period_blocks=None if period is None else period.blocks,
        regularity=found.regularity,
        active=found.active,
        order=found.order,
        stride_blocks=found.stride,
        tensors=tuple(tensor.name for tensor in _inside(named, pieces)),
        experts=None if slices is None else _experts(slices, pieces),
    )


def _experts(slices: Sequence[Slice], pieces: Sequence[tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    numbers: dict[str, set[int]] = {}
    for slice_ in _inside(slices, pieces):
        numbers.setdefault(slice_.layer, set()).add(slice_.number)
    return {layer: tuple(sorted(found)) for layer, found in numbers.items()}


def _pieces(found: FileClass) -> tuple[tuple[int, int], ...]:
    pieces: list[tuple[int, int]] = []
    for place in found.places:
        if pieces and not found.stride and pieces[-1][1] + 1 == place.first:
            pieces[-1] = pieces[-1][0], place.end - 1
        else:
            pieces.append((place.first, place.end - 1))
    return tuple(pieces)


def _inside(named: Sequence[N], pieces: Sequence[tuple[int, int]]) -> list[N]:
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


# From the places of one file to its classes: fragments join the place around them, pieces of one loop are merged.

SAME_PASSES = 0.25  # pieces of one loop differ by less in passes: the first or last pass may be partial
MOST_LOOPS = 8  # per file; beyond that, loops without a rhythm are merged (experts of an MoE model)
REGULAR = 0.75  # share of the intervals about as long as the period


@dataclass(frozen=True)
class FileClass:
    """One class of one file: places in the order of a pass (LOOP) or of blocks."""

    kind: Class
    places: tuple[Place, ...]
    blocks: int
    accesses: int
    passes: int
    since: Moment
    last: Moment
    period: Period | None = None
    regularity: float | None = None
    active: bool | None = None
    order: str | None = None
    stride: int = 0


def classes_of(trail: Trail, now: Moment) -> list[FileClass]:
    """Return the classes of a file's reads, or writes."""
    places = list(trail.places())
    walked = _joined([place for place in places if not place.scattered and not place.stride])
    scattered: list[Place] = []
    strided: list[Place] = []
    for place in places:
        if place.scattered and not _settle(place, walked):
            scattered.append(place)
        elif place.stride and not _belongs(place, walked):
            strided.append(place)
    drained = sum(place.accesses for place in walked if place.blocks == 0)  # all blocks were accessed again, and are hot
    walked = [place for place in walked if place.blocks > 0]
    rest = [*walked, *strided, *scattered]
    found = [_loop_of(group, now) for group in _loops(place for place in rest if place.kind == LOOP)]
    hot = [place for place in rest if place.kind == HOT]
    once = [place for place in rest if place.kind == SEQ]
    if hot:
        plain = _plain(HOT, _merged(hot, PLACES))
        found.append(replace(plain, accesses=plain.accesses + drained))
    blocks, accesses = trail.forgotten
    if once or blocks:
        found.append(_once(_merged(once, WINDOW), blocks, accesses, now))
    return found


def _joined(regions: list[Place]) -> list[Place]:
    """Merge regions shorter than a window into an adjacent longer one, whose ragged edge they are."""
    result: list[Place] = []
    for place in regions:
        before = result[-1] if result else None
        if before is not None and before.end == place.first and min(_length(before), _length(place)) < WINDOW:
            result[-1] = _together(max(before, place, key=_length), before, place)
        else:
            result.append(place)
    return result


def _together(main: Place, one: Place, other: Place) -> Place:
    return replace(
        main,
        first=one.first,
        end=max(one.end, other.end),
        blocks=one.blocks + other.blocks,
        accesses=one.accesses + other.accesses,
        since=min(one.since, other.since),
        last=max(one.last, other.last),
    )


def _length(place: Place) -> int:
    return place.end - place.first


def _settle(place: Place, regions: list[Place]) -> bool:
    """Count a scattered place in the region that it is part of, unless it is hot; return whether there is one."""
    for index, region in enumerate(regions):
        shared = common(place, region)
        edge = _is_edge(place, region)
        if not shared and not edge:
            continue
        inside = 2 * shared >= _length(place) or edge
        often = place.passes if edge else place.accesses
        if inside and (place.kind == SEQ or (region.kind == LOOP and often <= region.passes * place.blocks)):
            regions[index] = replace(region, accesses=region.accesses + place.accesses)
            return True
        if place.kind == HOT and shared:
            hot = place.blocks * shared // _length(place)
            regions[index] = replace(region, blocks=max(0, region.blocks - hot))
    return False


def _belongs(strided: Place, regions: list[Place]) -> bool:
    """Count strided runs in the unstrided walk around most of them; return whether there is one."""
    if strided.kind != SEQ or not regions:
        return False
    ends = [region.end for region in regions]
    blocks = range(strided.first, strided.end, strided.stride)
    met = ((bisect_right(ends, block), block) for block in blocks)
    inside = [index for index, block in met if index < len(regions) and regions[index].first <= block]
    if 2 * len(inside) < len(blocks):
        return False
    index = inside[0]
    regions[index] = replace(regions[index], accesses=regions[index].accesses + strided.accesses)
    return True


def _is_edge(place: Place, region: Place) -> bool:
    return _length(place) < WINDOW and region.first - WINDOW <= place.first and place.end <= region.end + WINDOW


def _loops(places: Iterable[Place]) -> list[list[Place]]:
    groups: list[list[Place]] = []
    for place in sorted(places, key=lambda place: -place.blocks):
        group = next((group for group in groups if _is_one(group[0], place)), None)
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    if len(groups) <= MOST_LOOPS:
        return groups
    chance = [place for group in groups if group[0].regularity < REGULAR for place in group]
    return [group for group in groups if group[0].regularity >= REGULAR] + ([chance] if chance else [])


def _is_one(main: Place, place: Place) -> bool:
    if main.stride != place.stride or main.period is None or place.period is None:
        return False
    if not is_about(main.period.blocks, place.period.blocks):
        return False
    return abs(main.passes - place.passes) <= max(1, SAME_PASSES * main.passes)


def _loop_of(group: list[Place], now: Moment) -> FileClass:
    blocks = sum(place.blocks for place in group)
    main = group[0]
    in_turn = sorted(group, key=lambda place: place.start.blocks)
    order = _order(in_turn)
    return replace(
        _plain(LOOP, sorted(group, key=lambda place: place.first) if order == "ascending" else in_turn),
        passes=round(sum(place.passes * place.blocks for place in group) / max(1, blocks)),
        period=_period(main, blocks),
        regularity=main.regularity,
        active=any(not place.expired(now) for place in group),
        order=order,
        stride=main.stride,
    )


def _period(main: Place, blocks: int) -> Period | None:
    """Return the period of a loop of `blocks`: at least one pass, even if each layer is read twice in a row."""
    fitting = [rhythm for rhythm in main.rhythms if rhythm.blocks >= blocks or is_about(rhythm.blocks, blocks)]
    if main.period is None or not fitting or main.period.blocks >= fitting[0].blocks:
        return main.period
    return fitting[0]


def _order(in_turn: Sequence[Place]) -> str:
    firsts = [place.first for place in in_turn]
    if len(in_turn) == 1:
        return "descending" if in_turn[0].descending else "ascending"
    if _turns(firsts) <= 1 and not any(place.descending for place in in_turn):
        return "ascending"
    return "descending" if _turns(firsts[::-1]) <= 1 else "other"


def _turns(firsts: Sequence[int]) -> int:
    return sum(later < earlier for earlier, later in pairwise([*firsts, firsts[0]]))


def _merged(places: list[Place], gap: int) -> list[Place]:
    result: list[Place] = []
    for place in sorted(places, key=lambda place: (place.first, place.end)):
        if result and place.first - result[-1].end <= gap and place.stride == result[-1].stride == 0:
            before = result[-1]
            passes, start = max(before.passes, place.passes), min(before.start, place.start)
            result[-1] = replace(_together(before, before, place), passes=passes, start=start)
        else:
            result.append(place)
    return result


def _plain(kind: Class, places: Sequence[Place]) -> FileClass:
    blocks, accesses = sum(place.blocks for place in places), sum(place.accesses for place in places)
    return FileClass(
        kind=kind,
        places=tuple(places),
        blocks=blocks,
        accesses=accesses,
        passes=round(accesses / max(1, blocks)),
        since=min(place.since for place in places),
        last=max(place.last for place in places),
        stride=places[0].stride if len({place.stride for place in places}) == 1 else 0,
    )


def _once(places: Sequence[Place], blocks: int, accesses: int, now: Moment) -> FileClass:
    if not places:
        return FileClass(SEQ, (), blocks, accesses, 1, now, now)
    found = _plain(SEQ, places)
    passes = max((place.passes for place in places if not place.scattered), default=1)
    return replace(found, blocks=found.blocks + blocks, accesses=found.accesses + accesses, passes=passes)
