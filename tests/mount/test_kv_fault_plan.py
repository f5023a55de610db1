"""Random plans of faults under KvStore, on a file and the emulated device, on a disk and within a mount: byte-exact.

LLMCACHE_FAULT_SECONDS and LLMCACHE_FAULT_SEED as in test_fault_plan. `possible` are the states that a crash may bring
back: all since everything was on the ssd tier last, or on the disk last where that lets go what it cannot write. What is
restored must be a beginning of one of them, with every whole page of the shortest.
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
    """One thing that is done: its name, and a seed for its details."""

    name: str
    seed: int


def make_moves(seed: int, count: int, mounted: bool, ssd: str) -> list[Move]:
    """Return a plan of so many moves, one of three a fault: each of them once before any comes again."""
    chance, faults = random.Random(seed), ["crash", "full"]
    names = {"step": 9, "crop": 3, "reorder": 2, "select": 2, "save": 2, "look": 6, "move": 3, "spill": 1}
    names |= {"again": 1, "repair": 5}
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
    """A store on `path`, its model, and what is broken at the moment."""

    possible: list[Plain]
    unsynced: list[Plain]

    def __init__(self, rig: Rig, path: Path, ssd: str) -> None:
        self.rig, self.path = rig, path
        self.config = StoreConfig(SHAPE, 2, 4, 8, cpu_pages=5, path=path, ssd=ssd, threads=1)
        self.store = KvStore(self.config)
        self.plain = Plain(SHAPE, 2)
        self._know()
        self.broken: set[str] = set()
        self.errors: list[str] = []
        self._disk = contextlib.ExitStack()
        self._steps = iter(range(10, 1 << 30, 7))

    def carry_out(self, move: Move) -> None:
        """Do one move."""
        getattr(self, "do_" + move.name)(random.Random(move.seed))

    def tried(self, call: Callable[[], Any]) -> bool:
        """Return whether a call went well; an error must have a fault to come from, and say what the user can do."""
        try:
            call()
            return True
        except LlmcacheError as error:
            assert self.broken, f"nothing is broken: {error.message}"
            assert error.exit_code == 3, error.message
            self.errors.append(error.message)
            return False

    def note(self, written: bool) -> None:
        """Note the model's state as one that a crash may bring back; as the only one if all of it was written."""
        state = copy.deepcopy(self.plain)
        self.possible = [state] if written and not self.broken else [*self.possible, state]
        self.unsynced.append(state)

    # What a program does

    def do_step(self, chance: random.Random) -> None:
        """Tokens for all layers."""
        count, seed, written = chance.choice([1, 1, 2, 3, 7, 30]), next(self._steps), True
        for layer in chance.sample(range(SHAPE.layers), SHAPE.layers):
            rows = self.plain.grow(layer, count, seed)
            written &= self.tried(partial(self.store.append, layer, *rows))
        ids = self.plain.grow_ids(count, seed)
        written &= self.tried(lambda: self.store.commit(ids, ids + 7))
        self.note(written)

    def do_crop(self, chance: random.Random) -> None:
        """Fewer tokens; where reading fails before anything is changed, as many as before."""
        tokens = chance.randrange(max(0, self.store.length - 20), self.store.length + 1)
        written = self.tried(lambda: self.store.crop(tokens))
        assert self.store.length in (tokens, self.plain.ids.shape[1])
        self.plain.crop(self.store.length)
        self.note(written)

    def do_reorder(self, chance: random.Random) -> None:
        """Beam search."""
        self._choose([chance.randrange(self.store.batch) for _ in range(self.store.batch)])

    def do_select(self, chance: random.Random) -> None:
        """More sequences, or fewer."""
        self._choose([chance.randrange(self.store.batch) for _ in range(chance.choice([1, 2, 3]))])

    def _choose(self, index: list[int]) -> None:
        written = self.tried(lambda: self.store.select(np.array(index)))
        self.plain.choose(np.array(index))
        self.note(written)

    def do_save(self, chance: random.Random) -> None:
        """Everything, the tail too."""
        if self.tried(self.store.save):
            self.note(True)
            self.unsynced = self.unsynced[-1:]

    def do_spill(self, chance: random.Random) -> None:
        """What could not be written before."""
        if self.tried(self.store.spill):
            self.note(True)

    def do_look(self, chance: random.Random) -> None:
        """Every byte, or an error."""
        self.tried(lambda: self.plain.check_all(self.store))

    def do_move(self, chance: random.Random) -> None:
        """Pages of the middle up or down, and a part of what is chosen."""
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
        """No block is left on the disk."""
        if "full" not in self.broken:
            self._disk.enter_context(full(self.rig.files))
            self.broken.add("full")

    def do_slow(self, chance: random.Random) -> None:
        """Requests that take their time."""
        rule = Rule("slow", chance.choice(["read", "write", "fsync"]), "*.kv", seconds=chance.choice([0.002, 0.02]))
        self.rig.set_rules([*self.rig.rules, rule])

    def do_short(self, chance: random.Random) -> None:
        """Answers of fewer bytes than asked for."""
        self.rig.set_rules([*self.rig.rules, Rule("short", chance.choice(["read", "write"]), "*.kv")])

    def do_clock(self, chance: random.Random) -> None:
        """The wall clock of the mount's daemon jumps; the store's own is never asked."""
        self.rig.set_clock(chance.choice([-1e9, -30.0, 30.0, 1e9]))

    def do_pressure(self, chance: random.Random) -> None:
        """The mount has little more memory than it uses."""
        if self.rig.group is not None:
            with contextlib.suppress(OSError):  # EBUSY: not so little
                used = self.rig.group.usage().current_bytes
                self.rig.group.set_memory(max(96 * MIB, used + chance.choice([12, 40]) * MIB))

    def _fails(self, call: str, chance: random.Random) -> None:
        first = chance.choice([0, 0, 8192, 200_000])
        end = first + chance.choice([4096, 100_000, 1 << 40])
        self.rig.set_rules([*self.rig.rules, Rule("eio", call, "*.kv", first, end)])
        self.broken.add(call)

    def do_unreadable(self, chance: random.Random) -> None:
        """EIO of reads."""
        self._fails("read", chance)

    def do_unwritable(self, chance: random.Random) -> None:
        """EIO of writes."""
        self._fails("write", chance)

    def do_unsynced(self, chance: random.Random) -> None:
        """EIO of fsync."""
        self._fails("fsync", chance)

    def do_lost(self, chance: random.Random) -> None:
        """EIO of fsync, and nothing is left of what was written since the last one."""
        self.rig.set_rules([*self.rig.rules, Rule("lost", "fsync", "*.kv")])
        self.broken.add("fsync")
        self.possible = [*self.unsynced, *self.possible]

    def do_kill_device(self, chance: random.Random) -> None:
        """kill -9 of the emulated device."""
        assert isinstance(self.store.ssd, CsdTier)
        device = self.store.ssd.device
        if device.process.poll() is None:
            os.kill(device.process.pid, signal.SIGKILL)
            device.process.wait()
        self.broken.add("device")

    def do_evict(self, chance: random.Random) -> None:
        """The mount gives everything up."""
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
        """Everything works again: all is there, and nothing more than the bound stays in memory."""
        self._heal()
        if "device" in self.broken:
            self.store.restart_device()
        self.broken.clear()
        self.store.spill()
        self.note(True)
        self.plain.check_all(self.store)

    def do_again(self, chance: random.Random) -> None:
        """Saved, closed and restored in order."""
        self.do_repair(chance)
        self.store.save()
        self.store.close()
        self._restore(whole=True)

    def do_crash(self, chance: random.Random) -> None:
        """kill -9 of the process, in whatever state."""
        crash(self.store)
        self._heal()
        self.broken.clear()
        self._restore()

    def do_kill_daemon(self, chance: random.Random) -> None:
        """kill -9 of the mount's daemon: the store's descriptors are dead with it."""
        assert self.rig.daemon is not None
        self.rig.daemon.kill()
        self.rig.daemon.wait(120)
        self.broken.add("mount")
        self.do_look(chance)
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
            self._know()
            return
        length = self.store.length
        alike = (state for state in reversed(self.possible) if np.array_equal(state.ids[:, :length], self.store.ids))
        found = next(alike, None)
        told = [state.ids.shape for state in self.possible]
        assert found is not None, f"[{self.store.batch}, {length}] is a beginning of none of {told}"
        assert length >= (self.plain.ids.shape[1] if whole else least), f"{length} tokens of {told}"
        self.plain = copy.deepcopy(found)
        self.plain.crop(length)
        self.plain.check_all(self.store)
        self._know()

    def _know(self) -> None:
        """Nothing but what the store has can come back from now on."""
        self.possible = [copy.deepcopy(self.plain)]
        self.unsynced = self.possible.copy()

    def end(self) -> None:
        """End the store, whatever state it is in."""
        self._heal()
        crash(self.store)


