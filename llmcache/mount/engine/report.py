"""The statistics of a mount: the counters of `llmcache stats`, and the layers that `llmcache top` draws.

`statistics` holds the lock for the files of SPACES_AT_A_TIME spaces at a time. `heat_map` holds it to copy one space at a
time: some hundred microseconds for a model of 100 GB.
"""

from __future__ import annotations

import operator
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcache.model.tensors import Part
from llmcache.mount.state.interfaces import ClientReads
from llmcache.mount.state.space import ABSENT, LOADING, PINNED, READY, SINGLE, SPARSE, TOUCHED, LoopSpace, MoeFile, SpaceFile
from llmcache.mount.state.state import CacheState, References
from llmcache.mount.stats import (
    HEAT_SCHEMA,
    STATS_SCHEMA,
    AccessLogStats,
    ArenaStats,
    ExpertStats,
    FileHeat,
    FileStats,
    HeatMap,
    LayerExperts,
    LayerHeat,
    LoopStats,
    MountStats,
    Prefetch,
    Waits,
    WaitsByReason,
    from_json,
)
from llmcache.procfs import status_of

SPACES_AT_A_TIME = 100  # while the lock is held


NameOf = Callable[[str], str]


def statistics(
    state: CacheState, mode: str, helper_pids: Sequence[int], reads: ClientReads | None, name_of: NameOf
) -> MountStats:
    """Return the counters and the state of all files. Takes the lock."""
    with state.lock:
        counters, log, memory = state.counters, state.references.log, state.memory
        fates = (counters.prefetch_useful_bytes, counters.prefetch_late_bytes, counters.prefetch_wasted_bytes)
        waits = (from_json(Waits, histogram.as_dict()) for histogram in (state.late_waits, state.demand_waits))
        found = MountStats(
            schema=STATS_SCHEMA,
            mode=mode,
            uptime_s=(time.monotonic_ns() - state.began_ns) / 1e9,
            budget_bytes=memory.budget_bytes,
            limit_bytes=memory.pin_limit_bytes,
            pinned_bytes=memory.pinned_bytes,
            window_bytes=memory.window_bytes,
            pages_bytes=0,
            resident_bytes=memory.used_bytes,
            read_bytes=counters.hit_bytes + counters.miss_bytes,
            hit_bytes=counters.hit_bytes,
            miss_bytes=counters.miss_bytes,
            requested_bytes=counters.requested_bytes,
            backing_read_bytes=counters.backing_read_bytes if reads is None else sum(reads),
            client_read_bytes=0 if reads is None else reads.client_bytes,
            backing_write_bytes=counters.backing_write_bytes,
            prefetch=Prefetch(*fates),
            waits=WaitsByReason(*waits),
            stored_bytes=counters.stored_bytes,
            invalidated_bytes=counters.invalidated_bytes,
            refault_bytes=counters.refault_bytes,
            beyond_bytes=max(0, memory.used_bytes - memory.limit_bytes) if memory.opportunistic_bytes else 0,
            helper_pid=next(iter(helper_pids), 0),
            arena=_arena(state.references),
            services=state.services.stats(),
            access_log=None if log is None else AccessLogStats(log.path, log.rows, log.lost),
            files=(),
            cpu_s=0.0,
            daemon_bytes=0,
        )
        held_bytes, spaces = memory.held_bytes, list(state.spaces.values())
    pages_bytes, files = 0, list[dict[str, Any]]()
    for first in range(0, len(spaces), SPACES_AT_A_TIME):
        with state.lock:
            for space in [space for space in spaces[first : first + SPACES_AT_A_TIME] if space.alive]:
                pages_bytes += sum(space.accounted_bytes[extent] for extent in space.partial_extents)
                files += [_file(state, space, member) for member in space.members]
    return replace(
        found,
        pages_bytes=pages_bytes,  # read by pages: headers, embedding rows, small and written files
        files=tuple(FileStats(name=name_of(file["path"]), **file) for file in files),
        cpu_s=cpu_s("self") + sum(cpu_s(str(pid)) for pid in helper_pids),
        daemon_bytes=max(0, private_bytes("self") - held_bytes) + sum(private_bytes(str(pid)) for pid in helper_pids),
    )


def _arena(references: References) -> ArenaStats | None:
    core = references.core
    if core is None:
        return None
    return ArenaStats(core.clock, core.hit_blocks, core.miss_blocks, core.evicted_blocks, core.held_blocks)


def _file(state: CacheState, space: LoopSpace, member: SpaceFile) -> dict[str, Any]:
    """The caller holds the engine's lock."""
    return {
        "path": member.path,
        "size_bytes": member.size_bytes,
        "kind": _class(space),
        "open": member.backing is not None and state.opens.get(member.backing, 0) > 0,
        "lacks_extents": space.lacks_extents,
        "loops": (_loop(space),) if space.looping and member is space.members[0] else (),
        "experts": None if member.moe is None else from_json(ExpertStats, member.moe.facts()),
    }


