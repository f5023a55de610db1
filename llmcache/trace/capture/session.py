"""One recording: from the choice of the source to the finished trace.

A loop of drain, name, write, in one thread. Signals only set a flag, so that whatever ends the recording, the rest is
drained and the file completed; what even that cannot save is in OUT.recording.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import platform
import select
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from llmcache.arrays import Records, Uint32s
from llmcache.errors import EnvironmentProblem, UsageError, printable
from llmcache.files import Output
from llmcache.trace.capture.files import AskLocked, FileTable, LockedBytes, nothing_locked
from llmcache.trace.capture.sidecars import BlockRequests, SampledTouches, sidecar
from llmcache.trace.capture.target import Target
from llmcache.trace.formats import PARQUET
from llmcache.trace.formats.recording import RecordingFull, RecordingWriter, kept_hint, no_rows, recording_of
from llmcache.trace.formats.recording import read as read_recording
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
from llmcache.trace.sources import AUTO
from llmcache.trace.sources.base import ACCESS, BLOCK, EVICT, FILL, POLL_S, SAMPLED, Scope
from llmcache.trace.sources.selection import ChosenSource, start_source
from llmcache.units import BLOCK_BYTES, format_duration, format_size

SCHEMA = "llmcache.capture/1"
HEADING = "    time     rows/s   blocks/s      MB/s    miss   files      lost"
_MOST_FILES = 8
FLUSH_S = 1.0
_LINES_PER_HEADING = 20
_WIDTH = 79
_LARGE_BYTES = 64 << 20  # from which on the last step takes a while
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class CaptureSettings:
    """The options of `llmcache trace`. `seconds`: None until the target ends; `glob`: None for all files."""

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
        """UsageError, naming the option, for what cannot be."""
        if Path(self.output).suffix.lower() != PARQUET:
            raise UsageError(f"-o: '{self.output}' must end in {PARQUET}", "llmcache convert makes other formats of it")
        if self.seconds is not None and self.seconds <= 0:
            raise UsageError("-d: the duration must be more than 0", "leave it out to record until the process ends")
        if self.rerefs_s is not None and self.rerefs_s <= 0:
            raise UsageError("--mmap-rerefs: the interval must be more than 0", "for example: --mmap-rerefs 1s")

    def scope(self, pid: int) -> Scope:
        """Returns what a source is to record of process `pid`."""
        return Scope((pid,), self.follow, self.writes, self.block, self.rerefs_s or 0.0, self.coalesce)

    @property
    def matches(self) -> Callable[[str], bool] | None:
        """Says whether a path is wanted; None if all are. A glob without a slash is for the file name alone."""
        glob = self.glob
        if glob is None:
            return None
        return lambda path: fnmatch.fnmatchcase(path if "/" in glob else os.path.basename(path), glob)


def default_output(pid: int, command: str) -> str:
    """Returns the name of the trace if none is given: after the program and its process."""
    program = os.path.basename(command.split(" ", 1)[0]) or "process"
    return f"{program}-{pid}{PARQUET}"


def record(target: Target, settings: CaptureSettings, locked: AskLocked = nothing_locked) -> Captured:
    """Record `target` until it ends, `settings.seconds` are over or a signal comes; returns what was written.

    `locked` tells how many bytes of a file its mount keeps locked. EnvironmentProblem if nothing can record here, the
    target is gone or the output cannot be written; UsageError if the output exists. On a full disk the rows until then
    stay in OUT.recording, and the error names it.
    """
    with ExitStack() as stack:
        stack.callback(target.end)
        Output(settings.output, settings.force)  # refuses what exists, before anything is recorded
        with _StopSignal() as stop:
            choice = start_source(settings.tier, settings.scope(target.pid))
            stack.callback(choice.source.stop)
            with _Capture(target, settings, choice, LockedBytes(locked)) as session:
                return session.run(stop)


@dataclass
class Tally:
    """Counts in rows and blocks. `known`: blocks read or mapped of which hit or miss is known, of them `missed`."""

    rows: int = 0
    blocks: int = 0
    written: int = 0
    known: int = 0
    missed: int = 0
    filled: int = 0
    evicted: int = 0
    left_out: int = 0
    by_file: dict[int, int] = field(default_factory=dict)

    def note(self, accesses: Records, file: Uint32s) -> None:
        """Count rows that go into the trace; `file`: the id of each row's file."""
        if not len(accesses):
            return
        count = accesses["count"].astype(np.int64)
        is_write = accesses["op"] == WRITE
        is_known = ~is_write & (accesses["miss"] != UNKNOWN)
        self.rows += len(accesses)
        self.blocks += int(count.sum())
        self.written += int(count[is_write].sum())
        self.known += int(count[is_known].sum())
        self.missed += int(count[is_known & (accesses["miss"] == MISS)].sum())
        totals = np.bincount(file, weights=count)
        for number in np.flatnonzero(totals).tolist():
            self.by_file[number] = self.by_file.get(number, 0) + int(totals[number])

    def note_cache(self, records: Records) -> None:
        """Count what the page cache did."""
        self.filled += int(records["count"][records["kind"] == FILL].sum(dtype=np.int64))
        self.evicted += int(records["count"][records["kind"] == EVICT].sum(dtype=np.int64))

    @property
    def miss_ratio(self) -> float | None:
        """Share (0..1) of the blocks read or mapped that came from storage; None if it is not known of any."""
        return self.missed / self.known if self.known else None


