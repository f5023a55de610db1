"""What a recording has seen so far, for the line of every second and for the summary."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from llmcache.arrays import Records, Uint32s
from llmcache.trace.record import MISS, UNKNOWN, WRITE, TraceFile
from llmcache.trace.sources.base import EVICT, FILL
from llmcache.units import BLOCK_BYTES, format_duration, format_size

SCHEMA = "llmcache.capture/1"
HEADING = "    time     rows/s   blocks/s      MB/s    miss   files      lost"
_MOST_FILES = 8


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
