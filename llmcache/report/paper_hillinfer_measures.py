"""What HillInfer claims, measured: memory, transfers, answers, speed-ups, parts; by models, readings and saved runs.

The paper leaves open what decides about its speed-ups, so several readings of its set-up are judged, none chosen for its
result. The first takes the machine as section 4.2 states it. The others put the share of the KV cache on the SSD that
figure 3a speaks of, whatever the memory; two of them take the speed of the SSD from the paper of the framework that the
baselines are built on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from llmcache.kv.bench.results import Bench, Row
from llmcache.kv.planning import (
    MODELS,
    PAPER_PC,
    SYSTEMS,
    Hardware,
    Latency,
    MemoryUse,
    ModelShape,
    System,
    Workload,
    hillinfer,
    latency,
    memory_use,
)
from llmcache.kv.planning.hardware import ASSUMED, Origin
from llmcache.kv.planning.placement import KEYS, KEYS_AND_VALUES, by_beta, by_ssd_share
from llmcache.report.judge import Measure

GIB = 1 << 30
QWEN, LLAMA, LONGCHAT = "Qwen-7B", "Llama2-13B", "LongChat-7B"
BATCH, ALPHA = 8, 0.2  # 4.2: "We set the importance rate α as 0.2 and batch size = 8 in our experiment"
OUTPUT_TOKENS = 128  # 4.2: "We set the output length as 128"
CONTEXTS = (2048, 4096, 8192, 16384, 32768)
LEAST, MOST = 4.21, 8.56
BASELINES = tuple(name for name in SYSTEMS if name != "hillinfer")
MEMORY_MODEL, READ, HERE = "memory model", "reading from the SSD", "this machine"


# How the paper's experiments can be read


@dataclass(frozen=True)
class Reading:
    """One way to read section 4.2. `ssd_share`: of the KV cache, for every system; None: what does not fit elsewhere.

    `host_evaluates`, `device_caches` and what is known of where important tokens lie as in `Workload`.
    """

    name: str
    title: str
    text: str
    machine: Hardware
    ssd_share: float | None = None
    host_evaluates: str = KEYS
    device_caches: bool = False
    important_on_ssd: float | None = None
    important_on_ssd_bkp: float | None = None

    def workload(self, context: int) -> Workload:
        """Returns the workload of section 4.2 at `context`."""
        return Workload(
            context,
            BATCH,
            ALPHA,
            host_evaluates=self.host_evaluates,
            device_caches=self.device_caches,
            important_on_ssd=self.important_on_ssd,
            important_on_ssd_bkp=self.important_on_ssd_bkp,
        )

    def latency(self, system: str | System, model: ModelShape, context: int) -> Latency:
        """Returns the modelled latency of `system`, a name or a system."""
        workload = self.workload(context)
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


def _by_share(name: str, share: float, machine: Hardware = PAPER_PC) -> Reading:
    slower = machine is not PAPER_PC
    why = "; the host reads its SSD at 2 GB/s, as FlexGen's paper says of the one it measures with" if slower else ""
    text = (
        f"the SSD has {share:.0%} of the KV cache, for every system (figure 3a); without in-storage evaluation the KV data "
        f"is read to the host for it (3.2), keys and values; the device scores from its DRAM what fits in there (2.2){why}"
    )
    title = f"{share:.0%} on the SSD" + (", read at 2 GB/s" if slower else "")
    return Reading(name, title, text, machine, share, KEYS_AND_VALUES, True)


READINGS: dict[str, Reading] = {
    reading.name: reading
    for reading in (
        Reading(
            "sizes",
            "sizes as stated",
            "24 GB and 64 GB of memory; the SSD has what they have no room for; speeds of data sheets; keys are enough to "
            "evaluate; the device reads its flash",
            PAPER_PC,
        ),
        _by_share("share-20", 0.2),
        _by_share("share-30", 0.3),
        _by_share("flexgen-20", 0.2, _FLEXGEN_PC),
        _by_share("flexgen-30", 0.3, _FLEXGEN_PC),
    )
}
"""All readings by name."""


@dataclass(frozen=True)
class ModelledCase:
    """One model at one context; `latencies` by system, *modelled*."""

    model: str
    context: int
    latencies: dict[str, Latency]

    def speedup(self, baseline: str, output_tokens: int = OUTPUT_TOKENS) -> float:
        """How many times as long `baseline` takes as HillInfer, end to end. Source: 4.3, "end-to-end latency"."""
        ends = [self.latencies[name].end_to_end_ns(output_tokens) for name in (baseline, "hillinfer")]
        return ends[0] / ends[1]


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


@dataclass(frozen=True)
class MemoryTable:
    """What models take, bytes: `by_context` at a batch of 8, `by_batch` at 4 K, each by model and value."""

    by_context: Mapping[str, Mapping[int, MemoryUse]]
    by_batch: Mapping[str, Mapping[int, MemoryUse]]

    @classmethod
    def computed(cls) -> MemoryTable:
        """Returns figure 2: both models at several contexts and batches."""
        models = {name: MODELS[name] for name in SAID}
        contexts, batches = (1024, 2048, 4096, 8192), (1, 2, 4, 8, 16)
        return cls(
            {name: {context: memory_use(model, context, BATCH) for context in contexts} for name, model in models.items()},
            {name: {batch: memory_use(model, MEMORY_CONTEXT, batch) for batch in batches} for name, model in models.items()},
        )

    def at(self, model: str) -> MemoryUse:
        """What `model` takes at 4 K and a batch of 8."""
        return self.by_context[model][MEMORY_CONTEXT]


def memory_measures(memory: MemoryTable) -> dict[str, Measure]:
    """Returns what is claimed of memory."""

    def takes(model: str) -> Measure:
        use = memory.at(model)
        away = use.total / GIB / SAID[model] - 1
        words = (
            f"{use.total / GIB:.1f} GiB ({use.total / 1e9:.1f} GB of 10^9 bytes): weights {use.weights / GIB:.1f}, "
            f"KV {use.kv / GIB:.1f}; {away:+.1%}"
        )
        values = {"total_bytes": use.total, "kv_bytes": use.kv, "difference": away, "away": abs(away)}
        return Measure(words, values)

    def exceeds(model: str, limit: int) -> Measure:
        total = memory.at(model).total
        return Measure(f"{total / GIB:.1f} GiB against {limit} GiB", {"total_bytes": total, "gib": total / GIB})

    use = memory.at(QWEN)
    share = use.kv / use.total
    values = {"kv_share": share, "kv_bytes": use.kv, "weight_bytes": use.weights}
    return {
        "qwen-30-gb": takes(QWEN),
        "qwen-beyond-the-gpu": exceeds(QWEN, GPU_GB),
        "mostly-kv": Measure(f"KV is {share:.0%} of {use.total / GIB:.1f} GiB", values),
        "llama-51-gb": takes(LLAMA),
        "llama-beyond-a-pc": exceeds(LLAMA, PC_GB),
    }


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
    def read(cls, told: Mapping[str, Any] | None) -> Transfers | None:
        """Returns what was measured, None if nothing was."""
        if told is None:
            return None
        seconds: dict[float, dict[int, float]] = {}
        for row in told["rows"]:
            seconds.setdefault(row["share"], {})[row["context"]] = row["seconds"]
        return cls("measured", told["layers"], seconds)

    @property
    def of_layers(self) -> str:
        """How many layers were read, in words."""
        return "one layer" if self.layers == 1 else f"{self.layers} layers"

    def document(self) -> dict[str, Any]:
        """Returns it for a JSON document."""
        rows = [{"share": s, "context": c, "seconds": one} for s, row in self.seconds.items() for c, one in row.items()]
        return {"kind": self.kind, "layers": self.layers, "rows": rows}

    def measures(self) -> dict[str, Measure]:
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

RECALLING = ("h2o", "prefetch", "hillinfer")
"""What figure 8 compares with the full cache."""


def accuracy_measures(found: Mapping[str, Any], system: str) -> dict[str, Measure]:
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


def over(points_: Sequence[ModelledCase], baseline: str) -> list[float]:
    """HillInfer's speed-ups over `baseline`, end to end, at every point."""
    return [point.speedup(baseline) for point in points_]


