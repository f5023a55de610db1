"""Builds Hugging Face hub caches and Ollama stores from the files of a test."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

COMMIT = hashlib.sha1(b"a revision").hexdigest()


def hub_snapshot(cache: Path, repository: str, files: Mapping[str, bytes | Path], revision: str = COMMIT) -> Path:
    """Add a revision of a repository to a hub cache and return the snapshot directory.

    Files given as paths are moved into the cache.
    """
    directory = cache / f"models--{repository.replace('/', '--')}"
    snapshot = directory / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (directory / "blobs").mkdir(exist_ok=True)
    (directory / "refs").mkdir(exist_ok=True)
    (directory / "refs" / "main").write_text(revision)
    for name, content in files.items():
        link = snapshot / name
        link.parent.mkdir(exist_ok=True)
        blob = directory / "blobs" / _placed(content, directory / "blobs")
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def ollama_model(
    store: Path, name: str, layers: Mapping[str, bytes | Path], *, place: str = "registry.ollama.ai/library"
) -> Path:
    """Add a model (`llama3.2:3b`) with one file per kind of layer to an Ollama store and return its manifest."""
    (store / "blobs").mkdir(parents=True, exist_ok=True)
    model, _, tag = name.partition(":")
    manifest = store / "manifests" / place / model / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for kind, content in layers.items():
        digest = _placed(content, store / "blobs", "sha256-").removeprefix("sha256-")
        rows.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": rows}))
    return manifest


def _placed(content: bytes | Path, blobs: Path, prefix: str = "") -> str:
    """Add a file to a blob directory and return its name."""
    if isinstance(content, bytes):
        name = prefix + hashlib.sha256(content).hexdigest()
        (blobs / name).write_bytes(content)
        return name
    name = prefix + hashlib.sha256(content.read_bytes()).hexdigest()
    shutil.move(content, blobs / name)
    return name


def safetensors_bytes(**tensors: int) -> bytes:
    """Return a safetensors file; `tensors` maps names to sizes in bytes."""
    header, offset = {}, 0
    for name, size_bytes in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size_bytes], "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


def blob_of(link: Path) -> str:
    """Return the name of the blob that a symbolic link points to."""
    return os.path.basename(os.path.realpath(link))
