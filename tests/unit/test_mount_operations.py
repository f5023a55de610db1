"""Races of file operations with other calls on the same path and with the last close."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import Mock

import pytest

from llmcache.mount.services import Services
from llmcache.mount.source.backing import Backing
from llmcache.mount.source.tree import THE_DAEMON, Caller, SourceTree, WritePolicy
from llmcache.mount.vfs.callbacks import Callbacks
from llmcache.mount.vfs.operations import LlmcacheOperations
from tests.property.kernel import wait_until
from tests.unit.kv_parts import unmount


@pytest.fixture
def engine() -> Mock:
    made = Mock()
    made.state.services = Services()
    return made


@pytest.fixture
def notifier() -> Mock:
    return Mock()


@pytest.fixture
def operations(tmp_path: Path, engine: Mock, notifier: Mock) -> Iterator[LlmcacheOperations]:
    """Operations on a directory with a file that has two names, without an engine and a kernel."""
    (tmp_path / "a.kv").write_bytes(b"x" * 10)
    os.link(tmp_path / "a.kv", tmp_path / "b.kv")
    made = LlmcacheOperations(SourceTree(str(tmp_path)), engine, Mock(), WritePolicy(everything=True))
    made.init(notifier)
    yield made
    made.destroy()


def are_open(directory: Path) -> int:
    """Return how many descriptors this process has open below a directory."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            count += os.readlink(f"/proc/self/fd/{fd}").startswith(f"{directory}/")
    return count


