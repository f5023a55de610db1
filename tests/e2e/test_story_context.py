"""The story of a context larger than memory: spilled to a mount, saved, and continued by another process and mount.

The budgets of the cache and of the mount are smaller than the keys and values. The token budget is larger than the
context, so tokens attend to all of it, and tokens and logits equal those of transformers' own cache bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmcache.mount.client import control
from tests.e2e.story_parts import mounted, run_json
from tests.mount.live import MIB, OVERHEAD_BYTES, private_bytes
from tools.bench.harness import ROOT
from tools.bench.sides import environment

pytestmark = [pytest.mark.mount, pytest.mark.transformers]

BUDGET = 16 * MIB
# reads and writes besides pages: headers, tables, commits, and the block that tests whether O_DIRECT works
OTHER_BYTES = 32 << 10


class Talker:
    """A process with a model that computes parts of conversations."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def say(self, name: str, path: Path | str = "", last: int = 0) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"name": name, "path": str(path), "last": last}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process ended: its errors are with this test's output"
        return dict(json.loads(line))


@contextmanager
def talker() -> Iterator[Talker]:
    """Yield a separate process; its stderr is that of the test."""
    command = [sys.executable, "-m", "tests.e2e.talking"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
    )
    with process:
        try:
            yield Talker(process)
        finally:
            process.kill()


def moved(turn: dict[str, Any], source: str, target: str) -> int:
    rows = turn["traffic"]["moved_bytes"]
    return sum(int(row["bytes"]) for row in rows if (row["from"], row["to"]) == (source, target))


def same(turn: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(turn[key] == expected[key] for key in ("ids", "logits"))


def check_bounded(mount: Path) -> None:
    """Check that the mount stays within its budget, and its daemon within the promised overhead."""
    pid = control.daemon_pid(str(mount))
    assert pid is not None
    assert run_json("stats", mount)["resident_bytes"] <= BUDGET + OVERHEAD_BYTES
    assert private_bytes(pid) <= BUDGET + OVERHEAD_BYTES


@pytest.mark.long
def test_a_context_larger_than_memory(tmp_path: Path) -> None:
    source, point = tmp_path / "source", tmp_path / "mnt"
    source.mkdir()
    with talker() as first, talker() as second:
        run_story(first, second, source, point)


def run_story(first: Talker, second: Talker, source: Path, point: Path) -> None:
    """The first process computes the conversation with transformers' cache and begins it again; the second continues it."""
    expected = first.say("stock")
    with mounted(source, point, "--cache", BUDGET, "--spill", "*.kv") as mount:
        begun = first.say("begin", mount / "talk.kv")
        assert same(begun, expected["begin"])
        check_bounded(mount)
        stats = run_json("stats", mount)
        assert moved(begun, "cpu", "ssd") > BUDGET
        assert 0 <= stats["backing_write_bytes"] - moved(begun, "cpu", "ssd") <= OTHER_BYTES
        assert 0 <= stats["read_bytes"] - moved(begun, "ssd", "cpu") <= OTHER_BYTES
    assert sorted(file.name for file in source.iterdir()) == ["tables-talk.kv", "talk.kv"]

    with mounted(source, point, "--cache", BUDGET, "--spill", "*.kv") as mount:
        continued = second.say("go-on", mount / "talk.kv", begun["ids"][-1])
        assert same(continued, expected["go-on"])
        check_bounded(mount)
        stats = run_json("stats", mount)
        assert 0 <= stats["backing_write_bytes"] - moved(continued, "cpu", "ssd") <= OTHER_BYTES
        # Restoring also reads tables and page headers, and the page cache reads around them.
        assert 0 <= stats["read_bytes"] - moved(continued, "ssd", "cpu") <= 4 * MIB
