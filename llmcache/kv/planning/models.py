"""Shapes of models: what weighs how much, and what a token leaves in the KV cache; the paper's models by name."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

KV_BYTES: dict[str, float] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes of a number of the KV cache, by type; int8 carries a scale of 4 bytes per row besides."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class MixtureMlp:
    """The MLPs of `layers` layers that are mixtures: `experts` of width `ffn`, of which a router has a token use `used`.

    `shared_ffn`: width of what each token uses besides, 0 if there is nothing.
    """

    layers: int
    experts: int
    used: int
    ffn: int
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.used <= self.experts:
            raise ValueError(f"used: {self.used}, at least 1 and at most the experts ({self.experts}) are needed")
        if self.layers < 1 or self.ffn < 1 or self.shared_ffn < 0:
            raise ValueError(f"layers: {self.layers}, ffn: {self.ffn}, shared_ffn: {self.shared_ffn}, sizes are needed")

    def read_share(self, tokens: int) -> float:
        """Of the experts, the share that `tokens` tokens use together, in the mean, each with any: 0 .. 1.

        Experts that are more popular than others make it less.
        """
        return -math.expm1(tokens * math.log1p(-self.used / self.experts)) if self.used < self.experts else 1.0


@dataclass(frozen=True)
class ModelShape:
    """A decoder: sizes of its parts. `gated`: its MLP has three matrices (SwiGLU), not two. `tied`: one embedding.

    `mixture`: layers that have experts in place of an MLP of width `ffn`.
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
    mixture: MixtureMlp | None = None

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
        if self.mixture is not None and self.mixture.layers > self.layers:
            raise ValueError(f"mixture: {self.mixture.layers} layers of {self.layers}")

    @property
    def expert_parameters(self) -> int:
        """Weights of all experts of all layers, 0 without."""
        mixture = self.mixture
        return 0 if mixture is None else mixture.layers * mixture.experts * self._matrices * self.hidden * mixture.ffn

    @property
    def dense_parameters(self) -> int:
        """Weights of all layers that each token uses: projections of attention, MLPs, what is shared, routers.

        Norms and biases are left out.
        """
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        plain = self.layers * (attention + self._matrices * self.hidden * self.ffn)
        mixture = self.mixture
        if mixture is None:
            return plain
        saved = self._matrices * (self.ffn - mixture.shared_ffn) - mixture.experts
        return plain - mixture.layers * self.hidden * saved

    @property
    def widest_ffn(self) -> int:
        """Width of what a token computes in the widest MLP."""
        mixture = self.mixture
        if mixture is None:
            return self.ffn
        used = mixture.used * mixture.ffn + mixture.shared_ffn
        return used if mixture.layers == self.layers else max(self.ffn, used)

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def layer_parameters(self) -> float:
        """Weights of one layer, in the mean, with which a token is computed."""
        mixture = self.mixture
        used = 0 if mixture is None else self.expert_parameters // mixture.experts * mixture.used
        return (self.dense_parameters + used) / self.layers

    @property
    def parameters(self) -> int:
        """All weights: layers, token embedding, output projection, position table."""
        tables = (1 if self.tied else 2) * self.vocabulary * self.hidden + self.positions * self.hidden
        return self.dense_parameters + self.expert_parameters + tables

    @property
    def token_parameters(self) -> int:
        """Weights with which a token is computed: of the layers, and the output projection."""
        return round(self.layers * self.layer_parameters) + self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return round(self.parameters * self.weight_bits / 8)

    def layer_weight_bytes(self, batch: int) -> float:
        """Bytes of the weights of one layer, in the mean, that a step of `batch` tokens reads."""
        experts = 0.0 if self.mixture is None else self.expert_parameters * self.mixture.read_share(batch)
        return (self.dense_parameters + experts) / self.layers * self.weight_bits / 8

    def crossing_bytes(self, host_bytes: float, batch: int) -> float:
        """What a step of `batch` tokens reads of `host_bytes` of weights on the host, where experts lie first of all."""
        if self.mixture is None:
            return host_bytes
        experts = min(host_bytes, self.expert_parameters * self.weight_bits / 8)
        return host_bytes - experts + experts * self.mixture.read_share(batch)

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
        derived = {
            "parameters": self.parameters,
            "token_parameters": self.token_parameters,
            "weight_bytes": self.weight_bytes,
            "kv_token_bytes": self.token_bytes,
        }
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