def _class(space: LoopSpace) -> str:
    if space.looping:
        return "loop"
    if space.paged:
        return "paged"
    return "hot" if SINGLE in space.status and space.hot else "sequential"


def _loop(space: LoopSpace) -> LoopStats:
    learner = space.touches
    return LoopStats(
        size_bytes=min(space.used_loop_bytes, sum(member.size_bytes for member in space.members)),
        period_s=None if learner.period is None else learner.period / 1e9,
        pinned_bytes=space.pinned_bytes,
        window_bytes=space.plan.window_bytes,
        passes=learner.passes,
        readers=tuple(cursor.head / space.count for cursor in space.cursors.live),
        guessed=learner.guessed,
        unused_bytes=space.use.unused.count(1) * space.extent_bytes,
        copied=space.copied,
        **judgement(space),
    )


def judgement(space: LoopSpace) -> dict[str, Any]:
    """Return the bytes that a pass reads by steering and by LRU, and whether the loop is left to the kernel."""
    guard = space.evidence.guard
    figures = (None, None) if guard is None or not guard.has_judged else (guard.steered_bytes, guard.lru_bytes)
    steered_bytes, lru_bytes = (None if each is None else int(each / space.evidence.window_passes) for each in figures)
    return {"left": space.left, "steered_pass_bytes": steered_bytes, "lru_pass_bytes": lru_bytes}


