"""A decoder in numpy whose attention layers run under AERP, for small Llama, Mistral and Qwen2 models.

A model directory has config.json and one model.safetensors in float32, without scaled rotations.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmcache.arrays import Doubles, Floats, Int64s
from llmcache.errors import DataError, UsageError
from llmcache.papers.edram.aerp import AerpLayer, AerpSettings, LayerShape, Projections, Rope, attend_prompt
from llmcache.papers.edram.flips import CellSettings

MODEL_TYPES = ("llama", "mistral", "qwen2")
_HINT = "name a directory with config.json and model.safetensors (float32) of a Llama, Mistral or Qwen2 model"
_LONGEST_HEADER = 1 << 26


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder, from its config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    theta: float
    eps: float

    @classmethod
    def parse(cls, data: Any) -> Config:
        if not isinstance(data, dict) or data.get("model_type") not in MODEL_TYPES:
            found = data.get("model_type") if isinstance(data, dict) else None
            raise DataError(f"model_type: must be one of {', '.join(MODEL_TYPES)}, not {found!r}", _HINT)
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        # Older files have "type" in place of "rope_type".
        plain = isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) == "default"
        if not plain:
            raise DataError(f"rope_parameters: only the default rope_type is supported, not {rope}", _HINT)
        # Mistral has a window by default, Qwen2 only if the file enables it.
        is_mistral = data["model_type"] == "mistral"
        if data.get("sliding_window", 4096) if is_mistral else data.get("use_sliding_window"):
            raise DataError("sliding_window: sliding windows are not supported", _HINT)
        if data.get("hidden_act", "silu") != "silu":
            raise DataError(f"hidden_act: only silu is supported, not {data['hidden_act']!r}", _HINT)
        heads, hidden = _whole(data, "num_attention_heads"), _whole(data, "hidden_size")
        return cls(
            layers=_whole(data, "num_hidden_layers"),
            heads=heads,
            kv_heads=_whole(data, "num_key_value_heads", heads),
            head_dim=_whole(data, "head_dim", hidden // heads),
            hidden=hidden,
            vocabulary=_whole(data, "vocab_size"),
            theta=_number(rope if rope.get("rope_theta") else data, "rope_theta", 10_000.0),
            eps=_number(data, "rms_norm_eps", 1e-6),
        )


def parse_tensors(raw: bytes) -> dict[str, Floats]:
    """Return the tensors of a float32 safetensors file; DataError names an invalid one."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or not 0 < length <= min(_LONGEST_HEADER, len(raw) - 8):
        raise DataError(f"model.safetensors: a header of {length} bytes does not fit in a file of {len(raw)} bytes", _HINT)
    try:
        header = json.loads(raw[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise DataError(f"model.safetensors: the header is not JSON: {error}", _HINT) from error
    if not isinstance(header, dict):
        raise DataError(f"model.safetensors: the header is a {type(header).__name__}, not an object", _HINT)
    body = raw[8 + length :]
    return {name: _tensor(name, entry, body) for name, entry in header.items() if name != "__metadata__"}


def _tensor(name: str, entry: Any, body: bytes) -> Floats:
    try:
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        if entry["dtype"] != "F32":
            raise DataError(f"{name}: dtype must be F32, not {entry['dtype']}", _HINT)
        return np.frombuffer(body[begin:end], np.float32).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{name}: {error}", _HINT) from error


def _whole(data: dict[str, Any], name: str, default: int | None = None) -> int:
    value = data.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{name}: must be a whole number of at least 1, not {value!r}", _HINT)
    return value


def _number(data: dict[str, Any], name: str, default: float) -> float:
    value = data.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise DataError(f"{name}: must be a number above 0, not {value!r}", _HINT)
    return float(value)


@dataclass(frozen=True)
class LayerPrompt:
    """One layer's x [n, hidden], keys and values [n, kv_heads, dim], and sums of attention weights [kv_heads, n]."""

    x: Floats
    keys: Floats
    values: Floats
    sums: Doubles


Prompt = tuple[LayerPrompt, ...]
"""A prompt after its dense pass: the data that caches need, by layer."""


class Decoder:
    """The weights of a model, and the computation of tokens."""

    def __init__(self, config: Config, tensors: dict[str, Floats]) -> None:
        self.config, self._tensors = config, tensors
        self.shape = LayerShape(config.heads, config.kv_heads, config.head_dim, config.hidden)
        self.rope = Rope(config.theta)
        self.projections = tuple(self._projections(f"model.layers.{layer}.self_attn") for layer in range(config.layers))

    @classmethod
    def load(cls, directory: str | Path) -> Decoder:
        """Read a model; UsageError if `directory` cannot be read, DataError for invalid content."""
        root = Path(directory)
        try:
            config = json.loads((root / "config.json").read_bytes())
            raw = (root / "model.safetensors").read_bytes()
        except OSError as error:
            raise UsageError(f"model: '{root}' cannot be read: {error.strerror}", _HINT) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"config.json: not JSON: {error}", _HINT) from error
        return cls(Config.parse(config), parse_tensors(raw))

    def _projections(self, prefix: str) -> Projections:
        key, value = self._linear(f"{prefix}.k_proj"), self._linear(f"{prefix}.v_proj")
        return Projections(key[0], value[0], self.config.kv_heads, self.rope, key[1], value[1])

    def _linear(self, name: str) -> tuple[Floats, Floats | None]:
        return self._tensor(f"{name}.weight").T, self._tensors.get(f"{name}.bias")

    def _tensor(self, name: str) -> Floats:
        if name not in self._tensors:
            raise DataError(f"{name}: the model has no such tensor", _HINT)
        return self._tensors[name]

    def _apply(self, name: str, rows: Floats) -> Floats:
        weight, bias = self._linear(name)
        return rows @ weight if bias is None else rows @ weight + bias

    def _norm(self, name: str, rows: Floats) -> Floats:
        scale = 1 / np.sqrt((rows * rows).mean(axis=-1, keepdims=True) + np.float32(self.config.eps))
        normed: Floats = rows * scale * self._tensor(f"{name}.weight")
        return normed

    def _queries(self, layer: int, x: Floats, positions: Int64s) -> Floats:
        rows = self._apply(f"model.layers.{layer}.self_attn.q_proj", x)
        return self.rope.turn(rows.reshape(len(x), self.config.heads, -1), positions)

    def _mlp(self, layer: int, hidden: Floats) -> Floats:
        name = f"model.layers.{layer}"
        x = self._norm(f"{name}.post_attention_layernorm", hidden)
        gate = self._apply(f"{name}.mlp.gate_proj", x)
        return self._apply(f"{name}.mlp.down_proj", gate / (1 + np.exp(-gate)) * self._apply(f"{name}.mlp.up_proj", x))

    def _logits(self, hidden: Floats) -> Floats:
        head = "lm_head.weight" if "lm_head.weight" in self._tensors else "model.embed_tokens.weight"
        logits: Floats = self._norm("model.norm", hidden) @ self._tensor(head).T
        return logits

    def prompt(self, ids: Int64s) -> tuple[Prompt, Floats]:
        """Return the input of caches, and the logits [n, vocabulary] of dense attention."""
        positions, layers = np.arange(len(ids)), []
        hidden = self._tensor("model.embed_tokens.weight")[ids]
        for layer, project in enumerate(self.projections):
            x = self._norm(f"model.layers.{layer}.input_layernorm", hidden)
            keys, values = project(x, positions)
            mixed, sums = attend_prompt(self._queries(layer, x, positions), keys, values)
            layers.append(LayerPrompt(x, keys, values, sums))
            hidden = hidden + self._apply(f"model.layers.{layer}.self_attn.o_proj", mixed.reshape(len(ids), -1))
            hidden = hidden + self._mlp(layer, hidden)
        return tuple(layers), self._logits(hidden)

    def cache(self, prompt: Prompt, settings: AerpSettings, cells: CellSettings) -> list[AerpLayer]:
        layers = []
        for number, one in enumerate(prompt):
            layer = AerpLayer(settings, self.shape, self.projections[number], cells, number)
            layer.prefill(one.keys, one.values, one.sums, one.x)
            layers.append(layer)
        return layers

    def step(self, token: int, cache: list[AerpLayer]) -> Floats:
        position = np.array([cache[0].slots.newest + 1])
        hidden = self._tensor("model.embed_tokens.weight")[[token]]
        for number, layer in enumerate(cache):
            x = self._norm(f"model.layers.{number}.input_layernorm", hidden)
            keys, values = self.projections[number](x, position)
            mixed = layer.step(self._queries(number, x, position)[0], keys[0], values[0], x[0])
            hidden = hidden + self._apply(f"model.layers.{number}.self_attn.o_proj", mixed.reshape(1, -1))
            hidden = hidden + self._mlp(number, hidden)
        logits: Floats = self._logits(hidden)[0]
        return logits
