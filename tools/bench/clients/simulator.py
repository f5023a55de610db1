"""The traces of the simulator's benchmark, written batch by batch; as a program it tells the memory of one step.

`python -m tools.bench.clients.simulator write|simulate PATH BLOCKS` writes the large trace or simulates it, and prints
{"seconds", "peak_bytes"} of this process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.plan import Plan
from llmcache.cache.simulate import simulate_all
from llmcache.trace.record import Provenance, TraceFile, TraceWriter
from llmcache.units import BLOCK_BYTES
from tools.bench.machine import peak_bytes

LOOP_BLOCKS = 1 << 20  # 4 GiB of weights
LOOP_RUN = 256  # 1 MiB reads
RANDOM_BLOCKS = 1_000_000
LARGE_BLOCKS = 1 << 22  # 16 GiB of weights
LARGE_RUN = 64
HOT_BLOCKS = 1 << 14
BATCH = 1 << 16

Runs = tuple[NDArray[np.int64], NDArray[np.int64]]


def loop(passes: int) -> Iterator[Runs]:
    """Yield the runs of a loop over `LOOP_BLOCKS`, a pass at a time."""
    first = np.arange(0, LOOP_BLOCKS, LOOP_RUN)
    for _ in range(passes):
        yield first, np.full(len(first), LOOP_RUN)


def single(references: int) -> Iterator[Runs]:
    """Yield single blocks, uniformly random: the worst case of caches, of the processor's too."""
    random = np.random.default_rng(1)
    for start in range(0, references, BATCH):
        rows = min(BATCH, references - start)
        yield random.integers(0, RANDOM_BLOCKS, rows), np.ones(rows, np.int64)


def large(blocks: int) -> Iterator[Runs]:
    """Yield at least `blocks` in all: a loop over `LARGE_BLOCKS`, each tenth run a block of a hot set of 64 MiB."""
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
    """Write `runs` as a trace, a microsecond apart."""
    provenance = Provenance("synthetic", command="tools/bench simulate")
    rows = 0
    with TraceWriter(path, [TraceFile(0, "/model", 1, 1, 0, 0)], provenance) as writer:
        for first, count in runs:
            t_ns = np.arange(rows, rows + len(first), dtype=np.uint64) * np.uint64(1000)
            writer.append({"t_ns": t_ns, "file": 0, "first": first, "count": count})
            rows += len(first)


def simulate_large(path: Path) -> int:
    """Simulate LRU at half the footprint, with stalls and the curve of all sizes; returns the accesses."""
    plan = Plan(("lru",), (LARGE_BLOCKS // 2 * BLOCK_BYTES,), period_ns=10**8, curves=True)
    return simulate_all([str(path)], plan).traces[0].accesses


def main() -> int:
    """Do the step named on the command line."""
    step, path, blocks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    start = time.perf_counter()
    if step == "write":
        write(path, large(blocks))
    elif simulate_large(path) < blocks:
        raise SystemExit(f"{path} has less than {blocks} blocks")
    print(json.dumps({"seconds": time.perf_counter() - start, "peak_bytes": peak_bytes()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
