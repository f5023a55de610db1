"""The files that are read: loops of random bytes, their CRCs, the loop of a GGUF model; and forgetting their pages."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .clients.loop_reader import crcs
from .errors import BenchError

MIB = 1 << 20


def forget(path: Path) -> None:
    """Drop the pages of one file from the page cache, or those of every file in a directory."""
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(fd)  # dirty pages would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def loop_file(path: Path, size_bytes: int) -> Path:
    """Make (or keep, if it has the size already) a file of random bytes."""
    if path.exists() and path.stat().st_size == size_bytes:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for offset in range(0, size_bytes, MIB):
            file.write(os.urandom(min(MIB, size_bytes - offset)))
        file.flush()
        os.fsync(file.fileno())
    return path


def crc_file(path: Path, scratch: Path) -> Path:
    """Write the CRCs of `path` as the JSON list that the loop reader's --check wants."""
    target = scratch / f"{path.name}.crc.json"
    target.write_text(json.dumps(crcs(path)))
    return target


def loop_bytes(model: Path) -> int:
    """Return what one token reads of a GGUF model: all tensors but the embedding, of which it needs one row."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise BenchError("the gguf package is missing", "pip install 'llmcache-toolkit[llama]'") from error
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(model).tensors}
    # a model with tied embeddings has no output matrix: the embedding is then read whole
    skipped = "token_embd.weight" if "output.weight" in sizes else None
    return sum(size for name, size in sizes.items() if name != skipped)
