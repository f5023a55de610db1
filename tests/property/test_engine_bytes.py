"""The engine against a modelled kernel: right bytes under every interleaving, bounded memory, no deadlock, honest errors.

The kernel is a model (tests/property/kernel.py); files, backing reads, threads and the engine are real.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.property.kernel import SlowBacking, wait_until
from tests.property.rig import BUDGET, LOOP, MIB, MODES, in_threads, looper, reader, running


@MODES
@pytest.mark.parametrize("seed", [1, 2])
def test_every_byte_is_right_and_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, seed: int
) -> None:
    with running(tmp_path, mode, monkeypatch) as rig:
        large, small, tiny = rig.file("large", 36 * MIB + 4097), rig.file("small", 9 * MIB + 1), rig.file("tiny", 70_001)
        files = [large, small, tiny]
        for file in files:
            assert isinstance(file.backing, SlowBacking)
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
                    *[reader(rig, files, seed * 100 + n, 250) for n in range(4)],
                )
            finally:
                done.set()

        in_threads(disturb, readers)
        rig.bound_holds()
        wait_until(rig.settled, "memory is within the budget")
        rig.charges_add_up()
        assert rig.kernel.most_requests > 1, "the readers were meant to be concurrent"


@MODES
def test_a_loop_is_held_and_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with running(tmp_path, mode, monkeypatch) as rig:
        file = rig.file("loop", LOOP)
        state = rig.engine.state
        for _ in range(3):
            rig.sweep(file)
        rig.until_pinned(file)

        def reads_less() -> bool:
            before = state.counters.backing_read_bytes
            rig.sweep(file)
            return state.counters.backing_read_bytes - before < file.backing.size

        wait_until(reads_less, "a pass reads less than the whole file")
        rig.engine.removed("/loop")
        wait_until(lambda: state.used_bytes == 0 and not rig.kernel.resident_bytes(), "all is given back")
        assert state.pinned_bytes() == 0


@MODES
def test_a_smaller_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with running(tmp_path, mode, monkeypatch, 40 * MIB) as rig:
        file = rig.file("loop", LOOP)
        for _ in range(4):
            rig.sweep(file)
        rig.engine.resize(BUDGET)
        rig.sweep(file)
        wait_until(rig.settled, "memory is within the smaller budget")
        assert rig.engine.state.pinned_bytes() <= BUDGET
        rig.bound_holds()


@MODES
def test_a_storage_error_is_seen_in_its_range_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with running(tmp_path, mode, monkeypatch) as rig:
        file = rig.file("bad", LOOP)
        assert isinstance(file.backing, SlowBacking)
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


@MODES
def test_failed_stores_cost_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The kernel may refuse a STORE (no memory): what is charged for it must still be given back."""
    with running(tmp_path, mode, monkeypatch) as rig:
        file, other = rig.file("loop", LOOP), rig.file("other", LOOP)
        source = random.Random(1)
        rig.kernel.refuse_store = lambda _offset, _length: source.random() < 0.7
        rig.sweep(file)
        rig.sweep(file)
        rig.kernel.refuse_store = lambda _offset, _length: False
        rig.sweep(other)
        wait_until(rig.settled, "memory is within the budget")
        rig.charges_add_up()


@MODES
def test_stop_during_load_returns_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with running(tmp_path, mode, monkeypatch) as rig:
        files = [rig.file("one", 20 * MIB), rig.file("two", LOOP)]
        for file in files:
            assert isinstance(file.backing, SlowBacking)
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


@MODES
def test_pages_read_while_a_file_is_being_attached_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """What was read before the node was known is dropped; what is read right after that counts."""
    with running(tmp_path, mode, monkeypatch) as rig:
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
