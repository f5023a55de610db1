"""Writes a Llama GGUF in Q8_0, whole or in the shards that llama.cpp loads together."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tools.modelgen import data
from tools.modelgen.shape import HEAD_SIZE, Shape, Weight, split_by_size

BYTES_PER_VALUE = data.Q8_0_BYTES / data.Q8_0_VALUES

_ALIGNMENT = 32
_F32, _Q8_0 = 0, 8
_U16, _U32, _I32, _FLOAT, _STRING, _ARRAY = 2, 4, 5, 6, 8, 9
_CONTEXT_LENGTH = 2048
_MOSTLY_Q8_0 = 7

_NAMES = {
    "embedding": "token_embd",
    "output_norm": "output_norm",
    "output": "output",
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "attention_output": "attn_output",
    "feed_forward_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "router": "ffn_gate_inp",
}


def shard_paths(out: Path, shards: int) -> list[Path]:
    """The files that `write` makes: `out` itself, or its shards with llama.cpp's names."""
    if shards == 1:
        return [out]
    return [out.with_name(f"{out.stem}-{number:05}-of-{shards:05}{out.suffix}") for number in range(1, shards + 1)]


def write(files: list[BinaryIO], shape: Shape, seed: int) -> None:
    """Write the model into `files`, one per shard."""
    weights = list(shape.weights())
    groups = split_by_size([_size(weight) for weight in weights], len(files))
    for number, (file, group) in enumerate(zip(files, groups, strict=True)):
        keys = _model_keys(shape) if number == 0 else []
        if len(files) > 1:
            keys += _split_keys(number, len(files), len(weights))
        _write_header(file, keys, [weights[index] for index in group])
        for index in group:
            _write_padded(file, _content(weights[index], seed, index))


def _is_plain(weight: Weight) -> bool:
    """Whether it is written as float32."""
    return weight.rows is None or weight.role == "router"


def _size(weight: Weight) -> int:
    if _is_plain(weight):
        return 4 * weight.values
    return weight.values // data.Q8_0_VALUES * data.Q8_0_BYTES


def _content(weight: Weight, seed: int, index: int) -> Iterator[bytes]:
    if weight.rows is None:
        return iter([data.f32_ones(weight.columns)])
    if _is_plain(weight):
        return iter([data.f32(seed, index, weight.values)])
    return data.q8_0(seed, index, weight.values)


def _write_header(file: BinaryIO, keys: list[bytes], weights: list[Weight]) -> None:
    header = [b"GGUF", struct.pack("<IQQ", 3, len(weights), len(keys)), *keys]
    offset = 0
    for weight in weights:
        shape = [size for size in (weight.columns, weight.rows, weight.experts) if size is not None]
        header.append(_text(_name(weight)) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        header.append(struct.pack("<IQ", _F32 if _is_plain(weight) else _Q8_0, offset))
        offset += -(-_size(weight) // _ALIGNMENT) * _ALIGNMENT
    _write_padded(file, iter(header))


def _write_padded(file: BinaryIO, pieces: Iterator[bytes]) -> None:
    written = sum(file.write(piece) for piece in pieces)
    file.write(bytes(-written % _ALIGNMENT))


def _name(weight: Weight) -> str:
    prefix = "" if weight.layer is None else f"blk.{weight.layer}."
    return f"{prefix}{_NAMES[weight.role]}{'_exps' if weight.experts else ''}.weight"


def _model_keys(shape: Shape) -> list[bytes]:
    """Hyper-parameters, and a SentencePiece vocabulary of made-up words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"\u2581w{number}" for number in range(shape.vocabulary - len(tokens))]
    normal, unknown, control, byte = 1, 2, 3, 6
    counts = {"llama.expert_count": shape.experts, "llama.expert_used_count": shape.used} if shape.experts else {}
    types = [unknown, control, control, *[byte] * 256, *[normal] * (shape.vocabulary - 259)]
    return [
        _key("general.architecture", _STRING, _text("llama")),
        _key("general.name", _STRING, _text("random weights")),
        _key("general.alignment", _U32, struct.pack("<I", _ALIGNMENT)),
        _key("general.file_type", _U32, struct.pack("<I", _MOSTLY_Q8_0)),
        _key("llama.context_length", _U32, struct.pack("<I", _CONTEXT_LENGTH)),
        _key("llama.embedding_length", _U32, struct.pack("<I", shape.width)),
        _key("llama.block_count", _U32, struct.pack("<I", shape.layers)),
        _key("llama.feed_forward_length", _U32, struct.pack("<I", shape.feed_forward)),
        _key("llama.attention.head_count", _U32, struct.pack("<I", shape.heads)),
        _key("llama.attention.head_count_kv", _U32, struct.pack("<I", shape.kv_heads)),
        _key("llama.attention.layer_norm_rms_epsilon", _FLOAT, struct.pack("<f", 1e-5)),
        _key("llama.rope.dimension_count", _U32, struct.pack("<I", HEAD_SIZE)),
        _key("llama.vocab_size", _U32, struct.pack("<I", shape.vocabulary)),
        *(_key(name, _U32, struct.pack("<I", count)) for name, count in counts.items()),
        _key("tokenizer.ggml.model", _STRING, _text("llama")),
        _array("tokenizer.ggml.tokens", _STRING, len(tokens), b"".join(_text(token) for token in tokens)),
        _array("tokenizer.ggml.scores", _FLOAT, len(tokens), bytes(4 * len(tokens))),
        _array("tokenizer.ggml.token_type", _I32, len(types), struct.pack(f"<{len(types)}i", *types)),
        _key("tokenizer.ggml.bos_token_id", _U32, struct.pack("<I", 1)),
        _key("tokenizer.ggml.eos_token_id", _U32, struct.pack("<I", 2)),
    ]


def _split_keys(number: int, count: int, tensor_count: int) -> list[bytes]:
    return [
        _key("split.no", _U16, struct.pack("<H", number)),
        _key("split.count", _U16, struct.pack("<H", count)),
        _key("split.tensors.count", _I32, struct.pack("<i", tensor_count)),
    ]


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _array(name: str, kind: int, count: int, items: bytes) -> bytes:
    return _key(name, _ARRAY, struct.pack("<IQ", kind, count) + items)
