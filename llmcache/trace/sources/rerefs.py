"""Which mapped file blocks were touched again: accessed bits of page tables, sampled (x86-64).

Page faults tell only the first touch of a page. Here the processor's own mark is read: at each sample the bits set since
the one before become SAMPLED records, and the bits are cleared (clear_refs), which costs the process a TLB flush and the
kernel its knowledge of what was used lately. A sample says that a block was touched in the interval, not when or how
often; huge pages have one bit for all their blocks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcache.bpf.pagetables import ACCESSED, HUGE, PAGE, PRESENT, TABLE_BYTES, TABLES, PageTables
from llmcache.trace.record import MAP, UNKNOWN
from llmcache.trace.sources.base import SAMPLED, Records, no_records

_PRESENT, _ACCESSED, _HUGE = np.uint64(PRESENT), np.uint64(ACCESSED), np.uint64(HUGE)
_CLEAR_MAPPED = "3"  # the accessed bits of file mappings


@dataclass(frozen=True)
class Mapping:
    """A file mapped by a process: addresses, and the first block in the file."""

    pid: int
    start: int
    end: int
    first: int
    dev: int
    inode: int


def file_mappings(pid: int) -> Iterator[Mapping]:
    """The file mappings of a process; none if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        addresses, _, offset, device, inode, *_ = line.split(None, 5)
        if inode != "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            major, minor = (int(number, 16) for number in device.split(":"))
            yield Mapping(pid, start, end, int(offset, 16) // PAGE, os.makedev(major, minor), int(inode))


def descendants(pid: int) -> Iterator[int]:
    """The process and all its children, theirs too."""
    yield pid
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = entry.read_text().split()
        except OSError:
            continue  # that thread has ended
        for child in children:
            yield from descendants(int(child))


class Sampler:
    """Samples the processes `pids` every `interval_s`, with `follow` their children too; Unreadable where impossible."""

    def __init__(self, pids: Sequence[int], interval_s: float, follow: bool = False) -> None:
        self._pids, self._interval_s, self._follow = list(pids), interval_s, follow
        self._pages = PageTables()
        self._tables = np.frombuffer(self._pages.tables, np.uint64).reshape(TABLES, 512)
        self._entries = np.frombuffer(self._pages.entries, np.uint64)
        self._clear()
        self._next_s = time.monotonic() + interval_s

    def sample(self) -> Records:
        """SAMPLED records of the interval that ended, if one did."""
        if time.monotonic() < self._next_s:
            return no_records()
        found = [self._touched(mapping) for pid in self._pids for mapping in file_mappings(pid)]
        self._clear()
        self._next_s = time.monotonic() + self._interval_s
        return np.concatenate(found) if found else no_records()

    def close(self) -> None:
        """Give the programs back."""
        self._pages.close()

    def _clear(self) -> None:
        if self._follow:
            self._pids = list(dict.fromkeys(one for pid in self._pids for one in descendants(pid)))
        for pid in list(self._pids):
            try:
                Path(f"/proc/{pid}/clear_refs").write_text(_CLEAR_MAPPED)
            except OSError:
                self._pids.remove(pid)  # it has ended

    def _touched(self, mapping: Mapping) -> Records:
        begin = mapping.start // TABLE_BYTES * TABLE_BYTES
        count = -(-(mapping.end - begin) // TABLE_BYTES)
        bits = []
        for at in range(0, count, TABLES):
            now = min(TABLES, count - at)
            if not self._pages.copy(mapping.pid, begin + at * TABLE_BYTES, now):
                return no_records()
            bits.append(self._accessed(now))
        offset = (mapping.start - begin) // PAGE
        accessed = np.concatenate(bits).reshape(-1)[offset : offset + (mapping.end - mapping.start) // PAGE]
        return _runs(mapping, accessed)

    def _accessed(self, count: int) -> NDArray[np.bool_]:
        entries, tables = self._entries[:count], self._tables[:count]
        huge = entries & (_PRESENT | _HUGE) == _PRESENT | _HUGE
        small = (entries & _PRESENT != 0) & ~huge
        both = _PRESENT | _ACCESSED
        accessed: NDArray[np.bool_] = (tables & both == both) & small[:, None]
        accessed[huge & (entries & _ACCESSED != 0)] = True
        return accessed


def _runs(mapping: Mapping, accessed: NDArray[np.bool_]) -> Records:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], accessed, [False])).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    records = no_records(len(starts))
    records["t_ns"] = time.monotonic_ns()
    records["first"] = mapping.first + starts
    records["count"] = ends - starts
    for name, value in (("dev", mapping.dev), ("inode", mapping.inode), ("pid", mapping.pid)):
        records[name] = value
    records["op"], records["miss"], records["kind"] = MAP, UNKNOWN, SAMPLED
    return records
