"""Warm-ups against a modelled kernel: what they promise holds whatever the plan does meanwhile, and they find room."""

from __future__ import annotations

import pytest

from llmcache.fs.engine.warmup import Tell, Warmer
from llmcache.fs.vfs.operations import LlmcacheOperations
from llmcache.fs.vfs.source import SourceTree, WritePolicy
from tests.property.kernel import READER_PID, File, wait_until
from tests.property.rig import BUDGET, LOOP, MIB, Rig


def warmed(rig: Rig, name: str, tell: Tell = lambda _progress: None, *, fetch: bool = True) -> tuple[int, int]:
    """Bytes that a warm-up of a file says are wanted, and there."""
    tree = SourceTree(str(rig.directory))
    warmer = Warmer(rig.engine, LlmcacheOperations(tree, rig.engine, rig.reader, WritePolicy(False, ())))
    told = warmer.warm([name], tell, fetch=fetch)
    return told["wanted_bytes"], told["warm_bytes"]


def closed(rig: Rig, file: File) -> None:
    """Its reader closes it."""
    rig.engine.closed(file.backing, READER_PID)


@pytest.mark.parametrize("budget_bytes", [BUDGET - MIB, BUDGET + 4 * MIB])
def test_what_a_warm_up_says_holds_for_the_plan_at_its_end(rig: Rig, budget_bytes: int) -> None:
    """The plan changes while it brings in what was wanted: here by another budget."""
    closed(rig, rig.file("loop", LOOP))
    wanted, there = warmed(rig, "loop", lambda _progress: rig.engine.resize(budget_bytes))
    assert wanted == there == budget_bytes
    assert warmed(rig, "loop", fetch=False) == (wanted, there)


def test_a_warm_up_finds_room_where_nobody_reads_any_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier loop has left fills the memory to the limit, and no reader makes the evictor keep some free."""
    monkeypatch.setattr("llmcache.fs.engine.planner.CURSOR_LIFE_NS", 0)
    before = rig.file("before", LOOP)
    rig.until_pinned(before)
    rig.sweep(before)
    closed(rig, before)
    closed(rig, rig.file("loop", LOOP))
    groups = rig.engine.state.groups.values()
    wait_until(lambda: not any(group.cursors.live for group in groups), "readers are forgotten")
    wanted, there = warmed(rig, "loop")
    assert wanted == there > BUDGET // 2
