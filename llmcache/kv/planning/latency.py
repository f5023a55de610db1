"""Latency per decode token of HillInfer and its baselines: what each moves, and a pipeline of layers. *Modelled*.

A layer is evaluated (by the processor, by the device, or read to the host for it), then what was chosen is fetched, then
it computes (a roofline). A system that looks ahead evaluates and fetches layer i+1 while layer i computes, so a layer
takes the longer of both; one that does not takes their sum. Within a stage, what different resources do overlaps if the
system lets it (reads with scoring, CPU with device, SSD with the GPU's link). The experts on the host that a step of a
mixture uses are fetched as KV data is: as if they were known a layer ahead. Nothing is fitted.

Source: hillinfer.txt, sections 3.2, 3.3 (figure 6) and 4.2, whose systems are read as it describes them; where it leaves
something open, the reading is the one that serves the baseline best. Differs from the paper: it measures; this is a model.
Not modelled: moves of BKP (they are off the critical path), and the software of the frameworks the baselines are built on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmcache.kv.planning.hardware import Hardware
from llmcache.kv.planning.models import ModelShape
from llmcache.kv.planning.placement import KEYS, Placement, Room, Workload, room, rule_share

_NS = 1e9
SCORE_BYTES = 4
"""On the link, per token and key head: offset and score, both of two bytes. Source: section 4.4, "4n bytes"."""
COMMANDS = 2
"""Per layer, one after the other: execute and read; those of several sequences are queued together. Assumed."""


@dataclass(frozen=True)
class System:
    """How a system works. `in_storage`: the SSD scores its keys (HIE). `ahead`: layer i+1 while i computes.

    `evaluates`: it judges tokens at each step. `abstracts`: by two keys per chunk. `piped`: reading and scoring overlap.
    `balanced`: pools by equation (1). `keeps`: pools keep what was important (BKP). `sparse`: attends to alpha * N.
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


def hillinfer(hie: bool = True, bkp: bool = True, app: bool = True) -> System:
    """HillInfer, or what is left of it without one of its parts.

    Without HIE the host evaluates, as all others do; without BKP important tokens lie anywhere; without APP nothing
    overlaps the computing and the host's pool is as large as it can be.
    """
    without = [name for name, on in (("HIE", hie), ("BKP", bkp), ("APP", app)) if not on]
    name = "-".join(["hillinfer", *(f"no-{part.lower()}" for part in without)])
    title = "HillInfer" + (f" without {', '.join(without)}" if without else "")
    return System(name, title, in_storage=hie, keeps=bkp, ahead=app, balanced=app)


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


@dataclass(frozen=True)
class Work:
    """One layer, all sequences: bytes unless noted.

    `scan`: read from the SSD in sequence to be evaluated by the host; `cpu_keys`, `device_keys`: scored there; `scores`:
    score blocks over the link; `commands`: of the device, counted; `ssd_fetch`: chosen data from the SSD, in reads of
    `request`; `device_fetch`: the same from the device; `gpu_link`: KV and weights to the GPU; `attended`: KV that
    attention reads; `flops`: operations; `weights`: read by the computing.
    """

    scan: float = 0.0
    cpu_keys: float = 0.0
    device_keys: float = 0.0
    scores: float = 0.0
    commands: int = 0
    ssd_fetch: float = 0.0
    request: float = 1.0
    device_fetch: float = 0.0
    gpu_link: float = 0.0
    attended: float = 0.0
    weights: float = 0.0
    flops: float = 0.0


def place(system: System, found: Room, kv_bytes: float, hardware: Hardware, cached: bool = False) -> Placement:
    """Returns where `system` keeps the KV cache; `cached` as for `rule_share`.

    On the GPU if it has room for all. Else the host has its share by equation (1), or without balance all, at most M0.
    """
    if found.gpu_kv:
        return Placement(kv_bytes, 0.0, 0.0)
    share = rule_share(hardware, cached) if system.balanced else 1.0
    host = min(share * kv_bytes, found.host_kv)
    return Placement(0.0, host, kv_bytes - host)


def layer_work(
    system: System, hardware: Hardware, model: ModelShape, workload: Workload, places: Placement, found: Room
) -> Work:
    """Returns the work of `system` for one layer of a decode step."""
    share = workload.alpha if system.sparse else 1.0
    host, ssd = places.host / model.layers, places.ssd / model.layers
    attended = share * places.total / model.layers
    evaluation = _evaluation(system, model, workload, host, ssd)
    on_ssd = attended * _important_on_ssd(system, workload, places) if system.sparse else ssd
    if evaluation.scan and not system.abstracts and workload.host_evaluates != KEYS:
        on_ssd = 0.0  # with its values it has been read already
    # Neighbouring tokens, keys and values apart; the full cache is read in sequence.
    tokens = workload.chunk_tokens if system.abstracts else workload.fetch_tokens
    crosses = places.gpu == 0 and hardware.has_gpu
    weights = model.crossing_bytes(found.weights_on_host, workload.batch)
    attention_flops = 4.0 * model.heads * model.head_dim * share * workload.context * workload.batch
    return replace(
        evaluation,
        commands=COMMANDS if system.in_storage and ssd else 0,
        request=tokens * model.key_bytes if system.sparse else float(1 << 20),
        device_fetch=on_ssd if system.in_storage else 0.0,
        ssd_fetch=0.0 if system.in_storage else on_ssd,
        gpu_link=(attended if crosses else 0.0) + (weights / model.layers if hardware.has_gpu else 0.0),
        attended=attended,
        weights=model.layer_weight_bytes(workload.batch),
        flops=2.0 * model.layer_parameters * workload.batch + attention_flops,
    )


def _evaluation(system: System, model: ModelShape, workload: Workload, host: float, ssd: float) -> Work:
    """What judging the tokens takes; the keys are half of `host` and of `ssd` (bytes of KV of one layer)."""
    if not system.evaluates or not host + ssd:
        return Work()
    if system.in_storage:
        tokens = ssd / (2 * model.key_bytes)
        return Work(cpu_keys=host / 2, device_keys=ssd / 2, scores=SCORE_BYTES * model.kv_heads * tokens)
    part = min(1.0, 2 / workload.chunk_tokens) if system.abstracts else 1.0
    values = 2.0 if workload.host_evaluates != KEYS and not system.abstracts else 1.0
    return Work(scan=part * values * ssd / 2, cpu_keys=part * (host + ssd) / 2)


def _important_on_ssd(system: System, workload: Workload, places: Placement) -> float:
    """The share of the important tokens that lie on the SSD."""
    told = workload.important_on_ssd_bkp if system.keeps else None
    told = workload.important_on_ssd if told is None else told
    return places.ssd_share if told is None else (told if places.ssd else 0.0)


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
    # Until all tokens are judged; until what was chosen is attended: what lies on the SSD goes the longer way.
    together: Callable[[float, float], float] = max if system.piped else operator.add
    in_storage = max(busy["cpu"], busy["device"], busy["scores"])
    evaluate = in_storage if system.in_storage else together(busy["scan"], busy["cpu"])
    fetch = together(busy["ssd"] + busy["device fetch"], busy["gpu link"])
    compute = busy["compute"]
    layer_s = max(compute, evaluate + fetch) if system.ahead else evaluate + fetch + compute
    output_flops = 2.0 * model.vocabulary * model.hidden * workload.batch
    output_s = max(model.output_weight_bytes / hardware.gpu_bytes_per_s, output_flops / hardware.gpu_flops)
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
