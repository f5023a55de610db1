"""KvStore with failing writes, damaged pages, and a killed device or process: typed errors, and no token lost or wrong.

tests/mount/test_kv_fault_plan.py combines such faults on real disks and mounts.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache.errors import DataError, LlmcacheError, MissingRequirement, UsageError
from llmcache.kv.spill import SpillReader
from llmcache.kv.spill.raw import RawFile, problem
from llmcache.kv.tiers import KvStore, Selection
from llmcache.kv.tiers.ssd import CsdTier
from llmcache.papers.csd import CsdProfile
from tests.unit.forked_device import FORKED
from tests.unit.forked_device import forked as forked
from tests.unit.kv_parts import flip
from tests.unit.store_parts import Make, crash
from tests.unit.store_parts import make as make


def reopen(store: KvStore) -> KvStore:
    """Restore a store from its spill file."""
    assert store.config.path is not None
    return KvStore.restore(store.config.path, store.config)


def device_of(store: KvStore) -> Any:
    assert isinstance(store.ssd, CsdTier)
    return store.ssd.device


EVERY = 16


def test_errors_at_any_write_lose_nothing(tmp_path: Path, make: Make) -> None:
    """One of 16 writes fails, starting at each of the first 16: each call takes effect in memory, and the file follows."""
    for begin in range(EVERY):
        _run_operations(make, begin)
        (tmp_path / "a.kv").unlink()
        (tmp_path / "tables-a.kv").unlink(missing_ok=True)


def _run_operations(make: Make, begin: int) -> None:
    """Run all operations that write; write number `begin` and every `EVERY`-th after it fail."""
    write, writes, errors = RawFile.write, itertools.count(-begin), []
    store, plain = make(6, batch=2)

    def failing(self: RawFile, *arguments: Any) -> None:
        if next(writes) % EVERY == 0:
            raise problem(self.path, "spilling", OSError(errno.ENOSPC, "full"))
        write(self, *arguments)

    def tried(call: Callable[[], None]) -> None:
        try:
            call()
        except LlmcacheError as error:
            assert error.exit_code == 3 and "no space left" in error.message
            errors.append(error)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RawFile, "write", failing)
        for step, tokens in enumerate((40, 1, 3, 5)):
            for layer in (1, 0):
                tried(partial(store.append, layer, *plain.grow(layer, tokens, step)))
            tried(partial(plain.commit, store, tokens, step))
            plain.check_all(store)
            if step == 1:
                tried(lambda: store.select(np.array([1, 1])))
                plain.choose(np.array([1, 1]))
            if step == 2:
                tried(store.save)
        plain.check_all(store)
        tried(lambda: store.crop(17))
        plain.crop(17)
        plain.check_all(store)
    assert len(errors) > 2, "several writes failed"
    store.save()
    plain.check_all(store)
    store.close()
    with reopen(store) as found:
        plain.check_all(found)
        assert (found.ids == plain.ids).all()


@FORKED
@pytest.mark.parametrize("ssd", ["file", "csd"])
def test_damaged_pages_are_not_returned(make: Make, ssd: str) -> None:
    store, plain = make(80, ssd=ssd)
    assert store.ssd is not None and store.config.path is not None
    store.ssd.flush()
    with SpillReader.open(store.config.path) as file:
        place = file.key_ranges(0, 1)[0][1] + 4096 * 9 + 77
    flip(store.config.path, place)
    queries = np.ones((2, 8), np.float32)
    for call in (
        lambda: store.gather(1, store.everything),
        lambda: store.stage(1, store.everything),
        lambda: store.read_side(1, 0, np.array([9]), 0),
        lambda: list(store.score_ssd(1, 0, queries)),
    ):
        with pytest.raises(DataError, match="keys: wrong checksum of page 9") as caught:
            call()
        assert caught.value.exit_code == 5 and caught.value.hint
    store.move_down(1, 0, np.array([17]))
    with pytest.raises(DataError, match="page 9"):
        store.move_up(1, 0, np.array([9]))
    plain.check(0, store.gather(0, store.everything))
    found = store.gather(1, Selection.of_pages(np.full((1, 2, 1), 8), 4))
    plain.check(1, found)
    assert list(store.score_ssd(1, 0, queries, np.array([8, 10])))


@FORKED
def test_a_device_killed_while_it_scores(make: Make) -> None:
    slow = CsdProfile("slow", 20e6, 1e9, 1e9, 0, fdm_bytes=1 << 17, buffer_bytes=1 << 14, throttle=True)
    store, plain = make(2000, ssd="csd", profile=slow)
    blocks = store.score_ssd(1, 0, np.ones((2, 8), np.float32), block_tokens=8)
    next(blocks)
    os.kill(device_of(store).process.pid, signal.SIGKILL)
    with pytest.raises(MissingRequirement, match="ended by signal 9") as caught:
        list(blocks)
    assert caught.value.hint and "restart" in caught.value.hint
    with pytest.raises(MissingRequirement, match="not running"):
        store.gather(1, Selection.of_pages(np.full((1, 2, 1), 8), 4))
    store.restart_device()
    plain.check(1, store.gather(1, store.everything))
    scored = {int(position) for block in store.score_ssd(1, 0, np.ones((2, 8), np.float32)) for position in block.positions}
    assert len(scored) == 4 * (len(store.middle) - 2), "all tokens that are not in the pool"


@FORKED
@pytest.mark.parametrize("messages", [0, 1, 2])
def test_a_device_killed_while_it_gathers(make: Make, monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
    store, plain = make(80, ssd="csd")
    receive = Connection.recv
    left = [messages]

    def dying(self: Any) -> Any:
        if left[0] == 0:
            device = device_of(store)
            os.kill(device.process.pid, signal.SIGKILL)
            device.process.wait()
            with contextlib.suppress(EOFError, ConnectionResetError):
                while self.recv_bytes():  # pending messages are lost with the device
                    pass
        left[0] -= 1
        return receive(self)

    monkeypatch.setattr(Connection, "recv", dying)
    with pytest.raises(MissingRequirement, match="emulated device was ended by signal 9"):
        store.gather(1, store.everything)
    monkeypatch.undo()
    store.restart_device()
    plain.check_all(store)


@FORKED
def test_a_device_killed_before_it_acknowledges(make: Make) -> None:
    store, plain = make(39, ssd="csd", batch=2)
    device = device_of(store)
    send = device.end.send

    def last(command: object) -> None:
        send(command)
        time.sleep(0.2)  # it may have written the page or not
        os.kill(device.process.pid, signal.SIGKILL)

    device.end.send = last
    with pytest.raises(MissingRequirement, match="signal 9"):
        plain.step(store, 1, seed=1)
    other = 0 if store.layer_length(0) == 39 else 1
    with pytest.raises(MissingRequirement, match="not running"):
        store.append(other, *plain.grow(other, 1, 1))
    with pytest.raises(MissingRequirement, match="not running"):
        plain.commit(store, 1, 1)
    store.restart_device()
    plain.step(store, 9, seed=2)
    plain.check_all(store)
    store.close()
    with reopen(store) as found:
        plain.crop(48)
        plain.check_all(found)


@contextlib.contextmanager
def killed_after(writes: int) -> Iterator[None]:
    """A context that ends after this many writes, as if its process were killed."""
    real, left = RawFile.write, iter(range(writes))

    def until_killed(self: RawFile, *arguments: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        real(self, *arguments)

    with pytest.MonkeyPatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(RawFile, "write", until_killed)
        yield


@pytest.mark.parametrize("writes", range(8))
def test_a_crash_while_sequences_are_removed_keeps_the_rest(tmp_path: Path, make: Make, writes: int) -> None:
    """Two of three sequences are removed, and the process is killed after any of the writes."""
    store, plain = make(18, batch=3)
    with killed_after(writes):
        store.select(np.array([0]))
    crash(store)
    with KvStore.restore(tmp_path / "a.kv", store.config) as restored:
        plain.choose(np.arange(restored.batch))
        plain.crop(16)
        assert restored.batch in (1, 3) and restored.length == 16
        plain.check_all(restored)


def test_a_crash_while_short_contexts_are_saved_loses_no_sequence(tmp_path: Path, make: Make) -> None:
    """With two sequences of less than a page, a crash keeps both or neither; after the save, both are complete."""
    found = []
    for writes in range(100):
        store, plain = make(3, batch=2)
        with killed_after(writes):
            store.save()
        crash(store)
        with KvStore.restore(tmp_path / "a.kv", store.config) as restored:
            assert restored.batch == 2
            found.append(restored.length)
            plain.crop(restored.length)
            plain.step(restored, 9, seed=1)
            plain.check_all(restored)
        for path in tmp_path.iterdir():
            path.unlink()
        if found[-1] == 3:
            break
    assert found == [0] * (len(found) - 1) + [3] and len(found) > 9


def test_no_page_is_removed_before_the_tables_are_written(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_tables: object, path: Path) -> None:
        raise problem(path, "writing page tables", OSError(errno.ENOSPC, "full"))

    store, plain = make(20, batch=3)
    monkeypatch.setattr("llmcache.kv.tiers.table.Tables.write", full)
    for call in (partial(store.select, np.array([0, 1, 0])), store.save, store.spill):
        with pytest.raises(MissingRequirement, match="no space left"):
            call()
    monkeypatch.undo()
    crash(store)
    with reopen(store) as found:
        plain.check_all(found)
        found.save()
        monkeypatch.setattr("llmcache.kv.tiers.table.Tables.write", full)
        with pytest.raises(MissingRequirement, match="no space left"):
            found.crop(9)
        monkeypatch.undo()
        found.spill()
        crash(found)
    with reopen(store) as found:
        assert found.length == 8, "pending removals are complete"


@FORKED
def test_a_missing_directory(tmp_path: Path, make: Make) -> None:
    (tmp_path / "a.txt").write_text("a file")
    for where in ("nowhere", "a.txt"):
        with pytest.raises(UsageError, match=f"{where}: not a directory"):
            make(path=tmp_path / where / "a.kv", ssd="csd")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_tables_of_a_deleted_file_are_removed(make: Make, tmp_path: Path) -> None:
    store, _ = make(40, batch=2)
    store.select(np.array([1, 0]))
    store.close()
    (tmp_path / "a.kv").unlink()
    other, plain = make(8)
    assert os.listdir(tmp_path) == ["a.kv"]
    other.close()
    with reopen(other) as found:
        plain.check_all(found)
