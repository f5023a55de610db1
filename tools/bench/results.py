"""The JSON that benchmarks write: the same document for whoever reads it, small, and never half of a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent / "results"
"""What the README is made from."""
DIGITS = 6
_NUMBER = r"(?:-?\d[\d.eE+-]*|null|true|false)"
_NUMBERS = re.compile(rf"\[\s*\n\s*({_NUMBER}(?:,\s*{_NUMBER})*)\s*\n\s*\]")


def rounded(value: Any) -> Any:
    """Return `value` with the numbers of its lists at six digits: samples, of which nobody needs sixteen."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [float(f"{one:.{DIGITS}g}") if isinstance(one, float) else rounded(one) for one in value]
    return value


def text(document: Any) -> str:
    """Return the JSON of `document`, indented, each list of numbers on one line."""
    indented = json.dumps(document, indent=1)
    # a string holds no line end in JSON, so only lists match
    return _NUMBERS.sub(lambda found: "[" + re.sub(r",\s+", ", ", found[1]) + "]", indented) + "\n"


def write(path: Path, document: Any) -> None:
    """Write `document`; replaces the file as a whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(text(document))
    part.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Return what a benchmark wrote."""
    document: dict[str, Any] = json.loads(path.read_text())
    return document
