"""Records of block accesses: who brings them (`Source`), their layout, their order, and hit or miss.

Hit or miss is told by the fills and evictions between accesses. A block that was read from storage since its last access,
by readahead or for the access itself, is a MISS at its next access; every other block is a HIT. So misses are comparable
with those of a simulated cache, which has no readahead, and every block that was read and used counts once, whichever
thread, io_uring worker or fault brought it in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llmcache.arrays import Int64s, Records, Uint64s
from llmcache.errors import EnvironmentProblem
from llmcache.trace.record import HIT, MISS, UNKNOWN, WRITE

POLL_S = 0.02  # how often a source is drained: often enough for the buffers, seldom enough to cost nothing
Key = tuple[int, int]  # device and inode

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

    def nobody(self) -> EnvironmentProblem:
        """Returns the error that none of the targets runs."""
        said = f"process {', '.join(map(str, self.targets))} does not exist"
        return EnvironmentProblem(said, "list processes with: ps -e")


class Source(ABC):
    """A tier. Its user calls start(), drain() about every POLL_S seconds, stop(), and drain() once more: in one thread.

    `sees` and `cannot_see` are sentences for the terminal and for the trace's note.
    """

    name: ClassVar[str]  # its key in SOURCES of llmcache.trace.kernel
    sees: ClassVar[str]
    cannot_see: ClassVar[str]
    pages: ClassVar[bool]  # sees fills and evictions, and touches of mapped pages
    requests: ClassVar[bool]  # sees requests of the block layer

    def __init__(self) -> None:
        self.remarks: list[str] = []  # what a reader must know beyond `cannot_see`: parts of the scope that were refused
        self.paths: dict[Key, str] = {}  # of files that it was told the names of; others are looked up by its user
        self._order = TimeOrder()
        self._lost = 0
        self._stopped = False

    @classmethod
    @abstractmethod
    def probe(cls) -> str | None:
        """Why it cannot work here and now ("needs root", …), or None if it can. Leaves nothing."""

    @abstractmethod
    def start(self, scope: Scope) -> None:
        """Accesses are seen from now on. EnvironmentProblem if the kernel refuses, or none of the targets is there."""

    @abstractmethod
    def drain(self) -> Records:
        """All finished records since the last call, ascending in t_ns within and across calls; after stop() the rest."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether any process that is recorded still runs."""

    @property
    @abstractmethod
    def lost(self) -> int:
        """Events known to have been lost since start()."""

    @abstractmethod
    def stop(self) -> None:
        """Detaches; what was recorded stays until the next drain(). May be called again, and without start()."""


class Residency:
    """Remembers, by file, the blocks that were filled and not accessed since."""

    def __init__(self) -> None:
        self._fresh: dict[Key, Int64s] = {}

    def mark(self, records: Records) -> Records:
        """Sets `miss` of the accesses among `records`, which are in order; splits those that are partly a miss."""
        relevant = (records["kind"] <= EVICT) & (records["flags"] & DIRECT == 0)
        access = records["kind"] == ACCESS
        records["miss"][access] = HIT
        records["miss"][access & (records["flags"] & DIRECT != 0) & (records["op"] != WRITE)] = MISS
        rows = np.flatnonzero(relevant)
        if not len(rows):
            return records
        dev, inode = records["dev"][rows], records["inode"][rows]
        first, index = distinct_files(dev, inode)
        keys = zip(dev[first].tolist(), inode[first].tolist(), strict=True)
        of_files = np.split(rows[np.argsort(index, kind="stable")], np.cumsum(np.bincount(index))[:-1])
        pieces = [self._mark_file(key, records, mine) for key, mine in zip(keys, of_files, strict=True)]
        split = [piece for piece in pieces if piece is not None]
        return _spliced(records, split) if split else records

    def _mark_file(self, key: Key, records: Records, rows: Int64s) -> tuple[Int64s, Records] | None:
        """Indices of the rows of one file that have misses, ascending and repeated, and the records that stand for them."""
        fresh = self._fresh.pop(key, np.empty(0, np.int64))
        mine = records[rows]
        if not len(fresh) and not (mine["kind"] == FILL).any():
            return None
        # Block by block, sorted by block and within it by time; what was fresh before is a fill that precedes all rows.
        counts = mine["count"].astype(np.int64)
        row = np.repeat(np.arange(len(rows)), counts)
        block = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - mine["first"].astype(np.int64), counts)
        blocks = np.concatenate((fresh, block))
        kinds = np.concatenate((np.full(len(fresh), FILL), mine["kind"][row]))
        order = np.argsort(blocks, kind="stable")
        blocks, kinds = blocks[order], kinds[order]
        same = blocks[1:] == blocks[:-1]
        remaining = blocks[np.append(~same, True) & (kinds == FILL)]
        if len(remaining):
            self._fresh[key] = remaining
        missed = np.zeros(len(blocks), bool)
        missed[order] = np.append(False, same & (kinds[:-1] == FILL)) & (kinds == ACCESS)
        missed = missed[len(fresh) :]
        touched = np.zeros(len(rows), bool)
        touched[row[missed]] = True
        inside = (touched & (mine["kind"] == ACCESS) & (mine["op"] != WRITE))[row]
        if not inside.any():
            return None
        row, missed, block = row[inside], missed[inside], block[inside]
        at = np.flatnonzero(np.append(True, (row[1:] != row[:-1]) | (missed[1:] != missed[:-1])))
        parts = mine[row[at]]
        parts["first"] = block[at]
        parts["count"] = np.diff(np.append(at, len(row)))
        parts["miss"] = np.where(missed[at], MISS, HIT)
        parts["aux"][np.append(False, row[at][1:] == row[at][:-1])] = 0
        return rows[row[at]], parts


def _spliced(records: Records, split: list[tuple[Int64s, Records]]) -> Records:
    """`records` with some rows replaced by parts, in the same order."""
    replaced = np.concatenate([rows for rows, _ in split])
    keep = np.ones(len(records), bool)
    keep[replaced] = False
    index = np.concatenate((np.flatnonzero(keep), replaced))
    merged = np.concatenate((records[keep], *(parts for _, parts in split)))
    return merged[np.argsort(index, kind="stable")]


def unknown(records: Records) -> Records:
    """`records` with every access UNKNOWN, for sources that see no fills; O_DIRECT is a MISS all the same."""
    access = records["kind"] == ACCESS
    records["miss"][access] = UNKNOWN
    records["miss"][access & (records["flags"] & DIRECT != 0)] = MISS
    return records
