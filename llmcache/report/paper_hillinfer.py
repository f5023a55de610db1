"""Efficient Long-Context LLM Inference on the Edge with Hierarchical KV Eviction using SmartSSD (HillInfer), recomputed.

Anonymous ACL submission. Its figures print curves and bars whose numbers are not in the text: its words are quoted and
judged (`llmcache/papers/hillinfer.toml`). It measures a machine that is not here: what it says, what the latency model
gives for that machine, and what `tools/bench papers` has measured, small, with an emulated device, stay apart.

The paper leaves open what decides about its speed-ups, so several readings of its set-up are judged, none chosen for its
result. The first takes the machine as section 4.2 states it. The others put the share of the KV cache on the SSD that
figure 3a speaks of, whatever the memory; two of them take the speed of the SSD from the paper of the framework that the
baselines are built on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from llmcache.kv.bench.results import Bench, read_bench
from llmcache.kv.planning.hardware import ASSUMED, NUMBERS, PAPER_PC, TYPICAL_PC, Hardware, Origin
from llmcache.kv.planning.latency import SYSTEMS, Latency, System, hillinfer, latency
from llmcache.kv.planning.models import MODELS, ModelShape
from llmcache.kv.planning.placement import KEYS_AND_VALUES, MemoryUse, Workload, by_beta, by_ssd_share, memory_use
from llmcache.report.html import Cell, Facts, Fold, HtmlBlock, Table, Text
from llmcache.report.judge import Measure, Measures, Paper, judge, read_paper
from llmcache.report.reproduce import Reproduction, Tell, machine_words, measurements, picture
from llmcache.report.theme import FAINT, KV_LOOKS, MUTED, Look, grid_of, legend_below, powers_of_2
from llmcache.units import format_duration, format_rate, format_size

GIB = 1 << 30
QWEN, LLAMA, LONGCHAT = "Qwen-7B", "Llama2-13B", "LongChat-7B"
BATCH = 8  # 4.2: "We set the importance rate α as 0.2 and batch size = 8 in our experiment", as `Workload` has them
OUTPUT_TOKENS = 128  # 4.2: "We set the output length as 128"
CONTEXTS = (2048, 4096, 8192, 16384, 32768)
LEAST, MOST = 4.21, 8.56
BASELINES = tuple(name for name in SYSTEMS if name != "hillinfer")
ClaimMeasures = dict[str, Measure]
"""Measures by claim."""


# How the paper's experiments can be read


_STATED = Workload(CONTEXTS[0])


@dataclass(frozen=True)
class Reading:
    """One way to read section 4.2: what `workload` assumes, at any context, on `machine`.

    `ssd_share`: of the KV cache, for every system; None: what does not fit elsewhere.
    """

    machine: Hardware
    ssd_share: float | None = None
    workload: Workload = _STATED

    def latency(self, system: str | System, model: ModelShape, context: int) -> Latency:
        """Returns the modelled latency of `system`, a name or a system."""
        workload = replace(self.workload, context=context)
        kv_bytes = model.kv_bytes(context, workload.batch)
        places = None if self.ssd_share is None else by_ssd_share(kv_bytes, self.ssd_share)
        return latency(system, self.machine, model, workload, places)


_FLEXGEN_PC = replace(
    PAPER_PC,
    name="paper, FlexGen's disk",
    ssd_bytes_per_s=2e9,
    origins=dict(PAPER_PC.origins)
    | {"ssd_bytes_per_s": Origin(ASSUMED, "2 GB/s: what FlexGen's paper (section 6) gives for reading its NVMe SSD")},
)
_WHOLE = replace(_STATED, host_evaluates=KEYS_AND_VALUES, device_caches=True)
READINGS: dict[str, Reading] = {
    "sizes": Reading(PAPER_PC),
    "share-20": Reading(PAPER_PC, 0.2, _WHOLE),
    "share-30": Reading(PAPER_PC, 0.3, _WHOLE),
    "flexgen-20": Reading(_FLEXGEN_PC, 0.2, _WHOLE),
    "flexgen-30": Reading(_FLEXGEN_PC, 0.3, _WHOLE),
}
"""All readings; the paper's file has their titles, and what they are in words."""


@dataclass(frozen=True)
class ModelledCase:
    """One model at one context; `latencies` by system, *modelled*."""

    model: str
    context: int
    latencies: dict[str, Latency]

    def speedup(self, baseline: str) -> float:
        """How many times as long `baseline` takes as HillInfer, end to end. Source: 4.3, "end-to-end latency"."""
        own, other = (self.latencies[name].end_to_end_ns(OUTPUT_TOKENS) for name in ("hillinfer", baseline))
        return other / own


Cases = Sequence[ModelledCase]


def points(reading: Reading) -> list[ModelledCase]:
    """Returns the paper's models at every context that each was made for."""
    return [
        ModelledCase(model.name, context, {name: reading.latency(name, model, context) for name in SYSTEMS})
        for model in MODELS.values()
        for context in CONTEXTS
        if context <= model.context_limit
    ]


# Memory: figure 2 and section 1, modelled from sizes

SAID = {QWEN: 30.0, LLAMA: 51.0}  # GB of the paper, at 4 K and 8
GPU_GB, PC_GB = 24, 44
MEMORY_CONTEXT = 4096
MemoryTable = Mapping[str, Mapping[int, MemoryUse]]
"""What models take, by model and context at a batch of 8, or by model and batch at 4 K."""


