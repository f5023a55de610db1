"""Bytes that a token reads of model files: loop, hot set and rows; shards, companion files, and invalid files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from llmcache.errors import DataError, UsageError
from llmcache.model.modelfile import ModelHeaders, model_bytes
from llmcache.model.moe import MoeBytes
from llmcache.trace.record import TraceFile
from tests.unit.gguf_bytes import U16, U32, Gguf
from tests.unit.names_parts import blob_of, hub_snapshot, ollama_model, safetensors_bytes

F32 = 0
OUTPUT = ("output.weight", 64)
LAYER = ("blk.0.attn_q.weight", 256)
EXPERTS = ("blk.0.ffn_up_exps.weight", 512)
EMBEDDING = ("token_embd.weight", 128)


def gguf(path: Path, *tensors: tuple[str, int], shard: tuple[int, int] | None = None, used: int | None = None) -> Path:
    """Write a GGUF file of float32 `tensors` with their sizes in bytes; expert tensors have 8 experts, `used` per token."""
    content, offset = Gguf(), 0
    if used is not None:
        content.key("test.expert_used_count", U32, used)
    if shard is not None:
        content.key("split.no", U16, shard[0]).key("split.count", U16, shard[1])
    for name, size_bytes in tensors:
        content.tensor(name, [size_bytes // 32, 8] if "_exps" in name else [size_bytes // 4], F32, offset)
        offset += size_bytes
    content.data_bytes = offset
    path.write_bytes(content.file())
    return path


def safetensors(path: Path, **tensors: int) -> Path:
    """Write a safetensors file; `tensors` maps names to sizes in bytes."""
    path.write_bytes(safetensors_bytes(**tensors))
    return path


@pytest.mark.parametrize(
    ("tensors", "used", "sizes", "experts"),
    [
        ((EMBEDDING, LAYER, OUTPUT), None, (256 + 64, 128, 0), (None, None, 256 + 64)),
        ((EMBEDDING, LAYER, OUTPUT), 0, (256 + 64, 128, 0), (None, None, 256 + 64)),
        ((EMBEDDING, LAYER), None, (128 + 256, 0, 0), (None, None, 128 + 256)),  # tied: the whole embedding is read
        ((EMBEDDING, LAYER, EXPERTS, OUTPUT), None, (256 + 512 + 64, 128, 512), (8, None, 256 + 512 + 64)),  # an upper bound
    ],
)
def test_bytes_per_token_follow_from_the_tensors(
    tmp_path: Path,
    tensors: tuple[tuple[str, int], ...],
    used: int | None,
    sizes: tuple[int, int, int],
    experts: tuple[int | None, int | None, int],
) -> None:
    path = gguf(tmp_path / "m.gguf", *tensors, used=used)
    found = model_bytes(str(path))
    assert (found.loop_bytes, found.row_bytes, found.sparse_bytes) == sizes
    assert (found.experts, found.used, found.loop) == experts
    assert (found.kind, found.files, found.path) == ("gguf", 1, str(path))
    assert found.hot_bytes == path.stat().st_size - found.loop_bytes - found.row_bytes


@pytest.mark.parametrize("given", [0, 1])
def test_any_shard_stands_for_all(tmp_path: Path, given: int) -> None:
    """The first header has the number of experts per token."""
    paths = [
        gguf(tmp_path / "m-00001-of-00002.gguf", EMBEDDING, LAYER, shard=(0, 2), used=2),
        gguf(tmp_path / "m-00002-of-00002.gguf", EXPERTS, OUTPUT, shard=(1, 2)),
    ]
    found = model_bytes(str(paths[given]))
    assert (found.files, found.row_bytes) == (2, 128)
    assert found.loop == MoeBytes(256 + 64, 512, experts=8, used=2)


@pytest.mark.parametrize(
    ("config", "used"),
    [
        (None, None),
        ({"num_experts_per_tok": 2}, 2),
        ({"experts_per_token": 1}, 1),
        ({"text_config": {"num_experts_per_tok": 2}}, 2),
        ({"num_experts_per_tok": [2]}, None),
        ([], None),
    ],
)
def test_a_config_gives_the_experts_per_token_of_safetensors(tmp_path: Path, config: object, used: int | None) -> None:
    """Three experts have tensors of their own; the shared expert is dense."""
    names = {f"model.layers.0.mlp.experts.{number}.up_proj.weight": 10 for number in range(3)}
    shared = {"model.layers.0.mlp.shared_experts.up_proj.weight": 5, "lm_head.weight": 30}
    path = safetensors(tmp_path / "m.safetensors", **names, **shared)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    found = model_bytes(str(path))
    assert (found.loop_bytes, found.sparse_bytes, found.experts, found.used) == (65, 30, 3, used)


def test_safetensors_with_companions_and_an_index(tmp_path: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    safetensors(tmp_path / names[0], **{"model.embed_tokens.weight": 50, "model.layers.0.mlp.up_proj.weight": 70})
    safetensors(tmp_path / names[1], **{"lm_head.weight": 30})
    plain = model_bytes(str(tmp_path / names[0]))
    assert (plain.kind, plain.files, plain.loop_bytes, plain.row_bytes) == ("safetensors", 2, 100, 50)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    (tmp_path / "tokenizer.json").write_bytes(bytes(1000))
    (tmp_path / "other.bin").write_bytes(bytes(5000))
    found = model_bytes(str(index))
    assert (found.files, found.loop_bytes) == (2, 100)
    assert found.hot_bytes == plain.hot_bytes + 1000 + index.stat().st_size


@pytest.mark.parametrize("given", ["link", "blob", "snapshot", "repository"])
def test_a_model_in_a_hub_cache_is_found_by_any_of_its_paths(tmp_path: Path, given: str) -> None:
    shards = [safetensors_bytes(**{"model.layers.0.mlp.up_proj.weight": 70}), safetensors_bytes(**{"lm_head.weight": 30})]
    files = {f"model-0000{number + 1}-of-00002.safetensors": content for number, content in enumerate(shards)}
    snapshot = hub_snapshot(tmp_path, "org/tiny", {**files, "config.json": b"{}"})
    link = snapshot / "model-00002-of-00002.safetensors"
    paths = {"link": link, "snapshot": snapshot, "repository": snapshot.parents[1]}
    found = model_bytes(str(paths.get(given, link.resolve())))
    assert (found.files, found.loop_bytes, found.kind) == (2, 100, "safetensors")
    assert found.hot_bytes == sum(map(len, shards)) - 100 + 2, "including the snapshot's config.json"


def test_a_model_in_an_ollama_store_is_found_by_its_manifest_and_its_blob(tmp_path: Path) -> None:
    model = gguf(tmp_path / "made.gguf", EMBEDDING, LAYER, OUTPUT)
    manifest = ollama_model(tmp_path / "models", "llama3.2:3b", {"template": b"{{ . }}", "model": model})
    blob = next(path for path in (tmp_path / "models" / "blobs").iterdir() if path.stat().st_size > 100)
    for path in (manifest, blob):
        assert model_bytes(str(path)).loop_bytes == 256 + 64
    manifest.write_text("{}")
    with pytest.raises(DataError, match="not an Ollama manifest"):
        model_bytes(str(manifest))
    blob.unlink()
    ollama_model(tmp_path / "models", "llama3.2:3b", {"template": b"{{ . }}"})
    with pytest.raises(DataError, match="names no model layer"):
        model_bytes(str(manifest))


def test_a_directory_stands_for_its_only_model(tmp_path: Path) -> None:
    gguf(tmp_path / "m-00001-of-00002.gguf", EMBEDDING, LAYER, shard=(0, 2))
    gguf(tmp_path / "m-00002-of-00002.gguf", OUTPUT, shard=(1, 2))
    gguf(tmp_path / "mmproj-model.gguf", LAYER)
    assert model_bytes(str(tmp_path)).files == 2
    gguf(tmp_path / "other.gguf", LAYER)
    with pytest.raises(UsageError, match=r"contains 2 models: m-00001-of-00002\.gguf, other\.gguf"):
        model_bytes(str(tmp_path))


def test_a_link_identifies_a_blob_of_a_trace(tmp_path: Path) -> None:
    content = safetensors_bytes(**{"lm_head.weight": 30})
    snapshot = hub_snapshot(tmp_path, "org/tiny", {"model.safetensors": content})
    link = snapshot / "model.safetensors"
    recorded = TraceFile(0, f"/elsewhere/blobs/{blob_of(link)}", dev=0, inode=1, generation=0, size_bytes=len(content))
    for path in (link, snapshot):
        found = ModelHeaders([str(path)], [recorded])(recorded)
        assert [tensor.name for tensor in found] == ["header", "lm_head.weight"]


def broken(tmp_path: Path) -> dict[str, Path]:
    """Write files that are not complete models and return their paths."""
    whole = gguf(tmp_path / "whole.gguf", EMBEDDING, LAYER, OUTPUT).read_bytes()
    index = {"missing": {"weight_map": {"a": "gone.safetensors"}}, "empty": {"weight_map": {}}, "foreign": {"x": 1}}
    contents = {
        "text.gguf": b"hello, world",
        "empty.gguf": b"",
        "header.gguf": whole[:40],
        "data.gguf": whole[:-10],
        "short.safetensors": b"abc",
        "long.safetensors": struct.pack("<Q", 1 << 40) + bytes(100),
        "nothing.gguf": Gguf().file(),
        **{f"{name}.safetensors.index.json": json.dumps(value).encode() for name, value in index.items()},
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {name: tmp_path / name for name in contents}


def test_damaged_files_are_named(tmp_path: Path) -> None:
    for path in broken(tmp_path).values():
        with pytest.raises(DataError) as caught:
            model_bytes(str(path))
        assert caught.value.message.startswith(f"--model: {path}"), path
    safetensors(tmp_path / "mixture.safetensors", **{"model.layers.0.mlp.experts.0.up_proj.weight": 10})
    (tmp_path / "config.json").write_text("{")
    gguf(tmp_path / "m-00001-of-00003.gguf", LAYER, shard=(0, 3))
    gguf(tmp_path / "renamed.gguf", LAYER, shard=(1, 3))
    gguf(tmp_path / "used.gguf", EMBEDDING, LAYER, EXPERTS, OUTPUT, used=9)
    for name, said in (
        ("mixture.safetensors", r"config\.json is not JSON"),
        ("m-00001-of-00003.gguf", r"m-00002-of-00003\.gguf is missing \(1 of 3 exist\)"),
        ("renamed.gguf", "is shard 2 of 3"),
        ("used.gguf", "use 9 of 8 experts"),
    ):
        with pytest.raises(DataError, match=said):
            model_bytes(str(tmp_path / name))


@pytest.mark.parametrize("name", ["absent.gguf", "absent-00001-of-00002.gguf", "directory", "file/below.gguf"])
def test_a_missing_model_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--model"):
        model_bytes(str(tmp_path / name))
