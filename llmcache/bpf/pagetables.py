"""The accessed bits in page tables (x86-64, four levels), read by bpf/pagewalk.bpf.c."""

from __future__ import annotations

import array
import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Sequence

from llmcache.bpf.libbpf import OBJECTS, BpfObject, LoadFailure
from llmcache.units import PAGE_BYTES

OBJECT = OBJECTS / "pagewalk.bpf.o"
TABLES, PROBES = 512, 8192  # most per call
TABLE_BYTES = 2 << 20  # the range of addresses of one page table
PRESENT, ACCESSED, HUGE = 1, 1 << 5, 1 << 7
_TOUCHED = PRESENT | ACCESSED
_PAGE_NUMBER = 0x000F_FFFF_FFFF_F000
_ENTRY = struct.Struct("<Q")


class _Place(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("memory", ctypes.c_uint64),
        ("frame", ctypes.c_uint64),
        ("mark", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
    )


class Unreadable(Exception):
    """Page tables cannot be read on this machine; the message is the reason."""


class PageTables:
    """A reader of page tables; Unreadable if this machine does not allow it.

    `copy` fills `tables` (TABLES tables of 512 entries, u64) and `entries` (which point to these tables, u64).
    """

    def __init__(self) -> None:
        if platform.machine() != "x86_64":
            raise Unreadable(f"page tables of {platform.machine()} are not supported")
        try:
            self._object = BpfObject(OBJECT)
            self._object.load(["find_memory", "copy_tables", "probe"])
        except LoadFailure as failure:
            raise Unreadable(
                f"the kernel rejects the BPF programs that read page tables: {os.strerror(failure.number)}"
            ) from failure
        self.tables = self._mapped("tables", TABLES * PAGE_BYTES, mmap.PROT_READ)
        self.entries = self._mapped("entries", TABLES * 8, mmap.PROT_READ)
        self._probes = self._mapped("probes", PROBES * 8, mmap.PROT_READ | mmap.PROT_WRITE)
        self._memory = 0
        self._find_memory()

    def _mapped(self, name: str, size: int, protection: int) -> mmap.mmap:
        return mmap.mmap(self._object.map_fd(name), size, mmap.MAP_SHARED, protection)

    def close(self) -> None:
        self._object.close()

    def _find_memory(self) -> None:
        """Find the address at which the kernel maps all memory.

        The check on a page of this process fails with five levels of tables or encrypted memory: Unreadable.
        """
        page = mmap.mmap(-1, PAGE_BYTES)
        mark = int.from_bytes(os.urandom(8), "little")
        _ENTRY.pack_into(page, 0, mark)
        _ENTRY.pack_into(page, PAGE_BYTES - 8, mark ^ (1 << 64) - 1)
        buffer = ctypes.c_char.from_buffer(page)
        address = ctypes.addressof(buffer)
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            (word,) = _ENTRY.unpack(os.pread(pagemap.fileno(), 8, address // PAGE_BYTES * 8))
        frame = (word & (1 << 55) - 1) * PAGE_BYTES
        place = _Place(address, 0, frame, mark, os.getpid(), 0)
        if self._object.run("find_memory", place):
            raise Unreadable("the address at which the kernel maps memory is unknown")
        self._memory = int(place.memory)
        base = address // TABLE_BYTES * TABLE_BYTES
        self.copy(os.getpid(), base, 1)
        is_present = _ENTRY.unpack_from(self.entries)[0] & PRESENT
        entry = _ENTRY.unpack_from(self.tables, (address - base) // PAGE_BYTES * 8)[0] if is_present else 0
        if entry & _PAGE_NUMBER != frame:
            raise Unreadable("page tables with five levels, or encrypted memory, are not supported")
        del buffer

    def copy(self, pid: int, address: int, count: int) -> bool:
        """Copy the tables for `count` (at most TABLES) times TABLE_BYTES from `address` on; False if `pid` has ended."""
        return not self._object.run("copy_tables", _Place(address, self._memory, 0, 0, pid, count))

    def accessed(self, pid: int, addresses: Sequence[int]) -> list[bool]:
        """Return whether each page is mapped and was accessed since the bits were cleared."""
        found: list[bool] = []
        for begin in range(0, len(addresses), PROBES):
            part = addresses[begin : begin + PROBES]
            size = len(part) * _ENTRY.size
            self._probes[:size] = array.array("Q", part).tobytes()
            if self._object.run("probe", _Place(0, self._memory, 0, 0, pid, len(part))):
                return [False] * len(addresses)
            entries = array.array("Q", self._probes[:size])
            found += [entry & _TOUCHED == _TOUCHED for entry in entries]
        return found
