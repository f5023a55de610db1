#!/usr/bin/env python3
"""Generate a model file with random weights, of any size, that llama.cpp can load and run.

    tools/make_model.py OUT.gguf --size 700M
    tools/make_model.py model.safetensors --format safetensors --size 2G --split 3
    tools/make_model.py moe.gguf --size 2G --experts 64 --used 4
    tools/make_model.py today.gguf --size 1145M --type q4_k_m
    tools/make_model.py qwen.gguf --like qwen3-30b-a3b                18.6 GB, Q4_K_M
    tools/make_model.py small.gguf --like qwen3-30b-a3b --layers 8     3.5 GB of the same shape
    tools/make_model.py gpt-oss.gguf --like gpt-oss-20b               12.1 GB, MXFP4

The same arguments give the same bytes. OUT.json records the parameters; if they match, the existing files are kept.
The model generates meaningless text, but llama.cpp reads the same bytes in the same order as for a trained model.

A model of --like also routes tokens to experts like a trained model. Its embedding is large compared with the output of the
layers, so the routers of all layers see the current token and some of the text before it. TOPIC_TOKENS consecutive tokens of
the vocabulary form a topic and share a part of their embeddings. The rows of a router have different lengths, which makes
some experts popular. `tools/bench/clients/llama_tokens.py --topics` evaluates a text for such a model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

# When this runs as a script, Python searches for modules in tools/, not in the repository above it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmcache.errors import MissingRequirement, UsageError, run_cli
from llmcache.files import replacing
from llmcache.units import format_size, parse_size

# Increase it when the same parameters give other bytes.
_GENERATOR_VERSION = 1
HEAD_SIZE = 64
_PIECE_BYTES = 8 * 2**20  # generated at a time, so that a model can be larger than memory
_DROP_BYTES = 64 * 2**20  # interval at which written pages are dropped from the page cache

_DEVIATION = 0.02  # standard deviation of weights, small enough for finite activations
# For models whose routers follow the token. With these values and the text of the benchmark's client, llama.cpp routes
# tokens as published for Qwen3-30B-A3B. Over its 48 layers, 90 % of the uses go to 55 of 128 experts for text of one topic
# and to 64 for two (published: 58 and 65); the most used expert has 6.2 % and 5.0 % of the uses (published: 6.3 % and
# 4.3 %). The previous token used 22 % of a token's experts, 13 % to 34 % by layer (other models: 18 % to 38 %).
_EMBEDDING_DEVIATION, _GROWTH = 0.33, 0.7  # deviation = first * layers ** second, so that 8 layers route like 48
_SHARED = 0.25  # share of a token's embedding that is the same for all tokens of its topic
_POPULARITY = 0.1  # deviation of the logarithm of the lengths of a router's rows
TOPIC_TOKENS = 1024
"""Number of consecutive tokens of the vocabulary that form a topic, in models of --like."""
# bfloat16 with random sign, mantissa and two low exponent bits: magnitudes from 2**-7 to 2**-3.
_BF16_RANDOM, _BF16_BASE, _BF16_ONE = 0x81FF, 0x3C00, 0x3F80

_ALIGNMENT = 32
_F32 = 0
_STRING, _ARRAY = 8, 9
_KINDS = {"H": 2, "I": 4, "i": 5, "f": 6}
"""GGUF types of numbers, by format character of `struct`."""
_NAMES = {
    "embedding": ("token_embd", "model.embed_tokens"),
    "output_norm": ("output_norm", "model.norm"),
    "output": ("output", "lm_head"),
    "attention_norm": ("attn_norm", "input_layernorm"),
    "query": ("attn_q", "self_attn.q_proj"),
    "key": ("attn_k", "self_attn.k_proj"),
    "value": ("attn_v", "self_attn.v_proj"),
    "query_norm": ("attn_q_norm", "self_attn.q_norm"),
    "key_norm": ("attn_k_norm", "self_attn.k_norm"),
    "sinks": ("attn_sinks", "self_attn.sinks"),
    "attention_output": ("attn_output", "self_attn.o_proj"),
    "feed_forward_norm": ("ffn_norm", "post_attention_layernorm"),
    "gate": ("ffn_gate", "mlp.gate_proj"),
    "up": ("ffn_up", "mlp.up_proj"),
    "down": ("ffn_down", "mlp.down_proj"),
    "router": ("ffn_gate_inp", "mlp.gate"),
}
"""Names of tensors in GGUF and in safetensors, by role."""


@dataclass(frozen=True)
class BlockType:
    """A quantized GGUF type: its `number` in a header, and the size of its blocks.

    `scales` maps the offset of a scale in a block to the value with which blocks of random bytes have mean 0 and
    deviation 1. A scale is a float16, or with `is_power` a byte with the exponent of a power of 2. `least` is the
    smallest int8 that the quantizer of the type writes.
    """

    number: int
    values: int
    block_bytes: int
    scales: dict[int, float]
    is_power: bool = False
    least: int = -128

    @property
    def value_bytes(self) -> float:
        return self.block_bytes / self.values

    def scale_bytes(self, deviation: float) -> dict[int, bytes]:
        scales = {at: scale * deviation for at, scale in self.scales.items()}
        if self.is_power:
            return {at: bytes([_POWER_BIAS + round(math.log2(scale))]) for at, scale in scales.items()}
        return {at: np.float16(scale).tobytes() for at, scale in scales.items()}


# Random bytes are uniform, so int8 has a deviation of 73. A Q4_K value is d * scale * q - dmin * min, where scale and min
# have 6 bits and q has 4; its mean is 0 for dmin = 7.5 d. A Q6_K value is d * scale * q, with 8 and 6 signed bits. An MXFP4
# value is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, times a power of 2; these have a deviation of 2.93.
_POWER_BIAS = 127
Q8_0 = BlockType(8, 32, 34, {0: 1 / 73}, least=-127)
Q4_K = BlockType(12, 256, 144, {0: 1 / 258, 2: 7.5 / 258})
Q6_K = BlockType(14, 256, 210, {208: 1 / 1366})
MXFP4 = BlockType(39, 32, 17, {0: 1 / 2.93}, is_power=True)


@dataclass(frozen=True)
class FileType:
    """A file type of llama.cpp: its `number` in a header, the type of most tensors, and a `better` one for some.

    `mean_value_bytes`: bytes per value in a whole model. `experts`: the type of experts, if it differs.
    """

    number: int
    block: BlockType
    better: BlockType
    mean_value_bytes: float
    experts: BlockType | None = None

    def block_of(self, weight: Weight, shape: Shape) -> BlockType:
        """Return the type that `llama_tensor_get_type` of llama.cpp chooses for a quantized tensor."""
        if weight.experts and self.experts is not None:
            return self.experts
        if weight.role == ("embedding" if shape.tied else "output"):
            return self.better
        if weight.role in ("value", "down") and weight.layer is not None and _use_more_bits(weight.layer, shape.layers):
            return self.better
        return self.block


def _use_more_bits(layer: int, layers: int) -> bool:
    """Return whether Q4_K_M uses the better type: in the first and last eighth of the layers, and a third of the rest."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


