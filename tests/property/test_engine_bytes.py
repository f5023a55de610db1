"""The engine against a modelled kernel: right bytes under every interleaving, bounded memory, no deadlock, honest errors;
and what a warm-up promises holds whatever the plan does meanwhile.

The kernel is a model (tests/property/kernel.py); files, backing reads, threads and the engine are real.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from llmcache.fs.backends.fuse import FuseBackend
from llmcache.fs.engine.warmup import Tell, Warmer
from llmcache.fs.vfs.operations import LlmcacheOperations
from llmcache.fs.vfs.source import SourceTree, WritePolicy
from tests.property.kernel import PAGE, READ_AHEAD_PAGES, READER_PID, File, wait_until
from tests.property.rig import BUDGET, LOOP, MIB, Rig, in_threads, looper, reader, running


def test_every_byte_is_right_and_memory_is_bounded(rig: Rig) -> None:
    large, small, tiny = rig.file("large", 36 * MIB + 4097), rig.file("small", 9 * MIB + 1), rig.file("tiny", 70_001)
    files, seed = [large, small, tiny], 1
    for file in files:
        file.backing.delays = random.Random(seed)
    done = threading.Event()

    def disturb() -> None:
        source = random.Random(seed)
        while not done.wait(0.002):
            rig.kernel.reclaim(source, source.choice([0, 0, 3, 60]))
            rig.bound_holds()

    def readers() -> None:
        try:
            in_threads(
                looper(rig, small, 4),
                looper(rig, large, 2),
                *[reader(rig, files, seed * 100 + n, 150) for n in range(4)],
            )
        finally:
            done.set()

    in_threads(disturb, readers)
    rig.bound_holds()
    wait_until(rig.settled, "memory is within the budget")
    rig.charges_add_up()
    assert rig.kernel.most_requests > 1, "the readers were meant to be concurrent"


def test_an_unexpected_error_of_a_loader_costs_no_byte_and_no_reader(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service is run again; after repeated failures steering ends, and reads are answered from SOURCE."""
    file, services = rig.file("loop", LOOP), rig.engine.state.services
    rig.sweep(file, 2)
    store, failing = FuseBackend.store, iter([True, False, True])

    def fail(backend: FuseBackend, *arguments: Any) -> None:
        if next(failing, False):
            raise KeyError("a bug")
        store(backend, *arguments)

    def swept_until(done: Callable[[], bool], what: str) -> None:
        def sweep_once() -> bool:
            rig.sweep(file)
            return done()

        wait_until(sweep_once, what)

    monkeypatch.setattr(FuseBackend, "store", fail)
    swept_until(lambda: services.failures == 2, "both errors have been met")
    assert services.facts()["ended"] == []
    rig.sweep(file, 3)
    failing = itertools.repeat(True)
    file = rig.file("other", LOOP)
    swept_until(lambda: not rig.engine.state.running, "steering has ended")
    assert services.facts()["ended"]
    rig.sweep(file)


def test_a_loop_is_held_and_given_back(rig: Rig) -> None:
    file = rig.file("loop", LOOP)
    state = rig.engine.state
    rig.sweep(file, 3)
    rig.until_pinned(file)

    def reads_less() -> bool:
        before = state.counters.backing_read_bytes
        rig.sweep(file)
        return state.counters.backing_read_bytes - before < file.backing.size

    wait_until(reads_less, "a pass reads less than the whole file")
    rig.engine.removed("/loop")
    wait_until(lambda: state.used_bytes == 0 and not rig.kernel.resident_bytes(), "all is given back")
    assert state.pinned_bytes() == 0


def test_a_loop_over_a_part_of_a_loaded_file_is_kept_if_it_fits(rig: Rig) -> None:
    """An engine may copy most tensors when it loads a model: the rest has the whole budget, and nothing else is fetched."""
    file = rig.file("loop", LOOP)
    rig.sweep(file, 2)
    rig.until_pinned(file)
    part = range(20 * MIB, LOOP, 256 << 10)

    def reads_nothing() -> bool:
        before = rig.engine.state.counters.backing_read_bytes
        for offset in part:
            rig.check(file, offset, 256 << 10)
        return rig.engine.state.counters.backing_read_bytes - before < MIB

    wait_until(reads_nothing, "a pass over the part reads nothing from storage")


