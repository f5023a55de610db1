"""What README.md and docs/ show of the recorded benchmarks: `python -m tools.bench.readme [--write]`.

What stands between these comments is made here; everything else is left as it is:

    <!-- results:NAME -->          a table of tools/bench/results/NAME.json
    <!-- /results -->

    <!-- figure:NAME.BAR -->0.70<!-- /figure -->      the value of one of its bars, or one of `FIGURES`
    <!-- limit:NAME.BAR -->>= 0.6<!-- /limit -->     the limit of that bar, and whether it is missed

docs/tokens.svg is drawn anew from the same results.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from typing import Any

from . import results
from .bars import Bar, of_document
from .mountbars import kernel, mounts, seconds
from .readme_picture import caption, drawn
from .readme_tables import TABLES, Document, reached, wanted

ROOT = Path(__file__).resolve().parents[2]
PICTURE = "docs/tokens.svg"
_TABLE = re.compile(r"(<!-- results:(\w+) -->\n)(.*?)(<!-- /results -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!-- (?:figure|limit):(\w+)\.([^>]*?) -->)(.*?)(<!-- /(?:figure|limit) -->)")


def pages(root: Path = ROOT) -> list[Path]:
    """Returns README.md and the pages of docs/."""
    return [root / "README.md", *sorted((root / "docs").glob("**/*.md"))]


def _largest_difference(mode: str) -> Callable[[Document], str]:
    """The largest difference between mount and formula with the T of a loop that is kept whole, in one mode."""

    def found(document: Document) -> str:
        rows = [one for one in document["mount"] if one["sweep"]["mode"] == mode]
        each = [one["measured"]["stalls_begin_bytes"] / one["modelled"]["stalls_begin_all_kept_bytes"] - 1 for one in rows]
        return f"{max(each, key=abs):+.0%}".replace("%", " %")

    return found


def _mean_hit_ratio(policy: str) -> Callable[[Document], str]:
    """The mean hit ratio of a policy on the traces of applications on a device."""
    return lambda document: f"{document['groups']['on_device'][policy]:.3f}"


def _first_case(document: Document) -> tuple[float, float]:
    first = document["results"][0]
    return seconds(first, kernel(first)), seconds(first, mounts(first)[0])


FIGURES: dict[str, Callable[[Document], str]] = {
    "all.reached": lambda document: "{} of {}".format(*reached(document)),
    "mount.caption": caption,
    "mount.times": lambda document: f"{truediv(*_first_case(document)):.1f}",
    "policies.of-llmcache": _mean_hit_ratio("llmcache"),
    "policies.of-lru": _mean_hit_ratio("lru"),
    "policies.of-belady": _mean_hit_ratio("belady"),
    "size.steer": _largest_difference("steer"),
    "size.arena": _largest_difference("arena"),
}
"""Figures that are no bar's value. `mount.*`: the first case of the mount benchmark."""


class UnknownFigure(ValueError):
    """A marker names a benchmark, a bar or a figure that there is not."""


def fill(text: str, read: Callable[[str], Document] | None = None) -> str:
    """Returns `text` with every marked table and figure as `read(NAME)`, the recorded JSON, has it."""
    reading = read or recorded

    def document(name: str) -> Document:
        if name not in TABLES:
            raise UnknownFigure(f"results:{name}: there is no such benchmark, only {', '.join(TABLES)}")
        return reading(name)

    def table(found: re.Match[str]) -> str:
        return found[1] + TABLES[found[2]](document(found[2])) + found[4]

    def single(found: re.Match[str]) -> str:
        one = limit_of if found[1].startswith("<!-- limit:") else figure_of
        return found[1] + one(found[2], found[3], document(found[2])) + found[5]

    # a marker of a table that is unknown must not pass for one of the tables
    for name in re.findall(r"<!-- results:(\w+) -->", text):
        document(name)
    return _FIGURE.sub(single, _TABLE.sub(table, text))


def figure_of(name: str, key: str, document: Document) -> str:
    """Returns a figure of `FIGURES`, or the value of the bar `key` of the benchmark `name`."""
    special = FIGURES.get(f"{name}.{key}")
    return _bar(name, key, document).shown if special is None else special(document)


def limit_of(name: str, key: str, document: Document) -> str:
    """Returns the limit of the bar `key` of the benchmark `name`."""
    return wanted(_bar(name, key, document))


def _bar(name: str, key: str, document: Document) -> Bar:
    bars = {bar.name: bar for bar in of_document(document)}
    if key not in bars:
        raise UnknownFigure(f"{name}.{key}: there are {', '.join(bars)}")
    return bars[key]


def recorded(name: str) -> dict[str, Any]:
    """Returns the recorded JSON of a benchmark."""
    return results.read(results.DIRECTORY / f"{name}.json")


def made(root: Path = ROOT) -> dict[Path, str]:
    """Returns the text that each page, and the picture, should have."""
    texts = {page: fill(page.read_text()) for page in pages(root)}
    return texts | {root / PICTURE: drawn(recorded("mount"))}


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Returns 0 if pages and picture show the recorded figures (with --write: show them now), 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.readme", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the recorded tables and figures into the pages")
    args = parser.parse_args(argv)
    differing = {path: text for path, text in made(root).items() if not path.exists() or path.read_text() != text}
    for path, text in differing.items():
        if args.write:
            part = path.with_name(path.name + ".part")
            part.write_text(text)
            part.replace(path)
        else:
            print(f"{path.relative_to(root)}: not as recorded: python -m tools.bench.readme --write", file=sys.stderr)
    return 0 if args.write or not differing else 1


if __name__ == "__main__":
    sys.exit(main())
