"""The recorded traces in the tree are small, real, and classed as what their programs did."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmcache.cache.classify import READ_OP, TraceClasses, classify
from llmcache.cache.detector import LOOP, SEQ
from llmcache.trace.record import HIT, MISS, UNKNOWN, Trace
from llmcache.units import BLOCK_BYTES
from tools.record_traces import SUBJECTS

TRACES = Path(__file__).resolve().parents[2] / "traces"
LOOPS = [name for name, subject in SUBJECTS.items() if name != "llama-no-mmap"]


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {name: Trace.load(TRACES / f"{name}.parquet") for name in SUBJECTS}


def fact(trace: Trace, name: str) -> float:
    return float(trace.provenance.extra[name])


def classes(trace: Trace) -> TraceClasses:
    return classify(trace.batches())


@pytest.mark.parametrize("name", LOOPS)
def test_loops_have_the_size_of_what_a_step_reads_and_its_period(name: str, traces: dict[str, Trace]) -> None:
    trace = traces[name]
    found = classes(trace)
    assert found.totals.loop_bytes == pytest.approx(fact(trace, "loop_bytes"), rel=0.02)
    main = max((row for row in found.rows if row.kind == LOOP), key=lambda row: row.accesses)
    assert main.op == READ_OP and main.passes >= 10
    assert main.period_ns == pytest.approx(1e9 * fact(trace, "step_s"), rel=0.05)
    missed = int(trace.count[trace.miss == MISS].sum())
    assert missed > 0.5 * trace.accesses, "a loop that does not fit comes from storage"


def test_a_model_that_is_read_into_memory_is_read_once(traces: dict[str, Trace]) -> None:
    trace = traces["llama-no-mmap"]
    (row,) = classes(trace).rows
    assert row.kind == SEQ
    assert row.size_bytes == trace.files[0].size_bytes
    assert set(trace.miss.tolist()) == {UNKNOWN}


def test_a_loop_of_reads_is_exact(traces: dict[str, Trace]) -> None:
    trace = traces["read-loop"]
    (row,) = classes(trace).rows
    blocks = 64 * 2**20 // BLOCK_BYTES
    assert (row.kind, row.size_bytes, row.passes, row.accesses) == (LOOP, blocks * BLOCK_BYTES, 12, 12 * blocks)
    assert int(trace.count[trace.miss == HIT].sum()) < 0.02 * trace.accesses