def speedup_measures(found: Sequence[ModelledCase]) -> dict[str, Measure]:
    """Returns what is claimed of speed-ups, for the points of one reading."""
    by_baseline = {name: over(found, name) for name in BASELINES}
    every = [value for values in by_baseline.values() for value in values]
    inside = sum(LEAST <= value <= MOST for value in every)
    told = ", ".join(f"{SYSTEMS[name].title} {min(row):.2f} to {max(row):.2f}x" for name, row in by_baseline.items())
    values = {f"{name}.{word}": pick(row) for name, row in by_baseline.items() for word, pick in _PICKS}
    name, largest = max(((name, max(row)) for name, row in by_baseline.items()), key=lambda item: item[1])
    highest = Measure(
        f"{largest:.2f}x at most, over {SYSTEMS[name].title}", {"most": largest, "away": abs(largest / MOST - 1)}
    )
    return {
        "speed-up-range": Measure(
            f"{inside} of {len(every)} in range; {told}", values | {"share_in_range": inside / len(every)}
        ),
        "up-to-8.56": highest,
        "longer-gains-more": _longer(found),
    }


_PICKS: tuple[tuple[str, Callable[[list[float]], float]], ...] = (("least", min), ("most", max))


def systems_in_order(found: Sequence[ModelledCase]) -> Measure:
    """Measures at how many points the systems come in the order of section 4.2, slowest first."""
    names, ordered = list(SYSTEMS), 0
    pairs: dict[str, int] = {}
    for point in found:
        times = [point.latencies[name].end_to_end_ns(OUTPUT_TOKENS) for name in names]
        steps = [before >= after for before, after in pairwise(times)]
        ordered += all(steps)
        for name, nxt, step in zip(names[:-1], names[1:], steps, strict=True):
            pairs[f"{name} >= {nxt}"] = pairs.get(f"{name} >= {nxt}", 0) + step
    told = ", ".join(f"{pair} {times} times" for pair, times in pairs.items())
    return Measure(f"in order at {ordered} of {len(found)} points; {told}", {"share": ordered / len(found)})


