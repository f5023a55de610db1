"""Names of blobs in generated hub caches and Ollama stores, with changing, hostile and missing links and manifests."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcache.model import names as module
from llmcache.model.names import INDEX_BYTES, ModelNames
from tests.unit.names_parts import COMMIT, blob_of, hub_snapshot, ollama_model

SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
LLAMA = "registry.ollama.ai/library/llama3.2"


@pytest.fixture
def names(tmp_path: Path) -> Iterator[ModelNames]:
    fd = os.open(tmp_path, os.O_RDONLY)
    found = ModelNames(str(tmp_path), fd)
    os.close(fd)
    yield found
    found.close()


def in_cache(snapshot: Path, name: str) -> str:
    """Return the path, below the hub cache, of the blob that a link of a snapshot points to."""
    return f"/{snapshot.parents[1].name}/blobs/{blob_of(snapshot / name)}"


def test_links_of_a_hub_cache_name_its_blobs(names: ModelNames, tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, "org/tiny", {SHARDS[0]: b"one", SHARDS[1]: b"two", "sub/config.json": b"{}"})
    names.scan()
    blobs = [in_cache(snapshot, name) for name in SHARDS]
    assert [names.shown(blob) for blob in blobs] == [f"org/tiny/{name}" for name in SHARDS]
    assert names.shown(in_cache(snapshot, "sub/config.json")) == "org/tiny/sub/config.json"
    link = f"/models--org--tiny/snapshots/{COMMIT}/{SHARDS[0]}"
    assert {blobs[0], link, f"org/tiny/{SHARDS[0]}"} <= set(names.all_of(blobs[0])) and names.links_to(blobs[0]) == (link,)
    assert [*names.shards(blobs[1])] == [tuple(blobs)]
    assert names.shown("/models--org--tiny/refs/main") == "models--org--tiny/refs/main" and not names.outside


def test_a_directory_of_one_repository_names_its_blobs(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, "gpt2", {"model.safetensors": b"one"})
    directory = snapshot.parents[1]
    fd = os.open(directory, os.O_RDONLY)
    names = ModelNames(str(directory), fd)
    os.close(fd)
    names.scan()
    assert names.shown(f"/blobs/{blob_of(snapshot / 'model.safetensors')}") == "gpt2/model.safetensors"
    names.close()


def test_names_include_the_revision_or_cache_where_files_differ(names: ModelNames, tmp_path: Path) -> None:
    old = hub_snapshot(tmp_path / "a", "org/tiny", {SHARDS[0]: b"one", SHARDS[1]: b"old"}, "0" * 40)
    os.utime(old, ns=(0, 0))
    new = hub_snapshot(tmp_path / "a", "org/tiny", {SHARDS[0]: b"one", SHARDS[1]: b"new"}, "1" * 40)
    other = hub_snapshot(tmp_path / "b", "org/other", {"model.safetensors": b"first"}, "main")
    third = hub_snapshot(tmp_path / "c", "org/other", {"model.safetensors": b"second"}, "main")
    names.scan()
    shared, first, second = (f"/a{in_cache(*each)}" for each in ((old, SHARDS[0]), (old, SHARDS[1]), (new, SHARDS[1])))
    assert names.shown(shared) == f"org/tiny/{SHARDS[0]}"
    assert names.shown(first) == f"org/tiny@00000000/{SHARDS[1]}" and names.shown(second) == f"org/tiny@11111111/{SHARDS[1]}"
    assert f"org/tiny/{SHARDS[1]}" in names.all_of(first), "globs need not name the revision"
    assert [*names.shards(shared)] == [(shared, second), (shared, first)], "shards of the newest snapshot come first"
    for directory, snapshot in (("b", other), ("c", third)):
        shown = names.shown(f"/{directory}{in_cache(snapshot, 'model.safetensors')}")
        assert shown == f"{directory}/models--org--other/snapshots/main/model.safetensors"


def test_manifests_of_an_ollama_store_name_its_blobs(names: ModelNames, tmp_path: Path) -> None:
    store = tmp_path / ".ollama" / "models"
    ollama_model(store, "llama3.2:latest", {"model": b"weights", "template": b"{{ .Prompt }}", "projector": b"vision"})
    ollama_model(store, "llama3.2:3b", {"model": b"weights"})
    ollama_model(store, "mine:7b", {"model": b"other"}, place="registry.ollama.ai/someone")
    ollama_model(store, "Tiny-GGUF:Q4_K_M", {"model": b"third"}, place="hf.co/org")
    names.scan()
    shown = {names.shown(f"/.ollama/models/blobs/{path.name}") for path in (store / "blobs").iterdir()}
    layers = {"llama3.2:latest/template", "llama3.2:latest/projector"}
    assert shown == {"llama3.2:3b", "someone/mine:7b", "hf.co/org/Tiny-GGUF:Q4_K_M"} | layers
    (store / "manifests" / LLAMA / "3b").unlink()
    names.scan()
    assert "llama3.2:latest" in {names.shown(f"/.ollama/models/blobs/{path.name}") for path in (store / "blobs").iterdir()}


def test_the_blob_directory_of_a_store_may_be_a_link(names: ModelNames, tmp_path: Path) -> None:
    """Users move the blobs to a larger disk."""
    ollama_model(tmp_path / "store", "llama3.2:3b", {"model": b"weights"})
    (tmp_path / "store" / "blobs").rename(tmp_path / "large")
    (tmp_path / "store" / "blobs").symlink_to("../large")
    names.scan()
    (blob,) = (f"/large/{path.name}" for path in (tmp_path / "large").iterdir())
    assert names.shown(blob) == "llama3.2:3b"


def test_names_follow_changes_of_links_and_manifests(names: ModelNames, tmp_path: Path) -> None:
    """A manifest that is rewritten in place does not change its directory."""
    manifest = ollama_model(tmp_path, "llama3.2:3b", {"model": b"old"})
    names.refresh(60)
    (old,) = (f"/blobs/{path.name}" for path in (tmp_path / "blobs").iterdir())
    assert names.shown(old) == "llama3.2:3b"
    version = names.version
    names.refresh(60, at_once=True)
    assert names.version == version, "nothing has changed"
    os.utime(manifest, (0, 0))
    os.utime(manifest.parent, (0, 0))
    names.refresh(60, at_once=True)
    ollama_model(tmp_path, "llama3.2:3b", {"model": b"new"})
    link = tmp_path / "model.gguf"
    link.symlink_to(old[1:])
    names.refresh(60, at_once=True)
    new = next(f"/blobs/{path.name}" for path in (tmp_path / "blobs").iterdir() if path.name != old[7:])
    assert (names.shown(new), names.shown(old)) == ("llama3.2:3b", "model.gguf") and names.version > version
    link.unlink()
    manifest.unlink()
    names.refresh(60, at_once=True)
    assert (names.shown(new), names.shown(old)) == (new[1:], old[1:])


def test_links_are_resolved_without_being_followed(names: ModelNames, tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "real.gguf").write_bytes(b"x")
    texts = {
        "plain": "real.gguf",
        "whole": str(tmp_path / "real.gguf"),
        "deep/up": "../real.gguf",
        "current": "deep",
        "through": "current/up",  # through a link to a directory, then through another link
        "back": "current/../real.gguf",
        "out": "../real.gguf",
        "far": "/etc/passwd",
        "itself": "itself",
        "one": "other",
        "other": "one",
    }
    for name, text in texts.items():
        (tmp_path / name).symlink_to(text)
    names.scan()
    assert set(names.links_to("/real.gguf")) == {"/plain", "/whole", "/deep/up", "/through", "/back"}
    assert set(names.outside) == {"/out", "/far", "/itself", "/one", "/other"}
    assert names.shown("/real.gguf") == "real.gguf", "its own name is as good as the links"


def test_an_index_lists_the_shards_if_their_names_do_not(names: ModelNames, tmp_path: Path) -> None:
    parts = ["consolidated.00.safetensors", "consolidated.01.safetensors"]
    index = json.dumps({"weight_map": {"a": parts[1], "b": parts[0]}}).encode()
    snapshot = hub_snapshot(tmp_path, "org/m", {parts[0]: b"0", parts[1]: b"1", "model.safetensors.index.json": index})
    names.scan()
    blobs = tuple(in_cache(snapshot, name) for name in parts)
    assert [*names.shards(blobs[1])] == [blobs]
    outside = json.dumps({"weight_map": {"a": "../" + parts[0], "b": parts[1]}}).encode()
    os.unlink(snapshot / "model.safetensors.index.json")
    (snapshot / "model.safetensors.index.json").write_bytes(outside)
    names.scan()
    assert not [*names.shards(blobs[1])], "an index must not name files outside its directory"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"[" * 100_000, b'{"layers": 3}', b'{"layers": [{"mediaType": 1, "digest": 2}]}', b"\xff" * 100,
     b"x" * (module.MANIFEST_BYTES + 1),
     b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../etc/passwd"}]}'],
)  # fmt: skip
def test_invalid_manifests_are_ignored(
    names: ModelNames, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bad = ollama_model(tmp_path, "llama3.2:1b", {"model": b"weights"})
    ollama_model(tmp_path, "llama3.2:3b", {"model": b"weights"})
    bad.write_bytes(content)
    os.utime(bad, (0, 0))
    names.scan()
    (blob,) = (f"/blobs/{path.name}" for path in (tmp_path / "blobs").iterdir())
    assert names.all_of(blob)[1:] == ("llama3.2:3b",)
    assert not any(word in caplog.text for word in ("llama3.2", "passwd")), "the log contains no names of models"
    if b"passwd" not in content:
        assert f"inode {bad.stat().st_ino} is ignored for names" in caplog.text
        caplog.clear()
        names.scan()
        assert not caplog.records, "it is reported only once"


def test_only_regular_files_are_read_as_manifests(names: ModelNames, tmp_path: Path) -> None:
    """A manifest behind a link to another directory is not read either."""
    secret = tmp_path / "secret"
    manifest = ollama_model(tmp_path / "store", "llama3.2:3b", {"model": b"weights"})
    manifest.rename(secret)
    os.mkfifo(manifest)
    manifest.with_name("link").symlink_to(secret)
    names.scan()
    (blob,) = (f"/store/blobs/{path.name}" for path in (tmp_path / "store" / "blobs").iterdir())
    assert names.all_of(blob) == (blob,)


def test_untrusted_counts_and_sizes_are_bounded(names: ModelNames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users control the count of shards in a name, the size of an index, and the number of links."""
    (tmp_path / "m-00001-of-99999.gguf").symlink_to("blob")
    large = tmp_path / "model.safetensors.index.json"
    large.write_bytes(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}).encode())
    os.truncate(large, INDEX_BYTES + 1)
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).touch()
    names.scan()
    assert not [*names.shards("/blob")] and not [*names.shards("/a.safetensors")]
    monkeypatch.setattr(module, "NAMES_MAX", 3)
    for number in range(20):
        (tmp_path / f"d{number:02}").mkdir()
        (tmp_path / f"d{number:02}" / "link.gguf").symlink_to("../blob2")
    names.scan()
    assert 0 < len(names.links_to("/blob2")) < 20


def test_names_are_kept_while_directories_cannot_be_read(
    names: ModelNames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = ollama_model(tmp_path, "llama3.2:3b", {"model": b"weights"})
    names.scan()
    (blob,) = (f"/blobs/{path.name}" for path in (tmp_path / "blobs").iterdir())

    def refused(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        names.scan()
    assert names.shown(blob) == "llama3.2:3b"
    manifest.unlink()
    names.scan()
    assert names.shown(blob) == blob[1:]


def test_a_hanging_scan_does_not_block_lookups(names: ModelNames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    scandir = os.scandir

    def hanging(fd: int) -> object:
        reached.set()
        assert go_on.wait(60)
        return scandir(fd)

    ollama_model(tmp_path, "llama3.2:3b", {"model": b"weights"})
    monkeypatch.setattr(os, "scandir", hanging)
    names.refresh(0)
    assert reached.wait(60)
    names.refresh(0.01, at_once=True)
    (blob,) = (f"/blobs/{path.name}" for path in (tmp_path / "blobs").iterdir())
    assert names.shown(blob) == blob[1:] and not [*names.shards(blob)]
    go_on.set()
    names.refresh(60)
    assert names.shown(blob) == "llama3.2:3b"
