"""The engine against a modeled kernel: files that change, are replaced or renamed never show old bytes."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmcache.mount.daemon.daemon import THREADS
from llmcache.mount.engine.engine import WAITERS
from llmcache.mount.engine.warmup import WarmupWorker
from tests.property.kernel import READER_PID, File, open_backing, wait_until
from tests.property.rig import LOOP, MIB, Rig, content, in_threads, running


def change_behind(rig: Rig, file: File, name: str, seed: int) -> None:
    """Rewrite `file` behind the mount and notice it, like the operations at the next open."""
    rig.write(name, content(file.backing.size, str(seed)))
    fd = os.open(rig.directory / name, os.O_RDONLY)
    try:
        os.utime(fd, ns=(seed, seed))
        assert file.backing.notice(fd)
    finally:
        os.close(fd)
    rig.engine.changed(file.backing, 0, -1)
    rig.engine.opened(file.backing, file.backing.path, 1)
    rig.kernel.invalidate(file.node, 0, 0)


def fetch_around(rig: Rig, file: File) -> None:
    """Send two requests with the kernel's read-ahead of 128 KiB, of which the second continues the first.

    The rest of the extent is fetched after the reply to the second.
    """
    for offset in (5 * MIB + (64 << 10), 5 * MIB + (192 << 10)):
        rig.check(file, offset, 4096)


@contextmanager
def storing(rig: Rig, begin: Callable[[], None]) -> Iterator[None]:
    """Run the body while the STORE that `begin` causes is in progress."""
    begun, resume = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert resume.wait(120)

    rig.kernel.before_store_page = hold
    try:
        begin()
        assert begun.wait(120)
        yield
    finally:
        resume.set()


@pytest.mark.parametrize(("mode", "size"), [("steer", 12 * MIB), ("arena", LOOP)])
def test_reads_after_a_change_see_no_old_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, size: int
) -> None:
    with running(tmp_path, mode, monkeypatch) as rig:
        file = rig.file("file", size)
        file.backing.delays = random.Random(4)
        done = threading.Event()

        def noise(seed: int) -> Callable[[], None]:
            def work() -> None:
                source = random.Random(seed)
                while not done.is_set():
                    start = source.randrange(file.backing.size)
                    for offset in range(start, min(start + 2 * MIB, file.backing.size), 128 << 10):
                        rig.kernel.read(file, offset, 128 << 10)

            return work

        def changes() -> None:
            try:
                for version in range(1, 4):
                    change_behind(rig, file, "file", version)
                    rig.sweep(file)
            finally:
                done.set()

        in_threads(changes, noise(1), noise(2))


def test_a_store_during_a_change_leaves_no_old_bytes(rig: Rig) -> None:
    """A STORE that starts before a change may end after the kernel's pages were dropped."""
    file = rig.file("file", LOOP)
    changing = threading.Thread(target=change_behind, args=(rig, file, "file", 7), daemon=True)
    with storing(rig, lambda: fetch_around(rig, file)):
        changing.start()
        changing.join(0.5)  # by now, it has dropped the pages or waits for the STORE
    changing.join(120)
    assert not changing.is_alive()
    wait_until(rig.settled, "the engine is idle")
    rig.sweep(file)


def evicted(rig: Rig, file: File) -> None:
    state = rig.engine.state
    with state.lock:
        rig.engine.forget(state.owners[file.backing][0])


def test_opening_for_writing_waits_for_a_store_of_evicted_pages(rig: Rig) -> None:
    """The STORE would overwrite new data with old."""
    file, state = rig.file("file", LOOP), rig.engine.state
    left: list[int] = []

    def open_to_write() -> None:
        file.backing.writable = True
        rig.engine.opened(file.backing, "/file", 1)
        left.append(len(state.storing))

    opening = threading.Thread(target=open_to_write, daemon=True)
    with storing(rig, lambda: fetch_around(rig, file)):
        evicted(rig, file)
        opening.start()
        wait_until(lambda: rig.engine.waiting > 0 or left != [], "the open waits, or returns")
        assert not left
    opening.join(120)
    assert left == [0]


