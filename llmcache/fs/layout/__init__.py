"""What a model file consists of, read from its header: GGUF and safetensors, whole or in shards.

    layout = read_layout(read, size_bytes, "model.gguf")     # None: not a model file; DataError: a broken one
    for region in layout.regions():                          # in the order a decoder computes
        ...

Only the header is read, and nothing is imported beyond the standard library: the daemon stays small.
"""

from llmcache.fs.layout.model import index_shards, order_shards, read_layout
from llmcache.fs.layout.tensors import ModelLayout, Region, Role, ShardName, Tensor, shard_name

__all__ = [
    "ModelLayout",
    "Region",
    "Role",
    "ShardName",
    "Tensor",
    "index_shards",
    "order_shards",
    "read_layout",
    "shard_name",
]
