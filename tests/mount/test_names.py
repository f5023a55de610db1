"""Models whose files are named by checksums: a Hugging Face cache and an Ollama store, over FUSE and in place."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import Mounted, Mounter
from tests.mount.live import MIB, by_read, llmcache, run_json, wait_for
from tests.unit.names_parts import blob_of, hub_snapshot, ollama_model
from tools import make_model

SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
NAMES = [f"org/tiny/{shard}" for shard in SHARDS]
CHECKSUM = re.compile(r"[0-9a-f]{32}")


def made(directory: Path, *words: str) -> list[Path]:
    """Generate a model of about 24 MB and return its files."""
    assert make_model.main([str(directory / "model.x"), "--size", "24M", *words]) == 0
    return sorted(directory.glob("model*.x"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A SOURCE with a model of two shards in a Hugging Face cache, and one in an Ollama store."""
    source, scratch = tmp_path / "source", tmp_path / "scratch"
    shards = made(scratch, "--format", "safetensors", "--split", "2")
    hub_snapshot(source / "hub", "org/tiny", dict(zip(SHARDS, shards, strict=True)) | {"config.json": b"{}"})
    (model,) = made(scratch / "gguf")
    ollama_model(source / "ollama", "llama3.2:3b", {"model": model, "template": b"{{ .Prompt }}"})
    return source


def files(mounted: Mounted) -> dict[str, dict[str, Any]]:
    return {file["name"]: file for file in mounted.stats()["files"]}


def pinned_bytes(mounted: Mounted, name: str) -> int:
    return sum(loop["pinned_bytes"] for loop in files(mounted).get(name, {"loops": []})["loops"])


@pytest.mark.parametrize("mode", ["steer", "arena", "inplace"])
def test_commands_use_the_names_of_models(mount: Mounter, store: Path, mode: str) -> None:
    """The shards are one loop, in their order; globs, tables and JSON use the names of models."""
    mounted = mount("--mode", mode, "--cache", "100Mi", "--pin", "llama3*", source=store)
    snapshot = next((mounted.point / "hub/models--org--tiny/snapshots").iterdir())
    wait_for(lambda: pinned_bytes(mounted, "llama3.2:3b") > 20 * MIB, "it is pinned under the name of the model")

    warm = run_json("warmup", mounted.point, f"org/tiny/{SHARDS[1]}")
    assert [row["name"] for row in warm["files"]] == NAMES, "the shards are one model"
    blobs = [f"/hub/models--org--tiny/blobs/{blob_of(snapshot / shard)}" for shard in SHARDS]
    assert [row["path"] for row in warm["files"]] == blobs
    assert [by_read(snapshot / shard) for shard in SHARDS] == [by_read(store / blob[1:]) for blob in blobs]
    seen = files(mounted)
    loops = [loop for name in NAMES for loop in seen[name]["loops"]]
    assert len(loops) == 1 and seen[NAMES[0]]["loops"] and loops[0]["bytes"] > 20 * MIB
    assert [seen[name]["path"] for name in NAMES] == blobs

    shown = [llmcache(*words).stdout for words in (("stats", mounted.point), ("top", mounted.point, "--once"))]
    shown += [llmcache("warmup", mounted.point, "--check").stdout, llmcache("evict", mounted.point, "llama*").stderr]
    for text in shown:
        assert "llama3.2:3b" in text and not CHECKSUM.search(text), text
    assert all("org/tiny/model-00001-of" in text or SHARDS[0][-20:] in text for text in shown[:3]), "shortened to the width"
    document = run_json("top", mounted.point, "--once")
    assert {file["name"] for file in document["heat"]} >= {"llama3.2:3b", *NAMES}
    assert 'file="llama3.2:3b"' in llmcache("stats", mounted.point, "--openmetrics").stdout
    (group,) = run_json("evict", mounted.point, "org/tiny/model*")["groups"]
    assert group["names"] == NAMES and group["evicted_bytes"] > 20 * MIB
    assert run_json("evict", mounted.point, "llama3.2:3b")["pinned_names"] == ["llama3.2:3b"]


@pytest.mark.parametrize("mode", ["steer", "inplace"])
def test_a_model_pulled_while_mounted_gets_its_name(mount: Mounter, tmp_path: Path, mode: str) -> None:
    """Like `ollama pull`: the blob is written and read first, and the manifest last."""
    (model,) = made(tmp_path / "scratch")
    (tmp_path / "source" / "blobs").mkdir(parents=True)
    mounted = mount("--mode", mode, "--cache", "100Mi", "--pin", "llama3*")
    content = model.read_bytes()
    manifest = ollama_model(mounted.source, "llama3.2:3b", {"model": model})
    text = manifest.read_text()
    manifest.unlink()
    (blob,) = (mounted.point / "blobs").iterdir()
    time.sleep(2.5)  # in place, files that have just changed are not steered
    wait_for(lambda: blob.read_bytes() == content and f"blobs/{blob.name}" in files(mounted), "it is read without a name")
    manifest.write_text(text)
    run_json("warmup", mounted.point, "llama3.2*")
    wait_for(lambda: pinned_bytes(mounted, "llama3.2:3b") > 20 * MIB, "it is pinned under its name")
    assert run_json("evict", mounted.point, "llama3.2:3b")["pinned_names"] == ["llama3.2:3b"], "by --pin"
