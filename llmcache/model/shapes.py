"""Shapes of models: sizes of weights and of the KV cache per token; the paper's by name, others from config.json.

Supported are decoders of Hugging Face with one KV cache per layer. Models without such a cache are rejected by name: MLA,
state spaces, linear attention, encoders.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmcache.errors import UsageError
from llmcache.model.moe import EXPERTS_USED

KV_BYTES: dict[str, float] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes of a number in the KV cache, by type; int8 also has a scale of 4 bytes per row."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class MoeMlp:
    """The MLPs of MoE layers. `ffn` is the width of an expert, `shared_ffn` that of the experts that each token uses."""

    layers: int
    experts: int
    used: int
    ffn: int
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.used <= self.experts:
            raise ValueError(f"used: must be from 1 to the number of experts ({self.experts}), not {self.used}")

    def read_share(self, tokens: int) -> float:
        """Return the mean share (0..1) of the experts that `tokens` tokens use together, if all are equally popular."""
        return -math.expm1(tokens * math.log1p(-self.used / self.experts)) if self.used < self.experts else 1.0


@dataclass(frozen=True)
class ModelShape:
    """A decoder: sizes of its parts. `gated`: its MLP has three matrices (SwiGLU), not two. `tied`: one embedding.

    `moe`: layers with experts instead of an MLP of width `ffn`. `positions`: rows of a learned position table (OPT, GPT-2).
    `context_limit`: tokens that the model was trained for, 0 if unknown.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    positions: int = 0
    kv_dtype: str = "float16"
    weight_bits: float = 16
    context_limit: int = 0
    notes: tuple[str, ...] = ()
    moe: MoeMlp | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: must divide the heads ({self.heads}), not {self.kv_heads}")
        if not 0 < self.weight_bits <= 64:
            raise ValueError(f"weight_bits: must be more than 0 and at most 64, not {self.weight_bits}")

    @property
    def expert_parameters(self) -> int:
        moe = self.moe
        return 0 if moe is None else moe.layers * moe.experts * self._matrices * self.hidden * moe.ffn

    @property
    def dense_parameters(self) -> int:
        """Return the weights of all layers that each token uses, without norms and biases."""
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        plain = self.layers * (attention + self._matrices * self.hidden * self.ffn)
        moe = self.moe
        if moe is None:
            return plain
        saved = self._matrices * (self.ffn - moe.shared_ffn) - moe.experts
        return plain - moe.layers * self.hidden * saved

    @property
    def widest_ffn(self) -> int:
        moe = self.moe
        if moe is None:
            return self.ffn
        used = moe.used * moe.ffn + moe.shared_ffn
        return used if moe.layers == self.layers else max(self.ffn, used)

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def layer_parameters(self) -> float:
        moe = self.moe
        used = 0 if moe is None else self.expert_parameters // moe.experts * moe.used
        return (self.dense_parameters + used) / self.layers

    @property
    def parameters(self) -> int:
        tables = (1 if self.tied else 2) * self.vocabulary * self.hidden + self.positions * self.hidden
        return self.dense_parameters + self.expert_parameters + tables

    @property
    def token_parameters(self) -> int:
        return round(self.layers * self.layer_parameters) + self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> int:
        return round(self.parameters * self.weight_bits / 8)

    def layer_weight_bytes(self, batch: int) -> float:
        experts = 0.0 if self.moe is None else self.expert_parameters * self.moe.read_share(batch)
        return (self.dense_parameters + experts) / self.layers * self.weight_bits / 8

    def crossing_bytes(self, host_bytes: float, batch: int) -> float:
        """Return the bytes that a step of `batch` tokens reads of `host_bytes` on the host, experts first."""
        if self.moe is None:
            return host_bytes
        experts = min(host_bytes, self.expert_parameters * self.weight_bits / 8)
        return host_bytes - experts + experts * self.moe.read_share(batch)

    @property
    def output_weight_bytes(self) -> float:
        return self.vocabulary * self.hidden * self.weight_bits / 8

    @property
    def key_bytes(self) -> float:
        """Return the bytes of the keys of one token in one layer; its values take the same."""
        scale = SCALE_BYTES if self.kv_dtype == "int8" else 0
        return self.kv_heads * (self.head_dim * KV_BYTES[self.kv_dtype] + scale)

    @property
    def token_bytes(self) -> float:
        return 2 * self.layers * self.key_bytes

    def kv_bytes(self, context: int, batch: int) -> float:
        return self.token_bytes * context * batch

    def to_json(self) -> dict[str, Any]:
        derived = {
            "parameters": self.parameters,
            "token_parameters": self.token_parameters,
            "weight_bytes": self.weight_bytes,
            "kv_token_bytes": self.token_bytes,
        }
        own = asdict(self)
        own["mixture"] = own.pop("moe")
        return {**own, **derived}


