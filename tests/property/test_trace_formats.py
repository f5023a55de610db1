"""Every format keeps the part of a trace that it can represent, whole or in parts; damaged logs are refused or skipped."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.errors import DataError
from llmcache.trace import record as record_trace
from llmcache.trace.formats import convert, open_trace
from llmcache.trace.formats.oracle_general import RECORD
from llmcache.trace.info import describe
from llmcache.trace.record import Trace, TraceReader, TraceWriter, concatenated
from tests.conftest import examples
from tests.unit.test_trace_strace import CASES
from tests.unit.trace_parts import blocks, traces


@settings(deadline=None, max_examples=examples(60))
@given(traces(), st.integers(1, 70), st.integers(1, 70))
def test_a_trace_written_and_read_in_parts_is_the_same(trace: Trace, written_rows: int, read_rows: int) -> None:
    """Traces written in parts and read in batches of any size have the same rows, in row groups of bounded size."""
    group_rows, record_trace.GROUP_ROWS = record_trace.GROUP_ROWS, 8
    try:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "t.parquet"
            with TraceWriter(path, provenance=trace.provenance) as writer:
                for part in trace.batches(written_rows):
                    writer.append(part)
            with TraceReader(path) as reader:
                parts = list(reader.batches(read_rows))
                assert reader.rows == len(trace) and max(map(len, parts)) <= read_rows
            metadata = pq.ParquetFile(path).metadata
            assert max(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)) <= 8
            assert Trace.load(path).equals(trace)
            joined = concatenated([part.columns for part in parts])
            assert all(np.array_equal(a, b) for a, b in zip(joined, trace.columns, strict=True))
    finally:
        record_trace.GROUP_ROWS = group_rows


@settings(deadline=None, max_examples=examples(50))
@given(traces())
def test_csv_keeps_accesses_and_times(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory) / "t.parquet", Path(directory) / "t.csv"
        trace.save(source)
        convert(source, target)
        with open_trace(target) as reader:
            loaded = reader.read()
        assert blocks(loaded) == blocks(trace)
        assert np.array_equal(loaded.t_ns, trace.t_ns) and np.array_equal(loaded.count, trace.count)
        convert(target, Path(directory) / "again.csv")
        assert (Path(directory) / "again.csv").read_bytes() == target.read_bytes()


@settings(deadline=None, max_examples=examples(50))
@given(traces())
def test_oracle_general_keeps_the_identity_of_blocks(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        source, target, back = (Path(directory) / name for name in ("t.parquet", "t.oracleGeneral", "back.parquet"))
        trace.save(source)
        convert(source, target)
        records = np.fromfile(target, RECORD)
        touched = [(path, block) for path, block, _ in blocks(trace)]
        numbers = dict(zip(touched, records["object"].tolist(), strict=True))
        assert records["object"].tolist() == [numbers[block] for block in touched]
        assert len(set(numbers.values())) == len(numbers)
        for now, (number, following) in enumerate(zip(records["object"], records["next"], strict=True)):
            later = np.flatnonzero(records["object"][now + 1 :] == number)
            assert following == (now + 2 + later[0] if len(later) else -1)
        convert(target, back)
        loaded = Trace.load(back)
        blocks_by_number = dict(zip(records["object"].tolist(), loaded.first.tolist(), strict=True))
        assert loaded.first.tolist() == [blocks_by_number[number] for number in records["object"].tolist()]
        assert len(set(blocks_by_number.values())) == len(blocks_by_number) and set(loaded.count.tolist()) == {1}


@settings(deadline=None, max_examples=examples(50))
@given(traces())
def test_info_counts_the_accesses_of_the_trace(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "t.parquet"
        trace.save(path)
        info = describe(path)
    touched = blocks(trace)
    assert (info.rows, info.accesses) == (len(trace), len(touched))
    assert info.touched_bytes == 4096 * len({(path, block) for path, block, _ in touched})
    assert sum(info.ops.values()) == sum(info.misses.values()) == info.accesses
    assert info.ops["write"] == sum(op == 1 for _, _, op in touched)
    assert (info.start_ns, info.end_ns) == (trace.t_ns[0], trace.t_ns[-1])
    assert sorted(info.pids) == sorted(set(trace.pid.tolist()))
    for file in info.files:
        of_file = [block for path, block, _ in touched if path == file.path]
        assert (file.accesses, file.touched_bytes) == (len(of_file), 4096 * len(set(of_file)))
    assert len(info.files) + info.untouched_files == len(trace.files)


LOG = "".join(f"{at}.5 {line}\n" for at, line in enumerate("".join(log for log, _ in CASES.values()).splitlines(), 10**9))
CSV = "file,offset,length,op,time\n" + "".join(f"/m{at},{at * 4096},{at + 1},read,{at}.25\n" for at in range(40))
FORMATS = {".strace": LOG, ".csv": CSV}


def with_damage(text: str, source: random.Random) -> str:
    """Return `text` with some characters, words or lines lost, repeated, exchanged or replaced."""
    for _ in range(source.randint(1, 12)):
        start = source.randrange(len(text))
        end = min(len(text), start + source.choice([1, 2, 5, 30, 200]))
        other = source.randrange(len(text))
        piece = source.choice(
            ["", text[start:end] * 2, text[other : other + end - start], '"', ", ", "[", "-1", "9" * 30, "\0"]
        )
        text = text[:start] + piece + text[end:] or " "
    return text


@pytest.mark.parametrize("ending", FORMATS)
@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_damage_is_refused_or_skipped(ending: str, seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"t{ending}"
        path.write_text(with_damage(FORMATS[ending], random.Random(seed)))
        try:
            with open_trace(path) as reader:
                assert reader.read().accesses > 0
        except DataError as refusal:
            assert refusal.hint and ":" in refusal.message
