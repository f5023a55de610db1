"""What benchmarks write: figures, each beside the bar it has to reach, in one JSON document of each benchmark.

The document is the same for whoever reads it, small, and never half of a file. `DIRECTORY` has the recorded ones.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from llmcache.files import replacing

DIRECTORY = Path(__file__).resolve().parent / "results"
SENSES: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
}
DIGITS = 6
_NUMBER = r"(?:-?\d[\d.eE+-]*|null|true|false)"
_NUMBERS = re.compile(rf"\[\s*\n\s*({_NUMBER}(?:,\s*{_NUMBER})*)\s*\n\s*\]")

Document = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """What a benchmark promises of a figure: its limit, and which side of it is good.

    `name` is its key among those of its benchmark, `what` is for people and says what is divided by what; `kind`: measured
    on this machine, modelled (computed from a model), or emulated (measured here with an emulated device taking part);
    `unit` is empty for shares and ratios; `command` makes the figure alone, where the whole benchmark is not needed for
    that. A value that is no number (nothing was measured) reaches no bar.
    """

    name: str
    what: str
    value: float
    sense: str
    limit: float
    kind: Literal["measured", "modelled", "emulated"] = "measured"
    unit: str = ""
    command: str = ""

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

    def to_json(self) -> Document:
        """Return it as plain data; a value that is no number is null."""
        return {**asdict(self), "value": self.value if math.isfinite(self.value) else None, "passed": self.passed}


def figure(value: float) -> str:
    """Return a number for people: three digits, whole from a hundred on, "-" for none."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def of_json(told: Document) -> Bar:
    """Return the bar that `to_json` told; what else stands beside it is left out."""
    values = {key: told[key] for key in Bar.__dataclass_fields__ if key in told}
    return Bar(**{**values, "value": math.nan if told["value"] is None else told["value"]})


def bars_of(document: Document) -> list[Bar]:
    """Return the bars of a benchmark's JSON."""
    return [of_json(one) for one in document["bars"]]


def exit_code(bars: Iterable[Bar]) -> int:
    """Return 0 if every bar is reached, 1 if not."""
    return 0 if all(bar.passed for bar in bars) else 1


def rounded(value: Any) -> Any:
    """Return `value` with the numbers of its lists at six digits: samples, of which nobody needs sixteen."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [float(f"{one:.{DIGITS}g}") if isinstance(one, float) else rounded(one) for one in value]
    return value


def write(path: Path, document: Any) -> None:
    """Write the JSON of `document`, indented, each list of numbers on one line; replaces the file as a whole."""
    indented = json.dumps(document, indent=1)
    # a string holds no line end in JSON, so only lists match
    write_text(path, _NUMBERS.sub(lambda found: "[" + re.sub(r",\s+", ", ", found[1]) + "]", indented) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write `content`; replaces the file as a whole."""
    with replacing(path, 0o666) as stream:
        stream.write(content.encode())


def read(path: Path) -> Document:
    """Return what a benchmark wrote."""
    document: Document = json.loads(path.read_text())
    return document


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int] = (0,)) -> str:
    """Returns a table; the columns in `texts` stand left, all others are numbers and stand right."""
    rule = "".join("---|" if place in texts else "---:|" for place in range(len(head)))
    lines = ["| " + " | ".join(head) + " |", "|" + rule, *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def wanted(bar: Bar) -> str:
    """The limit of a bar, and whether it is missed."""
    return bar.wanted if bar.passed else f"{bar.wanted}: **missed**"


def bars_table(document: Document, what: str = "figure", without: Callable[[Bar], str] | None = None) -> str:
    """The bars of a benchmark as they are; `what` heads them (their kinds, if it names one), `without` fills a column."""
    more = [] if without is None else ["without the feature"]
    rows = []
    for bar in bars_of(document):
        kind = "" if bar.kind in ("measured", *what.split()) else f"*{bar.kind}*: "
        rows.append([f"{kind}{bar.what}", bar.shown, wanted(bar), *([] if without is None else [without(bar)])])
    return markdown([what, "value", "target", *more], rows)
