"""`llmcache info`: the contents of a trace, read once in constant memory."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from llmcache.errors import printable
from llmcache.trace.formats import open_trace
from llmcache.trace.record import MISS_NAMES, OP_NAMES, BlockSpace, Provenance, Trace
from llmcache.units import BLOCK_BYTES, format_duration, format_size

SCHEMA = "llmcache.info/1"
_WIDTH = 79
_MOST_FILES = 20
_LONGEST_EXTRA = 200  # values can be whole documents


@dataclass(frozen=True)
class FileInfo:
    """`accesses` counts blocks, repeats included; `touched_bytes` counts each block once."""

    path: str
    size_bytes: int
    rows: int
    accesses: int
    touched_bytes: int


@dataclass(frozen=True)
class TraceInfo:
    """`ops` and `misses` count accessed blocks, repeats included; `files` has the most accessed first."""

    trace: str
    rows: int
    accesses: int
    accessed_bytes: int
    touched_bytes: int
    start_ns: int
    end_ns: int
    ops: dict[str, int]
    misses: dict[str, int]
    pids: list[int]
    files: list[FileInfo]
    untouched_files: int
    provenance: Provenance

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


def describe(path: str | os.PathLike[str]) -> TraceInfo:
    """Return the contents of the trace in `path` (any format); DataError if it is invalid or empty."""
    ops, misses = np.zeros(len(OP_NAMES), np.int64), np.zeros(len(MISS_NAMES), np.int64)
    rows, accesses = Counter[int](), Counter[int]()  # by file
    pids: set[int] = set()
    times: list[int] = []

    def counted(batch: Trace) -> Trace:
        count = batch.count.astype(np.int64)
        np.add.at(ops, batch.op, count)
        np.add.at(misses, batch.miss, count)
        files, index = np.unique(batch.file, return_inverse=True)
        blocks = np.bincount(index, count).astype(np.int64)
        rows.update(dict(zip(files.tolist(), np.bincount(index).tolist(), strict=True)))
        accesses.update(dict(zip(files.tolist(), blocks.tolist(), strict=True)))
        pids.update(np.unique(batch.pid).tolist())
        times[:] = [*times[:1], int(batch.t_ns[0]), int(batch.t_ns[-1])]
        return batch

    with open_trace(path) as reader:
        space = BlockSpace.of(counted(batch) for batch in reader.batches() if len(batch))
    touched = space.footprint_by_file()
    files = [
        FileInfo(file.path, file.size_bytes, rows[file.id], accesses[file.id], touched[file.id] * BLOCK_BYTES)
        for file in reader.files
        if file.id in touched
    ]
    return TraceInfo(
        trace=os.fspath(path),
        rows=reader.rows,
        accesses=accesses.total(),
        accessed_bytes=accesses.total() * BLOCK_BYTES,
        touched_bytes=space.footprint * BLOCK_BYTES,
        start_ns=times[0],
        end_ns=times[-1],
        ops=dict(zip(OP_NAMES, ops.tolist(), strict=True)),
        misses=dict(zip(MISS_NAMES, misses.tolist(), strict=True)),
        pids=sorted(pids),
        files=sorted(files, key=lambda file: -file.accesses),
        untouched_files=len(reader.files) - len(files),
        provenance=reader.provenance,
    )


def show(path: str | os.PathLike[str], as_json: bool = False) -> None:
    """Print the contents of a trace."""
    info = describe(path)
    if as_json:
        print(json.dumps({**asdict(info), "schema": SCHEMA, "duration_ns": info.duration_ns}, indent=2))
        return
    console = Console(width=_WIDTH, file=sys.stdout, highlight=False, markup=False)
    console.print(f"{printable(info.trace)}: {info.rows} rows, {info.accesses} accesses to blocks of {BLOCK_BYTES} bytes")
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _facts(info):
        facts.add_row(printable(name), printable(value))
    console.print(facts)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("file", overflow="ellipsis", no_wrap=True, max_width=36)
    for name in ("size", "touched", "accesses", "rows"):
        table.add_column(name, justify="right", no_wrap=True)
    for file in info.files[:_MOST_FILES]:
        size = format_size(file.size_bytes) if file.size_bytes else "unknown"
        table.add_row(printable(file.path), size, format_size(file.touched_bytes), str(file.accesses), str(file.rows))
    console.print(table)
    if len(info.files) > _MOST_FILES:
        console.print(f"and {len(info.files) - _MOST_FILES} more files (see --json)")


def _facts(info: TraceInfo) -> list[tuple[str, str]]:
    origin = info.provenance
    facts = [
        ("accessed", f"{format_size(info.accessed_bytes)}, {format_size(info.touched_bytes)} distinct"),
        ("time", f"{format_duration(info.duration_ns)}, starting at {info.start_ns} ns"),
        ("ops", _counts(info.ops)),
        ("cache", _counts(info.misses)),
        ("processes", str(len(info.pids))),
        ("source", origin.tier + (f", {origin.lost_events} events lost" if origin.lost_events else "")),
        ("clock", origin.clock),
        ("kernel", origin.kernel),
        ("command", origin.command),
        ("note", origin.note),
    ]
    for name, value in sorted(origin.extra.items()):
        facts.append((name, value if len(value) <= _LONGEST_EXTRA else f"{len(value)} characters (see --json)"))
    return [(name, value) for name, value in facts if value]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.items() if number)
