"""The claims about transfers from the SSD: figure 3 of hillinfer and section 2.3; modelled, and measured on this disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from llmcache.kv.planning import MODELS
from llmcache.report.claims import Claim, Finding, graded
from llmcache.report.reproduce.hillinfer.readings import BATCH, CONTEXTS, READINGS, Reading

QWEN = "Qwen-7B"
SHARES = (0.2, 0.3)  # figure 3a: "20% (blue) and 30% (red) of full KV cache"
MODELLED, MEASURED = "modelled", "measured here"
READ = "reading from the SSD"
SIGNIFICANT = 0.25  # of a step: what "significant GPU idle periods" must be at least
NOISE = 0.10  # by which a measured time may fall although more was read


@dataclass(frozen=True)
class Transfers:
    """Times (s) to read a share of the KV cache of Qwen-7B, batch 8, from the SSD: `seconds[share][context]`.

    `kind`: modelled or measured here. `layers`: how many layers were read (all are modelled). `transfer_share` and
    `idle_share`: of a decode step of the prefetch-based baseline at the longest context; None where it was not run.
    """

    kind: str
    layers: int
    seconds: Mapping[float, Mapping[int, float]]
    transfer_share: float | None = None
    idle_share: float | None = None


def modelled(reading: Reading = READINGS["share-20"]) -> Transfers:
    """Returns figure 3 by the latency model, on the machine of `reading`."""
    model = MODELS[QWEN]
    rate = reading.machine.ssd_bytes_per_s
    seconds = {share: {context: share * model.kv_bytes(context, BATCH) / rate for context in CONTEXTS} for share in SHARES}
    step = reading.latency("prefetch", model, model.context_limit)
    share = step.busy["link"] / step.token_ns
    return Transfers(MODELLED, model.layers, seconds, min(1.0, share), step.idle_share)


def grows_with_context(data: Transfers, _variant: str) -> Finding:
    """Whether longer contexts take longer to read."""
    growth = [after / before for row in data.seconds.values() for before, after in pairwise(row.values())]
    told = "; ".join(f"{share:.0%}: " + _row(row) for share, row in data.seconds.items())
    verdict = graded(min(growth) > 1, min(growth) > 1 - NOISE)
    layers = "1 layer" if data.layers == 1 else f"{data.layers} layers"
    return Finding(verdict, f"seconds for {layers}: {told}", {"least_growth": min(growth)})


def _row(row: Mapping[int, float]) -> str:
    return ", ".join(f"{context // 1024} K {seconds:.3g}" for context, seconds in row.items())


def grows_with_share(data: Transfers, _variant: str) -> Finding:
    """Whether 30 % of the KV cache takes longer to read than 20 %, at every context."""
    low, high = (data.seconds[share] for share in SHARES)
    ratios = [high[context] / low[context] for context in low]
    ours = f"30 % takes {min(ratios):.2f} to {max(ratios):.2f} times as long as 20 %"
    return Finding(graded(min(ratios) > 1, max(ratios) > 1), ours, {"least": min(ratios), "most": max(ratios)})


def dominates(data: Transfers, _variant: str) -> Finding:
    """Whether transfers from the SSD take most of a step of the prefetch-based baseline, and leave the GPU idle."""
    transfer, idle = data.transfer_share or 0.0, data.idle_share or 0.0
    ours = f"prefetch-based, 8 K, 20 % on the SSD: the SSD is read {transfer:.0%} of the time, the GPU idle {idle:.0%}"
    held = (transfer > 0.5, idle >= SIGNIFICANT)
    return Finding(graded(all(held), any(held)), ours, {"transfer_share": transfer, "idle_share": idle})


CLAIMS: tuple[Claim[Transfers], ...] = (
    Claim(
        "grows-with-context",
        "2.3",
        "transfer latency increases with the context length",
        "longer at every step of context; partly: never shorter by more than 10 %",
        grows_with_context,
        (READ,),
    ),
    Claim(
        "grows-with-share",
        "2.3",
        "and becomes more pronounced as a larger fraction of the KV cache is stored on the SSD",
        "30 % takes longer than 20 % at every context; partly: at some",
        grows_with_share,
        (READ,),
    ),
)
STEP_CLAIMS: tuple[Claim[Transfers], ...] = (
    Claim(
        "dominates",
        "2.3",
        "transferring KV data between the SSD and host for token importance evaluation dominates latency and results in "
        "significant GPU idle periods",
        "reading the SSD takes more than half of a step, and the GPU is idle for a quarter or more; partly: one of both",
        dominates,
        (READ,),
    ),
)
