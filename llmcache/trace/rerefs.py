"""Samples of the page tables' accessed bits: which mapped file blocks were touched again (x86-64).

Page faults show only the first access to a page. Each sample reads and clears the accessed bits (clear_refs), which costs
the process a TLB flush, and page reclaim loses them. A sample does not show when or how often a block was touched; a huge
page has one bit for all its blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmcache.arrays import Flags, Records
from llmcache.bpf.pagetables import ACCESSED, HUGE, PRESENT, TABLE_BYTES, TABLES, PageTables
from llmcache.procfs import FileMapping, descendants, mappings
from llmcache.trace.record import MAP, UNKNOWN
from llmcache.trace.records import SAMPLED, no_records
from llmcache.units import BLOCK_BYTES

_CLEAR_MAPPED = "3"  # the accessed bits of file mappings


class Sampler:
    """A sampler of processes, with `follow` also of their children; Unreadable if impossible."""

    def __init__(self, pids: Sequence[int], interval_s: float, follow: bool = False) -> None:
        self._pids, self._interval_s, self._follow = list(pids), interval_s, follow
        self._pages = PageTables()
        self._tables = np.frombuffer(self._pages.tables, np.uint64).reshape(TABLES, 512)
        self._entries = np.frombuffer(self._pages.entries, np.uint64)
        self._clear()
        self._next_s = time.monotonic() + interval_s

    def sample(self) -> Records:
        if time.monotonic() < self._next_s:
            return no_records()
        found = [self._touched(pid, mapping) for pid in self._pids for mapping in mappings(pid) if mapping.inode]
        self._clear()
        self._next_s = time.monotonic() + self._interval_s
        return np.concatenate(found) if found else no_records()

    def close(self) -> None:
        self._pages.close()

    def _clear(self) -> None:
        if self._follow:
            self._pids = list(dict.fromkeys(one for pid in self._pids for one in descendants(pid)))
        for pid in list(self._pids):
            try:
                Path(f"/proc/{pid}/clear_refs").write_text(_CLEAR_MAPPED)
            except OSError:
                self._pids.remove(pid)  # it has ended

    def _touched(self, pid: int, mapping: FileMapping) -> Records:
        begin = mapping.low // TABLE_BYTES * TABLE_BYTES
        count = -(-(mapping.high - begin) // TABLE_BYTES)
        bits = []
        for at in range(0, count, TABLES):
            now = min(TABLES, count - at)
            if not self._pages.copy(pid, begin + at * TABLE_BYTES, now):
                return no_records()
            bits.append(self._accessed(now))
        offset = (mapping.low - begin) // BLOCK_BYTES
        accessed = np.concatenate(bits).reshape(-1)[offset : offset + (mapping.high - mapping.low) // BLOCK_BYTES]
        return _runs(pid, mapping, accessed)

    def _accessed(self, count: int) -> Flags:
        entries, tables = self._entries[:count], self._tables[:count]
        huge = entries & (PRESENT | HUGE) == PRESENT | HUGE
        small = (entries & PRESENT != 0) & ~huge
        both = PRESENT | ACCESSED
        accessed: Flags = (tables & both == both) & small[:, None]
        accessed[huge & (entries & ACCESSED != 0)] = True
        return accessed


def _runs(pid: int, mapping: FileMapping, accessed: Flags) -> Records:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], accessed, [False])).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    records = no_records(len(starts))
    records["t_ns"] = time.monotonic_ns()
    records["first"] = mapping.block + starts
    records["count"] = ends - starts
    for name, value in (("dev", mapping.dev), ("inode", mapping.inode), ("pid", pid)):
        records[name] = value
    records["op"], records["miss"], records["kind"] = MAP, UNKNOWN, SAMPLED
    return records
