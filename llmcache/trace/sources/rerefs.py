"""Which mapped file blocks were touched again: accessed bits of page tables, sampled (x86-64).

Page faults tell only the first touch of a page. Here the processor's own mark is read: at each sample the bits set since
the one before become SAMPLED records, and the bits are cleared (clear_refs), which costs the process a TLB flush and the
kernel its knowledge of what was used lately. A sample says that a block was touched in the interval, not when or how
often; huge pages have one bit for all their blocks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcache.bpf.libbpf import OBJECTS, BpfObject, LoadFailure
from llmcache.trace.record import MAP, UNKNOWN
from llmcache.trace.sources.base import SAMPLED, Records, no_records

OBJECT = OBJECTS / "pagewalk.bpf.o"
_TABLES = 512
_TABLE_BYTES = 2 << 20  # addresses that one page table maps
_PAGE = 4096
_PRESENT, _ACCESSED, _HUGE = np.uint64(1), np.uint64(1 << 5), np.uint64(1 << 7)
_PAGE_NUMBER = np.uint64(0x000F_FFFF_FFFF_F000)
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
            yield Mapping(pid, start, end, int(offset, 16) // _PAGE, os.makedev(major, minor), int(inode))


class _Place(ctypes.Structure):
    """struct place of bpf/pagewalk.bpf.c."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("memory", ctypes.c_uint64),
        ("frame", ctypes.c_uint64),
        ("mark", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
    )


class Unreadable(Exception):
    """Page tables cannot be read here, and why."""


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
        if platform.machine() != "x86_64":
            raise Unreadable(f"page tables of {platform.machine()} are not known")
        self._pids, self._interval_s, self._follow = list(pids), interval_s, follow
        try:
            self._object = BpfObject(OBJECT)
            self._object.load(["find_memory", "copy_tables"])
        except LoadFailure as failure:
            raise Unreadable(f"the kernel refuses to read page tables: {os.strerror(failure.number)}") from failure
        self._maps = [mmap.mmap(self._object.map_fd(name), size, mmap.MAP_SHARED, mmap.PROT_READ) for name, size in _SIZES]
        self._tables = np.frombuffer(self._maps[0], np.uint64).reshape(_TABLES, 512)
        self._entries = np.frombuffer(self._maps[1], np.uint64)
        self._memory = 0
        self._find_memory()
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
        self._object.close()

    def _clear(self) -> None:
        if self._follow:
            self._pids = list(dict.fromkeys(one for pid in self._pids for one in descendants(pid)))
        for pid in list(self._pids):
            try:
                Path(f"/proc/{pid}/clear_refs").write_text(_CLEAR_MAPPED)
            except OSError:
                self._pids.remove(pid)  # it has ended

    def _find_memory(self) -> None:
        """Finds where the kernel maps all memory, then looks up a page of this process: tells five levels of tables."""
        page = mmap.mmap(-1, _PAGE)
        mark = int.from_bytes(os.urandom(8), "little")
        struct.pack_into("<Q", page, 0, mark)
        struct.pack_into("<Q", page, _PAGE - 8, mark ^ (1 << 64) - 1)
        buffer = ctypes.c_char.from_buffer(page)
        address = ctypes.addressof(buffer)
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            (word,) = struct.unpack("<Q", os.pread(pagemap.fileno(), 8, address // _PAGE * 8))
        frame = (word & (1 << 55) - 1) * _PAGE
        place = _Place(address, 0, frame, mark, os.getpid(), 0)
        if self._object.run("find_memory", place):
            raise Unreadable("where the kernel maps memory cannot be found")
        self._memory = int(place.memory)
        base = address // _TABLE_BYTES * _TABLE_BYTES
        self._copy(os.getpid(), base, 1)
        entry = self._tables[0][(address - base) // _PAGE] if self._entries[0] & _PRESENT else np.uint64(0)
        if int(entry & _PAGE_NUMBER) != frame:
            raise Unreadable("page tables have an unknown form (five levels or encrypted memory)")
        del buffer

    def _copy(self, pid: int, address: int, count: int) -> int:
        return self._object.run("copy_tables", _Place(address, self._memory, 0, 0, pid, count))

    def _touched(self, mapping: Mapping) -> Records:
        begin = mapping.start // _TABLE_BYTES * _TABLE_BYTES
        count = -(-(mapping.end - begin) // _TABLE_BYTES)
        bits = []
        for at in range(0, count, _TABLES):
            now = min(_TABLES, count - at)
            if self._copy(mapping.pid, begin + at * _TABLE_BYTES, now):
                return no_records()
            bits.append(self._accessed(now))
        offset = (mapping.start - begin) // _PAGE
        accessed = np.concatenate(bits).reshape(-1)[offset : offset + (mapping.end - mapping.start) // _PAGE]
        return _runs(mapping, accessed)

    def _accessed(self, count: int) -> NDArray[np.bool_]:
        entries, tables = self._entries[:count], self._tables[:count]
        huge = entries & (_PRESENT | _HUGE) == _PRESENT | _HUGE
        small = (entries & _PRESENT != 0) & ~huge
        both = _PRESENT | _ACCESSED
        accessed: NDArray[np.bool_] = (tables & both == both) & small[:, None]
        accessed[huge & (entries & _ACCESSED != 0)] = True
        return accessed


_SIZES = (("tables", _TABLES * _PAGE), ("entries", _TABLES * 8))


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
