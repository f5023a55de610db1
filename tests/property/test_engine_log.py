"""The engine against a modeled kernel: its log, applied to another core, gives the same state, which the arena matches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmcache.cache.steering import HIT, Steering
from llmcache.mount.backends.pins import ArenaPinStore
from tests.property.kernel import wait_until
from tests.property.rig import BUDGET, LOOP, MIB, Rig, in_threads, looper, reader, running
from tests.property.test_engine_changes import change_behind


class ListLog:
    """Replaces AccessLog: stores rows and events in order, with the extent of each row."""

    path = "list"
    lost = 0

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []
        self.files: dict[int, tuple[str, int]] = {}
        self.rows = 0

    def row(self, file: int, first: int, count: int, op: int, miss: int, pid: int) -> None:
        self.rows += 1
        self.entries.append(("row", (*self.files[file], first, count, miss)))

    def event(self, event: Sequence[Any]) -> None:
        if event[0] == "file":
            self.files[event[1]] = (event[2], event[3])
        else:
            self.entries.append(("event", event))

    def file(self, *_entry: Any) -> None:
        pass


def replayed_core(log: ListLog, limit_bytes: int) -> Steering:
    """Return a core that has processed the log; its results must be those in the log."""
    core = Steering(limit_bytes)
    for kind, entry in log.entries:
        if kind == "event":
            core.apply(entry)
            continue
        key, index, first, count, miss = entry
        space = core.spaces[key]
        extent = space.parts[index].base + first * 4096 // space.extent_bytes
        if core.is_single(key, extent):
            core.page(key, extent, count)
        else:
            assert (core.reference(key, extent) != HIT) == miss
    return core


def state_of(core: Steering) -> dict[str, Any]:
    cached = {key: sorted(space.held) for key, space in core.spaces.items()}
    periods = {key: space.learner.period for key, space in core.spaces.items()}
    return {
        "cached": cached,
        "periods": periods,
        "clock": core.clock,
        "hits": core.hit_blocks,
        "evicted": core.evicted_blocks,
    }


def two_loops(rig: Rig) -> None:
    files = [rig.file("a", LOOP), rig.file("b", 20 * MIB)]
    in_threads(looper(rig, files[0], 4), looper(rig, files[1], 6))


def random_readers(rig: Rig) -> None:
    files = [rig.file("a", LOOP), rig.file("b", 5 * MIB), rig.file("c", LOOP + MIB)]
    jobs: list[Callable[[], None]] = [reader(rig, files, seed, 200) for seed in range(3)]
    in_threads(*jobs, looper(rig, files[0], 3))


def changes_behind(rig: Rig) -> None:
    file = rig.file("a", LOOP)
    for version in range(1, 4):
        rig.sweep(file)
        rig.sweep(file)
        change_behind(rig, file, "a", version)
        rig.sweep(file)


def budgets(rig: Rig) -> None:
    file = rig.file("a", LOOP)
    source = random.Random(5)

    def resize() -> None:
        for _ in range(12):
            rig.engine.resize(source.randrange(4, 40) * MIB)
            rig.kernel.read(file, source.randrange(LOOP), 300_000)

    in_threads(looper(rig, file, 4), looper(rig, file, 4), resize)


def storage_errors(rig: Rig) -> None:
    file = rig.file("a", LOOP)
    rig.sweep(file, 2)
    file.backing.failing = range(9 * MIB, 9 * MIB + 1)
    for offset in range(0, LOOP, 128 << 10):
        if not 8 * MIB < offset < 11 * MIB:
            rig.check(file, offset, 128 << 10)
    file.backing.failing = range(0)
    rig.sweep(file)


def closing_and_opening(rig: Rig) -> None:
    first, second = rig.file("a", LOOP), rig.file("b", LOOP)
    for _ in range(3):
        rig.sweep(first)
        rig.engine.closed(first.backing, 1)
        rig.sweep(second)
        rig.sweep(second)
        rig.kernel.open(first)


WORKS = [two_loops, random_readers, changes_behind, budgets, storage_errors, closing_and_opening]


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_the_log_reproduces_the_state_of_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Rig], None]
) -> None:
    with running(tmp_path, "arena", monkeypatch) as rig:
        log = ListLog()
        rig.engine.state.references.log = log
        work(rig)
        wait_until(lambda: matches_log(rig, log), "no load runs")


def matches_log(rig: Rig, log: ListLog) -> bool:
    """Compare while no load runs; return False if one does, because a loader may start again at any time."""
    state = rig.engine.state
    with state.lock:
        if state.jobs or any(space.loading for space in state.spaces.values()):
            return False
        core, pin_store = state.references.core, rig.engine.pin_store
        assert core is not None and isinstance(pin_store, ArenaPinStore)
        assert state_of(replayed_core(log, BUDGET)) == state_of(core)
        state.memory.verify(state.spaces.values())
        cached = {(key, extent) for key, space in core.spaces.items() for extent in space.held}
        assert set(pin_store.regions) == cached
        assert state.memory.held_bytes == sum(region.size for region in pin_store.regions.values())
        assert core.clock > 0 and core.held_blocks * 4096 <= core.limit_bytes
        return True
