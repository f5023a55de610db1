"""A small model's configuration and weights as its directory has them: config.json and model.safetensors, as numpy arrays.

Only what the accuracy harness runs: one file, float32, the layers of Llama, Mistral and Qwen2 without scaled rotations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import DataError, UsageError

Floats = NDArray[np.float32]
MODEL_TYPES = ("llama", "mistral", "qwen2")
_HINT = "a directory with config.json and model.safetensors (float32) of a Llama, Mistral or Qwen2 model is needed"
_LONGEST_HEADER = 1 << 26


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder, as its config.json names them."""

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
        """Returns the sizes in the plain data of a config.json; DataError naming what is missing or not supported."""
        if not isinstance(data, dict) or data.get("model_type") not in MODEL_TYPES:
            found = data.get("model_type") if isinstance(data, dict) else None
            raise DataError(f"model_type: {found!r}, known are {', '.join(MODEL_TYPES)}", _HINT)
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default" or data.get("use_sliding_window", False):
            raise DataError(f"rope_parameters: {rope}, only default rotations over all tokens are supported", _HINT)
        heads, hidden = _whole(data, "num_attention_heads"), _whole(data, "hidden_size")
        return cls(
            layers=_whole(data, "num_hidden_layers"),
            heads=heads,
            kv_heads=_whole(data, "num_key_value_heads", heads),
            head_dim=_whole(data, "head_dim", hidden // heads),
            hidden=hidden,
            vocabulary=_whole(data, "vocab_size"),
            theta=float(rope.get("rope_theta") or data.get("rope_theta") or 10_000.0),
            eps=float(data.get("rms_norm_eps", 1e-6)),
        )


def read_model(directory: str | Path) -> tuple[Config, dict[str, Floats]]:
    """Returns configuration and tensors by name of the model in `directory`; UsageError if it is not there, DataError."""
    root = Path(directory)
    try:
        config = json.loads((root / "config.json").read_bytes())
        raw = (root / "model.safetensors").read_bytes()
    except OSError as error:
        raise UsageError(f"model: '{root}' cannot be read: {error.strerror}", _HINT) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"config.json: no JSON: {error}", _HINT) from error
    return Config.parse(config), parse_tensors(raw)


def parse_tensors(raw: bytes) -> dict[str, Floats]:
    """Returns the tensors of a safetensors file of float32; DataError naming the one that does not fit."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or not 0 < length <= min(_LONGEST_HEADER, len(raw) - 8):
        raise DataError(f"model.safetensors: a header of {length} bytes in a file of {len(raw)}", _HINT)
    try:
        header = json.loads(raw[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise DataError(f"model.safetensors: its header is no JSON: {error}", _HINT) from error
    body = raw[8 + length :]
    return {name: _tensor(name, entry, body) for name, entry in header.items() if name != "__metadata__"}


def _tensor(name: str, entry: Any, body: bytes) -> Floats:
    try:
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        if entry["dtype"] != "F32":
            raise DataError(f"{name}: {entry['dtype']}, F32 is needed", _HINT)
        return np.frombuffer(body[begin:end], np.float32).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{name}: {error}", _HINT) from error


def _whole(data: dict[str, Any], name: str, default: int | None = None) -> int:
    value = data.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{name}: {value!r}, a whole number of at least 1 is needed", _HINT)
    return value
