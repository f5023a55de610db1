"""Who is used, and by whom; trials: whether experts are steered or left to the kernel goes by what tokens take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from subprocess import PIPE, Popen
from unittest.mock import Mock

import pytest

from llmcache.fs.backends import samples
from llmcache.fs.backends.fuse import FuseBackend
from llmcache.fs.backends.holders import SteerHolder
from llmcache.fs.backends.samples import FIRST_S, QUIET_S, TRIAL_REST, FilePrograms, Samples, Trials
from llmcache.fs.engine.experts import Mixture, TokenCost
from llmcache.units import BLOCK_BYTES
from tests.unit.fs_parts import MIB, mixture_of, new_state


class Machine:
    """A program that computes tokens, on a clock of its own; `token_s` says how long the next one takes, given `alone`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, token_s: Callable[[bool], float], missed_bytes: int = 0) -> None:
        self.now_s, self.begin_s, self.end_s = 0.0, 0.0, 0.0
        self.token_s, self.missed_bytes, self.read_bytes = token_s, missed_bytes, 0
        self.programs, self.used = 1, False
        self.state = new_state(64 * MIB)
        self.mixture: Mixture = mixture_of(self.state)
        self.there = {1, 3, 9}
        with self.state.lock:
            for expert in self.there:
                self.state.mixtures.missed(self.mixture, expert)
                self.state.mixtures.arrived(self.mixture, expert, True)
        files = Mock()
        files.opened = self.opened
        self.samples = Trials(self.state, files)
        self.samples._over = Mock(wait=self.wait)
        monkeypatch.setattr(samples, "time", Mock(monotonic=lambda: self.now_s, thread_time=lambda: 0.0))
        monkeypatch.setattr(Trials, "_accessed", lambda _self, _file, _mixture, experts: self.accessed(list(experts)))
        monkeypatch.setattr(Trials, "_read_bytes", lambda _self, _mixture: self.read_bytes if self.programs == 1 else None)
        monkeypatch.setattr("llmcache.fs.syscalls.cached_pages", self.cached_pages)

    @contextmanager
    def opened(self, _file: object) -> Iterator[int]:
        """As Files has it."""
        yield 0

    def cached_pages(self, _fd: int, offset: int, length: int) -> int:
        """One page of what is no whole expert."""
        return length // BLOCK_BYTES if offset // (4 * MIB) in self.there else offset // (4 * MIB) == 5

    def wait(self, timeout_s: float) -> bool:
        """Time passes."""
        self.now_s += timeout_s
        while self.now_s >= self.end_s:
            self.begin_s, self.end_s = self.end_s, self.end_s + self.token_s(self.mixture.alone)
            self.used = True
            self.read_bytes += self.missed_bytes * (2 if self.mixture.alone else 1)
        return False

    def accessed(self, experts: list[int]) -> list[int]:
        """The first layer is computed in a tenth of a token's time."""
        used, self.used = self.used, self.now_s < self.begin_s + 0.1 * (self.end_s - self.begin_s)
        return experts[:1] if used else []

    def trial(self) -> None:
        """The next one."""
        (model,) = self.samples._waiting() or [[self.mixture]]
        self.samples._try(model)

    @property
    def due_s(self) -> float:
        """From now on, the next one."""
        return self.samples._due_s[self.mixture.group] - self.now_s


def test_experts_are_left_to_the_kernel_while_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay where they are, and who is there is kept again once help pays."""
    took = {False: 0.05, True: 0.04}
    machine = Machine(monkeypatch, took.__getitem__, missed_bytes=1000)
    mixture, cache = machine.mixture, machine.state.mixtures
    assert machine.samples._waiting() == [], "it has just begun"
    machine.wait(FIRST_S)
    assert machine.samples._waiting() == [[mixture]]
    machine.trial()
    facts = mixture.facts()
    assert facts["alone"] and mixture.kept == [] and cache.used_bytes == machine.state.resident_bytes == len(cache.hot) == 0
    assert facts["token"] == pytest.approx({"s": 0.05, "read_bytes": 1000}, rel=0.05)
    assert facts["token_alone"] == pytest.approx({"s": 0.04, "read_bytes": 2000}, rel=0.05)
    assert machine.due_s >= max(FIRST_S, TRIAL_REST * 5 * 2.0), "a small part of the time"
    with machine.state.lock:
        cache.arrived(mixture, 7, True)  # it was on its way
    assert mixture.kept == []
    machine.trial()
    assert mixture.facts()["alone"], "nothing has changed"
    took[True] = 0.07
    machine.there.discard(3)
    machine.trial()
    assert not mixture.facts()["alone"] and mixture.kept == [1, 9] and len(cache.hot) == 2
    assert cache.used_bytes == machine.state.resident_bytes == 8 * MIB
    assert {offset // (4 * MIB) for _, offset, _, _ in machine.state.debts} == {5}, "what is there in part goes"


@pytest.mark.parametrize("alone_s", [0.051, 0.2])
def test_experts_are_steered_while_that_is_faster(monkeypatch: pytest.MonkeyPatch, alone_s: float) -> None:
    machine = Machine(monkeypatch, {False: 0.05, True: alone_s}.__getitem__)
    machine.trial()
    assert not machine.mixture.alone and machine.mixture.kept == sorted(machine.there)
    assert machine.mixture.costs[True].seconds == pytest.approx(alone_s, rel=0.02)


def test_what_is_no_token_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, and pauses between two answers."""
    tokens = iter(range(10**6))
    machine = Machine(monkeypatch, lambda alone: 3.0 if next(tokens) % 10 == 0 else 0.06 if alone else 0.05)
    machine.trial()
    assert not machine.mixture.alone and machine.mixture.costs[False].seconds == pytest.approx(0.05, rel=0.02)


