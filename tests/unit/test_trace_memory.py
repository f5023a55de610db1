"""Memory of programs that read a trace does not grow with its length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmcache.cache.plan import Plan
from llmcache.cache.simulate import simulate_all
from llmcache.trace.record import Provenance, TraceFile, TraceReader, TraceWriter
from tests.unit.simulation_parts import loop, trace_of

ROWS = 1 << 17
# Each program is run with the paths of a short and a long trace, and prints its peak memory after each.
PROGRAMS = {
    "plot": """
from llmcache.report import plot
def use(path):
    plot.plot(path, path + ".png", lambda files: lambda file: (), lambda *_: None, classes=False)
""",
    "simulate": """
from llmcache.cache.plan import Plan
from llmcache.cache.simulate import simulate_all
def use(path):
    simulate_all([path], Plan(("lru", "sieve"), (4096 * 50000,), period_ns=10**6, curves=True), jobs=2)
""",
    "copy": """
from llmcache.trace.record import TraceReader, TraceWriter
def use(path):
    with TraceReader(path) as reader, TraceWriter(path + ".copy", reader.files) as writer:
        for batch in reader.batches():
            writer.append(batch)
""",
}
MAIN = """
import sys
from tools.bench.machine import peak_bytes
for path in sys.argv[1:]:
    use(path)
    print(peak_bytes())
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write a short and a long trace of single blocks out of 100,000, and compile what numba's cache lacks."""
    random, paths = np.random.default_rng(1), []
    for batches in (4, 24):
        paths.append(str(tmp_path_factory.mktemp("traces") / f"{batches}.parquet"))
        with TraceWriter(Path(paths[-1]), [TraceFile(0, "/m", 1, 1, 0, 0)], Provenance("synthetic")) as writer:
            for batch in range(batches):
                t_ns = np.arange(batch * ROWS, (batch + 1) * ROWS, dtype=np.uint64)
                writer.append({"t_ns": t_ns, "file": 0, "first": random.integers(0, 100_000, ROWS), "count": 1})
    simulate_all([trace_of(loop(9, 9, 3))], Plan(("lru", "sieve"), (4096,), period_ns=10**6, curves=True))
    return paths


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_does_not_grow_with_the_trace(name: str, traces: list[str]) -> None:
    """A process of its own is used, because a fork would inherit the peak of the test."""
    command = [sys.executable, "-c", PROGRAMS[name] + MAIN, *traces]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    short, long = map(int, done.stdout.split())
    # The columns of 20 times ROWS take 31 bytes per row: 78 MiB.
    assert long - short < 50 << 20
    if name == "copy":
        with TraceReader(Path(f"{traces[1]}.copy")) as reader:
            assert reader.rows == 24 * ROWS