MODELS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        ModelShape("Qwen-7B", 32, 4096, 32, 32, 128, 11008, 151936, context_limit=8192),
        ModelShape("Llama2-13B", 40, 5120, 40, 40, 128, 13824, 32000, context_limit=4096),
        ModelShape("LongChat-7B", 32, 4096, 32, 32, 128, 11008, 32000, context_limit=32768),
        ModelShape("OPT-6.7B", 32, 4096, 32, 32, 128, 16384, 50272, False, True, 2050, context_limit=2048),
    )
}
"""Models of hillinfer.txt, section 4.2; shapes from their public config.json files."""

# Parsing a config.json

_LARGEST_BYTES = 4 << 20  # a config.json has a few KB: a larger file is something else
_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "ffn": ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "context_limit": ("max_position_embeddings", "seq_length", "n_positions"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "used": EXPERTS_USED,
    "expert_ffn": ("moe_intermediate_size", "intermediate_size"),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "first_moe_layer": ("first_k_dense_replace",),
    "moe_step": ("decoder_sparse_step", "interleave_moe_layer_step"),
}
_HINT = "only decoders with keys and values in every layer can be planned"
_PLAIN_MLP = {"opt", "gpt2", "gpt_neox", "gptj", "phi", "falcon", "bloom", "mpt", "gpt_bigcode", "starcoder2"}
_LEARNED_POSITIONS = {"opt": 2, "gpt2": 0}  # rows beyond max_position_embeddings
_TIED = {"opt", "gpt2", "gemma", "gemma2", "gemma3_text", "bloom", "gpt_bigcode", "falcon", "mpt"}
_FOREIGN = {
    "kv_lora_rank": "latent attention (MLA) has no keys and values per head",
    "state_size": "a state-space model has no KV cache",
    "mamba_d_state": "state-space layers have no KV cache",
    "linear_num_value_heads": "layers with linear attention have no KV cache",
    "is_encoder_decoder": "an encoder-decoder has two KV caches",
}
_WITH_KV = {"attention", "full_attention", "sliding_attention", "chunked_attention"}


