"""The story of an operator: is the machine ready, a mount from a settings file, warmed, watched, resized, emptied, ended.

Every step is a command, with the exit code that scripts go by.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from tests.e2e.story_parts import llmcache, said
from tests.mount.live import MIB, by_read, random_file, resident_bytes, wait_for
from tools.bench.sides import is_mounted

pytestmark = pytest.mark.mount

MODEL_BYTES = 40 * MIB
CACHE, LESS = 64 * MIB, 24 * MIB


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A settings file for a directory with a model, its tokenizer and a file of no known format."""
    source, point = tmp_path / "models", tmp_path / "mnt"
    source.mkdir()
    point.mkdir()
    header = {"layers.0.weight": {"dtype": "U8", "shape": [MODEL_BYTES], "data_offsets": [0, MODEL_BYTES]}}
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + os.urandom(MODEL_BYTES))
    random_file(source / "tokenizer.json", MIB)
    random_file(source / "unknown.bin", 8 * MIB)
    path = tmp_path / "models.toml"
    path.write_text(f'[mount]\nsource = "{source}"\nmount = "{point}"\ncache = "64Mi"\npin = ["tokenizer.json"]\n')
    return path


def test_an_operators_day(settings: Path) -> None:
    source, point = settings.parent / "models", settings.parent / "mnt"
    model, served = source / "model.safetensors", point / "model.safetensors"

    assert not [each for each in said("doctor")["findings"] if each["status"] == "failed"]
    llmcache("doctor", point / "missing", code=2)
    shown = said("config", "--show", "--config", settings)
    assert str(settings) in json.dumps(shown) and '"64Mi"' in json.dumps(shown)

    llmcache("stats", point, code=4)
    llmcache("mount", "--config", settings)
    try:
        llmcache("mount", "--config", settings, code=4)

        assert said("warmup", point, "--check", code=4)["warm_bytes"] < MODEL_BYTES
        warm = said("warmup", point)
        assert warm["warm_bytes"] == warm["wanted_bytes"] >= MODEL_BYTES + MIB
        assert said("warmup", point, "--check")["warm_bytes"] == warm["warm_bytes"]
        llmcache("warmup", point, "*.gguf", code=2)

        before = said("stats", point)
        assert before["budget_bytes"] == CACHE
        assert by_read(served) == by_read(model)
        assert said("stats", point)["backing_read_bytes"] - before["backing_read_bytes"] < MIB, "it was read when warmed"

        shrunk = said("resize", point, "24Mi")
        assert (shrunk["before_bytes"], shrunk["budget_bytes"]) == (CACHE, LESS)
        stats = said("stats", point)
        assert stats["pinned_bytes"] <= LESS and stats["resident_bytes"] - stats["beyond_bytes"] <= LESS + 32 * MIB
        llmcache("resize", point, "900P", code=3)
        llmcache("resize", point, "much", code=2)
        assert said("stats", point)["budget_bytes"] == LESS

        assert said("evict", point)["pinned"] == ["/tokenizer.json"]
        wait_for(lambda: resident_bytes(served) < 2 * MIB, "the model is given up")
        assert by_read(served) == by_read(model)
        llmcache("umount", "--config", settings)
    finally:
        if is_mounted(point):
            llmcache("umount", "--force", point)
    llmcache("umount", point, code=4)
    assert os.listdir(point) == []
