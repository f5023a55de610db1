"""Streaming: a simulation's memory follows the footprint of a trace, not its length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmcache.trace.record import Provenance, TraceFile, TraceWriter

MIB = 1 << 20
ROWS = 1 << 17


def write(path: Path, batches: int) -> None:
    """Single-block rows all over 100,000 blocks."""
    random = np.random.default_rng(1)
    with TraceWriter(path, [TraceFile(0, "/m", 1, 1, 0, 0)], Provenance("synthetic")) as writer:
        for batch in range(batches):
            t_ns = np.arange(batch * ROWS, (batch + 1) * ROWS, dtype=np.uint64)
            writer.append({"t_ns": t_ns, "file": 0, "first": random.integers(0, 100_000, ROWS), "count": 1})


def peak_bytes(path: Path) -> int:
    """Most memory of a process that simulates the trace (its own peak, not that of the test it is forked from)."""
    code = """
import sys
from llmcache.cache.plan import Plan
from llmcache.cache.simulate import simulate_all
simulate_all([sys.argv[1]], Plan(("lru", "llmcache"), (4096 * 50000,), period_ns=10**6, curves=True), jobs=2)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, timeout=240)
    return 1024 * int(done.stdout)


@pytest.mark.long
def test_four_times_the_trace_takes_no_more_memory(tmp_path: Path) -> None:
    short, long = tmp_path / "short.parquet", tmp_path / "long.parquet"
    write(short, 4)
    write(long, 16)
    peak_bytes(short)  # compiles what is not in numba's cache yet, which takes as much memory again
    # The rows alone are 31 bytes each, 12 times ROWS: 46 MiB more if they were kept.
    assert peak_bytes(long) - peak_bytes(short) < 20 * MIB
