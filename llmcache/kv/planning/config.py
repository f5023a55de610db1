"""From a model's config.json, as Hugging Face writes it, to its shape.

Understood are decoders with one KV cache per layer: llama, mistral, qwen, qwen2, qwen3, opt, gpt2, gpt_neox, phi and
others that name their sizes in the same way, with plain MLPs or mixtures of experts (mixtral, qwen2_moe, qwen3_moe,
glm4_moe, gpt_oss, llama4). Refused, by name, is what has no such cache: MLA, state spaces, linear attention, encoders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcache.cache.mixture import EXPERTS_USED
from llmcache.errors import UsageError
from llmcache.kv.planning.models import KV_BYTES, MixtureMlp, ModelShape

_LARGEST_BYTES = 4 << 20  # a config is a few KB: what is larger is something else
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
    "first_mixture": ("first_k_dense_replace",),
    "mixture_step": ("decoder_sparse_step", "interleave_moe_layer_step"),
}
_HINT = "plans are for decoders with keys and values in every layer"
_PLAIN_MLP = {"opt", "gpt2", "gpt_neox", "gptj", "phi", "falcon", "bloom", "mpt", "gpt_bigcode", "starcoder2"}
_LEARNED_POSITIONS = {"opt": 2, "gpt2": 0}  # rows beyond max_position_embeddings
_TIED = {"opt", "gpt2", "gemma", "gemma2", "gemma3_text", "bloom", "gpt_bigcode", "falcon", "mpt"}
_FOREIGN = {
    "kv_lora_rank": "its latent attention (MLA) has no keys and values per head",
    "state_size": "a state-space model keeps no KV cache",
    "mamba_d_state": "its state-space layers keep no KV cache",
    "linear_num_value_heads": "its layers of linear attention keep no KV cache",
    "is_encoder_decoder": "an encoder-decoder has two KV caches",
}
_WITH_KV = {"attention", "full_attention", "sliding_attention", "chunked_attention"}


def read_config(path: str | Path) -> ModelShape:
    """Returns the shape of the model whose config.json, or directory with one, is `path`.

    UsageError, naming --model: it cannot be read, is no JSON of a decoder, or is of a kind that is not understood.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        with file.open("rb") as stream:
            raw = stream.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--model: cannot read {file}: {error.strerror}", "give a model's config.json") from error
    try:
        found = json.loads(raw) if len(raw) <= _LARGEST_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"--model: {file} is not a config.json", "give the config.json of a Hugging Face model")
    return shape_of(found, str(file))


def shape_of(config: Mapping[str, Any], source: str) -> ModelShape:
    """Returns the shape that `config` describes; errors as `read_config`, `source` names the file in them."""
    kind = str(config.get("model_type", ""))
    text = config.get("text_config")
    if isinstance(text, dict) and "num_hidden_layers" not in config:
        config, kind = text, str(text.get("model_type", kind))
    for name, why in _FOREIGN.items():
        value = config.get(name)
        if value:
            raise UsageError(f"--model: {source}: {name}: {value}: {why}", _HINT)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and (foreign := {str(layer) for layer in kinds} - _WITH_KV):
        raise UsageError(f"--model: {source}: layer_types: {min(foreign)}: they have no KV cache that is known", _HINT)
    sizes = {field: _size(config, field, source) for field in ("layers", "hidden", "heads", "vocabulary")}
    heads = sizes["heads"]
    ffn = _size(config, "ffn", source, 4 * sizes["hidden"])
    if kind == "qwen":
        ffn //= 2  # the first Qwen counts both halves of its gated MLP
    if config.get("multi_query") is True and not any(name in config for name in _NAMES["kv_heads"]):
        kv_heads = 1
    else:
        kv_heads = _size(config, "kv_heads", source, heads)
    limit = _size(config, "context_limit", source, 0)
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
            weight_bits=_bits(config),
            context_limit=limit,
            notes=_notes(config),
            mixture=_mixture(config, kind, sizes["layers"], source),
        )
    except ValueError as error:
        raise UsageError(f"--model: {source}: {error}", "is it the config.json of a decoder?") from error


def _mixture(config: Mapping[str, Any], kind: str, layers: int, source: str) -> MixtureMlp | None:
    experts = _size(config, "experts", source, 0)
    if experts <= 1:
        return None
    ffn = _size(config, "expert_ffn", source)
    if kind == "llama4_text":
        shared_ffn = ffn  # an expert that each token uses, of which its config says nothing
    else:
        shared_ffn = _size(config, "shared_ffn", source, ffn * _size(config, "shared_experts", source, 0))
    first, step = _size(config, "first_mixture", source, 0), max(1, _size(config, "mixture_step", source, 1))
    told = config.get("mlp_only_layers")
    plain = {one for one in told if isinstance(one, int)} if isinstance(told, list) else set()
    mixtures = layers // step - first // step  # each `step`th layer from the `first` on
    mixtures -= sum(first <= layer < layers and (layer + 1) % step == 0 for layer in plain)
    return MixtureMlp(mixtures, experts, _size(config, "used", source), ffn, shared_ffn) if mixtures > 0 else None


def _size(config: Mapping[str, Any], field: str, source: str, default: int | None = None) -> int:
    for name in _NAMES[field]:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise UsageError(f"--model: {source}: {name}: {value!r} is not a size", "is it the config.json of a decoder?")
        return value
    if default is None:
        wanted = " or ".join(_NAMES[field][:3])
        raise UsageError(f"--model: {source}: {wanted} is missing", "give the config.json of a Hugging Face decoder")
    return default


def _title(config: Mapping[str, Any], source: str) -> str:
    name = config.get("_name_or_path") or config.get("name_or_path")
    if isinstance(name, str) and name.strip("./"):
        return name.rstrip("/").rsplit("/", 1)[-1]
    return Path(source).absolute().parent.name or str(config.get("model_type", "model"))


def _dtype(config: Mapping[str, Any]) -> str:
    """Type of the KV cache: that of the model where the cache can have it, else half precision."""
    told = str(config.get("torch_dtype") or config.get("dtype") or "float16").removeprefix("torch.")
    return told if told in KV_BYTES else "float16"


def _bits(config: Mapping[str, Any]) -> float:
    """Bits of a weight: of its quantisation if it says so, else of its type."""
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict):
        bits = quantised.get("bits", 8 if quantised.get("load_in_8bit") else 4 if quantised.get("load_in_4bit") else None)
        if isinstance(bits, int | float) and not isinstance(bits, bool):
            return float(bits)
    return 8 * KV_BYTES[_dtype(config)]


def _notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    window = config.get("sliding_window")
    if isinstance(window, int) and window and config.get("use_sliding_window", True):
        return (f"layers with a sliding window of {window} tokens are counted like the others: an upper bound",)
    return ()