def _longer(found: Sequence[ModelledCase]) -> Measure:
    """Measures at how many steps of context the speed-up over each baseline grows, for models that have several."""
    rises = total = 0
    ends: dict[str, tuple[float, float]] = {}
    for model in MODELS:
        own = [point for point in found if point.model == model]
        for baseline in BASELINES:
            speedups = over(own, baseline)
            rises += sum(after > before for before, after in pairwise(speedups))
            total += max(0, len(speedups) - 1)
        if len(own) > 1:
            ends[model] = (own[0].speedup("prefetch"), own[-1].speedup("prefetch"))
    told = ", ".join(f"{model} {first:.2f} to {last:.2f}x" for model, (first, last) in ends.items())
    words = f"rises at {rises} of {total} steps of context; over prefetch-based, shortest to longest: {told}"
    return Measure(words, {"share_of_steps": rises / total})


def with_hits(bench: Bench, share: float) -> dict[str, list[ModelledCase]] | None:
    """Returns the points of the readings with `share` on the SSD, for misses as *measured* at the same share.

    Still *modelled*: only how many of the important tokens are on the SSD, with BKP and without, was measured. None if the
    benchmark did not observe it.
    """
    misses = {row.policy: 1 - row.observed.hit_ratio for row in bench.rows if row.observed is not None}
    if not {"prefetch", "hillinfer"} <= set(misses):
        return None
    plain, kept = misses["prefetch"], misses["hillinfer"]
    chosen = {name: reading for name, reading in READINGS.items() if reading.ssd_share == share}
    return {
        name: points(replace(reading, important_on_ssd=plain, important_on_ssd_bkp=kept)) for name, reading in chosen.items()
    }


