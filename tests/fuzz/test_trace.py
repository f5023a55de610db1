"""Fuzz target: Parquet traces and the files of a killed recorder: read, described and classified."""

from __future__ import annotations

import contextlib
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcache.cache.classify import TraceClasses, classify_file
from llmcache.model.modelfile import ModelHeaders
from llmcache.report import classify
from llmcache.trace.formats import open_trace
from llmcache.trace.formats.recording import FILES as NEW_FILES
from llmcache.trace.formats.recording import LOST, RecordingWriter
from llmcache.trace.info import describe, show
from llmcache.trace.record import COLUMNS, KEY, SCHEMA, Trace, TraceReader, encode
from llmcache.units import BLOCK_BYTES
from tests.conftest import examples
from tests.fuzz.mutations import documents, mutated, written
from tests.fuzz.target import Target, bounded, is_printable, refusal, scratch
from tests.unit.trace_parts import FILES, PROVENANCE, trace

METADATA: dict[str, Any] = json.loads(encode(FILES, PROVENANCE))
ROWS = {name: np.asarray(column) for name, column in zip(COLUMNS, trace().columns, strict=True)}


def parquet(metadata: bytes, columns: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    table = pa.table({name: pa.array(column, SCHEMA.field(name).type) for name, column in columns.items()}, SCHEMA)
    pq.write_table(table.replace_schema_metadata({KEY: metadata}), out, compression="zstd", write_page_checksum=True)
    return out.getvalue()


def saved() -> bytes:
    with scratch() as directory:
        path = Path(directory) / "a.parquet"
        trace().save(path)
        return path.read_bytes()


def recording(facts: dict[bytes, bytes] | None = None, ended: bool = False, empty: bool = False) -> bytes:
    """Return a recording of two batches.

    `facts` is the metadata of the second batch; `empty` makes the values of its first row null.
    """
    with scratch() as directory:
        path = Path(directory) / "a.recording"
        if facts is not None:
            arrays = [pa.array(column, mask=np.arange(len(column)) < empty) for column in trace().columns]
            first = {NEW_FILES: json.dumps(METADATA["files"]).encode(), LOST: b"1"}
            with pa.ipc.new_stream(str(path), SCHEMA.with_metadata({KEY: encode((), PROVENANCE)})) as stream:
                stream.write_batch(pa.record_batch(list(trace().columns), schema=SCHEMA), custom_metadata=first)
                stream.write_batch(pa.record_batch(arrays, schema=SCHEMA), custom_metadata=facts)
            return path.read_bytes()
        writer = RecordingWriter(path, PROVENANCE, force=False)
        writer.append(trace().columns, FILES, 1)
        writer.append(trace(t_ns=(9, 9, 10, 11)).columns, (), 2)
        if ended:
            writer.close()
        data = path.read_bytes()
        writer.discard()
        return data


def check(data: bytes, name: str = "a.parquet") -> None:
    """Check any bytes in a file with the suffix of `name`."""
    with scratch() as directory:
        path = Path(directory) / name
        path.write_bytes(data)
        with bounded(), refusal(), open_trace(path) as reader:
            check_reader(reader)
            check_description(path, reader)
            classes = classify_file(str(path), lambda files: ModelHeaders((), files))
            assert all(row.size_bytes >= 0 for row in classes.rows)
            check_printed(path, classes)
        assert path.read_bytes() == data and len(list(path.parent.iterdir())) == 1


def check_reader(reader: TraceReader) -> None:
    """Check that batches of any size give the whole trace, and that every row is possible."""
    assert all(is_printable(file.path.encode("utf-8", "surrogateescape").decode("latin-1")) for file in reader.files)
    whole = reader.read()
    assert len(whole) == reader.rows > 0
    assert (whole.count > 0).all() and (whole.op <= 2).all() and (whole.miss <= 2).all()
    assert (whole.t_ns[1:] >= whole.t_ns[:-1]).all()
    assert set(whole.file.tolist()) <= {file.id for file in reader.files}
    ends = [first + count for first, count in zip(whole.first.tolist(), whole.count.tolist(), strict=True)]
    assert max(ends) * BLOCK_BYTES <= 1 << 63, "no file is longer"
    for rows in (1, 3, 1 << 16):
        parts: list[Trace] = list(reader.batches(rows))
        assert sum(len(part) for part in parts) == len(whole)
        for name in COLUMNS:
            assert (np.concatenate([getattr(part, name) for part in parts]) == getattr(whole, name)).all()


def check_description(path: Path, reader: TraceReader) -> None:
    """Check that the sums of `llmcache info` match the rows."""
    info, whole = describe(path), reader.read()
    assert info.rows == len(whole) and info.accesses == whole.accesses == sum(info.ops.values()) == sum(info.misses.values())
    assert 0 < info.touched_bytes <= info.accessed_bytes == info.accesses * BLOCK_BYTES
    assert info.touched_bytes == sum(file.touched_bytes for file in info.files)
    assert info.duration_ns >= 0 and len(info.files) + info.untouched_files == len(reader.files)


def check_printed(path: Path, classes: TraceClasses) -> None:
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")):
        for as_json in (True, False):
            show(path, as_json)
            classify.show(classes, str(path), 0, as_json)


check_recording = partial(check, name="a.recording")
"""Checks any bytes as the file of a killed recorder."""


def _rows() -> st.SearchStrategy[bytes]:
    """Generate valid metadata with rows of which one or two numbers are replaced by odd values."""
    odd = [*range(4), 1 << 24, 1 << 31, (1 << 32) - 1, 1 << 39, 1 << 51, 1 << 62, (1 << 64) - 1]
    change = st.tuples(st.sampled_from(list(COLUMNS)), st.integers(0, 3), st.sampled_from(odd))
    return st.lists(change, min_size=1, max_size=2).map(_with)


def _with(changes: list[tuple[str, int, int]]) -> bytes:
    columns = {name: column.copy() for name, column in ROWS.items()}
    for name, row, value in changes:
        columns[name][row] = min(value, int(np.iinfo(COLUMNS[name]).max))
    return parquet(written(METADATA), columns)


DOCUMENTS = documents([METADATA]).map(written)
MADE = DOCUMENTS.map(lambda text: parquet(text, ROWS)) | _rows()
FACTS = st.builds(lambda files: {NEW_FILES: written(files), LOST: b"1"}, documents([METADATA["files"]]))
TARGET = Target("parquet", mutated([saved(), parquet(written(METADATA), ROWS)]) | MADE, check)
RECORDINGS = Target("recording", mutated([recording(), recording(ended=True)]) | FACTS.map(recording), check_recording)


def test_the_seeds_are_read() -> None:
    for data, name in (
        (saved(), "a.parquet"),
        (parquet(written(METADATA), ROWS), "a.parquet"),
        (recording(), "a.recording"),
    ):
        with scratch() as directory:
            path = Path(directory) / name
            path.write_bytes(data)
            with open_trace(path) as reader:
                assert reader.rows in (4, 8)
        check(data, name)


@given(TARGET.inputs)
@settings(max_examples=examples(150))
@example(parquet(b"[" * 100_000, ROWS))
@example(parquet(b"\xff\xfe", ROWS))
@example(parquet(written(METADATA), ROWS).replace(b"count", b"\x80ount"))  # the name of a column
@example(parquet(written(METADATA | {"provenance": METADATA["provenance"] | {"tier": "\ud800\x1b"}}), ROWS))
@example(_with([("count", 0, 0)]))
@example(_with([("op", 0, 3)]))
@example(_with([("miss", 0, 3)]))
@example(_with([("file", 0, 7)]))
@example(_with([("t_ns", 1, 0)]))
@example(_with([("first", 0, (1 << 64) - 1)]))
@example(parquet(written(METADATA), ROWS | {"count": [1, 1, 2, (1 << 32) - 1], "file": [1, 1, 1, 1]}))
def test_any_bytes(data: bytes) -> None:
    check(data)


@given(RECORDINGS.inputs)
@settings(max_examples=examples(120))
@example(recording({NEW_FILES: b"[" * 100_000, LOST: b"0"}))
@example(recording({NEW_FILES: b"[]", LOST: b"0"}, empty=True))
@example(recording({NEW_FILES: b"[5]", LOST: b"0"}))
@example(recording({NEW_FILES: b'[{"id": "0"}]', LOST: b"0"}))
@example(recording({NEW_FILES: b"[]", LOST: b"-1"}))
@example(recording({NEW_FILES: b"[]", LOST: b"9" * 5000}))
def test_any_recording(data: bytes) -> None:
    check_recording(data)
