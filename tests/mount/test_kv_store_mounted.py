"""KV stores, spill files and stored prompts on a mount, restored through it and behind it, and on failing disks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from llmcache.errors import DataError, MissingRequirement
from llmcache.kv.prefix.store import PART, BlockStore
from llmcache.kv.spill import KvShape, SpillFile, SpillReader
from llmcache.kv.tiers import KvStore, StoreConfig
from llmcache.mount.backends.touches import why_not
from tests.mount.conftest import Mounter
from tests.mount.fault_rig import faulty
from tests.mount.faulty import Rule, write_rules
from tests.unit.kv_parts import append, ids, loop_disk, restored
from tests.unit.store_parts import Plain, crash, shape_of
from tests.unit.test_kv_prefix import FILE_BYTES, MODEL, block, key, numbers, same


@pytest.mark.parametrize("ssd", ["file", "csd"])
def test_a_store_on_a_mount(mount: Mounter, ssd: str) -> None:
    mounted = mount()
    shape = shape_of()
    config = StoreConfig(shape, 2, 4, 8, cpu_pages=5, path=mounted.point / "context.kv", ssd=ssd, threads=1)
    plain = Plain(shape, 2)
    with KvStore(config) as store:
        plain.step(store, 601)
        store.select(np.array([0, 0, 1, 1]))
        plain.choose(np.array([0, 0, 1, 1]))
        for seed in range(1, 9):
            plain.step(store, 3, seed)
        plain.check_all(store)
        store.save()
    assert sorted(os.listdir(mounted.source)) == ["context.kv", "tables-context.kv"]
    assert config.path is not None
    with KvStore.restore(config.path, config) as store:
        assert store.batch == 4
        plain.check_all(store)
        plain.step(store, 10, 9)
        store.crop(500)
        plain.crop(500)
        plain.check_all(store)
        store.save()
    # SOURCE has a complete store, which another machine could restore.
    with KvStore.restore(mounted.source / "context.kv", config) as store:
        plain.check_all(store)
        store.discard()
    assert os.listdir(mounted.source) == []


@pytest.mark.parametrize("ssd", ["file", "csd"])
@pytest.mark.parametrize("direct", [None, False])
def test_a_disk_that_drops_unwritten_data(tmp_path: Path, ssd: str, direct: bool | None) -> None:
    """Data still in memory is written again, except with direct I/O; other data is reported as lost."""
    files, point, rules = tmp_path / "files", tmp_path / "point", tmp_path / "rules"
    files.mkdir()
    with faulty(files, point, rules), contextlib.ExitStack() as ends:
        config = StoreConfig(shape_of(), 2, 4, 8, cpu_pages=5, path=point / "context.kv", ssd=ssd, threads=1, direct=direct)
        store, plain = KvStore(config), Plain(shape_of(), 2)
        ends.callback(crash, store)
        plain.step(store, 80)
        store.save()
        plain.step(store, 41, 1)
        write_rules(rules, [Rule("lost", "fsync", "*.kv")])
        with pytest.raises(MissingRequirement, match="writing back"):
            store.save()
        write_rules(rules, [])
        if direct is False:
            with pytest.raises(DataError, match="is lost") as caught:
                store.save()
            assert caught.value.hint and "compute it again" in caught.value.hint
            with pytest.raises(DataError, match="is lost"):
                plain.check_all(store)
            store.crop(80)
            plain.crop(80)
        plain.check_all(store)
        plain.step(store, 9, 2)
        store.save()
        crash(store)
        assert config.path is not None
        with KvStore.restore(config.path, config) as found:
            plain.check_all(found)
            assert (found.ids == plain.ids).all()


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


TINY = KvShape("tiny", layers=2, kv_heads=2, head_dim=4, page_tokens=4)


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
