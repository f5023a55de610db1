"""The identity of a model file: every byte counts, a change is noticed, and the page cache stays as it was."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from llmcache.errors import MissingRequirement
from llmcache.kv.prefix import identity
from llmcache.kv.prefix.identity import FileIdentity
from llmcache.storage import cached_blocks

SIZE = 3 * identity.CHUNK_BYTES + 12345


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A cache directory of its own, and what forgets all digests of this process."""

    def forget() -> None:
        monkeypatch.setattr(identity, "_hasher", identity._Hasher())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield forget
    deadline = time.monotonic() + 60
    while any(thread.name == "llmcache-identity" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)


def content() -> bytes:
    return np.random.default_rng(0).bytes(SIZE)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content())
    return path


def digest(path: Path) -> str | None:
    return FileIdentity(path).digest(60)


def memories(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize("size", [0, 1, 4096, identity.CHUNK_BYTES, SIZE])
def test_a_digest_is_of_all_bytes(model: Path, size: int) -> None:
    data = model.read_bytes()[:size]
    model.write_bytes(data)
    assert digest(model) == hashlib.blake2b(data, digest_size=32).hexdigest()


def test_a_file_that_changes_while_it_is_read_has_no_identity(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, read = model.stat(), identity._Reader.read

    def read_late(reader: identity._Reader, offset: int, size: int) -> memoryview:
        part = read(reader, offset, size)
        if offset == 0:
            with open(model, "r+b") as stream:
                stream.write(b"changed")
            os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
        return part

    monkeypatch.setattr(identity._Reader, "read", read_late)
    found = FileIdentity(model)
    with pytest.raises(MissingRequirement, match="changed"):
        found.digest(60)
    assert not memories(tmp_path)


def test_a_digest_is_saved_until_the_file_changes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]
) -> None:
    before = digest(model)
    (memory,) = memories(tmp_path)
    assert memory.stat().st_mode & 0o777 == 0o600
    with monkeypatch.context() as patched:
        patched.setattr(identity, "_hash", lambda job: pytest.fail("was read again"))
        forgotten()
        assert digest(model) == before
    model.write_bytes(b"other")
    forgotten()
    assert digest(model) == hashlib.blake2b(b"other", digest_size=32).hexdigest()
    assert memories(tmp_path) == [memory], "the same file"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"{" * 100_000,
        lambda data: b"[1]",
        lambda data: data[:-5],
        lambda data: data.replace(b'"digest": "', b'"digest": "00')[:-1],
        lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
        lambda data: re.sub(rb'(?<="digest": ").', lambda digit: b"0" if digit[0] != b"0" else b"1", data),
        lambda data: b"\xff" * 100,
    ],
)
def test_a_damaged_saved_digest_is_ignored_and_replaced(
    model: Path, tmp_path: Path, forgotten: Callable[[], None], damage: Callable[[bytes], bytes]
) -> None:
    before = digest(model)
    (memory,) = memories(tmp_path)
    data = memory.read_bytes()
    memory.write_bytes(damage(data))
    forgotten()
    assert digest(model) == before
    assert memory.read_bytes() == data


def test_no_digest_is_saved_where_that_is_impossible(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]
) -> None:
    monkeypatch.setattr(identity, "fstype_at", lambda path: "vfat")
    assert digest(model) and not memories(tmp_path)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(model))
    forgotten()
    assert digest(model)


@pytest.mark.parametrize("direct", [True, False])
def test_the_page_cache_stays_as_it_was(model: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    fd, opened = os.open(model, os.O_RDWR), os.open

    def open_buffered(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *rest, **more)

    if not direct:
        monkeypatch.setattr(os, "open", open_buffered)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        if cached_blocks(fd, 0, SIZE):
            pytest.skip("the file system keeps files in memory")
        cached = [(0, identity.CHUNK_BYTES), (identity.CHUNK_BYTES + (1 << 20), 1 << 20)]
        for offset, size in cached:
            os.pread(fd, size, offset)
        before = [cached_blocks(fd, offset, 1 << 20) for offset in range(0, SIZE, 1 << 20)]
        assert digest(model) == hashlib.blake2b(content(), digest_size=32).hexdigest()
        assert [cached_blocks(fd, offset, 1 << 20) for offset in range(0, SIZE, 1 << 20)] == before
    finally:
        os.close(fd)


def test_a_child_process_identifies_files_itself(model: Path) -> None:
    found = FileIdentity(model)
    child = os.fork()
    if not child:
        try:
            os._exit(0 if found.digest(60) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert found.digest(60)
