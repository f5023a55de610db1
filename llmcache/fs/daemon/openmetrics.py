"""OpenMetrics text, version 1.0: what Prometheus and others scrape.

Names end in their unit, counters in `_total`; units are base units (bytes, seconds, ratio). Only the format is here;
what a mount tells is in `llmcache.fs.metrics`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
Kind = Literal["counter", "gauge", "histogram", "info"]
_SUFFIX = {"counter": "_total", "gauge": "", "info": "_info"}
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_UNITS = ("", "bytes", "seconds", "ratio")

Labels = tuple[tuple[str, str], ...]


@dataclass
class Family:
    """One metric: `name` (without the suffix of its kind), its kind, unit, help, and values by labels."""

    name: str
    kind: Kind
    help: str
    unit: str = ""
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """ValueError: a name, or a unit that it does not end in, that the format does not know."""
        if not _NAME.fullmatch(self.name) or self.unit not in _UNITS:
            raise ValueError(f"{self.name!r} with unit {self.unit!r} is no metric")
        if self.unit and not self.name.endswith(f"_{self.unit}"):
            raise ValueError(f"{self.name} does not end in its unit, {self.unit}")

    def add(self, value: float, **labels: str) -> Family:
        """Adds one value; ValueError if these labels have one."""
        return self._put(_SUFFIX[self.kind], labels, value)

    def add_histogram(self, waits: Mapping[str, Any], **labels: str) -> Family:
        """Adds classes as `llmcache.fs.engine.waits.Waits.as_dict` gives them."""
        passed = 0
        for bound, count in zip([*waits["bounds_s"], float("inf")], waits["counts"], strict=True):
            passed += count
            self._put("_bucket", {**labels, "le": number(bound)}, passed)
        self._put("_count", labels, passed)
        return self._put("_sum", labels, waits["sum_s"])

    def _put(self, suffix: str, labels: Mapping[str, str], value: float) -> Family:
        key = (suffix, tuple(labels.items()))
        if key in self.samples:
            raise ValueError(f"{self.name}: two values for {dict(labels)}")
        self.samples[key] = value
        return self

    def lines(self) -> Iterator[str]:
        """Yields its text; nothing without a value."""
        if not self.samples:
            return
        yield f"# TYPE {self.name} {self.kind}"
        if self.unit:
            yield f"# UNIT {self.name} {self.unit}"
        yield f"# HELP {self.name} {_escape(self.help)}"
        for (suffix, labels), value in self.samples.items():
            pairs = ",".join(f'{label}="{_escape(text)}"' for label, text in labels)
            yield f"{self.name}{suffix}{{{pairs}}} {number(value)}" if pairs else f"{self.name}{suffix} {number(value)}"


def render(families: Iterable[Family]) -> str:
    """Returns the whole exposition, with its end."""
    return "".join(f"{line}\n" for family in families for line in family.lines()) + "# EOF\n"


def number(value: float) -> str:
    """A value as the format writes it: whole ones exactly, bounds of histograms with a point."""
    if isinstance(value, int):
        return str(value)
    return {float("inf"): "+Inf", float("-inf"): "-Inf"}.get(value) or ("NaN" if value != value else repr(value))


def labels_of(paths: Sequence[str]) -> list[str]:
    """A label for each of `paths`, distinct ones for distinct paths.

    A label has to be UTF-8, a path need not be: what is none is written as \\xNN.
    """
    found: list[str] = []
    used: set[str] = set()
    for path in paths:
        text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        label, count = text, 1
        while label in used:
            count += 1
            label = f"{text} ({count})"
        used.add(label)
        found.append(label)
    return found


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