def line(before: Tally, now: Tally, seconds: float, span_s: float, files: int, lost: int) -> str:
    """Returns what happened in the last `span_s` seconds, in less than 80 columns; `seconds` since the start."""
    rows, blocks = (now.rows - before.rows) / span_s, (now.blocks - before.blocks) / span_s
    known, missed = now.known - before.known, now.missed - before.missed
    miss = f"{missed / known:7.1%}" if known else "      -"
    return f"{seconds:7.1f}s {rows:10.0f} {blocks:10.0f} {blocks * BLOCK_BYTES / 1e6:9.1f} {miss} {files:7d} {lost:9d}"


@dataclass(frozen=True)
class Captured:
    """What a recording wrote. `blocks` with repeats; `files` by their accessed blocks, most first."""

    trace: str
    tier: str
    rows: int
    blocks: int
    written_blocks: int
    miss_ratio: float | None
    filled_blocks: int
    evicted_blocks: int
    left_out_rows: int
    unnamed_files: int
    lost_events: int
    duration_s: float
    files: list[tuple[str, int]]
    ending: str
    beside: list[str]
    remarks: list[str]
    schema: str = SCHEMA

    def document(self) -> dict[str, Any]:
        """Returns the summary for programs, in base units."""
        return asdict(self) | {"files": [{"path": path, "blocks": blocks} for path, blocks in self.files]}

    def lines(self) -> list[str]:
        """Returns the summary for people."""
        size = format_size(self.blocks * BLOCK_BYTES)
        span = format_duration(self.duration_s * 1e9)
        ratio = "" if self.miss_ratio is None else f", {self.miss_ratio:.1%} from storage"
        made = [
            f"{self.trace}: {self.rows} rows in {span}; {self.ending}",
            f"accessed: {size} in {len(self.files)} files{ratio}",
            f"events lost: {self.lost_events}" + (": the trace is not complete" if self.lost_events else ""),
        ]
        width = max((len(str(blocks)) for _, blocks in self.files), default=0)
        made += [f"  {blocks:{width}d} blocks  {path}" for path, blocks in self.files[:_MOST_FILES]]
        if len(self.files) > _MOST_FILES:
            made.append(f"  and {len(self.files) - _MOST_FILES} more files, which llmcache info lists")
        if self.left_out_rows:
            made.append(f"left out by --path: {self.left_out_rows} rows")
        if self.unnamed_files:
            made.append(f"files without a name, closed before it could be looked up: {self.unnamed_files}")
        made += [f"also written: {path}" for path in self.beside]
        return made + [f"note: {remark}" for remark in self.remarks]


def ranking(tally: Tally, files: list[TraceFile]) -> list[tuple[str, int]]:
    """Returns the paths with the blocks accessed in them, most first."""
    return sorted(((files[number].path, blocks) for number, blocks in tally.by_file.items()), key=lambda pair: -pair[1])


