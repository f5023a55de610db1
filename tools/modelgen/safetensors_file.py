"""Writes a Llama model in bfloat16 as safetensors, whole or in shards with their index; needs no torch."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from tools.modelgen import data
from tools.modelgen.shape import Shape, Weight, split_by_size

BYTES_PER_VALUE = 2.0

_NAMES = {
    "embedding": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
}
_FUSED = {"gate": "mlp.experts.gate_proj", "up": "mlp.experts.up_proj", "down": "mlp.experts.down_proj"}


def shard_paths(out: Path, shards: int) -> list[Path]:
    """The files that `write` makes: `out` itself, or its shards and then their index."""
    if shards == 1:
        return [out]
    numbered = [out.with_name(f"{out.stem}-{number:05}-of-{shards:05}{out.suffix}") for number in range(1, shards + 1)]
    return [*numbered, out.with_name(f"{out.name}.index.json")]


def tensors(shape: Shape, fused: bool) -> list[Weight]:
    """All tensors in the order of the file: of a mixture one for each expert, or (`fused`) one for all of a layer."""
    found: list[Weight] = []
    for weight in shape.weights():
        found += [weight] if fused or not weight.experts else _apart(weight)
    if not fused and shape.experts:  # gate, up and down of an expert lie side by side
        found.sort(key=lambda weight: _place(weight, shape))
    return found


def _apart(weight: Weight) -> list[Weight]:
    return [replace(weight, experts=None, expert=expert) for expert in range(weight.experts or 0)]


def _place(weight: Weight, shape: Shape) -> tuple[int, int, int]:
    layer = weight.layer if weight.layer is not None else -1 if weight.role == "embedding" else shape.layers
    return layer, weight.expert is not None, weight.expert or 0


def write(files: list[BinaryIO], names: list[str], shape: Shape, seed: int, fused: bool = False) -> None:
    """Write the model into `files`: one per shard, and the index last where there are several; `names` are theirs."""
    weights = tensors(shape, fused)
    shards = max(1, len(files) - 1)
    groups = split_by_size([2 * weight.values for weight in weights], shards)
    for file, group in zip(files, groups, strict=False):
        _write_shard(file, [(index, weights[index]) for index in group], seed)
    if len(files) > 1:
        weight_map = {_name(weights[i]): names[shard] for shard, group in enumerate(groups) for i in group}
        total = sum(2 * weight.values for weight in weights)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files[-1].write(json.dumps(index, indent=1).encode())


def _write_shard(file: BinaryIO, weights: list[tuple[int, Weight]], seed: int) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for _, weight in weights:
        shape = [size for size in (weight.experts, weight.rows, weight.columns) if size is not None]
        end = offset + 2 * weight.values
        header[_name(weight)] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for index, weight in weights:
        if weight.rows is None:
            file.write(data.bf16_ones(weight.columns))
            continue
        for piece in data.bf16(seed, index, weight.values):
            file.write(piece)


def _name(weight: Weight) -> str:
    prefix = "" if weight.layer is None else f"model.layers.{weight.layer}."
    if weight.experts:
        return f"{prefix}{_FUSED[weight.role]}"
    name = _NAMES[weight.role]
    if weight.expert is not None:
        name = name.replace("mlp.", f"mlp.experts.{weight.expert}.")
    return f"{prefix}{name}.weight"
