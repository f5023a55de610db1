"""What computes a layer in a benchmark: an *emulated* accelerator, which waits as long as one takes, or this processor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmcache.kv.pipeline.attention import attention
from llmcache.kv.planning import Hardware, ModelShape
from llmcache.kv.tiers import Gathered
from llmcache.units import format_duration

_NS = 1e9
Floats = NDArray[np.float32]


class Accelerator(Protocol):
    """Computes one layer of one decode step."""

    title: str
    emulated: bool

    def compute(self, queries: Floats, gathered: Gathered) -> None:
        """Attends with `queries` [batch, heads, dim] to what was gathered; returns when a layer's computing is over."""


class Emulated:
    """*Emulated*: waits for as long as `layer_ns` says for a number of attended tokens, and computes nothing.

    A processor that waits is free for evaluation and fetches, as it is beside a real accelerator.
    """

    emulated = True

    def __init__(self, title: str, layer_ns: Callable[[int], float]) -> None:
        self.title, self.layer_ns = title, layer_ns

    def compute(self, queries: Floats, gathered: Gathered) -> None:
        """See `Accelerator.compute`."""
        time.sleep(self.layer_ns(gathered.positions.shape[2]) / _NS)


class Processor:
    """Really computes, with numpy: attention alone, in float32, without the layer's other products."""

    title = "this processor, attention alone, numpy float32"
    emulated = False

    def compute(self, queries: Floats, gathered: Gathered) -> None:
        """See `Accelerator.compute`."""
        attention(queries, gathered.keys, gathered.values)


def modelled(hardware: Hardware, model: ModelShape, batch: int) -> Emulated:
    """Returns an emulated accelerator with the modelled speed of that of `hardware`: a roofline of memory and products.

    Source: as `planning.latency`, whose host-to-accelerator link is left out: here everything is in one memory.
    """

    def layer_ns(tokens: int) -> float:
        attended = 2.0 * model.key_bytes * tokens * batch
        flops = batch * (2.0 * model.layer_parameters + 4.0 * model.heads * model.head_dim * tokens)
        reading = (model.layer_weight_bytes(batch) + attended) / hardware.gpu_bytes_per_s
        return _NS * max(reading, flops / hardware.gpu_flops)

    return Emulated(f"emulated: that of {hardware.title}, {model.name}", layer_ns)


def fixed(duration_ns: int) -> Emulated:
    """Returns an emulated accelerator that takes `duration_ns` for every layer."""
    return Emulated(f"emulated: {format_duration(duration_ns)} a layer, as given", lambda tokens: duration_ns)