class _StopSignal:
    """Whether a signal has asked for the end; the handlers before come back when the with block ends."""

    def __init__(self) -> None:
        self.by: str | None = None

    def __enter__(self) -> _StopSignal:
        self._before = {number: signal.signal(number, self._take) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.by = signal.Signals(number).name


class _Capture:
    """The state of a recording, whose source has been started; the with block ends its files."""

    def __init__(self, target: Target, settings: CaptureSettings, choice: ChosenSource, locked: LockedBytes) -> None:
        self._target, self._settings, self._choice, self._locked = target, settings, choice, locked
        self._source = choice.source
        self._tally, self._shown = Tally(), Tally()
        self._waiting: list[Columns] = []
        self._files_written = 0
        self._wanted: list[bool] = []
        self._changes_known = 0
        self._sidecars: dict[int, BlockRequests | SampledTouches] = {}

    def __enter__(self) -> _Capture:
        self._started_s = time.monotonic()
        self._recording = RecordingWriter(recording_of(self._settings.output), self._provenance(), self._settings.force)
        try:
            self._open_sidecars()
            self._table = FileTable((self._target.pid,), lambda: self._source.paths)
        except BaseException:
            self._recording.discard()
            self._discard_sidecars()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            with suppress(OSError, EnvironmentProblem):
                self._recording.close()
            self._discard_sidecars()

    def run(self, stop: _StopSignal) -> Captured:
        """Returns what was written when the recording has ended."""
        self._say_begin()
        self._target.release()
        self._started_s = time.monotonic()
        ending = self._loop(stop)
        self._source.stop()
        duration_s = time.monotonic() - self._started_s
        self._take(self._source.drain())
        self._table.finish()
        ending = self._target.ending or ending
        self._flush(whole_table=True)
        self._locked.finish(self._table.files)
        self._recording.close()
        self._finish()
        return self._captured(duration_s, ending)

    def _loop(self, stop: _StopSignal) -> str:
        """Drains until the end; returns why it has come."""
        end_s = self._started_s + self._settings.seconds if self._settings.seconds else None
        flush_s = shown_s = self._started_s
        shown_lines = 0
        with _woken_by(self._target.pid) as sleep:
            while True:
                # Asked before draining: what a process did before it ended is in the buffers now.
                alive = self._source.alive()
                self._take(self._source.drain())
                now_s = time.monotonic()
                if now_s - flush_s >= FLUSH_S:
                    self._flush()
                    flush_s = now_s
                if now_s - shown_s >= 1:
                    self._say_line(now_s - shown_s, heading=shown_lines % _LINES_PER_HEADING == 0)
                    shown_s, shown_lines = now_s, shown_lines + 1
                if stop.by:
                    return f"stopped by {stop.by}"
                if not alive:
                    return "the process has ended"
                if end_s is not None and now_s >= end_s:
                    return "the time is over"
                sleep(POLL_S if end_s is None else min(POLL_S, end_s - now_s))

    def _take(self, records: Records) -> None:
        """Sort `records` by kind: accesses to the trace, others beside it or to the counters."""
        if not len(records):
            return
        self._tally.note_cache(records)
        for kind, writer in self._sidecars.items():
            writer.append(records[records["kind"] == kind], self._table)
        accesses = records[records["kind"] == ACCESS]
        file = self._table.numbers(accesses["dev"], accesses["inode"], accesses["pid"])
        accesses, file = self._chosen(accesses, file)
        if not len(accesses):
            return
        self._tally.note(accesses, file)
        columns = {name: np.ascontiguousarray(accesses[name]) for name in ("t_ns", "first", "count", "op", "miss", "pid")}
        self._waiting.append(Columns(file=file, **columns))

    def _chosen(self, accesses: Records, file: Uint32s) -> tuple[Records, Uint32s]:
        """Returns the rows of files that --path wants."""
        matches = self._settings.matches
        if matches is None:
            return accesses, file
        if self._table.changes != self._changes_known:
            self._changes_known, self._wanted = self._table.changes, []
        self._wanted += [matches(entry.path) for entry in self._table.files[len(self._wanted) :]]
        chosen = np.array(self._wanted, bool)[file]
        self._tally.left_out += int((~chosen).sum())
        return accesses[chosen], file[chosen]

    def _flush(self, whole_table: bool = False) -> None:
        """Write what waits to the recording, with the files that are new; with `whole_table` all, at their last names."""
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
        """Make the trace of the recording, and name the files beside it."""
        provenance = self._provenance()
        if self._recording.size_bytes >= _LARGE_BYTES:
            say(f"writing {self._settings.output}")
        try:
            with TraceWriter(self._settings.output, force=self._settings.force) as writer:
                read_recording(self._recording.path, writer)
                writer.provenance = provenance
        except EnvironmentProblem as error:
            raise EnvironmentProblem(error.message, kept_hint(self._recording.path)) from error
        self._recording.discard()
        for written in self._sidecars.values():
            written.close(self._table.files, provenance)

    def _open_sidecars(self) -> None:
        if self._settings.block:
            self._sidecars[BLOCK] = BlockRequests(sidecar(self._settings.output, "block"), self._settings.force)
        if self._settings.rerefs_s:
            self._sidecars[SAMPLED] = SampledTouches(sidecar(self._settings.output, "sampled"), self._settings.force)

    def _discard_sidecars(self) -> None:
        for written in self._sidecars.values():
            written.discard()

    def _provenance(self) -> Provenance:
        source, tally = self._source, self._tally
        extra = {
            "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": platform.machine(),
            "path": self._settings.glob or "",
            "better_tiers": self._choice.reason,
            "filled_blocks": str(tally.filled or ""),
            "evicted_blocks": str(tally.evicted or ""),
            "rows_left_out": str(tally.left_out or ""),
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

    def _captured(self, duration_s: float, ending: str) -> Captured:
        tally = self._tally
        return Captured(
            trace=self._settings.output,
            tier=self._source.name,
            rows=tally.rows,
            blocks=tally.blocks,
            written_blocks=tally.written,
            miss_ratio=tally.miss_ratio,
            filled_blocks=tally.filled,
            evicted_blocks=tally.evicted,
            left_out_rows=tally.left_out,
            unnamed_files=self._table.unnamed,
            lost_events=self._source.lost,
            duration_s=duration_s,
            files=ranking(tally, self._table.files),
            ending=ending,
            beside=[f"{written.path}: {written.summary}" for written in self._sidecars.values()],
            remarks=[*self._source.remarks, *self._locked.remarks],
        )

    def _say_begin(self) -> None:
        name = self._target.command.split(" ", 1)[0] or "?"
        say(
            f"llmcache trace: recording {self._target.pid} ({os.path.basename(name)}), tier {self._source.name}; Ctrl-C ends"
        )
        say(f"cannot see: {self._source.cannot_see}")
        for remark in self._source.remarks:
            say(f"note: {remark}")
        if self._choice.passed_over:
            say(f"better tiers cannot record here: {self._choice.reason}")

    def _say_line(self, span_s: float, heading: bool) -> None:
        if heading:
            say(HEADING)
        seconds = time.monotonic() - self._started_s
        say(line(self._shown, self._tally, seconds, span_s, len(self._tally.by_file), self._source.lost))
        self._shown = dataclasses.replace(self._tally)


def show(captured: Captured, as_json: bool) -> None:
    """Print the summary: for people on stderr, where it cannot mix with what a command prints; JSON on stdout."""
    for text in captured.lines():
        say(text)
    if as_json:
        print(json.dumps(captured.document(), indent=1))


def say(text: str) -> None:
    """Print `text` on stderr, in lines under 80 columns; a terminal that is gone does not end a recording."""
    text = printable(text)
    with suppress(OSError, ValueError):
        lines = (
            [text] if len(text) <= _WIDTH else textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        )
        print("\n".join(lines), file=sys.stderr, flush=True)


@contextmanager
def _woken_by(pid: int) -> Iterator[Callable[[float], None]]:
    """Yields a function that sleeps some seconds, but not beyond the end of process `pid`."""
    poll = select.poll()

    def sleep(seconds: float) -> None:
        for ended, _ in poll.poll(max(0.0, seconds * 1000)):
            poll.unregister(ended)  # always ready from now on, and children may go on

    with ExitStack() as stack:
        with suppress(OSError):  # it is gone, or the kernel is older than 5.3
            fd = os.pidfd_open(pid)
            stack.callback(os.close, fd)
            poll.register(fd, select.POLLIN)
        yield sleep
