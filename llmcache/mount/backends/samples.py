"""Reads accessed bits in the page tables of clients, which show the experts and the pinned extents in use.

The bits of experts are sampled as often as that takes little CPU time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmcache.bpf.pagetables import PageTables, Unreadable
from llmcache.mount.backends.files import CHECK_S, File, Files, Program
from llmcache.mount.state.space import MoeFile
from llmcache.mount.state.state import CacheState
from llmcache.procfs import status_of

log = logging.getLogger(__name__)

REQUESTS_S = 1.0  # between updates of the clients of a file over FUSE
SAMPLE_S, SAMPLE_REST = 0.02, 100  # between samples of experts; at least this multiple of the CPU time of the last one
USES = 64  # counted at a time under the lock, so that misses wait no longer
PROBES = 8  # pages of an extent that are sampled


@dataclass
class RequestedFile:
    """A file over FUSE and its clients."""

    key: tuple[int, int]
    readers: list[Program] = field(default_factory=list)


class FilePrograms:
    """Finds the clients of files over FUSE from their requests."""

    def __init__(self) -> None:
        self.dev = 0  # device number of the mount
        self.lock = threading.Lock()
        self._files: dict[int, RequestedFile] = {}
        self._programs: dict[int, Program] = {}
        self._last: dict[int, int] = {}  # node -> thread of the last request
        self._looked_s = 0.0

    def request(self, node: int, thread: int) -> None:
        self._last[node] = thread

    def of_node(self, node: int | None) -> RequestedFile | None:
        """The clients are at most a second old."""
        if time.monotonic() - self._looked_s > REQUESTS_S:
            self._look()
            self._looked_s = time.monotonic()
        return self._files.get(node or 0)

    def _look(self) -> None:
        with self.lock:
            for pid, program in list(self._programs.items()):
                if program.ended:
                    self._programs.pop(pid).close()
                    for file in self._files.values():
                        file.readers = [reader for reader in file.readers if reader is not program]
        requests = list(self._last.items())
        self._last.clear()
        for node, thread in requests:
            with contextlib.suppress(OSError):  # the thread has ended
                self._record_reader(node, int(status_of(thread)["Tgid"]))

    def _record_reader(self, node: int, pid: int) -> None:
        program = self._programs.get(pid) or Program(pid)
        program.look()
        with self.lock:
            self._programs[pid] = program
            file = self._files.setdefault(node, RequestedFile((self.dev, node)))
            if program not in file.readers:
                file.readers.append(program)

    def close(self) -> None:
        with self.lock:
            for program in self._programs.values():
                program.close()
            self._programs.clear()
            self._files.clear()


class Samples:
    """The thread that samples uses of experts, from `run` to `stop`."""

    def __init__(self, state: CacheState, files: Files | FilePrograms, level: int) -> None:
        """`level`: log level of the message that page tables cannot be read."""
        self._state, self._files, self._level = state, files, level
        self._over = threading.Event()
        self._reading = threading.Lock()  # one thread reads page tables at a time
        self._tables: PageTables | None = None
        self._is_unreadable = False

    def stop(self) -> None:
        self._over.set()

    def run(self) -> None:
        pause_s = 0.0
        while not self._over.wait(pause_s):
            pause_s = self._look()
        with self._reading:
            if self._tables is not None:
                self._tables.close()
            self._is_unreadable = True

    def can_read(self) -> bool:
        """Log the reason once."""
        with self._reading:
            if self._tables is None and not self._is_unreadable:
                try:
                    self._tables = PageTables()
                except Unreadable as reason:
                    self._is_unreadable = True
                    log.log(
                        self._level, "uses of resident data are not observed, because page tables cannot be read: %s", reason
                    )
            return not self._is_unreadable

    def _accessed_pages(self, pid: int, addresses: Sequence[int]) -> list[bool]:
        with self._reading:
            if self._tables is None or self._is_unreadable:
                return [False] * len(addresses)
            return self._tables.accessed(pid, addresses)

    def touched(self, file: File, parts: Sequence[tuple[int, int]]) -> list[bool]:
        """Return for each part, (offset, bytes), whether a client has accessed it."""
        touched = [False] * len(parts)
        offsets = [offset + length * probe // PROBES for offset, length in parts for probe in range(PROBES)]
        with self._files.lock:
            for program in [program for program in file.readers if program.maps(*file.key)]:
                accessed = self._accessed_pages(program.pid, program.addresses_of(*file.key, offsets))
                touched = [was or any(accessed[at * PROBES : (at + 1) * PROBES]) for at, was in enumerate(touched)]
        return touched

    def _look(self) -> float:
        began, began_s = time.thread_time(), time.monotonic()
        with self._state.lock:
            residents = [(moe, moe.kept) for moe in self._state.expert_cache.moe_files]
        if not any(kept for _, kept in residents) or not self.can_read():
            return CHECK_S
        for moe, kept in residents:
            if kept and (file := self._files.of_node(moe.member.node)) is not None:
                used = self._accessed(file, moe, kept)
                with self._state.lock:
                    self._state.expert_cache.catch_up(moe)
                self._count(moe, used or [])
                with self._state.lock:
                    if moe.member.moe is moe:
                        self._state.expert_cache.sampled(moe, used is not None)
        pause_s = max(SAMPLE_S, SAMPLE_REST * (time.thread_time() - began))
        return max(0.0, began_s + pause_s - time.monotonic())

    def _accessed(self, file: File | RequestedFile, moe: MoeFile, experts: Sequence[int]) -> list[int] | None:
        """Return None unless one client maps the file: the kernel does not clear bits of pages that several ones map."""
        with self._files.lock:
            mappers = [program for program in file.readers if program.maps(*file.key)]
            if len(mappers) != 1:
                return None
            addresses = mappers[0].addresses_of(*file.key, list(map(moe.probes.__getitem__, experts)))
            accessed = self._accessed_pages(mappers[0].pid, addresses)
            mappers[0].cool(list(itertools.compress(addresses, accessed)))
            return list(itertools.compress(experts, accessed))

    def _count(self, moe: MoeFile, used: list[int]) -> None:
        for first in range(0, len(used), USES):
            with self._state.lock:
                if moe.member.moe is not moe or moe.alone:
                    return
                for expert in used[first : first + USES]:
                    if expert in moe.fresh:
                        moe.fresh.discard(expert)
                    else:
                        self._state.expert_cache.used(moe, expert)
