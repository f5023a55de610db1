"""What every source of live records offers: `Source`, what to record (`Scope`), and one record (`RECORD`).

A source records file blocks touched by some processes. Whoever uses it calls probe(), start(), drain() about every
`POLL_S` seconds, stop(), and drain() once more for the rest. All from one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llmcache.arrays import Int64s, Records, Uint64s
from llmcache.errors import EnvironmentProblem

POLL_S = 0.02  # how often drain() is called: often enough for the buffers, seldom enough to cost nothing

# The kinds of record. FILL and EVICT tell what the page cache did, whoever caused it, for files that were accessed.
ACCESS, FILL, EVICT, BLOCK, SAMPLED = range(5)

# Bits of `flags`.
DIRECT = 1  # O_DIRECT: past the page cache, always from or to storage
AROUND = 2  # mapped together with the page that faulted: the process may not have touched every block
STORED = 4  # a write through a mapping: seen when a clean page becomes dirty, whole folios
MATCHED = 8  # of a BLOCK record: dev, inode and first are those of the file, not of the disk

RECORD = np.dtype(
    [
        ("t_ns", "<u8"),  # CLOCK_MONOTONIC, when the first block of the run was touched; of a BLOCK record, its completion
        ("first", "<u8"),  # first block (4096 bytes) in the file; in the device, of a BLOCK record that is not MATCHED
        ("inode", "<u8"),  # inode number; 0 of a BLOCK record that is not MATCHED
        ("dev", "<u8"),  # the file system's device, as os.stat tells it in st_dev; the disk's, of an unmatched BLOCK
        ("count", "<u4"),  # blocks in the run, at least 1
        ("pid", "<u4"),  # process (not thread), as its number is in the recorder's pid namespace; 0 if unknown
        ("aux", "<u4"),  # ACCESS: requests merged into the run; BLOCK: latency in microseconds; else 0
        ("op", "u1"),  # READ, WRITE or MAP of llmcache.trace.record; FILL: READ; EVICT: READ; BLOCK: READ or WRITE
        ("miss", "u1"),  # HIT, MISS or UNKNOWN of llmcache.trace.record; only for ACCESS, else UNKNOWN
        ("kind", "u1"),  # ACCESS .. SAMPLED
        ("flags", "u1"),
    ]
)


@dataclass(frozen=True)
class Scope:
    """What to record: `targets` are process ids; all their threads, and with `follow` all children to come as well.

    `rerefs_s` > 0 asks for SAMPLED records at that interval; `coalesce` merges adjacent blocks into runs.
    """

    targets: Sequence[int]
    follow: bool = True
    writes: bool = False
    block: bool = False
    rerefs_s: float = 0.0
    coalesce: bool = True


def not_there(pids: Sequence[int]) -> EnvironmentProblem:
    """Returns the error that none of the processes to record runs."""
    return EnvironmentProblem(f"process {', '.join(map(str, pids))} is not there", "list processes with: ps -e")


class Source(ABC):
    """A way to see block accesses of running processes.

    `name` is its key in SOURCES; `sees` and `cannot_see` are sentences for the terminal and for the trace's note.
    `offers` names the fields of `Scope` that it can grant.
    """

    name: ClassVar[str]
    sees: ClassVar[str]
    cannot_see: ClassVar[str]
    offers: ClassVar[frozenset[str]]

    @classmethod
    @abstractmethod
    def probe(cls) -> str | None:
        """Why this source cannot work here and now ("needs root", …), or None if it can. Leaves nothing behind."""

    @abstractmethod
    def start(self, scope: Scope) -> None:
        """Begin to record; when it returns, accesses are being seen. EnvironmentProblem if that is impossible."""

    @abstractmethod
    def drain(self) -> Records:
        """All finished records since the last call, ascending in t_ns within and across calls; often none.

        After stop(), the first call returns the rest.
        """

    @abstractmethod
    def alive(self) -> bool:
        """Whether any process that is recorded still runs."""

    @property
    @abstractmethod
    def lost(self) -> int:
        """Events known to have been lost since start()."""

    @property
    def paths(self) -> Mapping[tuple[int, int], str]:
        """Paths by (dev, inode) of files that the source was told the names of; others are looked up by whoever uses it."""
        return {}

    @property
    def remarks(self) -> Sequence[str]:
        """What a reader of this recording must know beyond `cannot_see`: parts of the scope that could not be granted."""
        return ()

    @abstractmethod
    def stop(self) -> None:
        """Detach everything. May be called more than once, and without start()."""


def no_records(rows: int = 0) -> Records:
    """Zeroed records, by default none."""
    return np.zeros(rows, RECORD)


def distinct_files(dev: Uint64s, inode: Uint64s) -> tuple[Int64s, Int64s]:
    """Returns a row of each distinct (dev, inode), and for all rows, at least one, which of those it is."""
    if (inode == inode[0]).all() and (dev == dev[0]).all():
        return np.zeros(1, np.int64), np.zeros(len(dev), np.int64)
    order = np.lexsort((inode, dev))
    begins = np.append(True, (dev[order][1:] != dev[order][:-1]) | (inode[order][1:] != inode[order][:-1]))
    index = np.empty(len(dev), np.int64)
    index[order] = np.cumsum(begins) - 1
    return order[begins], index


class TimeOrder:
    """Brings records of several buffers into the order of time: holds them back until nothing older can come."""

    def __init__(self) -> None:
        self._waiting = no_records()
        self._horizon = np.uint64(0)

    def put(self, records: Records, horizon_ns: int | None) -> Records:
        """Returns, in order of time, what was put so far up to `horizon_ns`; all of it for None.

        At the same time fills come first: they preceded the access. A record older than the horizon before, which a
        machine that stood still can cause, gets the time of that horizon.
        """
        rows = np.concatenate((self._waiting, records)) if len(records) else self._waiting
        if not len(rows):
            return rows
        np.maximum(rows["t_ns"], self._horizon, out=rows["t_ns"])
        order = np.lexsort((rows["kind"] != FILL, rows["t_ns"]))
        rows = rows[order]
        split = len(rows)
        if horizon_ns is not None:
            self._horizon = max(self._horizon, np.uint64(max(horizon_ns, 0)))
            split = int(np.searchsorted(rows["t_ns"], self._horizon, "right"))
        self._waiting = rows[split:]
        return rows[:split]
