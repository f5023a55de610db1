"""The three sources that run BPF programs: on page-cache tracepoints, on the functions behind them, on system calls."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from llmcache.bpf.libbpf import LoadFailure, has_tracepoint
from llmcache.bpf.pagetables import Unreadable
from llmcache.errors import EnvironmentProblem
from llmcache.trace.sources.base import Records, Source, TimeOrder, Wish, no_records, not_there
from llmcache.trace.sources.kernel import LEFT_NS, KernelPart, Part, explained, supported
from llmcache.trace.sources.rerefs import Sampler
from llmcache.trace.sources.residency import Residency, unknown

_WRITES = (
    Part([["wrote"]], "writes by system call"),
    Part([["uring_wrote"], ["uring_wrote_older"]], "writes through io_uring"),
)
_STORES = Part([["stored"]], "writes through mappings")
_MADE = Part([["dirtied"]], "which fills were pages made by writes")
_FILLS = Part([["filled", "evicted"]], "fills and evictions: hits and misses are unknown")
_DIRECT = Part([["read_direct"]], "O_DIRECT reads")
_HUGE = Part([["touched", "touched_in_call"]], "mappings by huge pages")
_BLOCK = Part([["submitted", "completed", "request_completed"]], "block requests")
TRACEPOINTS = ("mm_filemap_get_pages", "mm_filemap_fault", "mm_filemap_map_pages")
"""What tier filemap cannot do without, since Linux 6.12."""
# An event is timed before its slot is locked: this much later it is in the slot, and later still it is sent.
_SETTLED_NS = 2_000_000 + LEFT_NS


class BpfSource(Source):
    """What the three have in common: loading, draining, losses."""

    offers: ClassVar[frozenset[str]] = frozenset({"follow", "writes", "block", "coalesce"})
    fills: ClassVar[bool] = True

    def __init__(self) -> None:
        self._kernel: KernelPart | None = None
        self._order = TimeOrder()
        self._residency = Residency()
        self._live = 0
        self._losses: dict[str, int] = {}
        self._remarks: list[str] = []
        self._sampler: Sampler | None = None
        self._stopped = False

    @classmethod
    @abstractmethod
    def parts(cls, wish: Wish) -> Sequence[Part]:
        """What is to be loaded for `wish`."""

    @classmethod
    def probe(cls) -> str | None:
        """Why not here: no privilege, no BTF, no libbpf, or the kernel refuses a program that is needed."""
        if reason := supported():
            return reason
        if os.geteuid() != 0 and not _has_capabilities():
            return "needs root (or CAP_BPF and CAP_PERFMON)"
        try:
            KernelPart(cls.parts(Wish(())), follow=True, coalesce=True).close()
        except LoadFailure as failure:
            return f"the kernel refuses {failure.program or 'the programs'}: {os.strerror(failure.number)}"
        except EnvironmentProblem as problem:
            return problem.message
        return None

    def start(self, wish: Wish) -> None:
        """Loads and attaches; EnvironmentProblem if the kernel refuses, or none of the targets is there."""
        try:
            self._kernel = KernelPart(self.parts(wish), wish.follow, wish.coalesce)
            self._live = self._kernel.attach(wish.targets)
        except LoadFailure as failure:
            self.stop()
            raise explained(failure, f"tier '{self.name}'") from failure
        self._remarks += [f"not recorded: {what} (the kernel refuses the program)" for what in self._kernel.missing]
        if not self._live:
            self.stop()
            raise not_there(wish.targets)
        if wish.rerefs_s > 0 and "rerefs_s" in self.offers:
            self._start_sampler(wish)

    def _start_sampler(self, wish: Wish) -> None:
        try:
            self._sampler = Sampler(wish.targets, wish.rerefs_s, wish.follow)
        except Unreadable as reason:
            self._remarks.append(f"not recorded: touches of mapped pages ({reason})")

    def drain(self) -> Records:
        """See Source."""
        if self._kernel is None:
            return no_records()
        horizon: int | None = time.monotonic_ns() - _SETTLED_NS
        self._live, complete = self._kernel.flush(self._stopped)
        records = self._kernel.read()
        if self._sampler is not None:
            records = np.concatenate((records, self._sampler.sample()))
        records = self._order.put(records, None if self._stopped else horizon if complete else 0)
        if self._stopped:
            self._close()
        return self._residency.mark(records) if self.fills else unknown(records)

    def _close(self) -> None:
        if self._kernel is not None:
            self._losses = self._kernel.losses()
            self._kernel.close()
        if self._sampler is not None:
            self._sampler.close()
        self._kernel = self._sampler = None

    def alive(self) -> bool:
        """See Source; as of the last drain()."""
        return self._live > 0

    @property
    def losses(self) -> dict[str, int]:
        """Events lost so far by reason."""
        if self._kernel is not None:
            self._losses = self._kernel.losses()
        return dict(self._losses)

    @property
    def lost(self) -> int:
        """See Source."""
        return sum(self.losses.values())

    @property
    def remarks(self) -> Sequence[str]:
        """See Source."""
        return tuple(self._remarks)

    def stop(self) -> None:
        """Detaches; what was recorded stays until the next drain()."""
        if self._kernel is not None:
            self._kernel.detach()
        self._stopped = True


class FilemapSource(BpfSource):
    """Page-cache tracepoints of Linux 6.12 and later: every access to cached files, and what the cache did."""

    name = "filemap"
    offers = BpfSource.offers | {"rerefs_s"}
    sees = (
        "reads by any call, io_uring, sendfile, splice and page faults, block by block; O_DIRECT; writes by call, io_uring "
        "and mapping; cache fills and evictions"
    )
    cannot_see = (
        "accesses to pages that are mapped already; which blocks around a page fault were touched; the beginning of an "
        "io_uring read, sendfile or splice that goes beyond what was read ahead; reads of tmpfs; "
        "O_DIRECT past iomap (raw devices, btrfs before 5.16, FUSE, NFS); copy_file_range and splice into a file"
    )

    @classmethod
    def parts(cls, wish: Wish) -> Sequence[Part]:
        """See BpfSource."""
        needed = Part([["read_pages", "fault_page", "mapped", "map_around"]])
        return (needed, *_common(wish))

    @classmethod
    def probe(cls) -> str | None:
        """See BpfSource."""
        reason = supported()
        if reason is None and not _described():
            return "the kernel has no page-cache access tracepoints (Linux 6.12 and later have)"
        return reason or super().probe()


class FexitSource(BpfSource):
    """The functions behind the page cache, for kernels without its tracepoints."""

    name = "fexit"
    offers = BpfSource.offers | {"rerefs_s"}
    sees = "reads by call, io_uring and page faults, block by block; writes; cache fills and evictions"
    cannot_see = (
        "sendfile and splice; accesses to pages that are mapped already; which blocks around a page fault were touched; "
        "reads of tmpfs; O_DIRECT before Linux 6.6"
    )

    @classmethod
    def parts(cls, wish: Wish) -> Sequence[Part]:
        """See BpfSource."""
        needed = Part([["read_returned", "fault_returned", "mapped", "map_returned"]])
        return (needed, *_common(wish))


class SyscallSource(BpfSource):
    """The results of read and write calls: no page faults, no hits and misses."""

    name = "syscalls"
    sees = "what read, pread, readv, preadv and preadv2 returned, whatever the file system; writes by call and io_uring"
    cannot_see = "page faults (mmap), io_uring reads, sendfile, splice; whether the page cache had the blocks"
    fills = False

    @classmethod
    def parts(cls, wish: Wish) -> Sequence[Part]:
        """See BpfSource."""
        return (Part([["read_call_returned"]]), *(_WRITES if wish.writes else ()), *((_BLOCK,) if wish.block else ()))


def _common(wish: Wish) -> Sequence[Part]:
    writes = (_STORES, *_WRITES) if wish.writes else (_MADE,)
    return (_FILLS, _DIRECT, _HUGE, *writes, *((_BLOCK,) if wish.block else ()))


def _described() -> bool:
    try:
        return all(map(has_tracepoint, TRACEPOINTS))
    except EnvironmentProblem:
        return True  # no libbpf: the general probe says so


def _has_capabilities() -> bool:
    """Whether CAP_BPF (39) and CAP_PERFMON (38) are effective."""
    with open("/proc/self/status") as status:
        effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return bool(effective >> 39 & effective >> 38 & 1)
