"""The story of a context larger than memory: spilled into a mount, saved, and gone on with in another process and mount.

The budgets of the cache and of the mount hold less than the keys and values. What a token attends to is all of them
(the token budget is larger), so tokens and logits are those of transformers' own cache, bit for bit.
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

from llmcache.fs.client import control
from tests.e2e.story_parts import mounted, said
from tests.mount.live import MIB, OVERHEAD_BYTES, private_bytes
from tools.bench.harness import ROOT
from tools.bench.sides import environment

pytestmark = [pytest.mark.mount, pytest.mark.transformers]

BUDGET = 16 * MIB
# What is not a page of keys and values: headers, tables, commits, and reading a block to see whether O_DIRECT works.
BESIDE = 32 << 10


class Talker:
    """A process that has a model and says parts of conversations with it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def say(self, name: str, path: Path | str = "", last: int = 0) -> dict[str, Any]:
        """What it says of a part."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"name": name, "path": str(path), "last": last}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process ended: its errors are with this test's output"
        return dict(json.loads(line))


@contextmanager
def talker() -> Iterator[Talker]:
    """Yield a process of its own; what it says to its standard error is this test's."""
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
    """Bytes that the store says it moved."""
    rows = turn["traffic"]["moved_bytes"]
    return sum(int(row["bytes"]) for row in rows if (row["from"], row["to"]) == (source, target))


def same(turn: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether tokens and logits are the same."""
    return all(turn[key] == expected[key] for key in ("ids", "logits"))


def check_bounded(mount: Path) -> None:
    """The mount keeps to its budget, and its daemon to what it may take beside it."""
    pid = control.daemon_pid(str(mount))
    assert pid is not None
    assert said("stats", mount)["resident_bytes"] <= BUDGET + OVERHEAD_BYTES
    assert private_bytes(pid) <= BUDGET + OVERHEAD_BYTES


@pytest.mark.long
def test_a_context_larger_than_memory(tmp_path: Path) -> None:
    source, point = tmp_path / "source", tmp_path / "mnt"
    source.mkdir()
    with talker() as first, talker() as second:
        tell(first, second, source, point)


def tell(first: Talker, second: Talker, source: Path, point: Path) -> None:
    """One process begins the conversation, after it has had all of it with transformers' own cache; another goes on."""
    expected = first.say("stock")
    with mounted(source, point, "--cache", BUDGET, "--spill", "*.kv") as mount:
        begun = first.say("begin", mount / "talk.kv")
        assert same(begun, expected["begin"])
        check_bounded(mount)
        stats = said("stats", mount)
        assert moved(begun, "cpu", "ssd") > BUDGET
        assert 0 <= stats["backing_write_bytes"] - moved(begun, "cpu", "ssd") <= BESIDE
        assert 0 <= stats["read_bytes"] - moved(begun, "ssd", "cpu") <= BESIDE
    assert sorted(file.name for file in source.iterdir()) == ["tables-talk.kv", "talk.kv"]

    with mounted(source, point, "--cache", BUDGET, "--spill", "*.kv") as mount:
        gone_on = second.say("go-on", mount / "talk.kv", begun["ids"][-1])
        assert same(gone_on, expected["go-on"])
        check_bounded(mount)
        stats = said("stats", mount)
        assert 0 <= stats["backing_write_bytes"] - moved(gone_on, "cpu", "ssd") <= BESIDE
        # Restoring reads tables and page headers as well, and pages around them through the page cache.
        assert 0 <= stats["read_bytes"] - moved(gone_on, "ssd", "cpu") <= 4 * MIB
