"""The statistics of a mount (`llmcache stats`) and the layers of its models (`llmcache top`), with their JSON documents.

Values are in base units. Daemons may have another version: `from_json` checks every value, ignores unknown keys, and uses
the default of a missing field.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from llmcache.mount.copies import Copied

STATS_SCHEMA, HEAT_SCHEMA = "llmcache.stats/1", "llmcache.heat/1"
STRIPS = {"pinned", "window", "pages", "cold"}
MAX_S = 1e12  # bounds values that are converted to nanoseconds
_Stats = TypeVar("_Stats")


def _key(name: str) -> Any:
    return field(metadata={"key": name})


def _omitted() -> Any:
    return field(default=None, metadata={"omitted": True})


@dataclass(frozen=True)
class Prefetch:
    """Prefetched bytes: read in time, awaited by a client, dropped unread."""

    useful_bytes: int
    late_bytes: int
    wasted_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.useful_bytes + self.late_bytes + self.wasted_bytes


@dataclass(frozen=True)
class Waits:
    """Histogram: `counts` by class, upper bounds of the classes, and the sum."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds_s) + 1 or list(self.bounds_s) != sorted(self.bounds_s):
            raise ValueError("waits")

    def since(self, before: Waits) -> Waits:
        counts = tuple(count - old for count, old in zip(self.counts, before.counts, strict=True))
        return Waits(self.bounds_s, counts, self.sum_s - before.sum_s)

    def quantile_s(self, share: float) -> float | None:
        """Return an upper bound of `share` (0..1) of the waits.

        None without waits; infinity beyond the last bound.
        """
        passed = list(accumulate(self.counts))
        if not passed[-1]:
            return None
        place = next(place for place, count in enumerate(passed) if count >= max(1, share * passed[-1]))
        return [*self.bounds_s, float("inf")][place]


@dataclass(frozen=True)
class WaitsByReason:
    """Waits for extents that were being prefetched, and for others."""

    late: Waits
    demand: Waits


@dataclass(frozen=True)
class ArenaStats:
    """Counters of the core in mode arena. Blocks have 4 KiB."""

    references: int
    hit_blocks: int
    miss_blocks: int
    evicted_blocks: int
    held_blocks: int


@dataclass(frozen=True)
class ServiceStats:
    """Threads of the daemon: running, failures, names of ended ones."""

    running: int = 0
    failures: int = 0
    ended: tuple[str, ...] = ()
    lost_touches: int | None = _omitted()
    refused_advice: int | None = _omitted()
    locked_again_bytes: int | None = _omitted()


@dataclass(frozen=True)
class AccessLogStats:
    """The access log."""

    path: str
    rows: int
    lost_rows: int


@dataclass(frozen=True, kw_only=True)
class ExpertStats:
    """The experts of an MoE model."""

    count: int
    kept: int
    kept_bytes: int
    size_bytes: int = _key("bytes")
    alone: bool = False
    token: None = None  # no longer measured
    token_alone: None = None


@dataclass(frozen=True, kw_only=True)
class LoopStats:
    """A loop. `readers`: their positions (0..1); `copied`: a client that has copied the weights.

    `left`: the loop is left to the kernel. `steered_pass_bytes`, `lru_pass_bytes`: bytes read per pass by steering and by
    the page cache, None if unknown. `unused_bytes`: no client has used them for some passes.
    """

    size_bytes: int = _key("bytes")
    period_s: float | None
    pinned_bytes: int
    window_bytes: int
    passes: int
    readers: tuple[float, ...]
    guessed: bool
    unused_bytes: int | None = None
    copied: Copied | None = None
    left: bool | None = None
    steered_pass_bytes: int | None = None
    lru_pass_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class FileStats:
    """`kind`: loop, hot, sequential or paged; `lacks_extents`: extents without room."""

    path: str
    name: str | None = None
    size_bytes: int
    kind: str = _key("class")
    open: bool
    lacks_extents: int = 0
    loops: tuple[LoopStats, ...]
    experts: ExpertStats | None = None

    @property
    def shown_name(self) -> str:
        return shown_name(self.path, self.name)


@dataclass(frozen=True, kw_only=True)
class MountStats:
    """The counters of a mount; `llmcache stats --help` describes each key."""

    schema: str
    mode: str
    uptime_s: float
    budget_bytes: int
    limit_bytes: int
    pinned_bytes: int
    window_bytes: int
    pages_bytes: int
    resident_bytes: int
    read_bytes: int
    hit_bytes: int
    miss_bytes: int
    requested_bytes: int
    backing_read_bytes: int
    client_read_bytes: int = 0
    backing_write_bytes: int
    prefetch: Prefetch
    waits: WaitsByReason
    stored_bytes: int
    invalidated_bytes: int
    refault_bytes: int
    beyond_bytes: int = 0
    helper_pid: int
    arena: ArenaStats | None = None
    services: ServiceStats = ServiceStats()
    access_log: AccessLogStats | None = None
    files: tuple[FileStats, ...]
    cpu_s: float
    daemon_bytes: int
    metrics: str | None = None

    @property
    def hit_ratio(self) -> float | None:
        return hit_ratio(self.mode, self.hit_bytes, self.read_bytes)


