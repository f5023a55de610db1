"""What a loader looks at before it fetches ahead."""

from __future__ import annotations

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
