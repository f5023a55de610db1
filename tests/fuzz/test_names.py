"""Fuzz target: manifests of Ollama's store, and how a mount handles them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings

from llmcache.model.names import ModelNames, manifest_layers
from tests.conftest import examples
from tests.fuzz.mutations import documents, mutated, written
from tests.fuzz.target import Target, bounded, refusal, scratch
from tests.unit.names_parts import ollama_model

BLOB = "sha256:" + "0123456789abcdef" * 4
MANIFEST: dict[str, Any] = {
    "schemaVersion": 2,
    "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": BLOB.replace("0", "1"), "size": 1},
    "layers": [
        {"mediaType": "application/vnd.ollama.image.model", "digest": BLOB, "size": 1},
        {"mediaType": "application/vnd.ollama.image.tensor; name=a", "digest": BLOB.replace("0", "2"), "size": 1},
    ],
}


def check(data: bytes) -> None:
    """Check that a manifest names files in `blobs` or is refused, and that a mount accepts it in both cases."""
    with bounded(), refusal():
        assert all("/" not in layer.blob and layer.kind.isalpha() for layer in manifest_layers(data))
    with scratch() as directory:
        manifest = ollama_model(Path(directory) / "store", "m:1", {"model": b"weights"})
        manifest.write_bytes(data)
        fd = os.open(directory, os.O_RDONLY)
        names = ModelNames(directory, fd)
        try:
            with bounded():
                names.scan()
            assert names.shown("/store/manifests") == "store/manifests" and not names.outside
        finally:
            names.close()
            os.close(fd)


TARGET = Target("ollama-manifest", documents([MANIFEST]).map(written) | mutated([written(MANIFEST)]), check)


def test_the_seed_is_read() -> None:
    assert [layer.kind for layer in manifest_layers(written(MANIFEST))] == ["model", "tensor", "config"]


@given(TARGET.inputs)
@settings(max_examples=examples(150))
@example(b"[" * 100_000)
@example(b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:\\ud800"}]}')
@example(b'{"layers": "abc", "config": []}')
@example(b'{"layers": [], "config": 1}')
@example(b'{"layers": {"a": 1}}')
def test_any_manifest(data: bytes) -> None:
    check(data)