def cpu_s(pid: str) -> float:
    """Return the CPU time of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def private_bytes(pid: str) -> int:
    """Return the anonymous memory of a process, with swap; 0 if it has ended."""
    try:
        fields = status_of(pid)
    except OSError:
        return 0
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap") if name in fields)  # a zombie has none


ROWS_MAX = 1024
CELLS = 16
RECENT_NS = 10_000_000_000
RECENT_PERIODS = 2

# Kinds of extents in the map. _STORAGE and _SEEN (read recently) differ in the lowest bit, which other kinds ignore.
_STORAGE, _SEEN, _WINDOW, _PINNED, _PAGES = 0, 1, 2, 4, 6
_KINDS = {ABSENT: _STORAGE, SPARSE: _STORAGE, LOADING: _WINDOW, READY: _WINDOW, TOUCHED: _WINDOW, PINNED: _PINNED}
_KINDS |= {SINGLE: _PAGES}
_KIND_OF_STATE = bytes(_KINDS.get(state, _STORAGE) for state in range(256))
_PLAIN = bytes((kind if kind < _WINDOW else kind & ~1) for kind in range(256))
_CELL_KINDS = {"pinned": _PINNED, "window": _WINDOW, "pages": _PAGES, "cold": _STORAGE}


@dataclass(frozen=True)
class _Copy:
    """Copy of a space: `status` by rank, the other arrays by extent. `held`: extents in the arena."""

    members: tuple[SpaceFile, ...]
    extent_bytes: int
    status: bytes
    rank_of: array[int]
    accounted_bytes: array[int]
    seen_ns: array[int]
    held: frozenset[int]
    now_ns: int
    since_ns: int
    moe_files: tuple[tuple[MoeFile, list[int]], ...]


def heat_map(state: CacheState, mode: str, name_of: NameOf) -> HeatMap:
    """Return the layers of every model and looping file. Takes the lock."""
    with state.lock:
        spaces = [space for space in state.spaces.values() if space.looping or any(m.anatomy for m in space.members)]
    files: list[FileHeat] = []
    rows_left = ROWS_MAX
    for space in spaces:
        with state.lock:
            copy = _copy(state, space)
        for moe, kept in copy.moe_files:
            _charge_experts(copy, moe, kept)
        for member in copy.members:
            if rows_left > 0 and member.size_bytes:
                files.append(_heat_file(copy, member, rows_left, name_of(member.path)))
                rows_left -= len(files[-1].layers)
    total = sum(1 for space in spaces for member in space.members if member.size_bytes)
    return HeatMap(schema=HEAT_SCHEMA, mode=mode, files=tuple(files), left_out_files=total - len(files))


def _copy(state: CacheState, space: LoopSpace) -> _Copy:
    now_ns = time.monotonic_ns()
    recent_ns = max(RECENT_NS, RECENT_PERIODS * (space.touches.period or 0))
    return _Copy(
        tuple(space.members),
        space.extent_bytes,
        bytes(space.status),
        space.order.rank_of[:],
        space.accounted_bytes[:],
        space.seen_ns[:],
        frozenset(space.held),
        now_ns,
        max(1, now_ns - recent_ns),  # 0 means never
        tuple((member.moe, member.moe.kept) for member in space.members if member.moe is not None),
    )


def _charge_experts(copy: _Copy, moe: MoeFile, kept: list[int]) -> None:
    size, base = copy.extent_bytes, moe.member.base
    for offset, length in (part for expert in kept for part in moe.ranges(expert)):
        for extent in range(offset // size, -(-(offset + length) // size)):
            part_bytes = min(offset + length, (extent + 1) * size) - max(offset, extent * size)
            copy.accounted_bytes[base + extent] = min(size, copy.accounted_bytes[base + extent] + part_bytes)


def _heat_file(copy: _Copy, member: SpaceFile, rows: int, name: str) -> FileHeat:
    whole = Part("", 0, ((0, member.size_bytes),))
    parts = list(member.anatomy.parts()) if member.anatomy is not None else [whole]
    experts = {}
    for moe, kept in copy.moe_files:
        if moe.member is member:
            counts = Counter(moe.layout.layer_of(expert)[0] for expert in kept)
            experts = {layer: LayerExperts(counts[layer], count) for layer, _, count in moe.layout.layers}
    return FileHeat(
        name=name,
        path=member.path,
        size_bytes=member.size_bytes,
        extent_bytes=copy.extent_bytes,
        layers=tuple(_layer(copy, member, part, experts.get(part.name)) for part in parts[:rows]),
        left_out_layers=max(0, len(parts) - rows),
    )


def _layer(copy: _Copy, member: SpaceFile, part: Part, experts: LayerExperts | None) -> LayerHeat:
    sums = dict.fromkeys((_STORAGE, _SEEN, _WINDOW, _PINNED, _PAGES), 0)
    strip = bytearray()
    seen_ns = 0
    for first, end in part.stretches:
        low, high = first // copy.extent_bytes, -(-end // copy.extent_bytes)
        extents = range(member.base + low, member.base + high)
        kinds = _kinds(copy, extents)
        for extent, kind, length in _lengths(copy, member, extents, kinds, first, end):
            if kind == _PAGES:  # only some of its pages are resident
                resident = min(length, copy.accounted_bytes[extent] * length // copy.extent_bytes)
                sums[_PAGES] += resident
                sums[_STORAGE] += length - resident
            else:
                sums[kind] += length
        seen_ns = max(seen_ns, *copy.seen_ns[extents.start : extents.stop])
        strip += kinds
    return LayerHeat(
        name=part.name,
        tensors=part.tensors,
        size_bytes=part.size_bytes,
        pinned_bytes=sums[_PINNED],
        window_bytes=sums[_WINDOW],
        pages_bytes=sums[_PAGES],
        streamed_bytes=sums[_SEEN],
        cold_bytes=sums[_STORAGE],
        age_s=(copy.now_ns - seen_ns) / 1e9 if seen_ns else None,
        cells={name: _cells(strip, kind) for name, kind in _CELL_KINDS.items()},
        experts=experts,
    )


def _kinds(copy: _Copy, extents: range) -> bytes:
    states = bytes(map(copy.status.__getitem__, copy.rank_of[extents.start : extents.stop]))
    kinds = states.translate(_KIND_OF_STATE)
    if copy.held:
        kinds = bytes(_PINNED if extent in copy.held else kind for extent, kind in zip(extents, kinds, strict=True))
    if _PAGES in kinds:
        resident = (bool(accounted_bytes) for accounted_bytes in copy.accounted_bytes[extents.start : extents.stop])
        kinds = bytes(kind if kind != _PAGES or has else _STORAGE for kind, has in zip(kinds, resident, strict=True))
    seen = map(copy.since_ns.__le__, copy.seen_ns[extents.start : extents.stop])
    return bytes(map(operator.or_, kinds, seen)).translate(_PLAIN)


def _lengths(
    copy: _Copy, member: SpaceFile, extents: range, kinds: bytes, first: int, end: int
) -> Iterator[tuple[int, int, int]]:
    size = copy.extent_bytes
    at = 0
    while at < len(kinds):
        kind, run = kinds[at], at + 1
        while kind != _PAGES and run < len(kinds) and kinds[run] == kind:
            run += 1
        base = extents[at] - member.base
        yield extents[at], kind, min(end, (base + run - at) * size) - max(first, base * size)
        at = run


def _cells(strip: Iterable[int], kind: int) -> str:
    kinds = bytes(strip)
    cells = []
    for cell in range(CELLS):
        low = cell * len(kinds) // CELLS
        part = kinds[low : max(low + 1, (cell + 1) * len(kinds) // CELLS)]
        cells.append(str(-(-9 * part.count(kind) // len(part))))
    return "".join(cells)
