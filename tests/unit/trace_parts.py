"""Small traces, in memory and as files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from llmcache.model.modelfile import Models
from llmcache.model.tensors import Experts, ModelLayout, Tensor
from llmcache.trace.record import KEY, SCHEMA, Provenance, Trace, TraceFile, encode

FILES = (TraceFile(0, "/models/a.gguf", 1, 11, 0, 400 * 4096), TraceFile(1, '/models/b,"c\n.bin', 1, 12, 3, 0))
PROVENANCE = Provenance("test", clock="monotonic", kernel="6.18", lost_events=2, command="x y", extra={"k": "ü"})


def trace(
    t_ns: Any = (1, 2, 2, 9),
    file: Any = (0, 1, 0, 0),
    first: Any = (0, 7, 3, 0),
    count: Any = (3, 1, 2, 3),
    files: Sequence[TraceFile] = FILES,
    **columns: Any,
) -> Trace:
    """Return a trace of four rows; keyword arguments replace its columns."""
    return Trace.build(t_ns, file, first, count, files=files, provenance=PROVENANCE, **columns)


@st.composite
def traces(draw: st.DrawFn, most_rows: int = 60) -> Trace:
    """Generate traces of up to three files."""
    rows = draw(st.integers(1, most_rows))

    def column(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    # A path may be any bytes; os.fsdecode maps bytes that are not valid UTF-8.
    text = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1)
    names = text | st.binary(min_size=1).map(lambda raw: os.fsdecode(raw.translate(None, b"\0\r"))).filter(bool)
    paths = draw(st.lists(names, min_size=3, max_size=3, unique=True))
    return Trace.build(
        sorted(column(st.integers(0, 10**12))),
        column(st.integers(0, 2)),
        column(st.integers(0, 500)),
        column(st.integers(1, 40)),
        column(st.integers(0, 2)),
        column(st.integers(0, 2)),
        column(st.integers(0, 2**32 - 1)),
        files=[TraceFile(number, path, number, 5, 0, 0) for number, path in enumerate(paths)],
        provenance=Provenance("test", note=draw(st.text())),
    )


def blocks(of: Trace) -> list[tuple[str, int, int]]:
    """Return (path, block, op) of every access, in order."""
    paths = {file.id: file.path for file in of.files}
    rows = zip(of.file.tolist(), of.first.tolist(), of.count.tolist(), of.op.tolist(), strict=True)
    return [(paths[file], block, op) for file, first, count, op in rows for block in range(first, first + count)]


def write_parquet(path: Path, columns: dict[str, Any], metadata: bytes | None = None, nullable: bool = False) -> Path:
    """Write Parquet that TraceWriter would not write: `columns` replace those of `trace()`; None omits a column."""
    good = dict(zip(SCHEMA.names, trace().columns, strict=True))
    arrays = {name: pa.array(values) for name, values in {**good, **columns}.items() if values is not None}
    fields = [pa.field(name, array.type, nullable=nullable) for name, array in arrays.items()]
    text = encode(FILES, PROVENANCE) if metadata is None else metadata
    schema = pa.schema(fields, metadata={KEY: text} if text else None)
    pq.write_table(pa.table(list(arrays.values()), schema=schema), path)
    return path


@dataclass(frozen=True)
class KnownModels(Models):
    """Models that give the same answer for every file, or for the files in `only`."""

    tensors: Sequence[Tensor] = ()
    moe: Experts | None = None
    layout: ModelLayout | None = None
    only: frozenset[int] | None = None

    def __call__(self, file: TraceFile) -> tuple[Tensor, ...]:
        return tuple(self.tensors) if self.only is None or file.id in self.only else ()

    def header(self, file: TraceFile) -> ModelLayout | None:
        return self.layout

    def experts(self, file: TraceFile) -> tuple[str, Experts] | None:
        return None if self.moe is None else (file.path, self.moe)
