#!/usr/bin/env python3
"""Generates a Llama model with random weights: a real file of any size that llama.cpp loads and decodes with.

    tools/make_model.py OUT.gguf --size 700M
    tools/make_model.py model.safetensors --format safetensors --size 2G --split 3
    tools/make_model.py mixture.gguf --size 2G --experts 64 --used 4
    tools/make_model.py today.gguf --size 1145M --type q4_k_m

The same arguments give the same bytes. A file with the same parameters, which OUT.json records, is kept.
The model generates meaningless text, but it reads the same bytes in the same order as a trained model of its size.
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

# Run as a script, Python looks for modules in tools/ and not in the repository above it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmcache.errors import EnvironmentProblem, UsageError, run_cli
from llmcache.files import replacing
from llmcache.units import format_size, parse_size

# Raise it when the bytes that the same parameters give change.
_GENERATOR_VERSION = 1
HEAD_SIZE = 64
_PIECE_BYTES = 8 * 2**20  # is made at a time: a model larger than memory can be generated

_DEVIATION = 0.02  # of weights, so that activations stay finite
# bfloat16 with random sign, mantissa and two low exponent bits: magnitudes from 2**-7 to 2**-3.
_BF16_RANDOM, _BF16_BASE, _BF16_ONE = 0x81FF, 0x3C00, 0x3F80

_ALIGNMENT = 32
_F32 = 0
_STRING, _ARRAY = 8, 9
_KINDS = {"H": 2, "I": 4, "i": 5, "f": 6}
"""By the letter that `struct` has for a number of a kind."""
_CONTEXT_LENGTH = 2048
_NAMES = {
    "embedding": ("token_embd", "model.embed_tokens"),
    "output_norm": ("output_norm", "model.norm"),
    "output": ("output", "lm_head"),
    "attention_norm": ("attn_norm", "input_layernorm"),
    "query": ("attn_q", "self_attn.q_proj"),
    "key": ("attn_k", "self_attn.k_proj"),
    "value": ("attn_v", "self_attn.v_proj"),
    "attention_output": ("attn_output", "self_attn.o_proj"),
    "feed_forward_norm": ("ffn_norm", "post_attention_layernorm"),
    "gate": ("ffn_gate", "mlp.gate_proj"),
    "up": ("ffn_up", "mlp.up_proj"),
    "down": ("ffn_down", "mlp.down_proj"),
    "router": ("ffn_gate_inp", "mlp.gate"),
}
"""The names of roles: in GGUF, and in safetensors."""


@dataclass(frozen=True)
class BlockType:
    """A quantised GGUF type: its `number` in a header, and the blocks that form a row.

    `scales` maps a byte offset in a block to the float16 number there; with it, a block of random bytes has values of mean 0
    and deviation `_DEVIATION`. `least` is the smallest int8 that the quantiser of the type writes.
    """

    number: int
    values: int
    block_bytes: int
    scales: dict[int, float]
    least: int = -128

    @property
    def value_bytes(self) -> float:
        """Bytes per value."""
        return self.block_bytes / self.values


# Random bytes are uniform: int8 has a deviation of 73. A Q4_K value is d * scale * q - dmin * min, where scale and min have
# 6 bits and q has 4; its mean is 0 for dmin = 7.5 d. A Q6_K value is d * scale * q, of 8 and 6 signed bits.
Q8_0 = BlockType(8, 32, 34, {0: _DEVIATION / 73}, least=-127)
Q4_K = BlockType(12, 256, 144, {0: _DEVIATION / 258, 2: 7.5 * _DEVIATION / 258})
Q6_K = BlockType(14, 256, 210, {208: _DEVIATION / 1366})


@dataclass(frozen=True)
class FileType:
    """A file type of llama.cpp: its `number` in a header, the type of most tensors, and a `better` one for some.

    `mean_value_bytes` is the mean number of bytes per value in a whole model.
    """

    number: int
    block: BlockType
    better: BlockType
    mean_value_bytes: float

    def block_of(self, weight: Weight, shape: Shape) -> BlockType:
        """Return the type of a quantised tensor, as `llama_tensor_get_type` of llama.cpp chooses it for a dense Llama."""
        if weight.role == ("embedding" if shape.tied else "output"):
            return self.better
        if weight.role in ("value", "down") and weight.layer is not None and _use_more_bits(weight.layer, shape.layers):
            return self.better
        return self.block


def _use_more_bits(layer: int, layers: int) -> bool:
    """Return whether Q4_K_M favours a layer: it does for the first and last eighth, and for every third of the others."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


