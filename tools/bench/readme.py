"""What README.md and docs/ show of the recorded benchmarks: `python -m tools.bench.readme [--write]`.

What stands between these comments is made here; everything else is left as it is:

    <!-- results:NAME -->          a table of tools/bench/results/NAME.json
    <!-- /results -->

    <!-- figure:NAME.BAR -->0.70<!-- /figure -->      the value of one of its bars, or one of `FIGURES`
    <!-- limit:NAME.BAR -->>= 0.6<!-- /limit -->     the limit of that bar, and whether it is missed

docs/tokens.svg is drawn anew from the same results: tokens per second over the share of a model that fits in memory, of
page cache and llmcachefs. The dense panel is of case (f) of `tools/bench mount`, and of case (a), whose storage is limited,
in open markers; the panel of mixtures is of case (g).
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import truediv
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from llmcache.kv.bench.results import MOST
from llmcache.report.theme import INK, MUTED, Look, figure_bytes, grid_of, legend_below, style

from . import results
from .kvmodels import BUDGETS, OWN
from .mount import Result, kernel, mean, mounts, seconds, storage_bytes
from .results import Bar, Document, bars_of, figure

ROOT = Path(__file__).resolve().parents[2]
PICTURE = "docs/tokens.svg"
KERNEL = "page cache"
LIMIT_BPS = 500_000_000  # of the rates that are measured, the one that is drawn
LOOKS = {
    KERNEL: Look(INK, "-", "s", 1.8),
    "inplace": Look("#0072b2", "-", "o", 2.4, 5),
    "steer": Look("#d55e00", "-", "^", 1.8),
}
NAMES = {KERNEL: KERNEL, "inplace": "llmcachefs, in place", "steer": "llmcachefs, steer"}
_TABLE = re.compile(r"(<!-- results:(\w+) -->\n)(.*?)(<!-- /results -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!-- (?:figure|limit):(\w+)\.([^>]*?) -->)(.*?)(<!-- /(?:figure|limit) -->)")
_DERIVED = re.compile(r"\b[mp][0-9a-f]{10}\b")  # what matplotlib names markers and clip paths, from their coordinates
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LABELS = {
    "a": "larger than memory",
    "b": "everything fits",
    "c": "one cold pass",
    "d": "readers",
    "e": "loop size",
    "f": "no limit",
}


def pages(root: Path = ROOT) -> list[Path]:
    """Returns README.md and the pages of docs/."""
    return [root / "README.md", *sorted((root / "docs").glob("**/*.md"))]


# The picture


class SpeedCurve(NamedTuple):
    """What one side did, storage `limited` or not: shares of the model in memory, and tokens per second at each."""

    side: str
    limited: bool
    shares: list[float]
    tokens_per_s: list[float]


def dense(document: Document) -> list[SpeedCurve]:
    """Lines of the dense model, run by llama.cpp; medians. Where nearly all fits another one is run, which is larger."""
    of_llama = [one for one in document["results"] if one["case"] in "af" and one["name"].startswith("llama.cpp")]
    return list(_lines([one for one in of_llama if one["file"] == of_llama[0]["file"]], seconds))


def mixture(document: Document) -> list[SpeedCurve]:
    """Lines of the first mixture that is read by a generated routing; means, as tokens use different experts."""
    routed = [one for one in document["results"] if one["case"] == "g" and not one["name"].startswith("llama.cpp")]
    return list(_lines([one for one in routed if one["file"] == routed[0]["file"]], mean))


def _lines(results: list[Result], time_of: Callable[[Result, str], float]) -> Iterator[SpeedCurve]:
    for rate in (None, LIMIT_BPS):
        each = sorted((one for one in results if one["read_bps"] == rate), key=_share)
        for side in (KERNEL, *mounts(each[0])) if each else ():
            times = [time_of(one, kernel(one, time_of) if side == KERNEL else side) for one in each]
            yield SpeedCurve(side, rate is not None, [_share(one) for one in each], [1 / each_s for each_s in times])


def _share(result: Result) -> float:
    return float(result["cache_bytes"] / result["loop_bytes"])


def caption(document: Document) -> str:
    """What the picture shows."""
    first = next(one for one in document["results"] if one["case"] == "f")
    limited = f"storage at full speed, or limited to {LIMIT_BPS / 1e6:.0f} MB/s (open markers)"
    model = f"llama.cpp with {first['loop_bytes'] / 1e6:.0f} MB of weights"
    return f"{model}; {limited}; all sides have the same memory and storage"


def drawn(document: Document) -> str:
    """Returns the picture as SVG; the same results give the same text."""
    panels = [("Dense model, llama.cpp", dense(document)), ("Mixture of experts, generated routing", mixture(document))]
    with style():
        figure, axes = grid_of(len(panels))
        for panel, (title, lines) in zip(axes, panels, strict=True):
            _draw(panel, title, lines)
        legend_below(figure, axes)
    return figure_bytes(figure, "svg").decode()


def same_picture(one: str, other: str) -> bool:
    """Whether two texts of `drawn` show the same to 1/1000 of a point: processors differ in a logarithm's last bit."""
    one, other = (_DERIVED.sub("", text) for text in (one, other))
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=False)
    return _NUMBER.sub("", one) == _NUMBER.sub("", other) and all(abs(float(a) - float(b)) < 1e-3 for a, b in pairs)


