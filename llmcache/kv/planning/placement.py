"""The workload, its memory, and the placement of weights and KV cache: the two pools of HillInfer. *Modelled.*

Source: hillinfer.txt, figure 2 and section 1, for memory (its "about 30 GB" are GiB: 14.4 GiB of weights and 16 GiB of
KV cache); section 3.1 (the GPU has weights, activations and attended tokens; the CPU a large portion of the KV cache,
and weights of larger models; the SSD the rest) and 3.3, equation (1): Mc/fc = Ms/fs with Mc < M0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from llmcache.kv.planning.hardware import RUNTIME_BYTES, Hardware
from llmcache.model.shapes import ModelShape

KEYS, KEYS_AND_VALUES = "keys", "keys and values"
ACTIVATION_BYTES = 2  # assumed: activations in half precision
BUFFERED_LAYERS = 2  # layers whose attended KV is on the GPU at a time: the one being computed and the one being fetched


@dataclass(frozen=True)
class Workload:
    """Decoding `batch` sequences of `context` tokens each, with attention to the share `alpha`.

    `host_evaluates`: data that a system without in-storage evaluation reads from the SSD to score tokens. Keys are enough;
    the paper speaks of KV data (section 3.2, figure 3a). `chunk_tokens`: of LeoAM's abstracts. `fetch_tokens`: adjacent
    tokens fetched together. `important_on_ssd`: the share of the important tokens on the SSD; None: as of all tokens.
    `important_on_ssd_bkp`: the same with BKP; None: BKP finds no locality. `device_caches`: the device scores keys that fit
    in its own memory from there, not from flash.
    """

    context: int
    batch: int = 8
    alpha: float = 0.2
    output_tokens: int = 128
    host_evaluates: str = KEYS
    chunk_tokens: int = 16
    fetch_tokens: int = 1
    important_on_ssd: float | None = None
    important_on_ssd_bkp: float | None = None
    device_caches: bool = False


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by purpose. `activations`: of one decode step, logits included."""

    weights: float
    kv: float
    activations: float
    runtime: float

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.activations + self.runtime

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def activation_bytes(model: ModelShape, batch: int) -> float:
    """Return the bytes of one decode step besides KV: the widest layer, and logits in float32."""
    widest = 4 * model.hidden + (2 if model.gated else 1) * model.widest_ffn
    return batch * (ACTIVATION_BYTES * widest + 4 * model.vocabulary)


def memory_use(model: ModelShape, context: int, batch: int) -> MemoryUse:
    """Return the memory for decoding at `context` tokens with the whole KV cache. Source: figure 2."""
    return MemoryUse(model.weight_bytes, model.kv_bytes(context, batch), activation_bytes(model, batch), RUNTIME_BYTES)


def largest_context(model: ModelShape, batch: int, memory_bytes: float) -> int:
    """Return the largest context (tokens) for which everything fits in `memory_bytes`; 0 if not even the weights fit."""
    fixed = memory_use(model, 0, batch).total
    return max(0, int((memory_bytes - fixed) // (model.token_bytes * batch)))


@dataclass(frozen=True)
class Room:
    """Memory left by the weights, bytes: `host_kv` is M0. `gpu_kv`: the whole KV cache, or 0 if it does not fit.

    `weights_on_host`: weights that do not fit on the GPU, experts first. `lacking`: bytes of weights that fit nowhere.
    """

    gpu_kv: float
    host_kv: float
    weights_on_gpu: float
    weights_on_host: float
    lacking: float


@dataclass(frozen=True)
class Placement:
    """Bytes of the KV cache in each tier."""

    gpu: float
    host: float
    ssd: float

    @property
    def total(self) -> float:
        return self.gpu + self.host + self.ssd

    @property
    def ssd_share(self) -> float:
        return self.ssd / self.total if self.total else 0.0

    @property
    def beta(self) -> float:
        return self.host / self.ssd if self.ssd else float("inf")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ssd_share": self.ssd_share, "beta": self.beta if self.ssd else None}


def room(hardware: Hardware, model: ModelShape, workload: Workload, attended_share: float) -> Room:
    """Return the placement of weights and the memory left for KV."""
    kv = model.kv_bytes(workload.context, workload.batch)
    working = activation_bytes(model, workload.batch) + min(1.0, BUFFERED_LAYERS / model.layers) * attended_share * kv
    host = hardware.host_bytes - hardware.host_reserved_bytes
    if not hardware.has_gpu:
        left = host - model.weight_bytes - activation_bytes(model, workload.batch)
        return Room(0.0, max(0.0, left), 0.0, model.weight_bytes, max(0.0, -left))
    gpu = hardware.gpu_bytes - hardware.gpu_reserved_bytes
    if model.weight_bytes + activation_bytes(model, workload.batch) + kv <= gpu:
        return Room(kv, max(0.0, host), model.weight_bytes, 0.0, 0.0)
    on_gpu = min(model.weight_bytes, max(0.0, gpu - working))
    on_host = model.weight_bytes - on_gpu
    return Room(0.0, max(0.0, host - on_host), on_gpu, on_host, max(0.0, on_host - max(0.0, host)))


def rule_share(hardware: Hardware, cached: bool = False) -> float:
    """Return the share of the KV cache that equation (1) assigns to the CPU: fc / (fc + fs), that is beta = fc / fs.

    `cached`: the device scores from its own memory; its pool, which the rule makes small, is assumed to fit.
    """
    device = hardware.device_score_rate(0, cached)
    return hardware.score_bytes_per_s / (hardware.score_bytes_per_s + device)


def by_beta(kv_bytes: float, beta: float) -> Placement:
    """Return the placement for a given ratio beta = Mc / Ms."""
    host = kv_bytes * beta / (1 + beta)
    return Placement(0.0, host, kv_bytes - host)


def by_ssd_share(kv_bytes: float, share: float) -> Placement:
    """Return the placement for a given share (0..1) on the SSD, as in figure 3a."""
    return Placement(0.0, (1 - share) * kv_bytes, share * kv_bytes)
