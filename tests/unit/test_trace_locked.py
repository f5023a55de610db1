"""What a mount keeps locked is in no trace of a program that maps it: it is noted beside the rows, and classed with them."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from llmcache.cache.classify import LockedLoop, TraceClasses, classify
from llmcache.errors import DataError, MountProblem
from llmcache.fs.client import control, mountpoint
from llmcache.mountinfo import Mount
from llmcache.report.classify import summary
from llmcache.trace.files import LockedBytes
from llmcache.trace.record import LOCKED, MAP, Provenance, Trace, TraceFile, locked_bytes, locked_extra

BLOCK = 4096
FILE = TraceFile(0, "/mnt/models/m.gguf", 0x2B, 7, 0, 1000 * BLOCK)
OTHER = TraceFile(1, "/etc/hosts", 1, 8, 0, BLOCK)


def passes(extra: str, shown_blocks: int = 600) -> TraceClasses:
    """The classes of six passes over the first blocks of FILE, 100 at a time, with what was locked beside them."""
    first = [block for _ in range(6) for block in range(0, shown_blocks, 100)]
    times = [number * 10**8 for number in range(len(first))]
    provenance = Provenance("test", extra={LOCKED: extra} if extra else {})
    return classify(Trace.build(times, 0, first, 100, MAP, files=[FILE, OTHER], provenance=provenance).batches())


def test_the_loop_is_what_was_seen_and_what_was_locked() -> None:
    found = passes(locked_extra({0: 300 * BLOCK, 1: BLOCK}))
    assert found.locked == (LockedLoop(FILE.path, 300 * BLOCK),), "what is in no loop is not counted"
    assert (found.totals.loop_at_once_bytes, found.totals.locked_loop_bytes) == (600 * BLOCK, 300 * BLOCK)
    assert found.size_command == f"llmcache size --loop {900 * BLOCK / 1e6:.10g}M --hot 0M"
    assert found.document("t")["locked"] == [{"path": FILE.path, "bytes": 300 * BLOCK}]
    assert any("1.23 MB of /mnt/models/m.gguf that its mount keeps locked" in line for line in summary(found))


def test_the_smaller_of_two_answers_was_locked_all_the_time() -> None:
    answers = {FILE.path: [500, 300], OTHER.path: [0]}
    asked = LockedBytes(lambda file: answers[file.path].pop(0))
    asked.begin([FILE, OTHER])
    asked.begin([FILE])
    asked.finish([FILE, OTHER])
    assert asked.by_file == {0: 300} and "300 B" in asked.remarks[0]
    silent = LockedBytes(Mock(side_effect=MountProblem("the daemon does not answer")))
    silent.begin([FILE])
    silent.finish([FILE])
    said = f"{FILE.path}: how much of it its mount keeps locked is not known: the daemon does not answer"
    assert silent.by_file == {} and silent.remarks == [said]


def test_what_is_noted_is_checked() -> None:
    assert locked_extra({}) == "" and passes("").locked == () and locked_bytes(Provenance("test")) == {}
    for text in ("[1]", "{", '{"x": 1}', '{"0": []}'):
        with pytest.raises(DataError, match="locked_bytes"):
            locked_bytes(Provenance("test", extra={LOCKED: text}))


@pytest.mark.parametrize(("mode", "expected"), [("steer", 300), ("arena", 0)])
def test_the_mount_below_a_file_is_asked(monkeypatch: pytest.MonkeyPatch, mode: str, expected: int) -> None:
    mount = Mount(30, 0x2B, "/", "/mnt/models", mountpoint.FSTYPE, "user_id=0")
    files = [{"path": "/m.gguf", "loops": [{"pinned_bytes": 300}]}, {"path": "/n.gguf", "loops": [{"pinned_bytes": 9}]}]
    request = Mock(return_value={"mode": mode, "files": files})
    monkeypatch.setattr(mountpoint, "mounts", lambda: {29: replace(mount, dev=0x2A, point="/else"), 30: mount})
    monkeypatch.setattr(control, "request", request)
    assert mountpoint.locked_bytes(FILE) == expected and mountpoint.locked_bytes(OTHER) == 0
    assert [call.args for call in request.call_args_list] == [("/mnt/models", {"op": "stats"})]