TYPES = {"q8_0": FileType(7, Q8_0, Q8_0, Q8_0.value_bytes), "q4_k_m": FileType(15, Q4_K, Q6_K, 0.602)}
"""The types of GGUF files, by the value of --type. The mean of Q4_K_M is that of the larger presets."""
BYTES_PER_VALUE = {"gguf": TYPES["q8_0"].mean_value_bytes, "safetensors": 2.0}
"""By format: Q8_0, and bfloat16."""

# (smallest number of parameters, width, feed-forward width, vocabulary); the middle ones are TinyLlama and Llama 8B.
_PRESETS = (
    (0, 256, 704, 2000),
    (30_000_000, 1024, 2816, 8000),
    (280_000_000, 2048, 5632, 32000),
    (5_500_000_000, 4096, 14336, 32000),
)


@dataclass(frozen=True)
class Weight:
    """One tensor to generate: `role` is its name without a format's spelling, `rows` None for a vector of ones.

    `experts`: as many matrices behind one another; `expert`: it is the matrix of that one.
    """

    role: str
    layer: int | None
    columns: int
    rows: int | None
    experts: int | None = None
    expert: int | None = None

    @property
    def values(self) -> int:
        """Number of values in the tensor."""
        return self.columns * (self.rows or 1) * (self.experts or 1)


