"""From the page-cache tracepoints of threads to accesses and fills: requests told in several events, faults told twice."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.trace.record import MAP, READ, UNKNOWN
from llmcache.trace.sources.base import ACCESS, AROUND, DIRECT, FILL, Records, no_records

READS, FAULTS, AROUNDS, FILLS, DIRECTS = range(5)
EVENT = np.dtype(
    [
        ("t_ns", "<u8"),
        ("dev", "<u8"),
        ("inode", "<u8"),
        ("first", "<u8"),
        ("end", "<u8"),  # block past the last
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("kind", "u1"),
    ]
)
Events = NDArray[np.void]
Mask = NDArray[np.bool_]

HOLD_NS = 1_000_000_000  # how long an access waits for events that belong to it: a page from slow storage
_AGE_NS = 1_000_000  # runs are joined within milliseconds of the clock
_NEVER = 1 << 63


class Runs:
    """Takes events as they come, and gives them back as records once nothing can be added to them."""

    def __init__(self, coalesce: bool) -> None:
        self._coalesce = coalesce
        self._held = np.zeros(0, EVENT)

    def put(self, events: Events, horizon_ns: int | None) -> tuple[Records, int]:
        """Returns the records of events up to `horizon_ns` (None: all), and the time before which no other will come."""
        now_ns = _NEVER if horizon_ns is None else horizon_ns
        held = np.concatenate((self._held, events))
        if not len(held):
            return no_records(), now_ns
        held = held[np.lexsort((held["t_ns"], held["tid"]))]
        later = held["t_ns"] > np.uint64(now_ns)  # others may come before them
        held, later = held[~later], held[later]
        # Before any is given back: the last access of a thread, which is held, may say what the one before it was.
        again = _settled(held)
        ready = _ready(held, now_ns)
        self._held = np.concatenate((held[~ready], later))
        if len(self._held):
            now_ns = min(now_ns, int(self._held["t_ns"].min()) - 1)
        return _records(held[ready], again[ready], self._coalesce), now_ns


def _ready(events: Events, now_ns: int) -> Mask:
    """Which events (by thread and time) are old enough: all but the last access of a thread and what follows it."""
    if now_ns == _NEVER or not len(events):
        return np.ones(len(events), bool)
    last = np.concatenate((events["tid"][1:] != events["tid"][:-1], [True]))
    is_access = events["kind"] != FILLS
    index = np.arange(len(events))
    accessed = np.maximum.accumulate(np.where(is_access, index, -1))
    # Of every thread, the index of its last access; a thread with fills only keeps them all.
    first = np.concatenate(([0], np.flatnonzero(last)[:-1] + 1))
    open_from = np.maximum(accessed[last], first)
    length = np.diff(np.concatenate((first, [len(events)])))
    is_open = index >= np.repeat(open_from, length)
    ready: Mask = ~is_open | (events["t_ns"] + np.uint64(HOLD_NS) < np.uint64(now_ns))
    return ready


def _settled(events: Events) -> Mask:
    """Has each part of a request name only its own blocks; returns which faults are told again by what follows.

    `events`: by thread, within it by time; what was settled before stays as it is.
    """
    access = np.flatnonzero(events["kind"] != FILLS)
    rows = events[access]
    _cut_continued(rows)
    events["end"][access] = rows["end"]
    again = np.zeros(len(events), bool)
    again[access] = _told_again(rows)
    return again


def _records(events: Events, again: Mask, coalesce: bool) -> Records:
    """`events`: by thread, within it by time; `again` of `_settled`. Returns records, not in order."""
    is_fill = events["kind"] == FILLS
    access = np.flatnonzero(~is_fill)
    before = np.maximum.accumulate(np.where(is_fill, -1, np.arange(len(events))))
    fills = _fills(events, np.flatnonzero(is_fill), before)
    if not len(access):
        return fills
    kept = access[~again[access]]
    made = _described(events[kept])
    if coalesce:
        made = _joined(made, events["tid"][kept], np.cumsum(is_fill)[kept])
    return np.concatenate((fills, made))


def _fills(events: Events, at: NDArray[np.intp], before: NDArray[np.intp]) -> Records:
    """Fills, at the time of the fault they are for: it is told before them, a request to read after."""
    made = _described(events[at])
    made["kind"], made["op"], made["aux"] = FILL, READ, 0
    cause = before[at]
    for_fault = cause >= 0
    causes = events[np.maximum(cause, 0)]
    for_fault &= (causes["kind"] == FAULTS) & (causes["tid"] == events["tid"][at]) & _same_file(causes, events[at])
    made["t_ns"] = np.where(for_fault, causes["t_ns"], made["t_ns"])
    return made


def _cut_continued(rows: Events) -> None:
    """A large request is told in several events, each naming what is left: each then gets what the next does not name."""
    now, before = rows[1:], rows[:-1]
    goes_on = (now["kind"] == READS) & (before["kind"] == READS) & (now["tid"] == before["tid"])
    goes_on &= _same_file(now, before) & (now["end"] == before["end"]) & (now["first"] > before["first"])
    rows["end"][:-1][goes_on] = now["first"][goes_on]


def _told_again(rows: Events) -> Mask:
    """Faults that are told again when their page has come, or that are within what is mapped around them next."""
    told = np.zeros(len(rows), bool)
    now, after = rows[:-1], rows[1:]
    inside = (after["first"] <= now["first"]) & (now["first"] < after["end"])
    followed = (after["kind"] == FAULTS) | (after["kind"] == AROUNDS)
    told[:-1] = (now["kind"] == FAULTS) & followed & (now["tid"] == after["tid"]) & _same_file(now, after) & inside
    return told


def _described(events: Events) -> Records:
    made = no_records(len(events))
    for name in ("t_ns", "dev", "inode", "first", "pid"):
        made[name] = events[name]
    made["count"] = events["end"] - events["first"]
    made["aux"] = 1
    made["op"] = np.where((events["kind"] == FAULTS) | (events["kind"] == AROUNDS), MAP, READ)
    made["miss"], made["kind"] = UNKNOWN, ACCESS
    made["flags"] = np.select([events["kind"] == AROUNDS, events["kind"] == DIRECTS], [AROUND, DIRECT], 0)
    return made


def _joined(made: Records, tid: NDArray[Any], filled: NDArray[Any]) -> Records:
    """Joins accesses of a thread to adjacent blocks within a millisecond, unless something was filled between them."""
    if not len(made):
        return made
    now, before = made[1:], made[:-1]
    adjacent = (now["first"] == before["first"] + before["count"]) & _same_file(now, before)
    alike = (now["op"] == before["op"]) & (now["flags"] == before["flags"]) & (tid[1:] == tid[:-1])
    soon = now["t_ns"] // np.uint64(_AGE_NS) == before["t_ns"] // np.uint64(_AGE_NS)
    begins = np.flatnonzero(np.concatenate(([True], ~(adjacent & alike & soon & (filled[1:] == filled[:-1])))))
    joined = made[begins]
    joined["count"] = np.add.reduceat(made["count"], begins)
    joined["aux"] = np.add.reduceat(made["aux"], begins)
    return joined


def _same_file(one: Events | Records, other: Events | Records) -> Mask:
    same: Mask = (one["inode"] == other["inode"]) & (one["dev"] == other["dev"])
    return same
