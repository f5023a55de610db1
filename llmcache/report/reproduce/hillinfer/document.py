"""hillinfer recomputed, for programs: base units; paper, modelled and measured stay apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcache import __version__
from llmcache.kv.planning import PAPER_PC, TYPICAL_PC
from llmcache.report.claims import Judged
from llmcache.report.reproduce.hillinfer import figure2, figure3, figure10, figure11
from llmcache.report.reproduce.hillinfer.measured import Measured
from llmcache.report.reproduce.hillinfer.readings import BASELINES, READINGS

SCHEMA = "llmcache.reproduce.hillinfer/1"
PAPER = {
    "title": "Efficient Long-Context LLM Inference on the Edge with Hierarchical KV Eviction using SmartSSD",
    "authors": "anonymous",
    "published": "ACL submission",
    "machine": "RTX 4090 24 GB, Xeon 8352V, 64 GB, 300 GB Intel SSD, Samsung SmartSSD (section 4.2)",
}
_MODELLED = "modelled: latency model, speeds of the paper's machine"
_HERE = "measured here: synthetic stream, emulated accelerator and device"
KINDS = {
    "figure 2": "modelled: sums of sizes",
    "figure 3": _MODELLED,
    "figure 3, the step": _MODELLED,
    "figure 3, this disk": "measured here: one layer from a spill file",
    "figure 8": "measured here: the recall model",
    "figures 9 and 10": _MODELLED,
    "figures 9 and 10, this machine": _HERE,
    "figure 11a and overhead": _MODELLED,
    "figure 11b": _MODELLED,
    "figure 11b, this machine": _HERE,
}


@dataclass(frozen=True)
class Modelled:
    """Everything that the models give."""

    memory: figure2.Memory
    transfers: figure3.Transfers
    speedups: figure10.Speedups
    ablation: figure11.Ablation
    sweep: figure11.Sweep


def modelled() -> Modelled:
    """Returns it; this takes less than a second."""
    return Modelled(figure2.computed(), figure3.modelled(), figure10.computed(), figure11.ablation(), figure11.sweep())


def document(found: Modelled, here: Measured, claims: Mapping[str, Sequence[Judged]]) -> dict[str, Any]:
    """Returns everything as JSON-ready values."""
    return {
        "schema": SCHEMA,
        "llmcache_version": __version__,
        "paper": PAPER,
        "machines": [PAPER_PC.to_json(), TYPICAL_PC.to_json()],
        "readings": [_reading(name) for name in READINGS],
        "modelled": {
            "kind": "modelled",
            "memory": list(_memory(found.memory)),
            "transfers": _transfers(found.transfers),
            "points": list(_points(found.speedups)),
            "parts": {
                name: {part: one.to_json() for part, one in row.items()} for name, row in found.ablation.parts.items()
            },
            "beta": {"rule": found.sweep.rule, "steps": list(figure11.STEPS), "token_ns": dict(found.sweep.token_ns)},
        },
        "measured_here": _measured(here),
        "claims": [
            {"about": about, "kind": KINDS[about], **claim.as_json()} for about, judged in claims.items() for claim in judged
        ],
    }


def _reading(name: str) -> dict[str, Any]:
    reading = READINGS[name]
    return {
        "name": name,
        "title": reading.title,
        "text": reading.text,
        "ssd_bytes_per_s": reading.machine.ssd_bytes_per_s,
        "ssd_source": str(reading.machine.origins["ssd_bytes_per_s"]),
        "ssd_share": reading.ssd_share,
        "host_evaluates": reading.host_evaluates,
        "device_caches": reading.device_caches,
        "ssd_needed": [
            {
                "baseline": one.baseline,
                "slowest_bytes_per_s": None if math.isnan(one.slowest) else one.slowest,
                "fastest_bytes_per_s": None if math.isnan(one.fastest) else one.fastest,
            }
            for one in figure10.needed(reading)
        ],
    }


def _memory(found: figure2.Memory) -> Iterator[dict[str, Any]]:
    for model, row in found.by_context.items():
        for context, use in row.items():
            yield {"model": model, "context": context, "batch": figure2.BATCH, **use.to_json()}
    for model, row in found.by_batch.items():
        for batch, use in row.items():
            if batch != figure2.BATCH:
                yield {"model": model, "context": figure2.CONTEXT, "batch": batch, **use.to_json()}


def _transfers(found: figure3.Transfers | None) -> dict[str, Any] | None:
    if found is None:
        return None
    rows = [
        {"share": share, "context": context, "seconds": seconds}
        for share, row in found.seconds.items()
        for context, seconds in row.items()
    ]
    return {"kind": found.kind, "layers": found.layers, "rows": rows}


def _points(found: figure10.Speedups) -> Iterator[dict[str, Any]]:
    for reading, points in found.points.items():
        for point in points:
            yield {
                "reading": reading,
                "model": point.model,
                "context": point.context,
                "systems": [one.to_json() for one in point.latencies.values()],
                "end_to_end_speedup": {name: point.speedup(name, figure10.OUTPUT_TOKENS) for name in BASELINES},
            }


def _measured(here: Measured) -> dict[str, Any]:
    accuracy = None if here.accuracy is None else dataclasses.asdict(here.accuracy)
    if accuracy is not None:
        accuracy["by_system"] = {
            name: {str(alpha): share for alpha, share in row.items()} for name, row in accuracy["by_system"].items()
        }
    return {
        "kind": "measured",
        "transfers": _transfers(here.transfers),
        "systems": None if here.systems is None else here.systems.document(),
        "beta": None if here.sweep is None else here.sweep.document(),
        "accuracy": accuracy,
        "missing": dict(here.missing),
    }
