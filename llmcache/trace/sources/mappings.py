"""Which file a page fault is in: the mappings of processes, by address and time."""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcache.trace.record import BLOCK_BYTES

Uint64s = NDArray[np.uint64]
FORK, MMAP = 7, 10  # PERF_RECORD_FORK, PERF_RECORD_MMAP2
_NAME = 64  # where the name begins in the latter


@dataclass(frozen=True, order=True)
class Mapping:
    """Addresses `low` .. `high` - 1; inode 0 for memory without a file. `block`: that of the file at `low`."""

    low: int
    high: int
    dev: int = 0
    inode: int = 0
    block: int = 0


class Space:
    """The address space of a process."""

    def __init__(self, mappings: list[Mapping] | None = None) -> None:
        self.mappings = mappings or []
        self._table: Uint64s | None = None

    def put(self, new: Mapping) -> None:
        """Take a mapping, which replaces what was there."""
        self._table = None
        at = max(0, bisect_left(self.mappings, Mapping(new.low, 0)) - 1)
        end = bisect_right(self.mappings, Mapping(new.high, 0))
        for old in self.mappings[at:end]:
            if old.low < new.high and new.low < old.high:
                self.mappings.remove(old)
                if old.low < new.low:
                    insort(self.mappings, Mapping(old.low, new.low, old.dev, old.inode, old.block))
                if new.high < old.high:
                    block = old.block + (new.high - old.low) // BLOCK_BYTES
                    insort(self.mappings, Mapping(new.high, old.high, old.dev, old.inode, block))
        insort(self.mappings, new)

    def files(self, address: Uint64s) -> tuple[Uint64s, Uint64s, Uint64s]:
        """Returns device, inode and block of each address; inode 0 where there is no file."""
        if not self.mappings:
            nothing = np.zeros(len(address), np.uint64)
            return nothing, nothing, nothing
        if self._table is None:
            rows = [(each.low, each.high, each.dev, each.inode, each.block) for each in self.mappings]
            self._table = np.array(rows, np.uint64).T
        low, high, dev, inode, block = self._table
        at = np.maximum(np.searchsorted(low, address, "right").astype(np.int64) - 1, 0)
        inside = (low[at] <= address) & (address < high[at])
        blocks = block[at] + (address - low[at]) // np.uint64(BLOCK_BYTES)
        return dev[at], np.where(inside, inode[at], np.uint64(0)), blocks


def space_of(pid: int) -> Space:
    """The address space of process `pid` as it is now; empty if it is gone or belongs to somebody else."""
    found = []
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                span, _, offset, device, inode = line.split(None, 5)[:5]
                low, _, high = span.partition("-")
                dev = _dev(*(int(part, 16) for part in device.split(":")))
                found.append(Mapping(int(low, 16), int(high, 16), dev, int(inode), int(offset, 16) // BLOCK_BYTES))
    except OSError:
        return Space()
    return Space(found)


class Spaces:
    """The address spaces of all recorded processes, kept up to date by the kernel's records of mappings and forks."""

    def __init__(self) -> None:
        self.paths: dict[tuple[int, int], str] = {}
        self._by_pid: dict[int, Space] = {}
        self._changes: list[tuple[int, int, Mapping | int]] = []  # time, process, its new mapping or its parent

    def look(self, pid: int) -> None:
        """Take the mappings that `pid` has now."""
        self._by_pid[pid] = space_of(pid)

    def note(self, kind: int, record: bytes) -> None:
        """Take a record of perf events, without its header, that has process and time (`sample_id_all`) at its end."""
        (t_ns,) = struct.unpack_from("<Q", record, len(record) - 8)
        if kind == FORK:
            pid, parent = struct.unpack_from("<II", record)
            if pid != parent:
                self._changes.append((t_ns, pid, parent))
        elif kind == MMAP:
            pid, _, low, length, offset, major, minor, inode = struct.unpack_from("<IIQQQIIQ", record)
            mapping = Mapping(low, low + length, _dev(major, minor), inode, offset // BLOCK_BYTES)
            self._changes.append((t_ns, pid, mapping))
            if inode:
                path, _, _ = record[_NAME:].partition(b"\0")
                self.paths[mapping.dev, inode] = os.fsdecode(path)

    def files(self, pid: Uint64s, t_ns: Uint64s, address: Uint64s) -> tuple[Uint64s, Uint64s, Uint64s]:
        """Returns device, inode and block of faults that ascend in time; inode 0 for those in no file."""
        found = np.zeros((3, len(pid)), np.uint64)
        begin = 0
        for when, process, change in sorted(self._changes, key=lambda each: each[0]):
            end = int(np.searchsorted(t_ns, np.uint64(when)))
            self._fill(found[:, begin:end], pid[begin:end], address[begin:end])
            begin = end
            self._apply(process, change)
        self._changes = []
        self._fill(found[:, begin:], pid[begin:], address[begin:])
        dev, inode, block = found
        return dev, inode, block

    def _apply(self, pid: int, change: Mapping | int) -> None:
        if isinstance(change, int):
            parent = self._by_pid.get(change)
            self._by_pid[pid] = Space(list(parent.mappings)) if parent else space_of(pid)
        else:
            self._by_pid.setdefault(pid, Space()).put(change)

    def _fill(self, found: Uint64s, pid: Uint64s, address: Uint64s) -> None:
        for process in np.unique(pid).tolist():
            mine = pid == process
            if process not in self._by_pid:
                self.look(process)
            found[:, mine] = self._by_pid[process].files(address[mine])


def _dev(major: int, minor: int) -> int:
    return os.makedev(major, minor)
