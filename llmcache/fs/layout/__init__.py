"""What a model file consists of, read from its header: GGUF and safetensors, whole or in shards.

    layout = read_layout(read, size_bytes, "model.gguf")     # None: not a model file; DataError: a broken one
    for region in layout.regions():                          # in the order a decoder computes
        ...

Only the header is read, and nothing is imported beyond the standard library: the daemon stays small.
"""

from __future__ import annotations

from llmcache.errors import DataError
from llmcache.fs.layout.gguf import MAGIC, ReadAt, read_gguf
from llmcache.fs.layout.safetensors import SUFFIX, begins_safetensors, read_safetensors
from llmcache.fs.layout.tensors import ModelLayout


def is_gguf(read: ReadAt, size: int) -> bool:
    """Return whether a file of `size` bytes begins as a GGUF file does."""
    return size >= len(MAGIC) and read(0, len(MAGIC)) == MAGIC


def read_layout(read: ReadAt, size: int, name: str) -> ModelLayout | None:
    """Return the layout of the file called `name` of `size` bytes, of which `read(offset, size)` returns bytes.

    None when it is no model file; DataError when it is one with a damaged header. Errors of `read` pass through. Both
    formats are recognized by their content, whatever the name is. A file that begins like a safetensors file, but
    is none, is only damaged if its name says that it is one.
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
