"""Stored prompts without llama.cpp: states that are cut and joined, the directory of blocks, and its commands."""

from __future__ import annotations

import fcntl
import itertools
import json
import multiprocessing
import os
import random
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from llmcache.arrays import Bytes
from llmcache.cli import app
from llmcache.errors import LlmcacheError, MissingRequirement, UsageError
from llmcache.kv.prefix.state import Joined, State, StateLayout, Uncut, read_state
from llmcache.kv.prefix.store import CUT, PART, Block, BlockKey, BlockStore
from llmcache.kv.spill.raw import RawFile
from tests.fuzz.target import bounded

MODEL = "0123456789abcdef" * 2
SECOND = 10**9


def state_bytes(parts: list[tuple[int, bool, int]], positions: list[int], seed: int = 0, head: bytes | None = None) -> Bytes:
    """Return a state in llama.cpp's format.

    For each part, the layers, whether values are transposed, and F16 numbers per row.
    """
    random_bytes = np.random.default_rng(seed).bytes
    out = struct.pack("<II", 0xAF143CD8, 0) if head is None else head
    for layers, transposed, width in parts:
        out += struct.pack("<II", 1, len(positions))
        for position in positions:
            out += struct.pack("<iIi", position, 1, 0)
        out += struct.pack("<II", transposed, layers)
        for _ in range(layers):
            out += struct.pack("<iQ", 1, 2 * width) + random_bytes(2 * width * len(positions))
        for _ in range(layers):
            out += struct.pack("<iII", 1, 2, width) if transposed else struct.pack("<iQ", 1, 2 * width)
            out += random_bytes(2 * width * len(positions))
    return np.frombuffer(out, np.uint8)


def rows_of(state: State, start: int, end: int) -> Bytes:
    out = np.empty((end - start) * state.layout.token_bytes, np.uint8)
    state.block(start, end, out)
    return out


SHAPES = [[(2, False, 8)], [(3, True, 4)], [(1, False, 2), (2, False, 6)], [(2, True, 2), (1, True, 4)]]


@pytest.mark.parametrize("parts", SHAPES)
@given(cuts=st.lists(st.integers(0, 40), max_size=5))
def test_a_state_cut_anywhere_is_joined_to_the_same_bytes(parts: list[tuple[int, bool, int]], cuts: list[int]) -> None:
    data = state_bytes(parts, list(range(40)))
    state = read_state(data)
    layout = StateLayout.from_json(json.loads(json.dumps(state.layout.to_json())))
    joined = Joined(layout, 40)
    bounds = sorted({0, 40, *cuts})
    for start, end in itertools.pairwise(bounds):
        joined.put(start, rows_of(state, start, end))
    assert joined.data.tobytes() == data.tobytes()


def test_cells_are_sorted() -> None:
    order = [3, 0, 4, 1, 2]
    rows = rows_of(read_state(state_bytes([(1, False, 2)], order)), 0, 5)
    at = 8 + 8 + 12 * 5 + 8 + 12
    keys = state_bytes([(1, False, 2)], order)[at : at + 20].reshape(5, 4)
    assert (rows[:20].reshape(5, 4) == keys[np.argsort(order)]).all()


def test_the_state_of_a_context_has_the_architecture_in_its_header() -> None:
    data = state_bytes([(1, False, 2)], [0, 1], head=struct.pack("<I", 5) + b"llama")
    assert read_state(data, "llama").tokens == 2
    with pytest.raises(Uncut, match="header"):
        read_state(data, "qwen2")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (state_bytes([(1, False, 2)], [0, 2]), "positions are missing"),
        (state_bytes([(1, False, 2)], [0, 0]), "positions are missing"),
        (state_bytes([(1, False, 2)], [0, 1])[:-1], "truncated within a layer"),
        (state_bytes([], []), "no tokens"),
        (state_bytes([(1, False, 2)], [0, 1], head=b"recurrent"), "header"),
        (
            np.concatenate([state_bytes([(1, False, 2)], [0]), state_bytes([(1, False, 2)], [0, 1], head=b"")]),
            "another one 2",
        ),
    ],
)
def test_states_that_cannot_be_cut_are_refused(data: Bytes, reason: str) -> None:
    with pytest.raises(Uncut, match=reason):
        read_state(data)


