"""What a model takes while it decodes: weights, KV cache, activations, and the runtime's own. *Modelled.*

Source: hillinfer.txt, figure 2 and section 1. Its "about 30 GB" are GiB: 14.4 GiB of weights and 16 GiB of KV cache are
32.6 GB of 10**9 bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from llmcache.kv.planning.models import ModelShape

RUNTIME_BYTES = 500 << 20
"""Assumed: a CUDA context with its libraries takes about half a GiB; the paper does not tell it apart."""
ACTIVATION_BYTES = 2
"""Assumed: activations in half precision."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by what they are for. `activations`: of one decode step, logits included."""

    weights: float
    kv: float
    activations: float
    runtime: float

    @property
    def total(self) -> float:
        """All of it, bytes."""
        return self.weights + self.kv + self.activations + self.runtime

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, bytes."""
        return {**asdict(self), "total": self.total}


def activation_bytes(model: ModelShape, batch: int) -> float:
    """Bytes of what one decode step of `batch` sequences keeps besides KV: the widest layer, and logits in float32."""
    widest = 4 * model.hidden + (2 if model.gated else 1) * model.widest_ffn
    return batch * (ACTIVATION_BYTES * widest + 4 * model.vocabulary)


def memory_use(model: ModelShape, context: int, batch: int) -> MemoryUse:
    """Returns what decoding at `context` tokens takes with the whole KV cache kept. Source: figure 2 (full KV cache)."""
    _check(context, batch)
    return MemoryUse(model.weight_bytes, model.kv_bytes(context, batch), activation_bytes(model, batch), RUNTIME_BYTES)


def largest_context(model: ModelShape, batch: int, memory_bytes: float) -> int:
    """Returns the most tokens of context for which `memory_bytes` hold everything; 0 if not even the weights fit."""
    fixed = memory_use(model, 0, batch).total
    return max(0, int((memory_bytes - fixed) // (model.token_bytes * batch)))


def _check(context: int, batch: int) -> None:
    if context < 0:
        raise ValueError(f"context: {context}, at least 0 is needed")
    if batch < 1:
        raise ValueError(f"batch: {batch}, at least 1 is needed")
