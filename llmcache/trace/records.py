"""Records of block accesses: their layout, their source, their order, and hit or miss.

If a block was read from storage since its last access, by readahead or for the access itself, its next access is a MISS;
otherwise it is a HIT. So misses are comparable with those of a simulated cache, which has no readahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llmcache.arrays import Int64s, Records, Uint64s
from llmcache.errors import MissingRequirement
from llmcache.trace.record import HIT, MISS, UNKNOWN, WRITE

POLL_S = 0.02  # interval at which a source is drained: short enough for the buffers, at negligible cost
Key = tuple[int, int]  # device and inode

# The kinds of record. FILL and EVICT are page-cache events on accessed files, whichever process caused them.
ACCESS, FILL, EVICT, BLOCK, SAMPLED = range(5)

# Bits of `flags`.
DIRECT = 1  # O_DIRECT: bypasses the page cache
AROUND = 2  # mapped together with a faulting page: the process may not have touched every block
STORED = 4  # a write through a mapping: recorded when a clean folio becomes dirty, for the whole folio
MATCHED = 8  # in BLOCK records: dev, inode and first are those of the file, not of the disk
COPIED = 16  # only in the ring: the record may come again, with more blocks (bpf/flush.h)

RECORD = np.dtype(
    [
        ("t_ns", "<u8"),  # CLOCK_MONOTONIC: access to the first block of the run; in BLOCK records, completion
        ("first", "<u8"),  # first block (4096 bytes) in the file; in BLOCK records without MATCHED, on the disk
        ("inode", "<u8"),  # 0 in BLOCK records without MATCHED
        ("dev", "<u8"),  # st_dev of the file system; in BLOCK records without MATCHED, of the disk
        ("count", "<u4"),  # blocks in the run, at least 1
        ("pid", "<u4"),  # process (not thread) in the recorder's pid namespace; 0 if unknown
        ("aux", "<u4"),  # ACCESS: requests merged into the run; BLOCK: latency in microseconds; else 0
        ("op", "u1"),  # READ, WRITE or MAP of llmcache.trace.record; FILL: READ; EVICT: READ; BLOCK: READ or WRITE
        ("miss", "u1"),  # HIT, MISS or UNKNOWN of llmcache.trace.record; only for ACCESS, else UNKNOWN
        ("kind", "u1"),  # ACCESS .. SAMPLED
        ("flags", "u1"),
    ]
)


def no_records(rows: int = 0) -> Records:
    """Return zeroed records."""
    return np.zeros(rows, RECORD)


def distinct_files(dev: Uint64s, inode: Uint64s) -> tuple[Int64s, Int64s]:
    """Return a row of each distinct (dev, inode), and the position of each row's pair among them."""
    if (inode == inode[0]).all() and (dev == dev[0]).all():
        return np.zeros(1, np.int64), np.zeros(len(dev), np.int64)
    order = np.lexsort((inode, dev))
    begins = np.append(True, (dev[order][1:] != dev[order][:-1]) | (inode[order][1:] != inode[order][:-1]))
    index = np.empty(len(dev), np.int64)
    index[order] = np.cumsum(begins) - 1
    return order[begins], index


class TimeOrder:
    """Merges records by time; they wait until no older ones can arrive."""

    def __init__(self) -> None:
        self._waiting = no_records()
        self._horizon = np.uint64(0)

    def put(self, records: Records, horizon_ns: int | None) -> Records:
        """Add `records`; return those up to `horizon_ns` (None: all), sorted by time.

        Fills precede accesses of equal time. A record older than the previous horizon gets its time.
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
    """The processes to record, and with `follow` the children they start.

    If `rerefs_s` is above 0, SAMPLED records are made at that interval; `coalesce` merges adjacent blocks.
    """

    targets: Sequence[int]
    follow: bool = True
    writes: bool = False
    block: bool = False
    rerefs_s: float = 0.0
    coalesce: bool = True

    def missing(self) -> MissingRequirement:
        message = f"process {', '.join(map(str, self.targets))} does not exist"
        return MissingRequirement(message, "list processes with: ps -e")


class Source(ABC):
    """A tier. The caller calls `start`, `drain` every POLL_S seconds, `stop`, and `drain` once more, all in one thread."""

    name: ClassVar[str]  # its key in SOURCES of llmcache.trace.kernel
    sees: ClassVar[str]
    cannot_see: ClassVar[str]
    pages: ClassVar[bool]  # sees fills and evictions, and touches of mapped pages
    requests: ClassVar[bool]  # sees requests of the block layer

    def __init__(self) -> None:
        self.remarks: list[str] = []  # further limits of this recording: parts of the scope that do not work here
        self.paths: dict[Key, str] = {}  # the paths that the source knows; the caller looks up the others
        self._order = TimeOrder()
        self._lost = 0
        self._stopped = False

    @classmethod
    @abstractmethod
    def probe(cls) -> str | None:
        """Return why the tier cannot work now ("needs root"), or None. No side effects."""

    @abstractmethod
    def start(self, scope: Scope) -> None:
        """Raise MissingRequirement if the kernel refuses, or no target runs."""

    @abstractmethod
    def drain(self) -> Records:
        """Return the new finished records, after `stop` all; `t_ns` ascends across calls too."""

    @abstractmethod
    def alive(self) -> bool: ...

    @property
    @abstractmethod
    def lost(self) -> int:
        """Return the number of events known to be lost."""

    @abstractmethod
    def stop(self) -> None:
        """Stop recording, except for one more `drain`. May be called twice, or before `start`."""


class Residency:
    """The blocks, by file, that were filled and not accessed since."""

    def __init__(self) -> None:
        self._fresh: dict[Key, Int64s] = {}

    def mark(self, records: Records) -> Records:
        """Set `miss` of the accesses, which ascend in time; split runs that are partly a miss."""
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
        """Return the parts that replace the rows of one file with misses, and their row indices (ascending)."""
        fresh = self._fresh.pop(key, np.empty(0, np.int64))
        mine = records[rows]
        if not len(fresh) and not (mine["kind"] == FILL).any():
            return None
        # Expand rows to blocks, sorted by block, then by time. Blocks in `fresh` are fills that precede all rows.
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
    replaced = np.concatenate([rows for rows, _ in split])
    keep = np.ones(len(records), bool)
    keep[replaced] = False
    index = np.concatenate((np.flatnonzero(keep), replaced))
    merged = np.concatenate((records[keep], *(parts for _, parts in split)))
    return merged[np.argsort(index, kind="stable")]


def unknown(records: Records) -> Records:
    """Set `miss` to UNKNOWN for sources that see no fills; O_DIRECT is still a MISS."""
    access = records["kind"] == ACCESS
    records["miss"][access] = UNKNOWN
    records["miss"][access & (records["flags"] & DIRECT != 0)] = MISS
    return records
