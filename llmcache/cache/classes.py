"""What a trace's accesses are classed as: the result of `classify`, as tables and JSON show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcache.cache.detector import HOT, LOOP, SEQ, Class
from llmcache.cache.layers import Layer
from llmcache.cache.routing import MixtureUses
from llmcache.units import BLOCK_BYTES

SCHEMA = "llmcache.classify/1"
READ_OP, WRITE_OP = "read", "write"


@dataclass(frozen=True)
class Classification:
    """One class of one file, its reads (mapped ones with them) or its writes.

    `pieces`: (first block, last block), for a LOOP in the order in which a pass visits them. `size_bytes`: of the
    blocks accessed there, without holes; those of a HOT piece do not count for the SEQ or LOOP around it.
    `passes`: how often a LOOP or SEQ was walked over, or a HOT block accessed on average. `regularity`: part (0..1) of the
    intervals of a LOOP that were about its period. `active`: a LOOP that had not missed two periods when the trace ended.
    `stride_blocks`: distance of the runs, 0 where there are no holes. `experts`: their numbers by layer, of a mixture.
    """

    file: int
    path: str
    op: str
    kind: Class
    pieces: tuple[tuple[int, int], ...]
    size_bytes: int
    accesses: int
    share: float
    passes: int
    since_ns: int
    last_ns: int
    period_ns: int | None = None
    period_blocks: int | None = None
    regularity: float | None = None
    active: bool | None = None
    order: str | None = None
    stride_blocks: int = 0
    tensors: tuple[str, ...] = ()
    experts: Mapping[str, tuple[int, ...]] | None = None

    @property
    def first_block(self) -> int | None:
        """The lowest block; None if nothing is known but how many there were."""
        return min((first for first, _ in self.pieces), default=None)

    @property
    def last_block(self) -> int | None:
        """The highest block."""
        return max((last for _, last in self.pieces), default=None)

    def row(self) -> dict[str, Any]:
        """Returns it as JSON has it: bytes, seconds, blocks."""
        return {
            "file": self.file,
            "path": self.path,
            "op": self.op,
            "class": self.kind,
            "first_block": self.first_block,
            "last_block": self.last_block,
            "bytes": self.size_bytes,
            "accesses": self.accesses,
            "share": self.share,
            "passes": self.passes,
            "period_s": None if self.period_ns is None else self.period_ns / 1e9,
            "period_blocks": self.period_blocks,
            "regularity": self.regularity,
            "active": self.active,
            "order": self.order,
            "stride_blocks": self.stride_blocks,
            "since_s": self.since_ns / 1e9,
            "last_s": self.last_ns / 1e9,
            "pieces": [list(piece) for piece in self.pieces],
            "tensors": list(self.tensors),
            **({} if self.experts is None else {"experts": {layer: list(found) for layer, found in self.experts.items()}}),
        }


@dataclass(frozen=True)
class Totals:
    """Bytes and shares (0..1) of all accesses by class, as section 3.3 of io_caching sums up a workload.

    `loop_bytes` are read in loops, `once_bytes` once. `loop_at_once_bytes`: the most that loops in use at the same time
    have together; with `locked_loop_bytes`, which a mount kept locked so that no fault showed them, the N of formula (1).
    Write loops are apart: no cache saves what must be written.
    """

    loop_bytes: int
    loop_at_once_bytes: int
    locked_loop_bytes: int
    hot_bytes: int
    once_bytes: int
    write_loop_bytes: int
    write_once_bytes: int
    loop_share: float
    hot_share: float
    once_share: float


@dataclass(frozen=True)
class LockedLoop:
    """The part of a file's loop that its mount kept locked while it was traced: read without faults, so not in the rows."""

    path: str
    size_bytes: int


@dataclass(frozen=True)
class TraceClasses:
    """The classes of one trace, largest share first, and how much of what it is. `begin_ns`: time of its first row.

    `layers`: of the model files whose tensors are known; `locked`: of files that have a read loop in the rows; `mixtures`:
    of the models of which experts were used.
    """

    rows: tuple[Classification, ...]
    accesses: int
    begin_ns: int
    end_ns: int
    tier: str
    lost_events: int
    layers: tuple[Layer, ...] = ()
    locked: tuple[LockedLoop, ...] = ()
    mixtures: tuple[MixtureUses, ...] = ()

    @property
    def totals(self) -> Totals:
        """Returns the sums over all rows."""
        return Totals(
            loop_bytes=_bytes(self.rows, LOOP, READ_OP),
            loop_at_once_bytes=_at_once(row for row in self.rows if (row.kind, row.op) == (LOOP, READ_OP)),
            locked_loop_bytes=sum(each.size_bytes for each in self.locked),
            hot_bytes=sum(row.size_bytes for row in self.rows if row.kind == HOT),
            once_bytes=_bytes(self.rows, SEQ, READ_OP),
            write_loop_bytes=_bytes(self.rows, LOOP, WRITE_OP),
            write_once_bytes=_bytes(self.rows, SEQ, WRITE_OP),
            loop_share=_share(self.rows, LOOP),
            hot_share=_share(self.rows, HOT),
            once_share=_share(self.rows, SEQ),
        )

    @property
    def size_command(self) -> str | None:
        """Returns the command that tells how large a cache these loops need; None without read loops."""
        totals = self.totals
        if not totals.loop_at_once_bytes:
            return None
        loop_bytes = totals.loop_at_once_bytes + totals.locked_loop_bytes
        return f"llmcache size --loop {loop_bytes / 1e6:.10g}M --hot {totals.hot_bytes / 1e6:.10g}M"

    def document(self, trace: str, min_bytes: int = 0) -> dict[str, Any]:
        """Returns the JSON document; rows below `min_bytes` are summed up in `smaller`, and are part of the totals."""
        smaller = [row for row in self.rows if row.size_bytes < min_bytes]
        return {
            "schema": SCHEMA,
            "trace": trace,
            "tier": self.tier,
            "lost_events": self.lost_events,
            "accesses": self.accesses,
            "duration_s": (self.end_ns - self.begin_ns) / 1e9,
            "block_bytes": BLOCK_BYTES,
            "totals": dict(vars(self.totals)),
            "size_command": self.size_command,
            "rows": [row.row() for row in self.rows if row.size_bytes >= min_bytes],
            "smaller": {
                "rows": len(smaller),
                "bytes": sum(row.size_bytes for row in smaller),
                "share": sum(row.share for row in smaller),
            },
            "layers": [layer.row() for layer in self.layers],
            "locked": [{"path": each.path, "bytes": each.size_bytes} for each in self.locked],
            **({"mixtures": [each.document() for each in self.mixtures]} if self.mixtures else {}),
        }


def _bytes(rows: Sequence[Classification], kind: Class, op: str) -> int:
    return sum(row.size_bytes for row in rows if row.kind == kind and row.op == op)


def _share(rows: Sequence[Classification], kind: Class) -> float:
    return sum(row.share for row in rows if row.kind == kind)


def _at_once(loops: Iterable[Classification]) -> int:
    """The largest sum of sizes of loops that are in use at one time."""
    events = sorted(event for row in loops for event in ((row.since_ns, row.size_bytes), (row.last_ns, -row.size_bytes)))
    most = level = 0
    for _, change in events:
        level += change
        most = max(most, level)
    return most