@dataclass(frozen=True)
class Shape:
    """A Llama decoder with grouped-query attention: 8 query heads share one key and value head.

    With `experts` its feed-forward part is a mixture (Mixtral's) of so many networks of `feed_forward` units each, of which
    a router has a token use `used`.
    """

    width: int
    feed_forward: int
    vocabulary: int
    layers: int
    tied: bool
    experts: int = 0
    used: int = 0

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.width // HEAD_SIZE

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return max(1, self.heads // 8)

    def weights(self) -> Iterator[Weight]:
        """All tensors in the order of the file."""
        yield Weight("embedding", None, self.width, self.vocabulary)
        for layer in range(self.layers):
            yield from self.layer_weights(layer)
        yield Weight("output_norm", None, self.width, None)
        if not self.tied:
            yield Weight("output", None, self.width, self.vocabulary)

    def layer_weights(self, layer: int) -> Iterator[Weight]:
        """The tensors of one layer."""
        kv_width = self.kv_heads * HEAD_SIZE
        yield Weight("attention_norm", layer, self.width, None)
        yield Weight("query", layer, self.width, self.width)
        yield Weight("key", layer, self.width, kv_width)
        yield Weight("value", layer, self.width, kv_width)
        yield Weight("attention_output", layer, self.width, self.width)
        yield Weight("feed_forward_norm", layer, self.width, None)
        if self.experts:
            yield Weight("router", layer, self.width, self.experts)
        yield Weight("gate", layer, self.width, self.feed_forward, self.experts or None)
        yield Weight("up", layer, self.width, self.feed_forward, self.experts or None)
        yield Weight("down", layer, self.feed_forward, self.width, self.experts or None)


@dataclass(frozen=True)
class MixtureShape:
    """A mixture to be: `slice_bytes` has one expert in one tensor, about."""

    experts: int
    used: int
    slice_bytes: int


def choose_shape(
    size_bytes: int,
    bytes_per_value: float,
    layers: int | None,
    tied: bool,
    mixture: MixtureShape | None = None,
    block_values: int = Q8_0.values,
) -> Shape:
    """The shape whose file comes nearest to `size_bytes`; a given number of `layers` is kept instead of the size.

    Rows consist of whole blocks of `block_values`.
    """
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
    """The indices of `sizes` in `parts` consecutive groups of about the same sum, none empty."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    total, before = sum(sizes), 0
    for index, size in enumerate(sizes):
        group = min(parts - 1, (before + size // 2) * parts // total)
        # Never skip a group, and leave an item for each group that is still to come.
        first_free = next((g for g, members in enumerate(groups) if not members), parts - 1)
        remaining = len(sizes) - index
        group = max(min(group, first_free), parts - remaining)
        groups[group].append(index)
        before += size
    return groups


# Random values, a generator for each tensor: the same whatever was generated before it


def _generator(seed: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64([seed, index]))


def _blocks(block: BlockType, seed: int, index: int, values: int) -> Iterator[bytes]:
    """Yield blocks of `values` random values. Nothing is quantised: the bytes themselves are random."""
    random = _generator(seed, index)
    blocks = values // block.values
    step = _PIECE_BYTES // block.block_bytes
    for start in range(0, blocks, step):
        count = min(step, blocks - start)
        piece = np.frombuffer(bytearray(random.bytes(count * block.block_bytes)), np.int8)
        np.maximum(piece, block.least, out=piece)
        rows = piece.view(np.uint8).reshape(count, block.block_bytes)
        for at, scale in block.scales.items():
            rows[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        yield piece.tobytes()


def _bf16(seed: int, index: int, values: int) -> Iterator[bytes]:
    """`values` random bfloat16 numbers."""
    random = _generator(seed, index)
    step = _PIECE_BYTES // 2
    for start in range(0, values, step):
        piece = np.frombuffer(random.bytes(2 * min(step, values - start)), np.uint16)
        yield ((piece & _BF16_RANDOM) | _BF16_BASE).tobytes()


# The two formats


def write_gguf(files: list[BinaryIO], shape: Shape, seed: int, file_type: FileType = TYPES["q8_0"]) -> None:
    """Write the model as GGUF into `files`, one for each shard, as llama.cpp loads them together."""
    tensors = [Tensor(weight, _block_of(weight, shape, file_type)) for weight in shape.weights()]
    groups = split_by_size([tensor.size_bytes for tensor in tensors], len(files))
    for number, (file, group) in enumerate(zip(files, groups, strict=True)):
        keys = _model_keys(shape, file_type) if number == 0 else []
        if len(files) > 1:
            keys += [_key("split.no", number, "H"), _key("split.count", len(files), "H")]
            keys += [_key("split.tensors.count", len(tensors), "i")]
        _write_header(file, keys, [tensors[index] for index in group])
        for index in group:
            _write_padded(file, _content(tensors[index], seed, index))


@dataclass(frozen=True)
class Tensor:
    """A weight in a GGUF file; `block` None for float32."""

    weight: Weight
    block: BlockType | None

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor, without padding."""
        values = self.weight.values
        return 4 * values if self.block is None else values // self.block.values * self.block.block_bytes


def _block_of(weight: Weight, shape: Shape, file_type: FileType) -> BlockType | None:
    """Return None for a tensor that every file type keeps in float32."""
    return None if weight.rows is None or weight.role == "router" else file_type.block_of(weight, shape)


def _content(tensor: Tensor, seed: int, index: int) -> Iterator[bytes]:
    weight = tensor.weight
    if weight.rows is None:
        return iter([np.ones(weight.columns, "<f4").tobytes()])
    if tensor.block is None:  # as large as those of trained routers
        return iter([(0.02 * _generator(seed, index).standard_normal(weight.values)).astype("<f4").tobytes()])
    return _blocks(tensor.block, seed, index, weight.values)


def _write_header(file: BinaryIO, keys: list[bytes], tensors: list[Tensor]) -> None:
    header = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys)), *keys]
    offset = 0
    for tensor in tensors:
        weight = tensor.weight
        shape = [size for size in (weight.columns, weight.rows, weight.experts) if size is not None]
        header.append(_text(_gguf_name(weight)) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        header.append(struct.pack("<IQ", _F32 if tensor.block is None else tensor.block.number, offset))
        offset += -(-tensor.size_bytes // _ALIGNMENT) * _ALIGNMENT
    _write_padded(file, iter(header))


def _write_padded(file: BinaryIO, pieces: Iterator[bytes]) -> None:
    written = sum(file.write(piece) for piece in pieces)
    file.write(bytes(-written % _ALIGNMENT))


def _gguf_name(weight: Weight) -> str:
    prefix = "" if weight.layer is None else f"blk.{weight.layer}."
    return f"{prefix}{_NAMES[weight.role][0]}{'_exps' if weight.experts else ''}.weight"


def _model_keys(shape: Shape, file_type: FileType) -> list[bytes]:
    """Hyper-parameters, and a SentencePiece vocabulary of made-up words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"\u2581w{number}" for number in range(shape.vocabulary - len(tokens))]
    normal, unknown, control, byte = 1, 2, 3, 6
    counts = {"llama.expert_count": shape.experts, "llama.expert_used_count": shape.used} if shape.experts else {}
    types = [unknown, control, control, *[byte] * 256, *[normal] * (shape.vocabulary - 259)]
    first: dict[str, str | float] = {
        "general.architecture": "llama",
        "general.name": "random weights",
        "general.alignment": _ALIGNMENT,
        "general.file_type": file_type.number,
        "llama.context_length": _CONTEXT_LENGTH,
        "llama.embedding_length": shape.width,
        "llama.block_count": shape.layers,
        "llama.feed_forward_length": shape.feed_forward,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HEAD_SIZE,
        "llama.vocab_size": shape.vocabulary,
        **counts,
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
    """A key with its value; `code` as in `_KINDS`, by default of an integer "I", else "f"."""
    if isinstance(value, str):
        return _text(name) + struct.pack("<I", _STRING) + _text(value)
    code = code or ("I" if isinstance(value, int) else "f")
    return _text(name) + struct.pack(f"<I{code}", _KINDS[code], value)


def _array(name: str, kind: int, count: int, items: bytes) -> bytes:
    return _text(name) + struct.pack("<IIQ", _ARRAY, kind, count) + items


def tensors(shape: Shape, fused: bool) -> list[Weight]:
    """All tensors in the order of the file: of a mixture one for each expert, or (`fused`) one for all of a layer."""
    found: list[Weight] = []
    for weight in shape.weights():
        apart = range(0 if fused else weight.experts or 0)
        found += [replace(weight, experts=None, expert=expert) for expert in apart] or [weight]
    if not fused and shape.experts:  # gate, up and down of an expert lie side by side
        found.sort(key=lambda weight: _place(weight, shape))
    return found


def _place(weight: Weight, shape: Shape) -> tuple[int, int, int]:
    layer = weight.layer if weight.layer is not None else -1 if weight.role == "embedding" else shape.layers
    return layer, weight.expert is not None, weight.expert or 0


def write_safetensors(files: list[BinaryIO], names: list[str], shape: Shape, seed: int, fused: bool = False) -> None:
    """Write the model in bfloat16 into `files`: one for each shard, and the index last if several."""
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
    """The files of the tensors: `out` itself, or its shards with the names that llama.cpp and transformers know."""
    numbers = range(1, shards + 1)
    return [out] if shards == 1 else [out.with_name(f"{out.stem}-{one:05}-of-{shards:05}{out.suffix}") for one in numbers]


def make_model(
    out: Path, shape: Shape, model_format: str, shards: int, seed: int, fused: bool = False, file_type: str = "q8_0"
) -> list[Path]:
    """The files of the model described by the arguments: those that exist where they are right, else new ones."""
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
        raise EnvironmentProblem(f"cannot write {out}: {error.strerror}", hint) from error
    return paths


def _is_right(sidecar: Path, parameters: dict[str, object], paths: list[Path]) -> bool:
    """Whether `sidecar` describes `parameters`, and all files are there with the sizes it tells."""
    try:
        known = json.loads(sidecar.read_text())
        sizes = {path.name: path.stat().st_size for path in paths}
        return bool(known["parameters"] == parameters and known["files"] == sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(paths: list[Path], shape: Shape, model_format: str, seed: int, fused: bool, file_type: FileType) -> None:
    """Write under temporary names first: a file with the final name is always whole."""
    with contextlib.ExitStack() as stack:
        files: list[BinaryIO] = [stack.enter_context(replacing(path, 0o666)) for path in paths]
        if model_format == "gguf":
            write_gguf(files, shape, seed, file_type)
        else:
            write_safetensors(files, [path.name for path in paths], shape, seed, fused)
        for file in files:  # on the disk, and out of the page cache: what reads it next starts cold, nothing is dirty
            file.flush()
            os.fsync(file.fileno())
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
    parser.add_argument("--split", type=int, default=1, metavar="N", help="write N shards")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Make the model that `words` (default: the command line) describe, and print the paths."""
    arguments = _arguments(words)
    if arguments.layers is not None and arguments.layers < 1:
        raise UsageError(f"--layers: must be at least 1, not {arguments.layers}")
    if arguments.type and arguments.format != "gguf":
        raise UsageError("--type: only for GGUF, safetensors are written in BF16", "remove --type, or use --format gguf")
    file_type = arguments.type or "q8_0"
    value_bytes = BYTES_PER_VALUE["safetensors"] if arguments.format != "gguf" else TYPES[file_type].mean_value_bytes
    if arguments.experts and not 1 <= arguments.used <= arguments.experts:
        raise UsageError(f"--used: must be from 1 to the number of experts, {arguments.experts}, not {arguments.used}")
    mixture = MixtureShape(arguments.experts, arguments.used, parse_size(arguments.slice)) if arguments.experts else None
    block_values = TYPES[file_type].block.values
    shape = choose_shape(parse_size(arguments.size), value_bytes, arguments.layers, arguments.tied, mixture, block_values)
    if not 1 <= arguments.split <= len(list(shape.weights())):
        raise UsageError(
            f"--split: must be from 1 to the number of tensors, {len(list(shape.weights()))}, not {arguments.split}"
        )
    paths = make_model(arguments.out, shape, arguments.format, arguments.split, arguments.seed, arguments.fused, file_type)
    total = sum(path.stat().st_size for path in paths)
    experts = f", {shape.experts} experts per layer, {shape.used} used" if mixture else ""
    print(f"{format_size(total)}, {shape.layers} layers, width {shape.width}{experts}", file=sys.stderr)
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
