"""A KV store whose spill file lies on a mount, made with its default --spill."""

from __future__ import annotations

import os

import numpy as np
import pytest

from llmcache.kv.tiers import KvStore, StoreConfig
from tests.mount.conftest import Mounter
from tests.unit.store_parts import Plain, shape_of


@pytest.mark.parametrize("ssd", ["file", "csd"])
def test_a_store_on_a_mount(mount: Mounter, ssd: str) -> None:
    mounted = mount()
    shape = shape_of()
    config = StoreConfig(shape, 2, 4, 8, cpu_pages=5, path=mounted.point / "context.kv", ssd=ssd, threads=1)
    plain = Plain(shape, 2)
    with KvStore(config) as store:
        plain.step(store, 601)
        store.repeat(2)
        plain.choose(np.array([0, 0, 1, 1]))
        for seed in range(1, 9):
            plain.step(store, 3, seed)
        plain.check_all(store)
        store.save()
    assert sorted(os.listdir(mounted.source)) == ["context.kv", "tables-context.kv"]
    assert config.path is not None
    with KvStore.restore(config.path, config) as store:
        assert store.restored is not None and store.restored.may_be_lost == 0 and store.batch == 4
        plain.check_all(store)
        plain.step(store, 10, 9)
        store.crop(500)
        plain.crop(500)
        plain.check_all(store)
        store.save()
    # Behind the mount, as another machine would find it.
    with KvStore.restore(mounted.source / "context.kv", config) as store:
        plain.check_all(store)
        store.discard()
    assert os.listdir(mounted.source) == []