def memory_tables() -> tuple[MemoryTable, MemoryTable]:
    """Returns figure 2: both models at several contexts, and at several batches."""
    by_context = {name: {n: memory_use(MODELS[name], n, BATCH) for n in (1024, 2048, 4096, 8192)} for name in SAID}
    by_batch = {name: {n: memory_use(MODELS[name], MEMORY_CONTEXT, n) for n in (1, 2, 4, 8, 16)} for name in SAID}
    return by_context, by_batch


def memory_measures(by_context: MemoryTable) -> ClaimMeasures:
    """Returns what is claimed of memory."""
    found = {}
    for model, takes, exceeds, limit in (
        (QWEN, "qwen-30-gb", "qwen-beyond-the-gpu", GPU_GB),
        (LLAMA, "llama-51-gb", "llama-beyond-a-pc", PC_GB),
    ):
        use = by_context[model][MEMORY_CONTEXT]
        gib, away = use.total / GIB, use.total / GIB / SAID[model] - 1
        words = f"{gib:.1f} GiB ({use.total / 1e9:.1f} GB of 10^9 bytes): weights {use.weights / GIB:.1f}, "
        words += f"KV {use.kv / GIB:.1f}; {away:+.1%}"
        values = {"total_bytes": use.total, "kv_bytes": use.kv, "difference": away, "away": abs(away)}
        found[takes] = Measure(words, values)
        found[exceeds] = Measure(f"{gib:.1f} GiB against {limit} GiB", {"total_bytes": use.total, "gib": gib})
    use = by_context[QWEN][MEMORY_CONTEXT]
    share = use.kv / use.total
    values = {"kv_share": share, "kv_bytes": use.kv, "weight_bytes": use.weights}
    return found | {"mostly-kv": Measure(f"KV is {share:.0%} of {use.total / GIB:.1f} GiB", values)}


# Transfers from the SSD: figure 3 and section 2.3

SHARES = (0.2, 0.3)  # figure 3a: "20% (blue) and 30% (red) of full KV cache"


@dataclass(frozen=True)
class Transfers:
    """Times (s) to read a share of the KV cache of Qwen-7B, batch 8, from the SSD: `seconds[share][context]`.

    `kind`: modelled or measured. `layers`: how many layers were read (all are modelled).
    """

    kind: str
    layers: int
    seconds: Mapping[float, Mapping[int, float]]

    @classmethod
    def modelled(cls, reading: Reading) -> Transfers:
        """Returns figure 3a by the latency model, on the machine of `reading`."""
        model, rate = MODELS[QWEN], reading.machine.ssd_bytes_per_s
        contexts = {share: {c: share * model.kv_bytes(c, BATCH) / rate for c in CONTEXTS} for share in SHARES}
        return cls("modelled", model.layers, contexts)

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Transfers:
        """Returns what was measured, as it is saved."""
        seconds: dict[float, dict[int, float]] = defaultdict(dict)
        for row in told["rows"]:
            seconds[row["share"]][row["context"]] = row["seconds"]
        return cls("measured", told["layers"], seconds)

    @property
    def of_layers(self) -> str:
        """How many layers were read, in words."""
        return "one layer" if self.layers == 1 else f"{self.layers} layers"

    def document(self) -> dict[str, Any]:
        """Returns it for a JSON document."""
        rows = [{"share": s, "context": c, "seconds": one} for s, row in self.seconds.items() for c, one in row.items()]
        return {"kind": self.kind, "layers": self.layers, "rows": rows}

    def measures(self) -> ClaimMeasures:
        """Returns what is claimed of times by context and by share."""
        growth = min(after / before for row in self.seconds.values() for before, after in pairwise(row.values()))
        told = "; ".join(
            f"{share:.0%}: " + ", ".join(f"{context // 1024} K {seconds:.3g}" for context, seconds in row.items())
            for share, row in self.seconds.items()
        )
        layers = self.of_layers.replace("one", "1")
        low, high = (self.seconds[share] for share in SHARES)
        ratios = [high[context] / low[context] for context in low]
        words = f"30 % takes {min(ratios):.2f} to {max(ratios):.2f} times as long as 20 %"
        return {
            "grows-with-context": Measure(f"seconds for {layers}: {told}", {"least_growth": growth}),
            "grows-with-share": Measure(words, {"least": min(ratios), "most": max(ratios)}),
        }


def dominates(step: Latency) -> Measure:
    """Measures how much of a step of the prefetch-based baseline reads from the SSD, and how long the GPU is idle."""
    transfer = min(1.0, step.busy["link"] / step.token_ns)
    words = f"prefetch-based, 8 K, 20 % on the SSD: the SSD is read {transfer:.0%} of the time, "
    words += f"the GPU idle {step.idle_share:.0%}"
    return Measure(words, {"transfer_share": transfer, "idle_share": step.idle_share})


# Accuracy: figure 8 and section 4.3, measured with a small model that recalls


def accuracy_measures(found: Mapping[str, Any], system: str) -> ClaimMeasures:
    """Returns what is claimed of answers: `full` with everything kept, `by_system[system][alpha]`, shares of `answers`."""
    rows = {float(alpha): share for alpha, share in found["by_system"][system].items()}
    full = found["full"]
    told = ", ".join(f"alpha {alpha:g}: {share:.3f}" for alpha, share in rows.items())
    words = f"full cache {full:.3f}; {told} ({found['answers']} answers, contexts of {found['tokens']:,} tokens)"
    enough = [alpha for alpha, share in rows.items() if full - share <= 0.01]
    least = min(enough, default=1.0)
    from_on = f"within 0.01 of the full cache from alpha {least:g} on" if enough else "at no alpha that was tried"
    return {
        "comparable-accuracy": Measure(words, {"full": full, "at_0.2": rows[0.2], "loss": full - rows[0.2]}),
        "alpha-trade-off": Measure(from_on, {"least_alpha": least}),
    }


