"""The tier without privilege: page faults of your own processes, and their reads and writes where strace is installed."""

from __future__ import annotations

import os
import struct
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

import numpy as np

from llmcache.arrays import Bytes, Records, Uint64s
from llmcache.errors import EnvironmentProblem
from llmcache.trace.processes import FileMapping, Key, ProcessTree, mappings, threads
from llmcache.trace.record import MAP, UNKNOWN
from llmcache.trace.sources import perf_event, strace
from llmcache.trace.sources.base import ACCESS, Scope, Source, TimeOrder, no_records, not_there
from llmcache.trace.sources.perf_event import EventRing, field
from llmcache.units import BLOCK_BYTES

FORK, MMAP = 7, 10  # PERF_RECORD_FORK, PERF_RECORD_MMAP2
_NAME = 64  # where the name begins in the latter
_SETTLED_NS = 50_000_000  # strace is not in a hurry
# What a user may lock for perf without privilege is 516 KiB by default, control pages included.
_LOCKED_BYTES = 480 << 10
_ROOT_RING_BYTES = 1 << 20


class FaultSource(Source):
    """See `sees` and `cannot_see`."""

    name = "faults"
    sees = "the page of every page fault in a mapped file; reads and writes by call where strace is installed"
    cannot_see = (
        "whether the page cache had the blocks; accesses to pages that are mapped already or were mapped around a fault; "
        "faults in calls of the kernel; io_uring; where files go that were open before, unless they are read at offsets"
    )
    offers: ClassVar[frozenset[str]] = frozenset({"follow", "writes"})

    def __init__(self) -> None:
        self._rings: dict[int, EventRing] = {}
        self._spaces = AddressSpaces()
        self._order = TimeOrder()
        self._processes = ProcessTree((), False)
        self._strace: strace.Strace | None = None
        self._without_strace = False
        self._lost = 0
        self._stopped = False

    @classmethod
    def probe(cls) -> str | None:
        """Why not here: perf events are forbidden, or there are none."""
        if reason := perf_event.supported():
            return reason
        try:
            os.close(perf_event.open_faults(os.getpid(), 0, True))
        except PermissionError:
            return "perf events are forbidden (kernel.perf_event_paranoid is above 2)"
        except OSError as error:
            return f"perf events: {error.strerror}"
        return None

    def start(self, scope: Scope) -> None:
        """See Source."""
        self._processes = ProcessTree(scope.targets, scope.follow)
        if not self._processes.alive():
            raise not_there(scope.targets)
        try:
            self._attach(scope)
            self._without_strace = not strace.installed()
            if not self._without_strace:
                self._strace = strace.Strace(scope.targets, scope.follow, scope.writes)
        except PermissionError as error:
            self._close()
            raise EnvironmentProblem("that process belongs to somebody else", "sudo llmcache trace …") from error
        except OSError as error:
            self._close()
            raise EnvironmentProblem(f"perf events cannot be opened: {error.strerror}", "try as root") from error
        except BaseException:
            self._close()
            raise

    def _attach(self, scope: Scope) -> None:
        cpus = _processors()
        most = _ROOT_RING_BYTES if os.geteuid() == 0 else max(4096, _LOCKED_BYTES // len(cpus) - 4096)
        size = 1 << most.bit_length() - 1  # a power of two
        for pid in scope.targets:
            for tid in threads(pid):
                with suppress(ProcessLookupError):
                    for cpu in cpus:
                        fd = perf_event.open_faults(tid, cpu, scope.follow)
                        if cpu in self._rings:
                            self._rings[cpu].add(fd)
                        else:
                            self._rings[cpu] = EventRing(fd, size)
            self._spaces.look(pid)

    def drain(self) -> Records:
        """See Source."""
        horizon: int | None = None if self._stopped else time.monotonic_ns() - _SETTLED_NS
        samples = [rows for ring in self._rings.values() for rows in ring.read(self._stopped)]
        for ring in self._rings.values():
            for kind, record in ring.others:
                self._spaces.note(kind, record)
            ring.others.clear()
        parts = [self._faults(np.concatenate(samples))] if samples else []
        if self._strace is not None:
            parts.append(self._strace.drain())
        records = np.concatenate(parts) if parts else no_records()
        self._processes.note(np.unique(records["pid"]).tolist())
        ordered = self._order.put(records, horizon)
        if self._stopped:
            self._close()
        return ordered

    def _faults(self, rows: Bytes) -> Records:
        """The faults in files among the samples `rows`."""
        rows = rows[np.argsort(field(rows, 8, 8), kind="stable")]
        records = no_records(len(rows))
        records["pid"], records["t_ns"] = field(rows, 0, 4), field(rows, 8, 8)
        found = self._spaces.files(field(rows, 0, 4), field(rows, 8, 8), field(rows, 16, 8))
        records["dev"], records["inode"], records["first"] = found
        records["count"], records["aux"], records["op"] = 1, 1, MAP
        records["miss"], records["kind"] = UNKNOWN, ACCESS
        in_files: Records = records[records["inode"] != 0]
        return in_files

    def alive(self) -> bool:
        """See Source."""
        return self._processes.alive()

    @property
    def lost(self) -> int:
        """See Source."""
        of_strace = self._strace.lost if self._strace else 0
        return self._lost + of_strace + sum(ring.lost for ring in self._rings.values())

    @property
    def paths(self) -> Mapping[Key, str]:
        """See Source."""
        return self._spaces.paths | (self._strace.paths if self._strace else {})

    @property
    def remarks(self) -> Sequence[str]:
        """See Source."""
        found = ["not recorded: reads and writes by call (strace is not installed)"] if self._without_strace else []
        if self._strace and self._strace.guessed:
            found.append(f"offsets guessed, of files that were open before: {self._strace.guessed}")
        return tuple(found)

    def stop(self) -> None:
        """See Source."""
        self._stopped = True
        for ring in self._rings.values():
            ring.stop()
        if self._strace is not None:
            self._strace.stop()

    def _close(self) -> None:
        self._lost += sum(ring.lost for ring in self._rings.values())
        for ring in self._rings.values():
            ring.close()
        self._rings = {}
        if self._strace is not None:
            self._strace.close()


def _processors() -> list[int]:
    """Numbers of the processors that are on: an event that processes inherit has to be opened on each of them."""
    found: list[int] = []
    with open("/sys/devices/system/cpu/online") as file:
        for part in file.read().strip().split(","):
            low, _, high = part.partition("-")
            found += range(int(low), int(high or low) + 1)
    return found


class AddressSpace:
    """The address space of a process."""

    def __init__(self, mappings: list[FileMapping] | None = None) -> None:
        self.mappings = mappings or []
        self._table: Uint64s | None = None

    def put(self, new: FileMapping) -> None:
        """Take a mapping, which replaces what was there."""
        self._table = None
        at = max(0, bisect_left(self.mappings, FileMapping(new.low, 0)) - 1)
        end = bisect_right(self.mappings, FileMapping(new.high, 0))
        for old in self.mappings[at:end]:
            if old.low < new.high and new.low < old.high:
                self.mappings.remove(old)
                if old.low < new.low:
                    insort(self.mappings, FileMapping(old.low, new.low, old.dev, old.inode, old.block))
                if new.high < old.high:
                    block = old.block + (new.high - old.low) // BLOCK_BYTES
                    insort(self.mappings, FileMapping(new.high, old.high, old.dev, old.inode, block))
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


class AddressSpaces:
    """The address spaces of all recorded processes, kept up to date by the kernel's records of mappings and forks."""

    def __init__(self) -> None:
        self.paths: dict[Key, str] = {}
        self._by_pid: dict[int, AddressSpace] = {}
        self._changes: list[tuple[int, int, FileMapping | int]] = []  # time, process, its new mapping or its parent

    def look(self, pid: int) -> None:
        """Take the mappings that `pid` has now."""
        self._by_pid[pid] = AddressSpace(list(mappings(pid)))

    def note(self, kind: int, record: bytes) -> None:
        """Take a record of perf events, without its header, that has process and time (`sample_id_all`) at its end."""
        (t_ns,) = struct.unpack_from("<Q", record, len(record) - 8)
        if kind == FORK:
            pid, parent = struct.unpack_from("<II", record)
            if pid != parent:
                self._changes.append((t_ns, pid, parent))
        elif kind == MMAP:
            pid, _, low, length, offset, major, minor, inode = struct.unpack_from("<IIQQQIIQ", record)
            mapping = FileMapping(low, low + length, os.makedev(major, minor), inode, offset // BLOCK_BYTES)
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

    def _apply(self, pid: int, change: FileMapping | int) -> None:
        if isinstance(change, int):
            parent = self._by_pid.get(change)
            self._by_pid[pid] = AddressSpace(list(parent.mappings)) if parent else AddressSpace(list(mappings(pid)))
        else:
            self._by_pid.setdefault(pid, AddressSpace()).put(change)

    def _fill(self, found: Uint64s, pid: Uint64s, address: Uint64s) -> None:
        for process in np.unique(pid).tolist():
            mine = pid == process
            if process not in self._by_pid:
                self.look(process)
            found[:, mine] = self._by_pid[process].files(address[mine])