TYPES = {
    "q8_0": FileType(7, Q8_0, Q8_0, Q8_0.value_bytes),
    "q4_k_m": FileType(15, Q4_K, Q6_K, 0.602),
    "mxfp4": FileType(38, Q8_0, Q8_0, Q8_0.value_bytes, experts=MXFP4),
}
"""File types by the value of --type. The mean of Q4_K_M applies to the larger presets, that of MXFP4 to dense models."""
BYTES_PER_VALUE = {"gguf": TYPES["q8_0"].mean_value_bytes, "safetensors": 2.0}
"""Default bytes per value by format: Q8_0, and bfloat16."""

# (smallest number of parameters, width, feed-forward width, vocabulary).
# The last two have the widths of TinyLlama and Llama 8B.
_PRESETS = (
    (0, 256, 704, 2000),
    (30_000_000, 1024, 2816, 8000),
    (280_000_000, 2048, 5632, 32000),
    (5_500_000_000, 4096, 14336, 32000),
)


@dataclass(frozen=True)
class Weight:
    """A tensor to generate; `rows` is None for a vector of ones.

    `experts`: the tensor has the matrices of this number of experts; `expert`: it has the matrix of this expert. `is_bias`:
    it is a vector of zeros, the bias of the tensor with the same role.
    """

    role: str
    layer: int | None
    columns: int
    rows: int | None
    experts: int | None = None
    expert: int | None = None
    is_bias: bool = False

    @property
    def values(self) -> int:
        return self.columns * (self.rows or 1) * (self.experts or 1)


