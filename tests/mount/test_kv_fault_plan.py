"""Random plans of faults under KvStore, with a file or the emulated device, on a disk or a mount: restores are byte-exact.

LLMCACHE_FAULT_SECONDS and LLMCACHE_FAULT_SEED work as in test_fault_plan. `possible` has the states that a crash may
restore: all since everything was last written to the ssd tier, or since the last sync if the disk drops data that it
cannot write. A restored context must be a prefix of one of them, with every whole page of the shortest.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from llmcache.errors import DataError, LlmcacheError
from llmcache.kv.tiers import KvStore, Selection, StoreConfig
from llmcache.kv.tiers.ssd import CsdTier
from tests.mount.fault_rig import NEEDS, SECONDS, SEED, Rig, full, seeds
from tests.mount.faulty import Rule
from tests.mount.live import MIB, wait_for
from tests.unit.store_parts import Plain, crash, shape_of

SHAPE = shape_of()
SIZE = SHAPE.page_tokens


@dataclass(frozen=True)
class Move:
    name: str
    seed: int


def make_moves(seed: int, count: int, mounted: bool, ssd: str) -> list[Move]:
    """Return a plan of `count` moves; every third is a fault, and each fault occurs once before any repeats."""
    chance, faults = random.Random(seed), ["crash", "full"]
    names = {"step": 9, "crop": 3, "reorder": 2, "select": 2, "save": 2, "check": 6, "move": 3, "spill": 1}
    names |= {"reopen": 1, "repair": 5}
    if mounted or ssd == "file":
        faults += ["unreadable", "unwritable", "unsynced", "slow", "short"]
    if not mounted and ssd == "file":
        faults.append("lost")
    if ssd == "csd":
        faults.append("kill_device")
    if mounted:
        faults += ["kill_daemon", "evict", "clock", "pressure"]
    picked = chance.choices(list(names), list(names.values()), k=count)
    deck: list[str] = []
    for at in range(2, count, 3):
        deck = deck or chance.sample(faults, len(faults))
        picked[at] = deck.pop()
    return [Move(name, chance.randrange(1 << 30)) for name in picked]


class KvRig:
    """A store on `path`, its model, and the current faults."""

    possible: list[Plain]
    unsynced: list[Plain]

    def __init__(self, rig: Rig, path: Path, ssd: str) -> None:
        self.rig, self.path = rig, path
        self.config = StoreConfig(SHAPE, 2, 4, 8, cpu_pages=5, path=path, ssd=ssd, threads=1)
        self.store = KvStore(self.config)
        self.plain = Plain(SHAPE, 2)
        self._reset_possible()
        self.broken: set[str] = set()
        self.errors: list[str] = []
        self._disk = contextlib.ExitStack()
        self._steps = iter(range(10, 1 << 30, 7))

    def carry_out(self, move: Move) -> None:
        getattr(self, "do_" + move.name)(random.Random(move.seed))

    def tried(self, call: Callable[[], Any]) -> bool:
        """Return whether a call succeeded; an error is allowed only during a fault, and must have exit code 3."""
        try:
            call()
            return True
        except LlmcacheError as error:
            assert self.broken, f"nothing is broken: {error.message}"
            assert error.exit_code == 3, error.message
            self.errors.append(error.message)
            return False

    def record_state(self, written: bool) -> None:
        """Add the model's state to those that a crash may restore.

        If everything is written and no fault is active, it is the only one.
        """
        state = copy.deepcopy(self.plain)
        self.possible = [state] if written and not self.broken else [*self.possible, state]
        self.unsynced.append(state)

    # Operations of a program

    def do_step(self, chance: random.Random) -> None:
        count, seed, written = chance.choice([1, 1, 2, 3, 7, 30]), next(self._steps), True
        for layer in chance.sample(range(SHAPE.layers), SHAPE.layers):
            rows = self.plain.grow(layer, count, seed)
            written &= self.tried(partial(self.store.append, layer, *rows))
        ids = self.plain.grow_ids(count, seed)
        written &= self.tried(lambda: self.store.commit(ids, ids + 7))
        self.record_state(written)

    def do_crop(self, chance: random.Random) -> None:
        """Remove tokens; if a read fails before the change, the length stays the same."""
        tokens = chance.randrange(max(0, self.store.length - 20), self.store.length + 1)
        written = self.tried(lambda: self.store.crop(tokens))
        assert self.store.length in (tokens, self.plain.ids.shape[1])
        self.plain.crop(self.store.length)
        self.record_state(written)

    def do_reorder(self, chance: random.Random) -> None:
        self._choose([chance.randrange(self.store.batch) for _ in range(self.store.batch)])

    def do_select(self, chance: random.Random) -> None:
        self._choose([chance.randrange(self.store.batch) for _ in range(chance.choice([1, 2, 3]))])

    def _choose(self, index: list[int]) -> None:
        written = self.tried(lambda: self.store.select(np.array(index)))
        self.plain.choose(np.array(index))
        self.record_state(written)

    def do_save(self, chance: random.Random) -> None:
        if self.tried(self.store.save):
            self.record_state(True)
            self.unsynced = self.unsynced[-1:]

    def do_spill(self, chance: random.Random) -> None:
        """Write the pages that could not be written before."""
        if self.tried(self.store.spill):
            self.record_state(True)

    def do_check(self, chance: random.Random) -> None:
        """Check every byte, or get an error."""
        self.tried(lambda: self.plain.check_all(self.store))

    def do_move(self, chance: random.Random) -> None:
        """Move pages of the middle up or down, and gather part of a selection."""
        middle = self.store.middle
        if not len(middle):
            return
        page, layer, sequence = chance.choice(middle), chance.randrange(SHAPE.layers), chance.randrange(self.store.batch)
        with contextlib.suppress(ValueError):  # no room in the pool, or not written yet
            move = self.store.move_up if chance.random() < 0.5 else self.store.move_down
            self.tried(lambda: move(layer, sequence, np.array([page])))
        chosen = Selection.of_pages(np.full((self.store.batch, SHAPE.kv_heads, 1), page), SIZE)
        self.tried(lambda: self.plain.check(layer, self.store.gather(layer, chosen)))

    # Faults

    def do_full(self, chance: random.Random) -> None:
        if "full" not in self.broken:
            self._disk.enter_context(full(self.rig.files))
            self.broken.add("full")

    def do_slow(self, chance: random.Random) -> None:
        rule = Rule("slow", chance.choice(["read", "write", "fsync"]), "*.kv", seconds=chance.choice([0.002, 0.02]))
        self.rig.set_rules([*self.rig.rules, rule])

    def do_short(self, chance: random.Random) -> None:
        self.rig.set_rules([*self.rig.rules, Rule("short", chance.choice(["read", "write"]), "*.kv")])

    def do_clock(self, chance: random.Random) -> None:
        """Shift the wall clock of the mount's daemon; the store itself never reads it."""
        self.rig.set_clock(chance.choice([-1e9, -30.0, 30.0, 1e9]))

    def do_pressure(self, chance: random.Random) -> None:
        """Limit the mount's memory to slightly more than it uses."""
        if self.rig.group is not None:
            with contextlib.suppress(OSError):  # EBUSY: the limit is too low
                used = self.rig.group.usage().current_bytes
                self.rig.group.set_memory(max(96 * MIB, used + chance.choice([12, 40]) * MIB))

    def _add_error(self, call: str, chance: random.Random) -> None:
        first = chance.choice([0, 0, 8192, 200_000])
        end = first + chance.choice([4096, 100_000, 1 << 40])
        self.rig.set_rules([*self.rig.rules, Rule("eio", call, "*.kv", first, end)])
        self.broken.add(call)

    def do_unreadable(self, chance: random.Random) -> None:
        self._add_error("read", chance)

    def do_unwritable(self, chance: random.Random) -> None:
        self._add_error("write", chance)

    def do_unsynced(self, chance: random.Random) -> None:
        self._add_error("fsync", chance)

    def do_lost(self, chance: random.Random) -> None:
        """fsync returns EIO, and all writes since the last one are lost."""
        self.rig.set_rules([*self.rig.rules, Rule("lost", "fsync", "*.kv")])
        self.broken.add("fsync")
        self.possible = [*self.unsynced, *self.possible]

    def do_kill_device(self, chance: random.Random) -> None:
        assert isinstance(self.store.ssd, CsdTier)
        device = self.store.ssd.device
        if device.process.poll() is None:
            os.kill(device.process.pid, signal.SIGKILL)
            device.process.wait()
        self.broken.add("device")

    def do_evict(self, chance: random.Random) -> None:
        self.rig.control(op="evict", globs=[])

    # Repair and restart

    def _heal(self) -> None:
        self._disk.close()
        self.rig.set_rules([])
        self.rig.set_clock(0.0)
        if self.rig.group is not None:
            self.rig.group.set_memory(None)
        self.broken -= {"full", "read", "write", "fsync"}

    def do_repair(self, chance: random.Random) -> None:
        """Repair everything: all data is there, and memory is within its bound."""
        self._heal()
        if "device" in self.broken:
            self.store.restart_device()
        self.broken.clear()
        self.store.spill()
        self.record_state(True)
        self.plain.check_all(self.store)

    def do_reopen(self, chance: random.Random) -> None:
        self.do_repair(chance)
        self.store.save()
        self.store.close()
        self._restore(whole=True)

    def do_crash(self, chance: random.Random) -> None:
        """kill -9 of the process, in any state."""
        crash(self.store)
        self._heal()
        self.broken.clear()
        self._restore()

    def do_kill_daemon(self, chance: random.Random) -> None:
        """kill -9 of the mount's daemon, which invalidates the store's descriptors."""
        assert self.rig.daemon is not None
        self.rig.daemon.kill()
        self.rig.daemon.wait(120)
        self.broken.add("mount")
        self.do_check(chance)
        crash(self.store)
        self.rig.force_unmount()
        self.rig.start_daemon()
        self._heal()
        self.broken.clear()
        self._restore()

    def _restore(self, whole: bool = False) -> None:
        least = min(state.ids.shape[1] // SIZE * SIZE for state in self.possible)
        try:
            self.store = KvStore.restore(self.path, self.config)
        except DataError as error:
            assert "has no sequences" in error.message and not least, error.message
            self.path.unlink()
            self.store = KvStore(self.config)
            self.plain = Plain(SHAPE, 2)
            self._reset_possible()
            return
        length = self.store.length
        alike = (state for state in reversed(self.possible) if np.array_equal(state.ids[:, :length], self.store.ids))
        found = next(alike, None)
        shapes = [state.ids.shape for state in self.possible]
        assert found is not None, f"[{self.store.batch}, {length}] is a beginning of none of {shapes}"
        assert length >= (self.plain.ids.shape[1] if whole else least), f"{length} tokens of {shapes}"
        self.plain = copy.deepcopy(found)
        self.plain.crop(length)
        self.plain.check_all(self.store)
        self._reset_possible()

    def _reset_possible(self) -> None:
        """Record that only the current state of the store can be restored from now on."""
        self.possible = [copy.deepcopy(self.plain)]
        self.unsynced = self.possible.copy()

    def end(self) -> None:
        self._heal()
        crash(self.store)


@contextlib.contextmanager
def kv_rig(rig: Rig, path: Path, ssd: str) -> Iterator[KvRig]:
    store = KvRig(rig, path, ssd)
    try:
        yield store
    finally:
        store.end()


SHORT_MOVES = {None: 24, "steer": 36, "arena": 36}  # each has every fault at least once
LONG_MOVES = 300

pytestmark = NEEDS


@pytest.mark.parametrize(("mode", "ssd"), [(None, "file"), ("steer", "file"), ("arena", "csd")])
def test_a_plan_of_faults_under_a_store(tmp_path: Path, mode: str | None, ssd: str) -> None:
    with Rig(tmp_path, mode, 0, sizes={}) as rig:
        for seed in seeds(7):
            one_plan(rig, ssd, seed, LONG_MOVES if SECONDS or SEED else SHORT_MOVES[rig.mode])
        if mode is not None:
            rig.end()


def one_plan(rig: Rig, ssd: str, seed: int, count: int) -> None:
    """Carry out one plan; a failure reports the moves and the seed."""
    directory = rig.source if rig.mode is None else rig.point
    moves, at = make_moves(seed, count, rig.mode is not None, ssd), 0
    with kv_rig(rig, directory / "context.kv", ssd) as store:
        try:
            for move in moves:
                store.carry_out(move)
                at += 1
            store.do_reopen(random.Random(seed))
            store.store.discard()
        except BaseException as error:
            names = " ".join(move.name for move in moves[max(0, at - 12) : at + 1])
            hint = f"LLMCACHE_FAULT_SEED={seed} repeats it; move {at} of {rig.mode} {ssd}"
            raise AssertionError(f"{error}\n{names}\n{hint}\nbroken: {store.broken}, {store.errors[-3:]}") from error
    # On the faulty file system, a file deleted while open has another name until it is closed.
    wait_for(lambda: os.listdir(rig.files) == [], "nothing is left behind")
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in children if "llmcache.papers.csd.device" in child.cmdline()]