def read_config(path: str | Path) -> ModelShape:
    """Return the shape of the model with the config.json `path`, or in the directory `path`.

    UsageError, naming --model: it cannot be read, is no JSON of a decoder, or is of an unsupported kind.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        with file.open("rb") as stream:
            raw = stream.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--model: cannot read {file}: {error.strerror}", "name the config.json of a model") from error
    try:
        found = json.loads(raw) if len(raw) <= _LARGEST_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"--model: {file} is not a config.json", "name the config.json of a Hugging Face model")
    return shape_of(found, str(file))


def shape_of(config: Mapping[str, Any], source: str) -> ModelShape:
    """Return the shape described by `config`; errors as for `read_config`."""
    kind = str(config.get("model_type", ""))
    text = config.get("text_config")
    if isinstance(text, dict) and "num_hidden_layers" not in config:
        config = {"quantization_config": config.get("quantization_config"), **text}
        kind = str(text.get("model_type", kind))
    for name, why in _FOREIGN.items():
        if value := config.get(name):
            raise UsageError(f"--model: {source}: {name} is {value}: {why}", _HINT)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and (foreign := {str(layer) for layer in kinds} - _WITH_KV):
        raise UsageError(f"--model: {source}: layer_types: '{min(foreign)}' is not supported", _HINT)
    sizes = {field: _size(config, field, source) for field in ("layers", "hidden", "heads", "vocabulary")}
    heads = sizes["heads"]
    ffn = _size(config, "ffn", source, 4 * sizes["hidden"])
    if kind == "qwen":
        ffn //= 2  # the first Qwen counts both halves of its gated MLP
    kv_heads = _size(config, "kv_heads", source, 1 if config.get("multi_query") is True else heads)
    limit = _size(config, "context_limit", source, 0)
    notes: tuple[str, ...] = ()
    window = config.get("sliding_window")
    if isinstance(window, int) and window and config.get("use_sliding_window", True):
        notes = (f"an upper bound: layers with a sliding window of {window} tokens are counted like the others",)
    quantization = config.get("quantization_config")
    bits = _bits(quantization) if isinstance(quantization, dict) else None
    if isinstance(quantization, dict) and bits is None:
        method = quantization.get("quant_method")
        notes += (f"an upper bound: weights quantized by {method} are counted as not quantized, as their bits are unknown",)
    try:
        return ModelShape(
            name=_title(config, source),
            **sizes,
            kv_heads=kv_heads,
            head_dim=_size(config, "head_dim", source, sizes["hidden"] // max(1, heads)),
            ffn=ffn,
            gated=kind not in _PLAIN_MLP,
            tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
            positions=limit + _LEARNED_POSITIONS[kind] if kind in _LEARNED_POSITIONS else 0,
            kv_dtype=_dtype(config),
            weight_bits=8 * KV_BYTES[_dtype(config)] if bits is None else bits,
            context_limit=limit,
            notes=notes,
            moe=_moe_mlp(config, kind, sizes["layers"], source),
        )
    except ValueError as error:
        raise UsageError(f"--model: {source}: {error}", "check that it is the config.json of a decoder") from error


def _moe_mlp(config: Mapping[str, Any], kind: str, layers: int, source: str) -> MoeMlp | None:
    experts = _size(config, "experts", source, 0)
    if experts <= 1:
        return None
    ffn = _size(config, "expert_ffn", source)
    if kind == "llama4_text":
        shared_ffn = ffn  # a shared expert, which is not in the config
    else:
        shared_ffn = _size(config, "shared_ffn", source, ffn * _size(config, "shared_experts", source, 0))
    first, step = _size(config, "first_moe_layer", source, 0), max(1, _size(config, "moe_step", source, 1))
    dense_layers = config.get("mlp_only_layers")
    plain = {one for one in dense_layers if isinstance(one, int)} if isinstance(dense_layers, list) else set()
    moe_layers = layers // step - first // step  # every `step`th layer from `first` on
    moe_layers -= sum(first <= layer < layers and (layer + 1) % step == 0 for layer in plain)
    return MoeMlp(moe_layers, experts, _size(config, "used", source), ffn, shared_ffn) if moe_layers > 0 else None


def _size(config: Mapping[str, Any], field: str, source: str, default: int | None = None) -> int:
    for name in _NAMES[field]:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise UsageError(
                f"--model: {source}: {name}: {value!r} is not a size", "check that it is the config.json of a decoder"
            )
        return value
    if default is None:
        wanted = " or ".join(_NAMES[field][:3])
        raise UsageError(f"--model: {source}: {wanted} is missing", "name the config.json of a Hugging Face decoder")
    return default


def _title(config: Mapping[str, Any], source: str) -> str:
    name = config.get("_name_or_path") or config.get("name_or_path")
    if isinstance(name, str) and name.strip("./"):
        return name.rstrip("/").rsplit("/", 1)[-1]
    return Path(source).absolute().parent.name or str(config.get("model_type", "model"))


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "float16").removeprefix("torch.")
    return dtype if dtype in KV_BYTES else "float16"


def _bits(quantization: Mapping[str, Any]) -> float | None:
    is_byte = quantization.get("load_in_8bit") or quantization.get("quant_method") == "fp8"
    bits = quantization.get("bits", 8 if is_byte else 4 if quantization.get("load_in_4bit") else None)
    return float(bits) if isinstance(bits, int | float) and not isinstance(bits, bool) else None