@dataclass(frozen=True)
class Architecture:
    """Properties of an architecture of llama.cpp; `keys` are further hyperparameters in the header."""

    context_length: int
    epsilon: float
    keys: dict[str, str | float]
    has_head_norms: bool = False
    has_biases: bool = False
    has_sinks: bool = False


_GPT_OSS_KEYS: dict[str, str | float] = {
    "attention.sliding_window": 128,
    "rope.freq_base": 150000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}
ARCHITECTURES = {
    "llama": Architecture(2048, 1e-5, {}),
    "qwen3moe": Architecture(40960, 1e-6, {"rope.freq_base": 1e6}, has_head_norms=True),
    "gpt-oss": Architecture(131072, 1e-5, _GPT_OSS_KEYS, has_biases=True, has_sinks=True),
}
"""Architectures by their name in a GGUF header."""


@dataclass(frozen=True)
class Heads:
    """Numbers of attention heads: `query`, and `kv` for keys and values; each has the width `values`."""

    query: int
    kv: int
    values: int


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention.

    A token uses `used` of the `experts` in each layer. Without `attention`, 8 query heads share one key and value head.
    """

    width: int
    feed_forward: int
    vocabulary: int
    layers: int
    tied: bool
    experts: int = 0
    used: int = 0
    architecture: str = "llama"
    attention: Heads | None = None

    @property
    def heads(self) -> Heads:
        count = self.width // HEAD_SIZE
        return self.attention or Heads(count, max(1, count // 8), HEAD_SIZE)

    @property
    def follows_tokens(self) -> bool:
        return self.architecture != "llama"

    def weights(self) -> Iterator[Weight]:
        yield Weight("embedding", None, self.width, self.vocabulary)
        for layer in range(self.layers):
            yield from self.layer_weights(layer)
        yield Weight("output_norm", None, self.width, None)
        if not self.tied:
            yield Weight("output", None, self.width, self.vocabulary)

    def layer_weights(self, layer: int) -> Iterator[Weight]:
        kind = ARCHITECTURES[self.architecture]
        for weight in self._layer_weights(layer, kind):
            yield weight
            if kind.has_biases and weight.rows is not None:
                yield Weight(weight.role, layer, weight.rows, None, weight.experts, is_bias=True)

    def _layer_weights(self, layer: int, kind: Architecture) -> Iterator[Weight]:
        heads = self.heads
        query_width, kv_width = heads.query * heads.values, heads.kv * heads.values
        yield Weight("attention_norm", layer, self.width, None)
        yield Weight("query", layer, self.width, query_width)
        yield Weight("key", layer, self.width, kv_width)
        yield Weight("value", layer, self.width, kv_width)
        if kind.has_head_norms:
            yield Weight("query_norm", layer, heads.values, None)
            yield Weight("key_norm", layer, heads.values, None)
        if kind.has_sinks:
            yield Weight("sinks", layer, heads.query, None)
        yield Weight("attention_output", layer, query_width, self.width)
        yield Weight("feed_forward_norm", layer, self.width, None)
        if self.experts:
            yield Weight("router", layer, self.width, self.experts)
        yield Weight("gate", layer, self.width, self.feed_forward, self.experts or None)
        yield Weight("up", layer, self.width, self.feed_forward, self.experts or None)
        yield Weight("down", layer, self.feed_forward, self.width, self.experts or None)


LIKE = {
    "qwen3-30b-a3b": (Shape(2048, 768, 151936, 48, False, 128, 8, "qwen3moe", Heads(32, 4, 128)), "q4_k_m"),
    "gpt-oss-20b": (Shape(2880, 2880, 201088, 24, False, 32, 4, "gpt-oss", Heads(64, 8, 64)), "mxfp4"),
}
"""The shapes and file types of published models, by the value of --like."""


@dataclass(frozen=True)
class MoeShape:
    """Parameters of an MoE model; `slice_bytes` is the approximate size of one expert in one tensor."""

    experts: int
    used: int
    slice_bytes: int


def choose_shape(
    size_bytes: int,
    bytes_per_value: float,
    layers: int | None,
    tied: bool,
    mixture: MoeShape | None = None,
    block_values: int = Q8_0.values,
) -> Shape:
    """Return the shape whose file is closest to `size_bytes`; `layers`, if given, takes precedence over the size."""
    values = size_bytes / bytes_per_value
    if mixture is None:
        _, width, feed_forward, vocabulary = max(preset for preset in _PRESETS if preset[0] <= values)
        shape = Shape(width, -(-feed_forward // block_values) * block_values, vocabulary, 1, tied)
    else:
        _, width, _, vocabulary = _PRESETS[1 if mixture.slice_bytes < 2 << 20 else 2]
        units = max(1, round(mixture.slice_bytes / bytes_per_value / width / block_values)) * block_values
        shape = Shape(width, units, vocabulary, 1, tied, mixture.experts, mixture.used)
    fixed = shape.width * shape.vocabulary * (1 if tied else 2)
    per_layer = sum(weight.values for weight in shape.layer_weights(0))
    return replace(shape, layers=layers or max(1, math.floor((values - fixed) / per_layer + 0.5)))


def split_by_size(sizes: list[int], parts: int) -> list[list[int]]:
    """Return the indices of `sizes` in `parts` consecutive, non-empty groups with about the same sum."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    total, before = sum(sizes), 0
    for index, size in enumerate(sizes):
        group = min(parts - 1, (before + size // 2) * parts // total)
        # Do not skip a group, and leave an item for each remaining group.
        first_free = next((g for g, members in enumerate(groups) if not members), parts - 1)
        remaining = len(sizes) - index
        group = max(min(group, first_free), parts - remaining)
        groups[group].append(index)
        before += size
    return groups


# Random values: each tensor has its own generator, so its values do not depend on the other tensors


def _generator(seed: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64([seed, index]))


def _random_bytes(random: np.random.Generator, count: int) -> NDArray[np.uint8]:
    return random.integers(0, 2**64, -(-count // 8), np.uint64).view(np.uint8)[:count]


def _blocks(
    block: BlockType, seed: int, index: int, values: int, deviation: float = _DEVIATION, row_blocks: int = 0
) -> Iterator[memoryview]:
    """Yield the blocks of `values` random values. Nothing is quantized: the bytes themselves are random.

    With `row_blocks`, a token has a row of `row_blocks` blocks, and all rows of a topic begin with the same blocks.
    """
    random = _generator(seed, index)
    blocks = values // block.values
    step = TOPIC_TOKENS * row_blocks or _PIECE_BYTES // block.block_bytes
    for start in range(0, blocks, step):
        count = min(step, blocks - start)
        piece = _random_bytes(random, count * block.block_bytes)
        if block.least > -128:
            np.maximum(piece.view(np.int8), block.least, out=piece.view(np.int8))
        made = piece.reshape(count, block.block_bytes)
        for at, scale in block.scale_bytes(deviation).items():
            made[:, at : at + len(scale)] = np.frombuffer(scale, np.uint8)
        if row_blocks:
            rows = made.reshape(-1, row_blocks, block.block_bytes)
            rows[1:, : round(_SHARED * row_blocks)] = rows[0, : round(_SHARED * row_blocks)]
        yield piece.data


def _bf16(seed: int, index: int, values: int) -> Iterator[bytes]:
    random = _generator(seed, index)
    step = _PIECE_BYTES // 2
    for start in range(0, values, step):
        piece = _random_bytes(random, 2 * min(step, values - start)).view(np.uint16)
        yield ((piece & _BF16_RANDOM) | _BF16_BASE).tobytes()


# The two formats


def write_gguf(files: list[BinaryIO], shape: Shape, seed: int, file_type: FileType = TYPES["q8_0"]) -> None:
    tensors = gguf_tensors(shape, file_type)
    groups = split_by_size([tensor.size_bytes for tensor in tensors], len(files))
    for number, (file, group) in enumerate(zip(files, groups, strict=True)):
        keys = _model_keys(shape, file_type) if number == 0 else []
        if len(files) > 1:
            keys += [_key("split.no", number, "H"), _key("split.count", len(files), "H")]
            keys += [_key("split.tensors.count", len(tensors), "i")]
        dropped = 0
        _write_header(file, keys, [tensors[index] for index in group], shape.architecture)
        for index in group:
            _write_padded(file, _content(tensors[index], shape, seed, index))
            if file.tell() - dropped > _DROP_BYTES:
                _drop_pages(file)
                dropped = file.tell()


@dataclass(frozen=True)
class Tensor:
    """A tensor in a GGUF file; `block` is None for float32."""

    weight: Weight
    block: BlockType | None

    @property
    def size_bytes(self) -> int:
        values = self.weight.values
        return 4 * values if self.block is None else values // self.block.values * self.block.block_bytes


def gguf_tensors(shape: Shape, file_type: FileType) -> list[Tensor]:
    return [Tensor(weight, _block_of(weight, shape, file_type)) for weight in shape.weights()]


def _block_of(weight: Weight, shape: Shape, file_type: FileType) -> BlockType | None:
    """Return None for tensors that are float32 in all file types."""
    return None if weight.rows is None or weight.role == "router" else file_type.block_of(weight, shape)


def _content(tensor: Tensor, shape: Shape, seed: int, index: int) -> Iterator[bytes | memoryview]:
    weight = tensor.weight
    if weight.rows is None:
        return iter([np.full(weight.values, 0 if weight.is_bias else 1, "<f4").data])
    if tensor.block is None:
        return iter([_router(weight, shape, seed, index).data])
    if shape.follows_tokens and weight.role == "embedding":
        row_blocks = weight.columns // tensor.block.values
        return _blocks(tensor.block, seed, index, weight.values, _EMBEDDING_DEVIATION * shape.layers**_GROWTH, row_blocks)
    return _blocks(tensor.block, seed, index, weight.values)


def _router(weight: Weight, shape: Shape, seed: int, index: int) -> NDArray[np.float32]:
    """Return weights with the deviation of trained routers; rows of different lengths make some experts popular."""
    random = _generator(seed, index)
    rows = 0.02 * random.standard_normal((weight.rows or 1, weight.columns))
    if shape.follows_tokens:
        rows *= np.exp(_POPULARITY * random.standard_normal((len(rows), 1)))
    return rows.astype("<f4")


def _write_header(file: BinaryIO, keys: list[bytes], tensors: list[Tensor], architecture: str) -> None:
    header = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys)), *keys]
    offset = 0
    for tensor in tensors:
        weight = tensor.weight
        shape = [size for size in (weight.columns, weight.rows, weight.experts) if size is not None]
        header.append(_text(_gguf_name(weight, architecture)) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        header.append(struct.pack("<IQ", _F32 if tensor.block is None else tensor.block.number, offset))
        offset += -(-tensor.size_bytes // _ALIGNMENT) * _ALIGNMENT
    _write_padded(file, iter(header))


def _write_padded(file: BinaryIO, pieces: Iterator[bytes | memoryview]) -> None:
    written = sum(file.write(piece) for piece in pieces)
    file.write(bytes(-written % _ALIGNMENT))


def _gguf_name(weight: Weight, architecture: str) -> str:
    prefix = "" if weight.layer is None else f"blk.{weight.layer}."
    name = _NAMES[weight.role][0]
    if architecture == "gpt-oss" and weight.role == "feed_forward_norm":
        name = "post_attention_norm"
    return f"{prefix}{name}{'_exps' if weight.experts else ''}.{'bias' if weight.is_bias else 'weight'}"


def _model_keys(shape: Shape, file_type: FileType) -> list[bytes]:
    """Return the hyperparameters, and a SentencePiece vocabulary of invented words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"\u2581w{number}" for number in range(shape.vocabulary - len(tokens))]
    normal, unknown, control, byte = 1, 2, 3, 6
    types = [unknown, control, control, *[byte] * 256, *[normal] * (shape.vocabulary - 259)]
    kind, heads = ARCHITECTURES[shape.architecture], shape.heads
    numbers: dict[str, str | float] = {
        "context_length": kind.context_length,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "feed_forward_length": shape.feed_forward,
        "attention.head_count": heads.query,
        "attention.head_count_kv": heads.kv,
        "attention.layer_norm_rms_epsilon": kind.epsilon,
        "rope.dimension_count": heads.values,
        "vocab_size": shape.vocabulary,
        **kind.keys,
    }
    if shape.attention is not None:
        numbers |= {"attention.key_length": heads.values, "attention.value_length": heads.values}
    if shape.experts:
        numbers |= {"expert_count": shape.experts, "expert_used_count": shape.used}
        numbers |= {"expert_feed_forward_length": shape.feed_forward} if shape.attention else {}
    first: dict[str, str | float] = {
        "general.architecture": shape.architecture,
        "general.name": "random weights",
        "general.alignment": _ALIGNMENT,
        "general.file_type": file_type.number,
        **{f"{shape.architecture}.{name}": value for name, value in numbers.items()},
        "tokenizer.ggml.model": "llama",
    }
    last = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return [
        *(_key(name, value) for name, value in first.items()),
        _array("tokenizer.ggml.tokens", _STRING, len(tokens), b"".join(_text(token) for token in tokens)),
        _array("tokenizer.ggml.scores", _KINDS["f"], len(tokens), bytes(4 * len(tokens))),
        _array("tokenizer.ggml.token_type", _KINDS["i"], len(types), struct.pack(f"<{len(types)}i", *types)),
        *(_key(name, value) for name, value in last.items()),
    ]


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _key(name: str, value: str | float, code: str = "") -> bytes:
    """Return a key with its value; `code` is a key of `_KINDS` (default: "I" for integers, "f" for floats)."""
    if isinstance(value, str):
        return _text(name) + struct.pack("<I", _STRING) + _text(value)
    code = code or ("I" if isinstance(value, int) else "f")
    return _text(name) + struct.pack(f"<I{code}", _KINDS[code], value)


def _array(name: str, kind: int, count: int, items: bytes) -> bytes:
    return _text(name) + struct.pack("<IIQ", _ARRAY, kind, count) + items


def tensors(shape: Shape, fused: bool) -> list[Weight]:
    """Return all tensors in safetensors order: experts as separate tensors, or (`fused`) one tensor for all of a layer."""
    found: list[Weight] = []
    for weight in shape.weights():
        separate = range(0 if fused else weight.experts or 0)
        found += [replace(weight, experts=None, expert=expert) for expert in separate] or [weight]
    if not fused and shape.experts:  # gate, up and down of an expert are adjacent
        found.sort(key=lambda weight: _place(weight, shape))
    return found


def _place(weight: Weight, shape: Shape) -> tuple[int, int, int]:
    layer = weight.layer if weight.layer is not None else -1 if weight.role == "embedding" else shape.layers
    return layer, weight.expert is not None, weight.expert or 0


def write_safetensors(files: list[BinaryIO], names: list[str], shape: Shape, seed: int, fused: bool = False) -> None:
    """Write the model in bfloat16 into `files`: one for each shard and, if there are several, the index as last file."""
    weights = tensors(shape, fused)
    shards = max(1, len(files) - 1)
    groups = split_by_size([2 * weight.values for weight in weights], shards)
    for file, group in zip(files, groups, strict=False):
        _write_shard(file, [(index, weights[index]) for index in group], seed)
    if len(files) > 1:
        weight_map = {_safetensors_name(weights[i]): names[shard] for shard, group in enumerate(groups) for i in group}
        total = sum(2 * weight.values for weight in weights)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files[-1].write(json.dumps(index, indent=1).encode())


def _write_shard(file: BinaryIO, weights: list[tuple[int, Weight]], seed: int) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for _, weight in weights:
        shape = [size for size in (weight.experts, weight.rows, weight.columns) if size is not None]
        end = offset + 2 * weight.values
        header[_safetensors_name(weight)] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for index, weight in weights:
        if weight.rows is None:
            file.write(np.full(weight.columns, _BF16_ONE, np.uint16).tobytes())
            continue
        for piece in _bf16(seed, index, weight.values):
            file.write(piece)


def _safetensors_name(weight: Weight) -> str:
    prefix = "" if weight.layer is None else f"model.layers.{weight.layer}."
    name = _NAMES[weight.role][1]
    if weight.experts:
        return prefix + name.replace("mlp.", "mlp.experts.")
    if weight.expert is not None:
        name = name.replace("mlp.", f"mlp.experts.{weight.expert}.")
    return f"{prefix}{name}.weight"


# Whole models


def shard_paths(out: Path, shards: int) -> list[Path]:
    """Return `out`, or shards with names in the form that llama.cpp and transformers expect."""
    numbers = range(1, shards + 1)
    return [out] if shards == 1 else [out.with_name(f"{out.stem}-{one:05}-of-{shards:05}{out.suffix}") for one in numbers]


def make_model(
    out: Path, shape: Shape, model_format: str, shards: int, seed: int, fused: bool = False, file_type: str = "q8_0"
) -> list[Path]:
    """Write the model unless its files exist with the same parameters; return their paths."""
    paths = shard_paths(out, shards)
    paths += [out.with_name(f"{out.name}.index.json")] if shards > 1 and model_format == "safetensors" else []
    parameters = {"version": _GENERATOR_VERSION, "format": model_format, "shards": shards, "seed": seed}
    parameters |= asdict(shape) | {"fused": fused} | ({} if file_type == "q8_0" else {"type": file_type})
    sidecar = out.with_name(out.name + ".json")
    if _is_right(sidecar, parameters, paths):
        return paths
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sidecar.unlink(missing_ok=True)
        _write(paths, shape, model_format, seed, fused, TYPES[file_type])
        sizes = {path.name: path.stat().st_size for path in paths}
        sidecar.write_text(json.dumps({"parameters": parameters, "files": sizes}, indent=1) + "\n")
    except OSError as error:
        hint = "name a writable directory with enough free space"
        raise MissingRequirement(f"cannot write {out}: {error.strerror}", hint) from error
    return paths


def _is_right(sidecar: Path, parameters: dict[str, object], paths: list[Path]) -> bool:
    try:
        recorded = json.loads(sidecar.read_text())
        sizes = {path.name: path.stat().st_size for path in paths}
        return bool(recorded["parameters"] == parameters and recorded["files"] == sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(paths: list[Path], shape: Shape, model_format: str, seed: int, fused: bool, file_type: FileType) -> None:
    with contextlib.ExitStack() as stack:
        files: list[BinaryIO] = [stack.enter_context(replacing(path, 0o666)) for path in paths]
        if model_format == "gguf":
            write_gguf(files, shape, seed, file_type)
        else:
            write_safetensors(files, [path.name for path in paths], shape, seed, fused)
        for file in files:
            file.flush()
            os.fdatasync(file.fileno())
            _drop_pages(file)  # so that the next reader starts with a cold cache


def _drop_pages(file: BinaryIO) -> None:
    """Drop clean pages of `file` from the page cache, and start to write dirty ones."""
    file.flush()
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write; shards are named after it")
    parser.add_argument("--size", default="700M", help="approximate size of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="number of layers (default: chosen by --size)")
    parser.add_argument("--format", choices=("gguf", "safetensors"), default="gguf", help="GGUF, or safetensors in BF16")
    parser.add_argument("--type", choices=tuple(TYPES), help="quantization of a GGUF (default: q8_0)")
    parser.add_argument("--experts", type=int, default=0, metavar="N", help="make an MoE model with N experts in each layer")
    parser.add_argument(
        "--used", type=int, default=4, metavar="K", help="experts that a token uses in each layer (default: %(default)s)"
    )
    parser.add_argument(
        "--slice", default="500K", metavar="SIZE", help="size of one expert in one tensor (default: %(default)s)"
    )
    parser.add_argument("--fused", action="store_true", help="safetensors: one tensor for all experts of a layer")
    parser.add_argument("--tied", action="store_true", help="use the embedding as output tensor")
    like = "make a GGUF with the architecture, shape and types of this MoE model; only --layers changes its size"
    parser.add_argument("--like", choices=tuple(LIKE), help=like)
    parser.add_argument("--split", type=int, default=1, metavar="N", help="write N shards")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    if arguments.layers is not None and arguments.layers < 1:
        raise UsageError(f"--layers: must be at least 1, not {arguments.layers}")
    fixed = ("size", "format", "type", "experts", "used", "slice", "fused", "tied") if arguments.like else ()
    for name in fixed:
        if getattr(arguments, name) != parser.get_default(name):
            raise UsageError(f"--{name}: cannot be combined with --like, which sets it", f"remove --{name}, or --like")
    return arguments


def _chosen_shape(arguments: argparse.Namespace) -> tuple[Shape, str]:
    if arguments.like:
        shape, file_type = LIKE[arguments.like]
        return replace(shape, layers=arguments.layers or shape.layers), file_type
    if arguments.type and arguments.format != "gguf":
        raise UsageError("--type: only for GGUF, safetensors are written in BF16", "remove --type, or use --format gguf")
    file_type = arguments.type or "q8_0"
    value_bytes = BYTES_PER_VALUE["safetensors"] if arguments.format != "gguf" else TYPES[file_type].mean_value_bytes
    if arguments.experts and not 1 <= arguments.used <= arguments.experts:
        raise UsageError(f"--used: must be from 1 to the number of experts, {arguments.experts}, not {arguments.used}")
    mixture = MoeShape(arguments.experts, arguments.used, parse_size(arguments.slice)) if arguments.experts else None
    size_bytes, block_values = parse_size(arguments.size), TYPES[file_type].block.values
    return choose_shape(size_bytes, value_bytes, arguments.layers, arguments.tied, mixture, block_values), file_type


def main(words: Sequence[str] | None = None) -> int:
    arguments = _arguments(words)
    shape, file_type = _chosen_shape(arguments)
    if not 1 <= arguments.split <= len(list(shape.weights())):
        raise UsageError(
            f"--split: must be from 1 to the number of tensors, {len(list(shape.weights()))}, not {arguments.split}"
        )
    paths = make_model(arguments.out, shape, arguments.format, arguments.split, arguments.seed, arguments.fused, file_type)
    total = sum(path.stat().st_size for path in paths)
    experts = f", {shape.experts} experts per layer, {shape.used} used" if shape.experts else ""
    print(f"{format_size(total)}, {shape.layers} layers, width {shape.width}{experts}", file=sys.stderr)
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