def test_single_rows_are_read_as_requested(rig: Rig) -> None:
    """Rows of a table lie anywhere: neither the extent around them nor what follows is fetched."""
    table, source = rig.file("table", 40 * MIB), random.Random(1)
    before = rig.engine.state.counters.backing_read_bytes
    rows = [source.randrange(table.backing.size // 4096) * 4096 for _ in range(60)]
    for offset in rows:
        rig.check(table, offset, 4096)
    read_bytes = rig.engine.state.counters.backing_read_bytes - before
    assert read_bytes <= len(rows) * READ_AHEAD_PAGES * PAGE, "no more than the kernel requests"


def test_a_smaller_budget_is_kept(rig: Rig) -> None:
    rig.engine.resize(40 * MIB)
    file = rig.file("loop", LOOP)
    rig.sweep(file, 4)
    rig.engine.resize(BUDGET)
    rig.sweep(file)
    wait_until(rig.settled, "memory is within the smaller budget")
    assert rig.engine.state.pinned_bytes() <= BUDGET
    rig.bound_holds()


def test_a_storage_error_is_seen_in_its_range_only(rig: Rig) -> None:
    file = rig.file("bad", LOOP)
    bad = range(3 * MIB + 8192, 3 * MIB + 8192 + 4096)
    file.backing.failing = bad
    for _ in range(3):
        for offset in [*range(0, 2 * MIB, 64 << 10), *range(3 * MIB, 4 * MIB, 16 << 10)]:
            for page in range(offset, offset + (16 << 10), 4096):
                if page in bad:
                    with pytest.raises(OSError) as caught:
                        rig.kernel.read(file, page, 4096)
                    assert caught.value.errno == errno.EIO
                else:
                    rig.check(file, page, 4096)
    file.backing.failing = range(0)
    rig.sweep(file)
    rig.charges_add_up()


def test_failed_stores_cost_no_memory(rig: Rig) -> None:
    """The kernel may refuse a STORE (no memory): what is charged for it must still be given back."""
    file, other = rig.file("loop", LOOP), rig.file("other", LOOP)
    source = random.Random(1)
    rig.kernel.refuse_store = lambda _offset, _length: source.random() < 0.7
    rig.sweep(file)
    rig.sweep(file)
    rig.kernel.refuse_store = lambda _offset, _length: False
    rig.sweep(other)
    wait_until(rig.settled, "memory is within the budget")
    rig.charges_add_up()


def test_stop_during_load_returns_and_reads_go_on(rig: Rig) -> None:
    files = [rig.file("one", 20 * MIB), rig.file("two", LOOP)]
    for file in files:
        file.backing.delays = random.Random(3)
    halfway = threading.Barrier(4)

    def work(seed: int) -> Callable[[], None]:
        def both() -> None:
            reader(rig, files, seed, 150)()
            halfway.wait(200)
            reader(rig, files, seed + 50, 150)()

        return both

    def stop() -> None:
        halfway.wait(200)
        rig.engine.stop()

    in_threads(stop, *[work(seed) for seed in range(3)])
    assert not rig.engine.state.running
    rig.sweep(files[0])


def test_pages_read_while_a_file_is_being_attached_are_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read before the node was known is dropped; what is read right after that counts."""
    attach = rig.engine.pins.attach
    late: list[str] = []
    monkeypatch.setattr(rig.engine.pins, "attach", late.append)
    file = rig.file("file", 8 * MIB, attached=False)
    rig.sweep(file)
    drop = rig.kernel.invalidate

    def drop_and_read(nodeid: int, offset: int, length: int) -> int:
        result = drop(nodeid, offset, length)
        rig.check(file, 0, MIB)
        return result

    monkeypatch.setattr(rig.kernel, "invalidate", drop_and_read)
    attach(late[0])
    wait_until(lambda: rig.node_known(file), "the file is attached")
    wait_until(rig.settled, "nothing is under way")
    rig.bound_holds()


def warmed(rig: Rig, name: str, tell: Tell = lambda _progress: None, *, fetch: bool = True) -> tuple[int, int]:
    """Bytes that a warm-up of a file says are wanted, and there."""
    tree = SourceTree(str(rig.directory))
    warmer = Warmer(rig.engine, LlmcacheOperations(tree, rig.engine, rig.reader, WritePolicy(False, ())))
    told = warmer.warm([name], tell, fetch=fetch)
    return told["wanted_bytes"], told["warm_bytes"]


def closed(rig: Rig, file: File) -> None:
    """Its reader closes it."""
    rig.engine.closed(file.backing, READER_PID)


@pytest.mark.parametrize("budget_bytes", [BUDGET - MIB, BUDGET + 4 * MIB])
def test_what_a_warm_up_says_holds_for_the_plan_at_its_end(rig: Rig, budget_bytes: int) -> None:
    """The plan changes while it brings in what was wanted: here by another budget."""
    closed(rig, rig.file("loop", LOOP))
    wanted, there = warmed(rig, "loop", lambda _progress: rig.engine.resize(budget_bytes))
    assert wanted == there == budget_bytes
    assert warmed(rig, "loop", fetch=False) == (wanted, there)


def test_a_warm_up_finds_room_where_nobody_reads_any_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier loop has left fills the memory to the limit, and no reader makes the evictor keep some free."""
    monkeypatch.setattr("llmcache.fs.engine.planner.CURSOR_LIFE_NS", 0)
    before = rig.file("before", LOOP)
    rig.until_pinned(before)
    rig.sweep(before)
    closed(rig, before)
    closed(rig, rig.file("loop", LOOP))
    groups = rig.engine.state.groups.values()
    wait_until(lambda: not any(group.cursors.live for group in groups), "readers are forgotten")
    wanted, there = warmed(rig, "loop")
    assert wanted == there > BUDGET // 2


def test_without_memory_everything_is_read_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some machines refuse memory that is not there (vm.overcommit_memory=2): nobody may notice, and no thread end."""
    make = mmap.mmap

    def scarce(fd: int, length: int) -> mmap.mmap:
        if length >= MIB:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return make(fd, length)

    with running(tmp_path, "arena", monkeypatch) as rig:
        file = rig.file("file", LOOP)
        rig.sweep(file)
        monkeypatch.setattr("mmap.mmap", scarce)
        rig.sweep(file)
        opener = Mock(open=lambda *_: (rig.engine.opened(file.backing, "/file", os.getpid()), True))
        opener.release = lambda _: rig.engine.closed(file.backing, os.getpid())
        told = Warmer(rig.engine, opener).warm(["file"], lambda _progress: None)
        assert told["warm_bytes"] < told["wanted_bytes"]
        rig.sweep(file)
        in_threads(lambda: rig.engine.closed(file.backing, READER_PID))
