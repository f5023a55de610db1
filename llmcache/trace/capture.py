"""`llmcache trace`: one recording, from the choice of the source to the finished trace.

Signal handlers only set a flag, so the remaining events are drained and the file is completed. If the process is killed, the
rows written until then are in `OUT.recording`.

`RUN.block.parquet` (schema "llmcache.block/1") has a row for each request of the block layer, with its latency.
`RUN.sampled.parquet` is a trace of the pages touched in each interval.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llmcache.arrays import Records, Uint32s
from llmcache.errors import MissingRequirement, UsageError, broken, printable
from llmcache.files import Output, writing
from llmcache.procfs import RunningProcesses
from llmcache.trace.files import FileTable, LockedBytes, LockedQuery
from llmcache.trace.formats import PARQUET
from llmcache.trace.formats.recording import RecordingFull, RecordingWriter, kept_hint, no_rows, recording_of
from llmcache.trace.formats.recording import read as read_recording
from llmcache.trace.kernel import AUTO, start_source
from llmcache.trace.processes import Target
from llmcache.trace.record import (
    LOCKED,
    MISS,
    UNKNOWN,
    WRITE,
    Columns,
    Provenance,
    TraceFile,
    TraceWriter,
    concatenated,
    locked_extra,
)
from llmcache.trace.records import ACCESS, BLOCK, EVICT, FILL, MATCHED, POLL_S, SAMPLED, Scope
from llmcache.units import BLOCK_BYTES, format_duration, format_percent, format_size

SCHEMA = "llmcache.capture/1"
BLOCK_SCHEMA = "llmcache.block/1"
HEADING = "    time     rows/s   blocks/s      MB/s    miss   files      lost"
NO_FILE = (1 << 32) - 1
FLUSH_S = 1.0
_MOST_FILES = 8
_LINES_PER_HEADING = 20
_WIDTH = 79
_LARGE_BYTES = 64 << 20  # a larger recording takes seconds to convert: announce it
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ROW = ("t_ns", "first", "count", "op", "miss", "pid")


@dataclass(frozen=True)
class CaptureSettings:
    """The options of `llmcache trace`."""

    output: str
    seconds: float | None = None
    follow: bool = True
    writes: bool = True
    block: bool = False
    rerefs_s: float | None = None
    coalesce: bool = True
    glob: str | None = None
    tier: str = AUTO
    force: bool = False

    def __post_init__(self) -> None:
        if Path(self.output).suffix.lower() != PARQUET:
            raise UsageError(f"-o: '{self.output}' must end in {PARQUET}", "llmcache convert writes other formats")
        if self.seconds is not None and self.seconds <= 0:
            raise UsageError("-d: the duration must be more than 0", "omit -d to record until the process ends")
        if self.rerefs_s is not None and self.rerefs_s <= 0:
            raise UsageError("--mmap-rerefs: the interval must be more than 0", "for example: --mmap-rerefs 1s")

    def matches(self, path: str) -> bool:
        """Compare `path` with the glob; one without a slash is compared with the file name only."""
        glob = self.glob
        return glob is None or fnmatch.fnmatchcase(path if "/" in glob else os.path.basename(path), glob)

    def beside(self, what: str) -> Path:
        path = Path(self.output)
        return path.with_suffix(f".{what}{path.suffix}")


def default_output(target: Target) -> str:
    """Return `PROGRAM-PID.parquet`."""
    program = os.path.basename(target.command.split(" ", 1)[0]) or "process"
    return f"{program}-{target.pid}{PARQUET}"


def record(target: Target, settings: CaptureSettings, locked: LockedQuery) -> Captured:
    """Record `target` until it ends, `settings.seconds` are over or a signal arrives.

    `locked` returns how many bytes of a file its mount has locked. MissingRequirement if no tier works, the target has ended
    or the output cannot be written; UsageError if the output exists. On a full disk the rows stay in `OUT.recording`.
    """
    with ExitStack() as stack:
        stack.callback(target.end)
        Output(settings.output, settings.force)  # raises UsageError before the recording, not after it
        with _stop_signals() as stopped, _Capture(target, settings, LockedBytes(locked)) as session:
            return session.run(stopped)


@dataclass
class Captured:
    """The summary of a recording; repeated accesses to a block count again.

    `missed_blocks` are among the `known_blocks`, for which hit or miss is known.
    """

    trace: str
    tier: str
    rows: int = 0
    blocks: int = 0
    written_blocks: int = 0
    known_blocks: int = 0
    missed_blocks: int = 0
    filled_blocks: int = 0
    evicted_blocks: int = 0
    left_out_rows: int = 0
    by_file: dict[int, int] = field(default_factory=dict)
    unnamed_files: int = 0
    lost_events: int = 0
    duration_s: float = 0.0
    files: list[tuple[str, int]] = field(default_factory=list)
    ending: str = ""
    beside: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def note(self, accesses: Records, file: Uint32s) -> None:
        count = accesses["count"].astype(np.int64)
        is_write = accesses["op"] == WRITE
        is_known = ~is_write & (accesses["miss"] != UNKNOWN)
        self.rows += len(accesses)
        self.blocks += int(count.sum())
        self.written_blocks += int(count[is_write].sum())
        self.known_blocks += int(count[is_known].sum())
        self.missed_blocks += int(count[is_known & (accesses["miss"] == MISS)].sum())
        totals = np.bincount(file, weights=count)
        for number in np.flatnonzero(totals).tolist():
            self.by_file[number] = self.by_file.get(number, 0) + int(totals[number])

    @property
    def miss_ratio(self) -> float | None:
        return self.missed_blocks / self.known_blocks if self.known_blocks else None

    def document(self) -> dict[str, Any]:
        shown = {
            name: value for name, value in vars(self).items() if name not in ("by_file", "known_blocks", "missed_blocks")
        }
        files = [{"path": path, "blocks": blocks} for path, blocks in self.files]
        return {**shown, "miss_ratio": self.miss_ratio, "files": files, "schema": SCHEMA}

    def lines(self) -> list[str]:
        ratio = "" if self.miss_ratio is None else f", {format_percent(self.miss_ratio)} from storage"
        made = [
            f"{self.trace}: {self.rows} rows in {format_duration(self.duration_s * 1e9)}; {self.ending}",
            f"accessed: {format_size(self.blocks * BLOCK_BYTES)} in {len(self.files)} files{ratio}",
            f"events lost: {self.lost_events}" + (": the trace is not complete" if self.lost_events else ""),
        ]
        width = max((len(str(blocks)) for _, blocks in self.files), default=0)
        made += [f"  {blocks:{width}d} blocks  {path}" for path, blocks in self.files[:_MOST_FILES]]
        if len(self.files) > _MOST_FILES:
            made.append(f"  and {len(self.files) - _MOST_FILES} more files, which llmcache info lists")
        if self.left_out_rows:
            made.append(f"left out by --path: {self.left_out_rows} rows")
        if self.unnamed_files:
            made.append(f"files without a name, because they were closed too early: {self.unnamed_files}")
        made += [f"also written: {path}" for path in self.beside]
        return made + [f"note: {remark}" for remark in self.remarks]

    def show(self, as_json: bool) -> None:
        """Print the lines on stderr, apart from the output of the traced command, and JSON on stdout."""
        for text in self.lines():
            say(text)
        if as_json:
            print(json.dumps(self.document(), indent=1))


@contextmanager
def _stop_signals() -> Iterator[list[str]]:
    received: list[str] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda number, _frame: received.append(signal.Signals(number).name))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Capture:
    """A recording whose source has been started."""

    def __init__(self, target: Target, settings: CaptureSettings, locked: LockedBytes) -> None:
        self._target, self._settings, self._locked = target, settings, locked
        scope = Scope(
            (target.pid,), settings.follow, settings.writes, settings.block, settings.rerefs_s or 0.0, settings.coalesce
        )
        self._source, passed_over = start_source(settings.tier, scope)
        self._better_tiers = "; ".join(f"{name}: {why}" for name, why in passed_over.items())
        self._counts = Captured(settings.output, self._source.name)
        self._shown_counts = dataclasses.replace(self._counts)
        self._waiting: list[Columns] = []
        self._files_written = 0
        self._wanted: list[bool] = []  # by file id: whether the path matches --path
        self._changes_known = 0
        self._sidecars: dict[int, BlockRequests | SampledTouches] = {}

    def __enter__(self) -> _Capture:
        settings = self._settings
        with ExitStack() as stack:
            stack.callback(self._source.stop)
            self._recording = RecordingWriter(recording_of(settings.output), self._provenance(), settings.force)
            stack.callback(self._recording.discard)
            stack.callback(self._discard_sidecars)
            if settings.block:
                self._sidecars[BLOCK] = BlockRequests(settings.beside("block"), settings.force)
            if settings.rerefs_s:
                self._sidecars[SAMPLED] = SampledTouches(settings.beside("sampled"), settings.force)
            self._table = FileTable((self._target.pid,), self._source.paths)
            stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._source.stop()
        if kind is not None:
            with suppress(OSError, MissingRequirement):
                self._recording.close()
            self._discard_sidecars()

    def _discard_sidecars(self) -> None:
        for written in self._sidecars.values():
            written.discard()

    def run(self, stopped: list[str]) -> Captured:
        self._say_begin()
        try:
            self._target.release()
        except UsageError:
            self._recording.discard()
            raise
        self._started_s = time.monotonic()
        ending = self._loop(stopped)
        self._source.stop()
        counts = self._counts
        counts.duration_s = time.monotonic() - self._started_s
        self._take(self._source.drain())
        self._table.finish()
        counts.ending = self._target.ending or ending
        self._flush(whole_table=True)
        self._locked.finish(self._table.files)
        self._recording.close()
        self._finish()
        counts.unnamed_files, counts.lost_events = self._table.unnamed, self._source.lost
        ranked = sorted(counts.by_file.items(), key=lambda pair: -pair[1])
        counts.files = [(self._table.files[number].path, blocks) for number, blocks in ranked]
        counts.beside = [f"{written.path}: {written.summary}" for written in self._sidecars.values()]
        counts.remarks = [*self._source.remarks, *self._locked.remarks]
        return counts

    def _loop(self, stopped: list[str]) -> str:
        end_s = self._started_s + self._settings.seconds if self._settings.seconds else None
        flush_s = shown_s = self._started_s
        shown_lines = 0
        with RunningProcesses([self._target.pid]) as running:
            while True:
                # Checked before draining: if the process has ended, all of its events are in the buffers now.
                alive = self._source.alive()
                self._take(self._source.drain())
                now_s = time.monotonic()
                if now_s - flush_s >= FLUSH_S:
                    self._flush()
                    flush_s = now_s
                if now_s - shown_s >= 1:
                    if shown_lines % _LINES_PER_HEADING == 0:
                        say(HEADING)
                    self._say_line(now_s - shown_s)
                    shown_s, shown_lines = now_s, shown_lines + 1
                if stopped:
                    return f"stopped by {stopped[-1]}"
                if not alive:
                    return "the process has ended"
                if end_s is not None and now_s >= end_s:
                    return "the time is over"
                running.wait(POLL_S if end_s is None else min(POLL_S, max(0.0, end_s - now_s)))

    def _take(self, records: Records) -> None:
        if not len(records):
            return
        counts, kinds = self._counts, records["kind"]
        counts.filled_blocks += int(records["count"][kinds == FILL].sum(dtype=np.int64))
        counts.evicted_blocks += int(records["count"][kinds == EVICT].sum(dtype=np.int64))
        for kind, writer in self._sidecars.items():
            if (kinds == kind).any():
                writer.append(records[kinds == kind], self._table)
        accesses = records[kinds == ACCESS]
        file = self._table.numbers(accesses["dev"], accesses["inode"], accesses["pid"])
        if self._settings.glob is not None:
            accesses, file = self._chosen(accesses, file)
        if not len(accesses):
            return
        counts.note(accesses, file)
        self._waiting.append(Columns(file=file, **{name: np.ascontiguousarray(accesses[name]) for name in _ROW}))

    def _chosen(self, accesses: Records, file: Uint32s) -> tuple[Records, Uint32s]:
        if self._table.changes != self._changes_known:
            self._changes_known, self._wanted = self._table.changes, []
        self._wanted += [self._settings.matches(entry.path) for entry in self._table.files[len(self._wanted) :]]
        chosen = np.array(self._wanted, bool)[file]
        self._counts.left_out_rows += int((~chosen).sum())
        return accesses[chosen], file[chosen]

    def _flush(self, whole_table: bool = False) -> None:
        files = self._table.files[0 if whole_table else self._files_written :]
        if not self._waiting and not whole_table:
            return
        self._locked.begin(files)
        waiting, self._waiting = self._waiting, []
        rows = concatenated(waiting) if waiting else no_rows()
        try:
            self._recording.append(rows, files, self._source.lost)
        except RecordingFull:
            self._source.stop()
            raise
        self._files_written = len(self._table.files)

    def _finish(self) -> None:
        provenance = self._provenance()
        if self._recording.size_bytes >= _LARGE_BYTES:
            say(f"writing {self._settings.output}")
        try:
            with TraceWriter(self._settings.output, force=self._settings.force) as writer:
                read_recording(self._recording.opened, writer)
                writer.provenance = provenance
        except MissingRequirement as error:
            raise MissingRequirement(error.message, kept_hint(self._recording.path)) from error
        self._recording.discard()
        for written in self._sidecars.values():
            written.close(self._table.files, provenance)

    def _provenance(self) -> Provenance:
        source, counts = self._source, self._counts
        extra = {
            "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": platform.machine(),
            "path": self._settings.glob or "",
            "better_tiers": self._better_tiers,
            "filled_blocks": str(counts.filled_blocks or ""),
            "evicted_blocks": str(counts.evicted_blocks or ""),
            "rows_left_out": str(counts.left_out_rows or ""),
            LOCKED: locked_extra(self._locked.by_file),
        }
        return Provenance(
            tier=source.name,
            clock="CLOCK_MONOTONIC",
            kernel=platform.release(),
            lost_events=source.lost,
            command=self._target.command,
            note=" ".join([f"Sees {source.sees}. Cannot see {source.cannot_see}.", *source.remarks, *self._locked.remarks]),
            extra={name: value for name, value in extra.items() if value},
        )

    def _say_begin(self) -> None:
        name = os.path.basename(self._target.command.split(" ", 1)[0] or "?")
        say(f"llmcache trace: recording {self._target.pid} ({name}), tier {self._source.name}; Ctrl-C to stop")
        say(f"cannot see: {self._source.cannot_see}")
        for remark in self._source.remarks:
            say(f"note: {remark}")
        if self._better_tiers:
            say(f"better tiers are not available: {self._better_tiers}")

    def _say_line(self, span_s: float) -> None:
        now, before = self._counts, self._shown_counts
        seconds, lost = time.monotonic() - self._started_s, self._source.lost
        rows, blocks = (now.rows - before.rows) / span_s, (now.blocks - before.blocks) / span_s
        known, missed = now.known_blocks - before.known_blocks, now.missed_blocks - before.missed_blocks
        miss = f"{format_percent(missed / known if known else None):>7}"
        speed = f"{rows:10.0f} {blocks:10.0f} {blocks * BLOCK_BYTES / 1e6:9.1f}"
        say(f"{seconds:6.1f} s {speed} {miss} {len(now.by_file):7d} {lost:9d}")
        self._shown_counts = dataclasses.replace(now)


def say(text: str) -> None:
    """Print `text` on stderr, in lines under 80 columns; a closed terminal does not end the recording."""
    with suppress(OSError, ValueError):
        print("\n".join(broken(printable(text), _WIDTH)), file=sys.stderr, flush=True)


_COLUMNS = pa.schema(
    [
        ("t_ns", pa.uint64()),  # completion, clock of the trace
        ("latency_us", pa.uint32()),
        ("dev", pa.uint64()),  # of the file system if the file is known, else of the disk
        ("file", pa.uint32()),  # id in the trace; NO_FILE if not known
        ("first", pa.uint64()),  # block of the file if it is known, else of the disk
        ("count", pa.uint32()),
        ("op", pa.uint8()),
        ("pid", pa.uint32()),
    ]
)


class BlockRequests:
    """Writes block-layer requests, to a temporary file until `close`."""

    def __init__(self, path: Path, force: bool) -> None:
        self.path = path
        self._requests = self._blocks = self._latency_us = 0
        self._output = Output(path, force)
        described = _COLUMNS.with_metadata({"llmcache.block": BLOCK_SCHEMA})
        try:
            with writing(path):
                self._parquet = pq.ParquetWriter(self._output.begin(), described, compression="zstd")
        except MissingRequirement:
            self._output.discard()
            raise

    def append(self, records: Records, table: FileTable) -> None:
        self._requests += len(records)
        self._blocks += int(records["count"].sum(dtype=np.int64))
        self._latency_us += int(records["aux"].sum(dtype=np.int64))
        matched = records["flags"] & MATCHED != 0
        file = np.full(len(records), NO_FILE, np.uint32)
        some = records[matched]
        file[matched] = table.numbers(some["dev"], some["inode"], some["pid"])
        columns = [records[name] for name in ("t_ns", "aux", "dev")]
        columns += [file, *(records[name] for name in ("first", "count", "op", "pid"))]
        batch = pa.record_batch([np.ascontiguousarray(column) for column in columns], schema=_COLUMNS)
        with writing(self.path):
            self._parquet.write_batch(batch)

    @property
    def summary(self) -> str:
        if not self._requests:
            return "no block requests"
        latency = format_duration(self._latency_us / self._requests * 1e3)
        return f"{self._requests} block requests, {format_size(self._blocks * BLOCK_BYTES)}, mean latency {latency}"

    def close(self, files: list[TraceFile], provenance: Provenance) -> None:
        with writing(self.path):
            self._parquet.close()
        self._output.keep()

    def discard(self) -> None:
        self._output.discard()


class SampledTouches:
    """Writes the sampled pages as a trace, to a temporary file until `close`."""

    def __init__(self, path: Path, force: bool) -> None:
        self.path = path
        self._blocks = 0
        self._writer = TraceWriter(path, force=force)

    @property
    def summary(self) -> str:
        return f"{self._blocks} sampled touches of blocks"

    def append(self, records: Records, table: FileTable) -> None:
        self._blocks += int(records["count"].sum(dtype=np.int64))
        file = table.numbers(records["dev"], records["inode"], records["pid"])
        self._writer.append({"file": file, **{name: records[name] for name in _ROW}})

    def close(self, files: list[TraceFile], provenance: Provenance) -> None:
        for file in files:
            self._writer.add_file(file)
        note = "Sampled: pages touched within each interval, in the order of their blocks; not single accesses."
        self._writer.provenance = dataclasses.replace(provenance, tier=f"{provenance.tier}, sampled", note=note)
        self._writer.close()

    def discard(self) -> None:
        self._writer.discard()
