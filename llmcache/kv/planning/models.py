"""Shapes of models: what weighs how much, and what a token leaves in the KV cache; the paper's models by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

KV_BYTES: dict[str, float] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes of a number of the KV cache, by type; int8 carries a scale of 4 bytes per row besides."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class ModelShape:
    """A decoder: sizes of its parts. `gated`: its MLP has three matrices (SwiGLU), not two. `tied`: one embedding.

    `weight_bits` per parameter (16: half precision). `positions`: rows of a learned position table (OPT, GPT-2), else 0.
    `context_limit`: tokens that the model was made for, 0 if it does not say. `notes`: what the shape leaves out.
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

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
                raise ValueError(f"{name}: {value!r}, a whole number of at least 1 is needed")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads}, heads ({self.heads}) must be a multiple of it")
        if self.kv_dtype not in KV_BYTES:
            raise ValueError(f"kv_dtype: '{self.kv_dtype}', known are {', '.join(KV_BYTES)}")
        if not 0 < self.weight_bits <= 64:
            raise ValueError(f"weight_bits: {self.weight_bits}, more than 0 and at most 64 is needed")

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: projections of attention and the matrices of the MLP; norms and biases are left out."""
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """All weights: layers, token embedding, output projection, position table."""
        tables = (1 if self.tied else 2) * self.vocabulary * self.hidden + self.positions * self.hidden
        return self.layers * self.layer_parameters + tables

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return round(self.parameters * self.weight_bits / 8)

    @property
    def layer_weight_bytes(self) -> float:
        """Bytes of the weights of one layer."""
        return self.layer_parameters * self.weight_bits / 8

    @property
    def output_weight_bytes(self) -> float:
        """Bytes of the output projection, which a step reads once."""
        return self.vocabulary * self.hidden * self.weight_bits / 8

    @property
    def key_bytes(self) -> float:
        """Bytes of the keys of one token in one layer; its values take as many."""
        scale = SCALE_BYTES if self.kv_dtype == "int8" else 0
        return self.kv_heads * (self.head_dim * KV_BYTES[self.kv_dtype] + scale)

    @property
    def token_bytes(self) -> float:
        """Bytes that a token takes in the KV cache of all layers."""
        return 2 * self.layers * self.key_bytes

    def kv_bytes(self, context: int, batch: int) -> float:
        """Bytes of the whole KV cache of `batch` sequences of `context` tokens."""
        return self.token_bytes * context * batch

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, with what follows from it."""
        derived = {"parameters": self.parameters, "weight_bytes": self.weight_bytes, "kv_token_bytes": self.token_bytes}
        return {**asdict(self), **derived}


# hillinfer.txt, section 4.2, "Models"; shapes from the models' public config.json files.
QWEN_7B = ModelShape("Qwen-7B", 32, 4096, 32, 32, 128, 11008, 151936, context_limit=8192)
LLAMA2_13B = ModelShape("Llama2-13B", 40, 5120, 40, 40, 128, 13824, 32000, context_limit=4096)
LONGCHAT_7B = ModelShape("LongChat-7B", 32, 4096, 32, 32, 128, 11008, 32000, context_limit=32768)
OPT_6_7B = ModelShape(
    "OPT-6.7B", 32, 4096, 32, 32, 128, 16384, 50272, gated=False, tied=True, positions=2050, context_limit=2048
)

MODELS: dict[str, ModelShape] = {model.name: model for model in (QWEN_7B, LLAMA2_13B, LONGCHAT_7B, OPT_6_7B)}
"""The paper's models by name."""
