"""The claims about latency and speed-up: figures 9 and 10 of hillinfer and section 4.3. *Modelled*, for each reading."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from llmcache.kv.bench.results import Bench
from llmcache.kv.planning import MODELS, SYSTEMS
from llmcache.report.claims import Claim, Finding, graded
from llmcache.report.reproduce.hillinfer.readings import BASELINES, READINGS, Point, Reading, points

LEAST, MOST = 4.21, 8.56
OUTPUT_TOKENS = 128  # 4.2: "We set the output length as 128"
SECTION = "4.3"
SLOWEST, FASTEST = 1e7, 1e12  # bytes/s: between these an SSD is looked for


@dataclass(frozen=True)
class Speedups:
    """Modelled points by reading."""

    points: Mapping[str, Sequence[Point]]

    def over(self, reading: str, baseline: str) -> list[float]:
        """HillInfer's speed-ups over `baseline`, end to end, at every point."""
        return [point.speedup(baseline, OUTPUT_TOKENS) for point in self.points[reading]]


def computed() -> Speedups:
    """Returns the modelled points of every reading."""
    return Speedups({name: points(reading) for name, reading in READINGS.items()})


def with_hits(bench: Bench, share: float) -> Speedups | None:
    """Returns the points of the readings with `share` on the SSD, for misses as *measured here* at the same share.

    Still *modelled*: only how many of the important tokens are on the SSD, with BKP and without, was measured. None if the
    benchmark did not observe it.
    """
    misses = {row.policy: 1 - row.observed.hit_ratio for row in bench.rows if row.observed is not None}
    if not {"prefetch", "hillinfer"} <= set(misses):
        return None
    plain, kept = misses["prefetch"], misses["hillinfer"]
    chosen = {name: reading for name, reading in READINGS.items() if reading.ssd_share == share}
    return Speedups(
        {
            name: points(replace(reading, important_on_ssd=plain, important_on_ssd_bkp=kept))
            for name, reading in chosen.items()
        }
    )


def in_range(data: Speedups, reading: str) -> Finding:
    """Whether the speed-ups over all four baselines lie in the range that the paper reports."""
    by_baseline = {name: data.over(reading, name) for name in BASELINES}
    every = [value for values in by_baseline.values() for value in values]
    inside = sum(LEAST <= value <= MOST for value in every)
    share = inside / len(every)
    told = ", ".join(
        f"{SYSTEMS[name].title} {min(values):.2f} to {max(values):.2f}x" for name, values in by_baseline.items()
    )
    ours = f"{inside} of {len(every)} in range; {told}"
    values = {f"{name}.{word}": pick(found) for name, found in by_baseline.items() for word, pick in _ENDS}
    return Finding(graded(share == 1, share >= 0.5), ours, values | {"share_in_range": share})


_ENDS = (("least", min), ("most", max))


def up_to(data: Speedups, reading: str) -> Finding:
    """Whether the largest speed-up is as large as the paper's."""
    name, largest = max(((name, max(data.over(reading, name))) for name in BASELINES), key=lambda item: item[1])
    ours = f"{largest:.2f}x at most, over {SYSTEMS[name].title}"
    return Finding(graded(abs(largest / MOST - 1) <= 0.1, largest >= LEAST), ours, {"most": largest})


def order(data: Speedups, reading: str) -> Finding:
    """Whether the systems come in the order of section 4.2, slowest first, at every point."""
    held = 0
    names = list(SYSTEMS)
    pairs: dict[str, int] = {}
    for point in data.points[reading]:
        times = [point.latencies[name].end_to_end_ns(OUTPUT_TOKENS) for name in names]
        steps = [before >= after for before, after in pairwise(times)]
        held += all(steps)
        for name, nxt, step in zip(names[:-1], names[1:], steps, strict=True):
            pairs[f"{name} >= {nxt}"] = pairs.get(f"{name} >= {nxt}", 0) + step
    count = len(data.points[reading])
    told = ", ".join(f"{pair} {times} times" for pair, times in pairs.items())
    share = held / count
    return Finding(graded(share == 1, share >= 0.5), f"in order at {held} of {count} points; {told}", {"share": share})