# Latency and speed-up: figures 9 and 10, sections 4.2 and 4.3, modelled for each reading


def over(cases: Cases, baseline: str) -> list[float]:
    """HillInfer's speed-ups over `baseline`, end to end, at every point."""
    return [point.speedup(baseline) for point in cases]


def speedup_measures(cases: Cases) -> ClaimMeasures:
    """Returns what is claimed of speed-ups, for the points of one reading."""
    rows = {name: over(cases, name) for name in BASELINES}
    every = [value for row in rows.values() for value in row]
    inside = sum(LEAST <= value <= MOST for value in every)
    told = ", ".join(f"{SYSTEMS[name].title} {min(row):.2f} to {max(row):.2f}x" for name, row in rows.items())
    values = {f"{name}.{word}": end for name, row in rows.items() for word, end in (("least", min(row)), ("most", max(row)))}
    values["share_in_range"] = inside / len(every)
    largest = max(every)
    of = next(name for name, row in rows.items() if largest in row)
    words = f"{largest:.2f}x at most, over {SYSTEMS[of].title}"
    return {
        "speed-up-range": Measure(f"{inside} of {len(every)} in range; {told}", values),
        "up-to-8.56": Measure(words, {"most": largest, "away": abs(largest / MOST - 1)}),
        "longer-gains-more": _longer(cases),
    }


def systems_in_order(cases: Cases) -> Measure:
    """Measures at how many points the systems come in the order of section 4.2, slowest first."""
    ordered, pairs = 0, {f"{name} >= {after}": 0 for name, after in pairwise(SYSTEMS)}
    for point in cases:
        times = [point.latencies[name].end_to_end_ns(OUTPUT_TOKENS) for name in SYSTEMS]
        steps = [before >= after for before, after in pairwise(times)]
        ordered += all(steps)
        pairs = {pair: many + step for (pair, many), step in zip(pairs.items(), steps, strict=True)}
    told = ", ".join(f"{pair} {times} times" for pair, times in pairs.items())
    return Measure(f"in order at {ordered} of {len(cases)} points; {told}", {"share": ordered / len(cases)})


def _longer(cases: Cases) -> Measure:
    """Measures at how many steps of context the speed-up over each baseline grows, for models that have several."""
    rises: list[bool] = []
    ends: list[str] = []
    for model in MODELS:
        own = [point for point in cases if point.model == model]
        for baseline in BASELINES:
            rises += [after > before for before, after in pairwise(over(own, baseline))]
        if len(own) > 1:
            ends.append(f"{model} {own[0].speedup('prefetch'):.2f} to {own[-1].speedup('prefetch'):.2f}x")
    words = f"rises at {sum(rises)} of {len(rises)} steps of context; over prefetch-based, shortest to longest: "
    return Measure(words + ", ".join(ends), {"share_of_steps": sum(rises) / len(rises)})


def with_hits(bench: Bench, share: float) -> dict[str, list[ModelledCase]] | None:
    """Returns the points of the readings with `share` on the SSD, for misses as *measured* at the same share.

    Still *modelled*: only how many of the important tokens are on the SSD, with BKP and without, was measured. None if the
    benchmark did not observe it.
    """
    misses = {row.policy: 1 - row.observed.hit_ratio for row in bench.rows if row.observed is not None}
    if not {"prefetch", "hillinfer"} <= set(misses):
        return None
    seen = replace(_WHOLE, important_on_ssd=misses["prefetch"], important_on_ssd_bkp=misses["hillinfer"])
    return {
        name: points(replace(reading, workload=seen)) for name, reading in READINGS.items() if reading.ssd_share == share
    }


Range = tuple[float, float]


def needed(reading: Reading, model: str = QWEN, context: int = 4096) -> dict[str, Range]:
    """Returns between which speeds (bytes/s) the baselines' SSD has to be for the paper's range; NaN where none does it.

    All else is as in `reading`. HillInfer itself does not read that SSD, so a slower one makes it look faster.
    """

    def rate_for(baseline: str, speedup: float) -> float:
        """The rate at which the speed-up is `speedup`, by bisection: it falls as the SSD gets faster."""

        def at(rate: float) -> float:
            factor = rate / reading.machine.ssd_bytes_per_s
            changed = replace(reading, machine=reading.machine.faster(ssd_bytes_per_s=factor, ssd_requests_per_s=factor))
            both = {name: changed.latency(name, MODELS[model], context) for name in (baseline, "hillinfer")}
            return ModelledCase(model, context, both).speedup(baseline)

        low, high = 1e7, 1e12
        if not at(high) <= speedup <= at(low):
            return math.nan
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if at(middle) < speedup else (middle, high)
        return low

    return {name: (rate_for(name, MOST), rate_for(name, LEAST)) for name in BASELINES}


# Parts, and the ratio of the pools: figure 11 and section 4.4, modelled

