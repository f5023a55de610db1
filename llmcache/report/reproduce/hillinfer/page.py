"""hillinfer recomputed, as a page: figures like the paper's, its words beside our numbers, and what they rest on."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence

from llmcache.kv.planning import PAPER_PC, SYSTEMS
from llmcache.report.claims import Judged, claims_table, rules_table, verdicts_table
from llmcache.report.html import Block, Cell, Facts, Fold, Section, Table, Text, html_page
from llmcache.report.reproduce.hillinfer import figure2, figure3, figure8, figure10, figure11, here, pictures, why
from llmcache.report.reproduce.hillinfer.document import PAPER, Modelled
from llmcache.report.reproduce.hillinfer.measured import SSD_SHARE, Measured
from llmcache.report.reproduce.hillinfer.readings import BASELINES, CONTEXTS, READINGS, TITLES, Point
from llmcache.report.reproduce.hillinfer.tables import bench_table, machine_table, transfer_table
from llmcache.report.theme import embedded, style

MODELLED, MEASURED = "modelled here", "measured here"
LEAD = (
    "What the paper says of memory, transfers, accuracy and speed, beside what models and this machine give. “Paper” are "
    "its own words: its figures print no numbers in the text, and none were read off pictures. “Modelled here” is a latency "
    "model with the speeds of the paper's machine, in which nothing is fitted to its results. “Measured here” ran on this "
    "machine, small, with an emulated accelerator and an emulated computational SSD. Every verdict is computed from the "
    "numbers beside it."
)
LONGEST = "LongChat-7B"


def page(found: Modelled, measured: Measured, claims: Mapping[str, Sequence[Judged]]) -> str:
    """Returns the page."""
    sections = [
        Section("Verdicts", [verdicts_table(claims, TITLES)]),
        Section("The speed-ups: by how much not, and why", _why(found, measured)),
        Section("Memory (the paper's figure 2)", _figure2(found, claims)),
        Section("Transfers from the SSD (figure 3)", _figure3(found, measured, claims)),
        Section("Accuracy (figure 8)", _figure8(measured, claims)),
        Section("Latency and speed-up (figures 9 and 10)", _figure10(found, measured, claims)),
        Section("Parts, and the ratio of the pools (figure 11)", _figure11(found, measured, claims)),
        Section("The machine of the paper, number by number", [machine_table(PAPER_PC)]),
        Section("Conditions", [_conditions(measured)]),
    ]
    return html_page(f"Recomputed: {PAPER['title']}", LEAD, sections)


def _why(found: Modelled, measured: Measured) -> list[Block]:
    titles = [f"over {SYSTEMS[name].title}" for name in BASELINES]
    needed: list[list[Cell]] = [
        [TITLES[name], *(_rates(one) for one in figure10.needed(reading))] for name, reading in READINGS.items()
    ]
    return [
        _ranges(f"Speed-ups end to end ({MODELLED}); the paper: 4.21 to 8.56", found.speedups),
        *(Text(text) for text in why.paragraphs(found.speedups, measured)),
        Table(
            f"How fast the baselines' SSD would have to be read for 4.21 to 8.56 (GB/s, Qwen-7B, 4 K, {MODELLED})",
            ["reading", *titles],
            needed,
        ),
        *_with_hits(measured),
        Fold("The readings", [Facts([(reading.title, reading.text) for reading in READINGS.values()])]),
    ]


def _ranges(caption: str, speedups: figure10.Speedups) -> Table:
    """Least and largest speed-up over each baseline, a row for each reading."""
    rows: list[list[Cell]] = [
        [TITLES[name], *(f"{min(row):.2f} to {max(row):.2f}" for row in (speedups.over(name, one) for one in BASELINES))]
        for name in speedups.points
    ]
    return Table(caption, ["reading", *(f"over {SYSTEMS[name].title}" for name in BASELINES)], rows)


def _with_hits(measured: Measured) -> list[Block]:
    """The same with the hit ratios that were measured here, where they were."""
    bench = measured.systems
    speedups = None if bench is None else figure10.with_hits(bench, SSD_SHARE)
    if bench is None or speedups is None:
        return []
    hits = {row.policy: row.observed.hit_ratio for row in bench.rows if row.observed is not None}
    note = (
        f"The table above takes it that important tokens are on the SSD as often as all others. In the runs on this machine "
        f"HillInfer found {hits['hillinfer']:.0%} of what it chose in memory, prefetch-based {hits['prefetch']:.0%} "
        f"(measured here, synthetic stream, {SSD_SHARE:.0%} on the SSD). With these shares the model gives:"
    )
    return [Text(note), _ranges(f"Speed-ups with hits as measured here ({MODELLED})", speedups)]


def _rates(one: figure10.Needed) -> str:
    if math.isnan(one.slowest) and math.isnan(one.fastest):
        return "no speed does it"
    slowest, fastest = ("any" if math.isnan(rate) else f"{rate / 1e9:.2f}" for rate in (one.slowest, one.fastest))
    return f"{slowest} to {fastest}"


def _figure2(found: Modelled, claims: Mapping[str, Sequence[Judged]]) -> list[Block]:
    with style():
        figure = pictures.memory_figure(found.memory)
    told = ", ".join(f"{model} {found.memory.at(model).total / figure2.GIB:.1f} GiB" for model in figure2.SAID)
    captioned = (
        "Memory with the full KV cache. Modelled: weights and KV in half precision, activations of one step, half a GiB for "
        "the runtime (assumed). Crosses: the numbers in the paper's text, read as GiB."
    )
    return [
        embedded(figure, f"Memory over context and over batch. At 4 K and a batch of 8: {told}.", captioned),
        *_judged("What section 1 says of figure 2", claims["figure 2"], {figure2.MODEL: figure2.MODEL}, MODELLED),
    ]


def _figure3(found: Modelled, measured: Measured, claims: Mapping[str, Sequence[Judged]]) -> list[Block]:
    data = [found.transfers] if measured.transfers is None else [found.transfers, measured.transfers]
    with style():
        figure = pictures.transfer_figure(data)
    captioned = (
        "Time to read 20 % and 30 % of the KV cache of Qwen-7B from the SSD, batch of 8. Modelled: 7 GB/s (assumed). "
        "Measured here: one layer from a spill file on the disk of the temporary directory; not the paper's machine."
    )
    titles = {figure3.READ: figure3.READ}
    blocks: list[Block] = [
        embedded(figure, "Seconds over context, a line for each share. " + _transfer_words(data), captioned),
        *_judged("What section 2.3 says of figure 3", claims["figure 3"], titles, MODELLED),
        *_judged("What it says of a decode step (figure 3b)", claims["figure 3, the step"], titles, MODELLED),
    ]
    if measured.transfers is None:
        return [*blocks, _missing(measured, "transfers", "The same on this disk")]
    blocks += _judged("The same on this disk", claims["figure 3, this disk"], titles, MEASURED)
    return [*blocks, Fold("The numbers behind the figure", [transfer_table(one) for one in data])]


def _transfer_words(data: Sequence[figure3.Transfers]) -> str:
    ends = []
    for one in data:
        for share, row in one.seconds.items():
            values = list(row.values())
            ends.append(f"{one.kind}, {share:.0%}: {values[0]:.3g} to {values[-1]:.3g} s")
    return "; ".join(ends) + "."


def _figure8(measured: Measured, claims: Mapping[str, Sequence[Judged]]) -> list[Block]:
    intro = Text(
        "The paper asks OPT, LLaMA and Qwen on OpenBookQA, RTE, PIQA and COPA; neither models nor data are downloaded here. "
        "In their place a model of 460 000 parameters, trained for it, finds key-value pairs in noise: this tells what is "
        "lost by evicting, not how the paper's models answer."
    )
    if measured.accuracy is None:
        return [intro, _missing(measured, "accuracy", "Figure 8 on the recall model")]
    data = measured.accuracy
    alphas = list(next(iter(data.by_system.values())))
    rows: list[list[Cell]] = [
        [figure8.SYSTEMS[name], *(row[alpha] for alpha in alphas), data.full] for name, row in data.by_system.items()
    ]
    columns = ["system", *(f"alpha {alpha:g}" for alpha in alphas), "full cache"]
    caption = f"Share of right answers, contexts of {data.tokens:,} tokens, {data.answers} answers ({MEASURED})"
    judged = _judged("What section 4.3 says of figure 8", claims["figure 8"], figure8.SYSTEMS, MEASURED)
    return [intro, Table(caption, columns, rows), *judged]


def _figure10(found: Modelled, measured: Measured, claims: Mapping[str, Sequence[Judged]]) -> list[Block]:
    shown: dict[str, Sequence[Point]] = dict(found.speedups.points)
    with style():
        speedups = pictures.speedup_figure(shown, TITLES)
        latencies = pictures.latency_figure({name: shown[name] for name in ("sizes", "flexgen-20")}, TITLES, LONGEST)
    at = f"contexts of {CONTEXTS[0]:,} to {CONTEXTS[-1]:,} tokens, as far as each model was made for, batch of 8, alpha 0.2"
    blocks: list[Block] = [
        embedded(
            speedups,
            "HillInfer's speed-up over each baseline at every model and context, a panel per reading, on a band from "
            "4.21 to 8.56.",
            f"Speed-up end to end, prefill and 128 tokens; {at}. Modelled. The band is what the paper reports.",
        ),
        embedded(
            latencies,
            f"Seconds per decode step of {LONGEST} over context, a line per system.",
            f"Latency of a decode step; {at}. Modelled.",
        ),
        *_judged("What sections 4.2 and 4.3 say", claims["figures 9 and 10"], TITLES, MODELLED),
    ]
    if measured.systems is None:
        return [*blocks, _missing(measured, "systems", "The systems on this machine")]
    return [
        *blocks,
        bench_table(measured.systems, f"The systems on this machine ({MEASURED})"),
        *_judged(
            "The same claims on this machine", claims["figures 9 and 10, this machine"], {here.HERE: here.HERE}, MEASURED
        ),
    ]


def _figure11(found: Modelled, measured: Measured, claims: Mapping[str, Sequence[Judged]]) -> list[Block]:
    with style():
        figure = pictures.sweep_figure(found.sweep)
    told = "; ".join(
        f"{name}: {min(times) / 1e6:.0f} to {max(times) / 1e6:.0f} ms" for name, times in found.sweep.token_ns.items()
    )
    ends = {figure11.WORST: figure11.WORST, figure11.BEST: figure11.BEST}
    blocks: list[Block] = [
        *_judged("What section 4.4 says of figure 11a and of overhead", claims["figure 11a and overhead"], TITLES, MODELLED),
        embedded(
            figure,
            f"Latency over beta. {told}.",
            "Latency of a decode step against beta = Mc/Ms; memory of the host is not bounded here. Modelled, for the two "
            "ends of what BKP can do: important tokens are on the SSD as often as others, or never.",
        ),
        *_judged("What section 4.4 says of figure 11b", claims["figure 11b"], ends, MODELLED),
    ]
    if measured.sweep is None:
        return [*blocks, _missing(measured, "sweep", "Figure 11b on this machine")]
    return [
        *blocks,
        bench_table(measured.sweep, f"HillInfer by beta on this machine ({MEASURED})"),
        *_judged("The same on this machine", claims["figure 11b, this machine"], {here.HERE: here.HERE}, MEASURED),
    ]


def _judged(caption: str, judged: Sequence[Judged], titles: Mapping[str, str], label: str) -> list[Block]:
    return [
        claims_table(caption, judged, titles, label),
        Fold("When a claim counts as confirmed", [rules_table(judged)]),
    ]


def _missing(measured: Measured, name: str, what: str) -> Block:
    return Text(f"{what}: not measured. {measured.missing[name]}")


def _conditions(measured: Measured) -> Block:
    facts = [
        ("processor", f"{platform.machine()}, Linux {platform.release()}"),
        ("python", platform.python_version()),
        ("not measured", ", ".join(measured.missing) or "nothing is missing"),
    ]
    for name, bench in (("systems", measured.systems), ("sweep of beta", measured.sweep)):
        if bench is not None:
            plain = {key: value for key, value in bench.conditions.items() if isinstance(value, str | int | float)}
            facts.append((name, ", ".join(f"{key} {value}" for key, value in plain.items())))
    return Facts(facts)