def longer_gains_more(data: Speedups, reading: str) -> Finding:
    """Whether the speed-up over each baseline grows with the context, for models that have several."""
    rises = total = 0
    ends: dict[str, tuple[float, float]] = {}
    for model in MODELS:
        own = [point for point in data.points[reading] if point.model == model]
        for baseline in BASELINES:
            found = [point.speedup(baseline, OUTPUT_TOKENS) for point in own]
            rises += sum(after > before for before, after in pairwise(found))
            total += max(0, len(found) - 1)
        if len(own) > 1:
            ends[model] = (own[0].speedup("prefetch", OUTPUT_TOKENS), own[-1].speedup("prefetch", OUTPUT_TOKENS))
    told = ", ".join(f"{model} {first:.2f} to {last:.2f}x" for model, (first, last) in ends.items())
    ours = f"rises at {rises} of {total} steps of context; over prefetch-based, shortest to longest: {told}"
    share = rises / total
    return Finding(graded(share == 1, share >= 0.5), ours, {"share_of_steps": share})


@dataclass(frozen=True)
class Needed:
    """SSD speeds (bytes/s) between which HillInfer's speed-up over `baseline` is in the paper's range; NaN: at none."""

    baseline: str
    slowest: float
    fastest: float


def needed(reading: Reading, model: str = "Qwen-7B", context: int = 4096) -> list[Needed]:
    """Returns how fast the baselines' SSD would have to be for the paper's range, all else as in `reading`.

    HillInfer itself does not read that SSD, so a slower one makes it look faster.
    """
    return [
        Needed(
            baseline,
            _rate_for(reading, model, context, baseline, MOST),
            _rate_for(reading, model, context, baseline, LEAST),
        )
        for baseline in BASELINES
    ]


def _rate_for(reading: Reading, model: str, context: int, baseline: str, speedup: float) -> float:
    """The SSD's bytes/s at which the speed-up is `speedup`, by bisection (it falls as the SSD gets faster); NaN: none."""
    shape, base = MODELS[model], reading.machine.ssd_bytes_per_s

    def at(rate: float) -> float:
        machine = reading.machine.faster(ssd_bytes_per_s=rate / base, ssd_requests_per_s=rate / base)
        changed = Reading(reading.name, "", "", machine, reading.ssd_share, reading.host_evaluates, reading.device_caches)
        return Point("", context, {name: changed.latency(name, shape, context) for name in (baseline, "hillinfer")}).speedup(
            baseline, OUTPUT_TOKENS
        )

    low, high = SLOWEST, FASTEST
    if not at(high) <= speedup <= at(low):
        return math.nan
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if at(middle) < speedup else (middle, high)
    return low


CLAIMS: tuple[Claim[Speedups], ...] = (
    Claim(
        "speed-up-range",
        SECTION,
        "HillInfer reduces end-to-end latency by 76.25%~88.32% […] achieves a speedup of 4.21 ~ 8.56×",
        "the speed-up over each of the four baselines is from 4.21 to 8.56 at every model and context; partly: at half of "
        "them or more",
        in_range,
        tuple(READINGS),
    ),
    Claim(
        "up-to-8.56",
        "abstract",
        "up to 8.56× speedup over baselines",
        "the largest is within 10 % of 8.56; partly: at least 4.21",
        up_to,
        tuple(READINGS),
    ),
    Claim(
        "order",
        "4.2",
        "(1) Full Cache […] (2) H2O-like […] (3) Prefetch-based […] (4) LeoAM-like",
        "end-to-end latency falls in this order, HillInfer last, at every point; partly: at half of them. The text gives no "
        "order of results: this is the one it lists the systems in",
        order,
        tuple(READINGS),
    ),
    Claim(
        "longer-gains-more",
        SECTION,
        "with more pronounced speed-up gains on datasets with longer context lengths",
        "the speed-up rises at every step of context, over every baseline; partly: at half of the steps or more",
        longer_gains_more,
        tuple(READINGS),
    ),
)