@pytest.mark.parametrize("limit", [("WAITERS", 1), ("WAIT_S", 0.01)], ids=["too many", "too long"])
def test_opens_that_wait_for_a_store_leave_threads_for_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: tuple[str, float]
) -> None:
    monkeypatch.setattr(f"llmcache.mount.engine.engine.{limit[0]}", limit[1])
    with running(tmp_path, "steer", monkeypatch) as rig:
        file = rig.file("file", LOOP)
        opens = [threading.Thread(target=rig.kernel.open, args=(file,), daemon=True) for _ in range(3)]
        with storing(rig, lambda: fetch_around(rig, file)):
            evicted(rig, file)
            # the opens would wait there for the page of the STORE
            monkeypatch.setattr(rig.kernel, "invalidate", lambda *_: 0)
            for thread in opens:
                thread.start()
            waiting = int(limit[0] == "WAITERS")
            wait_until(
                lambda: sum(thread.is_alive() for thread in opens) == waiting == rig.engine.waiting, "the other opens return"
            )
        for thread in opens:
            thread.join(120)
            assert not thread.is_alive()
    assert WAITERS < THREADS


def test_closing_a_file_does_not_wait_for_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hot page that is warmed up was already read when it is stored."""
    with running(tmp_path, "steer", monkeypatch) as rig:
        file = rig.file("file", 2 * MIB)
        space, member = rig.engine.state.owners[file.backing]
        bringer = WarmupWorker(rig.engine.state, rig.engine.backend, rig.engine.pin_store, [(space, member, 0)])
        warming = threading.Thread(target=bringer.run, args=(lambda _progress: None,), daemon=True)
        closing = threading.Thread(target=rig.engine.closed, args=(file.backing, 1), daemon=True)
        with storing(rig, warming.start):
            closing.start()
            closing.join(60)
            assert not closing.is_alive()
        warming.join(120)
        assert not warming.is_alive()


def test_a_fetch_for_a_removed_loop_space_is_not_stored(rig: Rig) -> None:
    """A read covers two extents; the file changes after the first fetch and again during the second."""
    file = rig.file("file", LOOP)
    backing = file.backing
    extent = rig.engine.state.owners[backing][0].extent_bytes
    versions = iter([1, 2])

    def change_once(size: int, offset: int) -> None:
        if size == extent and (version := next(versions, None)) is not None:
            rig.write("file", content(backing.size, str(version)))
            rig.engine.changed(backing, 0, -1)

    backing.after_read = change_once
    rig.kernel.read(file, 2 * extent - (64 << 10), 128 << 10)
    backing.after_read = lambda _size, _offset: None
    wait_until(rig.settled, "the engine is idle")
    with rig.kernel.lock:
        file.pages.clear()  # reads before may have either version, later STOREs must not have the old one
    rig.sweep(file)
    rig.charges_add_up()


def test_a_file_replaced_while_closed_is_read_again(rig: Rig, tmp_path: Path) -> None:
    old = rig.file("file", LOOP)
    rig.sweep(old, 3)
    rig.until_pinned(old)
    rig.engine.closed(old.backing, 1)
    (tmp_path / "file").unlink()
    new = rig.file("file", LOOP, seed=1)
    rig.sweep(new, 2)
    wait_until(rig.settled, "the engine is idle")
    rig.charges_add_up()


def test_a_name_used_again_after_a_rename_is_another_file(rig: Rig, tmp_path: Path) -> None:
    first = rig.file("new", LOOP)
    rig.sweep(first, 3)
    rig.until_pinned(first)
    os.rename(tmp_path / "new", tmp_path / "final")
    rig.content["/final"] = rig.content.pop("/new")
    rig.engine.renamed("/new", "/final")
    first.backing.path = "/final"
    wait_until(lambda: "/final" in rig.kernel.files, "the helper knows the name")
    second = rig.file("new", LOOP, seed=1)
    for _ in range(2):
        rig.sweep(second)
        rig.sweep(first)
    wait_until(rig.settled, "the engine is idle")
    rig.charges_add_up()


def test_a_file_replaced_by_a_rename_is_released(rig: Rig, tmp_path: Path) -> None:
    """Its pins are released at once, although no open would notice the replacement."""
    replaced = rig.file("file", LOOP)
    rig.sweep(replaced, 3)
    rig.until_pinned(replaced)
    new = rig.file("new", 3 * MIB)
    rig.engine.closed(replaced.backing, READER_PID)
    os.rename(tmp_path / "new", tmp_path / "file")
    rig.content["/file"] = rig.content["/new"]
    rig.kernel.files["no name"] = replaced
    rig.engine.renamed("/new", "/file")
    new.backing.path = "/file"
    assert rig.engine.state.memory.pinned_bytes == 0
    assert [file.size_bytes for file in rig.engine.stats().files] == [3 * MIB]
    rig.sweep(new)
    rig.charges_add_up()


def test_closes_of_a_dead_pin_helper_are_not_counted_as_closes_of_clients(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    file, state, pins = rig.file("file", LOOP), rig.engine.state, rig.engine.pins
    (helper,) = pins.pids
    assert rig.engine.opened(file.backing, "/file", helper) and state.opens[file.backing] == 1
    # the new helper starts before the kernel has reported all closes of the old one
    monkeypatch.setattr(pins, "pid", helper + 1)  # of the rig's replacement
    rig.engine.closed(file.backing, helper)
    assert state.opens[file.backing] == 1 and file.backing in state.owners
    rig.engine.opened(file.backing, "/file", helper)  # another process with the same number
    rig.engine.closed(file.backing, helper)
    rig.engine.closed(file.backing, 1)
    assert file.backing not in state.opens and file.backing not in state.owners


def test_nothing_is_fetched_through_a_closed_descriptor(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client closes the file before the helper has attached it; the descriptor number then means another file."""
    rig.write("other", bytes(LOOP))
    attach = rig.engine.pins.attach
    late: list[str] = []
    monkeypatch.setattr(rig.engine.pins, "attach", late.append)
    file = rig.file("file", LOOP, attached=False)
    for offset in range(0, 4 * MIB, 64 << 10):
        rig.check(file, offset, 64 << 10)
    begun, resume = threading.Event(), threading.Event()

    def hold(_size: int, _offset: int) -> None:
        begun.set()
        assert resume.wait(120)

    file.backing.after_read = hold
    number = file.backing.fd
    with open(tmp_path / "other", "rb") as other:
        rig.engine.closed(file.backing, 1)
        file.backing.close()
        reused = fcntl.fcntl(other.fileno(), fcntl.F_DUPFD_CLOEXEC, number)  # lower numbers may be free as well
    try:
        assert reused == number, "the descriptor has the same number"
        attach(late[0])
        begun.wait(0.5)  # time in which a wrong read from the number would happen
        file.backing = open_backing("/file", tmp_path / "file")
        rig.kernel.open(file)
        resume.set()
        rig.sweep(file)
    finally:
        os.close(reused)


def test_a_write_reported_after_a_truncation_is_accepted(rig: Rig, tmp_path: Path) -> None:
    rig.write("new.kv", b"")
    backing = open_backing("/new.kv", tmp_path / "new.kv", writable=True)
    rig.kernel.open(rig.kernel.add(backing))
    wait_until(lambda: rig.engine.state.owners[backing][1].node is not None, "the file is attached")
    rig.engine.changed(backing, 0, -1)  # a truncation by another thread
    rig.engine.changed(backing, 0, MIB)  # the write that it truncated
    rig.charges_add_up()
