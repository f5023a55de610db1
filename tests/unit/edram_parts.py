"""What tests of eDRAM share: streams that a model would hand to a layer, a decoder, the accelerator model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.accelerator import Outcome, evaluate
from llmcache.edram.aerp import LayerShape, Projections, Rope, attend_prompt
from llmcache.edram.constants import PAPER, Profile
from llmcache.edram.decoder import Config, Decoder
from llmcache.edram.systems import MODELS, SYSTEMS, WORKLOADS, AcceleratorSystem, Configuration

Floats = NDArray[np.float32]


@dataclass
class Stream:
    """What a model would hand to a layer: x of every token, its queries, and its projections."""

    shape: LayerShape
    x: Floats
    queries: Floats
    project: Projections

    @classmethod
    def of(cls, shape: LayerShape, tokens: int, seed: int, flat: bool = False) -> Stream:
        random = np.random.default_rng(seed)
        wide = (shape.channels, shape.kv_heads * shape.head_dim)
        weights = [random.standard_normal(wide, np.float32) for _ in range(2)]
        queries = random.standard_normal((tokens, shape.heads, shape.head_dim), np.float32)
        x = random.standard_normal((tokens, shape.channels), np.float32)
        return cls(shape, x, queries * (not flat), Projections(weights[0], weights[1], shape.kv_heads, Rope()))

    def kv(self) -> tuple[Floats, Floats]:
        # A token at a time, as decoding does: a product of many rows rounds differently.
        rows = [self.project(self.x[t : t + 1], np.array([t])) for t in range(len(self.x))]
        return np.concatenate([keys for keys, _ in rows]), np.concatenate([values for _, values in rows])


def column_sums(queries: Floats, keys: Floats) -> NDArray[np.float64]:
    """What each token of a prompt gathers from all queries of its group of heads, itself included [kv_heads, n]."""
    return attend_prompt(queries, keys, keys[:, :, :0])[1]


def random_decoder(*, heads: int = 4, kv_heads: int = 4, dim: int = 8, layers: int = 2, seed: int = 0) -> Decoder:
    """A decoder of random weights: says nothing about accuracy, much about whether two ways of computing it are one."""
    hidden, vocabulary = heads * dim, 50
    config = Config(layers, heads, kv_heads, dim, hidden, vocabulary, 10_000.0, 1e-6)
    shapes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        sizes = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim, "o_proj": hidden}
        shapes |= {f"{name}.self_attn.{part}": (size, hidden) for part, size in sizes.items()}
        shapes |= {f"{name}.mlp.{part}_proj": (2 * hidden, hidden) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj"] = (hidden, 2 * hidden)
    random = np.random.default_rng(seed)
    tensors = {f"{name}.weight": random.standard_normal(shape, np.float32) * 0.3 for name, shape in shapes.items()}
    tensors |= {f"{name}_proj.bias": random.standard_normal(kv_heads * dim, np.float32) for name in _kv_names(layers)}
    norms = ["model.norm", *(f"model.layers.{i}.{n}_layernorm" for i in range(layers) for n in ("input", "post_attention"))]
    return Decoder(config, tensors | {f"{name}.weight": np.ones(hidden, np.float32) for name in norms})


def _kv_names(layers: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{part}" for layer in range(layers) for part in ("k", "v")]


def with_hardware(system: AcceleratorSystem, **changes: Any) -> AcceleratorSystem:
    return replace(system, hardware=replace(system.hardware, **changes))


def configuration(
    model: str = "llama2-7b",
    task: str = "PG19",
    system: str | AcceleratorSystem = "Kelle+eDRAM",
    profile: Profile = PAPER,
    **workload: Any,
) -> Configuration:
    found = SYSTEMS[system] if isinstance(system, str) else system
    return Configuration(MODELS[model], replace(WORKLOADS[task], **workload), found, profile)


def outcome(*args: Any, **kwargs: Any) -> Outcome:
    return evaluate([configuration(*args, **kwargs)])[0]