CALLS: dict[str, Callable[[LlmcacheOperations], object]] = {
    "rename": lambda operations: operations.rename("/a.kv", "/c.kv", 0),
    "chmod": lambda operations: operations.chmod("/a.kv", None, 0o600, THE_DAEMON),
    "utimens": lambda operations: operations.utimens("/a.kv", None, None),
    "write to another name": lambda operations: operations.truncate("/b.kv", None, 3, THE_DAEMON),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_file_that_is_closed_during_a_call_keeps_its_descriptor(
    operations: LlmcacheOperations, tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the descriptor is closed during the call, the call fails with EIO or uses another file of that number."""
    number, _ = operations.open("/a.kv", os.O_RDONLY, THE_DAEMON)
    record, handles = Backing.record, [number]

    def closing(backing: Backing) -> None:
        if handles and backing.path in ("/a.kv", "/c.kv"):
            operations.release(handles.pop())
        record(backing)

    monkeypatch.setattr(Backing, "record", closing)
    CALLS[call](operations)
    assert not handles
    assert are_open(tmp_path) == 0
    assert operations.table.acquire("/a.kv") is None and operations.table.acquire("/c.kv") is None


@pytest.mark.parametrize("released", ["before", "while", "late", "after"])
def test_a_deleted_file_is_freed_with_its_last_release(
    operations: LlmcacheOperations, engine: Mock, tmp_path: Path, released: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libfuse deletes the hidden name only if the last release follows the hiding; otherwise its space would be lost."""
    number, _ = operations.open("/a.kv", os.O_RDONLY, THE_DAEMON)
    assert are_open(tmp_path) > 0
    hidden = "/.fuse_hidden0000000300000001"
    if released == "before":
        operations.release(number)
    if released == "while":
        monkeypatch.setattr(engine, "removed", lambda _path: operations.release(number))
    if released == "late":
        _release_once_hidden(operations, number, monkeypatch)
    operations.hide("/a.kv", hidden)
    if released == "after":
        assert operations.getattr(hidden, None).st_nlink == 1
        operations.release(number)
    assert are_open(tmp_path) == 0
    operations.unlink(hidden)
    assert not operations.hidden and not operations.vanished
    assert os.listdir(tmp_path) == ["b.kv"]


def _release_once_hidden(operations: LlmcacheOperations, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Release a handle at the first moment at which its file is marked as hidden."""

    def setting(backing: Backing, name: str, value: object) -> None:
        object.__setattr__(backing, name, value)
        if name == "hidden" and value:
            operations.release(number)

    monkeypatch.setattr(Backing, "__setattr__", setting)


@pytest.mark.parametrize("renamed", ["before", "while"])
@pytest.mark.parametrize("learned", range(4))
def test_pages_of_a_file_that_is_being_renamed_are_dropped(
    operations: LlmcacheOperations, engine: Mock, notifier: Mock, renamed: str, learned: int
) -> None:
    """Until the rename returns, libfuse finds no inode under the new name."""
    nodes = {"/a.kv": "the inode"}
    dropped: list[str] = []
    asked: list[str] = []

    def invalidate(path: str) -> int:
        if not asked and renamed == "while":
            operations.rename("/a.kv", "/c.kv", 0)
        if len(asked) == learned:
            nodes["/c.kv"] = nodes.pop("/a.kv")
        asked.append(path)
        dropped.extend([nodes[path]] if path in nodes else [])
        return 0 if path in nodes else -errno.ENOENT

    notifier.invalidate_path.side_effect = invalidate
    operations.open("/a.kv", os.O_RDONLY, THE_DAEMON)
    backing = engine.opened.call_args.args[0]
    if renamed == "before":
        operations.rename("/a.kv", "/c.kv", 0)
    operations.truncate("/b.kv", None, 3, THE_DAEMON)
    wait_until(lambda: not backing.unsettled, "pages are dropped")
    assert dropped


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_read_only_file_is_not_opened_while_its_predecessor_is_written(
    operations: LlmcacheOperations, tmp_path: Path
) -> None:
    """Writes would fail from then on, so the new file cannot be opened before the writers have closed the old one."""
    number, _ = operations.open("/a.kv", os.O_RDWR, THE_DAEMON)
    fixed = tmp_path / "fixed"
    fixed.write_bytes(b"fixed")
    subprocess.run(["mount", "--bind", str(fixed), str(tmp_path / "a.kv")], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path / "a.kv")], check=True)
        with pytest.raises(OSError, match="busy"):
            operations.open("/a.kv", os.O_RDONLY, THE_DAEMON)
        operations.release(number)
        number, _ = operations.open("/a.kv", os.O_RDONLY, THE_DAEMON)
        assert operations.getattr(None, number).st_size == 5
        operations.release(number)
    finally:
        unmount(tmp_path / "a.kv")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a file that another user may not write")
def test_truncate_spares_a_file_that_replaced_the_original(
    operations: LlmcacheOperations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the permission check and the truncation, root replaces the file and opens the new one."""
    tmp_path.chmod(0o755)
    os.chown(tmp_path / "a.kv", 65534, 65534)
    (tmp_path / "private").write_bytes(b"secret" * 10)
    (tmp_path / "private").chmod(0o600)
    change = Backing.own_change

    with ThreadPoolExecutor(1) as root:
        root.submit(os.getpid).result()  # start the thread before the process acts as the user

        def late(backing: Backing) -> AbstractContextManager[None]:
            root.submit((tmp_path / "private").replace, tmp_path / "a.kv").result()
            with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
                root.submit(operations.open, "/a.kv", os.O_RDONLY, THE_DAEMON).result()
            return change(backing)

        monkeypatch.setattr(Backing, "own_change", late)
        operations.truncate("/a.kv", None, 3, Caller(65534, 65534, os.getpid(), known_groups=()))
    assert (tmp_path / "a.kv").read_bytes() == b"secret" * 10
    assert (tmp_path / "b.kv").stat().st_size == 3


def thread_states() -> int:
    """Return how many thread states the interpreter has."""
    api = ctypes.pythonapi
    for function in (api.PyInterpreterState_Get, api.PyInterpreterState_ThreadHead, api.PyThreadState_Next):
        function.restype = ctypes.c_void_p
    count, state = 0, api.PyInterpreterState_ThreadHead(ctypes.c_void_p(api.PyInterpreterState_Get()))
    while state:
        count, state = count + 1, api.PyThreadState_Next(ctypes.c_void_p(state))
    return count


def test_a_worker_thread_that_ends_leaves_no_thread_state() -> None:
    """Before version 3.12, libfuse creates threads in C for each burst of requests."""
    call, libc, seen = Callbacks(Mock(), Mock()).function("release"), ctypes.CDLL(None), []
    assert call is not None

    work = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _nothing: seen.append(call(None, Mock())))
    before = thread_states()
    for _ in range(50):
        thread = ctypes.c_ulong()
        assert libc.pthread_create(ctypes.byref(thread), None, work, None) == 0
        assert libc.pthread_join(thread, None) == 0
    assert seen == [0] * 50 and thread_states() == before
