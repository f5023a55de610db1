"""The tier without privilege: page faults of your own processes, and their reads and writes where strace is installed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

import numpy as np

from llmcache.errors import EnvironmentProblem
from llmcache.trace.record import MAP, UNKNOWN
from llmcache.trace.sources import perf_event, strace
from llmcache.trace.sources.base import ACCESS, Records, Source, TimeOrder, Wish, no_records, not_there
from llmcache.trace.sources.family import Family, threads
from llmcache.trace.sources.mappings import Spaces
from llmcache.trace.sources.perf_event import ADDR, PAGE_FAULTS, SOFTWARE, TID, TIME, Bytes, Event, EventRing, field
from llmcache.trace.sources.processors import online

_FAULT = Event(SOFTWARE, PAGE_FAULTS, TID | TIME | ADDR, user_only=True, mappings=True)
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
        self._spaces = Spaces()
        self._order = TimeOrder()
        self._family = Family((), False)
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
            os.close(perf_event.open_event(_FAULT, os.getpid(), 0, True))
        except PermissionError:
            return "perf events are forbidden (kernel.perf_event_paranoid is above 2)"
        except OSError as error:
            return f"perf events: {error.strerror}"
        return None

    def start(self, wish: Wish) -> None:
        """See Source."""
        self._family = Family(wish.targets, wish.follow)
        if not self._family.alive():
            raise not_there(wish.targets)
        try:
            self._attach(wish)
            self._without_strace = not strace.installed()
            if not self._without_strace:
                self._strace = strace.Strace(wish.targets, wish.follow, wish.writes)
        except PermissionError as error:
            self._close()
            raise EnvironmentProblem("that process belongs to somebody else", "sudo llmcache trace …") from error
        except OSError as error:
            self._close()
            raise EnvironmentProblem(f"perf events cannot be opened: {error.strerror}", "try as root") from error
        except BaseException:
            self._close()
            raise

    def _attach(self, wish: Wish) -> None:
        cpus = online()
        size = _ROOT_RING_BYTES if os.geteuid() == 0 else _largest_power(max(4096, _LOCKED_BYTES // len(cpus) - 4096))
        for pid in wish.targets:
            for tid in threads(pid):
                with suppress(ProcessLookupError):
                    for cpu in cpus:
                        fd = perf_event.open_event(_FAULT, tid, cpu, wish.follow)
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
        self._family.note(np.unique(records["pid"]).tolist())
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
        return self._family.alive()

    @property
    def lost(self) -> int:
        """See Source."""
        of_strace = self._strace.lost if self._strace else 0
        return self._lost + of_strace + sum(ring.lost for ring in self._rings.values())

    @property
    def paths(self) -> Mapping[tuple[int, int], str]:
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


def _largest_power(limit: int) -> int:
    return 1 << (limit.bit_length() - 1)
