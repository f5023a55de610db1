"""Latency per decode token of HillInfer and its baselines, from bytes moved and a pipeline of layers. *Modelled*.

A layer is evaluated (by the processor, by the device, or by the host after reading it), then the selected tokens are
fetched, then it computes (a roofline). A system that looks ahead evaluates and fetches layer i+1 while layer i computes,
so a layer takes the longer of both; otherwise it takes their sum. Within a stage, different resources overlap if the
system allows it. Experts on the host that a step of an MoE model uses are fetched like KV data, as if they were known
one layer ahead. Nothing is fitted.

Source: hillinfer.txt, sections 3.2, 3.3 (figure 6) and 4.2; where it leaves something open, the reading most favorable
to the baseline is used. Not modelled: moves of BKP (they are off the critical path), and the baselines' frameworks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcache.kv.planning.hardware import Hardware
from llmcache.kv.planning.placement import KEYS, Placement, Room, Workload, room, rule_share
from llmcache.model.shapes import ModelShape

_NS = 1e9
SCORE_BYTES = 4
"""Bytes on the link, per token and key head: offset and score, two bytes each. Source: section 4.4, "4n bytes"."""


@dataclass(frozen=True)
class System:
    """How a system works. `in_storage`: the SSD scores its keys (HIE). `ahead`: layer i+1 while i computes.

    `evaluates`: it scores tokens at each step. `abstracts`: by two keys per chunk. `piped`: reading and scoring overlap.
    `balanced`: pools by equation (1). `keeps`: pools keep important tokens (BKP). `sparse`: it attends to alpha * N tokens.
    """

    name: str
    title: str
    evaluates: bool = True
    sparse: bool = True
    in_storage: bool = False
    abstracts: bool = False
    piped: bool = True
    ahead: bool = True
    balanced: bool = False
    keeps: bool = False


DESIGNS = ("hie", "bkp", "app")  # designs of HillInfer that can be left out. Source: hillinfer.txt, sections 3.2 and 3.3.


@dataclass(frozen=True)
class Variant:
    """A policy and, for HillInfer, which of `DESIGNS` are left out."""

    policy: str
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-no-".join([self.policy, *self.without])

    def titled(self, title: str) -> str:
        return title + (f" without {', '.join(self.without).upper()}" if self.without else "")


def hillinfer(*without: str) -> System:
    """Return HillInfer, without some of `DESIGNS`.

    Without HIE the host evaluates; without BKP the location of important tokens is arbitrary; without APP nothing overlaps
    the computation, and the host's pool is as large as possible.
    """
    own = Variant("hillinfer", without)
    hie, bkp, app = (part not in without for part in DESIGNS)
    return System(own.name, own.titled("HillInfer"), in_storage=hie, keeps=bkp, ahead=app, balanced=app)


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("full", "full cache", evaluates=False, sparse=False),
        System("h2o", "H2O-like", piped=False, ahead=False),
        System("prefetch", "prefetch-based"),
        System("leoam", "LeoAM-like", abstracts=True),
        hillinfer(),
    )
}
"""The systems of section 4.2, in its order: baselines, then HillInfer."""


def place(system: System, found: Room, kv_bytes: float, hardware: Hardware, cached: bool = False) -> Placement:
    """Return the placement of the KV cache: on the GPU if it fits there, else on the host, up to its share and M0."""
    if found.gpu_kv:
        return Placement(kv_bytes, 0.0, 0.0)
    share = rule_share(hardware, cached) if system.balanced else 1.0
    host = min(share * kv_bytes, found.host_kv)
    return Placement(0.0, host, kv_bytes - host)


@dataclass(frozen=True)
class Latency:
    """*Modelled* times (ns) of one decode step: one token of every sequence of the batch.

    `stages`: each as if alone; `exposed`: the part of evaluate and fetch that nothing hides. `busy`: by resource. `moved`:
    bytes by link; `device internal` never leaves the device. `prefill_ns`: for the whole context, once.
    """

    system: System
    machine: str
    token_ns: float
    prefill_ns: float
    stages: Mapping[str, float]
    exposed_ns: float
    busy: Mapping[str, float]
    moved: Mapping[str, float]
    places: Placement
    found: Room

    @property
    def idle_share(self) -> float:
        """Share of a step without computation, 0..1. Source: section 3.3, "GPU idle time"."""
        return 1 - self.stages["compute"] / self.token_ns

    def end_to_end_ns(self, output_tokens: int) -> float:
        return self.prefill_ns + output_tokens * self.token_ns

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.system.name,
            "kind": "modelled",
            "machine": self.machine,
            "token_ns": self.token_ns,
            "prefill_ns": self.prefill_ns,
            "stages_ns": dict(self.stages),
            "exposed_ns": self.exposed_ns,
            "busy_ns": dict(self.busy),
            "moved_bytes": dict(self.moved),
            "idle_share": self.idle_share,
            "placement": self.places.to_json(),
        }


def latency(
    policy: str | System, hardware: Hardware, model: ModelShape, workload: Workload, places: Placement | None = None
) -> Latency:
    """Return the modelled latency of `policy`, a system or its name; `places` replaces the system's placement."""
    system = SYSTEMS[policy] if isinstance(policy, str) else policy
    share = workload.alpha if system.sparse else 1.0
    found = room(hardware, model, workload, share)
    kv_bytes = model.kv_bytes(workload.context, workload.batch)
    places = place(system, found, kv_bytes, hardware, workload.device_caches) if places is None else places
    layers, batch = model.layers, workload.batch
    host, ssd = places.host / layers, places.ssd / layers

    # Bytes of one layer, all sequences. Evaluating the tokens: the keys are half of each pool.
    scan = cpu_keys = device_keys = scores = 0.0
    if system.in_storage:
        cpu_keys, device_keys = host / 2, ssd / 2
        scores = SCORE_BYTES * model.kv_heads * (ssd / (2 * model.key_bytes))
    elif system.evaluates:
        part = min(1.0, 2 / workload.chunk_tokens) if system.abstracts else 1.0
        values = 2.0 if workload.host_evaluates != KEYS and not system.abstracts else 1.0
        scan, cpu_keys = part * values * ssd / 2, part * (host + ssd) / 2
    # Fetching the selected tokens: adjacent tokens, keys and values separately; the full cache is read in sequence.
    attended = share * places.total / layers
    fetched = attended * _important_on_ssd(system, workload, places) if system.sparse else ssd
    if scan and not system.abstracts and workload.host_evaluates != KEYS:
        fetched = 0.0  # evaluation has read them already, with their values
    tokens = workload.chunk_tokens if system.abstracts else workload.fetch_tokens
    request = tokens * model.key_bytes if system.sparse else float(1 << 20)
    from_device, from_ssd = (fetched, 0.0) if system.in_storage else (0.0, fetched)
    gpu_link = 0.0
    if hardware.has_gpu:
        crossing = model.crossing_bytes(found.weights_on_host, batch) / layers
        gpu_link = (attended if places.gpu == 0 else 0.0) + crossing
    flops = 4.0 * model.heads * model.head_dim * share * workload.context * batch + 2.0 * model.layer_parameters * batch

    # Seconds of each activity of one layer, as if it were alone. Assumed: one command to execute, then one to read;
    # those of several sequences are queued together.
    wait = hardware.device_latency_ns / _NS if system.in_storage and ssd else 0.0
    scoring = hardware.device_score_rate(places.ssd / 2, workload.device_caches)
    scan_s, cpu_s = scan / hardware.ssd_bytes_per_s, cpu_keys / hardware.score_bytes_per_s
    device_s, scores_s = device_keys / scoring + wait, scores / hardware.device_link_bytes_per_s
    device_fetch_s = from_device / min(hardware.device_link_bytes_per_s, hardware.device_bytes_per_s) + wait
    fetch_s, gpu_link_s = from_ssd / hardware.ssd_rate(request), gpu_link / hardware.gpu_link_bytes_per_s
    reading = (model.layer_weight_bytes(batch) + attended) / hardware.gpu_bytes_per_s
    compute = max(reading, flops / hardware.gpu_flops)

    # Evaluation ends when all tokens are scored, the fetch when the selected ones are attended to; tokens on the SSD
    # take the longer path.
    together: Callable[[float, float], float] = max if system.piped else operator.add
    evaluate = max(cpu_s, device_s, scores_s) if system.in_storage else together(scan_s, cpu_s)
    fetch = together(fetch_s + device_fetch_s, gpu_link_s)
    layer_s = max(compute, evaluate + fetch) if system.ahead else evaluate + fetch + compute
    output_flops = 2.0 * model.vocabulary * model.hidden * batch
    output_s = max(model.output_weight_bytes / hardware.gpu_bytes_per_s, output_flops / hardware.gpu_flops)
    link_s = scan_s + scores_s + fetch_s + device_fetch_s
    busy = {"compute": compute, "cpu": cpu_s, "device": device_s, "link": link_s, "gpu link": gpu_link_s}
    moved = {
        "ssd to host": scan + from_ssd,
        "device to host": scores + from_device,
        "device internal": device_keys + from_device,
        "host to gpu": gpu_link,
    }
    return Latency(
        system=system,
        machine=hardware.name,
        token_ns=_NS * (layers * layer_s + output_s),
        prefill_ns=_NS * _prefill_s(hardware, model, workload, places, found),
        stages={
            "evaluate": _NS * layers * evaluate,
            "fetch": _NS * layers * fetch,
            "compute": _NS * (layers * compute + output_s),
        },
        exposed_ns=_NS * layers * (layer_s - compute),
        busy={name: _NS * layers * seconds for name, seconds in busy.items()},
        moved={name: layers * size for name, size in moved.items()},
        places=places,
        found=found,
    )


def _important_on_ssd(system: System, workload: Workload, places: Placement) -> float:
    share = workload.important_on_ssd_bkp if system.keeps else None
    share = workload.important_on_ssd if share is None else share
    return places.ssd_share if share is None else (share if places.ssd else 0.0)


def _prefill_s(hardware: Hardware, model: ModelShape, workload: Workload, places: Placement, found: Room) -> float:
    """Return the seconds for the whole context: products and causal attention, overlapped with writing the KV cache.

    Assumed: storage writes as fast as it reads.
    """
    tokens = float(workload.context * workload.batch)
    products = 2.0 * model.layers * model.layer_parameters * tokens
    attention = 2.0 * model.layers * model.heads * model.head_dim * workload.context * tokens
    crossing = places.host + places.ssd + found.weights_on_host if hardware.has_gpu else 0.0
    return max(
        (products + attention) / hardware.gpu_flops,
        crossing / hardware.gpu_link_bytes_per_s,
        places.ssd / hardware.device_link_bytes_per_s,
    )
