"""Results of benchmarks, one JSON document for each in `DIRECTORY`, and the targets that their figures have to meet.

Documents contain measurements. Targets are computed from them whenever they are shown, so that a change of a target needs no
new measurement.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
class Target:
    """A figure and the limit that it has to keep.

    `name`: unique within the benchmark. `what`: the figure in words, for ratios both sides. `kind`: measured on this
    machine, modelled, or emulated (measured here with an emulated device). `unit`: empty for shares and ratios. `command`:
    measures this figure alone, if a part of the benchmark is enough. A value that is not finite (nothing was measured)
    misses every target.
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
        return math.isfinite(self.value) and SENSES[self.sense](self.value, self.limit)

    @property
    def shown(self) -> str:
        return f"{figure(self.value)} {self.unit}".rstrip()

    @property
    def wanted(self) -> str:
        return f"{self.sense} {figure(self.limit)} {self.unit}".rstrip()

    def to_json(self) -> Document:
        return {**asdict(self), "value": self.value if math.isfinite(self.value) else None, "passed": self.passed}


def figure(value: float) -> str:
    """Return a number for display: three digits, an integer from 100 on, "-" if it is not finite."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def part_targets(document: Document, limits: Mapping[str, tuple[Any, ...]]) -> list[Target]:
    """Return a target for each of the "parts" of a document that has an entry in `limits`: sense, limit, and perhaps kind.

    A part to which its target does not apply ("applies" is false) has no value.
    """
    parts = {name: document["parts"][name] for name in limits if name in document["parts"]}
    values = {name: one["figure"] if one.get("applies", True) else math.nan for name, one in parts.items()}
    return [Target(name, one["what"], values[name], *limits[name]) for name, one in parts.items()]


def exit_code(targets: Iterable[Target]) -> int:
    return 0 if all(target.passed for target in targets) else 1


def rounded(value: Any) -> Any:
    """Return `value` with the floats in its lists rounded to six digits, which is enough for samples."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [float(f"{one:.{DIGITS}g}") if isinstance(one, float) else rounded(one) for one in value]
    return value


def write(path: Path, document: Any) -> None:
    """Replace the file at `path` with the JSON of `document`, indented, with each list of numbers on one line."""
    indented = json.dumps(document, indent=1)
    # JSON strings contain no line breaks, so only lists match
    write_text(path, _NUMBERS.sub(lambda found: "[" + re.sub(r",\s+", ", ", found[1]) + "]", indented) + "\n")


def write_text(path: Path, content: str) -> None:
    with replacing(path, 0o666) as stream:
        stream.write(content.encode())


def read(path: Path) -> Document:
    document: Document = json.loads(path.read_text())
    return document


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int] = (0,)) -> str:
    """Return a table in Markdown. Columns in `texts` are aligned left, all others (numbers) right."""
    rule = "".join("---|" if place in texts else "---:|" for place in range(len(head)))
    lines = ["| " + " | ".join(head) + " |", "|" + rule, *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def about_machine(machine: Document) -> str:
    """Return a line about the machine and the package versions of a result."""
    versions = ", ".join(f"{name} {one}" for name, one in machine["versions"].items() if name != "llmcache-toolkit")
    return (
        f"Machine: {machine['cpu']}, {machine['cpus']} CPUs, {machine['memory_bytes'] / 1e9:.0f} GB of memory, "
        f"Linux {machine['kernel']}, disk {machine['device']['name']}; {versions}."
    )


def wanted(target: Target) -> str:
    """Return the limit of a target, marked if it is missed."""
    return target.wanted if target.passed else f"{target.wanted}: **missed**"


def worst(
    name: str, what: str, cases: Iterable[tuple[str, float]], sense: str, limit: float, **about: Any
) -> Iterator[Target]:
    """Yield the target `name` with the figure of the case that is furthest from the limit; nothing if there are no cases.

    `cases`: (words, figure). A figure that is not finite is the worst. `what` is followed by the worst case, the number of
    cases, and the number of those that miss the target. `about`: further fields of the target.
    """
    found = [Target(name, words, value, sense, limit, **about) for words, value in cases]
    if not found:
        return
    sign = 1 if sense in ("<", "<=") else -1
    one = max(found, key=lambda target: (not math.isfinite(target.value), sign * target.value))
    missed = sum(not target.passed for target in found)
    others = f"; worst of {len(found)}" if len(found) > 1 else ""
    others += f", {missed} missed" if missed and others else ""
    yield replace(one, what=f"{what} ({one.what}{others})")


def targets_table(targets: Iterable[Target], what: str = "figure", without: Callable[[Target], str] | None = None) -> str:
    """Return targets in Markdown.

    `what` heads the first column; kinds that it names are not repeated in the rows. `without` returns the cells of a column
    that shows the figures without the feature.
    """
    more = [] if without is None else ["without the feature"]
    rows = []
    for target in targets:
        kind = "" if target.kind in ("measured", *what.split()) else f"*{target.kind}*: "
        rows.append([f"{kind}{target.what}", target.shown, wanted(target), *([] if without is None else [without(target)])])
    return markdown([what, "value", "target", *more], rows)
