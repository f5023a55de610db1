"""Measure the KV pipeline in four parts, each with a target.

Times and bytes are measured on this machine. Keys, values and queries are synthetic; the accelerator and the computational
SSD are emulated.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from llmcache.kv.bench.results import Bench, Row
from llmcache.kv.bench.synthetic import Setup, compare, fixed, marks_of, sweep
from llmcache.kv.planning.latency import Variant
from llmcache.kv.tiers.config import PING_PONG_STEPS
from llmcache.kv.workload import StreamSpec
from llmcache.papers.csd import CsdProfile

from .harness import common_options, workplace
from .results import Document, Target, figure, part_targets, targets_table

SCHEMA = "llmcache-bench-kvpipeline/2"
IDLE_TARGET = 0.10
SLACK = 2.0  # computing time relative to the time that it has to hide
WARM_UP = 4
FACTORS = (1 / 4, 1 / 2, 1, 2, 4, 8)
"""Betas of the sweep, as multiples of the rule's beta."""
MS = 1e6


def setup_of(directory: Path, context: int, layers: int, steps: int, seed: int) -> Setup:
    """Return the common set-up: 8 key heads of 128 fp16 numbers, 4 query heads each, half of the pages in memory."""
    spec = StreamSpec(layers=layers, kv_heads=8, heads=32, head_dim=128, context=context, seed=seed)
    return Setup(spec, fixed(int(MS)), directory, steps=steps, warm_up=WARM_UP, alpha=0.2, block_tokens=1024, threads=2)


def idle(directory: Path, quick: bool, seed: int) -> dict[str, Any]:
    """Return the idle share of the accelerator with and without look-ahead.

    Computing takes `SLACK` times the time that it has to hide.
    """
    setup = setup_of(directory, 2048 if quick else 4096, 4 if quick else 16, 4 if quick else 8, seed)
    plain = Variant("hillinfer", ("app",))
    timed = replace(setup, accelerator=fixed(int(SLACK * to_hide_ns(compare(setup, [plain]).rows[0], setup))))
    bench = compare(timed, [Variant("hillinfer"), plain])
    ahead, without = bench.rows
    modelled = modelled_idle(without, setup)
    waits = "share of decode time in which the emulated accelerator waits"
    return {
        "what": f"look-ahead: {waits}, where the model predicts at most 0.1",
        "to_hide_ns": to_hide_ns(without, setup), "compute_ns": without.stages_ns["compute"] / setup.spec.layers,
        "modelled": modelled, "figure": ahead.idle_share, "without": without.idle_share,
        "speedup": ahead.speedup_over(without), "applies": modelled <= IDLE_TARGET, "run": _without_timelines(bench),
    }  # fmt: skip


def to_hide_ns(row: Row, setup: Setup) -> float:
    """Return the time of a layer besides its computing, measured without overlap."""
    return sum(row.stages_ns[stage] for stage in ("evaluate", "fetch", "update")) / setup.spec.layers


def modelled_idle(row: Row, setup: Setup) -> float:
    """Return the idle share of a modelled pipeline: the first layer waits, the others wait for the part not hidden."""
    layers, hide = setup.spec.layers, to_hide_ns(row, setup)
    compute = row.stages_ns["compute"] / layers
    return 1 - layers * compute / (hide + compute + (layers - 1) * max(hide, compute))


def ping_pong(directory: Path, quick: bool, seed: int) -> dict[str, Any]:
    """Return the share of fetched pages that were evicted at most 16 steps before, with and without BKP."""
    setup = setup_of(directory, 2048 if quick else 16384, 2, 8 if quick else 64, seed)
    setup = replace(setup, warm_up=2 if quick else PING_PONG_STEPS + 1)  # evictions of the prefill do not count
    bench = compare(setup, [Variant("hillinfer"), Variant("hillinfer", ("bkp",))])
    shares = [_seen(row).ping_pong_share for row in bench.rows]
    return {
        "what": "pools: pages fetched again within 16 steps after their eviction / pages fetched",
        "figure": shares[0], "without": shares[1], "pages_up": [_seen(row).pages_up for row in bench.rows],
        "run": _without_timelines(bench),
    }  # fmt: skip


