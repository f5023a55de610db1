"""What each system does for one layer of one decode step: bytes by what moves or works on them. *Modelled.*

The systems are those of hillinfer.txt, section 4.2, read as it describes them; where it leaves something open, the
reading is the one that serves the baseline best, and said here.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcache.kv.planning.hardware import Hardware
from llmcache.kv.planning.models import ModelShape
from llmcache.kv.planning.placement import Placement, Room, by_capacity, by_rule
from llmcache.kv.planning.workload import KEYS, Workload

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


FULL = System("full", "full cache", evaluates=False, sparse=False)
H2O = System("h2o", "H2O-like", piped=False, ahead=False)
PREFETCH = System("prefetch", "prefetch-based")
LEOAM = System("leoam", "LeoAM-like", abstracts=True)

SYSTEMS: dict[str, System] = {system.name: system for system in (FULL, H2O, PREFETCH, LEOAM)}
"""The baselines of section 4.2, in its order."""


def hillinfer(hie: bool = True, bkp: bool = True, app: bool = True) -> System:
    """HillInfer, or what is left of it without one of its parts.

    Without HIE the host evaluates, as all others do; without BKP important tokens lie anywhere; without APP nothing
    overlaps the computing and the host's pool is as large as it can be.
    """
    without = [name for name, on in (("HIE", hie), ("BKP", bkp), ("APP", app)) if not on]
    name = "-".join(["hillinfer", *(f"no-{part.lower()}" for part in without)])
    title = "HillInfer" + (f" without {', '.join(without)}" if without else "")
    return System(name, title, in_storage=hie, keeps=bkp, ahead=app, balanced=app)


SYSTEMS["hillinfer"] = hillinfer()


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
    """Returns where `system` keeps the KV cache; `cached` as for `rule_share`."""
    return by_rule(found, kv_bytes, hardware, cached) if system.balanced else by_capacity(found, kv_bytes)


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
    tokens = workload.chunk_tokens if system.abstracts else workload.fetch_tokens
    crosses = places.gpu == 0 and hardware.has_gpu
    fetch = {"device_fetch": on_ssd} if system.in_storage else {"ssd_fetch": on_ssd}
    weights = model.crossing_bytes(found.weights_on_host, workload.batch)
    flops = 2.0 * model.layer_parameters * workload.batch + _attention_flops(model, workload, share)
    return Work(
        scan=evaluation.scan,
        cpu_keys=evaluation.cpu_keys,
        device_keys=evaluation.device_keys,
        scores=evaluation.scores,
        commands=COMMANDS if system.in_storage and ssd else 0,
        request=_request(system, model, tokens),
        gpu_link=(attended if crosses else 0.0) + (weights / model.layers if hardware.has_gpu else 0.0),
        attended=attended,
        weights=model.layer_weight_bytes(workload.batch),
        flops=flops,
        **fetch,
    )


def _evaluation(system: System, model: ModelShape, workload: Workload, host: float, ssd: float) -> Work:
    """What judging the tokens takes; the keys are half of `host` and of `ssd` (bytes of KV of one layer)."""
    if not system.evaluates or not host + ssd:
        return Work()
    if system.in_storage:
        tokens = ssd / (2 * model.key_bytes)
        return Work(cpu_keys=host / 2, device_keys=ssd / 2, scores=SCORE_BYTES * model.kv_heads * tokens)
    part = 2 / workload.chunk_tokens if system.abstracts else 1.0
    part = min(1.0, part)
    values = 2.0 if workload.host_evaluates != KEYS and not system.abstracts else 1.0
    return Work(scan=part * values * ssd / 2, cpu_keys=part * (host + ssd) / 2)


def _important_on_ssd(system: System, workload: Workload, places: Placement) -> float:
    """The share of the important tokens that lie on the SSD."""
    told = workload.important_on_ssd_bkp if system.keeps else None
    told = workload.important_on_ssd if told is None else told
    return places.ssd_share if told is None else (told if places.ssd else 0.0)


def _request(system: System, model: ModelShape, tokens: int) -> float:
    """Bytes of one read: neighbouring tokens, keys and values apart. The full cache is read in sequence."""
    return tokens * model.key_bytes if system.sparse else float(1 << 20)


def _attention_flops(model: ModelShape, workload: Workload, share: float) -> float:
    return 4.0 * model.heads * model.head_dim * share * workload.context * workload.batch
