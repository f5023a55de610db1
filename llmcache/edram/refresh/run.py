"""A recorded run, `llmcache.edram-run/1`: which rows lay in eDRAM during each step of a decode, on a modelled clock.

    {"schema": "llmcache.edram-run/1", "title": text, "clock": text (what is behind the durations; never wall time),
     "pair_bytes": n (one half, MSB or LSB, of a key and a value of one head), "x_bytes": n (one half of an x row; 0: none),
     "settings": {any}, "steps": {column: [a number per step]}, "lives": null or [{kind, begin, path, count}]}

Columns of steps: duration_ns (null instead of the list: the reader of the file says how long a step takes) and, for kv
(pairs of a key and a value of a head) and x: high_kv, low_kv, appended_kv, evicted_kv, promoted_kv, high_x and so on. A
path is [[true for high, step at which that ends], ...]. Rows written by the prompt are there from step 0 on.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.refresh.lives import KINDS, Flow, Life
from llmcache.errors import DataError, EnvironmentProblem, UsageError
from llmcache.files import replacing

SCHEMA = "llmcache.edram-run/1"
FLOWS = tuple(name.name for name in fields(Flow))
COLUMNS = tuple(f"{flow}_{kind}" for kind in KINDS for flow in FLOWS)
_HINT = f"a file of {SCHEMA} is needed, as `llmcache kv bench --policy kelle --edram-run FILE` records it"
_LARGEST = 1 << 53


@dataclass(frozen=True)
class EdramRun:
    """What a run kept in eDRAM. `flows` [steps] by kind; `durations_ns` [steps] modelled, None if not said.

    `pair_bytes`, `x_bytes`: of one half of the bits. `lives`: None if rows were not followed one by one.
    """

    pair_bytes: int
    x_bytes: int
    flows: dict[str, tuple[Flow, ...]]
    durations_ns: tuple[float, ...] | None = None
    lives: tuple[Life, ...] | None = None
    title: str = ""
    clock: str = "modelled"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return len(self.flows["kv"])

    def half_bytes(self, kind: str) -> int:
        """Returns the bytes of one half (MSB or LSB) of a row of `kind`."""
        return self.pair_bytes if kind == "kv" else self.x_bytes

    def column(self, kind: str, flow: str) -> NDArray[np.float64]:
        """Returns one number of every step."""
        return np.array([getattr(step, flow) for step in self.flows[kind]], np.float64)

    def with_step(self, step_ns: float, clock: str) -> EdramRun:
        """Returns the run with every step taking `step_ns`, as `clock` explains."""
        if not 0 < step_ns < _LARGEST:
            raise UsageError(f"step: {step_ns:g} ns, more than 0 is needed")
        return replace(self, durations_ns=(step_ns,) * self.steps, clock=clock)

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data of `SCHEMA`."""
        steps: dict[str, Any] = {"duration_ns": None if self.durations_ns is None else list(self.durations_ns)}
        for kind in KINDS:
            steps |= {f"{flow}_{kind}": [getattr(step, flow) for step in self.flows[kind]] for flow in FLOWS}
        lives = None if self.lives is None else [{**vars(life), "path": list(map(list, life.path))} for life in self.lives]
        named = {name: getattr(self, name) for name in ("title", "clock", "pair_bytes", "x_bytes", "settings")}
        return {"schema": SCHEMA, **named, "steps": steps, "lives": lives}

    def save(self, path: str | os.PathLike[str], force: bool = False) -> None:
        """Writes it to `path` as a whole; UsageError if that exists (and not `force`), EnvironmentProblem if it cannot."""
        target = Path(path)
        if target.exists() and not force:
            raise UsageError(f"run: '{target}' exists", "choose another name, or --force")
        try:
            with replacing(target, 0o666) as stream:
                stream.write(json.dumps(self.to_json(), separators=(",", ":")).encode())
        except OSError as error:
            raise EnvironmentProblem(f"run: '{target}' cannot be written: {error.strerror}") from error


def read_run(path: str | os.PathLike[str]) -> EdramRun:
    """Returns the recorded run in the file `path`; UsageError if it cannot be read, DataError naming what is wrong in it."""
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"run: '{os.fspath(path)}' cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"run: '{os.fspath(path)}' is no JSON: {error}", _HINT) from error
    return parse_run(data)


