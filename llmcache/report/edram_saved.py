"""Saved documents of `llmcache edram model` and `sweep`, read back for pictures; DataError names the field that is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcache.errors import DataError, UsageError
from llmcache.report.edram_model import SCHEMA as MODEL_SCHEMA
from llmcache.report.edram_sweep import SCHEMA as SWEEP_SCHEMA

HINT = "save one with: llmcache edram model --json > FILE"
NUMBERS = (
    "context",
    "decode",
    "batch",
    "budget",
    "dram_bytes_per_s",
    "kv_capacity_bytes",
    "latency_s",
    "energy_j",
    "speedup",
    "efficiency",
    "refresh_share",
)


@dataclass(frozen=True)
class Row:
    """One result: names, and numbers in seconds, joules and bytes. `energies_j`: by component, empty in a sweep."""

    model: str
    workload: str
    system: str
    profile: str
    mean_interval_ns: float | None
    numbers: Mapping[str, float]
    energies_j: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.numbers[name]


@dataclass(frozen=True)
class Roof:
    """A saved roofline: its roofs, and its points as (name, operations per byte, operations per second)."""

    system: str
    peak_ops_per_s: float
    dram_bytes_per_s: float
    points: Sequence[tuple[str, float, float]]


@dataclass(frozen=True)
class Saved:
    """A document: its results in their order, and, of a model, its rooflines."""

    schema: str
    rows: Sequence[Row]
    roofs: Sequence[Roof]
    baseline: str

    @property
    def is_sweep(self) -> bool:
        """Whether it is of `llmcache edram sweep`."""
        return self.schema == SWEEP_SCHEMA


def read(path: str | Path) -> Saved:
    """Returns the document in the file `path`; UsageError if it cannot be read, DataError if it is none of ours."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", HINT) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not text", HINT) from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}", HINT) from error
    try:
        return saved(document)
    except DataError as error:
        raise DataError(f"{path}: {error.message}", error.hint) from error


def saved(document: Any) -> Saved:
    """Returns `document`, as `json.loads` gives it, checked."""
    schema = _field(document, "", "schema", str)
    if schema not in (MODEL_SCHEMA, SWEEP_SCHEMA):
        raise DataError(f"schema: '{schema}' is not one that can be drawn", HINT)
    results = _field(document, "", "results", list)
    if not results:
        raise DataError("results: there are none", HINT)
    rows = [_row(result, f"results[{place}]") for place, result in enumerate(results)]
    roofs = _field(document, "", "rooflines", dict) if schema == MODEL_SCHEMA else {}
    made = [_roof(name, roof, f"rooflines.{name}") for name, roof in roofs.items()]
    return Saved(schema, rows, made, _field(document, "", "baseline", str))


def _row(result: Any, where: str) -> Row:
    interval_ns = _any(result, where, "mean_interval_ns")
    energies = {}  # a sweep has none by component
    if isinstance(result, dict) and "energies_j" in result:
        energies = _field(result, where, "energies_j", dict)
    model, workload, system, profile = (
        _field(result, where, name, str) for name in ("model", "workload", "system", "profile")
    )
    return Row(
        model,
        workload,
        system,
        profile,
        mean_interval_ns=None if interval_ns is None else _number(interval_ns, f"{where}.mean_interval_ns"),
        numbers={name: _number(_any(result, where, name), f"{where}.{name}") for name in NUMBERS},
        energies_j={name: _number(value, f"{where}.energies_j.{name}") for name, value in energies.items()},
    )


def _roof(system: str, roof: Any, where: str) -> Roof:
    points = [
        (
            _field(point, f"{where}.points[{place}]", "name", str),
            _rate(point, f"{where}.points[{place}]", "intensity"),
            _rate(point, f"{where}.points[{place}]", "ops_per_s"),
        )
        for place, point in enumerate(_field(roof, where, "points", list))
    ]
    peak, rate = (_rate(roof, where, name) for name in ("peak_ops_per_s", "dram_bytes_per_s"))
    return Roof(system, peak, rate, points)


def _rate(holder: Any, where: str, name: str) -> float:
    value = _number(_any(holder, where, name), f"{where}.{name}")
    if not 0 < value < 1e100:
        raise DataError(f"{where}.{name}: {value:g}, more than 0 is needed", HINT)
    return value


def _any(holder: Any, where: str, name: str) -> Any:
    if not isinstance(holder, dict):
        raise DataError(f"{where or 'document'}: not an object", HINT)
    if name not in holder:
        raise DataError(f"{where}.{name}: missing".lstrip("."), HINT)
    return holder[name]


def _field(holder: Any, where: str, name: str, kind: type) -> Any:
    value = _any(holder, where, name)
    if not isinstance(value, kind):
        raise DataError(f"{where}.{name}: not a {kind.__name__}".lstrip("."), HINT)
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise DataError(f"{where}: '{value}' is not a number", HINT)
    return float(value)
