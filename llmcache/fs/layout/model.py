"""`read_layout`: any model file to its layout; `order_shards`: all shards of one model to one order."""

from __future__ import annotations

from collections.abc import Sequence

from llmcache.fs.layout.cursor import ReadAt
from llmcache.fs.layout.gguf import MAGIC, read_gguf
from llmcache.fs.layout.safetensors import SUFFIX, read_safetensors
from llmcache.fs.layout.tensors import ModelLayout, Region, Tensor, order_key, region_of


def read_layout(read: ReadAt, size: int, name: str) -> ModelLayout | None:
    """The layout of the file called `name` of `size` bytes, of which `read(offset, size)` gives bytes.

    None when it is no model file (GGUF is known by its first bytes, safetensors by its name); DataError when it is one
    with a damaged header. Errors of `read` pass through.
    """
    if size >= len(MAGIC) and read(0, len(MAGIC)) == MAGIC:
        return read_gguf(read, size)
    if name.endswith(SUFFIX):
        return read_safetensors(read, size, name)
    return None


def order_shards(shards: Sequence[ModelLayout]) -> tuple[tuple[int, Region], ...]:
    """Regions of all `shards` of one model (given in order), each with the index of its shard.

    Headers first, then tensors in the order a decoder computes across the whole model.
    """
    tied = not any(shard.has_output for shard in shards)
    headers = [(index, Region(0, shard.header_bytes, "hot", "header")) for index, shard in enumerate(shards)]
    tensors: list[tuple[int, Tensor]] = [(index, tensor) for index, s in enumerate(shards) for tensor in s.tensors]
    tensors.sort(key=lambda item: (order_key(item[1], tied)[0], item[0], item[1].offset))
    return (*headers, *((index, region_of(tensor, tied)) for index, tensor in tensors))