PART_CONTEXT = 8192
WHOLE = "+ Design 1 and 2 (APP)"
PARTS: dict[str, System] = {
    "prefetch-based": SYSTEMS["prefetch"],
    "+ Design 1 (HIE, BKP)": hillinfer(app=False),
    WHOLE: hillinfer(),
}
"""The bars of figure 11a."""
BKP_KEEPS = {"BKP keeps nothing": None, "BKP keeps everything": 0.0}
"""The ends of what BKP can do: important tokens on the SSD as often as others, or never."""
STEPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Values of beta, as multiples of fc / fs."""
BETA_RULE = PAPER_PC.score_bytes_per_s / PAPER_PC.device_bytes_per_s
Parts = Mapping[str, Latency]


def parts_of(reading: Reading) -> Parts:
    """Returns figure 11a by the model: the latency of each of `PARTS`."""
    return {part: reading.latency(system, MODELS[QWEN], PART_CONTEXT) for part, system in PARTS.items()}


def part_measures(found: Parts, reading: Reading) -> ClaimMeasures:
    """Returns what is claimed of the parts of HillInfer and of what they need besides, for one reading."""
    times = {part: one.token_ns / 1e9 for part, one in found.items()}
    faster = sum(after < before for before, after in pairwise(times.values()))
    told = ", ".join(f"{part} {seconds:.3g}" for part, seconds in times.items())
    whole, model = found[WHOLE], MODELS[QWEN]
    tokens = whole.places.ssd / model.token_bytes
    size = 4.0 * model.kv_heads * tokens * model.layers
    share = size / whole.places.total
    hidden = size / reading.machine.device_link_bytes_per_s * 1e9 <= whole.busy["device"] or not tokens
    blocks = f"{size / 1e6:.3g} MB a step, {share:.2%} of the KV cache; sent while the device scores: "
    table = 2.0 * model.layers / model.token_bytes
    return {
        "each-part-counts": Measure(f"s per token: {told}", times | {"faster": faster}),
        "score-blocks": Measure(
            blocks + ("yes" if hidden else "no"), {"bytes": size, "share": share, "hidden": float(hidden)}
        ),
        "hit-table": Measure(f"2 bytes per token and layer: {table:.3%} of the KV cache", {"share": table}),
    }


Sweep = Mapping[str, Sequence[float]]
"""Modelled latency (ns per token) at each of `STEPS`, by what BKP keeps."""


def beta_sweep() -> Sweep:
    """Returns figure 11b by the model: host memory without bound, so that only the rule decides."""
    model, workload = MODELS[QWEN], Workload(PART_CONTEXT)
    places = [by_beta(model.kv_bytes(PART_CONTEXT, BATCH), step * BETA_RULE) for step in STEPS]

    def curve(on_ssd: float | None) -> list[float]:
        own = replace(workload, important_on_ssd_bkp=on_ssd)
        return [latency("hillinfer", PAPER_PC, model, own, place).token_ns for place in places]

    return {name: curve(on_ssd) for name, on_ssd in BKP_KEEPS.items()}


def sweep_measure(times: Sequence[float]) -> Measure:
    """Measures how many steps of the sweep the least latency is from beta = fc / fs."""
    best, place = times.index(min(times)), STEPS.index(1.0)
    excess = times[place] / min(times) - 1
    told = ", ".join(f"{step:g}: {time / 1e6:.0f} ms" for step, time in zip(STEPS, times, strict=True))
    words = f"least at {STEPS[best]:g} times fc/fs ({BETA_RULE:.3g}); at fc/fs {excess:+.1%}; {told}"
    return Measure(words, {"best": STEPS[best], "excess_at_rule": excess, "steps_away": abs(best - place)})


# What ran on a machine with no GPU, its device emulated: verdicts of this project's systems, not of the paper's


def run_measures(bench: Bench) -> ClaimMeasures:
    """Returns what is claimed of speed-ups, parts and traffic, from a benchmark of all systems."""
    rows = {row.policy: row for row in bench.rows}
    speedups = {name: rows["hillinfer"].speedup_over(rows[name]) for name in BASELINES}
    inside = sum(LEAST <= value <= MOST for value in speedups.values())
    times = {name: rows[name].token_ns for name in ("prefetch", "hillinfer-no-app", "hillinfer")}
    # Two medians may differ by 5 % on a machine that does other things too.
    faster = sum(after <= 0.95 * before for before, after in pairwise(times.values()))
    moved = {  # bytes a step that cross from the SSD to the host for evaluation
        name: sum(size for link, size in rows[name].moved_bytes.items() if link.startswith("ssd to cpu") and "scor" in link)
        for name in ("prefetch", "hillinfer")
    }
    ratio = moved["prefetch"] / max(moved["hillinfer"], 1.0)
    told = ", ".join(f"{rows[name].title} {value:.2f}x" for name, value in speedups.items())
    parts = ", ".join(f"{rows[name].title} {time / 1e6:.1f} ms" for name, time in times.items())
    less = f"{moved['prefetch'] / 1e6:.3g} MB a step against {moved['hillinfer'] / 1e6:.3g} MB: {ratio:.0f} times fewer"
    return {
        "speed-up-here": Measure(told, speedups | {"inside": inside}),
        "parts-here": Measure(parts, times | {"faster": faster}),
        "link-bytes-here": Measure(less, moved | {"ratio": ratio}),
    }


def beta_measure(bench: Bench) -> Measure:
    """Measures how many steps of the sweep the least latency is from where rule and memory expect it."""
    rows = sorted((row.beta or 0.0, row.token_ns) for row in bench.rows)
    betas, times = [beta for beta, _ in rows], [time for _, time in rows]
    expected = bench.marks.expected if bench.marks is not None else 0.0
    best = times.index(min(times))
    place = min(range(len(rows)), key=lambda number: abs(betas[number] - expected))
    excess = times[place] / min(times) - 1
    told = ", ".join(f"{beta:.3g}: {time / 1e6:.1f} ms" for beta, time in rows)
    words = f"least at {betas[best]:.3g}, expected at {expected:.3g} ({excess:+.0%} there); {told}"
    return Measure(words, {"best": betas[best], "expected": expected, "excess": excess, "steps_away": abs(best - place)})


# The reproduction


class HillInferResults:
    """Everything that the models give, in less than a second, beside what was measured.

    What was not measured is None; `measured["missing"]` says why.
    """

    def __init__(self, paper: Paper, measured: Mapping[str, Any]) -> None:
        self.paper, self.measured = paper, measured
        self.by_context, self.by_batch = memory_tables()
        self.speedups = {name: points(reading) for name, reading in READINGS.items()}
        self.parts = {name: parts_of(reading) for name, reading in READINGS.items()}
        self.needed = {name: needed(reading) for name, reading in READINGS.items()}
        self.sweep = beta_sweep()
        self.modelled_transfers = Transfers.modelled(READINGS["share-20"])
        self.transfers = None if measured["transfers"] is None else Transfers.read(measured["transfers"])
        self.systems, self.beta = (
            None if measured[name] is None else read_bench(measured[name], f"hillinfer.json: {name}")
            for name in ("systems", "beta")
        )

    def measures(self) -> Measures:
        """Returns what is measured of every claim; what was not measured is left out."""

        def alone(variant: str, found: ClaimMeasures) -> dict[str, dict[str, Measure]]:
            return {name: {variant: measure} for name, measure in found.items()}

        def by_variant(found: Mapping[str, ClaimMeasures]) -> dict[str, dict[str, Measure]]:
            return {name: {variant: own[name] for variant, own in found.items()} for name in next(iter(found.values()))}

        step = READINGS["share-20"].latency("prefetch", MODELS[QWEN], MODELS[QWEN].context_limit)
        orders = {name: {"order": systems_in_order(of)} for name, of in self.speedups.items()}
        faster = {name: speedup_measures(of) | orders[name] for name, of in self.speedups.items()}
        parts = {name: part_measures(self.parts[name], reading) for name, reading in READINGS.items()}
        curves = {name: {"beta-rule": sweep_measure(times)} for name, times in self.sweep.items()}
        read, here = "reading from the SSD", "this machine"
        measures: dict[str, Mapping[str, Mapping[str, Measure | float]]] = {
            "figure 2": alone("memory model", memory_measures(self.by_context)),
            "figure 3": alone(read, self.modelled_transfers.measures()),
            "figure 3, the step": alone(read, {"dominates": dominates(step)}),
            "figures 9 and 10": by_variant(faster),
            "figure 11a and overhead": by_variant(parts),
            "figure 11b": by_variant(curves),
        }
        if self.transfers is not None:
            measures["figure 3, this disk"] = alone(read, self.transfers.measures())
        if (accuracy := self.measured["accuracy"]) is not None:
            recalling = {name: accuracy_measures(accuracy, name) for name in ("h2o", "prefetch", "hillinfer")}
            measures["figure 8"] = by_variant(recalling)
        if self.systems is not None:
            measures["figures 9 and 10, this machine"] = alone(here, run_measures(self.systems))
        if self.beta is not None:
            measures["figure 11b, this machine"] = alone(here, {"beta-here": beta_measure(self.beta)})
        return measures

    def told(self) -> dict[str, Any]:
        """Returns everything that a document has beside the claims."""
        here = {key: self.measured[key] for key in ("systems", "beta", "accuracy", "missing", "machine", "date", "quick")}
        cases = [
            {
                "reading": name,
                "model": point.model,
                "context": point.context,
                "systems": [one.to_json() for one in point.latencies.values()],
                "end_to_end_speedup": {baseline: point.speedup(baseline) for baseline in BASELINES},
            }
            for name, of in self.speedups.items()
            for point in of
        ]
        memory = [(model, n, BATCH, use) for model, row in self.by_context.items() for n, use in row.items()]
        memory += [
            (model, MEMORY_CONTEXT, n, use) for model, row in self.by_batch.items() for n, use in row.items() if n != BATCH
        ]
        return {
            "machines": [PAPER_PC.to_json(), TYPICAL_PC.to_json()],
            "readings": [self._reading(name) for name in READINGS],
            "modelled": {
                "kind": "modelled",
                "memory": [{"model": m, "context": n, "batch": batch, **use.to_json()} for m, n, batch, use in memory],
                "transfers": self.modelled_transfers.document(),
                "points": cases,
                "parts": {name: {part: one.to_json() for part, one in row.items()} for name, row in self.parts.items()},
                "beta": {"rule": BETA_RULE, "steps": list(STEPS), "token_ns": dict(self.sweep)},
            },
            "measured_here": {"kind": "measured", "transfers": self.transfers and self.transfers.document(), **here},
        }

    def _reading(self, name: str) -> dict[str, Any]:

        def rate(value: float) -> float | None:
            return None if math.isnan(value) else value

        reading = READINGS[name]
        return {
            "name": name,
            "title": self.paper.variants[name],
            "text": self.paper.data["readings"][name],
            "ssd_bytes_per_s": reading.machine.ssd_bytes_per_s,
            "ssd_source": str(reading.machine.origins["ssd_bytes_per_s"]),
            "ssd_share": reading.ssd_share,
            "host_evaluates": reading.workload.host_evaluates,
            "device_caches": reading.workload.device_caches,
            "ssd_needed": [
                {"baseline": baseline, "slowest_bytes_per_s": rate(slowest), "fastest_bytes_per_s": rate(fastest)}
                for baseline, (slowest, fastest) in self.needed[name].items()
            ],
        }


def reproduce(quick: bool, tell: Tell) -> Reproduction:
    """Returns the paper recomputed. `quick` changes nothing: what is measured is saved."""
    tell("asking the models")
    paper = read_paper("hillinfer")
    results = HillInferResults(paper, measurements("hillinfer"))
    return Reproduction("hillinfer", paper, judge(paper, results.measures()), results.told(), lambda: _blocks(results))


# The page


def _blocks(found: HillInferResults) -> dict[str, list[HtmlBlock]]:
    paper, measured = found.paper, found.measured
    memory = ", ".join(f"{model} {found.by_context[model][MEMORY_CONTEXT].total / GIB:.1f} GiB" for model in SAID)
    transfers = [one for one in (found.modelled_transfers, found.transfers) if one is not None]
    times = {name: found.speedups[name] for name in ("sizes", "flexgen-20")}
    beta = "; ".join(f"{name}: {min(of) / 1e6:.0f} to {max(of) / 1e6:.0f} ms" for name, of in found.sweep.items())
    places: dict[str, str] = paper.data["measured"]
    blocks: dict[str, list[HtmlBlock]] = {
        "The speed-ups: by how much not, and why": list(_why(found)),
        "Memory (the paper's figure 2)": [picture(paper, "memory", _memory_figure(found), told=memory)],
        places["transfers"]: [
            picture(paper, "transfers", _transfer_figure(transfers), told=_transfer_words(transfers)),
            Fold("The numbers behind the figure", [_transfer_table(one) for one in transfers]),
        ],
        places["systems"]: [
            picture(paper, "speed-ups", _speedup_figure(paper, found.speedups)),
            picture(paper, "latencies", _latency_figure(paper, times, LONGCHAT)),
        ],
        places["beta"]: [picture(paper, "beta", _sweep_figure(found.sweep), told=beta)],
        "The machine of the paper, number by number": [_machine_table(PAPER_PC)],
        places["accuracy"]: [] if measured["accuracy"] is None else [_accuracy_table(paper, measured["accuracy"])],
    }
    conditions = machine_words(measured)
    for name, bench, table, what in (
        ("systems", found.systems, "The systems", "systems"),
        ("beta", found.beta, "HillInfer by beta", "sweep of beta"),
    ):
        if bench is not None:
            blocks[places[name]].append(_bench_table(bench, f"{table} on the machine named below (measured)"))
            plain = {key: value for key, value in bench.conditions.items() if isinstance(value, str | int | float)}
            conditions.append((what, ", ".join(f"{key} {value}" for key, value in plain.items())))
    for name, why in measured["missing"].items():
        blocks[places[name]].append(Text(f"Not measured: {name}. {why}"))
    return blocks | {"Conditions": [Facts(conditions)]}


def _why(found: HillInferResults) -> Iterator[HtmlBlock]:
    """Yields by how much the speed-ups are missed, and what decides about them, in the order of its weight."""
    paper, systems, why = found.paper, found.systems, found.paper.data["why"]
    numbers = _numbers(found)
    yield _ranges(paper, "Speed-ups end to end (modelled); the paper: 4.21 to 8.56", found.speedups)
    for name in ("words", "storage", "speeds", "abstracts", "evaluation"):
        yield Text(why[name].format(**numbers))
    if systems is not None:
        rows = {row.policy: row for row in systems.rows}
        fastest, ours = min(rows.values(), key=lambda row: row.token_ns), rows["hillinfer"]
        times = {"fastest": fastest.token_ns, "ours": ours.token_ns, "evaluation": ours.stages_ns["evaluate"]}
        yield Text(why["here"].format(title=fastest.title, **{name: time / 1e6 for name, time in times.items()}))
    rates: list[list[Cell]] = [[paper.variants[name], *map(_rates, of.values())] for name, of in found.needed.items()]
    head = "How fast the baselines' SSD would have to be read for 4.21 to 8.56 (GB/s, Qwen-7B, 4 K, modelled)"
    yield Table(head, ["reading", *(f"over {SYSTEMS[name].title}" for name in BASELINES)], rates)
    share = 0.2
    if systems is not None and (seen := with_hits(systems, share)) is not None:
        hits = {row.policy: row.observed.hit_ratio for row in systems.rows if row.observed is not None}
        yield Text(why["hits"].format(hillinfer=hits["hillinfer"], prefetch=hits["prefetch"], share=share))
        yield _ranges(paper, "Speed-ups with hits as measured (modelled)", seen)
    texts = [(paper.variants[name], text) for name, text in paper.data["readings"].items()]
    yield Fold("The readings", [Facts(texts)])


def _numbers(found: HillInferResults) -> dict[str, Any]:
    """Returns the numbers that the paper's file names in what it says of the speed-ups."""
    inside = []
    for name, of in found.speedups.items():
        values = [value for baseline in BASELINES for value in over(of, baseline)]
        within = sum(LEAST <= value <= MOST for value in values)
        inside.append(f"{found.paper.variants[name]}: {within} of {len(values)}")
    ssd, device = PAPER_PC.ssd_bytes_per_s, PAPER_PC.device_bytes_per_s
    ends = {name: ends for name, ends in found.needed["share-20"].items() if not math.isnan(ends[0])}
    plain = [ends[name] for name in ("full", "h2o", "prefetch") if name in ends]
    low, high = max(slowest for slowest, _ in plain), min(fastest for _, fastest in plain)
    moved = {
        name: READINGS["flexgen-20"].latency(name, MODELS[QWEN], 4096).moved["ssd to host"] for name in ("prefetch", "leoam")
    }
    long = [point for point in found.speedups["sizes"] if point.model == LONGCHAT]
    last = READINGS["sizes"].latency("hillinfer", MODELS[LONGCHAT], 32768)
    return {
        "inside": "; ".join(inside),
        "device": device / 1e9,
        "ssd": ssd / 1e9,
        "times": ssd / device,
        "half": ssd / device / 2,
        "rates": ", ".join(f"{SYSTEMS[name].title} {a / 1e9:.2f} to {b / 1e9:.2f} GB/s" for name, (a, b) in ends.items()),
        "between": f"{low / 1e9:.2f} to {high / 1e9:.2f} GB/s" if low < high else "no one speed",
        "most": max(value for of in found.speedups.values() for value in over(of, "leoam")),
        "leoam": moved["leoam"] / 1e9,
        "prefetch": moved["prefetch"] / 1e9,
        "ends": " to ".join(f"{one.speedup('prefetch'):.2f}x at {one.context // 1024} K" for one in (long[0], long[-1])),
        "share": last.places.ssd_share,
        "token": last.token_ns / 1e9,
        "evaluate": last.stages["evaluate"] / 1e9,
    }