def test_one_measurement_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """All became faster while the kernel had the experts."""
    machine = Machine(monkeypatch, lambda _alone: 0.05 if machine.now_s < 5 else 0.04)
    machine.trial()
    assert not machine.mixture.alone and set(machine.mixture.costs) == {False, True}


@pytest.mark.parametrize("why", ["nobody computes", "several do", "it ends", "too fast"])
def test_nothing_changes_where_tokens_cannot_be_timed(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    machine = Machine(monkeypatch, lambda _alone: {"nobody computes": 10**6, "too fast": 0.002}.get(why, 0.05))
    machine.mixture.costs = {False: TokenCost(1.0, 0)}
    if why == "several do":
        machine.programs = 2
    if why == "it ends":
        machine.token_s = lambda alone: 10**6 if alone else 0.05
    machine.trial()
    assert not machine.mixture.alone and machine.mixture.kept == sorted(machine.there)
    assert machine.mixture.costs == {False: TokenCost(1.0, 0)} and machine.now_s < 20 * QUIET_S


def test_what_a_request_has_told_of_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it came in, and where a page that was taken out is asked for: its bit is set by that very use."""
    state = new_state(64 * MIB)
    mixture, cache = mixture_of(state), state.mixtures
    backend = FuseBackend(state, SteerHolder(state, None))  # type: ignore[arg-type]
    slices, looking = backend.slices, Samples(state, FilePrograms())
    with state.lock:
        slices.claim(mixture, 9, mixture.layout.starts[9], BLOCK_BYTES, True, 1)
        cache.arrived(mixture, 9, True)
    looking._count(mixture, [9])
    assert state.counters.hit_bytes == 0
    looking._count(mixture, [9])
    assert state.counters.hit_bytes == mixture.sizes[9]
    with state.lock:
        mixture.trip(9)
        slices.claim(mixture, 9, mixture.probes[9], BLOCK_BYTES, True, 1)
    looking._count(mixture, [9])
    assert state.counters.hit_bytes == 2 * mixture.sizes[9]


def test_requests_tell_who_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads for their programs, until these end."""
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * BLOCK_BYTES))
    code = (
        "import mmap, sys, threading; file = open(sys.argv[1]); view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "threading.Thread(target=lambda: (print(threading.get_native_id(), flush=True), sys.stdin.read())).start()"
    )
    monkeypatch.setattr(samples, "REQUESTS_S", -1.0)
    status, programs = path.stat(), FilePrograms()
    programs.dev = status.st_dev
    with Popen([sys.executable, "-c", code, str(path)], stdin=PIPE, stdout=PIPE, text=True) as program:
        assert program.stdin is not None and program.stdout is not None
        thread = int(program.stdout.readline())
        assert programs.of_node(status.st_ino) is None
        programs.ask(status.st_ino, thread)
        file = programs.of_node(status.st_ino)
        assert file is not None and thread != program.pid == file.readers[0].pid
        assert file.key == (status.st_dev, status.st_ino) and file.readers[0].maps(*file.key)
        programs.ask(status.st_ino, program.pid)
        assert programs.of_node(status.st_ino) is file and len(file.readers) == 1
        program.stdin.close()
    programs.ask(status.st_ino, thread)
    assert programs.of_node(status.st_ino) is file and file.readers == []
    programs.close()
    assert programs.of_node(status.st_ino) is None


def test_of_pages_that_several_programs_map_bits_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot be cleared."""
    mixture = mixture_of(new_state(64 * MIB))
    tables = Mock(accessed=lambda _pid, addresses: [address != 0 for address in addresses])
    monkeypatch.setattr(samples, "PageTables", lambda: tables)
    looking = Samples(Mock(), Mock(lock=nullcontext()))
    one, other, none = (
        Mock(pid=pid, maps=lambda *_, mapped=pid < 3: mapped, addresses_of=lambda _dev, _ino, at: [0, *at[1:]])
        for pid in (1, 2, 3)
    )
    assert looking._accessed(Mock(readers=[one, none], key=(1, 1)), mixture, [2, 3, 5]) == [3, 5]
    one.cool.assert_called_once_with([mixture.probes[3], mixture.probes[5]])
    assert looking._accessed(Mock(readers=[one, other], key=(1, 1)), mixture, [2, 3, 5]) == []