def _draw(panel: Axes, title: str, lines: list[SpeedCurve]) -> None:
    for line in lines:
        look = LOOKS[line.side].line()
        if line.limited:
            look |= {"linestyle": ":", "markerfacecolor": "none", "markeredgecolor": look["color"]}
        panel.plot(line.shares, line.tokens_per_s, label=None if line.limited else NAMES[line.side], **look)
        if line.limited and line.side == KERNEL:
            place = (line.shares[-1], line.tokens_per_s[-1])
            text = f"{LIMIT_BPS / 1e6:.0f} MB/s"
            panel.annotate(text, place, (8, -3), textcoords="offset points", color=MUTED, fontsize=8)
    panel.set(title=title, xlabel="share of the model's loop that fits in memory", ylabel="tokens per second", yscale="log")
    panel.xaxis.set_major_formatter(PercentFormatter(1))
    panel.yaxis.set_major_formatter("{x:g}")


# Tables and figures


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


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int] = (0,)) -> str:
    """Returns a table; the columns in `texts` stand left, all others are numbers and stand right."""
    rule = "".join("---|" if place in texts else "---:|" for place in range(len(head)))
    lines = ["| " + " | ".join(head) + " |", "|" + rule, *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def mount_table(document: Document) -> str:
    """The results of `tools/bench mount`, with the machine they were measured on."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {one}" for name, one in machine["versions"].items() if name != "llmcache-toolkit")
    about = (
        f"Machine: {machine['cpu']}, {machine['cpus']} processors, {machine['memory_bytes'] / 1e9:.0f} GB, "
        f"Linux {machine['kernel']}, device {machine['device']['name']}; {versions}.\n\n"
    )
    results = [result for result in document["results"] if result["case"] != "g"]
    sides = list(dict.fromkeys(side for result in results for side in mounts(result)))
    named = ["page cache", *("llmcachefs" if side == "mount" else side for side in sides)]
    columns = [f"{name} {unit}" for unit in ("s", "MB") for name in named]
    head = ["case", "loop / cache MB", *columns, "bound s", "times"]
    rows = [mount_row(result, sides) for result in results]
    return f"{about}{markdown(head, rows)}\n{mixtures_table(document)}"


def mount_row(result: Document, sides: Sequence[str]) -> list[str]:
    """One line of the mount's table: the page cache at its best and `sides`, and how many times faster the first is."""
    all_sides = [kernel(result), *sides]
    times = [seconds(result, side) for side in all_sides]
    return [
        f"{LABELS[result['case']]}: {result['name']}",
        f"{result['loop_bytes'] / 1e6:.0f} / {result['cache_bytes'] / 1e6:.0f}",
        *(f"{one:.3f}" for one in times),
        *(f"{storage_bytes(result, side) / 1e6:.0f}" for side in all_sides),
        f"{result['bound_s']:.3f}" if result["case"] in "ade" else "",
        f"{times[0] / times[1]:.2f}",
    ]


def mixtures_table(document: Document) -> str:
    """What mixtures of experts took, by the routing of `tools/bench/routing.py`: means of a token, and what whole experts in
    the same room would have missed.
    """
    results = [result for result in document["results"] if result["case"] == "g"]
    head = ["mixture, share in memory, storage", "page cache ms", "in place", "steer", "page cache MB", "in place", "steer"]
    head += ["exact LRU MB", "popularities known", "Belady"]
    rows = []
    for result in results:
        sides = [side if side in result["sides"] else None for side in (kernel(result, mean), "inplace", "steer")]
        times = ["" if side is None else f"{1e3 * mean(result, side):.0f}" for side in sides]
        read = ["" if side is None else f"{storage_bytes(result, side) / 1e6:.0f}" for side in sides]
        told = (result["routed"].get(f"{policy}_bytes") for policy in ("lru", "known", "belady"))
        rows.append([result["name"], *times, *read, *("" if each is None else f"{each / 1e6:.0f}" for each in told)])
    about = "Means of a token, what it read from storage, and what it would have, by replays of its routing (modelled):"
    return f"{about}\n\n{markdown(head, rows)}"


def policy_table(document: Document) -> str:
    """The mean hit ratios of `tools/bench policies` by group of traces, and the misses of experts by the room for them."""
    groups = document["groups"]
    policies = list(groups["on_device"])
    rows = []
    for group, means in groups.items():
        best = max(means[name] for name in policies if name != "belady")
        cells = [f"**{means[name]:.3f}**" if means[name] == best else f"{means[name]:.3f}" for name in policies]
        rows.append([group.replace("_", "-"), *cells])
    table = markdown(["traces", *policies], rows)
    by_room: dict[int, list[dict[str, float]]] = {}
    for row in document["mixtures"]:
        by_room.setdefault(row["percent"], []).append(row["misses"])
    deciders = ("llmcache", "known", "belady")
    means = {
        percent: [statistics.fmean(missed[name] / missed["lru"] for missed in found) for name in deciders]
        for percent, found in by_room.items()
    }
    head = ["experts that fit: misses, of LRU's", "llmcache", "popularities known", "belady"]
    return f"{table}\n" + markdown(
        head, [[f"{percent} %", *map("{:.2f}".format, found)] for percent, found in means.items()]
    )


def speed_table(document: Document) -> str:
    """The speeds and the memory of `tools/bench simulate`."""
    rows = []
    for one in document["speeds"]:
        bar = f"{one['bar'] / 1e6:g}" if one["bar"] else ""
        rows.append([one["trace"], one["policy"], f"{one['blocks_per_s'] / 1e6:.1f}", bar])
    for one in document["memory"]:
        what = f"{one['step']} {one['blocks'] / 1e9:.2g} G blocks: {one['peak_bytes'] / 2**20:.0f} MiB at most"
        rows.append([what, "", f"{one['blocks'] / one['seconds'] / 1e6:.1f}", ""])
    return markdown(["trace", "policy", "M blocks/s", "bar"], rows, texts=(0, 1))


def size_table(document: Document) -> str:
    """Where stalls begin on a throttled mount, from `tools/bench size`."""
    head = ["mount", "storage MB/s", "T s", "S by formula (1) MB", "S on the mount MB", "difference"]
    rows = []
    for one in document["mount"]:
        first = [one["sweep"]["mode"], f"{one['sweep']['read_bps'] / 1e6:.0f}"]
        sizes = [f"{one[kind]['stalls_begin_bytes'] / 1e6:.1f}" for kind in ("modelled", "measured")]
        rows.append([*first, f"{one['measured']['period_s']:.3f}", *sizes, f"{one['difference']:+.1%}"])
    return markdown(head, rows)


def trace_table(document: Document) -> str:
    """What tracers cost, from `tools/bench trace`: times as long as without one."""
    sizes = sorted({one["read_bytes"] for one in document["overheads"]})
    tracers = dict.fromkeys(one["tracer"] for one in document["overheads"] if one["tracer"] != "none")
    ratios = {(one["tracer"], one["read_bytes"]): one["ratio"] for one in document["overheads"]}
    head = ["tracer", *(f"preads of {size // 1024} KiB" for size in sizes)]
    return markdown(head, [[tracer, *(f"{ratios[tracer, size]:.2f}" for size in sizes)] for tracer in tracers])


def edram_table(document: Document) -> str:
    """How long the accelerator model takes, from `tools/bench edram`."""
    head = [f"accelerator model, {document['configurations']:,} configurations", "s"]
    return markdown(head, [[one["case"], f"{one['median_s']:.2f}"] for one in document["cases"]])


def wanted(bar: Bar) -> str:
    """The limit of a bar, and whether it is missed."""
    return bar.wanted if bar.passed else f"{bar.wanted}: **not reached**"


def bars_table(document: Document, what: str = "what", without: Callable[[Bar], str] | None = None) -> str:
    """The bars of a benchmark as they are; `what` heads them (their kinds, if it names one), `without` fills a column."""
    more = [] if without is None else ["without"]
    rows = []
    for bar in bars_of(document):
        kind = "" if bar.kind in ("measured", *what.split()) else f"*{bar.kind}*: "
        rows.append([f"{kind}{bar.what}", bar.shown, wanted(bar), *([] if without is None else [without(bar)])])
    return markdown([what, "figure", "bar", *more], rows)


def reached(document: Document) -> tuple[int, int]:
    """How many bars of all benchmarks are reached, and how many there are, from `tools/bench all`."""
    bars = bars_of(document)
    return sum(bar.passed for bar in bars), len(bars)


def missed_table(document: Document) -> str:
    """How many bars of all benchmarks are reached, and those that are not, from `tools/bench all`."""
    missed = [bar for bar in bars_of(document) if not bar.passed]
    rows = [[bar.what, bar.kind, bar.shown, bar.wanted] for bar in missed]
    about = "Reached: {} of {} bars.".format(*reached(document))
    return about + ("\n\n" + markdown(["not reached", "kind", "figure", "bar"], rows, texts=(0, 1)) if missed else "\n")


def pipeline_table(document: Document) -> str:
    """What looking ahead, the pools and near-data scoring of the KV manager do, from `tools/bench kvpipeline`."""
    parts = document["parts"]

    def without(bar: Bar) -> str:
        return figure(parts[bar.name]["without"]) if "without" in parts[bar.name] else ""

    return bars_table(document, "measured; stream synthetic, accelerator and computational SSD emulated", without)


def models_table(document: Document) -> str:
    """Contexts on real models, from `tools/bench kvmodels`: its bars, and what a budget costs in loss and in answers."""
    parts = document["parts"]
    runs = {part: parts[f"{part}.{BUDGETS[0]}"]["runs"] for part in ("loss", "tasks") if f"{part}.{BUDGETS[0]}" in parts}
    rows = []
    for run in runs.get("loss", ()):
        above: dict[str, dict[int, tuple[float, float]]] = {}
        for one in run["rows"]:
            if one["budget"] is not None:
                above.setdefault(one["policy"], {})[one["budget"]] = one["above"]
        for policy, by_budget in above.items():
            cells = ["{:.3f} ± {:.3f}".format(*by_budget[budget]) if budget in by_budget else "" for budget in BUDGETS]
            rows.append([f"{run['model']}, {run['context']:,}", policy, *cells])
    head = [f"{len(runs['loss'][0]['texts'])} texts" if rows else "", "loss above the full cache's", *map(str, BUDGETS)]
    tables = [bars_table(document, "measured, real models"), *([markdown(head, rows, texts=(0, 1))] if rows else [])]
    answers: dict[tuple[str, str], list[list[int]]] = {}
    for run in runs.get("tasks", ()):
        full, *others = run["rows"]
        if sum(full["right"]) < MOST * sum(full["asked"]):
            continue  # what the full cache does not know says nothing
        kept = {one["budget"]: sum(one["kept"]) for one in others if one["policy"] == OWN}
        found = [sum(full["asked"]), sum(full["right"]), *(kept[budget] for budget in BUDGETS)]
        answers.setdefault((run["model"], run["task"]), []).append(found)
    if answers:
        head = ["model, task", "asked", "right with the full cache", *(f"of these at {budget}" for budget in BUDGETS)]
        totals = [
            [f"{model}, {task}", *map(str, map(sum, zip(*each, strict=True)))] for (model, task), each in answers.items()
        ]
        tables.append(markdown(head, totals))
    return "\n".join(tables)


def index_table(document: Document) -> str:
    """Trees of keys against a scan of all, one thread each, from `tools/bench kvindex`."""
    head = ["keys", "recall@64", "keys touched", "scan us", "tree us", "times", "auto takes"]
    rows = []
    for one in document["rows"]:
        scan, tree = (1e6 * one["times"][side]["median_s"] for side in ("scan", "tree"))
        found = [f"{one['recall']['tree']:.3f}", f"{one['touched']:.1%}", f"{scan:.0f}", f"{tree:.0f}", f"{scan / tree:.1f}"]
        rows.append([f"{one['kind']}, {one['keys'] // 1024} Ki", *found, one["auto"]["uses"]])
    return markdown(head, rows, texts=(0, 6))


TABLES: dict[str, Callable[[Document], str]] = {
    "all": missed_table,
    **dict.fromkeys(("demotime", "kv", "kvstore", "papers", "startup", "testtime"), bars_table),
    "edram": edram_table,
    "kvmodels": models_table,
    "kvanswers": partial(bars_table, what="measured, recall model"),
    "kvindex": index_table,
    "kvpipeline": pipeline_table,
    "prefix": partial(bars_table, what="measured, llama.cpp"),
    "kvtransformers": partial(bars_table, what="measured, in transformers"),
    "mount": mount_table,
    "policies": policy_table,
    "simulate": speed_table,
    "size": size_table,
    "trace": trace_table,
}
"""By the name of the benchmark."""


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
        _, name, key, _, end = found.groups()
        is_limit, told = found[1].startswith("<!-- limit:"), document(name)
        return found[1] + (wanted(_bar(name, key, told)) if is_limit else figure_of(name, key, told)) + end

    # a marker of a table that is unknown must not pass for one of the tables
    for name in re.findall(r"<!-- results:(\w+) -->", text):
        document(name)
    return _FIGURE.sub(single, _TABLE.sub(table, text))


def figure_of(name: str, key: str, document: Document) -> str:
    """Returns a figure of `FIGURES`, or the value of the bar `key` of the benchmark `name`."""
    special = FIGURES.get(f"{name}.{key}")
    return _bar(name, key, document).shown if special is None else special(document)


def _bar(name: str, key: str, document: Document) -> Bar:
    bars = {bar.name: bar for bar in bars_of(document)}
    if key not in bars:
        raise UnknownFigure(f"{name}.{key}: there are {', '.join(bars)}")
    return bars[key]


def recorded(name: str) -> Document:
    """Returns the recorded JSON of a benchmark."""
    return results.read(results.DIRECTORY / f"{name}.json")


def made(root: Path = ROOT) -> dict[Path, str]:
    """Returns the text that each page, and the picture, should have."""
    texts = {page: fill(page.read_text()) for page in pages(root)}
    return texts | {root / PICTURE: drawn(recorded("mount"))}


def shows(path: Path, text: str) -> bool:
    """Whether the file at `path` has `text`, or the picture that it is."""
    shown = path.read_text()
    return shown == text or (path.suffix == ".svg" and same_picture(shown, text))


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Returns 0 if pages and picture show the recorded figures (with --write: show them now), 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.readme", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the recorded tables and figures into the pages")
    args = parser.parse_args(argv)
    differing = {path: text for path, text in made(root).items() if not path.exists() or not shows(path, text)}
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