def _ranges(paper: Paper, head: str, speedups: Mapping[str, Cases]) -> Table:
    """Least and largest speed-up over each baseline, a row for each reading."""
    rows: list[list[Cell]] = [
        [paper.variants[name], *(f"{min(row):.2f} to {max(row):.2f}" for row in (over(of, one) for one in BASELINES))]
        for name, of in speedups.items()
    ]
    return Table(head, ["reading", *(f"over {SYSTEMS[name].title}" for name in BASELINES)], rows)


def _rates(ends: Range) -> str:
    if all(map(math.isnan, ends)):
        return "no speed does it"
    return " to ".join("any" if math.isnan(rate) else f"{rate / 1e9:.2f}" for rate in ends)


def _transfer_words(data: Sequence[Transfers]) -> str:
    ends = [(one.kind, share, list(row.values())) for one in data for share, row in one.seconds.items()]
    return "; ".join(f"{kind}, {share:.0%}: {of[0]:.3g} to {of[-1]:.3g} s" for kind, share, of in ends)


def _transfer_table(data: Transfers) -> Table:
    rows: list[list[Cell]] = [[f"{share:.0%}", *row.values()] for share, row in data.seconds.items()]
    contexts = [f"{context:,}" for context in data.seconds[SHARES[0]]]
    return Table(f"Seconds, {data.of_layers} ({data.kind})", ["share", *contexts], rows)


