"""Logs of strace, the tool of the paper: `strace -f -ttt -y -e trace=desc,process -o app.strace APP`.

Read are system calls, so what is touched through mmap is not seen: a mapping gives one row for what it maps. Offsets
belong to open file descriptions, which dup and fork share; `-y` (paths beside descriptors) makes up for files that were
opened before tracing began. Any of the options -t -tt -ttt -r, or none; with or without -f.
Source: io_caching, section 3: "trace capturing was performed using the Linux strace utility together with a custom parser".
"""

from __future__ import annotations

from pathlib import Path

from llmcache.errors import DataError
from llmcache.trace.importers.strace.calls import Calls
from llmcache.trace.importers.strace.descriptors import File
from llmcache.trace.importers.strace.lines import LONGEST_LINE, Log
from llmcache.trace.record import BLOCK_BYTES, COLUMNS, UNKNOWN, Provenance, TraceWriter
from llmcache.trace.record.reader import readable

_BATCH_ROWS = 1 << 15
_NOTE = "System calls only: a map row tells what was mapped, not what was touched; io_uring is not seen."


def read(path: Path, writer: TraceWriter) -> None:
    """Append the accesses in the log `path`; DataError if it is none. Constant memory, but for names and descriptors."""
    rows, log = _Rows(writer), Log()
    calls = Calls(rows.note)
    with readable(path), open(path, encoding="utf-8", errors="surrogateescape") as lines:
        for event in log.events(iter(lambda: lines.readline(LONGEST_LINE + 1), "")):
            calls.take(event)
    if not log.calls:
        raise DataError(f"rows: no system call found in '{path}'", "not a log of strace, or one of another format (-c, -X)")
    rows.flush()
    for file in calls.files.table(rows.files):
        writer.add_file(file)
    counts = {
        "calls": log.calls,
        "calls_not_understood": calls.not_understood,
        "other_lines": log.other_lines,
        "accesses_of_unknown_files": calls.unknown,
        "guessed_offsets": calls.guessed,
        "mapped_ranges": calls.mapped,
        "threads_of_unknown_origin": calls.processes.adopted,
        "clock_steps_back": log.clock.steps_back,
    }
    writer.provenance = Provenance(
        tier="strace",
        clock=log.clock.kind,
        command=calls.command,
        note=_NOTE,
        extra={name: str(count) for name, count in counts.items() if count},
    )


class _Rows:
    """Collects accesses into batches of blocks."""

    def __init__(self, writer: TraceWriter) -> None:
        self.files: set[int] = set()
        self._writer = writer
        self._rows: list[tuple[int, ...]] = []

    def note(self, t_ns: int, file: File, offset: int, length: int, op: int, pid: int) -> None:
        """Take one access."""
        first = offset // BLOCK_BYTES
        count = (offset + length - 1) // BLOCK_BYTES - first + 1
        self.files.add(file.number)
        self._rows.append((t_ns, file.number, first, count, op, UNKNOWN, pid))
        if len(self._rows) >= _BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Append what has been collected."""
        if self._rows:
            self._writer.append(dict(zip(COLUMNS, map(list, zip(*self._rows, strict=True)), strict=True)))
            self._rows = []
