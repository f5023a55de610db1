"""The engine against a modeled kernel: right bytes in every interleaving, bounded memory, no deadlock, correct errors.

Warm-ups report the pinned bytes, even if the plan changes during them. The kernel is a model (tests/property/kernel.py);
files, backing reads, threads and the engine are real.
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
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from llmcache.mount.backends.fuse import FuseBackend
from llmcache.mount.engine.warmup import Tell, Warmup
from llmcache.mount.source.tree import SourceTree, WritePolicy
from llmcache.mount.state.space import LoopSpace
from llmcache.mount.vfs.operations import LlmcacheOperations
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
    assert rig.kernel.most_requests > 1, "the readers ran concurrently"


def test_an_unexpected_error_of_a_loader_does_not_disturb_readers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service is restarted; after repeated failures steering ends, and reads are served from SOURCE."""
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
    assert not services.stats().ended
    rig.sweep(file, 3)
    failing = itertools.repeat(True)
    file = rig.file("other", LOOP, attached=False)  # steering may end before it is attached
    swept_until(lambda: not rig.engine.state.running, "steering has ended")
    assert services.stats().ended
    rig.sweep(file)


def test_a_loop_is_pinned_and_released(rig: Rig) -> None:
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
    wait_until(lambda: state.memory.used_bytes == 0 and not rig.kernel.resident_bytes(), "everything is released")
    assert state.memory.pinned_bytes == 0


def test_a_loop_over_part_of_a_loaded_file_is_pinned_if_it_fits(rig: Rig) -> None:
    """An inference engine may copy most tensors while it loads a model; later passes read only the rest, which fits."""
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
    """Rows of a table are scattered: neither their extents nor the following bytes are fetched."""
    table, source = rig.file("table", 40 * MIB), random.Random(1)
    before = rig.engine.state.counters.backing_read_bytes
    rows = [source.randrange(table.backing.size // 4096) * 4096 for _ in range(60)]
    for offset in rows:
        rig.check(table, offset, 4096)
    read_bytes = rig.engine.state.counters.backing_read_bytes - before
    assert read_bytes <= len(rows) * READ_AHEAD_PAGES * PAGE, "no more than the kernel requests"


def test_a_smaller_budget_holds(rig: Rig) -> None:
    rig.engine.resize(40 * MIB)
    file = rig.file("loop", LOOP)
    rig.sweep(file, 4)
    rig.engine.resize(BUDGET)
    rig.sweep(file)
    wait_until(rig.settled, "memory is within the smaller budget")
    assert rig.engine.state.memory.pinned_bytes <= BUDGET
    rig.bound_holds()


def test_fewer_bytes_are_planned_before_a_new_helper_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The OOM killer may have killed the last helper: the next one must not lock all its pages again."""
    with running(tmp_path, "steer", monkeypatch, 24 * MIB) as rig:
        file, memory = rig.file("loop", LOOP), rig.engine.state.memory

        def is_pinned() -> bool:
            rig.sweep(file)
            return memory.pinned_bytes > 16 * MIB

        wait_until(is_pinned, "most of the budget is pinned")
        before = memory.pinned_bytes
        rig.engine.helper_lost(False)
        assert memory.pinned_bytes <= before // 2


def test_a_storage_error_affects_only_its_range(rig: Rig) -> None:
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
    """If the kernel refuses a STORE for lack of memory, the bytes accounted for it must be released."""
    file, other = rig.file("loop", LOOP), rig.file("other", LOOP)
    source = random.Random(1)
    rig.kernel.refuse_store = lambda _offset, _length: source.random() < 0.7
    rig.sweep(file)
    rig.sweep(file)
    rig.kernel.refuse_store = lambda _offset, _length: False
    rig.sweep(other)
    wait_until(rig.settled, "memory is within the budget")
    rig.charges_add_up()


def test_reads_continue_after_a_stop_during_load(rig: Rig) -> None:
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
    """Pages read before the node is known are dropped; pages read right after that count."""
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
    """Return how many bytes a warm-up of a file wanted, and how many are warm."""
    tree = SourceTree(str(rig.directory))
    warmer = Warmup(rig.engine, LlmcacheOperations(tree, rig.engine, rig.reader, WritePolicy(False, ())))
    reply = warmer.warm([name], tell, fetch=fetch)
    return reply["wanted_bytes"], reply["warm_bytes"]


def closed(rig: Rig, file: File) -> None:
    rig.engine.closed(file.backing, READER_PID)


@pytest.mark.parametrize("budget_bytes", [BUDGET - MIB, BUDGET + 4 * MIB])
def test_a_warmup_reports_the_plan_at_its_end(rig: Rig, budget_bytes: int) -> None:
    """The plan changes during the warm-up, here by another budget."""
    closed(rig, rig.file("loop", LOOP))
    wanted, warm = warmed(rig, "loop", lambda _progress: rig.engine.resize(budget_bytes))
    assert wanted == warm == budget_bytes
    assert warmed(rig, "loop", fetch=False) == (wanted, warm)


def test_a_warmup_evicts_an_earlier_loop_without_readers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of an earlier loop fill the memory, and without readers the evictor frees nothing in advance."""
    monkeypatch.setattr("llmcache.mount.engine.planner.CURSOR_LIFE_NS", 0)
    before = rig.file("before", LOOP)
    rig.until_pinned(before)
    rig.sweep(before)
    closed(rig, before)
    closed(rig, rig.file("loop", LOOP))
    spaces = rig.engine.state.spaces.values()
    wait_until(lambda: not any(space.cursors.live for space in spaces), "readers are forgotten")
    wanted, warm = warmed(rig, "loop")
    assert wanted == warm > BUDGET // 2


class Unwalkable(dict[str, LoopSpace]):
    """The spaces of a mount, in which keys can be looked up, but which cannot be searched."""

    def _refuse(self) -> NoReturn:
        raise AssertionError("a walk over all files, whose time grows with their number")

    __iter__ = keys = values = items = _refuse


def test_reads_do_not_take_longer_because_many_files_are_known(rig: Rig) -> None:
    """No thread walks over all of them: readers, loaders, the evictor, the planner, and the maintenance thread."""
    for number in range(20):
        closed(rig, rig.file(f"known{number}", 70_000))
    known = rig.engine.state.spaces
    with rig.engine.state.lock:
        rig.engine.state.spaces = unwalkable = Unwalkable(known)
    try:
        file = rig.file("loop", LOOP)
        rig.until_pinned(file)
        rig.sweep(file, 2)
        rig.engine.resize(BUDGET // 2)
        closed(rig, file)
        rig.sweep(rig.file("new", 9 * MIB))
        assert not rig.engine.state.services.failures
    finally:
        with rig.engine.state.lock:
            rig.engine.state.spaces = dict(dict.items(unwalkable))


def test_without_memory_everything_is_read_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the machine refuses to allocate memory (vm.overcommit_memory=2), reads still work and no thread ends."""
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
        reply = Warmup(rig.engine, opener).warm(["file"], lambda _progress: None)
        assert reply["warm_bytes"] < reply["wanted_bytes"]
        rig.sweep(file)
        in_threads(lambda: rig.engine.closed(file.backing, READER_PID))
