"""Efficient Long-Context LLM Inference on the Edge with Hierarchical KV Eviction using SmartSSD (HillInfer), recomputed.

Anonymous ACL submission. Its figures print curves and bars whose numbers are not in the text: its words are quoted and
judged (`llmcache/papers/hillinfer.toml`). It measures a machine that is not here: what it says, what the latency model
gives for that machine, and what `tools/bench papers` has measured, small, with an emulated device, stay apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmcache.kv.bench.results import Bench, read_bench
from llmcache.kv.planning import (
    MODELS,
    PAPER_PC,
    SYSTEMS,
    TYPICAL_PC,
    Hardware,
)
from llmcache.kv.planning.hardware import NUMBERS
from llmcache.report.html import Cell, Facts, Fold, HtmlBlock, Table, Text
from llmcache.report.judge import Measure, Measures, judge, read_paper
from llmcache.report.paper_hillinfer_measures import (
    BASELINES,
    BATCH,
    BEST,
    CONTEXTS,
    GIB,
    GPU_GB,
    HERE,
    LEAST,
    LONGCHAT,
    MEMORY_CONTEXT,
    MEMORY_MODEL,
    MOST,
    PC_GB,
    QWEN,
    READ,
    READINGS,
    RECALLING,
    SAID,
    STEPS,
    WORST,
    Ablation,
    BetaSweep,
    MemoryTable,
    ModelledCase,
    Needed,
    Reading,
    Transfers,
    ablation,
    accuracy_measures,
    beta_measure,
    dominates,
    memory_measures,
    needed,
    over,
    part_measures,
    points,
    run_measures,
    speedup_measures,
    systems_in_order,
    with_hits,
)
from llmcache.report.reproduce import Reproduction, Tell, machine_words, measurements
from llmcache.report.theme import FAINT, KV_LOOKS, MUTED, Look, embedded, grid_of, legend_below, style
from llmcache.units import format_duration, format_rate, format_size


@dataclass(frozen=True)
class Results:
    """Everything that the models give, and what was measured; None where `measured["missing"]` says why not."""

    memory: MemoryTable
    transfers: Transfers
    speedups: Mapping[str, Sequence[ModelledCase]]
    parts: Ablation
    sweep: BetaSweep
    measured: Mapping[str, Any]

    @classmethod
    def of(cls, measured: Mapping[str, Any]) -> Results:
        """Returns the results of the models, which take less than a second, beside what was `measured`."""
        speedups = {name: points(reading) for name, reading in READINGS.items()}
        modelled = Transfers.modelled(READINGS["share-20"])
        return cls(MemoryTable.computed(), modelled, speedups, ablation(), BetaSweep.modelled(), measured)

    def bench(self, name: str) -> Bench | None:
        """Returns the benchmark of all "systems", or of "beta"."""
        return None if self.measured[name] is None else read_bench(self.measured[name], f"hillinfer.json: {name}")

    def measures(self) -> Measures:
        """Returns what is measured of every claim; what was not measured is left out."""

        def alone(found: Mapping[str, Measure], variant: str) -> dict[str, dict[str, Measure]]:
            return {name: {variant: measure} for name, measure in found.items()}

        def by_variant(found: Mapping[str, Mapping[str, Measure]]) -> dict[str, dict[str, Measure]]:
            return {name: {variant: own[name] for variant, own in found.items()} for name in next(iter(found.values()))}

        step = READINGS["share-20"].latency("prefetch", MODELS[QWEN], MODELS[QWEN].context_limit)
        measures: dict[str, Mapping[str, Mapping[str, Measure | float]]] = {
            "figure 2": alone(memory_measures(self.memory), MEMORY_MODEL),
            "figure 3": alone(self.transfers.measures(), READ),
            "figure 3, the step": alone({"dominates": dominates(step)}, READ),
            "figures 9 and 10": by_variant(
                {name: {**speedup_measures(of), "order": systems_in_order(of)} for name, of in self.speedups.items()}
            ),
            "figure 11a and overhead": by_variant(
                {name: part_measures(self.parts[name], reading) for name, reading in READINGS.items()}
            ),
            "figure 11b": {"beta-rule": {variant: self.sweep.measure(variant) for variant in (WORST, BEST)}},
        }
        if (transfers := Transfers.read(self.measured["transfers"])) is not None:
            measures["figure 3, this disk"] = alone(transfers.measures(), READ)
        if (accuracy := self.measured["accuracy"]) is not None:
            measures["figure 8"] = by_variant({name: accuracy_measures(accuracy, name) for name in RECALLING})
        if (systems := self.bench("systems")) is not None:
            measures["figures 9 and 10, this machine"] = alone(run_measures(systems), HERE)
        if (sweep := self.bench("beta")) is not None:
            measures["figure 11b, this machine"] = alone({"beta-here": beta_measure(sweep)}, HERE)
        return measures


def reproduce(quick: bool, tell: Tell) -> Reproduction:
    """Returns the paper recomputed. `quick` changes nothing: what is measured is saved."""
    tell("asking the models")
    paper, results = read_paper("hillinfer"), Results.of(measurements("hillinfer"))
    judged = judge(paper, results.measures())
    return Reproduction("hillinfer", paper, judged, _told(results), lambda: _blocks(results))


def _told(found: Results) -> dict[str, Any]:
    measured = found.measured
    transfers = Transfers.read(measured["transfers"])
    here = {key: measured[key] for key in ("systems", "beta", "accuracy", "missing", "machine", "date", "quick")}
    return {
        "machines": [PAPER_PC.to_json(), TYPICAL_PC.to_json()],
        "readings": [_reading(reading) for reading in READINGS.values()],
        "modelled": {
            "kind": "modelled",
            "memory": list(_memory(found.memory)),
            "transfers": found.transfers.document(),
            "points": [
                {
                    "reading": name,
                    "model": point.model,
                    "context": point.context,
                    "systems": [one.to_json() for one in point.latencies.values()],
                    "end_to_end_speedup": {baseline: point.speedup(baseline) for baseline in BASELINES},
                }
                for name, of in found.speedups.items()
                for point in of
            ],
            "parts": {name: {part: one.to_json() for part, one in row.items()} for name, row in found.parts.items()},
            "beta": {"rule": found.sweep.rule, "steps": list(STEPS), "token_ns": dict(found.sweep.token_ns)},
        },
        "measured_here": {"kind": "measured", "transfers": transfers and transfers.document(), **here},
    }


def _reading(reading: Reading) -> dict[str, Any]:
    def rate(value: float) -> float | None:
        return None if math.isnan(value) else value

    return {
        "name": reading.name,
        "title": reading.title,
        "text": reading.text,
        "ssd_bytes_per_s": reading.machine.ssd_bytes_per_s,
        "ssd_source": str(reading.machine.origins["ssd_bytes_per_s"]),
        "ssd_share": reading.ssd_share,
        "host_evaluates": reading.host_evaluates,
        "device_caches": reading.device_caches,
        "ssd_needed": [
            {
                "baseline": one.baseline,
                "slowest_bytes_per_s": rate(one.slowest),
                "fastest_bytes_per_s": rate(one.fastest),
            }
            for one in needed(reading)
        ],
    }


def _memory(found: MemoryTable) -> Iterator[dict[str, Any]]:
    for model, row in found.by_context.items():
        for context, use in row.items():
            yield {"model": model, "context": context, "batch": BATCH, **use.to_json()}
    for model, row in found.by_batch.items():
        for batch, use in row.items():
            if batch != BATCH:
                yield {"model": model, "context": MEMORY_CONTEXT, "batch": batch, **use.to_json()}


# The page


def _blocks(found: Results) -> dict[str, list[HtmlBlock]]:
    measured, systems = found.measured, found.bench("systems")
    memory_told = ", ".join(f"{model} {found.memory.at(model).total / GIB:.1f} GiB" for model in SAID)
    transfers = [one for one in (found.transfers, Transfers.read(measured["transfers"])) if one is not None]
    at = f"contexts of {CONTEXTS[0]:,} to {CONTEXTS[-1]:,} tokens, as far as each model was made for, batch of 8, alpha 0.2"
    curves = found.sweep.token_ns.items()
    sweep_told = "; ".join(f"{name}: {min(times) / 1e6:.0f} to {max(times) / 1e6:.0f} ms" for name, times in curves)
    with style():
        memory, seconds = _memory_figure(found.memory), _transfer_figure(transfers)
        ratios = _speedup_figure(found.speedups)
        times = _latency_figure({name: found.speedups[name] for name in ("sizes", "flexgen-20")}, LONGCHAT)
        beta = _sweep_figure(found.sweep)
    blocks: dict[str, list[HtmlBlock]] = {
        "The speed-ups: by how much not, and why": list(_why(found, systems)),
        "Memory (the paper's figure 2)": [
            embedded(
                memory,
                f"Memory over context and over batch. At 4 K and a batch of 8: {memory_told}.",
                "Memory with the full KV cache. Modelled: weights and KV in half precision, activations of one step, half a "
                "GiB for the runtime (assumed). Crosses: the numbers in the paper's text, read as GiB.",
            )
        ],
        "Transfers from the SSD (figure 3)": [
            embedded(
                seconds,
                f"Seconds over context, a line for each share. {_transfer_words(transfers)}",
                "Time to read 20 % and 30 % of the KV cache of Qwen-7B from the SSD, batch of 8. Modelled: 7 GB/s (assumed)"
                ". Measured: one layer from a spill file on the disk of the temporary directory; not the paper's machine.",
            ),
            Fold("The numbers behind the figure", [_transfer_table(one) for one in transfers]),
        ],
        "Latency and speed-up (figures 9 and 10)": [
            embedded(
                ratios,
                "HillInfer's speed-up over each baseline at every model and context, a panel per reading, on a band from "
                "4.21 to 8.56.",
                f"Speed-up end to end, prefill and 128 tokens; {at}. Modelled. The band is what the paper reports.",
            ),
            embedded(
                times,
                f"Seconds per decode step of {LONGCHAT} over context, a line per system.",
                f"Latency of a decode step; {at}. Modelled.",
            ),
        ],
        "Parts, and the ratio of the pools (figure 11)": [
            embedded(
                beta,
                f"Latency over beta. {sweep_told}.",
                "Latency of a decode step against beta = Mc/Ms; memory of the host is not bounded here. Modelled, for the "
                "two ends of what BKP can do: important tokens are on the SSD as often as others, or never.",
            )
        ],
        "The machine of the paper, number by number": [_machine_table(PAPER_PC)],
        "Conditions": [Facts([*machine_words(measured), *_conditions(found)])],
    }
    if (accuracy := measured["accuracy"]) is not None:
        blocks["Accuracy (figure 8)"] = [_accuracy_table(accuracy)]
    for name, section, what in (
        ("systems", "Latency and speed-up (figures 9 and 10)", "The systems"),
        ("beta", "Parts, and the ratio of the pools (figure 11)", "HillInfer by beta"),
    ):
        if (bench := found.bench(name)) is not None:
            blocks[section].append(_bench_table(bench, f"{what} on the machine named below (measured)"))
    return blocks | _missing(measured, blocks)


def _missing(measured: Mapping[str, Any], blocks: Mapping[str, list[HtmlBlock]]) -> dict[str, list[HtmlBlock]]:
    """Returns the sections of what was not measured, with the reason."""
    sections = {
        "transfers": "Transfers from the SSD (figure 3)",
        "accuracy": "Accuracy (figure 8)",
        "systems": "Latency and speed-up (figures 9 and 10)",
        "beta": "Parts, and the ratio of the pools (figure 11)",
    }
    found: dict[str, list[HtmlBlock]] = {}
    for name, why in measured["missing"].items():
        section = sections[name]
        found[section] = [*blocks.get(section, []), Text(f"Not measured: {name}. {why}")]
    return found


def _why(found: Results, systems: Bench | None) -> Iterator[HtmlBlock]:
    """Yields by how much the speed-ups are missed, and what decides about them, in the order of its weight."""
    titles = [f"over {SYSTEMS[name].title}" for name in BASELINES]
    yield _ranges("Speed-ups end to end (modelled); the paper: 4.21 to 8.56", found.speedups)
    yield Text(_in_words(found.speedups))
    yield Text(_storage())
    yield Text(_speeds())
    yield Text(_abstracts(found.speedups))
    yield Text(_evaluation(found.speedups))
    if systems is not None:
        yield Text(_on_this_machine(systems))
    rates: list[list[Cell]] = [[one.title, *map(_rates, needed(one))] for one in READINGS.values()]
    head = "How fast the baselines' SSD would have to be read for 4.21 to 8.56 (GB/s, Qwen-7B, 4 K, modelled)"
    yield Table(head, ["reading", *titles], rates)
    share = 0.2
    if systems is not None and (seen := with_hits(systems, share)) is not None:
        hits = {row.policy: row.observed.hit_ratio for row in systems.rows if row.observed is not None}
        yield Text(
            f"The table above takes it that important tokens are on the SSD as often as all others. In the runs HillInfer "
            f"found {hits['hillinfer']:.0%} of what it chose in memory, prefetch-based {hits['prefetch']:.0%} (measured, "
            f"synthetic stream, {share:.0%} on the SSD). With these shares the model gives:"
        )
        yield _ranges("Speed-ups with hits as measured (modelled)", seen)
    yield Fold("The readings", [Facts([(reading.title, reading.text) for reading in READINGS.values()])])


def _ranges(head: str, speedups: Mapping[str, Sequence[ModelledCase]]) -> Table:
    """Least and largest speed-up over each baseline, a row for each reading."""
    rows: list[list[Cell]] = [
        [READINGS[name].title, *(f"{min(row):.2f} to {max(row):.2f}" for row in (over(of, one) for one in BASELINES))]
        for name, of in speedups.items()
    ]
    return Table(head, ["reading", *(f"over {SYSTEMS[name].title}" for name in BASELINES)], rows)


def _rates(one: Needed) -> str:
    if math.isnan(one.slowest) and math.isnan(one.fastest):
        return "no speed does it"
    slowest, fastest = ("any" if math.isnan(rate) else f"{rate / 1e9:.2f}" for rate in (one.slowest, one.fastest))
    return f"{slowest} to {fastest}"


def _in_words(speedups: Mapping[str, Sequence[ModelledCase]]) -> str:
    parts = []
    for name, of in speedups.items():
        values = [value for baseline in BASELINES for value in over(of, baseline)]
        parts.append(f"{READINGS[name].title}: {sum(LEAST <= value <= MOST for value in values)} of {len(values)}")
    return "Speed-ups that lie in the paper's range, by reading: " + "; ".join(parts) + "."


def _storage() -> str:
    ssd, device = PAPER_PC.ssd_bytes_per_s, PAPER_PC.device_bytes_per_s
    return (
        f"What in-storage evaluation can save is bounded by speeds of the same storage: the device works through its keys "
        f"at {device / 1e9:g} GB/s (the paper's figure), a plain SSD on PCIe 4.0 gives the host {ssd / 1e9:g} GB/s "
        f"(assumed). For equal bytes it is {ssd / device:.2f} times as fast to read keys to the host as to score them in "
        f"the device; evaluating by keys and values instead makes that {ssd / device / 2:.2f}. What it does save is the "
        f"link: a score and its place are 4 bytes, a key of 128 halves is 256."
    )


def _speeds() -> str:
    found = [one for one in needed(READINGS["share-20"]) if not math.isnan(one.slowest)]
    plain = [one for one in found if one.baseline in ("full", "h2o", "prefetch")]
    low, high = max(one.slowest for one in plain), min(one.fastest for one in plain)
    told = ", ".join(
        f"{SYSTEMS[one.baseline].title} {one.slowest / 1e9:.2f} to {one.fastest / 1e9:.2f} GB/s" for one in found
    )
    between = f"{low / 1e9:.2f} to {high / 1e9:.2f} GB/s" if low < high else "no one speed"
    return (
        f"With 20 % of the KV cache on the SSD (Qwen-7B, 4 K), the paper's range would follow if the baselines read it at: "
        f"{told}. For full cache, H2O-like and prefetch-based together that is {between}; FlexGen, on which the baselines "
        f"are built, reports 2 GB/s for its disk. The paper does not say what its baselines get of their SSD."
    )


def _abstracts(speedups: Mapping[str, Sequence[ModelledCase]]) -> str:
    most = max(value for of in speedups.values() for value in over(of, "leoam"))
    reading = READINGS["flexgen-20"]
    moved = {name: reading.latency(name, MODELS[QWEN], 4096).moved["ssd to host"] for name in ("prefetch", "leoam")}
    return (
        f"Over LeoAM-like no reading gives more than {most:.2f}x: by two keys per chunk of 16 tokens it reads "
        f"{moved['leoam'] / 1e9:.2f} GB a step from the SSD where prefetch-based reads {moved['prefetch'] / 1e9:.2f} GB, so "
        f"most of what evaluation in storage saves is saved already. The model knows no overhead of its software, and none "
        f"of fetching whole chunks for a few tokens."
    )


def _evaluation(speedups: Mapping[str, Sequence[ModelledCase]]) -> str:
    own = [point for point in speedups["sizes"] if point.model == LONGCHAT]
    ends = " to ".join(f"{one.speedup('prefetch'):.2f}x at {one.context // 1024} K" for one in (own[0], own[-1]))
    found = READINGS["sizes"].latency("hillinfer", MODELS[LONGCHAT], 32768)
    return (
        f"With longer contexts (LongChat-7B, sizes as stated) the speed-up over prefetch-based goes from {ends}: once the "
        f"memory of the host is full, all that is added lies on the SSD, and HillInfer evaluates it at the device's speed. "
        f"At 32 K {found.places.ssd_share:.0%} of the KV cache is on the SSD, and of {found.token_ns / 1e9:.1f} s a step "
        f"{found.stages['evaluate'] / 1e9:.1f} s go into evaluation."
    )


def _on_this_machine(bench: Bench) -> str:
    rows = {row.policy: row for row in bench.rows}
    fastest, ours = min(rows.values(), key=lambda row: row.token_ns), rows["hillinfer"]
    return (
        f"On the machine named below (measured) the fastest system is {fastest.title}, {fastest.token_ns / 1e6:.0f} ms a "
        f"step; HillInfer takes {ours.token_ns / 1e6:.0f} ms, {ours.stages_ns['evaluate'] / 1e6:.0f} of them with "
        f"evaluation. Its device is emulated: it scores on the same processors as the host and reads the same disk, so "
        f"there is no second engine to gain from."
    )


def _transfer_words(data: Sequence[Transfers]) -> str:
    ends = []
    for one in data:
        for share, row in one.seconds.items():
            values = list(row.values())
            ends.append(f"{one.kind}, {share:.0%}: {values[0]:.3g} to {values[-1]:.3g} s")
    return "; ".join(ends) + "."


def _transfer_table(data: Transfers) -> Table:
    contexts = list(next(iter(data.seconds.values())))
    rows: list[list[Cell]] = [[f"{share:.0%}", *row.values()] for share, row in data.seconds.items()]
    return Table(f"Seconds, {data.of_layers} ({data.kind})", ["share", *(f"{context:,}" for context in contexts)], rows)


def _accuracy_table(found: Mapping[str, Any]) -> Table:
    alphas = list(next(iter(found["by_system"].values())))
    titles = read_paper("hillinfer").variants
    rows: list[list[Cell]] = [
        [titles[name], *(row[alpha] for alpha in alphas), found["full"]] for name, row in found["by_system"].items()
    ]
    head = f"Share of right answers, contexts of {found['tokens']:,} tokens, {found['answers']} answers (measured)"
    return Table(head, ["system", *(f"alpha {alpha}" for alpha in alphas), "full cache"], rows)


def _machine_table(machine: Hardware) -> Table:
    """Returns every number of `machine` with where it comes from."""

    def value(name: str) -> str:
        number = getattr(machine, name)
        if name.endswith("_bytes"):
            return f"{number / GIB:.1f} GiB" if number >= GIB else format_size(number)
        if name.endswith("_bytes_per_s"):
            return format_rate(number)
        if name.endswith("_ns"):
            return format_duration(number)
        return f"{number:.3g} operations/s" if name.endswith("_flops") else f"{number:,.0f} requests/s"

    rows: list[list[Cell]] = []
    for name in NUMBERS:
        origin, words = machine.origins[name], name.removesuffix("_per_s").removesuffix("_bytes").replace("_", " ")
        rows.append([words, value(name), origin.kind, origin.text])
    return Table(machine.title, ["number", "value", "origin", "source"], rows)


def _bench_table(bench: Bench, head: str) -> Table:
    """Returns the rows of a benchmark: times, idle share, bytes from the SSD, hits."""
    columns = ["system", "beta", "ms a step", "evaluate (ms)", "fetch (ms)", "idle (%)", "MB from SSD to host", "hits (%)"]
    rows: list[list[Cell]] = [
        [
            row.title,
            "-" if row.beta is None else f"{row.beta:.3g}",
            row.token_ns / 1e6,
            row.stages_ns["evaluate"] / 1e6,
            row.stages_ns["fetch"] / 1e6,
            100 * row.idle_share,
            sum(size for link, size in row.moved_bytes.items() if link.startswith("ssd to cpu")) / 1e6,
            "-" if row.observed is None else f"{100 * row.observed.hit_ratio:.0f}",
        ]
        for row in bench.rows
    ]
    return Table(head, columns, rows, digits=1)


def _conditions(found: Results) -> Iterator[tuple[str, str]]:
    for name, what in (("systems", "systems"), ("beta", "sweep of beta")):
        if (bench := found.bench(name)) is not None:
            plain = {key: value for key, value in bench.conditions.items() if isinstance(value, str | int | float)}
            yield what, ", ".join(f"{key} {value}" for key, value in plain.items())


# Pictures like the paper's, from our numbers; what the paper says is drawn apart, as marks

_TWO = (Look("#0072b2", "-", "o", 2.2), Look("#d55e00", (0, (5, 1)), "s", 2.0))
SYSTEM_LOOKS = {name: KV_LOOKS[name] for name in ("full", "h2o", "prefetch", "leoam", "hillinfer")}


def _powers_of_2(panel: Axes, values: Sequence[int], labels: Sequence[str], label: str) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(values), list(labels))
    panel.minorticks_off()
    panel.set_xlabel(label)


def _memory_figure(data: MemoryTable) -> Figure:
    """Returns figure 2: GiB over context and over batch, the paper's numbers as crosses."""
    figure, axes = grid_of(2)
    panels = (
        (data.by_context, f"batch {BATCH}", "context (tokens)", MEMORY_CONTEXT),
        (data.by_batch, f"context {MEMORY_CONTEXT:,}", "batch", BATCH),
    )
    for panel, (rows, title, label, said_at) in zip(axes, panels, strict=True):
        for look, (model, row) in zip(_TWO, rows.items(), strict=True):
            panel.plot(list(row), [use.total / GIB for use in row.values()], label=model, **look.line())
            crossed = f"{model}: the paper"
            panel.plot([said_at], [SAID[model]], "x", color=look.colour, markersize=9, markeredgewidth=2, label=crossed)
        for limit, name in ((GPU_GB, "RTX 4090"), (PC_GB, "a typical PC, all memory")):
            panel.axhline(limit, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
            panel.annotate(
                f"{name}: {limit} GB",
                (0, limit),
                xycoords=("axes fraction", "data"),
                xytext=(3, 3),
                textcoords="offset points",
                fontsize=7.5,
                color=MUTED,
            )
        values = list(next(iter(rows.values())))
        _powers_of_2(panel, values, [f"{value:,}" for value in values], label)
        panel.set_ylim(bottom=0)
        panel.set_ylabel("memory, modelled (GiB)")
        panel.set_title(title)
    legend_below(figure, axes)
    return figure


def _transfer_figure(found: Sequence[Transfers]) -> Figure:
    """Returns figure 3a, one panel for each of `found`: seconds over context."""
    figure, axes = grid_of(len(found))
    for panel, data in zip(axes, found, strict=True):
        for look, (share, row) in zip(_TWO, data.seconds.items(), strict=True):
            panel.plot(list(row), list(row.values()), label=f"{share:.0%} of the KV cache", **look.line())
        contexts = list(next(iter(data.seconds.values())))
        panel.set_xticks(contexts, [f"{context // 1024} K" if context >= 1024 else str(context) for context in contexts])
        panel.set_ylim(bottom=0)
        panel.set_xlabel("context (tokens)")
        panel.set_ylabel(f"seconds, {data.kind}")
        panel.set_title(f"{data.kind}: {data.of_layers}")
    legend_below(figure, axes)
    return figure


def _speedup_figure(speedups: Mapping[str, Sequence[ModelledCase]]) -> Figure:
    """Returns figure 10: speed-ups end to end at every point, one panel a reading."""
    figure, axes = grid_of(len(speedups))
    for panel, (name, found) in zip(axes, speedups.items(), strict=True):
        panel.axhspan(LEAST, MOST, color=FAINT, zorder=0, label=f"the paper: {LEAST} to {MOST}x")
        panel.axhline(1, color=MUTED, linewidth=0.8, zorder=1)
        # The four baselines side by side, so that none hides another.
        for shift, baseline in zip((-0.24, -0.08, 0.08, 0.24), BASELINES, strict=True):
            line = SYSTEM_LOOKS[baseline].line() | {"linestyle": "none", "markersize": 6.5}
            places = [number + shift for number in range(len(found))]
            panel.plot(places, over(found, baseline), label=f"over {SYSTEMS[baseline].title}", **line)
        panel.set_yscale("log", base=2)
        panel.set_yticks([0.25, 0.5, 1, 2, 4, 8, 16], ["0.25", "0.5", "1", "2", "4", "8", "16"])
        panel.minorticks_off()
        labels = [f"{point.model} {point.context // 1024} K" for point in found]
        panel.set_xticks(range(len(found)), labels, rotation=60, ha="right", fontsize=7.5)
        panel.set_ylabel("HillInfer's speed-up, modelled")
        panel.set_title(READINGS[name].title)
    legend_below(figure, axes)
    return figure


def _latency_figure(speedups: Mapping[str, Sequence[ModelledCase]], model: str) -> Figure:
    """Returns figure 9 for one model: seconds per token over context, one panel a reading."""
    figure, axes = grid_of(len(speedups))
    for panel, (name, found) in zip(axes, speedups.items(), strict=True):
        own = [point for point in found if point.model == model]
        contexts = [point.context for point in own]
        for system, look in SYSTEM_LOOKS.items():
            values = [point.latencies[system].token_ns / 1e9 for point in own]
            panel.plot(contexts, values, label=SYSTEMS[system].title, **look.line())
        panel.set_yscale("log")
        _powers_of_2(panel, contexts, [f"{context // 1024} K" for context in contexts], "context (tokens)")
        panel.set_ylabel(f"s per decode step, {model}, modelled")
        panel.set_title(READINGS[name].title)
        panel.yaxis.set_major_formatter("{x:g}")
    legend_below(figure, axes)
    return figure


def _sweep_figure(data: BetaSweep) -> Figure:
    """Returns figure 11b: ms per token over beta, in multiples of fc / fs."""
    figure, (panel,) = grid_of(1)
    for look, (name, times) in zip(_TWO, data.token_ns.items(), strict=True):
        panel.plot(list(STEPS), [time / 1e6 for time in times], label=name, **look.line())
    panel.axvline(1, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(STEPS), [f"{step:g}" for step in STEPS])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.set_xlabel(f"beta, in multiples of fc/fs ({data.rule:.3g})")
    panel.set_ylabel("ms per decode step, modelled")
    panel.set_title("Qwen-7B, 8 K: latency by the ratio of the pools")
    legend_below(figure, [panel])
    return figure
