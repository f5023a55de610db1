"""What refreshing the rows of a run costs, group by group, on its modelled clock. All of it is modelled.

A row is one half (bits 15 to 8, or 7 to 0) of one key, value or x vector; its energy is its share of a pass over the array.
Rules of counting (`RULES`):
- ticks: one counter per group, as section 5.1 describes the controller; at every tick all living rows of the group are
  refreshed. Source: kelle.txt, section 5.1.
- expected: the same with the counters' phases unknown: living time over interval.
- floor: every row has its own timer, started by its write; exact for a controller that knows when rows were written.
- ceil: an upper bound of it, which charges every stretch in a group at least once.
A row that is promoted to the high-score group is refreshed at once, as its age may exceed the shorter interval; a demoted
one keeps its timer. Reading restores nothing: 3T cells are read without loss. Differs from the paper: it says none of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.constants import GROUPS, Intervals
from llmcache.edram.refresh.lives import KINDS, Life
from llmcache.edram.refresh.run import EdramRun
from llmcache.errors import DataError, UsageError

RULES = ("ticks", "expected", "floor", "ceil")
_VECTORS = {"kv": 2, "x": 1}
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class GroupAccount:
    """One group: its mean living rows, its refreshes of rows (of them `promotions` on the spot), bytes and joules, modelled.

    `row_seconds`: living time of its rows, added up.
    """

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
    """Refreshes of a run by group (in the order of `GROUPS`), modelled. `joules` is summed step by step, not over groups."""

    rule: str
    clock: str
    seconds: float
    groups: tuple[GroupAccount, ...]
    joules: float
    pinned_share: float

    @property
    def watts(self) -> float:
        """Mean power of refreshing."""
        return self.joules / self.seconds

    @property
    def mean_interval_ns(self) -> float:
        """Living time of all rows over their refreshes; tends to the harmonic mean of the intervals for equal groups."""
        refreshes = sum(group.refreshes for group in self.groups)
        return 1e9 * sum(group.row_seconds for group in self.groups) / refreshes if refreshes else float("inf")


@dataclass(frozen=True)
class _Loads:
    """Rows and bytes of each group in each step [4, steps], and those promoted into it on the spot."""

    rows: Numbers
    bytes: Numbers
    promoted_rows: Numbers
    promoted_bytes: Numbers


def account(
    run: EdramRun,
    intervals: Intervals,
    joules_per_byte: float,
    *,
    rule: str = "ticks",
    capacity_bytes: float | None = None,
    phase_ns: float = 0.0,
) -> RefreshAccount:
    """Returns what refreshing `run` costs at `intervals`, by one of `RULES`.

    `joules_per_byte`: of refreshing a byte once (`Profile.refresh_j_per_byte`). `capacity_bytes`: what the eDRAM holds; of
    more, a share as large is pinned and the rest streams through, too briefly to be refreshed (None: all is pinned).
    `phase_ns`: when the counters of "ticks" begin. DataError if the run has no durations, or no lives where the rule needs
    them; UsageError for a rule that does not go with a capacity.
    """
    if rule not in RULES:
        raise UsageError(f"rule: '{rule}'", f"known are {', '.join(RULES)}")
    if run.durations_ns is None or not run.steps:
        raise DataError("steps.duration_ns: the run does not say how long its steps took", "say it: --step 20ms")
    loads = _loads(run)
    if rule in ("floor", "ceil"):
        if capacity_bytes is not None:
            raise UsageError(f"rule: '{rule}' follows single rows and cannot pin a share of them", "use ticks or expected")
        return _by_row(run, intervals, joules_per_byte, rule, loads)
    share = _pinned(loads, capacity_bytes)
    counts = _ticks(run.durations_ns, intervals, rule, phase_ns)
    rows = share * (counts * loads.rows + loads.promoted_rows)
    refreshed = share * (counts * loads.bytes + loads.promoted_bytes)
    counted = np.stack([rows, share * loads.promoted_rows, refreshed]).sum(axis=2)
    joules = float((refreshed.sum(axis=0) * joules_per_byte).sum())
    totals = _Totals(rule, counted, share, joules, joules_per_byte)
    return _account(run, intervals, loads, totals)


@dataclass(frozen=True)
class _Totals:
    """What a rule counted: refreshes, promotions and refreshed bytes [3, groups]; the pinned share of each step."""

    rule: str
    counted: Numbers
    share: Numbers
    joules: float
    joules_per_byte: float


def _account(run: EdramRun, intervals: Intervals, loads: _Loads, totals: _Totals) -> RefreshAccount:
    durations = np.array(run.durations_ns)
    seconds = float(durations.sum()) / 1e9
    row_seconds = (totals.share * loads.rows * durations).sum(axis=1) / 1e9
    groups = []
    for place, (group, interval) in enumerate(zip(GROUPS, intervals.in_order(), strict=True)):
        time, (refreshes, promotions, size) = float(row_seconds[place]), totals.counted[:, place].tolist()
        joules = size * totals.joules_per_byte
        groups.append(GroupAccount(group, interval, time / seconds, time, refreshes, promotions, size, joules))
    living = float((loads.bytes * durations).sum())
    pinned = float((totals.share * loads.bytes * durations).sum()) / living if living else 1.0
    return RefreshAccount(totals.rule, run.clock, seconds, tuple(groups), totals.joules, pinned)


def _loads(run: EdramRun) -> _Loads:
    """Adds pairs (a key and a value) and x rows up; both halves of a vector are in groups of the same score."""
    shape = (len(GROUPS), run.steps)
    rows, size, promoted, promoted_size = (np.zeros(shape) for _ in range(4))
    for kind in KINDS:
        vectors, half = _VECTORS[kind], run.half_bytes(kind)
        for place, flow in enumerate(("high", "high", "low", "low")):
            column = run.column(kind, flow)
            rows[place] += vectors * column
            size[place] += half * column
        for place in (0, 1):
            column = run.column(kind, "promoted")
            promoted[place] += vectors * column
            promoted_size[place] += half * column
    return _Loads(rows, size, promoted, promoted_size)


def _pinned(loads: _Loads, capacity_bytes: float | None) -> Numbers:
    """Returns the share of the living bytes that is pinned in each step."""
    living = loads.bytes.sum(axis=0)
    if capacity_bytes is None:
        return np.ones(len(living))
    if capacity_bytes <= 0:
        raise UsageError(f"capacity: {capacity_bytes:g} bytes, more than 0 is needed")
    share: Numbers = np.minimum(1.0, capacity_bytes / np.maximum(living, 1))
    return share


def _ticks(durations: tuple[float, ...], intervals: Intervals, rule: str, phase_ns: float) -> Numbers:
    """Returns how often each group's counter ticks in each step [4, steps]."""
    times = np.concatenate([[0.0], np.cumsum(durations)])
    ticks = (times[None] - phase_ns) / np.array(intervals.in_order())[:, None]
    return np.diff(np.floor(ticks) if rule == "ticks" else ticks, axis=1)


def _by_row(run: EdramRun, intervals: Intervals, joules_per_byte: float, rule: str, loads: _Loads) -> RefreshAccount:
    if run.lives is None:
        raise DataError("lives: the run did not follow its rows one by one", "use the rule ticks or expected")
    times = np.concatenate([[0.0], np.cumsum(np.array(run.durations_ns))]).tolist()
    rows, spot, size = np.zeros(4), np.zeros(4), np.zeros(4)
    joules = 0.0
    for life in run.lives:
        counts, promotions = _refreshes(life, times, intervals.in_order(), rule)
        rows += life.count * _VECTORS[life.kind] * counts
        spot += life.count * _VECTORS[life.kind] * promotions
        size += life.count * run.half_bytes(life.kind) * counts
        joules += life.count * run.half_bytes(life.kind) * float(counts.sum()) * joules_per_byte
    totals = _Totals(rule, np.stack([rows, spot, size]), np.ones(run.steps), joules, joules_per_byte)
    return _account(run, intervals, loads, totals)


def _refreshes(life: Life, times: list[float], intervals: tuple[float, ...], rule: str) -> tuple[Numbers, Numbers]:
    """Returns the refreshes of one row of `life` in each group [4], and those of them that are promotions."""
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