def _accuracy_table(paper: Paper, found: Mapping[str, Any]) -> Table:
    rows: list[list[Cell]] = [
        [paper.variants[name], *row.values(), found["full"]] for name, row in found["by_system"].items()
    ]
    alphas = [f"alpha {alpha}" for alpha in found["by_system"]["hillinfer"]]
    head = f"Share of right answers, contexts of {found['tokens']:,} tokens, {found['answers']} answers (measured)"
    return Table(head, ["system", *alphas, "full cache"], rows)


def _machine_table(machine: Hardware) -> Table:
    """Returns every number of `machine` with where it comes from."""

    def value(name: str) -> str:
        number = getattr(machine, name)
        if name.endswith("_bytes"):
            return f"{number / GIB:.1f} GiB" if number >= GIB else format_size(number)
        if name.endswith("_bytes_per_s"):
            return format_rate(number)
        if name.endswith("_ns"):
            return format_duration(number)
        return f"{number:.3g} operations/s" if name.endswith("_flops") else f"{number:,.0f} requests/s"

    rows: list[list[Cell]] = []
    for name in NUMBERS:
        origin, words = machine.origins[name], name.removesuffix("_per_s").removesuffix("_bytes").replace("_", " ")
        rows.append([words, value(name), origin.kind, origin.text])
    return Table(machine.title, ["number", "value", "origin", "source"], rows)


