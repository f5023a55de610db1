"""A bar: what an issue asks of a figure. Every benchmark's JSON has its bars in this shape, under "bars"."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

KINDS = ("measured", "modelled", "emulated")
"""On this machine; computed from a model; measured here with an emulated device taking part."""
SENSES: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Bar:
    """One bar: a value, its limit, and which side of it is good.

    `name` is its key among those of its benchmark, `what` is for people and says what is divided by what; `unit` is empty
    for shares and ratios. A value that is no number (nothing was measured) reaches no bar.
    """

    issue: int
    name: str
    what: str
    value: float
    sense: str
    limit: float
    command: str
    kind: str = "measured"
    unit: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.sense not in SENSES:
            raise ValueError(f"kind or sense: {self.kind!r}, {self.sense!r}")

    @property
    def passed(self) -> bool:
        """Return whether the bar is reached."""
        return math.isfinite(self.value) and SENSES[self.sense](self.value, self.limit)

    @property
    def shown(self) -> str:
        """Return the value for people, with its unit."""
        return f"{figure(self.value)} {self.unit}".rstrip()

    @property
    def wanted(self) -> str:
        """Return sense and limit for people."""
        return f"{self.sense} {figure(self.limit)} {self.unit}".rstrip()

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; a value that is no number is null."""
        told = {**asdict(self), "passed": self.passed}
        return told if math.isfinite(self.value) else {**told, "value": None}


def figure(value: float) -> str:
    """Return a number for people: three digits, whole from a hundred on, "-" for none."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def of_json(told: dict[str, Any]) -> Bar:
    """Return the bar that `to_json` told."""
    values = {key: value for key, value in told.items() if key != "passed"}
    return Bar(**{**values, "value": math.nan if told["value"] is None else told["value"]})


def of_document(document: dict[str, Any]) -> list[Bar]:
    """Return the bars of a benchmark's JSON."""
    return [of_json(one) for one in document["bars"]]


def with_bars(document: dict[str, Any], bars: Iterable[Bar]) -> dict[str, Any]:
    """Return the document with its bars; ValueError if two have one name."""
    told = [bar.to_json() for bar in bars]
    if len({one["name"] for one in told}) != len(told):
        raise ValueError("bars: names that come twice")
    return {**document, "bars": told}


def exit_code(bars: Iterable[Bar]) -> int:
    """Return 0 if every bar is reached, 1 if not."""
    return 0 if all(bar.passed for bar in bars) else 1


def table(bars: Sequence[Bar]) -> Table:
    """Return every bar with pass or FAIL."""
    made = Table(title="bars")
    for name in ("bar", "value", "limit", "kind", ""):
        made.add_column(name, justify="right" if name in ("value", "limit") else "left")
    for bar in bars:
        made.add_row(bar.what, bar.shown, bar.wanted, bar.kind, verdict(bar.passed))
    return made


def verdict(passed: bool) -> str:
    """Return pass or FAIL, for rich."""
    return "[green]pass[/green]" if passed else "[red]FAIL[/red]"
