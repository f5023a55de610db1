"""`read_layout`: any model file to its layout; `order_shards`: all shards of one model to one order."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from llmcache.errors import DataError
from llmcache.fs.layout.gguf import MAGIC, ReadAt, read_gguf
from llmcache.fs.layout.safetensors import SUFFIX, read_safetensors
from llmcache.fs.layout.tensors import ModelLayout, Region, Tensor, is_text, order_key, quoted, region_of

_LONGEST_NAME = 1024


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


def index_shards(text: bytes) -> tuple[str, ...]:
    """File names of all shards in a `model.safetensors.index.json`, sorted; DataError when it is not one, or names files
    that do not lie beside or below it.
    """
    try:
        weight_map = json.loads(text)["weight_map"]
        names = tuple(sorted({name for name in weight_map.values() if isinstance(name, str)}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError("not a safetensors index: it has no 'weight_map' of tensor names to file names") from error
    for name in names:
        if not _is_below(name):
            raise DataError(f"weight_map: {quoted(name)} is not the name of a file beside the index")
    return names


def _is_below(name: str) -> bool:
    """Whether `name` leads to a file, and not out of the directory that it is looked up in."""
    parts = name.split("/")
    return len(name) <= _LONGEST_NAME and is_text(name) and "\0" not in name and not {"", os.pardir} & set(parts)
