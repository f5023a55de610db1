"""BPF tiers: programs on page-cache tracepoints, on page-cache functions, or on system calls."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llmcache.arrays import Records
from llmcache.bpf.filemap import BY_TRACEPOINT, observable_by
from llmcache.bpf.libbpf import OBJECTS, BpfObject, LoadFailure
from llmcache.bpf.pagetables import Unreadable
from llmcache.bpf.ring import BUSY, DISCARDED, Ring
from llmcache.errors import MissingRequirement, UsageError
from llmcache.procfs import status_of
from llmcache.trace.faults import FaultSource
from llmcache.trace.records import COPIED, RECORD, Residency, Scope, Source, no_records, unknown
from llmcache.trace.rerefs import Sampler
from llmcache.units import BLOCK_BYTES, PAGE_BYTES

OBJECT = OBJECTS / "iotrace.bpf.o"
RING_BYTES = 16 << 20
MAX_AGE_NS = 1_000_000
LEFT_NS = 5 * MAX_AGE_NS  # maximal age of a run that `flush` does not copy yet (bpf/flush.h)
MAX_BLOCKS = 1024
LOSSES = ("ring full", "too many threads", "too many files", "too many block requests", "huge mapping of an unknown file")

# struct config of bpf/record.h.
CONFIG = np.dtype(
    [
        ("max_age_ns", "<u8"),
        ("max_blocks", "<u4"),
        ("follow", "<u4"),
        ("page_blocks_log2", "<u4"),
        ("total_store_order", "<u4"),
        ("write_calls", "<i4", 6),
        ("read_calls", "<i4", 6),
    ]
)
# Numbers of write, pwrite64, writev, pwritev, pwritev2, sendfile and of read, pread64, readv, preadv, preadv2.
_CALLS = {
    "x86_64": ((1, 18, 20, 296, 328, 40), (0, 17, 19, 295, 327, -1)),
    "aarch64": ((64, 68, 66, 70, 287, 71), (63, 67, 65, 69, 286, -1)),
}
_ALWAYS = ("seed", "flush", "started", "ended", "replaced")
_RUN_BY_US = ("seed", "flush")
# A program takes the time of an event before it records it: allow 2 ms for that, and LEFT_NS until `flush` copies it.
_SETTLED_NS = 2_000_000 + LEFT_NS


@dataclass(frozen=True)
class Feature:
    """Something to record. The kernel's first accepted set of `programs` is used.

    If none is accepted, the recording lacks `missing`; with None it fails.
    """

    programs: Sequence[Sequence[str]]
    missing: str | None = None


def supported() -> str | None:
    """Return why no BPF tier can work, or None."""
    if platform.machine() not in _CALLS:
        return f"the processor is {platform.machine()}; only x86-64 and arm64 are supported"
    if not Path("/sys/kernel/btf/vmlinux").exists():
        return "the kernel has no BTF (/sys/kernel/btf/vmlinux, CONFIG_DEBUG_INFO_BTF)"
    return None


class _FlushResult(ctypes.Structure):
    _fields_ = (("live", ctypes.c_uint32), ("all", ctypes.c_uint32))


class RecordRing(Ring):
    """A ring of records of the dtype `record`."""

    def __init__(self, fd: int, size: int, record: np.dtype[np.void]) -> None:
        super().__init__(fd, size, record.itemsize)
        self._framed = np.dtype([("length", "<u4"), ("page", "<u4"), ("record", record)])

    def read(self) -> Records:
        frames = np.frombuffer(self.stretch(), self._framed)
        busy = np.flatnonzero(frames["length"] & np.uint32(BUSY))
        if len(busy):
            frames = frames[: busy[0]]
        self.fence()
        records: Records = frames["record"][(frames["length"] & np.uint32(DISCARDED)) == 0]
        self.free(len(frames))
        return records


class Copies:
    """The runs that the kernel has copied to the ring and not sent yet."""

    def __init__(self) -> None:
        self._copied: dict[tuple[int, ...], tuple[int, int]] = {}

    def settle(self, records: Records) -> Records:
        """Remove from runs that come again the blocks that their copies had."""
        is_copy = records["flags"] & COPIED != 0
        for row in np.flatnonzero(is_copy):
            self._copied[_run(records[row])] = int(records["count"][row]), int(records["aux"][row])
            records["flags"][row] &= ~np.uint8(COPIED)
        if not self._copied:
            return records
        times = np.array([run[0] for run in self._copied], np.uint64)
        keep = np.ones(len(records), bool)
        for row in np.flatnonzero(~is_copy & np.isin(records["t_ns"], times)):
            blocks, requests = self._copied.pop(_run(records[row]), (0, 0))
            keep[row] = records["count"][row] > blocks
            if keep[row]:
                records["first"][row] += np.uint64(blocks)
                records["count"][row] -= blocks
                records["aux"][row] -= requests
        return records[keep]


def _run(record: Any) -> tuple[int, ...]:
    return tuple(int(record[name]) for name in ("t_ns", "dev", "inode", "first", "pid", "kind", "op"))


class KernelPrograms:
    """The BPF object; `missing` describes the features that the kernel does not support."""

    def __init__(self, features: Iterable[Feature], follow: bool, coalesce: bool) -> None:
        self.missing: list[str] = []
        self._config = _config(follow, coalesce).tobytes()
        self._object, self._programs = self._load(list(features))
        self._ring = RecordRing(self._object.map_fd("ring"), RING_BYTES, RECORD)
        self._copies = Copies()

    def _load(self, features: list[Feature]) -> tuple[BpfObject, list[str]]:
        choice = [0] * len(features)
        while True:
            chosen = [
                feature.programs[at] for feature, at in zip(features, choice, strict=True) if at < len(feature.programs)
            ]
            programs = [*_ALWAYS, *(name for group in chosen for name in group)]
            loaded = BpfObject(OBJECT)
            try:
                loaded.configure(self._config)
                loaded.load(programs)
                return loaded, programs
            except LoadFailure as failure:
                loaded.close()
                self._skip(failure, features, choice)

    def _skip(self, failure: LoadFailure, features: list[Feature], choice: list[int]) -> None:
        for position, feature in enumerate(features):
            untried = feature.programs[choice[position] :]
            if untried and failure.program in untried[0]:
                choice[position] += 1
                if len(untried) > 1:
                    return
                if feature.missing is not None:
                    self.missing.append(feature.missing)
                    return
        raise failure

    def attach(self, pids: Iterable[int]) -> int:
        """Start to record the processes; return the number of their threads."""
        for pid in pids:
            self._object.put("targets", pid.to_bytes(4, sys.byteorder), (1).to_bytes(4, sys.byteorder))
        for name in ("started", "ended", "replaced"):
            self._object.attach(name)
        # A thread that is not seeded yet can start others: the next round finds those.
        found = 0
        while added := len(self._object.iterate("seed")):
            found += added
        for name in self._programs:
            if name not in _ALWAYS:
                self._object.attach(name)
        return found

    def flush(self, at_end: bool = False) -> int:
        """Copy the runs that stopped growing to the ring, `at_end` (after `detach`) all; return the number of threads."""
        result = _FlushResult(all=at_end)
        self._object.run("flush", result)
        return int(result.live)

    def read(self) -> Records:
        return self._copies.settle(self._ring.read())

    def lost(self) -> int:
        counts = (self._object.read("losses", number.to_bytes(4, sys.byteorder), 8) for number in range(len(LOSSES)))
        attached = [name for name in self._programs if name not in _RUN_BY_US]
        busy = sum(self._object.misses(name) for name in attached)
        return busy + sum(int.from_bytes(count, sys.byteorder) for count in counts)

    def detach(self) -> None:
        """Detach the programs; runs in the maps can still be flushed and read."""
        self._object.detach()

    def close(self) -> None:
        self._object.close()


def _config(follow: bool, coalesce: bool) -> Records:
    config = np.zeros(1, CONFIG)
    config["max_age_ns"] = MAX_AGE_NS
    config["max_blocks"] = MAX_BLOCKS if coalesce else 0
    config["follow"] = follow
    config["page_blocks_log2"] = (PAGE_BYTES // BLOCK_BYTES).bit_length() - 1
    config["total_store_order"] = platform.machine() == "x86_64"
    config["write_calls"], config["read_calls"] = _CALLS[platform.machine()]
    return config


_WRITES = (
    Feature([["wrote"]], "writes by system call"),
    Feature([["uring_wrote"], ["uring_wrote_older"]], "writes through io_uring"),
)
_STORES = Feature([["stored"]], "writes through mappings")
_MADE = Feature([["dirtied"]], "which cache fills are pages created by writes")
_FILLS = Feature([["filled", "evicted"]], "cache fills and evictions, so hits and misses are unknown")
_DIRECT = Feature([["read_direct"]], "O_DIRECT reads")
_HUGE = Feature([["touched", "touched_in_call"]], "mappings by huge pages")
_BLOCK = Feature([["submitted", "completed", "request_completed"]], "block requests")


class BpfSource(Source):
    """The common part of all BPF tiers."""

    programs: ClassVar[Sequence[str]]  # the programs that see accesses: required
    pages = True
    requests = True

    def __init__(self) -> None:
        super().__init__()
        self._kernel: KernelPrograms | None = None
        self._residency = Residency()
        self._live = 0
        self._sampler: Sampler | None = None

    @classmethod
    def features(cls, scope: Scope) -> Sequence[Feature]:
        seen = [_FILLS, _DIRECT, _HUGE, *([_STORES] if scope.writes else [_MADE])] if cls.pages else []
        return [Feature([cls.programs]), *seen, *(_WRITES if scope.writes else ()), *([_BLOCK] if scope.block else ())]

    @classmethod
    def probe(cls) -> str | None:
        if reason := supported():
            return reason
        if os.geteuid() != 0 and not _has_capabilities():
            return "needs root (or CAP_BPF and CAP_PERFMON)"
        try:
            KernelPrograms(cls.features(Scope(())), follow=True, coalesce=True).close()
        except LoadFailure as failure:
            return f"the kernel rejects {failure.program or 'the BPF programs'}: {os.strerror(failure.number)}"
        except MissingRequirement as problem:
            return problem.message
        return None

    def start(self, scope: Scope) -> None:
        try:
            self._kernel = KernelPrograms(self.features(scope), scope.follow, scope.coalesce)
            self._live = self._kernel.attach(scope.targets)
        except LoadFailure as failure:
            self.stop()
            message = f"the kernel rejects the BPF programs of tier '{self.name}': {failure}"
            raise MissingRequirement(message, "choose another tier with --tier") from failure
        self.remarks += [f"not recorded: {what} (the kernel rejects the BPF program)" for what in self._kernel.missing]
        if not self._live:
            self.stop()
            raise scope.missing()
        if scope.rerefs_s > 0:
            try:
                self._sampler = Sampler(scope.targets, scope.rerefs_s, scope.follow)
            except Unreadable as reason:
                self.remarks.append(f"not recorded: touches of mapped pages ({reason})")

    def drain(self) -> Records:
        if self._kernel is None:
            return no_records()
        horizon: int | None = time.monotonic_ns() - _SETTLED_NS
        self._live = self._kernel.flush(self._stopped)
        records = self._kernel.read()
        if self._sampler is not None:
            records = np.concatenate((records, self._sampler.sample()))
        records = self._order.put(records, None if self._stopped else horizon)
        if self._stopped:
            self._lost = self._kernel.lost()
            self._kernel.close()
            if self._sampler is not None:
                self._sampler.close()
            self._kernel = self._sampler = None
        return self._residency.mark(records) if self.pages else unknown(records)

    def alive(self) -> bool:
        return self._live > 0

    @property
    def lost(self) -> int:
        if self._kernel is not None:
            self._lost = self._kernel.lost()
        return self._lost

    def stop(self) -> None:
        if self._kernel is not None:
            self._kernel.detach()
        self._stopped = True


class FilemapSource(BpfSource):
    """The tier on page-cache tracepoints (Linux 6.12 and later)."""

    name = "filemap"
    programs = ("read_pages", "fault_page", "mapped", "map_around")
    sees = (
        "reads by any call, io_uring, sendfile, splice and page faults, block by block; O_DIRECT; writes by call, io_uring "
        "and mapping; cache fills and evictions"
    )
    cannot_see = (
        "accesses to pages that are already mapped; which blocks around a page fault were touched; the beginning of an "
        "io_uring read, sendfile or splice that goes beyond the data read ahead; reads of tmpfs; O_DIRECT that bypasses "
        "iomap (raw devices, btrfs before 5.16, FUSE, NFS); copy_file_range and splice into a file"
    )

    @classmethod
    def probe(cls) -> str | None:
        reason = supported()
        if reason is None and not _described():
            return "the kernel has no tracepoints for page cache accesses (Linux 6.12 and later have them)"
        return reason or super().probe()


class FexitSource(BpfSource):
    """The tier on the page-cache functions, for kernels without the tracepoints."""

    name = "fexit"
    programs = ("read_returned", "fault_returned", "mapped", "map_returned")
    sees = "reads by call, io_uring and page faults, block by block; writes; cache fills and evictions"
    cannot_see = (
        "sendfile and splice; accesses to pages that are already mapped; which blocks around a page fault were touched; "
        "reads of tmpfs; O_DIRECT before Linux 6.6"
    )


class SyscallSource(BpfSource):
    """The tier on read and write calls."""

    name = "syscalls"
    programs = ("read_call_returned",)
    sees = "what read, pread, readv, preadv and preadv2 returned, whatever the file system; writes by call and io_uring"
    cannot_see = "page faults (mmap), io_uring reads, sendfile, splice; cache hits and misses"
    pages = False


def _described() -> bool:
    try:
        return observable_by() == BY_TRACEPOINT
    except MissingRequirement:
        return True  # no libbpf: BpfSource.probe reports it


def _has_capabilities() -> bool:
    effective = int(status_of()["CapEff"], 16)
    return bool(effective >> 39 & effective >> 38 & 1)


AUTO = "auto"
SOURCES: dict[str, type[Source]] = {tier.name: tier for tier in (FilemapSource, FexitSource, SyscallSource, FaultSource)}


def start_source(tier: str, scope: Scope) -> tuple[Source, Mapping[str, str]]:
    """Start the source `tier` ("auto": the best that works); return it, and why each better one does not work.

    UsageError for an unknown name; MissingRequirement if the tier cannot record.
    """
    if tier not in (AUTO, *SOURCES):
        raise UsageError(f"--tier: '{tier}' is unknown", f"use one of: {', '.join([AUTO, *SOURCES])}")
    passed_over: dict[str, str] = {}
    for name in SOURCES if tier == AUTO else [tier]:
        started = _started(SOURCES[name], scope)
        if isinstance(started, Source):
            return started, passed_over
        passed_over[name] = started
    if tier == AUTO:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
        raise MissingRequirement(f"no tier can record this on this machine: {reasons}", "try as root: sudo llmcache trace …")
    others = (name for name, other in SOURCES.items() if name != tier and not _unseen(other, scope))
    works = next((name for name in others if SOURCES[name].probe() is None), None)
    hint = f"--tier {works} works here" if works else "no other tier works here either: most need root"
    raise MissingRequirement(f"--tier: {tier} cannot record here: {passed_over[tier]}", hint)


def _started(kind: type[Source], scope: Scope) -> Source | str:
    """Return a started source, or the reason why it cannot record.

    Probing takes as long as starting, so the source is probed only if starting fails.
    """
    if reason := _unseen(kind, scope):
        return reason
    source = kind()
    try:
        source.start(scope)
    except MissingRequirement:
        if reason := kind.probe():
            return reason
        raise
    return source


def _unseen(kind: type[Source], scope: Scope) -> str | None:
    if scope.block and not kind.requests:
        return "it cannot see block requests (--block)"
    if scope.rerefs_s and not kind.pages:
        return "it cannot see touches of mapped pages (--mmap-rerefs)"
    return None
