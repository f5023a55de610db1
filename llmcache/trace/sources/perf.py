"""The tier without BPF: the page-cache tracepoints through perf_event_open."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

import numpy as np

from llmcache.errors import EnvironmentProblem
from llmcache.trace.openfiles import Key, opened
from llmcache.trace.sources import perf_event
from llmcache.trace.sources.base import Records, Source, TimeOrder, Wish, no_records, not_there
from llmcache.trace.sources.family import Family, threads
from llmcache.trace.sources.perf_event import RAW, TID, TIME, TRACEPOINT, Bytes, Event, EventRing, field, open_event
from llmcache.trace.sources.perf_runs import AROUNDS, DIRECTS, EVENT, FAULTS, FILLS, READS, Events, Runs
from llmcache.trace.sources.processors import online
from llmcache.trace.sources.residency import Residency
from llmcache.trace.sources.tracefs import Tracepoint, tracepoints

_SETTLED_NS = 2_000_000
_DATA = 8 + 8 + 4  # of a sample: process and thread, time, size of what follows
_WRITE = 1 << 18  # IOCB_WRITE in ki_flags
_BLOCK = 4096
# Tracepoint: (kind, bytes of its buffer on each CPU). The last is missing where no file system uses iomap.
_TRACED = {
    "filemap/mm_filemap_get_pages": (READS, 4 << 20),
    "filemap/mm_filemap_map_pages": (AROUNDS, 1 << 20),
    "filemap/mm_filemap_fault": (FAULTS, 1 << 20),
    "filemap/mm_filemap_add_to_page_cache": (FILLS, 2 << 20),
    "iomap/iomap_dio_rw_begin": (DIRECTS, 1 << 20),
}
_OPTIONAL = "iomap/iomap_dio_rw_begin"
REQUIRED = tuple(name for name in _TRACED if name != _OPTIONAL)


class PerfSource(Source):
    """See `sees` and `cannot_see`. One buffer per tracepoint and CPU, so that each holds samples of one size."""

    name = "perf"
    sees = "reads by any call and page faults, block by block; O_DIRECT through iomap; cache fills of the recorded processes"
    cannot_see = (
        "writes; evictions and fills by others (a miss may be taken for a hit; a block that a write made, for a miss); "
        "where files end (the last request of a file counts whole); now and then a part of a request that waited for "
        "storage; accesses to pages that are mapped already; reads of tmpfs"
    )
    offers: ClassVar[frozenset[str]] = frozenset({"follow", "coalesce"})

    def __init__(self) -> None:
        self._rings: list[tuple[EventRing, int, Tracepoint]] = []
        self._order, self._residency = TimeOrder(), Residency()
        self._family = Family((), False)
        self._runs = Runs(True)
        self._wish: Wish | None = None
        self._paths: dict[Key, str] = {}
        self._sighted: set[int] = set()  # inodes
        self._lost = 0
        self._stopped = False

    @classmethod
    def probe(cls) -> str | None:
        """Why not here: no privilege, or a kernel without these tracepoints."""
        if reason := perf_event.supported():
            return reason
        try:
            found = tracepoints(list(_TRACED))
            for name in REQUIRED:
                if name not in found:
                    return f"the kernel has no tracepoint {name} (Linux 6.12 and later have)"
            os.close(open_event(_event(next(iter(found.values()))), os.getpid(), 0, True))
        except PermissionError:
            return "needs root (or CAP_PERFMON, and tracefs)"
        except OSError as error:
            return f"perf events: {error.strerror}"
        return None

    def start(self, wish: Wish) -> None:
        """See Source."""
        if reason := self.probe():
            raise EnvironmentProblem(f"perf: {reason}", "choose another with --tier")
        self._wish = wish
        self._family = Family(wish.targets, wish.follow)
        self._runs = Runs(wish.coalesce)
        _allow_descriptors()
        try:
            attached = self._attach(wish)
        except OSError as error:
            self._close()
            hint = "the limit of open files (ulimit -n) must be at least threads x processors x 5"
            raise EnvironmentProblem(f"perf events cannot be opened: {error.strerror}", hint) from error
        if not attached:
            self._close()
            raise not_there(wish.targets)

    def _attach(self, wish: Wish) -> int:
        """Returns the number of threads that are recorded."""
        points, cpus = tracepoints(list(_TRACED)), online()
        rings: dict[tuple[str, int], EventRing] = {}
        done: set[int] = set()
        # A thread that is started meanwhile inherits the events of its own starter, or is found in the next round.
        while new := {tid for pid in wish.targets for tid in threads(pid)} - done:
            for tid in new:
                with suppress(ProcessLookupError):
                    for name, point in points.items():
                        for cpu in cpus:
                            self._open(name, point, tid, cpu, rings)
            if done:
                break
            done |= new
        return len(done)

    def _open(self, name: str, point: Tracepoint, tid: int, cpu: int, rings: dict[tuple[str, int], EventRing]) -> None:
        assert self._wish is not None
        fd = open_event(_event(point), tid, cpu, self._wish.follow)
        if (name, cpu) in rings:
            rings[name, cpu].add(fd)
            return
        kind, size_bytes = _TRACED[name]
        rings[name, cpu] = EventRing(fd, size_bytes)
        self._rings.append((rings[name, cpu], kind, point))

    def drain(self) -> Records:
        """See Source."""
        horizon: int | None = None if self._stopped else time.monotonic_ns() - _SETTLED_NS
        parts = [_events(rows, kind, point) for ring, kind, point in self._rings for rows in ring.read(self._stopped)]
        events = np.concatenate(parts) if parts else np.zeros(0, EVENT)
        self._family.note(np.unique(events["pid"]).tolist())
        self._look(events)
        records, settled_ns = self._runs.put(events, horizon)
        ordered = self._order.put(records, None if self._stopped else settled_ns)
        if self._stopped:
            self._close()
        return self._residency.mark(ordered) if len(ordered) else no_records()

    def _look(self, events: Events) -> None:
        """Note the names of files while their processes still have them: records may wait for others until they have not."""
        inodes = set(np.unique(events["inode"]).tolist()) - self._sighted
        if not inodes:
            return
        self._sighted |= inodes
        for pid in np.unique(events["pid"][np.isin(events["inode"], list(inodes))]).tolist():
            with suppress(OSError):
                self._paths.update((key, named.path) for key, named in opened(pid))

    @property
    def paths(self) -> Mapping[Key, str]:
        """See Source."""
        return self._paths

    def alive(self) -> bool:
        """See Source."""
        return self._family.alive()

    @property
    def lost(self) -> int:
        """See Source."""
        return self._lost + sum(ring.lost for ring, _, _ in self._rings)

    @property
    def remarks(self) -> Sequence[str]:
        """See Source."""
        return ("not recorded: writes",) if self._wish and self._wish.writes else ()

    def stop(self) -> None:
        """See Source."""
        self._stopped = True
        for ring, _, _ in self._rings:
            ring.stop()

    def _close(self) -> None:
        self._lost = self.lost
        for ring, _, _ in self._rings:
            ring.close()
        self._rings = []


def _event(point: Tracepoint) -> Event:
    return Event(TRACEPOINT, point.number, TID | TIME | RAW)


def _events(rows: Bytes, kind: int, point: Tracepoint) -> Events:
    """The samples `rows` of a tracepoint as events."""

    def of(name: str) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        offset, size = point.fields[name]
        return field(rows, _DATA + offset, size)

    events = np.zeros(len(rows), EVENT)
    events["pid"], events["tid"], events["t_ns"] = field(rows, 0, 4), field(rows, 4, 4), field(rows, 8, 8)
    events["kind"] = kind
    if kind == DIRECTS:
        start, size = of("pos"), of("count")
        events["dev"], events["inode"] = _dev(of("dev")), of("ino")
        events["first"] = start // np.uint64(_BLOCK)
        events["end"] = (start + size + np.uint64(_BLOCK - 1)) // np.uint64(_BLOCK)
        is_read = (of("ki_flags") & np.uint64(_WRITE) == 0) & (size > 0)
        reads: Events = events[is_read]
        return reads
    events["dev"], events["inode"], events["first"] = _dev(of("s_dev")), of("i_ino"), of("index")
    if kind == FILLS:
        events["end"] = events["first"] + (np.uint64(1) << of("order"))
    else:
        events["end"] = (of("last_index") if kind != FAULTS else events["first"]) + np.uint64(1)
    return events


def _dev(kernel: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The kernel's device numbers as st_dev has them."""
    distinct, index = np.unique(kernel, return_inverse=True)
    return np.array([os.makedev(int(dev) >> 20, int(dev) & 0xFFFFF) for dev in distinct], np.uint64)[index]


def _allow_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
