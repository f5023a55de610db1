"""Accessed bits and requests: experts and extents in use, and the programs that use them."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from subprocess import PIPE, Popen
from unittest.mock import Mock

import pytest

from llmcache.bpf.pagetables import Unreadable
from llmcache.mount.backends import samples
from llmcache.mount.backends.fuse import FuseBackend
from llmcache.mount.backends.pins import LockedPinStore
from llmcache.mount.backends.samples import PROBES, FilePrograms, Samples
from llmcache.units import BLOCK_BYTES
from tests.unit.fs_parts import MIB, mixture_of, new_state


def test_a_use_that_a_request_showed_is_counted_once() -> None:
    """The first use of an expert that is fetched, or whose tripwire is read, also sets its accessed bit."""
    state = new_state(64 * MIB)
    moe, cache = mixture_of(state), state.expert_cache
    backend = FuseBackend(state, LockedPinStore(state, None))  # type: ignore[arg-type]
    slices, looking = backend.slices, Samples(state, FilePrograms(), logging.INFO)
    with state.lock:
        slices.claim(moe, 9, moe.layout.starts[9], BLOCK_BYTES, True, 1)
        cache.arrived(moe, 9, True)
    looking._count(moe, [9])
    assert state.counters.hit_bytes == 0
    looking._count(moe, [9])
    assert state.counters.hit_bytes == moe.sizes[9]
    with state.lock:
        moe.trip(9)
        slices.claim(moe, 9, moe.probes[9], BLOCK_BYTES, True, 1)
    looking._count(moe, [9])
    assert state.counters.hit_bytes == 2 * moe.sizes[9]


def test_requests_identify_the_programs_that_read_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread id stands for its process until the process ends."""
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
        programs.request(status.st_ino, thread)
        file = programs.of_node(status.st_ino)
        assert file is not None and thread != program.pid == file.readers[0].pid
        assert file.key == (status.st_dev, status.st_ino) and file.readers[0].maps(*file.key)
        programs.request(status.st_ino, program.pid)
        assert programs.of_node(status.st_ino) is file and len(file.readers) == 1
        program.stdin.close()
    programs.request(status.st_ino, thread)
    assert programs.of_node(status.st_ino) is file and file.readers == []
    programs.close()
    assert programs.of_node(status.st_ino) is None


def test_accessed_bits_of_shared_pages_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not clear the bits of pages that several programs map."""
    moe = mixture_of(new_state(64 * MIB))
    tables = Mock(accessed=lambda _pid, addresses: [address != 0 for address in addresses])
    monkeypatch.setattr(samples, "PageTables", lambda: tables)
    looking = Samples(Mock(), Mock(lock=nullcontext()), logging.INFO)
    assert looking.can_read()
    one, other, none = (
        Mock(pid=pid, maps=lambda *_, mapped=pid < 3: mapped, addresses_of=lambda _dev, _ino, at: [0, *at[1:]])
        for pid in (1, 2, 3)
    )
    assert looking._accessed(Mock(readers=[one, none], key=(1, 1)), moe, [2, 3, 5]) == [3, 5]
    one.cool.assert_called_once_with([moe.probes[3], moe.probes[5]])
    assert looking._accessed(Mock(readers=[one, other], key=(1, 1)), moe, [2, 3, 5]) is None


def test_an_extent_is_touched_if_any_of_its_pages_is(monkeypatch: pytest.MonkeyPatch) -> None:
    size = PROBES * BLOCK_BYTES
    accessed = {size + 3 * BLOCK_BYTES}
    tables = Mock(accessed=lambda _pid, addresses: [address in accessed for address in addresses])
    monkeypatch.setattr(samples, "PageTables", lambda: tables)
    looking = Samples(Mock(), Mock(lock=nullcontext()), logging.INFO)
    assert looking.can_read()
    program = Mock(pid=1, maps=lambda *_: True, addresses_of=lambda _dev, _ino, offsets: offsets)
    file = Mock(readers=[program], key=(1, 1))
    assert looking.touched(file, [(0, size), (size, size), (2 * size, size)]) == [False, True, False]


def test_page_tables_that_cannot_be_read_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(samples, "PageTables", Mock(side_effect=Unreadable("no")))
    looking = Samples(Mock(), Mock(lock=nullcontext()), logging.WARNING)
    assert not looking.can_read() and not looking.can_read()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
