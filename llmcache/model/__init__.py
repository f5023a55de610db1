"""Layout of model files (GGUF and safetensors, whole or in shards), read from their headers.

The package imports only the standard library, which keeps the daemon small.
"""

from __future__ import annotations

from llmcache.errors import DataError
from llmcache.model.gguf import MAGIC, ReadAt, read_gguf
from llmcache.model.safetensors import SUFFIX, begins_safetensors, read_safetensors
from llmcache.model.tensors import ModelLayout


def is_gguf(read: ReadAt, size: int) -> bool:
    """Return whether a file of `size` bytes begins with the GGUF magic."""
    return size >= len(MAGIC) and read(0, len(MAGIC)) == MAGIC


def read_layout(read: ReadAt, size: int, name: str) -> ModelLayout | None:
    """Return the layout of the file `name`, or None if it is not a model file; DataError if its header is damaged.

    Errors of `read(offset, size)` pass through. The content decides the format; the name `.safetensors` only decides whether
    an unparsable file is damaged or not a model.
    """
    if is_gguf(read, size):
        return read_gguf(read, size)
    if name.endswith(SUFFIX):
        return read_safetensors(read, size, name)
    if not begins_safetensors(read, size):
        return None
    try:
        layout = read_safetensors(read, size, name)
    except DataError:
        return None
    return layout if layout.tensors else None
