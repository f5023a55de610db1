"""Small traces for the simulator's tests, and plain implementations of LRU and Belady's rule."""

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
    """Return rows that read blocks 0 .. `blocks` - 1 `passes` times, `run` at a time."""
    return [(0, first, min(run, blocks - first), op) for _ in range(passes) for first in range(0, blocks, run)]


def saved(trace: Trace, directory: Path, name: str = "trace.parquet") -> str:
    """Return the path of `trace` as a file."""
    path = directory / name
    trace.save(path)
    return str(path)


def rows(blocks: int = 60, longest: int = 40, most: int = 60) -> st.SearchStrategy[list[Row]]:
    """Generate rows in two files, close and distant, with runs that overlap in all ways."""
    row = st.tuples(
        st.sampled_from([0, 3]),
        st.integers(0, blocks).flatmap(lambda first: st.sampled_from([first, first + 1000])),
        st.integers(1, longest),
        st.sampled_from([READ, WRITE, MAP]),
    )
    return st.lists(row, min_size=1, max_size=most)


def plain_lru(rows: list[Row], capacity: int) -> list[tuple[int, int]]:
    """Return (hits, evictions so far) of each row, block by block."""
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    told, evictions = [], 0
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
        told.append((hits, evictions))
    return told


def plain_belady(ids: Sequence[int], capacity: int) -> int:
    """Return the hits if the block used last, or never again, is evicted, and every missed block is inserted."""
    again, later = [0] * len(ids), dict[int, int]()
    for now in reversed(range(len(ids))):
        again[now] = later.get(ids[now], len(ids))
        later[ids[now]] = now
    kept, hits = dict[int, int](), 0
    for now, block in enumerate(ids):
        hits += block in kept
        if block not in kept and len(kept) == capacity:
            del kept[max(kept, key=kept.__getitem__)]
        kept[block] = again[now]
    return hits
