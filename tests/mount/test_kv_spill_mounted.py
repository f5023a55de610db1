"""Spill files and stored prompts on a mount, restored through it and behind it; and spill files on a failing disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from llmcache.errors import MissingRequirement
from llmcache.kv.prefix.store import PART, BlockStore
from llmcache.kv.spill import KvShape, SpillFile, SpillReader
from llmcache.mount.backends.touches import why_not
from tests.mount.conftest import Mounter
from tests.unit.kv_parts import append, ids, loop_disk, restored
from tests.unit.test_kv_prefix import FILE_BYTES, MODEL, block, key, numbers, same

SHAPE = KvShape("tiny", layers=2, kv_heads=2, head_dim=64, page_tokens=16)
TINY = KvShape("tiny", layers=2, kv_heads=2, head_dim=4, page_tokens=4)


@pytest.mark.parametrize("mode", ["steer", pytest.param("inplace", marks=pytest.mark.bpf)])
def test_stored_prompts_on_a_mount(mount: Mounter, tmp_path: Path, mode: str) -> None:
    """Blocks, links and locks work as on the underlying file system, the limit holds, and SOURCE has the same files."""
    if mode == "inplace" and (reason := why_not(str(tmp_path))):
        pytest.skip(reason)
    mounted = mount("--mode", mode, "--rw")
    store, link = BlockStore(mounted.point / "kv", 4 * FILE_BYTES), "b" * 40
    for number in range(6):
        store.write(key(number), block(number))
    store.write(key(6, 1, PART), block(6), [link])
    assert numbers(store) == {4, 5, 6} and store.newest(MODEL, [link], 1) == key(6, 1, PART)
    store.used([key(4), key(6, 1, PART)], 8, 16384)
    (store.directory / key(5).file).write_bytes(b"damaged")
    for one in (store, BlockStore(mounted.point / "kv", 4 * FILE_BYTES), BlockStore(mounted.source / "kv", None)):
        assert same(one.read(key(4)), block(4)) and same(one.read(key(6, 1, PART)), block(6))
        assert one.read(key(5)) is None and one.uses(MODEL).restores == 1
    assert numbers(store) == {4, 6}
    store.prune()
    assert os.listdir(mounted.source / "kv") == ["lock"]


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_failed_writeback_does_not_succeed_later(tmp_path: Path, direct: bool | None, reopened: bool) -> None:
    """The kernel marks unwritten pages clean after an error. The file rewrites them, or a new open finds them missing."""
    with loop_disk(tmp_path) as disk, contextlib.ExitStack() as ends:
        path = disk.point / "a.kv"
        file = SpillFile.create(path, TINY, extent_pages=16, direct=direct)
        ends.callback(lambda: file.raw.close())
        append(file, 0, ids(0, 256))
        file.flush()
        old_offsets = {offset for layer in range(2) for _, offset in file.key_ranges(0, layer)}
        append(file, 0, ids(256, 232))
        new_offsets = {offset for layer in range(2) for _, offset in file.key_ranges(0, layer)} - old_offsets
        disk.starve(path, [keys - 4096 for keys in new_offsets])  # the tables of these extents
        append(file, 0, ids(488, 12))  # pages that the kernel has already tried to write must be written again
        with pytest.raises(MissingRequirement, match="writing back"):
            file.flush()
        append(file, 0, ids(500, 12))  # their entries are in a block that was not written
        if reopened:
            with pytest.raises(MissingRequirement, match="writing back"):
                file.close()
        disk.feed()
        if reopened:
            file = SpillFile.open(path, TINY, direct=direct)
        length = 256 if reopened else 512
        assert restored(file, 0) == list(range(length))
        file.flush()
        append(file, 0, ids(length, 16))
        file.close()
        disk.remount()
        with SpillReader.open(path, TINY) as found:
            assert not found.torn and restored(found, 0) == list(range(length + 16))
