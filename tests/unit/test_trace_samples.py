"""The traces in the tree: generated ones match the paper's descriptions, recorded ones match their programs."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from llmcache.cache.classify import READ_OP, TraceClasses, classify
from llmcache.cache.detector import LOOP, SEQ
from llmcache.papers.traces import GROUPS, REQUEST_BLOCKS, SHAPES
from llmcache.trace.record import HIT, MAP, MISS, UNKNOWN, WRITE, Trace
from llmcache.units import BLOCK_BYTES
from tools import make_traces
from tools.record_traces import SUBJECTS

ROOT = Path(__file__).resolve().parents[2]


sample = functools.cache(make_traces.sample)


def touched(trace: Trace, path: str, op: int | None = None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return every touched block of a file in order, with repeats."""
    number = next(file.id for file in trace.files if file.path.endswith(path))
    rows = (trace.file == number) & (True if op is None else trace.op == op)
    first, count = trace.first[rows].astype(np.int64), trace.count[rows].astype(np.int64)
    return np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_valid_and_marked_as_synthetic(name: str) -> None:
    """The seed determines the trace, and the tree contains the generated trace."""
    made = sample(name)
    assert made.provenance.tier == "synthetic" and made.provenance.clock == "invented"
    assert "Synthetic: " in made.provenance.note and "invented" in made.provenance.note
    assert made.provenance.extra["shape"] == name
    assert set(made.miss.tolist()) == {UNKNOWN} != {HIT}
    assert int(made.count.max()) <= REQUEST_BLOCKS
    assert len(made.files) == len({file.path for file in made.files}) == len({file.inode for file in made.files})
    sizes = np.array([file.size_bytes for file in made.files]) // 4096
    assert (made.end <= sizes[made.file]).all()
    assert Trace.load(ROOT / "traces" / f"{name}.parquet").equals(made), "run tools/make_traces.py"


def test_shapes_have_the_properties_that_the_paper_describes() -> None:
    assert not SHAPES["gemini"](99).equals(SHAPES["gemini"]()), "the seed matters"
    assert [name for names in GROUPS.values() for name in names] == list(SHAPES)
    assert [len(GROUPS[group]) for group in ("on_device", "remote")] == [4, 4]
    for name in GROUPS["remote"]:
        made = SHAPES[name]()
        prompts = np.bincount(touched(made, "prompts.dat"))
        assert prompts.max() <= 3, "saved, read for sending, and read again if the request failed"
        assert (np.bincount(touched(made, "prompts.dat", WRITE)) <= 1).all()
        assert (prompts == 3).any() == (name == "claude")
    waits = np.diff(SHAPES["claude"]().t_ns.astype(np.int64))
    assert waits.max() > 120 * 10**9, "a failed prompt is read again minutes later"
    blocks = touched(SHAPES["moe_routing"](), "experts.gguf", MAP)
    per_expert = np.bincount(blocks[blocks % 1020 >= 60] // 60)
    assert per_expert.max() > 3 * np.median(per_expert[per_expert > 0]), "some experts are popular"
    kilobytes, notes = SHAPES["kilobytes"](), SHAPES["ai_notes"](13)
    assert len(kilobytes) == 4 * notes.accesses and set(kilobytes.count.tolist()) == {1}
    assert (kilobytes.first.reshape(-1, 4) == kilobytes.first[::4, None]).all()


def test_the_table_of_traces_is_up_to_date_and_traces_are_small() -> None:
    readme = (ROOT / "traces" / "README.md").read_text()
    assert make_traces.with_table(readme, [sample(name) for name in SHAPES]) == readme
    size = sum((ROOT / "traces" / f"{name}.parquet").stat().st_size for name in SHAPES)
    assert size < 1_500_000
    assert {path.stem for path in (ROOT / "traces").glob("*.parquet")} >= set(SHAPES)


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
def test_recorded_loops_have_the_size_and_period_of_a_step(name: str, traces: dict[str, Trace]) -> None:
    trace = traces[name]
    found = classes(trace)
    assert found.totals.loop_bytes == pytest.approx(fact(trace, "loop_bytes"), rel=0.02)
    main = max((row for row in found.rows if row.kind == LOOP), key=lambda row: row.accesses)
    assert main.op == READ_OP and main.passes >= 10
    assert main.period_ns == pytest.approx(1e9 * fact(trace, "step_s"), rel=0.05)
    missed = int(trace.count[trace.miss == MISS].sum())
    assert missed > 0.5 * trace.accesses, "a loop that does not fit is read from storage"


def test_a_model_loaded_without_mmap_is_read_once(traces: dict[str, Trace]) -> None:
    trace = traces["llama-no-mmap"]
    (row,) = classes(trace).rows
    assert row.kind == SEQ
    assert row.size_bytes == trace.files[0].size_bytes
    assert set(trace.miss.tolist()) == {UNKNOWN}


def test_a_recorded_read_loop_is_exact(traces: dict[str, Trace]) -> None:
    trace = traces["read-loop"]
    (row,) = classes(trace).rows
    blocks = 64 * 2**20 // BLOCK_BYTES
    assert (row.kind, row.size_bytes, row.passes, row.accesses) == (LOOP, blocks * BLOCK_BYTES, 12, 12 * blocks)
    assert int(trace.count[trace.miss == HIT].sum()) < 0.02 * trace.accesses
