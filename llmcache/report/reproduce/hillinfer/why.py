"""Why the modelled speed-ups are what they are: sentences whose numbers are computed from the results beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from llmcache.kv.bench.results import Bench
from llmcache.kv.planning import MODELS, PAPER_PC, SYSTEMS
from llmcache.report.reproduce.hillinfer import figure10
from llmcache.report.reproduce.hillinfer.figure10 import LEAST, MOST, OUTPUT_TOKENS, Needed, Speedups
from llmcache.report.reproduce.hillinfer.measured import Measured
from llmcache.report.reproduce.hillinfer.readings import BASELINES, READINGS

QWEN, CONTEXT = "Qwen-7B", 4096


def paragraphs(data: Speedups, measured: Measured) -> Iterator[str]:
    """Yields what decides about the speed-ups, in the order of its weight."""
    yield _in_words(data)
    yield _storage()
    yield _needed()
    yield _abstracts(data)
    yield _evaluation(data)
    if measured.systems is not None:
        yield _here(measured.systems)


def _here(bench: Bench) -> str:
    rows = {row.policy: row for row in bench.rows}
    fastest = min(rows.values(), key=lambda row: row.token_ns)
    ours = rows["hillinfer"]
    return (
        f"On this machine (measured here) the fastest system is {fastest.title}, {fastest.token_ns / 1e6:.0f} ms a step; "
        f"HillInfer takes {ours.token_ns / 1e6:.0f} ms, {ours.stages_ns['evaluate'] / 1e6:.0f} of them with evaluation. Its "
        f"device is emulated: it scores on the same processors as the host and reads the same disk, so there is no second "
        f"engine to gain from."
    )


def _in_words(data: Speedups) -> str:
    parts = []
    for name, reading in READINGS.items():
        values = [value for baseline in BASELINES for value in data.over(name, baseline)]
        inside = sum(LEAST <= value <= MOST for value in values)
        parts.append(f"{reading.title}: {inside} of {len(values)}")
    return "Speed-ups that lie in the paper's range, by reading: " + "; ".join(parts) + "."


def _storage() -> str:
    ssd, device = PAPER_PC.ssd_bytes_per_s, PAPER_PC.device_bytes_per_s
    return (
        f"What in-storage evaluation can save is bounded by speeds of the same storage: the device works through its keys "
        f"at {device / 1e9:g} GB/s (the paper's figure), a plain SSD on PCIe 4.0 gives the host {ssd / 1e9:g} GB/s "
        f"(assumed). For equal bytes it is {ssd / device:.2f} times as fast to read keys to the host as to score them in "
        f"the device; evaluating by keys and values instead makes that {ssd / device / 2:.2f}. What it does save is the "
        f"link: a score and its place are 4 bytes, a key of 128 halves is 256."
    )


def _needed() -> str:
    found = [one for one in figure10.needed(READINGS["share-20"], QWEN, CONTEXT) if not math.isnan(one.slowest)]
    by_name = {one.baseline: one for one in found}
    common = _common([by_name[name] for name in ("full", "h2o", "prefetch") if name in by_name])
    told = ", ".join(
        f"{SYSTEMS[one.baseline].title} {one.slowest / 1e9:.2f} to {one.fastest / 1e9:.2f} GB/s" for one in found
    )
    between = f"{common[0] / 1e9:.2f} to {common[1] / 1e9:.2f} GB/s" if common[0] < common[1] else "no one speed"
    return (
        f"With 20 % of the KV cache on the SSD (Qwen-7B, 4 K), the paper's range would follow if the baselines read it at: "
        f"{told}. For full cache, H2O-like and prefetch-based together that is {between}; FlexGen, on which the baselines "
        f"are built, reports 2 GB/s for its disk. The paper does not say what its baselines get of their SSD."
    )


def _common(found: list[Needed]) -> tuple[float, float]:
    return max(one.slowest for one in found), min(one.fastest for one in found)


def _abstracts(data: Speedups) -> str:
    most = max(value for name in READINGS for value in data.over(name, "leoam"))
    reading = READINGS["flexgen-20"]
    model = MODELS[QWEN]
    moved = {name: reading.latency(name, model, CONTEXT).moved["ssd to host"] for name in ("prefetch", "leoam")}
    return (
        f"Over LeoAM-like no reading gives more than {most:.2f}x: by two keys per chunk of 16 tokens it reads "
        f"{moved['leoam'] / 1e9:.2f} GB a step from the SSD where prefetch-based reads {moved['prefetch'] / 1e9:.2f} GB, so "
        f"most of what evaluation in storage saves is saved already. The model knows no overhead of its software, and none "
        f"of fetching whole chunks for a few tokens."
    )


def _evaluation(data: Speedups) -> str:
    own = [point for point in data.points["sizes"] if point.model == "LongChat-7B"]
    over = " to ".join(
        f"{point.speedup('prefetch', OUTPUT_TOKENS):.2f}x at {point.context // 1024} K" for point in (own[0], own[-1])
    )
    reading = READINGS["sizes"]
    found = reading.latency("hillinfer", MODELS["LongChat-7B"], 32768)
    evaluation_s, step_s = found.stages["evaluate"] / 1e9, found.token_ns / 1e9
    return (
        f"With longer contexts (LongChat-7B, sizes as stated) the speed-up over prefetch-based goes from {over}: once the "
        f"memory of the host is full, all that is added lies on the SSD, and HillInfer evaluates it at the device's speed. "
        f"At 32 K {found.places.ssd_share:.0%} of the KV cache is on the SSD, and of {step_s:.1f} s a step "
        f"{evaluation_s:.1f} s go into evaluation."
    )
