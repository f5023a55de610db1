"""Check that README.md and docs/ show the recorded results; with --write, update them.

Only the text between these marks is generated:

    <!-- results:NAME -->          the tables of tools/bench/results/NAME.json
    <!-- /results -->

    <!-- figure:NAME.KEY -->0.70<!-- /figure -->      one of its figures, or the value of one of its targets

docs/tokens.svg is drawn from the same results: tokens per second with the page cache alone and with llmcachefs in place, of
the dense model of case (f) of `tools/bench mount` and of an MoE model of case (g), both with unlimited storage.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from matplotlib.axes import Axes

from llmcache.report.theme import MUTED, figure_bytes, grid_of, legend_below, style

from . import results
from .all import NAMES, table, whole
from .harness import ROOT, shown, targets_of
from .mount import Result, kernel, mean, seconds
from .results import Document, figure

COLORS = {"page cache alone": MUTED, "with llmcache": "#0072b2"}
MOE_SHARES = (0.12, 0.2, 0.3, 0.5)
_MARKED = re.compile(r"(<!-- (results|figure):(\w+)\.?([^>]*?) -->\n?)(.*?)(<!-- /\2 -->)", re.DOTALL)
_DERIVED = re.compile(r"\b[mp][0-9a-f]{10}\b")  # matplotlib derives these names of markers and clip paths from coordinates
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


# The picture


def dense(document: Document) -> list[Result]:
    """Return the results of one dense model with llama.cpp and unlimited storage, sorted by the share of it in memory."""
    of_llama = [one for one in document["results"] if one["case"] == "f" and one["name"].startswith("llama.cpp")]
    return sorted((one for one in of_llama if one["file"] == of_llama[0]["file"]), key=_share)


def moe(document: Document) -> list[Result]:
    """Return the results of one MoE model with a generated routing and unlimited storage, sorted by the share of it in
    memory.
    """
    routed = [one for one in document["results"] if one["case"] == "g" and not one["read_bps"] and one["routed"]]
    routed = [one for one in routed if not one["name"].startswith("llama.cpp") and round(_share(one), 2) in MOE_SHARES]
    return sorted((one for one in routed if one["file"] == routed[0]["file"]), key=_share)


def caption(document: Document) -> str:
    """Return the caption of the picture: models and conditions."""
    dense_bytes, moe_bytes = (one[0]["loop_bytes"] for one in (dense(document), moe(document)))
    return (
        f"Dense: llama.cpp, {dense_bytes / 1e6:.0f} MB of weights. MoE: {moe_bytes / 1e9:.1f} GB; a program reads "
        "the experts that a generated routing selects, and computes nothing. Both sides have the same memory and storage; "
        "the page cache has the faster of two values of read_ahead_kb"
    )


def drawn(document: Document) -> str:
    """Return the picture as SVG; equal results give equal text."""
    with style():
        figure, axes = grid_of(2)
        _draw(axes[0], "Dense model", dense(document), seconds)
        _draw(axes[1], "MoE model", moe(document), mean)  # means, because tokens use different experts
        legend_below(figure, axes)
    return figure_bytes(figure, "svg").decode()


def same_picture(one: str, other: str) -> bool:
    """Return whether two texts of `drawn` agree to 1/1000 of a point; CPUs compute different last bits of logarithms."""
    one, other = (_DERIVED.sub("", text) for text in (one, other))
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=False)
    return _NUMBER.sub("", one) == _NUMBER.sub("", other) and all(abs(float(a) - float(b)) < 1e-3 for a, b in pairs)


def _draw(panel: Axes, title: str, each: list[Result], time_of: Callable[[Result, str], float]) -> None:
    for number, (label, color) in enumerate(COLORS.items()):
        times = [time_of(one, "inplace" if number else kernel(one, time_of)) for one in each]
        bars = panel.bar(
            [at + 0.4 * number for at in range(len(each))], [1 / s for s in times], 0.38, label=label, color=color
        )
        panel.bar_label(bars, fmt=lambda value: f"{value:.1f}" if value < 10 else f"{value:.0f}", padding=2, fontsize=8.5)
    panel.set_xticks([at + 0.2 for at in range(len(each))], [f"{100 * _share(one):.0f} %" for one in each])
    panel.set(title=title, xlabel="share of the model that fits in memory", ylabel="tokens per second")
    panel.grid(visible=False, axis="x")
    panel.margins(y=0.12)


def _share(result: Result) -> float:
    return float(result["cache_bytes"] / result["loop_bytes"])


# Tables and figures


def recorded(name: str) -> Document:
    return results.read(results.DIRECTORY / f"{name}.json")


def filled(text: str) -> str:
    """Return `text` with the recorded values in all marked tables and figures. ValueError: unknown benchmark or figure."""

    def updated(found: re.Match[str]) -> str:
        begin, kind, name, key, _, end = found.groups()
        if name not in (*NAMES, "all"):
            raise ValueError(f"{kind}:{name}: unknown benchmark; known are all, {', '.join(NAMES)}")
        if name == "all":
            return begin + table(whole(results.DIRECTORY)) + end
        document, bench = recorded(name), import_module(f"tools.bench.{name}")
        if kind == "results":
            return begin + shown(bench, document) + end
        values: dict[str, str] = {target.name: target.shown for target in targets_of(bench, document)}
        figures = bench.figures(document) if hasattr(bench, "figures") else {}
        values |= {name: one if isinstance(one, str) else figure(one) for name, one in figures.items()}
        if name == "mount":
            values["caption"] = caption(document)
        if key not in values:
            raise ValueError(f"{name}.{key}: unknown figure; known are {', '.join(values)}")
        return begin + values[key] + end

    return _MARKED.sub(updated, text)


def shows(path: Path, text: str) -> bool:
    """Return whether the file at `path` has the content `text`; pictures are compared with a tolerance."""
    current = path.read_text()
    return current == text or (path.suffix == ".svg" and same_picture(current, text))


def main(argv: list[str] | None = None) -> int:
    """Return 0 if pages and picture show the recorded results (with --write: update them), 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.readme", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="write the recorded tables and figures into the pages, and draw docs/tokens.svg"
    )
    args = parser.parse_args(argv)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    made = {page: filled(page.read_text()) for page in pages} | {ROOT / "docs" / "tokens.svg": drawn(recorded("mount"))}
    differing = {path: text for path, text in made.items() if not path.exists() or not shows(path, text)}
    for path, text in differing.items():
        if args.write:
            results.write_text(path, text)
        else:
            print(
                f"{path.relative_to(ROOT)}: differs from the recorded results: python -m tools.bench.readme --write",
                file=sys.stderr,
            )
    return 0 if args.write or not differing else 1


if __name__ == "__main__":
    sys.exit(main())
