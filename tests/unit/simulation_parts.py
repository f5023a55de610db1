"""Small traces for the simulator's tests, and reference implementations of LRU and Belady's rule."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from llmcache.trace.record import MAP, READ, WRITE, Provenance, Trace, TraceFile

FILES = (TraceFile(0, "/models/m.gguf", 1, 10, 0, 0), TraceFile(3, "/models/tokenizer.json", 1, 11, 0, 0))
Row = tuple[int, int, int, int]  # file, first, count, op


def trace_of(rows: list[Row], step_ns: int = 1_000_000, provenance: Provenance | None = None) -> Trace:
    """Return a trace of these rows, `step_ns` apart."""
    file, first, count, op = np.array(rows, np.int64).reshape(-1, 4).T
    t_ns = np.arange(len(rows), dtype=np.int64) * step_ns
    known = provenance or Provenance("synthetic")
    return Trace.build(t_ns, file, first, count, op, files=FILES, provenance=known)


def loop(blocks: int, passes: int, run: int, op: int = READ) -> list[Row]:
    """Return rows that read blocks 0 .. `blocks` - 1 `passes` times, `run` blocks per row."""
    return [(0, first, min(run, blocks - first), op) for _ in range(passes) for first in range(0, blocks, run)]


def saved(trace: Trace, directory: Path, name: str = "trace.parquet") -> str:
    """Save `trace` and return its path."""
    path = directory / name
    trace.save(path)
    return str(path)


def rows(blocks: int = 60, longest: int = 40, most: int = 60) -> st.SearchStrategy[list[Row]]:
    """Generate rows in two files, whose runs overlap in all ways and also lie far apart."""
    row = st.tuples(
        st.sampled_from([0, 3]),
        st.integers(0, blocks).flatmap(lambda first: st.sampled_from([first, first + 1000])),
        st.integers(1, longest),
        st.sampled_from([READ, WRITE, MAP]),
    )
    return st.lists(row, min_size=1, max_size=most)


def plain_lru(rows: list[Row], capacity: int) -> list[tuple[int, int]]:
    """Replay rows block by block; return the hits of each row and the total evictions after it."""
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    counts, evictions = [], 0
    for file, first, count, _ in rows:
        hits = 0
        for block in range(first, first + count):
            if (file, block) in held:
                hits += 1
                held.move_to_end((file, block))
                continue
            if len(held) == capacity:
                held.popitem(last=False)
                evictions += 1
            held[file, block] = None
        counts.append((hits, evictions))
    return counts


def plain_belady(ids: Sequence[int], capacity: int) -> int:
    """Return the hits of Belady's rule, which evicts the block whose next use is furthest away; every miss is inserted."""
    next_use, later = [0] * len(ids), dict[int, int]()
    for now in reversed(range(len(ids))):
        next_use[now] = later.get(ids[now], len(ids))
        later[ids[now]] = now
    kept, hits = dict[int, int](), 0
    for now, block in enumerate(ids):
        hits += block in kept
        if block not in kept and len(kept) == capacity:
            del kept[max(kept, key=kept.__getitem__)]
        kept[block] = next_use[now]
    return hits
