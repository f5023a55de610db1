"""Where weights and KV cache lie, and how large the two pools of HillInfer are. *Modelled.*

Source: hillinfer.txt, section 3.1 (the GPU has weights, activations and what is attended; the CPU a large portion of the
KV cache, and weights of larger models; the SSD the rest) and 3.3, equation (1): Mc/fc = Ms/fs with Mc < M0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from llmcache.kv.planning.hardware import Hardware
from llmcache.kv.planning.memory import activation_bytes
from llmcache.kv.planning.models import ModelShape
from llmcache.kv.planning.workload import Workload

BUFFERED_LAYERS = 2
"""Layers whose attended KV is on the GPU at a time: the one that computes, the one that is fetched."""


@dataclass(frozen=True)
class Room:
    """What the weights leave, bytes: `host_kv` is M0. `gpu_kv`: the whole KV cache, or 0 (then it lies in the pools).

    `weights_on_host`: weights that the GPU has no room for, experts before all others. `lacking`: bytes that weights alone
    have no room for anywhere.
    """

    gpu_kv: float
    host_kv: float
    weights_on_gpu: float
    weights_on_host: float
    lacking: float

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, bytes."""
        return asdict(self)


@dataclass(frozen=True)
class Placement:
    """Bytes of the KV cache in each tier."""

    gpu: float
    host: float
    ssd: float

    @property
    def total(self) -> float:
        """The whole KV cache, bytes."""
        return self.gpu + self.host + self.ssd

    @property
    def ssd_share(self) -> float:
        """The share of the KV cache on the SSD, 0 .. 1."""
        return self.ssd / self.total if self.total else 0.0

    @property
    def beta(self) -> float:
        """Mc / Ms, infinite if nothing is on the SSD."""
        return self.host / self.ssd if self.ssd else float("inf")

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, bytes; beta is null if nothing is on the SSD."""
        return {**asdict(self), "ssd_share": self.ssd_share, "beta": self.beta if self.ssd else None}


def room(hardware: Hardware, model: ModelShape, workload: Workload, attended_share: float) -> Room:
    """Returns where weights lie and what is left for KV, for a system that attends to `attended_share` of the tokens."""
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
    """The share of the KV cache that equation (1) gives to the CPU: fc / (fc + fs), that is beta = fc / fs.

    `cached`: the device scores from its own memory; its pool, which the rule makes small, is taken to fit in there.
    """
    device = hardware.device_score_rate(0, cached)
    return hardware.score_bytes_per_s / (hardware.score_bytes_per_s + device)


def by_capacity(found: Room, kv_bytes: float) -> Placement:
    """The host first, the SSD for what it has no room for: what systems do that balance nothing."""
    if found.gpu_kv:
        return Placement(kv_bytes, 0.0, 0.0)
    host = min(kv_bytes, found.host_kv)
    return Placement(0.0, host, kv_bytes - host)


def by_rule(found: Room, kv_bytes: float, hardware: Hardware, cached: bool = False) -> Placement:
    """Equation (1): Mc = fc / (fc + fs) of it, at most M0."""
    if found.gpu_kv:
        return Placement(kv_bytes, 0.0, 0.0)
    host = min(rule_share(hardware, cached) * kv_bytes, found.host_kv)
    return Placement(0.0, host, kv_bytes - host)


def by_beta(kv_bytes: float, beta: float, most_host_bytes: float = float("inf")) -> Placement:
    """A given ratio beta = Mc / Ms, Mc at most `most_host_bytes`; for sweeps. ValueError: beta is negative."""
    if beta < 0:
        raise ValueError(f"beta: {beta}, at least 0 is needed")
    host = min(kv_bytes * beta / (1 + beta), most_host_bytes)
    return Placement(0.0, host, kv_bytes - host)


def by_ssd_share(kv_bytes: float, share: float) -> Placement:
    """A given share of it (0 .. 1) on the SSD, as in figure 3a."""
    if not 0 <= share <= 1:
        raise ValueError(f"share: {share}, 0 .. 1 is needed")
    return Placement(0.0, (1 - share) * kv_bytes, share * kv_bytes)