@dataclass(frozen=True)
class LayerExperts:
    """Experts of a layer."""

    kept: int = 0
    count: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerHeat:
    """A layer: bytes by state, seconds since the last request (`age_s`), and strips.

    `streamed_bytes` on storage were read recently, `cold_bytes` not. `cells`: for each of STRIPS, a digit per segment: its
    ninths in that state.
    """

    name: str
    tensors: int
    size_bytes: int = _key("bytes")
    pinned_bytes: int
    window_bytes: int
    pages_bytes: int
    streamed_bytes: int
    cold_bytes: int
    age_s: float | None
    cells: dict[str, str]
    experts: LayerExperts | None = None

    def __post_init__(self) -> None:
        if set(self.cells) != STRIPS or not all(strip and set(strip) <= set("0123456789") for strip in self.cells.values()):
            raise ValueError("cells")


@dataclass(frozen=True, kw_only=True)
class FileHeat:
    """The layers of a file in order; one if the format is unknown."""

    name: str | None = None
    path: str
    size_bytes: int
    extent_bytes: int
    layers: tuple[LayerHeat, ...]
    left_out_layers: int

    @property
    def shown_name(self) -> str:
        return shown_name(self.path, self.name)


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """The layers of models and looping files."""

    schema: str
    mode: str
    files: tuple[FileHeat, ...]
    left_out_files: int


def shown_name(path: str, name: str | None) -> str:
    """Return the displayed name; from the path for version 1.0, which sends no names."""
    return (path if name is None else name).lstrip("/")


def hit_ratio(mode: str, hit_bytes: int, read_bytes: int) -> float | None:
    """Return the share (0..1) of the bytes read by clients that came from memory; None if unknown.

    In modes steer and inplace, a loop's resident part counts once for each observed pass.
    """
    return hit_bytes / read_bytes if read_bytes and (hit_bytes or mode == "arena") else None


def to_json(value: Any) -> Any:
    """Return the JSON document of one of these objects, or of a tuple."""
    if isinstance(value, tuple):
        return [to_json(part) for part in value]
    if not dataclasses.is_dataclass(value):
        return value
    plan = _plan(value.__class__)
    document = dict(zip(plan.keys, plan.values(value), strict=True))
    for key in plan.nested:
        document[key] = to_json(document[key])
    for key in plan.omitted:
        if document[key] is None:
            del document[key]
    return document


def from_json(kind: type[_Stats], document: Any) -> _Stats:
    """Return the `kind` of a document. KeyError, TypeError or ValueError: a value is missing or wrong."""
    if not isinstance(document, dict):
        raise TypeError(f"{type(document).__name__} for an object")
    parsers = _plan(typing.cast(Any, kind)).parsers
    return kind(**{name: parse(document[key]) for name, key, needed, parse in parsers if needed or key in document})


@dataclass(frozen=True)
class _Plan:
    """How a class is converted.

    `nested`: keys of objects and tuples; `omitted`: left out if None. `parsers`: (field, key, required, check).
    """

    keys: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]]
    nested: tuple[str, ...]
    omitted: tuple[str, ...]
    parsers: tuple[tuple[str, str, bool, Callable[[Any], Any]], ...]


@functools.cache
def _plan(kind: Any) -> _Plan:
    hints = typing.get_type_hints(kind)
    fields = {each.metadata.get("key", each.name): each for each in dataclasses.fields(kind)}
    plain = {hint for base in _CHECKS for hint in (base, base | None if base is not types.NoneType else base)}
    return _Plan(
        keys=tuple(fields),
        values=operator.attrgetter(*(each.name for each in fields.values())),
        nested=tuple(key for key, each in fields.items() if hints[each.name] not in plain),
        omitted=tuple(key for key, each in fields.items() if "omitted" in each.metadata),
        parsers=tuple(
            (each.name, key, each.default is dataclasses.MISSING, _parser(hints[each.name]))
            for key, each in fields.items()
            if each.init
        ),
    )


def _parser(hint: Any) -> Callable[[Any], Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (_parser(each) for each in arguments if each is not types.NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        inner = _parser(arguments[0])
        return lambda value: tuple(map(inner, _typed(value, list)))
    if origin is dict:
        inner = _parser(arguments[1])
        return lambda value: {text(key): inner(part) for key, part in _typed(value, dict).items()}
    if origin is typing.Literal:
        return lambda value: arguments[arguments.index(value)]
    return _CHECKS[hint] if hint in _CHECKS else functools.partial(from_json, hint)


def _typed(value: object, kind: type[_Stats]) -> _Stats:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} for {kind.__name__}")
    return value


def whole(value: object) -> int:
    """Return a whole number; ValueError if it is none or out of bounds."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{type(value).__name__} for a whole number")
    return value


def real(value: object) -> float:
    """Return a number; ValueError if it is none or out of bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_S:
        raise ValueError(f"{type(value).__name__} for a number")
    return float(value)


def text(value: object) -> str:
    """Return a string; TypeError if it is not one."""
    return _typed(value, str)


_CHECKS: Mapping[Any, Callable[[Any], Any]] = {
    int: whole,
    float: real,
    str: text,
    bool: lambda value: _typed(value, bool),
    types.NoneType: lambda _value: None,
}
