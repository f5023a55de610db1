"""Spill files on a mount: made with its default --spill, restored through it and behind it."""

from __future__ import annotations

import os

import pytest

from llmcache.errors import EnvironmentProblem
from llmcache.kv.spill import KvShape, SpillFile, SpillReader
from tests.mount.conftest import Mounter
from tests.unit.kv_parts import append, ids, restored

SHAPE = KvShape("tiny", layers=2, kv_heads=2, head_dim=64, page_tokens=16)


@pytest.mark.parametrize("direct", [None, False])
def test_spilled_through_a_mount(mount: Mounter, direct: bool | None) -> None:
    mounted = mount()
    path = mounted.point / "context.kv"
    with SpillFile.create(path, SHAPE, direct=direct) as file:
        append(file, 0, ids(0, 1600))
        file.flush()
        append(file, 0, ids(1600, 40))
        assert restored(file, 0) == list(range(1640))
    with SpillFile.open(path, SHAPE, direct=direct) as file:
        assert file.recovery.clean and restored(file, 0) == list(range(1640))
        file.truncate(0, 100)
        append(file, 0, ids(1600, 160))
    with SpillReader.open(mounted.source / "context.kv") as behind:
        assert restored(behind, 0) == list(range(1760))
    assert os.listdir(mounted.source) == ["context.kv"]


def test_a_name_that_is_no_spill_file_of_the_mount(mount: Mounter) -> None:
    mounted = mount()
    with pytest.raises(EnvironmentProblem, match="Read-only file system"):
        SpillFile.create(mounted.point / "context.gguf", SHAPE)
    assert os.listdir(mounted.source) == []
