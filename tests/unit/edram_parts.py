"""Helpers of the eDRAM tests: the inputs of an attention layer and configurations of the accelerator model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmcache.arrays import Doubles, Floats
from llmcache.papers.edram.accelerator import Outcome, evaluate
from llmcache.papers.edram.aerp import LayerShape, Projections, Rope, attend_prompt
from llmcache.papers.edram.constants import PAPER, Profile
from llmcache.papers.edram.systems import MODELS, SYSTEMS, WORKLOADS, AcceleratorSystem, Configuration


@dataclass
class Stream:
    """The inputs of an attention layer: x of every token, its queries, and the key and value projections."""

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
        # One token at a time, as in decoding: a product of many rows rounds differently.
        rows = [self.project(self.x[t : t + 1], np.array([t])) for t in range(len(self.x))]
        return np.concatenate([keys for keys, _ in rows]), np.concatenate([values for _, values in rows])


def column_sums(queries: Floats, keys: Floats) -> Doubles:
    """Return the attention that each prompt token receives from the queries of its head group [kv_heads, n]."""
    return attend_prompt(queries, keys, keys[:, :, :0])[1]


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