@contextlib.contextmanager
def kv_rig(rig: Rig, path: Path, ssd: str) -> Iterator[KvRig]:
    """Yield a store on `path`, ended in the end."""
    store = KvRig(rig, path, ssd)
    try:
        yield store
    finally:
        store.end()


SHORT_MOVES = {None: 24, "steer": 36, "arena": 36}  # every fault at least once
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
    """Carry one plan out; a failure tells which."""
    directory = rig.source if rig.mode is None else rig.point
    moves, at = make_moves(seed, count, rig.mode is not None, ssd), 0
    with kv_rig(rig, directory / "context.kv", ssd) as store:
        try:
            for move in moves:
                store.carry_out(move)
                at += 1
            store.do_again(random.Random(seed))
            store.store.discard()
        except BaseException as error:
            told = " ".join(move.name for move in moves[max(0, at - 12) : at + 1])
            hint = f"LLMCACHE_FAULT_SEED={seed} does it again; move {at} of {rig.mode} {ssd}"
            raise AssertionError(f"{error}\n{told}\n{hint}\nbroken: {store.broken}, {store.errors[-3:]}") from error
    # What was deleted while it was open has another name on the faulty file system until it is closed.
    wait_for(lambda: os.listdir(rig.files) == [], "nothing is left behind")
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in children if "llmcache.kv.csd.device" in child.cmdline()]