def parse_run(data: Any) -> EdramRun:
    """Returns the run in plain `data` of `SCHEMA`; DataError naming the field that is missing or cannot be."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise DataError(f"schema: {found!r}, '{SCHEMA}' is needed", _HINT)
    steps = _field(data, "steps", dict)
    columns = {name: _counts(steps, name) for name in COLUMNS}
    count = len(columns[COLUMNS[0]])
    for name, column in columns.items():
        if len(column) != count:
            raise DataError(f"steps.{name}: {len(column)} steps, {COLUMNS[0]} has {count}", _HINT)
    flows = {kind: tuple(Flow(*row) for row in zip(*(columns[f"{f}_{kind}"] for f in FLOWS), strict=True)) for kind in KINDS}
    run = EdramRun(
        pair_bytes=_whole(_field(data, "pair_bytes", int), "pair_bytes", 1),
        x_bytes=_whole(_field(data, "x_bytes", int), "x_bytes", 0),
        flows=flows,
        durations_ns=_durations(steps, count),
        lives=_lives(data.get("lives"), count),
        title=_field(data, "title", str),
        clock=_field(data, "clock", str),
        settings=_field(data, "settings", dict),
    )
    _check(run)
    return run


def _check(run: EdramRun) -> None:
    """DataError unless the rows of each step are those of the step before it, plus the new, less the gone."""
    for kind in KINDS:
        before = 0
        for step, flow in enumerate(run.flows[kind]):
            living = flow.high + flow.low
            if living != before + flow.appended - flow.evicted or flow.promoted > flow.high:
                raise DataError(f"steps.high_{kind}: step {step} has {living} rows, which its flows do not explain", _HINT)
            before = living
        if any(flow.high + flow.low for flow in run.flows[kind]) and not run.half_bytes(kind):
            raise DataError(f"{kind}_bytes: 0, but there are rows", _HINT)
        if run.lives is not None:
            _check_lives(run, kind, run.lives)


def _check_lives(run: EdramRun, kind: str, lives: Sequence[Life]) -> None:
    """DataError unless as many rows live in each group of each step as its columns say."""
    changes = np.zeros((2, run.steps + 1), np.int64)
    for life in lives:
        begin = life.begin
        for high, end in life.path if life.kind == kind else ():
            changes[int(high), begin] += life.count
            changes[int(high), end] -= life.count
            begin = end
    for group, rows in zip(("low", "high"), np.cumsum(changes, axis=1)[:, :-1], strict=True):
        unlike = np.nonzero(rows != run.column(kind, group))[0]
        if len(unlike):
            raise DataError(f"lives: {rows[unlike[0]]} of {kind} in step {unlike[0]}, steps.{group}_{kind} differs", _HINT)


def _field(data: dict[str, Any], name: str, kind: type) -> Any:
    value = data.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        found = "missing" if name not in data else repr(value)[:40]
        raise DataError(f"{name}: {found}, {kind.__name__} is needed", _HINT)
    return value


def _whole(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LARGEST:
        raise DataError(f"{name}: {value!r}, a whole number of at least {least} is needed", _HINT)
    return value


def _counts(steps: dict[str, Any], name: str) -> list[int]:
    values = _field(steps, name, list)
    return [_whole(value, f"steps.{name}", 0) for value in values]


def _durations(steps: dict[str, Any], count: int) -> tuple[float, ...] | None:
    if steps.get("duration_ns", 0) is None:
        return None
    values = _field(steps, "duration_ns", list)
    if len(values) != count:
        raise DataError(f"steps.duration_ns: {len(values)} steps, {COLUMNS[0]} has {count}", _HINT)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _LARGEST:
            raise DataError(f"steps.duration_ns: {value!r}, more than 0 is needed", _HINT)
    return tuple(map(float, values))


def _lives(data: Any, steps: int) -> tuple[Life, ...] | None:
    if data is None:
        return None
    if not isinstance(data, list):
        raise DataError(f"lives: {type(data).__name__}, a list or null is needed", _HINT)
    return tuple(_life(entry, steps) for entry in data)


def _life(entry: Any, steps: int) -> Life:
    if not isinstance(entry, dict) or entry.get("kind") not in KINDS:
        raise DataError(f"lives: {repr(entry)[:60]}, its kind must be one of {', '.join(KINDS)}", _HINT)
    begin, count = _whole(entry.get("begin"), "lives.begin", 0), _whole(entry.get("count"), "lives.count", 1)
    path = entry.get("path")
    if not isinstance(path, list) or not path or not all(isinstance(part, list) and len(part) == 2 for part in path):
        raise DataError(f"lives.path: {repr(path)[:60]}, pairs of a group and a step are needed", _HINT)
    ends = [begin, *(_whole(end, "lives.path", 0) for _, end in path)]
    if not all(isinstance(high, bool) for high, _ in path) or not _ascending(ends) or ends[-1] > steps:
        raise DataError(f"lives.path: {repr(path)[:60]}, true or false and ascending steps up to {steps} are needed", _HINT)
    return Life(entry["kind"], begin, tuple((high, end) for high, end in path), count)


def _ascending(steps: Sequence[int]) -> bool:
    return all(early < late for early, late in itertools.pairwise(steps))
