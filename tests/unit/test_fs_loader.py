"""What a loader looks at before it fetches ahead."""

from __future__ import annotations

import time
from typing import cast

import pytest

from llmcache.fs.backends.base import BufferPool, Holder
from llmcache.fs.backends.fuse import FuseBackend
from llmcache.fs.engine.group import Group, Member
from llmcache.fs.engine.loader import Loader
from llmcache.fs.engine.state import CacheState


def test_files_without_a_reader_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every open wakes all loaders: with 5000 known files their looks at each were a third of the daemon's time."""
    state = CacheState(10**8, BufferPool(2, 1))
    for number in range(100):
        path = f"/{number}"
        state.groups[path] = Group(path, [Member(path, 4 << 20, 0, 4)], 1 << 20, None)
    state.groups["/7"].note(0, 1, True)
    looked: list[str] = []
    loader = Loader(state, FuseBackend(state, cast(Holder, None)))

    def look(group: Group) -> tuple[()]:
        looked.append(group.key)
        return ()

    monkeypatch.setattr(loader, "_candidates", look)
    with state.lock:
        assert loader._claim() is None
    assert looked == ["/7"]


def test_who_looks_after_experts_rests_also_after_a_second_start(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = FuseBackend(CacheState(10**8, BufferPool(2, 1)), cast(Holder, None)).slices
    looks: list[int] = []

    def look() -> list[tuple[int, int, int]]:
        looks.append(1)
        return []

    monkeypatch.setattr(slices, "_stray_places", look)
    for _ in range(2):
        slices.start()
        time.sleep(0.2)
        slices.stop()
    assert 2 <= len(looks) < 10, "no mixture is read: once a second"