# The store


class Clock:
    def __init__(self) -> None:
        self.now = 2_000_000_000 * SECOND

    def __call__(self) -> int:
        return self.now


def key(number: int, index: int = 0, kind: str = CUT, model: str = MODEL) -> BlockKey:
    return BlockKey(model, f"{number:040x}", index, kind)


def block(number: int, size: int = 8192, tokens: int = 4) -> Block:
    return Block(np.random.default_rng(number).integers(0, 256, size, np.uint8), tuple(range(number, number + tokens)))


FILE_BYTES = 4096 + 8192
"""Of `block`: a header of one page, and what it holds."""


def same(one: Block | None, other: Block) -> bool:
    return one is not None and (one.payload == other.payload).all() and replace(one, payload=other.payload) == other


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path / "kv", 10**9, clock=Clock())


def numbers(store: BlockStore) -> set[int]:
    return {int(entry.key.name, 16) for entry in store.entries()}


def test_a_block_may_have_any_size(store: BlockStore) -> None:
    odd = Block(np.arange(13, dtype=np.uint8), (5,))
    store.write(key(9), odd)
    assert same(store.read(key(9)), odd)


def test_other_users_have_no_access(store: BlockStore) -> None:
    store.write(key(1), block(1))
    store.describe(MODEL, {"file": "a"})
    store.used([key(1)], 4, 8192)
    for path in (store.directory, *store.directory.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@given(at=st.integers(0, FILE_BYTES - 1), bit=st.integers(0, 7))
def test_a_damaged_block_is_removed_and_others_stay(at: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    store = BlockStore(tmp_path_factory.mktemp("kv"), 10**9)
    store.write(key(1), block(1))
    store.write(key(2), block(2))
    path = store.directory / key(1).file
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    read = store.read(key(1))
    if read is None:
        assert not path.exists()
    else:  # bytes between header and payload have no meaning
        assert same(read, block(1)) and at < 4096
    assert same(store.read(key(2)), block(2))


def test_truncated_and_swapped_files_are_not_used(store: BlockStore) -> None:
    for number in range(3):
        store.write(key(number), block(number))
    (store.directory / key(0).file).write_bytes(b"")
    os.truncate(store.directory / key(1).file, 5000)
    os.replace(store.directory / key(2).file, store.directory / key(3).file)
    assert [store.read(key(number)) for number in range(4)] == [None] * 4
    assert not store.entries()


def test_eviction_is_lru_and_starts_at_the_end_of_a_prompt(tmp_path: Path) -> None:
    clock = Clock()
    store = BlockStore(tmp_path, 6 * FILE_BYTES, clock=clock)
    for number in range(6):
        clock.now += SECOND
        store.write(key(number, index=number), block(number))
    clock.now += SECOND
    store.used([key(number, index=number) for number in range(4)])
    store.write(key(6), block(6))
    assert numbers(store) == {0, 1, 2, 3, 6}, "two blocks, because eviction stops at 95 % of the limit"
    store.write(key(7), block(7))
    store.write(key(8), block(8))
    assert numbers(store) == {0, 1, 6, 7, 8}
    assert sum(entry.size_bytes for entry in store.entries()) <= 6 * FILE_BYTES
    with pytest.raises(MissingRequirement, match="limit"):
        store.write(key(10), block(10, 10 * FILE_BYTES))


def test_the_first_blocks_of_a_prompt_larger_than_the_limit_stay(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 4 * FILE_BYTES, clock=Clock())
    store.write(key(9), block(9))
    used_ns = store.used([key(0)])
    for number in range(8):
        store.write(key(number, index=number), block(number), used_ns=used_ns)
    assert numbers(store) == {0, 1, 7}, (
        "the last blocks replaced each other, two at a time: eviction stops at 95 % of the limit"
    )


def test_a_clock_set_back_changes_no_order_and_expires_nothing(tmp_path: Path) -> None:
    clock = Clock()
    store = BlockStore(tmp_path, 4 * FILE_BYTES, ttl_ns=3600 * SECOND, clock=clock)
    for number in range(3):
        store.write(key(number), block(number))
    clock.now -= 86400 * 365 * SECOND
    store.write(key(3), block(3))
    store.used([key(0)])
    assert all(key(number) in store for number in range(4))
    store.write(key(4), block(4))
    assert numbers(store) == {0, 3, 4}
    reopened = BlockStore(tmp_path, 4 * FILE_BYTES, ttl_ns=3600 * SECOND, clock=clock)
    assert numbers(reopened) == {0, 3, 4}


def test_unused_blocks_expire(tmp_path: Path) -> None:
    clock = Clock()
    store = BlockStore(tmp_path, 10**9, ttl_ns=60 * SECOND, clock=clock)
    store.write(key(1), block(1))
    store.write(key(2), block(2))
    clock.now += 40 * SECOND
    store.used([key(2)])
    clock.now += 40 * SECOND
    assert key(1) not in store and key(2) in store
    store.used([key(2)], 4, 8192)
    assert numbers(store) == {2}, "without a restart of the process"
    clock.now += 80 * SECOND
    BlockStore(tmp_path, 10**9, ttl_ns=60 * SECOND, clock=clock)
    assert not numbers(store)


def test_a_floor_of_free_space_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10 * FILE_BYTES
    store = BlockStore(tmp_path, 10**9, floor_bytes=7 * FILE_BYTES)

    def statvfs(path: object) -> os.statvfs_result:
        left = free - sum(entry.size_bytes for entry in store.entries())
        return os.statvfs_result((4096, 1, 0, 0, max(0, left), 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    for number in range(5):
        store.write(key(number), block(number))
    assert numbers(store) == {2, 3, 4}
    free = 0
    with pytest.raises(MissingRequirement, match="space"):
        store.write(key(5), block(5))
    assert not store.entries(), "what others need is given back"


@pytest.mark.parametrize(("size", "floor"), [(300 * 10**6, 15 * 10**6), (10**12, 10**9)])
def test_by_default_a_share_of_a_small_file_system_is_left_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, floor: int
) -> None:
    status = os.statvfs_result((4096, 4096, size // 4096, 0, size // 4096, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    store = BlockStore(tmp_path / "kv", 200 * 10**6, floor_bytes=None)
    assert floor - 4096 < store.floor_bytes <= floor
    store.write(key(1), block(1))
    assert store.room_bytes() == 200 * 10**6 and numbers(store) == {1}
    large = BlockStore(tmp_path / "kv", 10**15, floor_bytes=None)
    assert large.room_bytes() == FILE_BYTES + status.f_bavail * 4096 - large.floor_bytes


@pytest.mark.cgroup
def test_on_a_full_disk_the_oldest_blocks_are_evicted_and_a_failed_write_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], check=True)
    try:
        store = BlockStore(tmp_path, 10**9)
        for number in range(9):
            store.write(key(number), block(number))
        left = numbers(store)
        assert 8 in left and 3 <= len(left) < 6
        (tmp_path / "foreign").write_bytes(b"x" * (os.statvfs(tmp_path).f_bavail * 4096))
        with monkeypatch.context() as patched, pytest.raises(MissingRequirement, match="space"):
            patched.setattr(store, "lacking", lambda size: 0)  # another process took the space first
            store.write(key(10), block(10))
        assert numbers(store) == left
        assert all(same(store.read(key(number)), block(number)) for number in left)
        assert not list(tmp_path.rglob("new-*"))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_foreign_files_are_left_alone(store: BlockStore) -> None:
    store.write(key(1), block(1))
    foreign = [
        store.directory / "notes.txt",
        store.directory / MODEL / "notes.kv",
        store.directory / MODEL / f"{'0' * 40}-0.kv.bak",
        store.directory / MODEL / "new-thing.tmp",
        store.directory / ("f" * 31) / "x",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    outside = store.directory.parent / "outside"
    outside.mkdir()
    (outside / f"{'0' * 40}-0.kv").write_bytes(b"mine")
    (store.directory / ("a" * 32)).symlink_to(outside)
    again = BlockStore(store.directory, 10**9)
    assert [entry.key for entry in again.entries()] == [key(1)]
    assert [entry.key for entry in again.prune()] == [key(1)]
    assert all(path.read_bytes() == b"mine" for path in (*foreign, *outside.iterdir()))


def test_only_regular_files_are_blocks(store: BlockStore) -> None:
    """A FIFO, link or directory with the name of a block is neither read nor removed, and causes no wait."""
    store.write(key(9), block(9))
    paths = [store.directory / key(number).file for number in range(3)]
    os.mkfifo(paths[0])
    paths[1].symlink_to(store.directory / key(9).file)
    paths[2].mkdir()
    store.ahead(map(key, range(3)))
    for number in range(3):
        assert key(number) not in store and store.read(key(number)) is None
    assert all(path.is_fifo() or path.is_symlink() or path.is_dir() for path in paths)
    store.write(key(1), block(1))
    assert same(store.read(key(1)), block(1)) and same(store.read(key(9)), block(9))
    for name in (f"{'0' * 40}-007.kv", f"{'0' * 40}-\u0663.kv"):
        (store.directory / MODEL / name).write_bytes(b"mine")
    assert numbers(store) == {1, 9}


def test_a_huge_sparse_file_takes_no_memory(store: BlockStore) -> None:
    store.write(key(1), block(1))
    os.truncate(store.directory / key(1).file, 1 << 42)
    with bounded():
        assert store.read(key(1)) is None
    assert not store.entries()


def test_links_refer_to_the_newest_block_and_a_longer_block_replaces_a_part(store: BlockStore) -> None:
    short, long = "b" * 40, "c" * 40
    begun = Block(block(1).payload, (1, 2, 3))
    assert store.newest(MODEL, [long, short], 1) is None
    store.write(key(1, 1, PART), begun, [short])
    assert store.newest(MODEL, [long, short], 1) == key(1, 1, PART)
    store.write(key(2, 1), Block(block(2).payload, (1, 2, 4)), [long, short])
    assert store.newest(MODEL, [long, short], 1) == store.newest(MODEL, [short], 1) == key(2, 1)
    assert numbers(store) == {1, 2}, "other tokens"
    store.write(key(1, 1, PART), begun, [short])
    store.write(key(3, 1, PART), Block(block(3).payload, (1, 2, 3, 4)), [long, short])
    assert numbers(store) == {2, 3} and store.newest(MODEL, [long], 1) == key(3, 1, PART)
    store.drop([key(3, 1, PART)])
    assert store.newest(MODEL, [long, short], 1) is None
    store.write(key(3, 1, PART), Block(block(3).payload, (1, 2, 3, 4)), [long, short])
    assert store.newest(MODEL, [long], 2) is None
    store.prune()
    assert store.newest(MODEL, [long, short], 1) is None
    assert sorted(path.name for path in store.directory.rglob("*")) == ["lock"]


def test_planted_symlinks_are_not_followed(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a new file during its write, of a block, and of the directory of a model."""
    outside = store.directory.parent / "outside"
    outside.mkdir()
    victim = outside / "victim"
    victim.write_text("untouched")
    os.utime(victim, ns=(1, 1))
    sync = RawFile.sync

    def exchanged(raw: RawFile) -> None:
        sync(raw)
        os.unlink(raw.path)
        os.symlink(victim, raw.path)

    with monkeypatch.context() as patch:
        patch.setattr(RawFile, "sync", exchanged)
        store.write(key(1), block(1))
    assert key(1) not in store and store.read(key(1)) is None
    store.used([key(1)])
    other = "b" * 32
    (store.directory / other).symlink_to(outside)
    with pytest.raises(MissingRequirement, match="cannot store"):
        store.write(key(2, model=other), block(2))
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        store.describe(other, {"file": "a"})
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        store.used([key(2, model=other)], tokens=1)
    store.drop([key(2, model=other)])
    assert list(outside.iterdir()) == [victim]
    assert victim.read_text() == "untouched" and victim.stat().st_mtime_ns == 1


def test_unfinished_files_of_dead_writers_are_removed(store: BlockStore) -> None:
    store.write(key(1), block(1))
    left, live, link = (store.directory / MODEL / f"new-{number:016x}.tmp" for number in range(3))
    left.write_bytes(b"half")
    link.symlink_to("nowhere")
    with open(live, "wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        BlockStore(store.directory, 10**9)
        assert not left.exists() and not link.is_symlink() and live.exists()
    BlockStore(store.directory, 10**9)
    assert not live.exists() and numbers(store) == {1}


def test_new_files_are_not_removed(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process opens the directory between the creation of a file and its lock."""
    lock, others = RawFile.lock, [threading.Thread(target=lambda: BlockStore(store.directory, 10**9))]

    def lock_late(raw: RawFile) -> None:
        if others:
            other = others.pop()
            other.start()
            other.join(0.5)
        lock(raw)

    monkeypatch.setattr(RawFile, "lock", lock_late)
    store.write(key(1), block(1))
    assert same(store.read(key(1)), block(1)) and not others


def test_uses_are_counted_and_damaged_counters_are_reset(store: BlockStore) -> None:
    store.write(key(1), block(1))
    for _ in range(3):
        store.used([key(1)], 256, 1000)
    assert store.uses(MODEL) == (3, 768, 3000)
    (store.directory / MODEL / "uses").write_bytes(b"x")
    (store.directory / MODEL / "model.json").write_bytes(b"{")
    assert store.uses(MODEL).restores == 0 and store.description(MODEL) == {}
    (store.directory / MODEL / "uses").write_bytes(b"\xff" * 24)
    store.used([key(1)], 256, 1000)
    assert store.uses(MODEL).restores == (1 << 64) - 1


@pytest.mark.parametrize("lock", [b"nonsense", b"", b"llmcKVB1" + b"\xff" * 16])
def test_sizes_are_counted_again_if_the_lock_file_is_damaged(tmp_path: Path, lock: bytes) -> None:
    store = BlockStore(tmp_path, 3 * FILE_BYTES, clock=Clock())
    for number in range(4):
        store.write(key(number), block(number))
        (tmp_path / "lock").write_bytes(lock)
    assert numbers(store) == {2, 3}


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b""), lambda path: path.symlink_to("nowhere")])
def test_a_path_that_is_no_directory(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "kv")
    with pytest.raises(UsageError, match="not a directory"):
        BlockStore(tmp_path / "kv", 10**9)


def write_on(directory: Path, seed: int, ready: Event) -> None:
    """Write, read and use blocks until the process is killed."""
    store, turns = BlockStore(directory, 40 * FILE_BYTES), random.Random(seed)
    ready.set()
    while True:
        number = turns.randrange(60)
        store.write(key(number, number % 5, CUT if number % 3 else PART), block(number), [f"{number % 7:040x}"])
        store.read(key(turns.randrange(60), number % 5))
        store.used([key(turns.randrange(60), number % 5)])


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Callable[[int], BaseProcess]]:
    """Return a function that forks writers from a process with all imports, because thousands are killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    running: list[BaseProcess] = []

    def start(seed: int) -> BaseProcess:
        ready = context.Event()
        running.append(context.Process(target=write_on, args=(tmp_path / "kv", seed, ready), daemon=True))
        running[-1].start()
        assert ready.wait(120)
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.join()


@pytest.mark.long
def test_writers_killed_at_any_moment_leave_valid_blocks(
    tmp_path: Path, writers: Callable[[int], BaseProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """LLMCACHE_PREFIX_KILLS (default 4): how often one of two writers on a directory is killed."""
    turns = random.Random(0)
    pair = [writers(0), writers(1)]
    kills = int(os.environ.get("LLMCACHE_PREFIX_KILLS", "4"))
    for kill in range(kills):
        time.sleep(turns.random() * 0.1)
        pair[kill % 2].kill()
        pair[kill % 2].join()
        store = BlockStore(tmp_path / "kv", 40 * FILE_BYTES)
        for entry in store.entries():
            number = int(entry.key.name, 16)
            read = store.read(entry.key)
            assert read is None or same(read, block(number)), "evicted in the meantime, or correct"
        assert not caplog.messages, "none was damaged"
        pair[kill % 2] = writers(kill + 2)
    for process in pair:
        assert process.is_alive(), "the end of one writer does not end the other"
        process.kill()
        process.join()
    store = BlockStore(tmp_path / "kv", 40 * FILE_BYTES)
    assert 0 < sum(entry.size_bytes for entry in store.entries()) <= 40 * FILE_BYTES
    assert not list((tmp_path / "kv").rglob("new-*.tmp")), "unfinished files were removed"
    store.write(key(100), block(100))
    assert same(store.read(key(100)), block(100))


# Commands

OTHER = "f" * 32


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a directory with three blocks of one model, unused for a day, and one block of another, restored once."""
    clock = Clock()
    clock.now = 1_700_000_000 * SECOND
    store = BlockStore(tmp_path / "kv", 10**9, clock=clock)
    description = {"file": "a.gguf", "block_tokens": 256, "context": {"type_k": 1}}
    store.describe(MODEL, description)
    store.describe(OTHER, {**description, "file": "b.gguf"})
    for index in range(2):
        store.write(key(index, index), block(index))
    store.write(key(2, 2, PART), block(2))
    clock.now += 86400 * SECOND
    store.write(key(3, model=OTHER), block(3))
    store.used([key(3, model=OTHER)], 256, 8192)
    (store.directory / "foreign").write_text("mine")
    return store.directory


def said(*words: object) -> Any:
    result = CliRunner().invoke(app, ["kv", *map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_list_shows_every_model(directory: Path) -> None:
    document = said("list", directory)
    assert document["schema"] == "llmcache.kv-list/1"
    first, second = document["models"]
    assert (first["fingerprint"], first["file"], first["blocks"]) == (OTHER, "b.gguf", {"kv": 1})
    assert (first["restores"], first["restored_tokens"], first["restored_bytes"]) == (1, 256, 8192)
    assert (second["blocks"], second["size_bytes"], second["longest_tokens"]) == ({"kv": 2, "part": 1}, 3 * FILE_BYTES, 512)
    assert second["used_ns_ago"] - first["used_ns_ago"] == pytest.approx(86400 * SECOND, rel=0.01)


def test_show_describes_a_fingerprint(directory: Path) -> None:
    document = said("show", directory, MODEL[:6])
    assert document["schema"] == "llmcache.kv-show/1" and document["described"]["context"] == {"type_k": 1}
    assert said("show", directory, "a.gguf")["described"] == document["described"]
    with pytest.raises(UsageError, match="no model"):
        said("show", directory, "c.gguf")
    with pytest.raises(UsageError, match="several"):
        said("show", directory, "")


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("--model", OTHER[:5]), {0, 1, 2}),
        (("--model", "a.gguf", "--keep", FILE_BYTES), {2, 3}),
        (("--keep", 0), set()),
        (("--unused", "1s", "--model", "b.gguf"), {0, 1, 2}),
        (("--keep", "1G", "--unused", "100000d"), {0, 1, 2, 3}),
    ],
)
def test_prune_removes_the_selected_blocks_and_no_foreign_files(
    directory: Path, words: tuple[str, ...], left: set[int]
) -> None:
    document, removed = said("prune", directory, *words), 4 - len(left)
    assert (document["removed_blocks"], document["removed_bytes"]) == (removed, removed * FILE_BYTES)
    assert (document["left_blocks"], document["left_bytes"]) == (len(left), len(left) * FILE_BYTES)
    store = BlockStore(directory, None)
    assert numbers(store) == left
    assert store.models() == sorted({OTHER if number == 3 else MODEL for number in left}), (
        "models without blocks are removed"
    )
    assert (directory / "foreign").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "code"),
    [(("prune", "."), 2), (("list", "."), 2), (("list", "/nowhere"), 2), (("prune", ".", "--unused", "long"), 2)],
)
def test_invalid_commands_are_refused(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    with pytest.raises(LlmcacheError) as caught:
        CliRunner().invoke(app, ["kv", words[0], str(tmp_path / words[1]), *words[2:]], catch_exceptions=False)
    assert caught.value.exit_code == code and caught.value.hint
    assert not list(tmp_path.iterdir()), "a refused command creates no files"
