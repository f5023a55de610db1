"""Experts over FUSE: a request for one that is not there has all of its slices read and stored, in pieces.

The request takes its own piece itself, loaders take the others: behind it in its slice, then before it, then the other
slices'. A request for a piece that nobody has begun begins it, so that a reply never waits for what it does not need.

Uses of what is there send no request. So a page is taken out of each of the experts that would leave next: who is used all
the same shows it by a request for that page, and stays (as with the reference bit of CLOCK, asked for where it is about to
matter). The more leave, the more are looked at; where all stay nobody is asked.

A mapping's fault brings requests for what lies around it, of other experts too: only the slice in which a request begins is
wanted, or the next, where nothing of the first is used. The rest is answered, and dropped again.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

from llmcache.fs.backends.base import BUFFER_BYTES, BufferFetch, MemoryRegion
from llmcache.fs.engine.experts import ExpertLoad
from llmcache.fs.engine.group import ABSENT, PAGE, TOUCHED

if TYPE_CHECKING:
    from llmcache.fs.backends.fuse import FuseBackend
    from llmcache.fs.engine.experts import Mixture
    from llmcache.fs.engine.state import CacheState

PIECE_BYTES = BUFFER_BYTES
TRIPS = 4  # pages taken out for each expert that leaves
LOOK_S, IDLE_S, UNUSED_S = 0.005, 0.01, 1.0
REFAULTS_MAX = 2


class SliceReader:
    """Brings experts in for those who read them, and sees which of those that are there are used."""

    def __init__(self, backend: FuseBackend) -> None:
        self.backend = backend
        self.state: CacheState = backend.state
        self._strays: list[tuple[Mixture, int, int, int]] = []
        self._left = 0  # experts, as far as pages were taken out for that
        self._due = 0  # pages to be taken out
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """The thread that looks begins. May follow `stop`."""
        self._ending.clear()
        self._thread = threading.Thread(target=self._look, name="trips", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """And ends."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def wanted(self, mixture: Mixture, offset: int, size: int) -> int | None:
        """The slice for which a request was sent; None if that was for something before it. Lock held."""
        first = mixture.slice_at(offset)
        if first is None or mixture.states[mixture.layout.expert_of[first]] != ABSENT:
            return first
        end = mixture.end_of(first) // PAGE * PAGE
        return first if offset + size < end - PAGE else mixture.slice_at(end) if offset + size > end else None

    def claim(
        self, mixture: Mixture, number: int, offset: int, length: int, wanted: bool, pid: int
    ) -> tuple[BufferFetch | None, bool]:
        """The fetch that will have a part of a slice, and whether it is the caller's to load. Lock held.

        None: it is read by itself.
        """
        expert = mixture.layout.expert_of[number]
        if pid and mixture.states[expert] == TOUCHED:
            self._came_back(mixture, expert, length)
        if mixture.states[expert] == ABSENT:
            found = self.state.mixtures.missed(mixture, expert) if wanted and pid else []
            if not found:
                self._strays.append((mixture, expert, offset, length))
                return None, False
            for each in found:
                self._begin(mixture, each, offset)
                self.state.references.slices(mixture.group, mixture.member, mixture.ranges(each), pid)
        return self._piece(mixture, expert, offset)

    def _came_back(self, mixture: Mixture, expert: int, length: int) -> None:
        """Pages of an expert that is there are asked for: that of its tripwire, or the kernel has reclaimed some."""
        if expert in mixture.trips:
            mixture.trips.discard(expert)
            self.state.mixtures.used(mixture, expert)
            return
        self.state.counters.refault_bytes += length
        count = mixture.refaults[expert] = mixture.refaults.get(expert, 0) + 1
        if count >= REFAULTS_MAX:
            self.state.mixtures.lost(mixture, expert)

    def _begin(self, mixture: Mixture, expert: int, offset: int) -> None:
        """Has loaders bring an expert in, from `offset` on. Lock held."""
        behind: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []
        for start, length in mixture.ranges(expert):
            pieces = [(at, min(PIECE_BYTES, start + length - at)) for at in range(start, start + length, PIECE_BYTES)]
            mine = start <= offset < start + length
            behind += [piece for piece in pieces if mine and piece[0] + piece[1] > offset]
            others += [piece for piece in pieces if not (mine and piece[0] + piece[1] > offset)]
        mixture.loads[expert] = load = ExpertLoad(behind + others)
        job = functools.partial(self._bring_next, mixture, expert, load)
        self.state.jobs.extend([job] * len(load.waiting))
        self.state.work.notify(len(load.waiting))
        self._finish(mixture, expert, load)  # all of it is in the loop

    def _piece(self, mixture: Mixture, expert: int, offset: int) -> tuple[BufferFetch | None, bool]:
        load = mixture.loads.get(expert)
        if load is None:
            return None, False
        for fetch in load.loading:
            if fetch.offset <= offset < fetch.offset + fetch.length:
                fetch.users += 1
                fetch.joined = True
                return fetch, False
        for piece in load.waiting:
            if piece[0] <= offset < piece[0] + piece[1]:
                return self._take(mixture, expert, load, piece, ahead=False), True
        return None, False

    def _take(
        self, mixture: Mixture, expert: int, load: ExpertLoad, piece: tuple[int, int], ahead: bool
    ) -> BufferFetch | None:
        """Begins to read a piece; None without memory for it. Lock held."""
        offset, length = piece
        buffer = self.state.pool.take(length, ahead)
        try:
            region = buffer or MemoryRegion(PIECE_BYTES)
        except OSError:  # no memory: it is read by pages
            load.failed = True
            load.waiting.clear()
            self._finish(mixture, expert, load)
            return None
        load.waiting.remove(piece)
        mixture.member.loads += 1
        backing = mixture.member.backing
        fetch = BufferFetch(expert, length, ahead, backing, buffer=buffer, region=region, offset=offset, load=load)
        load.loading.append(fetch)
        return fetch

    def _bring_next(self, mixture: Mixture, expert: int, load: ExpertLoad) -> None:
        """A loader's work: the next piece that nobody has begun, if there still is one."""
        with self.state.lock:
            fetch = self._take(mixture, expert, load, load.waiting[0], ahead=True) if load.waiting else None
        if fetch is not None:
            self.backend.load(mixture.group, mixture.member, fetch)
            self.backend.store(mixture.group, mixture.member, fetch)

    def ended(self, mixture: Mixture, fetch: BufferFetch, stored: bool) -> None:
        """A piece is in the page cache, or could not be brought there. Lock held."""
        load, expert = fetch.load, fetch.extent
        assert load is not None
        load.loading.remove(fetch)
        load.failed = load.failed or not stored
        if stored:
            self.state.counters.stored_bytes += fetch.length
        self._finish(mixture, expert, load)

    def _finish(self, mixture: Mixture, expert: int, load: ExpertLoad) -> None:
        if not load.waiting and not load.loading and mixture.loads.get(expert) is load:
            del mixture.loads[expert]
            if load.failed:  # what did get in has to go
                self._strays += [(mixture, expert, offset, length) for offset, length in mixture.own(expert)]
            self.state.mixtures.arrived(mixture, expert, not load.failed)

    # The thread

    def _look(self) -> None:
        pause_s = 0.0
        while not self._ending.wait(pause_s):
            with self.state.lock:
                places = self._stray_places() + self._trip_places()
            for node, offset, length in places:
                self.backend.drop(node, offset, length)
            pause_s = LOOK_S if places else IDLE_S if self.state.mixtures.mixtures else UNUSED_S

    def _stray_places(self) -> list[tuple[int, int, int]]:
        strays, self._strays = self._strays, []
        absent = [stray for stray in strays if stray[0].states[stray[1]] == ABSENT]
        return [(stray[0].member.node, *stray[2:]) for stray in absent if stray[0].member.node is not None]

    def _trip_places(self) -> list[tuple[int, int, int]]:
        """A page of each of those that would leave next, if it is not out yet."""
        mixtures = self.state.mixtures
        self._due += TRIPS * (mixtures.left - self._left)
        self._left = mixtures.left
        out = sum(len(mixture.trips) for mixture in mixtures.mixtures)
        self._due = min(self._due, len(mixtures.hot) - out)
        found: list[tuple[int, int, int]] = []
        for mixture, expert in map(mixtures.of, mixtures.hot.coldest(out + self._due) if self._due else ()):
            if expert in mixture.trips or mixture.computes(expert):  # what is in use now has been counted
                continue
            if mixture.member.node is not None:
                mixture.trips.add(expert)
                found.append((mixture.member.node, mixture.probes[expert], PAGE))
        self._due -= len(found)
        return found
