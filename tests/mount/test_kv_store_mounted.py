"""A KV store whose spill file is on a mount with the default --spill."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from llmcache.errors import DataError, MissingRequirement
from llmcache.kv.tiers import KvStore, StoreConfig
from tests.mount.conftest import Mounter
from tests.mount.fault_rig import faulty
from tests.mount.faulty import Rule, write_rules
from tests.unit.store_parts import Plain, crash, shape_of


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