def link(directory: Path, quick: bool, seed: int) -> dict[str, Any]:
    """Return the bytes that scoring moves between host and SSD, in the emulated device and on the host."""
    setup = setup_of(directory, 2048 if quick else 16384, 2, 4 if quick else 8, seed)
    variant = [Variant("hillinfer")]
    device, host = (compare(replace(setup, device=kind), variant).rows[0] for kind in ("csd", "file"))
    links = ("ssd to cpu, score", "cpu to ssd, score")
    moved = [sum(row.moved_bytes.get(name, 0) for name in links) for row in (device, host)]
    return {
        "what": "bytes that scoring moves between host and SSD: emulated device / host",
        "device_bytes": moved[0], "host_bytes": moved[1],
        "figure": moved[0] / moved[1],
    }  # fmt: skip


def beta(directory: Path, quick: bool, seed: int) -> dict[str, Any]:
    """Return the distance of the fastest beta from the rule's f_c / f_s, in steps of the sweep.

    The emulated device runs at a third of the measured speed of the processor, so that it takes little of the processor's
    time. With this ratio, latency differs on both sides of the rule's beta; with a beta of 20, all larger ones are within 5
    %. Only a few tokens are attended to, so that evaluation, the subject of the rule, takes nearly all of the time.
    """
    spec = StreamSpec(layers=1, kv_heads=1, heads=64, head_dim=128, context=(1 << 13) if quick else (1 << 17), seed=seed)
    setup = Setup(spec, fixed(1000), directory, steps=4 if quick else 24, warm_up=WARM_UP, alpha=0.001, threads=1)
    setup, variant = replace(setup, block_tokens=4096), Variant("hillinfer", ("app",))
    speed = marks_of(setup, variant).f_c / 3
    device = CsdProfile("a third as fast as the processor", speed, math.inf, math.inf, 60_000, throttle=True)
    bench = sweep(replace(setup, csd=device), variant, factors=FACTORS)
    assert bench.marks is not None
    relative = relative_times([_seen(row).steps_ns for row in bench.rows])
    best = min(range(len(FACTORS)), key=lambda place: relative[place])
    return {
        "what": "distance from the rule's beta to the beta of least latency, in doublings",
        "betas": [row.beta for row in bench.rows], "token_ns": [row.token_ns for row in bench.rows],
        "relative": relative, "rule": bench.marks.rule, "figure": abs(best - FACTORS.index(1)),
        "run": _without_timelines(bench),
    }  # fmt: skip


def relative_times(steps: Sequence[Sequence[int]]) -> list[float]:
    """Return the median time of the steps of each run, relative to the mean of all runs at the same step.

    The runs take turns, so that other load slows the same step of all runs.
    """
    means = [statistics.mean(times) for times in zip(*steps, strict=True)]
    return [statistics.median(own / mean for own, mean in zip(times, means, strict=True)) for times in steps]


PARTS = {"idle": idle, "ping_pong": ping_pong, "link": link, "beta": beta}
TARGETS = {
    "idle": ("<=", IDLE_TARGET, "emulated"), "ping_pong": ("<=", 0.01, "emulated"), "link": ("<=", 1 / 50, "emulated"),
    "beta": ("<=", 1, "emulated"),
}  # fmt: skip
"""Shares: of the decode time in which the accelerator waits (no value if the model predicts that the work cannot be hidden),
of the fetched pages, of the bytes that scoring on the host moves. `beta`: steps of the sweep from its minimum to the rule's.
"""


def _seen(row: Row) -> Any:
    assert row.observed is not None
    return row.observed


def _without_timelines(bench: Bench) -> dict[str, Any]:
    """Return the results without the spans, which are many; `llmcache kv plot` draws its own runs."""
    document = bench.document()
    for row in document["rows"]:
        row["observed"]["timeline"] = {"emulated": row["observed"]["timeline"]["emulated"], "spans": []}
    return document


def options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "the spill files, 3 GB", "short contexts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the synthetic stream [%(default)s]")


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    parts = {}
    with workplace(args.dir) as scratch:
        for name, part in PARTS.items():
            begin = time.monotonic()
            parts[name] = part(scratch, args.quick, args.seed)
            console.print(f"{name}: {time.monotonic() - begin:.0f} s", soft_wrap=True)
    yield {"quick": args.quick, "seed": args.seed, "parts": parts}


def table(document: Document) -> str:
    parts = document["parts"]

    def without(target: Target) -> str:
        return figure(parts[target.name]["without"]) if "without" in parts[target.name] else ""

    what = "measured; stream synthetic, accelerator and computational SSD emulated"
    return targets_table(part_targets(document, TARGETS), what, without)