def _bench_table(bench: Bench, head: str) -> Table:
    """Returns the rows of a benchmark: times, idle share, bytes from the SSD, hits."""
    columns = ["system", "beta", "ms a step", "evaluate (ms)", "fetch (ms)", "idle (%)", "MB from SSD to host", "hits (%)"]
    rows: list[list[Cell]] = [
        [
            row.title,
            "-" if row.beta is None else f"{row.beta:.3g}",
            row.token_ns / 1e6,
            row.stages_ns["evaluate"] / 1e6,
            row.stages_ns["fetch"] / 1e6,
            100 * row.idle_share,
            sum(size for link, size in row.moved_bytes.items() if link.startswith("ssd to cpu")) / 1e6,
            "-" if row.observed is None else f"{100 * row.observed.hit_ratio:.0f}",
        ]
        for row in bench.rows
    ]
    return Table(head, columns, rows, digits=1)


# Pictures like the paper's, from our numbers; what the paper says is drawn apart, as marks

_TWO = (Look("#0072b2", "-", "o", 2.2), Look("#d55e00", (0, (5, 1)), "s", 2.0))
SYSTEM_LOOKS = {name: KV_LOOKS[name] for name in ("full", "h2o", "prefetch", "leoam", "hillinfer")}


def _memory_figure(found: HillInferResults) -> Figure:
    """Returns figure 2: GiB over context and over batch, the paper's numbers as crosses."""
    figure, axes = grid_of(2)
    panels = (
        (found.by_context, f"batch {BATCH}", "context (tokens)", MEMORY_CONTEXT),
        (found.by_batch, f"context {MEMORY_CONTEXT:,}", "batch", BATCH),
    )
    for panel, (rows, title, label, said_at) in zip(axes, panels, strict=True):
        for look, (model, row) in zip(_TWO, rows.items(), strict=True):
            panel.plot(list(row), [use.total / GIB for use in row.values()], label=model, **look.line())
            crossed = f"{model}: the paper"
            panel.plot([said_at], [SAID[model]], "x", color=look.colour, markersize=9, markeredgewidth=2, label=crossed)
        for limit, name in ((GPU_GB, "RTX 4090"), (PC_GB, "a typical PC, all memory")):
            panel.axhline(limit, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
            place, words = ("axes fraction", "data"), f"{name}: {limit} GB"
            panel.annotate(words, (0, limit), (3, 3), place, "offset points", fontsize=7.5, color=MUTED)
        powers_of_2(panel, list(rows[QWEN]), [f"{value:,}" for value in rows[QWEN]], label)
        panel.set(ylim=(0, None), ylabel="memory, modelled (GiB)", title=title)
    legend_below(figure, axes)
    return figure


def _transfer_figure(found: Sequence[Transfers]) -> Figure:
    """Returns figure 3a, one panel for each of `found`: seconds over context."""
    figure, axes = grid_of(len(found))
    for panel, data in zip(axes, found, strict=True):
        for look, (share, row) in zip(_TWO, data.seconds.items(), strict=True):
            panel.plot(list(row), list(row.values()), label=f"{share:.0%} of the KV cache", **look.line())
        contexts = list(data.seconds[SHARES[0]])
        panel.set_xticks(contexts, [f"{context // 1024} K" if context >= 1024 else str(context) for context in contexts])
        panel.set(ylim=(0, None), xlabel="context (tokens)", ylabel=f"seconds, {data.kind}")
        panel.set_title(f"{data.kind}: {data.of_layers}")
    legend_below(figure, axes)
    return figure


def _speedup_figure(paper: Paper, speedups: Mapping[str, Cases]) -> Figure:
    """Returns figure 10: speed-ups end to end at every point, one panel a reading."""
    figure, axes = grid_of(len(speedups))
    for panel, (name, found) in zip(axes, speedups.items(), strict=True):
        panel.axhspan(LEAST, MOST, color=FAINT, zorder=0, label=f"the paper: {LEAST} to {MOST}x")
        panel.axhline(1, color=MUTED, linewidth=0.8, zorder=1)
        # The four baselines side by side, so that none hides another.
        for shift, baseline in zip((-0.24, -0.08, 0.08, 0.24), BASELINES, strict=True):
            line = SYSTEM_LOOKS[baseline].line() | {"linestyle": "none", "markersize": 6.5}
            places = [number + shift for number in range(len(found))]
            panel.plot(places, over(found, baseline), label=f"over {SYSTEMS[baseline].title}", **line)
        panel.set_yscale("log", base=2)
        panel.set_yticks([0.25, 0.5, 1, 2, 4, 8, 16], ["0.25", "0.5", "1", "2", "4", "8", "16"])
        panel.minorticks_off()
        labels = [f"{point.model} {point.context // 1024} K" for point in found]
        panel.set_xticks(range(len(found)), labels, rotation=60, ha="right", fontsize=7.5)
        panel.set(ylabel="HillInfer's speed-up, modelled", title=paper.variants[name])
    legend_below(figure, axes)
    return figure


def _latency_figure(paper: Paper, speedups: Mapping[str, Cases], model: str) -> Figure:
    """Returns figure 9 for one model: seconds per token over context, one panel a reading."""
    figure, axes = grid_of(len(speedups))
    for panel, (name, found) in zip(axes, speedups.items(), strict=True):
        own = [point for point in found if point.model == model]
        contexts = [point.context for point in own]
        for system, look in SYSTEM_LOOKS.items():
            values = [point.latencies[system].token_ns / 1e9 for point in own]
            panel.plot(contexts, values, label=SYSTEMS[system].title, **look.line())
        panel.set_yscale("log")
        powers_of_2(panel, contexts, [f"{context // 1024} K" for context in contexts], "context (tokens)")
        panel.set(ylabel=f"s per decode step, {model}, modelled", title=paper.variants[name])
        panel.yaxis.set_major_formatter("{x:g}")
    legend_below(figure, axes)
    return figure


def _sweep_figure(sweep: Sweep) -> Figure:
    """Returns figure 11b: ms per token over beta, in multiples of fc / fs."""
    figure, (panel,) = grid_of(1)
    for look, (name, times) in zip(_TWO, sweep.items(), strict=True):
        panel.plot(list(STEPS), [time / 1e6 for time in times], label=name, **look.line())
    panel.axvline(1, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    powers_of_2(panel, STEPS, [f"{step:g}" for step in STEPS], f"beta, in multiples of fc/fs ({BETA_RULE:.3g})")
    panel.set(ylim=(0, None), ylabel="ms per decode step, modelled", title="Qwen-7B, 8 K: latency by the ratio of the pools")
    legend_below(figure, [panel])
    return figure
