"""Which files are shards of one model, told from their names and from the index of a safetensors model."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass

from llmcache.errors import DataError
from llmcache.fs.layout.tensors import is_text, quoted

# Both families use the same pattern: llama-00001-of-00003.gguf, model-00001-of-00005.safetensors.
_LONGEST_NAME = 1024
_SHARD = re.compile(r".*-(?P<number>[0-9]{5,6})-of-(?P<count>[0-9]{5,6})(?:\.gguf|\.safetensors)", re.DOTALL)


@dataclass(frozen=True)
class ShardName:
    """What the name of a shard says: which of how many; `number` counts from 0."""

    number: int
    count: int


def shard_name(name: str) -> ShardName | None:
    """The shard that the file called `name` (with or without directories) is; None for a file on its own."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        return None
    return ShardName(number - 1, count)


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
