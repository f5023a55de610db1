"""Accessed bits of experts: read and cleared again and again, they tell who is used, and how long tokens take.

In place a *trial* finds out by that whether help pays: what a token takes while experts are steered, and while the kernel
has them alone. What is faster goes on until the next trial: where little is missed little can be saved, and the daemon takes
time of processors that a program may wait for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmcache.bpf.pagetables import PageTables, Unreadable
from llmcache.fs import syscalls
from llmcache.fs.backends.files import CHECK_S, Program
from llmcache.fs.engine.experts import TokenCost
from llmcache.fs.engine.group import TOUCHED
from llmcache.procfs import read_bytes_of, status_of
from llmcache.units import BLOCK_BYTES

if TYPE_CHECKING:
    from llmcache.fs.backends.files import File, Files
    from llmcache.fs.engine.experts import Mixture
    from llmcache.fs.engine.group import Group
    from llmcache.fs.engine.state import CacheState

log = logging.getLogger(__name__)

REQUESTS_S = 1.0  # after which it is seen anew who asks over FUSE
SAMPLE_S, SAMPLE_REST = 0.02, 100  # experts are looked at so often, and for so small a part of the time
USES = 64  # are counted at a time: who misses an expert meanwhile waits for no more
FIRST_S, TRIAL_REST = 30.0, 20  # until the first trial of what is read; between two, times as long as one takes
TOKENS, LEAST_S = 64, 2.0  # are timed, and for so long at least
SETTLED_SHARE, SETTLED_TOKENS, SETTLE_S = 0.5, 1024, 0.1  # of the room is read, or so many pass; it looks so often
POLLS, LEAST_POLLS = 4, 3  # of a token's time
POLL_S, POLL_MAX_S = 0.001, 0.02
QUIET_S = 10.0  # without a token: nobody computes
LONG = 8  # times the median: a prompt, or a pause between two answers
GAIN = 0.97  # of the time it has to take, to be changed to
SLOW, SLOW_TOKENS = 1.5, 32  # so many times what a token took before, over so many, is enough to know


@dataclass
class RequestedFile:
    """A file over FUSE, and the programs whose requests for it were seen."""

    key: tuple[int, int]
    readers: list[Program] = field(default_factory=list)


class FilePrograms:
    """Over FUSE: who reads which file, by what is asked for."""

    def __init__(self) -> None:
        self.dev = 0  # the mount's
        self.lock = threading.Lock()
        self._files: dict[int, RequestedFile] = {}
        self._programs: dict[int, Program] = {}
        self._last: dict[int, int] = {}  # node -> the thread that has asked last
        self._looked_s = 0.0

    def ask(self, node: int, thread: int) -> None:
        """A thread of some program asks for a part of a file."""
        self._last[node] = thread

    def of_node(self, node: int | None) -> RequestedFile | None:
        """The file and who reads it, as of a second ago."""
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
        asked = list(self._last.items())
        self._last.clear()
        for node, thread in asked:
            with contextlib.suppress(OSError):  # it has ended
                self._note(node, int(status_of(thread)["Tgid"]))

    def _note(self, node: int, pid: int) -> None:
        program = self._programs.get(pid) or Program(pid)
        program.look()
        with self.lock:
            self._programs[pid] = program
            file = self._files.setdefault(node, RequestedFile((self.dev, node)))
            if program not in file.readers:
                file.readers.append(program)

    def close(self) -> None:
        """Lets go of all programs."""
        with self.lock:
            for program in self._programs.values():
                program.close()
            self._programs.clear()
            self._files.clear()


class Samples:
    """The thread that looks at experts, from `run` to `stop`."""

    unreadable = logging.INFO  # over FUSE requests tell of uses too

    def __init__(self, state: CacheState, files: Files | FilePrograms) -> None:
        self._state, self._files = state, files
        self._over = threading.Event()
        self._tables: PageTables | None = None
        self._timed = range(0)  # experts whose bits tell of tokens
        self._look_s = 0.0  # when they are looked at again

    def stop(self) -> None:
        """Ends `run` soon."""
        self._over.set()

    def run(self) -> None:
        """Looks again and again which experts that are there were used, as long as that costs little."""
        try:
            while not self._over.wait(max(0.0, self._look_s - time.monotonic())):
                self._look()
                self._looked()
        except Unreadable as reason:
            log.log(self.unreadable, "which experts are used cannot be seen in page tables: %s", reason)
        finally:
            if self._tables is not None:
                self._tables.close()

    def _looked(self) -> None:
        """After each look."""

    @property
    def _pages(self) -> PageTables:
        if self._tables is None:
            self._tables = PageTables()
        return self._tables

    def _look(self) -> None:
        """Counts uses, and says when it wants to be called again."""
        began, began_s = time.thread_time(), time.monotonic()
        with self._state.lock:
            found = [(mixture, mixture.kept) for mixture in self._state.mixtures.mixtures]
        for mixture, kept in found:
            if kept and (file := self._files.of_node(mixture.member.node)) is not None:
                used = self._accessed(file, mixture, [expert for expert in kept if expert not in self._timed])
                with self._state.lock:
                    self._state.mixtures.catch_up(mixture)
                self._count(mixture, used)
        pause_s = max(SAMPLE_S, SAMPLE_REST * (time.thread_time() - began)) if any(kept for _, kept in found) else CHECK_S
        self._look_s = began_s + pause_s

    def _accessed(self, file: File | RequestedFile, mixture: Mixture, experts: Sequence[int]) -> list[int]:
        """Those of `experts` that were used since they were looked at last.

        None where several programs map them: the bits of such pages are not cleared.
        """
        with self._files.lock:
            mappers = [program for program in file.readers if program.maps(*file.key)]
            if len(mappers) != 1:
                return []
            addresses = mappers[0].addresses_of(*file.key, list(map(mixture.probes.__getitem__, experts)))
            accessed = self._pages.accessed(mappers[0].pid, addresses)
            mappers[0].cool(list(itertools.compress(addresses, accessed)))
            return list(itertools.compress(experts, accessed))

    def _count(self, mixture: Mixture, used: list[int]) -> None:
        for first in range(0, len(used), USES):
            with self._state.lock:
                if mixture.member.mixture is not mixture or mixture.alone:
                    return
                for expert in used[first : first + USES]:
                    if expert in mixture.fresh:
                        mixture.fresh.discard(expert)
                    else:
                        self._state.mixtures.used(mixture, expert)


class Trials(Samples):
    """And has tokens timed, in place."""

    unreadable = logging.WARNING

    def __init__(self, state: CacheState, files: Files) -> None:
        super().__init__(state, files)
        self._source = files
        self._due_s: dict[Group, float] = {}  # when the next trial of a model is

    def _looked(self) -> None:
        for model in self._waiting():
            self._try(model)

    def _rest(self, pause_s: float) -> bool:
        """Waits, and looks at experts if that is due; True at the end."""
        if self._over.wait(pause_s):
            return True
        if time.monotonic() >= self._look_s:
            self._look()
        return False

    def _waiting(self) -> list[list[Mixture]]:
        """The models whose trial is due, each as the mixtures of its files."""
        now_s = time.monotonic()
        with self._state.lock:
            models: dict[Group, list[Mixture]] = {}
            for mixture in self._state.mixtures.mixtures:
                models.setdefault(mixture.group, []).append(mixture)
        self._due_s = {group: self._due_s.get(group, now_s + FIRST_S) for group in models}
        return [model for group, model in models.items() if self._due_s[group] <= now_s]

    def _try(self, model: list[Mixture]) -> None:
        """Goes on, with help or without, in the way in which tokens take less time."""
        began_s, was_alone = time.monotonic(), model[0].alone
        costs = self._compare(model)
        changes = len(costs) > 2 and not costs[1].exceeds(costs[2], GAIN)
        self._turn(model, was_alone is not changes)
        for mixture in model if len(costs) > 1 else []:
            mixture.costs = {was_alone: costs[0], not was_alone: costs[1]}
        if changes:
            log.info("experts are %s", "left to the kernel" if model[0].alone else "steered again")
        now_s = time.monotonic()
        self._due_s[model[0].group] = now_s + max(FIRST_S, TRIAL_REST * (now_s - began_s))

    def _compare(self, model: list[Mixture]) -> list[TokenCost]:
        """What tokens take as it is, the other way, and as it is again; the third only where the second is less."""
        was_alone = model[0].alone
        costs: list[TokenCost] = []
        for alone in (was_alone, not was_alone, was_alone):
            before = costs[-1] if costs else None
            if self._turn(model, alone) and before is not None:
                self._settle(model[0], before)
            cost = self._cost(model[0], before)
            if cost is None:
                break
            costs.append(cost)
            if len(costs) == 2 and cost.exceeds(before, GAIN):
                break
        return costs

    def _settle(self, mixture: Mixture, before: TokenCost) -> None:
        """Waits until what is there is the doing of who decides now, where a token takes about as long as `before`."""
        end_s = time.monotonic() + SETTLED_TOKENS * before.seconds
        first_bytes = read_bytes = self._read_bytes(mixture)
        share = SETTLED_SHARE * self._state.mixtures.room_bytes
        while first_bytes is not None and read_bytes is not None and read_bytes - first_bytes < share:
            if time.monotonic() > end_s or self._rest(SETTLE_S):
                return
            read_bytes = self._read_bytes(mixture)

    def _cost(self, mixture: Mixture, before: TokenCost | None) -> TokenCost | None:
        """Times tokens, fewer where they take much longer than `before`; None if nobody computes, or several programs do."""
        file, first_bytes = self._files.of_node(mixture.member.node), self._read_bytes(mixture)
        began: list[float] = []
        polls, was_used, last_s = 0, True, time.monotonic()
        used_s = last_s
        _, first, count = mixture.layout.layers[0]
        self._timed = range(first, first + count)
        try:
            while file is not None and first_bytes is not None and mixture.member.mixture is mixture:
                pause_s = min(POLL_MAX_S, max(POLL_S, (time.monotonic() - used_s) / POLLS))
                if self._rest(pause_s) or time.monotonic() - last_s > QUIET_S:
                    break
                used = self._accessed(file, mixture, self._timed)
                self._count(mixture, [expert for expert in used if mixture.states[expert] == TOUCHED])
                polls += bool(began)
                used_s = time.monotonic() if used else used_s
                if used and not was_used:
                    last_s = used_s
                    began.append(last_s)
                    read_bytes = self._read_bytes(mixture)
                    if read_bytes is None or polls < LEAST_POLLS * (len(began) - 1):
                        break
                    enough = len(began) > TOKENS and last_s - began[0] > LEAST_S
                    if enough or (before is not None and len(began) > SLOW_TOKENS):
                        cost = _average(began, read_bytes - first_bytes)
                        if enough or cost.exceeds(before, SLOW):
                            return cost
                was_used = bool(used)
        finally:
            self._timed = range(0)
        return None

    def _read_bytes(self, mixture: Mixture) -> int | None:
        """What the program that reads a file, and this one, have read from storage; None if not one does."""
        file = self._files.of_node(mixture.member.node)
        with self._files.lock:
            pids = [] if file is None else [program.pid for program in file.readers if program.maps(*file.key)]
        if len(pids) != 1:
            return None
        try:
            return read_bytes_of(pids[0]) + self._state.counters.stored_bytes
        except OSError:
            return None

    def _turn(self, model: list[Mixture], alone: bool) -> bool:
        """Leaves experts to the kernel, or takes those that are there; False if that is how it is."""
        changed = False
        for mixture in model:
            if mixture.alone is alone:
                continue
            changed = True
            whole, debts = ([], []) if alone else self._found(mixture)
            with self._state.lock:
                if mixture.member.mixture is mixture:
                    self._state.mixtures.turn(mixture, alone, whole)
                    self._state.debts += debts
                    self._state.room.notify()
        return changed

    def _found(self, mixture: Mixture) -> tuple[list[int], list[tuple[int, int, int, int]]]:
        """The experts that are there, and what is to be dropped of those that are there in part."""
        whole: list[int] = []
        debts: list[tuple[int, int, int, int]] = []
        file = self._source.of_node(mixture.member.node)
        if file is None:
            return whole, debts
        with contextlib.suppress(OSError), self._source.opened(file) as fd:
            for expert in range(mixture.layout.count):
                pages = sum(syscalls.cached_pages(fd, *part) for part in mixture.ranges(expert))
                if pages * BLOCK_BYTES >= mixture.sizes[expert] > 0:
                    whole.append(expert)
                elif pages:
                    debts += [(mixture.member.node or 0, *part, 0) for part in mixture.own(expert)]
        return whole, debts


def _average(began: list[float], read_bytes: int) -> TokenCost:
    """Of tokens, from when each began, and what all have read."""
    took = [end - begin for begin, end in itertools.pairwise(began)]
    most = LONG * sorted(took)[len(took) // 2]
    usual = [each for each in took if each <= most]
    return TokenCost(sum(usual) / len(usual), read_bytes // len(took))