@dataclass(frozen=True)
class Needed:
    """SSD speeds (bytes/s) between which HillInfer's speed-up over `baseline` is in the paper's range; NaN: at none."""

    baseline: str
    slowest: float
    fastest: float


def needed(reading: Reading, model: str = QWEN, context: int = 4096) -> list[Needed]:
    """Returns how fast the baselines' SSD would have to be for the paper's range, all else as in `reading`.

    HillInfer itself does not read that SSD, so a slower one makes it look faster.
    """
    return [
        Needed(name, *(_rate_for(reading, model, context, name, speedup) for speedup in (MOST, LEAST))) for name in BASELINES
    ]


def _rate_for(reading: Reading, model: str, context: int, baseline: str, speedup: float) -> float:
    """The SSD's bytes/s at which the speed-up is `speedup`, by bisection (it falls as the SSD gets faster); NaN: none."""
    shape, base = MODELS[model], reading.machine.ssd_bytes_per_s

    def at(rate: float) -> float:
        machine = reading.machine.faster(ssd_bytes_per_s=rate / base, ssd_requests_per_s=rate / base)
        changed = replace(reading, machine=machine, important_on_ssd=None, important_on_ssd_bkp=None)
        return ModelledCase(
            "", context, {name: changed.latency(name, shape, context) for name in (baseline, "hillinfer")}
        ).speedup(baseline)

    low, high = 1e7, 1e12
    if not at(high) <= speedup <= at(low):
        return math.nan
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if at(middle) < speedup else (middle, high)
    return low


# Parts, and the ratio of the pools: figure 11 and section 4.4, modelled

