"""The claims about HillInfer's parts and the ratio of its pools: figure 11 of hillinfer and section 4.4. *Modelled*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from llmcache.kv.planning import MODELS, SYSTEMS, Latency, System, hillinfer, latency
from llmcache.kv.planning.placement import by_beta
from llmcache.report.claims import Claim, Finding, graded
from llmcache.report.reproduce.hillinfer.readings import READINGS, TITLES

QWEN = "Qwen-7B"
CONTEXT = 8192
SECTION = "4.4"
PARTS: dict[str, System] = {
    "prefetch-based": SYSTEMS["prefetch"],
    "+ Design 1 (HIE, BKP)": hillinfer(app=False),
    "+ Design 1 and 2 (APP)": hillinfer(),
}
"""The bars of figure 11a."""
WORST, BEST = "BKP keeps nothing", "BKP keeps everything"
STEPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Values of beta, as multiples of fc / fs."""
NEGLIGIBLE = 0.01  # of what it is compared with
FLAT = 0.02  # of the least latency: what counts as minimal too


@dataclass(frozen=True)
class Ablation:
    """Modelled latencies of `PARTS`, by reading."""

    parts: Mapping[str, Mapping[str, Latency]]


@dataclass(frozen=True)
class Sweep:
    """Modelled latency (ns per token) by beta, in multiples of fc / fs (`rule`), for the ends of what BKP can do."""

    rule: float
    token_ns: Mapping[str, Sequence[float]]


def ablation() -> Ablation:
    """Returns figure 11a by the model, for every reading."""
    model = MODELS[QWEN]
    return Ablation(
        {
            name: {part: reading.latency(system, model, CONTEXT) for part, system in PARTS.items()}
            for name, reading in READINGS.items()
        }
    )


def sweep() -> Sweep:
    """Returns figure 11b by the model: host memory without bound, so that only the rule decides."""
    reading = READINGS["sizes"]
    model, machine = MODELS[QWEN], reading.machine
    rule = machine.score_bytes_per_s / machine.device_bytes_per_s
    workload = reading.workload(CONTEXT)
    kv_bytes = model.kv_bytes(CONTEXT, workload.batch)

    def curve(on_ssd: float | None) -> list[float]:
        own = replace(workload, important_on_ssd_bkp=on_ssd)
        return [latency("hillinfer", machine, model, own, by_beta(kv_bytes, step * rule)).token_ns for step in STEPS]

    return Sweep(rule, {WORST: curve(None), BEST: curve(0.0)})


def each_part_counts(data: Ablation, reading: str) -> Finding:
    """Whether each part of HillInfer makes a token faster."""
    times = {part: found.token_ns / 1e9 for part, found in data.parts[reading].items()}
    values = list(times.values())
    faster = [after < before for before, after in pairwise(values)]
    ours = "s per token: " + ", ".join(f"{part} {seconds:.3g}" for part, seconds in times.items())
    return Finding(graded(all(faster), any(faster)), ours, times)


def minimum_at_the_rule(data: Sweep, variant: str) -> Finding:
    """Whether latency is least at beta = fc / fs, within one step of the sweep."""
    times = data.token_ns[variant]
    least = min(times)
    best = STEPS[times.index(least)]
    place = STEPS.index(1.0)
    near = abs(STEPS.index(best) - place) <= 1
    there = times[place] / least - 1
    told = ", ".join(f"{step:g}: {time / 1e6:.0f} ms" for step, time in zip(STEPS, times, strict=True))
    ours = f"least at {best:g} times fc/fs ({data.rule:.3g}); at fc/fs {there:+.1%}; {told}"
    return Finding(graded(near, there <= FLAT), ours, {"best": best, "excess_at_rule": there})


def score_blocks_are_negligible(data: Ablation, reading: str) -> Finding:
    """Whether score blocks are negligible beside the KV cache, and hidden by computing the scores."""
    found = data.parts[reading]["+ Design 1 and 2 (APP)"]
    model = MODELS[QWEN]
    tokens = found.places.ssd / model.token_bytes
    size = 4.0 * model.kv_heads * tokens * model.layers
    share = size / found.places.total
    hidden = size / READINGS[reading].machine.device_link_bytes_per_s * 1e9 <= found.busy["device"] or not tokens
    ours = (
        f"{size / 1e6:.3g} MB a step, {share:.2%} of the KV cache; sent while the device scores: {'yes' if hidden else 'no'}"
    )
    return Finding(graded(share <= NEGLIGIBLE and hidden, hidden), ours, {"bytes": size, "share": share})


def hit_table_is_negligible(_data: Ablation, _reading: str) -> Finding:
    """Whether the table of hits, 2N bytes, is negligible beside the KV cache."""
    model = MODELS[QWEN]
    share = 2.0 * model.layers / model.token_bytes
    ours = f"2 bytes per token and layer: {share:.3%} of the KV cache"
    return Finding(graded(share <= NEGLIGIBLE, False), ours, {"share": share})


CLAIMS: tuple[Claim[Ablation], ...] = (
    Claim(
        "each-part-counts",
        SECTION,
        "Compared to the prefetch-based method, +Design1 and Design1&2 achieve varying degrees of inference latency "
        "reduction, indicating that both designs contribute",
        "Qwen-7B, 8 K: both steps are faster than what was before; partly: one of them. Without APP nothing overlaps the "
        "computing",
        each_part_counts,
        tuple(TITLES),
    ),
    Claim(
        "score-blocks",
        SECTION,
        "Each score block only occupies 2n half-precision floating-point values (i.e., 4n bytes), which is negligible "
        "[…] its transfer latency can be fully hidden by computation",
        "1 % of the KV cache or less, and sending takes no longer than scoring; partly: the latter",
        score_blocks_are_negligible,
        tuple(TITLES),
    ),
    Claim(
        "hit-table",
        SECTION,
        "HillInfer maintains a cache hit table with a size of 2N bytes, which is negligible compared to the memory "
        "footprint of the KV cache",
        "1 % of the KV cache or less",
        hit_table_is_negligible,
        tuple(TITLES),
    ),
)
SWEEP_CLAIMS: tuple[Claim[Sweep], ...] = (
    Claim(
        "beta-rule",
        SECTION,
        "the latency is minimized when β ≈ fc/fs",
        "the least of the sweep is at fc/fs or one step beside it; partly: at fc/fs it is within 2 % of the least",
        minimum_at_the_rule,
        (WORST, BEST),
    ),
)
