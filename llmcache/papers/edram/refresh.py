"""Refresh accounting: the rows that a run keeps in eDRAM, and the modelled cost of refreshing them by group.

A recorded run, `llmcache.edram-run/1`, lists the rows in eDRAM during each step of a decode, on a modelled clock:

    {"schema": "llmcache.edram-run/1", "title": text, "clock": text (the source of the durations; never wall time),
     "pair_bytes": n (one half, MSB or LSB, of a key and a value of one head), "x_bytes": n (one half of an x row; 0: none),
     "settings": {any}, "steps": {column: [a number per step]}, "lives": null or [{kind, begin, path, count}]}

Columns of steps: duration_ns (null instead of the list: the reader of the file chooses it) and, for kv (pairs of a key and a
value of a head) and x: high_kv, low_kv, appended_kv, evicted_kv, promoted_kv, high_x and so on. A path is [[true for high,
step at which that ends], ...]. Rows written by the prompt exist from step 0 on.

A row of the account is one half (bits 15 to 8, or 7 to 0) of one key, value or x vector; its energy is its share of a pass
over the array. Rules of counting (`RULES`):
- ticks: one counter per group (section 5.1); each tick refreshes all rows of the group.
- expected: the same with unknown phases of the counters: lifetime divided by interval.
- floor: every row has its own timer, started by its write.
- ceil: an upper bound of floor, which counts at least one refresh for each stretch in a group.

A row that is promoted to the high-score group is refreshed at once, because its age may exceed the shorter interval; a
demoted row keeps its timer. Reads do not refresh, because reading a 3T cell does not destroy its data. The paper states none
of this.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np

from llmcache.arrays import Doubles, Flags, Int64s
from llmcache.documents import check_schema, from_json, invalid, read_json
from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.files import replacing
from llmcache.papers.edram.constants import GROUPS, RefreshIntervals

NONE = -1
KINDS = ("kv", "x")


@dataclass(frozen=True)
class Life:
    """`count` equal rows of a `kind` that exist from step `begin` on.

    `path`: for each stretch, whether the score is high, and the step at which it ends.
    """

    kind: str
    begin: int
    path: tuple[tuple[bool, int], ...]
    count: int = 1


@dataclass(frozen=True)
class Flow:
    """Rows of one kind in one step."""

    high: int = 0
    low: int = 0
    appended: int = 0
    evicted: int = 0
    promoted: int = 0

    def __add__(self, other: Flow) -> Flow:
        mine, theirs = vars(self), vars(other)
        return Flow(**{name: mine[name] + theirs[name] for name in mine})


@dataclass
class Tracker:
    """Follows the rows in one array of places from step to step."""

    kind: str
    lives: Counter[Life]
    _ids: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    _high: Flags = field(default_factory=lambda: np.empty(0, np.bool_))
    _begins: dict[int, tuple[int, list[tuple[bool, int]]]] = field(default_factory=dict)

    def observe(self, step: int, ids: Int64s, high: Flags) -> Flow:
        """Take `ids` of the rows in the places (-1: free), and their groups."""
        ids, high = ids.reshape(-1).copy(), high.reshape(-1).copy()
        grown = len(ids) - len(self._ids)
        if grown < 0:
            raise ValueError(
                f"ids: must have at least the {len(self._ids)} places of the last step (-1 if free), not {len(ids)}"
            )
        before = np.pad(self._ids, (0, grown), constant_values=NONE)
        was_high = np.pad(self._high, (0, grown))
        new, gone = (ids != before) & (ids != NONE), (ids != before) & (before != NONE)
        moved = (ids == before) & (ids != NONE) & (high != was_high)
        for place in np.nonzero(gone)[0].tolist():
            self._end(place, step, bool(was_high[place]))
        for place in np.nonzero(new)[0].tolist():
            self._begins[place] = (step, [])
        for place in np.nonzero(moved)[0].tolist():
            self._begins[place][1].append((bool(was_high[place]), step))
        self._ids, self._high = ids, high
        living = ids != NONE
        counts = (living & high, living & ~high, new, gone, moved & high)
        return Flow(*(int(flags.sum()) for flags in counts))

    def _end(self, place: int, step: int, high: bool) -> None:
        begin, path = self._begins.pop(place)
        self.lives[Life(self.kind, begin, (*path, (high, step)))] += 1

    def close(self, step: int) -> None:
        for place in list(self._begins):
            self._end(place, step, bool(self._high[place]))


SCHEMA = "llmcache.edram-run/1"
FLOWS = tuple(name.name for name in fields(Flow))
COLUMNS = tuple(f"{flow}_{kind}" for kind in KINDS for flow in FLOWS)
_HINT = "record a run with: llmcache kv bench --policy kelle --edram-run FILE"
_LARGEST = 1 << 53


@dataclass(frozen=True)
class EdramRun:
    """The rows of a run in eDRAM. `durations_ns` [steps]: None if unknown.

    `pair_bytes`, `x_bytes`: of one half of the bits.
    """

    pair_bytes: int
    x_bytes: int
    flows: dict[str, tuple[Flow, ...]]
    durations_ns: tuple[float, ...] | None = None
    lives: tuple[Life, ...] | None = None
    title: str = ""
    clock: str = "modelled"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.flows["kv"])

    def half_bytes(self, kind: str) -> int:
        return self.pair_bytes if kind == "kv" else self.x_bytes

    def column(self, kind: str, flow: str) -> Doubles:
        return np.array([getattr(step, flow) for step in self.flows[kind]], np.float64)

    def with_step(self, step_ns: float, clock: str) -> EdramRun:
        if not 0 < step_ns < _LARGEST:
            raise UsageError(f"step_ns: must be more than 0, not {step_ns:g}")
        return replace(self, durations_ns=(step_ns,) * self.steps, clock=clock)

    def to_json(self) -> dict[str, Any]:
        steps: dict[str, Any] = {"duration_ns": None if self.durations_ns is None else list(self.durations_ns)}
        for kind in KINDS:
            steps |= {f"{flow}_{kind}": [getattr(step, flow) for step in self.flows[kind]] for flow in FLOWS}
        lives = None if self.lives is None else [{**vars(life), "path": list(map(list, life.path))} for life in self.lives]
        named = {name: getattr(self, name) for name in ("title", "clock", "pair_bytes", "x_bytes", "settings")}
        return {"schema": SCHEMA, **named, "steps": steps, "lives": lives}

    def save(self, path: str | os.PathLike[str], force: bool = False) -> None:
        """Write the run; UsageError if `path` exists without `force`, MissingRequirement if it cannot be written."""
        target = Path(path)
        if target.exists() and not force:
            raise UsageError(f"run: '{target}' exists", "name another file, or replace it with --force")
        try:
            with replacing(target, 0o666) as stream:
                stream.write(json.dumps(self.to_json(), separators=(",", ":")).encode())
        except OSError as error:
            raise MissingRequirement(f"run: '{target}' cannot be written: {error.strerror}") from error


def read_run(path: str | os.PathLike[str]) -> EdramRun:
    """Read a recorded run; UsageError if it cannot be read, DataError for invalid content."""
    return parse_run(read_json(path, _HINT))


@dataclass(frozen=True)
class _SavedLife:
    kind: str
    begin: int
    path: tuple[Any, ...]
    count: int


@dataclass(frozen=True)
class _SavedRun:
    title: str
    clock: str
    pair_bytes: int
    x_bytes: int
    settings: Mapping[str, Any]
    steps: Mapping[str, Any]
    lives: tuple[_SavedLife, ...] | None = None


def parse_run(data: Any) -> EdramRun:
    """Return the run in `data`; DataError names an invalid field."""
    with invalid("", _HINT):
        check_schema(data, SCHEMA)
        found: _SavedRun = from_json(_SavedRun, data)
        columns = {name: from_json(tuple[int, ...], found.steps[name], f"steps.{name}") for name in COLUMNS}
        count = len(columns[COLUMNS[0]])
        durations = from_json(tuple[float, ...] | None, found.steps["duration_ns"], "steps.duration_ns")
        for name, column in columns.items():
            _ensure(len(column) == count, f"steps.{name}: has {len(column)} steps, but {COLUMNS[0]} has {count}")
            for value in column:
                _ensure(
                    isinstance(value, int) and 0 <= value < _LARGEST, f"steps.{name}: must be whole numbers, not {value}"
                )
        for value in durations or ():
            _ensure(0 < value < _LARGEST, f"steps.duration_ns: must be more than 0, not {value!r}")
        _ensure(durations is None or len(durations) == count, f"steps.duration_ns: must have {count} steps")
        _ensure(0 < found.pair_bytes < _LARGEST and 0 <= found.x_bytes < _LARGEST, "pair_bytes: must be at least 1")
        lives = None if found.lives is None else tuple(_life(one, count) for one in found.lives)
        flows = {
            kind: tuple(Flow(*row) for row in zip(*(columns[f"{flow}_{kind}"] for flow in FLOWS), strict=True))
            for kind in KINDS
        }
        run = EdramRun(
            found.pair_bytes, found.x_bytes, flows, durations, lives, found.title, found.clock, dict(found.settings)
        )
        _check(run)
        return run


def _ensure(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _life(found: _SavedLife, steps: int) -> Life:
    _ensure(found.kind in KINDS, f"lives: kind must be one of {', '.join(KINDS)}, not {found.kind!r}")
    path = tuple(tuple(part) if isinstance(part, list) else () for part in found.path)
    pairs = bool(path) and all(len(part) == 2 and isinstance(part[0], bool) and type(part[1]) is int for part in path)
    ends = [found.begin, *(part[1] for part in path)] if pairs else []
    ascending = pairs and ends[0] >= 0 and all(early < late for early, late in itertools.pairwise(ends))
    wanted = f"lives.path: must be pairs of a bool and ascending steps up to {steps}, not {repr(found.path)[:60]}"
    _ensure(ascending and ends[-1] <= steps, wanted)
    _ensure(0 < found.count < _LARGEST, "lives.count: must be at least 1")
    return Life(found.kind, found.begin, path, found.count)


def _check(run: EdramRun) -> None:
    """Raise a ValueError unless the rows of each step follow from the step before."""
    for kind in KINDS:
        before = 0
        for step, flow in enumerate(run.flows[kind]):
            living = flow.high + flow.low
            agree = living == before + flow.appended - flow.evicted and flow.promoted <= flow.high
            _ensure(agree, f"steps.high_{kind}: the {living} rows of step {step} contradict its appended and evicted rows")
            before = living
        has_rows = any(flow.high + flow.low for flow in run.flows[kind])
        _ensure(bool(run.half_bytes(kind)) or not has_rows, f"{kind}_bytes: must be more than 0: the run has rows of {kind}")
        if run.lives is not None:
            _check_lives(run, kind, run.lives)


def _check_lives(run: EdramRun, kind: str, lives: Sequence[Life]) -> None:
    changes = np.zeros((2, run.steps + 1), np.int64)
    for life in lives:
        begin = life.begin
        for high, end in life.path if life.kind == kind else ():
            changes[int(high), begin] += life.count
            changes[int(high), end] -= life.count
            begin = end
    for group, rows in zip(("low", "high"), np.cumsum(changes, axis=1)[:, :-1], strict=True):
        for step in np.nonzero(rows != run.column(kind, group))[0][:1]:
            raise ValueError(f"lives: {rows[step]} rows of {kind} in step {step}, but steps.{group}_{kind} differs")


class RunRecorder:
    """Collects an `EdramRun`, with about 100 bytes per row ever written."""

    def __init__(self, pair_bytes: int, x_bytes: int = 0) -> None:
        if pair_bytes < 1 or x_bytes < 0:
            raise ValueError(f"pair_bytes, x_bytes: must be at least 1 and 0, not {pair_bytes} and {x_bytes}")
        self.pair_bytes, self.x_bytes = pair_bytes, x_bytes
        self._lives: Counter[Life] = Counter()
        self._trackers: dict[tuple[Hashable, str], Tracker] = {}
        self._now = dict.fromkeys(KINDS, Flow())
        self._flows: dict[str, list[Flow]] = {kind: [] for kind in KINDS}
        self._durations: list[float] = []

    def observe(self, layer: Hashable, kind: str, ids: Int64s, high: Flags) -> None:
        """Record the `ids` of the rows (-1: free) in one array of places; call it once per step."""
        if kind not in KINDS:
            raise ValueError(f"kind: must be one of {', '.join(KINDS)}, not '{kind}'")
        tracker = self._trackers.setdefault((layer, kind), Tracker(kind, self._lives))
        self._now[kind] += tracker.observe(len(self._flows[kind]), ids, high)

    def end_step(self, duration_ns: float | None = None) -> None:
        timed = len(self._durations) if duration_ns is None else len(self._flows["kv"]) - len(self._durations)
        if timed:
            raise ValueError("duration_ns: must be given for all steps or for none")
        if duration_ns is not None:
            if not duration_ns > 0:
                raise ValueError(f"duration_ns: must be more than 0, not {duration_ns}")
            self._durations.append(float(duration_ns))
        for kind in KINDS:
            self._flows[kind].append(self._now[kind])
        self._now = dict.fromkeys(KINDS, Flow())

    def finish(self, title: str, clock: str, settings: dict[str, Any] | None = None) -> EdramRun:
        for tracker in self._trackers.values():
            tracker.close(len(self._flows["kv"]))
        flows = {kind: tuple(of_kind) for kind, of_kind in self._flows.items()}
        lives = tuple(replace(life, count=count) for life, count in self._lives.items())
        durations = tuple(self._durations) or None
        return EdramRun(self.pair_bytes, self.x_bytes, flows, durations, lives, title, clock, settings or {})


RULES = ("ticks", "expected", "floor", "ceil")
_VECTORS = {"kv": 2, "x": 1}


@dataclass(frozen=True)
class GroupAccount:
    """One group. `refreshes` of rows include `promotions`; `row_seconds`: the sum of the lifetimes of its rows."""

    group: str
    interval_ns: float
    mean_rows: float
    row_seconds: float
    refreshes: float
    promotions: float
    refreshed_bytes: float
    joules: float


@dataclass(frozen=True)
class RefreshAccount:
    """Refreshes by group, in the order of `GROUPS`. `joules` is summed over steps, not over groups."""

    rule: str
    clock: str
    seconds: float
    groups: tuple[GroupAccount, ...]
    joules: float
    pinned_share: float

    @property
    def watts(self) -> float:
        return self.joules / self.seconds

    @property
    def mean_interval_ns(self) -> float:
        refreshes = sum(group.refreshes for group in self.groups)
        return 1e9 * sum(group.row_seconds for group in self.groups) / refreshes if refreshes else float("inf")


def account(
    run: EdramRun,
    intervals: RefreshIntervals,
    joules_per_byte: float,
    *,
    rule: str = "ticks",
    capacity_bytes: float | None = None,
) -> RefreshAccount:
    """Return the modelled cost of refreshing `run`, by one of `RULES`.

    `joules_per_byte`: of refreshing a byte once. `capacity_bytes`: size of the eDRAM (None: unlimited); rows beyond it
    stream through, too briefly to be refreshed. DataError if the run has no durations, or no lives where the rule needs
    them; UsageError if the rule does not support a capacity.
    """
    if rule not in RULES:
        raise UsageError(f"rule: there is no rule '{rule}'", f"one of: {', '.join(RULES)}")
    if run.durations_ns is None or not run.steps:
        raise DataError("steps.duration_ns: the run has no duration of its steps", "specify it, for example --step 20ms")
    durations, each_ns = np.array(run.durations_ns), np.array(intervals.in_order())
    times = np.concatenate([[0.0], np.cumsum(durations)])
    rows, size, raised, raised_size = _loads(run)
    if rule in ("floor", "ceil"):
        if capacity_bytes is not None:
            raise UsageError(f"rule: '{rule}' counts single rows, and cannot pin a share of them", "use ticks or expected")
        share = np.ones(run.steps)
        counted, joules = _by_row(run, times.tolist(), intervals.in_order(), joules_per_byte, rule)
    else:
        share = _pinned(size.sum(axis=0), capacity_bytes)
        ticks = times / each_ns[:, None]
        counts = np.diff(np.floor(ticks) if rule == "ticks" else ticks, axis=1)
        refreshed = share * (counts * size + raised_size)
        counted = np.stack([share * (counts * rows + raised), share * raised, refreshed]).sum(axis=2)
        joules = float((refreshed.sum(axis=0) * joules_per_byte).sum())
    seconds = float(durations.sum()) / 1e9
    row_seconds = (share * rows * durations).sum(axis=1) / 1e9
    groups = []
    for place, (group, interval) in enumerate(zip(GROUPS, intervals.in_order(), strict=True)):
        time, (refreshes, promotions, bytes_) = float(row_seconds[place]), counted[:, place].tolist()
        joules_ = bytes_ * joules_per_byte
        groups.append(GroupAccount(group, interval, time / seconds, time, refreshes, promotions, bytes_, joules_))
    living = float((size * durations).sum())
    pinned = float((share * size * durations).sum()) / living if living else 1.0
    return RefreshAccount(rule, run.clock, seconds, tuple(groups), joules, pinned)


def _loads(run: EdramRun) -> Doubles:
    """Return rows and bytes that exist, and those promoted, [4, groups, steps]."""
    loads = np.zeros((2, 2, len(GROUPS), run.steps))
    for kind in KINDS:
        high, low, promoted = (run.column(kind, flow) for flow in ("high", "low", "promoted"))
        none = np.zeros_like(promoted)
        of_kind = np.stack([[high, high, low, low], [promoted, promoted, none, none]])
        loads[:, 0] += _VECTORS[kind] * of_kind
        loads[:, 1] += run.half_bytes(kind) * of_kind
    return loads.reshape(4, len(GROUPS), run.steps)


def _pinned(living: Doubles, capacity_bytes: float | None) -> Doubles:
    if capacity_bytes is None:
        return np.ones(len(living))
    if capacity_bytes <= 0:
        raise UsageError(f"capacity_bytes: must be more than 0, not {capacity_bytes:g}")
    share: Doubles = np.minimum(1.0, capacity_bytes / np.maximum(living, 1))
    return share


def _by_row(
    run: EdramRun, times: list[float], intervals: tuple[float, ...], joules_per_byte: float, rule: str
) -> tuple[Doubles, float]:
    """Return refreshes, promotions, bytes [3, groups], and joules."""
    if run.lives is None:
        raise DataError("lives: the run did not record single rows", "use the rule ticks or expected")
    counted, joules = np.zeros((3, len(GROUPS))), 0.0
    for life in run.lives:
        refreshes, promotions = _refreshes(life, times, intervals, rule)
        rows, size = life.count * _VECTORS[life.kind], life.count * run.half_bytes(life.kind)
        counted += np.stack([rows * refreshes, rows * promotions, size * refreshes])
        joules += size * float(refreshes.sum()) * joules_per_byte
    return counted, joules


def _refreshes(life: Life, times: list[float], intervals: tuple[float, ...], rule: str) -> tuple[Doubles, Doubles]:
    """Return the refreshes of one row [4], and the promotions."""
    counts, promotions = np.zeros(4), np.zeros(4)
    for half in (0, 1):
        last = begin = times[life.begin]
        was_high = True
        for high, end in life.path:
            place = half if high else 2 + half
            if high and not was_high:
                counts[place] += 1
                promotions[place] += 1
                last = begin
            if rule == "floor":
                ticks = max(0, floor((times[end] - last) / intervals[place]))
                last += ticks * intervals[place]
            else:
                ticks = ceil((times[end] - begin) / intervals[place])
            counts[place] += ticks
            begin, was_high = times[end], high
    return counts, promotions