PART_CONTEXT = 8192
PARTS: dict[str, System] = {
    "prefetch-based": SYSTEMS["prefetch"],
    "+ Design 1 (HIE, BKP)": hillinfer(app=False),
    "+ Design 1 and 2 (APP)": hillinfer(),
}
"""The bars of figure 11a."""
WORST, BEST = "BKP keeps nothing", "BKP keeps everything"
STEPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Values of beta, as multiples of fc / fs."""


@dataclass(frozen=True)
class BetaSweep:
    """Modelled latency (ns per token) by beta, in multiples of fc / fs (`rule`), for the ends of what BKP can do."""

    rule: float
    token_ns: Mapping[str, Sequence[float]]

    @classmethod
    def modelled(cls) -> BetaSweep:
        """Returns figure 11b by the model: host memory without bound, so that only the rule decides."""
        reading, model = READINGS["sizes"], MODELS[QWEN]
        rule = reading.machine.score_bytes_per_s / reading.machine.device_bytes_per_s
        workload = reading.workload(PART_CONTEXT)
        kv_bytes = model.kv_bytes(PART_CONTEXT, workload.batch)

        def curve(on_ssd: float | None) -> list[float]:
            own = replace(workload, important_on_ssd_bkp=on_ssd)
            places = (by_beta(kv_bytes, step * rule) for step in STEPS)
            return [latency("hillinfer", reading.machine, model, own, place).token_ns for place in places]

        return cls(rule, {WORST: curve(None), BEST: curve(0.0)})

    def measure(self, variant: str) -> Measure:
        """Measures how many steps of the sweep the least latency is from beta = fc / fs."""
        times = self.token_ns[variant]
        best, place = times.index(min(times)), STEPS.index(1.0)
        excess = times[place] / min(times) - 1
        told = ", ".join(f"{step:g}: {time / 1e6:.0f} ms" for step, time in zip(STEPS, times, strict=True))
        words = f"least at {STEPS[best]:g} times fc/fs ({self.rule:.3g}); at fc/fs {excess:+.1%}; {told}"
        return Measure(words, {"best": STEPS[best], "excess_at_rule": excess, "steps_away": abs(best - place)})


Ablation = Mapping[str, Mapping[str, Latency]]
"""Modelled latencies of `PARTS`, by reading."""


def ablation() -> Ablation:
    """Returns figure 11a by the model, for every reading."""
    return {
        name: {part: reading.latency(system, MODELS[QWEN], PART_CONTEXT) for part, system in PARTS.items()}
        for name, reading in READINGS.items()
    }


def part_measures(found: Mapping[str, Latency], reading: Reading) -> dict[str, Measure]:
    """Returns what is claimed of the parts of HillInfer and of what they need besides, for one reading."""
    times = {part: one.token_ns / 1e9 for part, one in found.items()}
    faster = sum(after < before for before, after in pairwise(times.values()))
    whole, model = found["+ Design 1 and 2 (APP)"], MODELS[QWEN]
    tokens = whole.places.ssd / model.token_bytes
    size = 4.0 * model.kv_heads * tokens * model.layers
    share = size / whole.places.total
    hidden = size / reading.machine.device_link_bytes_per_s * 1e9 <= whole.busy["device"] or not tokens
    blocks = f"{size / 1e6:.3g} MB a step, {share:.2%} of the KV cache; sent while the device scores: "
    table = 2.0 * model.layers / model.token_bytes
    return {
        "each-part-counts": Measure(
            "s per token: " + ", ".join(f"{part} {seconds:.3g}" for part, seconds in times.items()),
            times | {"faster": faster},
        ),
        "score-blocks": Measure(
            blocks + ("yes" if hidden else "no"), {"bytes": size, "share": share, "hidden": float(hidden)}
        ),
        "hit-table": Measure(f"2 bytes per token and layer: {table:.3%} of the KV cache", {"share": table}),
    }


# What ran on a machine with no GPU, its device emulated: verdicts of this project's systems, not of the paper's


def run_measures(bench: Bench) -> dict[str, Measure]:
    """Returns what is claimed of speed-ups, parts and traffic, from a benchmark of all systems."""
    rows = {row.policy: row for row in bench.rows}
    ours = rows["hillinfer"]
    speedups = {name: ours.speedup_over(rows[name]) for name in BASELINES}
    inside = sum(LEAST <= value <= MOST for value in speedups.values())
    names = ("prefetch", "hillinfer-no-app", "hillinfer")
    times = {name: rows[name].token_ns for name in names}
    # Two medians may differ by 5 % on a machine that does other things too.
    faster = sum(after <= 0.95 * before for before, after in pairwise(times.values()))
    moved = {name: _evaluated(rows[name]) for name in ("prefetch", "hillinfer")}
    ratio = moved["prefetch"] / max(moved["hillinfer"], 1.0)
    return {
        "speed-up-here": Measure(
            ", ".join(f"{rows[name].title} {value:.2f}x" for name, value in speedups.items()), speedups | {"inside": inside}
        ),
        "parts-here": Measure(
            ", ".join(f"{rows[name].title} {time / 1e6:.1f} ms" for name, time in times.items()), times | {"faster": faster}
        ),
        "link-bytes-here": Measure(
            f"{moved['prefetch'] / 1e6:.3g} MB a step against {moved['hillinfer'] / 1e6:.3g} MB: {ratio:.0f} times fewer",
            moved | {"ratio": ratio},
        ),
    }


def _evaluated(row: Row) -> float:
    """Bytes a step that cross from the SSD to the host for evaluation."""
    return sum(size for link, size in row.moved_bytes.items() if link.startswith("ssd to cpu") and "scor" in link)


def beta_measure(bench: Bench) -> Measure:
    """Measures how many steps of the sweep the least latency is from where rule and memory expect it."""
    rows = sorted(bench.rows, key=lambda row: row.beta or 0.0)
    betas, times = [row.beta or 0.0 for row in rows], [row.token_ns for row in rows]
    expected = bench.marks.expected if bench.marks is not None else 0.0
    best = times.index(min(times))
    place = min(range(len(rows)), key=lambda number: abs(betas[number] - expected))
    excess = times[place] / min(times) - 1
    told = ", ".join(f"{beta:.3g}: {time / 1e6:.1f} ms" for beta, time in zip(betas, times, strict=True))
    words = f"least at {betas[best]:.3g}, expected at {expected:.3g} ({excess:+.0%} there); {told}"
    return Measure(words, {"best": betas[best], "expected": expected, "excess": excess, "steps_away": abs(best - place)})
