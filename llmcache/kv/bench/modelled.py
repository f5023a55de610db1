"""The same benchmark by the latency model, on a machine that is not here: the paper's. Everything here is *modelled*."""

from __future__ import annotations

from collections.abc import Sequence

from llmcache.errors import UsageError
from llmcache.kv.bench.results import MODELLED, Bench, Marks, Row
from llmcache.kv.planning import SYSTEMS, Hardware, Latency, ModelShape, System, Workload, hillinfer, latency
from llmcache.kv.planning.placement import by_beta, room


def system_of(policy: str, hie: bool, bkp: bool, app: bool) -> System:
    """Returns the modelled system of that name; UsageError if there is no model of it."""
    if policy == "hillinfer":
        return hillinfer(hie, bkp, app)
    if policy not in SYSTEMS:
        known = ", ".join(SYSTEMS)
        raise UsageError(f"--policy: '{policy}' has no latency model", f"with --profile paper there are: {known}")
    return SYSTEMS[policy]


def row_of(found: Latency) -> Row:
    """Returns the row of a modelled latency. Moves between the pools are not modelled."""
    return Row(
        policy=found.system.name,
        title=found.system.title,
        token_ns=found.token_ns,
        stages_ns={**found.stages, "update": 0.0},
        exposed_ns=found.exposed_ns,
        idle_share=found.idle_share,
        moved_bytes=dict(found.moved),
        beta=found.places.beta if found.places.ssd else None,
    )


def compare(systems: Sequence[System], hardware: Hardware, model: ModelShape, workload: Workload) -> Bench:
    """Returns the modelled rows of `systems`, each with its pools as it places them."""
    rows = [row_of(latency(system, hardware, model, workload)) for system in systems]
    return Bench(MODELLED, _conditions(hardware, model, workload), tuple(rows))


def sweep(system: System, hardware: Hardware, model: ModelShape, workload: Workload, betas: Sequence[float]) -> Bench:
    """Returns the modelled rows of one system with its pools at each of `betas`, at most M0 in memory."""
    found = room(hardware, model, workload, workload.alpha if system.sparse else 1.0)
    kv_bytes = model.kv_bytes(workload.context, workload.batch)
    m0 = found.host_kv / (kv_bytes - found.host_kv) if found.host_kv < kv_bytes else None
    possible = sorted({beta if m0 is None else min(beta, m0) for beta in betas})
    rows = [row_of(latency(system, hardware, model, workload, by_beta(kv_bytes, beta))) for beta in possible]
    marks = Marks(hardware.score_bytes_per_s, hardware.device_bytes_per_s, m0)
    return Bench(MODELLED, _conditions(hardware, model, workload), tuple(rows), marks)


def _conditions(hardware: Hardware, model: ModelShape, workload: Workload) -> dict[str, object]:
    return {"machine": hardware.title, "model": model.name, **workload.to_json()}
