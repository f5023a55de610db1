"""llama.cpp computes the same logits over the mount as over the plain file, in all modes, with too small a budget."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.mount.live import live
from tools.bench.runner import client
from tools.make_model import main as make_model

TOKENS = 5

pytestmark = [pytest.mark.mount, pytest.mark.llama]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    make_model([str(path), "--size", "48M"])
    return path


def logits(model: Path) -> list[int]:
    """Return a checksum of the logits of each token."""
    command = client("llama_tokens", model, TOKENS, "--threads", 1)
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-1000:]
    events = [json.loads(line) for line in result.stdout.splitlines()]
    return [event["crc"] for event in events if event["event"] == "step"]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    plain = logits(model)
    assert len(plain) == len(set(plain)) == TOKENS
    return plain


@pytest.mark.parametrize("mode", ["steer", "arena", pytest.param("inplace", marks=pytest.mark.bpf)])
def test_same_logits(model: Path, expected: list[int], tmp_path: Path, mode: str) -> None:
    with live(model.parent, tmp_path / "mnt", "32Mi", "--mode", mode) as mount:
        assert logits(mount.mountpoint / model.name) == expected
        entry = next(each for each in mount.stats()["files"] if each["path"].lstrip("/") == model.name)
        assert (entry["class"], entry["size_bytes"]) == ("loop", model.stat().st_size), "the header makes it one"
        assert logits(mount.mountpoint / model.name) == expected, "the second run starts with what the first left"
        stats = mount.stats()
    assert stats["mode"] == mode
    assert stats["read_bytes"] > 0
    assert stats["backing_read_bytes"] > 0 or mode == "inplace", "in place the kernel may have had all of it"
