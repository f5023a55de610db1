"""Latency per decode token of HillInfer and its baselines: a pipeline of layers. *Modelled*, nothing is fitted.

A layer is evaluated (by the processor, by the device, or read to the host for it), then what was chosen is fetched, then
it computes (a roofline). A system that looks ahead evaluates and fetches layer i+1 while layer i computes, so a layer
takes the longer of both; one that does not takes their sum. Within a stage, what different resources do overlaps if the
system lets it (reads with scoring, CPU with device, SSD with the GPU's link). The experts on the host that a step of a
mixture uses are fetched as KV data is: as if they were known a layer ahead.

Source: hillinfer.txt, sections 3.2, 3.3 (figure 6) and 4.2. Differs from the paper: it measures; this is a model. Not
modelled: moves of BKP (they are off the critical path), and the software of the frameworks the baselines are built on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmcache.kv.planning.hardware import Hardware
from llmcache.kv.planning.models import ModelShape
from llmcache.kv.planning.placement import Placement, Room, room
from llmcache.kv.planning.work import SYSTEMS, System, Work, layer_work, place
from llmcache.kv.planning.workload import Workload

_NS = 1e9


@dataclass(frozen=True)
class Latency:
    """*Modelled* times (ns) of one decode step: one token of every sequence of the batch.

    `stages`: evaluate, fetch, compute, each as if alone; `exposed`: what of evaluate and fetch nothing hides. `busy`: by
    resource. `moved`: bytes by link. `prefill_ns`: of the whole context, once.
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
        """The share of a step in which nothing computes, 0 .. 1. Source: section 3.3, "GPU idle time"."""
        return 1 - self.stages["compute"] / self.token_ns

    def end_to_end_ns(self, output_tokens: int) -> float:
        """Prefill and `output_tokens` decode steps."""
        return self.prefill_ns + output_tokens * self.token_ns

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, ns and bytes."""
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
    """Returns the modelled latency of `policy` (a name of SYSTEMS, or a system).

    `places`: where the KV cache lies; None: as the system places it. KeyError: no such policy.
    """
    system = SYSTEMS[policy] if isinstance(policy, str) else policy
    found = room(hardware, model, workload, workload.alpha if system.sparse else 1.0)
    kv_bytes = model.kv_bytes(workload.context, workload.batch)
    places = place(system, found, kv_bytes, hardware, workload.device_caches) if places is None else places
    work = layer_work(system, hardware, model, workload, places, found)
    scoring = hardware.device_score_rate(places.ssd / 2, workload.device_caches)
    busy = _busy(work, hardware, scoring)
    evaluate, fetch, compute = _evaluate_s(system, busy), _fetch_s(system, busy), busy["compute"]
    layer_s = max(compute, evaluate + fetch) if system.ahead else evaluate + fetch + compute
    output_s = _output_s(hardware, model, workload)
    layers = model.layers
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
        busy=_by_resource(busy, layers),
        moved=_moved(work, layers),
        places=places,
        found=found,
    )


def _busy(work: Work, hardware: Hardware, scoring: float) -> dict[str, float]:
    """Seconds of each activity of one layer, as if it were alone; the device scores `scoring` bytes/s."""
    device_rate = min(hardware.device_link_bytes_per_s, hardware.device_bytes_per_s)
    wait = hardware.device_latency_ns / _NS * (work.commands / 2)
    return {
        "scan": work.scan / hardware.ssd_bytes_per_s,
        "cpu": work.cpu_keys / hardware.score_bytes_per_s,
        "device": work.device_keys / scoring + wait,
        "scores": work.scores / hardware.device_link_bytes_per_s,
        "ssd": work.ssd_fetch / hardware.ssd_rate(work.request),
        "device fetch": work.device_fetch / device_rate + wait,
        "gpu link": work.gpu_link / hardware.gpu_link_bytes_per_s,
        "compute": max((work.weights + work.attended) / hardware.gpu_bytes_per_s, work.flops / hardware.gpu_flops),
    }


def _evaluate_s(system: System, busy: Mapping[str, float]) -> float:
    """Seconds until all tokens of a layer are judged."""
    if system.in_storage:
        return max(busy["cpu"], busy["device"], busy["scores"])
    return max(busy["scan"], busy["cpu"]) if system.piped else busy["scan"] + busy["cpu"]


def _fetch_s(system: System, busy: Mapping[str, float]) -> float:
    """Seconds until what was chosen is where it is attended: what lies on the SSD goes the longer way."""
    storage = busy["ssd"] + busy["device fetch"]
    return max(storage, busy["gpu link"]) if system.piped else storage + busy["gpu link"]


def _output_s(hardware: Hardware, model: ModelShape, workload: Workload) -> float:
    flops = 2.0 * model.vocabulary * model.hidden * workload.batch
    return max(model.output_weight_bytes / hardware.gpu_bytes_per_s, flops / hardware.gpu_flops)


def _prefill_s(hardware: Hardware, model: ModelShape, workload: Workload, places: Placement, found: Room) -> float:
    """Seconds of the whole context: products, causal attention; writing the KV cache down overlaps them.

    Assumed: storage takes data as fast as it gives it. All systems do the same here: the paper changes decoding only.
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


def _by_resource(busy: Mapping[str, float], layers: int) -> dict[str, float]:
    """Busy ns of a step by resource, in the words of the pipeline's timeline; the link is that of the storage."""
    seconds = {
        "compute": busy["compute"],
        "cpu": busy["cpu"],
        "device": busy["device"],
        "link": busy["scan"] + busy["scores"] + busy["ssd"] + busy["device fetch"],
        "gpu link": busy["gpu link"],
    }
    return {name: _NS * layers * value for name, value in seconds.items()}


def _moved(work: Work, layers: int) -> dict[str, float]:
    """Bytes of a step by link; `device internal` never leaves the device."""
    moved = {
        "ssd to host": work.scan + work.ssd_fetch,
        "device to host": work.scores + work.device_fetch,
        "device internal": work.device_keys + work.device_fetch,
        "host to gpu": work.gpu_link,
    }
    return {name: layers * size for name, size in moved.items()}
