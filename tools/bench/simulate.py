"""Measure the simulator: its speed in interleaved runs, its memory in separate processes."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from llmcache.arrays import Int64s
from llmcache.cache.plan import Plan
from llmcache.cache.policies import policy_class
from llmcache.cache.simulate import parts_of, simulate_all
from llmcache.trace.record import BlockSpace, Provenance, TraceFile, TraceReader, TraceWriter
from llmcache.units import BLOCK_BYTES

from .harness import common_options, in_turns, measured_apart, workplace
from .machine import peak_bytes
from .results import Document, Target, markdown

SCHEMA = "llmcache-bench-simulate/3"
LOOP_BLOCKS = 1 << 20  # 4 GiB of weights
LOOP_RUN = 256  # 1 MiB reads
RANDOM_BLOCKS = 1_000_000
LARGE_BLOCKS = 1 << 22  # 16 GiB of weights
LARGE_RUN = 64
HOT_BLOCKS = 1 << 14
BATCH = 1 << 16
LARGE = 1_000_000_000
MEMORY_TARGET = 1 << 30
MIB = 1 << 20


# The traces, written batch by batch

Runs = tuple[Int64s, Int64s]


def loop(passes: int) -> Iterator[Runs]:
    """Yield the runs of a loop over `LOOP_BLOCKS`, one pass at a time."""
    first = np.arange(0, LOOP_BLOCKS, LOOP_RUN)
    for _ in range(passes):
        yield first, np.full(len(first), LOOP_RUN)


def single(references: int) -> Iterator[Runs]:
    """Yield single random blocks: the worst case for caches, including those of the CPU."""
    random = np.random.default_rng(1)
    for start in range(0, references, BATCH):
        rows = min(BATCH, references - start)
        yield random.integers(0, RANDOM_BLOCKS, rows), np.ones(rows, np.int64)


def large(blocks: int) -> Iterator[Runs]:
    """Yield at least `blocks` blocks: a loop over `LARGE_BLOCKS`, in which every tenth run is a block of a hot set of 64
    MiB.
    """
    random = np.random.default_rng(2)
    place, done = 0, 0
    while done < blocks:
        hot = random.random(BATCH) < 0.1
        steps = np.cumsum(~hot) * LARGE_RUN
        first = np.where(hot, LARGE_BLOCKS + random.integers(0, HOT_BLOCKS, BATCH), (place + steps) % LARGE_BLOCKS)
        place = int(place + steps[-1]) % LARGE_BLOCKS
        count = np.where(hot, 1, LARGE_RUN)
        done += int(count.sum())
        yield first, count


def write(path: Path, runs: Iterator[Runs]) -> None:
    """Write `runs` as a trace with 1 µs between them."""
    provenance = Provenance("synthetic", command="tools/bench simulate")
    rows = 0
    with TraceWriter(path, [TraceFile(0, "/model", 1, 1, 0, 0)], provenance) as writer:
        for first, count in runs:
            t_ns = np.arange(rows, rows + len(first), dtype=np.uint64) * np.uint64(1000)
            writer.append({"t_ns": t_ns, "file": 0, "first": first, "count": count})
            rows += len(first)


# The measurements


@dataclass
class Throughput:
    """The speed of a policy on a trace (blocks/s).

    `policy` None: the curve over all cache sizes. `target` 0: no target. `alone`: replay runs from memory, without the trace
    file.
    """

    trace: str
    policy: str | None
    cache_blocks: int
    target: float = 0
    alone: bool = False
    blocks: int = 0

    @property
    def name(self) -> str:
        return "lru, all sizes" if self.policy is None else f"{self.policy}, replay alone" if self.alone else self.policy

    def run(self, path: Path) -> float:
        """Return the seconds of one run on one thread: from the Parquet file to the results, or of the policy alone."""
        if self.alone and self.policy is not None:
            with TraceReader(path) as reader:
                space = BlockSpace.of(reader.batches())
                parts = list(parts_of(reader.batches(), space))
            policy = policy_class(self.policy)(self.cache_blocks, space.blocks)
            start = time.perf_counter()
            for part in parts:
                policy.replay(part.first, part.count)
            seconds = time.perf_counter() - start
            self.blocks = sum(int(part.count.sum()) for part in parts)
            return seconds
        policies = () if self.policy is None else (self.policy,)
        plan = Plan(policies, (self.cache_blocks * BLOCK_BYTES,), curves=self.policy is None)
        start = time.perf_counter()
        self.blocks = simulate_all([str(path)], plan, jobs=1).traces[0].accesses
        return time.perf_counter() - start

    def to_json(self, seconds: list[float]) -> Document:
        values = {"trace": self.trace, "policy": self.name, "cache_blocks": self.cache_blocks, "blocks": self.blocks}
        rate = self.blocks / statistics.median(seconds)
        return {**values, "seconds": seconds, "blocks_per_s": rate, "target": self.target or None}


def speeds() -> list[Throughput]:
    """Return the measurements; caches hold half of the blocks."""
    return [
        Throughput("loop in runs", "lru", LOOP_BLOCKS // 2, 100e6),
        Throughput("loop in runs", "llmcache", LOOP_BLOCKS // 2, 10e6),
        Throughput("loop in runs", None, 1),
        Throughput("random blocks", "lru", RANDOM_BLOCKS // 2, 10e6),
        Throughput("random blocks", "llmcache", RANDOM_BLOCKS // 2, 0.2e6),
        Throughput("random blocks", None, 1, 5e6),
        Throughput("random blocks", "lru", RANDOM_BLOCKS // 2, alone=True),
        Throughput("random blocks", "llmcache", RANDOM_BLOCKS // 2, alone=True),
    ]


def options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "the traces, up to 1 GB", "short traces", repeat=5)


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    with workplace(args.dir) as scratch:
        passes, references, blocks = (20, 500_000, LARGE // 50) if args.quick else (400, 10_000_000, LARGE)
        paths = {name: scratch / f"{name.replace(' ', '-')}.parquet" for name in ("loop in runs", "random blocks")}
        write(paths["loop in runs"], loop(passes))
        write(paths["random blocks"], single(references))
        found = {f"{one.trace}, {one.name}": one for one in speeds()}
        runs = {name: partial(one.run, paths[one.trace]) for name, one in found.items()}
        seconds = in_turns(runs, args.repeat, console)
        memory = []
        for step in ("write", "simulate"):
            cost = measured_apart("simulate", step, scratch / "large.parquet", blocks)
            memory.append({"step": step, "blocks": blocks, **cost, "target": MEMORY_TARGET})
            console.print(
                f"{step} {blocks:,} blocks: {cost['seconds']:.1f} s, peak memory {cost['peak_bytes'] / 1e6:.0f} MB"
            )
    yield {"speeds": [one.to_json(seconds[name]) for name, one in found.items()], "memory": memory}


def targets(document: Document) -> list[Target]:
    found = []
    for one in document["speeds"]:
        if one["target"]:
            name, values = f"{one['trace']}, {one['policy']}", (one["blocks_per_s"] / 1e6, ">=", one["target"] / 1e6)
            found.append(Target(name, f"{name}: speed from a trace file", *values, unit="M blocks/s"))
    for one in document["memory"]:
        what = f"{one['step']} a trace of {one['blocks'] / 1e9:.2g} G blocks: peak memory"
        peak, most = one["peak_bytes"] / MIB, one["target"] / MIB
        found.append(Target(f"memory, {one['step']}", what, peak, "<", most, unit="MiB"))
    return found


def table(document: Document) -> str:
    rows = []
    for one in document["speeds"]:
        target = f"{one['target'] / 1e6:g}" if one["target"] else ""
        rows.append([one["trace"], one["policy"], f"{one['blocks_per_s'] / 1e6:.1f}", target])
    for one in document["memory"]:
        what = f"{one['step']} {one['blocks'] / 1e9:.2g} G blocks: peak memory {one['peak_bytes'] / 2**20:.0f} MiB"
        rows.append([what, "", f"{one['blocks'] / one['seconds'] / 1e6:.1f}", ""])
    return markdown(["trace", "policy", "M blocks/s", "target"], rows, texts=(0, 1))


def apart(step: str, path: Path, blocks: int) -> Document:
    """Write the large trace, or simulate LRU on it with stalls and the curve; return time and peak memory."""
    start = time.perf_counter()
    if step == "write":
        write(path, large(blocks))
    else:
        plan = Plan(("lru",), (LARGE_BLOCKS // 2 * BLOCK_BYTES,), period_ns=10**8, curves=True)
        if (found := simulate_all([str(path)], plan).traces[0].accesses) < blocks:
            raise SystemExit(f"{path} has {found} blocks, less than {blocks}")
    return {"seconds": time.perf_counter() - start, "peak_bytes": peak_bytes()}


if __name__ == "__main__":  # run by harness.measured_apart
    print(json.dumps(apart(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
