"""The story of a context larger than memory: spilled into a mount, saved, and gone on with in another process and mount.

The budgets of the cache and of the mount hold less than the keys and values. What a token attends to is all of them
(the token budget is larger), so tokens and logits are those of transformers' own cache, bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmcache.fs.client import control
from tests.e2e.story_parts import mounted, said
from tests.mount.live import MIB, OVERHEAD_BYTES, private_bytes
from tools.bench.sides import REPOSITORY, environment

pytestmark = [pytest.mark.mount, pytest.mark.transformers]

BUDGET = 16 * MIB
# What is not a page of keys and values: headers, tables, commits, and reading a block to see whether O_DIRECT works.
BESIDE = 32 << 10


def talk(*words: object, told: str = "") -> dict[str, Any]:
    """What a process of the conversation says."""
    command = [sys.executable, "-m", "tests.e2e.talking", *map(str, words)]
    result = subprocess.run(
        command, input=told, capture_output=True, text=True, timeout=240, check=False, env=environment(), cwd=REPOSITORY
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return dict(json.loads(result.stdout))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Both turns with transformers' own cache."""
    return talk("stock")


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
@pytest.mark.parametrize("ssd", ["file", "csd"])
def test_a_context_larger_than_memory(expected: dict[str, Any], tmp_path: Path, ssd: str) -> None:
    source, point = tmp_path / "source", tmp_path / "mnt"
    source.mkdir()
    # The emulated device reads and writes for the host; what it moves is counted where the file is.
    memory = "cpu" if ssd == "file" else "device"
    with mounted(source, point, "--cache", BUDGET, "--spill", "*.kv") as mount:
        first = talk("begin", mount / "talk.kv", "--ssd", ssd)
        assert same(first, expected["begin"])
        check_bounded(mount)
        stats = said("stats", mount)
        assert moved(first, memory, "ssd") > BUDGET
        assert 0 <= stats["backing_write_bytes"] - moved(first, memory, "ssd") <= BESIDE
        assert 0 <= stats["read_bytes"] - moved(first, "ssd", memory) <= BESIDE
    assert sorted(file.name for file in source.iterdir()) == ["tables-talk.kv", "talk.kv"]

    with mounted(source, point, "--cache", BUDGET, "--spill", "*.kv") as mount:
        second = talk("go-on", mount / "talk.kv", "--ssd", ssd, told=str(first["ids"][-1]))
        assert same(second, expected["go-on"])
        check_bounded(mount)
        stats = said("stats", mount)
        assert 0 <= stats["backing_write_bytes"] - moved(second, memory, "ssd") <= BESIDE
        # Restoring reads tables and page headers as well, and pages around them through the page cache.
        assert 0 <= stats["read_bytes"] - moved(second, "ssd", memory) <= 4 * MIB
