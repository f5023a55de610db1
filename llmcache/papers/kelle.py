"""Kelle: Co-design KV Caching and eDRAM for Efficient LLM Serving in Edge Computing, recomputed.

T. Xia and S. Q. Zhang, MICRO 2025, doi:10.1145/3725843.3756071. Every number is modelled, from constants in the paper and
public ones. Figures 13 to 16 print no numbers, so only the text about them is judged (`kelle.toml`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from llmcache.papers.edram.accelerator import Outcome, evaluate
from llmcache.papers.edram.chip import access_ns, area_of, at_the_same_time, one_after_the_other
from llmcache.papers.edram.constants import (
    CHIP,
    EDRAM_4MB,
    FAILURE_RATE,
    GB,
    GIB,
    KELLE_INTERVALS,
    MIB,
    ORG_INTERVALS,
    PAPER,
    PROFILES,
    RETENTION_NS,
    SRAM_4MB,
    TABLE4_INTERVALS,
    UNI_INTERVALS,
    Profile,
    RefreshIntervals,
)
from llmcache.papers.edram.latency import DECLARED_SHARE, PASSES_16_BY_8
from llmcache.papers.edram.plot import energy_figure, refresh_figure, roofline_figure, saved
from llmcache.papers.edram.retention import Points, paper_curve
from llmcache.papers.edram.systems import (
    BASELINE,
    EDRAM_HARDWARE,
    KELLE_HARDWARE,
    MODELS,
    ORIGINAL,
    SRAM_HARDWARE,
    SYSTEMS,
    WORKLOADS,
    AcceleratorHardware,
    AcceleratorSystem,
    Configuration,
    GenerationWorkload,
)
from llmcache.papers.edram.tables import compare, document, joules
from llmcache.papers.judge import Claim, Judged, Paper, Values, judge, number, read_paper
from llmcache.papers.reproduce import Blocks, Progress, Reproduction, picture
from llmcache.report.html import Cell, Facts, HtmlBlock, Table
from llmcache.report.theme import INK, Curve, Look, curves_figure

Change = Callable[[AcceleratorSystem], AcceleratorSystem]
LLAMA, PG19 = MODELS["llama2-7b"], WORKLOADS["PG19"]
OURSELF = SYSTEMS["Kelle+eDRAM"]
AVERAGED = ("llama2-7b", "llama2-13b", "llama3.2-3b")
"""Models for the averages of section 8.1: those of tables 7 to 9. Figure 13 names the paper's."""
TASKS = tuple(WORKLOADS)
WEIGHTS_8_4 = 6.5 * GIB  # "assuming 8-bit weights occupy 6.5 GB out of 16 GB DRAM"
CELL_UM2 = 0.525  # a 6T cell at 65 nm
MODES = {"first principles": "first-principles", "declared recomputation": "declared"}
BOTH = "paper, declared recomputation"

LATENCY, ENERGY = 0, 1
Cost = NDArray[np.float64]
"""Latency (s) and energy (J), or the ratios of both between two systems."""


def same(system: AcceleratorSystem) -> AcceleratorSystem:
    return system


def with_hardware(system: AcceleratorSystem, **changes: Any) -> AcceleratorSystem:
    return replace(system, hardware=replace(system.hardware, **changes))


@cache
def outcomes(*configurations: Configuration) -> tuple[Outcome, ...]:
    return tuple(evaluate(configurations))


def costs(
    model: str,
    workload: GenerationWorkload,
    profile: Profile = PAPER,
    recompute: str = "first-principles",
    change: Change = same,
) -> dict[str, Cost]:
    """Return the cost of each of the five systems; `change` is not applied to the baseline."""
    systems = {name: system.with_recompute(recompute) for name, system in SYSTEMS.items()}
    systems = {name: system if name == BASELINE else change(system) for name, system in systems.items()}
    found = outcomes(*(Configuration(MODELS[model], workload, system, profile) for system in systems.values()))
    return {name: np.array([one.latency_s, one.energy_j]) for name, one in zip(systems, found, strict=True)}


def gains(model: str, workload: GenerationWorkload, *more: Any, **options: Any) -> dict[str, Cost]:
    """Return speed-up and efficiency of each system against the baseline; arguments as for `costs`."""
    found = costs(model, workload, *more, **options)
    return {name: found[BASELINE] / cost for name, cost in found.items()}


PARTS: dict[str, tuple[str, str]] = {
    "kelle": (BASELINE, "Kelle+eDRAM"),
    "edram": (BASELINE, "Original+eDRAM"),
    "aep": (BASELINE, "AEP+SRAM"),
    "aerp": ("AEP+SRAM", "AERP+SRAM"),
    "kelle-over-aerp": ("AERP+SRAM", "Kelle+eDRAM"),
}
"""Parts of Kelle in section 8.1: the baseline and the system whose gain is claimed."""
WITH_MODES = ("kelle", "aerp")
"""Parts for which recomputation as declared in the paper is reported too."""


def mean_gains(profile: Profile, recompute: str = "first-principles", change: Change = same) -> dict[str, list[float]]:
    """Return the mean gains of `PARTS`: latency, energy."""
    found = [costs(model, WORKLOADS[task], profile, recompute, change) for model in AVERAGED for task in TASKS]
    return {
        name: [mean(column) for column in zip(*(by_system[over] / by_system[part] for by_system in found), strict=True)]
        for name, (over, part) in PARTS.items()
    }


def of_all(system: AcceleratorSystem, profile: Profile) -> tuple[Outcome, ...]:
    return outcomes(
        *(Configuration(MODELS[model], WORKLOADS[task], system, profile) for model in AVERAGED for task in TASKS)
    )


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def by_profile(measure: Callable[[Profile], float]) -> dict[str, float]:
    return {name: measure(profile) for name, profile in PROFILES.items()}


# Consequences of printed numbers alone


def chip() -> dict[str, float | Values]:
    """Return the values for table 1 and section 8."""
    ours, sram = area_of(OURSELF), area_of(SYSTEMS[BASELINE])
    platform = platform_mm2()
    edram_8mb = (platform - SRAM_4MB.area_mm2 + 2 * EDRAM_4MB.area_mm2) / (platform + SRAM_4MB.area_mm2)
    return {
        "density": SRAM_4MB.area_mm2 / EDRAM_4MB.area_mm2,
        "leakage": SRAM_4MB.leakage_w / EDRAM_4MB.leakage_w,
        "access-energy": SRAM_4MB.access_j / EDRAM_4MB.access_j,
        "cell-area": CELL_UM2 * 8 * SRAM_4MB.capacity_bytes / 1e6,
        "access-power": SRAM_4MB.access_j * CHIP.sram_bytes_per_s,
        "refresh-pass": by_profile(lambda profile: profile.refresh_w(4 * MIB, KELLE_INTERVALS.mean_ns)),
        "area": ours.chip_mm2,
        "edram-area": ours.edram_mm2,
        "sram-area": ours.sram_mm2,
        "area-matched": sram.chip_mm2,
        "8mb-area": edram_8mb,
        "sram-8mb-area": SRAM_4MB.area_mm2 / platform,
        "evictor-area": CHIP.evictor_mm2 / CHIP.area_mm2,
        "evictor-power": CHIP.evictor_w / CHIP.power_w,
        "int8-tops": EDRAM_HARDWARE.int8_ops_per_s / 1e12,
        "dram-power": {"public (LPDDR4, 8 pJ/bit)": 1e12 * PROFILES["public"].dram_j_per_byte},
    }


def platform_mm2() -> float:
    return CHIP.area_shares[0] * CHIP.area_mm2 + CHIP.area_shares[3] * CHIP.area_mm2 + SRAM_4MB.area_mm2


def algorithm() -> dict[str, float | Values]:
    """Return the values for intervals, lifetimes, recomputation and capacities."""
    curve = paper_curve()
    other = Points(((RETENTION_NS, curve.failure(RETENTION_NS)), (KELLE_INTERVALS.mean_ns, FAILURE_RATE)))
    apart, together = step_lifetimes_ns()
    free = 16 * GIB - WEIGHTS_8_4
    load_us, recompute_us = 1e6 * LLAMA.kv_layer_bytes / KELLE_HARDWARE.dram_bytes_per_s, 1e6 * recompute_s()
    shrink = {name: shape.x_layer_bytes / shape.kv_layer_bytes for name, shape in MODELS.items()}
    return {
        **{f"interval-{printed // 1000}": intervals.mean_ns / 1000 for printed, intervals in TABLE4_INTERVALS.items()},
        "average-interval": KELLE_INTERVALS.mean_ns / 1e6,
        "failure-rate": {
            "at 1.05 ms, if it is the groups' mean": curve.failure(KELLE_INTERVALS.mean_ns),
            "the groups' mean, if it is at 1.05 ms": sum(map(other.failure, KELLE_INTERVALS.in_order())) / 4,
        },
        "same-failure-rate": curve.failure(KELLE_INTERVALS.mean_ns),
        # Equations 7 and 8 at T_SRAM = T_eDRAM = 1 ns, and their result for a decode step.
        "lifetime-baseline": sum(one_after_the_other(1.0, 1.0)),
        "lifetime-kelle": sum(at_the_same_time(1.0, 1.0)),
        "lifetime-ratio": {"LLaMA2-7B, PG19, batch 16": together / apart},
        "recompute-time": {"K and V of a token, one layer": recompute_us, "one of both": recompute_us / 2},
        "load-time": {"K and V of a token, one layer": load_us, "one of both": load_us / 2},
        "recompute-example": {
            "declared times": max(3 * CHIP.load_vector_ns, CHIP.recompute_vector_ns) / 1000,
            "first principles": max(3 * load_us, recompute_us),
        },
        "recompute-share": {"1.1 / (1.1 + 3.2)": DECLARED_SHARE},
        "popularity": {name: shrink[name] for name in ("llama2-7b", "llama3-8b", "llama3.2-3b", "qwen2-7b")},
        "balance": 2.41 * 1.27 * 1.45,
        "balance-latency": 2.39 * 1.19 * 1.29,
        "kv-8192": 8192 * LLAMA.kv_bytes / GIB,
        "weights": {"GB": LLAMA.stored_weights / 1e9, "GiB": LLAMA.stored_weights / GIB},
        "longest-context": free // LLAMA.kv_bytes,
        "aerp-context": (free - 31 * PG19.budget * LLAMA.kv_layer_bytes) / LLAMA.kv_layer_bytes,
        "4-bit-context": 16 / 4,
        "largest-budget": PG19.context + PG19.decode,
        "resident-layers": {
            f"{task}, batch {batch}": CHIP.kv_edram_bytes / (batch * WORKLOADS[task].budget * LLAMA.kv_layer_bytes)
            for task, batch in (("LA", 1), ("PG19", 1), ("LA", 16), ("PG19", 16))
        },
        "activation-edram": {"X, Q, K and V, batch 16": 4 * 16 * LLAMA.channels * CHIP.value_bytes / 1024},
    }


def step_lifetimes_ns() -> tuple[float, float]:
    """Return the lifetimes of activations in the baseline, and with Kelle's scheduler."""
    times = access_ns(Configuration(LLAMA, PG19, OURSELF))
    return sum(one_after_the_other(*times)), sum(at_the_same_time(*times))


def recompute_s() -> float:
    """Return the time to recompute K and V of a token in one layer."""
    macs = 2 * LLAMA.channels * LLAMA.kv_heads * LLAMA.head_dim
    return macs / (EDRAM_HARDWARE.array_rows**2 * EDRAM_HARDWARE.clock_hz * EDRAM_HARDWARE.macs_per_pe / PASSES_16_BY_8)


# Results of the accelerator model


def averages() -> dict[str, float | Values]:
    energy = {name: mean_gains(profile) for name, profile in PROFILES.items()}
    energy[BOTH] = mean_gains(PAPER, "declared")
    latency = {name: mean_gains(PAPER, mode) for name, mode in MODES.items()}
    found: dict[str, float | Values] = {}
    for name in PARTS:
        speedups = {variant: gained[name][LATENCY] for variant, gained in latency.items()}
        found[f"{name}-speedup"] = speedups if name in WITH_MODES else speedups["first principles"]
        efficiencies = {variant: gained[name][ENERGY] for variant, gained in energy.items()}
        found[f"{name}-efficiency"] = {
            key: one for key, one in efficiencies.items() if name in WITH_MODES or key in PROFILES
        }
    arrays = {"24 x 24 PEs in all": CHIP.baseline_rows, "32 x 32 in all but the baseline": CHIP.array_rows}
    found["edram-speedup-equal-arrays"] = {
        title: mean_gains(PAPER, change=partial(with_hardware, array_rows=rows))["edram"][LATENCY]
        for title, rows in arrays.items()
    }
    return found | {
        "aep-bound": mean(WORKLOADS[task].eviction_bound for task in TASKS),
        "aep-bound-pg19": PG19.eviction_bound,
        "longer-is-better": _longer(),
        **{f"fits-{name.partition('+')[0].lower()}": _peak_gib(SYSTEMS[name]) for name in (BASELINE, "Kelle+eDRAM")},
        "abstract-speedup": 3.94,
        "abstract-energy": 4.46,
    }


def _longer() -> Values:
    by_length = [WORKLOADS[task] for task in sorted(TASKS, key=lambda task: WORKLOADS[task].decode)]
    one_task = [replace(PG19, decode=workload.decode) for workload in by_length]

    def share(system: str, workloads: list[GenerationWorkload]) -> float:
        found = [gains("llama2-7b", workload)[system][LATENCY] for workload in workloads]
        return sum(bool(later >= earlier) for earlier, later in pairwise(found)) / (len(found) - 1)

    return {
        "LA, TQ, QP, PG19": share("Kelle+eDRAM", by_length),
        "PG19 with their lengths": share("Kelle+eDRAM", one_task),
        "PG19 with their lengths, eviction alone": share("AEP+SRAM", one_task),
    }


def _peak_gib(system: AcceleratorSystem) -> Values:
    found = {}
    for model in AVERAGED:
        for workload in WORKLOADS.values():
            tokens = workload.context + workload.decode
            tokens = min(tokens, workload.budget) if system.policy.evict else tokens
            size = MODELS[model].stored_weights + workload.batch * tokens * MODELS[model].kv_bytes
            found[f"{model}, {workload.name}"] = size / GIB
    return found


def tables(paper: Paper) -> tuple[list[Claim], dict[str, dict[str, float | Values]]]:
    """Return the claims of tables 7, 8 and 9 with the model's values."""
    claims: list[Claim] = []
    found: dict[str, dict[str, float | Values]] = {f"table {place}": {} for place in (7, 8, 9)}
    why, shapes = paper.data["why"], paper.data["shape"]

    def add(about: str, name: str, quote: str, printed: float, ours: Values, why: str, rule: str = "gain") -> None:
        section = "table 8, 8.3.4" if rule == shapes["linear"] else about
        claims.append(Claim(about, name, section, quote, **paper.rules[rule], paper=printed, why=why))
        found[about][name] = ours

    def budget(model: str, tokens: int, profile: Profile) -> float:
        return float(gains(model, replace(PG19, budget=tokens), profile)["Kelle+eDRAM"][ENERGY])

    def interval(task: str, us: int, profile: Profile) -> float:
        change = partial(_scaled, factor=1000 * us / KELLE_INTERVALS.mean_ns)
        return float(gains("llama3.2-3b", WORKLOADS[task], profile, change=change)["Kelle+eDRAM"][ENERGY])

    for about, measure, unit, shape in (
        ("table 7", budget, "N' in PG19 {}", "N' {}, relative to {:.2f}× at 2048"),
        ("table 8", interval, "interval {} µs", "{} µs, relative to {:.2f}× at 1050"),
    ):
        short = about.replace("table ", "t")
        for key, row in paper.data[about.replace(" ", "")].items():
            ours = {at: by_profile(partial(measure, key, int(at))) for at in row}
            first, *rest = row
            for at, printed in row.items():
                quote = f"{printed:.2f}× [{key}, {unit.format(at)}]"
                add(about, f"{short}-{key}-{at}", quote, printed, ours[at], why[about])
            for at in rest:
                quote = f"{row[at]:.2f}× [{key}, {shape.format(at, row[first])}]"
                relative = {name: ours[at][name] / ours[first][name] for name in PROFILES}
                reason, rule = why[f"{about}, relative"], shapes[about]
                add(about, f"{short}-relative-{key}-{at}", quote, row[at] / row[first], relative, reason, rule)
            if about == "table 8":
                # If refresh energy is linear in 1/interval, from the first two rows alone.
                share = row["1050"] / row["525"] - 1
                linear = {f"{us} µs": 1 + share * (1050 / us - 1) for us in (131, 262)}
                quote = f"{row['131']:.2f}× [{key}, 131 µs; as energy relative to 1050 µs]"
                add(about, f"t8-linear-{key}", quote, row["1050"] / row["131"], linear, why["linear"], shapes["linear"])
    for batch, row in paper.data["table9"].items():
        gained = {name: gains("llama2-7b", replace(PG19, batch=int(batch)), profile) for name, profile in PROFILES.items()}
        for system, printed in row.items():
            quote = f"{printed:.2f}× [batch size {batch}, {system}]"
            each = {name: one[system][ENERGY] for name, one in gained.items()}
            add("table 9", f"t9-{batch}-{system}", quote, printed, each, why["table 9"])
    found["table 7"]["no-eviction"] = {
        f"{model}, {name}": budget(model, 8750, profile)
        for model in paper.data["table7"]
        for name, profile in PROFILES.items()
    }
    alone = costs("llama2-7b", replace(PG19, batch=1))
    for system in ("Original+SRAM", "AEP+SRAM", "AERP+SRAM"):
        found["table 9"][f"batch1-{system}"] = {
            "of table 9 (energy)": 1.71 / paper.data["table9"]["1"].get(system, 1.0),
            "speed-up, modelled": (alone[system] / alone["Kelle+eDRAM"])[LATENCY],
        }
    return claims, found


def _scaled(system: AcceleratorSystem, factor: float) -> AcceleratorSystem:
    return replace(system, policy=replace(system.policy, intervals=system.policy.intervals.scaled(factor)))


POWERS: dict[str, tuple[str, ...]] = {
    "rsa": ("array_",),
    "edram": ("kv_memory", "activation_memory", "edram_leakage", "refresh_"),
    "sram": ("weight_memory", "sram_leakage"),
    "sfu": ("sfu", "evictor"),
}
"""Components of the chip's power by part, as in section 8."""


def experiments() -> dict[str, float | Values]:
    """Return the values for sections 3 and 8.3."""
    chains = {name: of_all(OURSELF, profile) for name, profile in PROFILES.items()}
    return {
        **_motivation(),
        "chip-power": {name: mean(map(chip_w, results)) for name, results in chains.items()},
        "dram-mean-power": {name: mean(part_w(one, ("dram_",)) for one in results) for name, results in chains.items()},
        **{
            f"power-{part}": {
                name: mean(part_w(one, names) / chip_w(one) for one in results) for name, results in chains.items()
            }
            for part, names in POWERS.items()
        },
        **_evictor(),
        "recompute-efficiency": _recomputation(),
        "refresh-strategies": _strategies_hold(),
        **_long_inputs(),
        **_half_bandwidth(),
    }


def part_w(outcome: Outcome, prefixes: tuple[str, ...]) -> float:
    return sum(value for name, value in outcome.energies_j.items() if name.startswith(prefixes)) / outcome.latency_s


def chip_w(outcome: Outcome) -> float:
    """Return the mean power without DRAM."""
    return sum(value for name, value in outcome.energies_j.items() if not name.startswith("dram_")) / outcome.latency_s


def _motivation() -> dict[str, float | Values]:
    lengths = (512, 2048, 8192)  # the decoding lengths of figure 3 are only in the image
    works = [
        GenerationWorkload("figure 3", 512, decode, 512 + decode, batch=batch) for batch in (1, 16) for decode in lengths
    ]
    small = replace(SRAM_HARDWARE, array_rows=CHIP.array_rows)
    large = replace(small, kv_capacity_bytes=4 * MIB, weight_capacity_bytes=4 * MIB)
    edram = replace(EDRAM_HARDWARE, kv_capacity_bytes=8 * MIB)

    def evaluated(hardware: AcceleratorHardware, profile: Profile = PAPER) -> tuple[Outcome, ...]:
        system = AcceleratorSystem("figure 3", hardware, ORIGINAL)
        return outcomes(*(Configuration(LLAMA, work, system, profile) for work in works))

    def more_power(p: Profile) -> float:
        return mean(chip_w(two) / chip_w(one) - 1 for one, two in zip(evaluated(small, p), evaluated(large, p), strict=True))

    shares = {
        name: [one.refresh_j / one.energy_j for one in evaluated(edram, profile)] for name, profile in PROFILES.items()
    }
    pairs = zip(evaluated(small), evaluated(large), strict=True)
    return {
        "sram-8mb-speedup": mean(one.latency_s / two.latency_s for one, two in pairs),
        "sram-8mb-power": by_profile(more_power),
        "refresh-share": {name: max(values) for name, values in shares.items()},
        "refresh-overhead": {name: mean(1 / (1 - share) for share in values) for name, values in shares.items()},
    }


def _evictor() -> dict[str, float | Values]:
    without = with_hardware(OURSELF, systolic_evictor=False)
    pairs = list(zip(of_all(OURSELF, PAPER), of_all(without, PAPER), strict=True))
    saved_time = [1 - one.latency_s / two.latency_s for one, two in pairs]

    def saved_energy(p: Profile) -> float:
        both = zip(of_all(OURSELF, p), of_all(without, p), strict=True)
        return mean(two.energy_j / one.energy_j - 1 for one, two in both)

    return {
        "evictor-latency": {"mean": mean(saved_time), "largest": max(saved_time), "smallest": min(saved_time)},
        "evictor-efficiency": by_profile(saved_energy),
    }


def _recomputation() -> Values:
    def gained(mode: str, profile: Profile) -> float:
        without, with_it = (of_all(OURSELF.with_recompute(how), profile) for how in ("none", mode))
        return mean(one.energy_j / two.energy_j - 1 for one, two in zip(without, with_it, strict=True))

    found = {f"{name}, first principles": gained("first-principles", profile) for name, profile in PROFILES.items()}
    return found | {BOTH: gained("declared", PAPER)}


STRATEGIES: dict[str, tuple[RefreshIntervals, bool]] = {
    "Org": (ORG_INTERVALS, False),
    "Uni": (UNI_INTERVALS, False),
    "2D": (KELLE_INTERVALS, False),
    "2K": (KELLE_INTERVALS, True),
}
"""8.3.3: refresh intervals, and whether the Kelle scheduler is used."""


def strategy_j(profile: Profile, recompute: str = "first-principles") -> Mapping[str, float]:
    """Return the energy by refresh strategy (figure 15b)."""
    configurations = []
    for name, (intervals, scheduler) in STRATEGIES.items():
        interval_ns = RETENTION_NS if name == "Org" else intervals.hst_msb_ns
        policy = replace(OURSELF.policy, intervals=intervals, activation_interval_ns=interval_ns)
        system = AcceleratorSystem(name, replace(KELLE_HARDWARE, overlap=scheduler), policy).with_recompute(recompute)
        configurations.append(Configuration(LLAMA, PG19, system, profile))
    return {name: one.energy_j for name, one in zip(STRATEGIES, outcomes(*configurations), strict=True)}


def _strategies_hold() -> Values:

    def share(profile: Profile, recompute: str = "first-principles") -> float:
        energies = strategy_j(profile, recompute).values()
        return mean(later < earlier for earlier, later in pairwise(energies))

    return {**by_profile(share), "paper, nothing recomputed": share(PAPER, "none")}


def _long_inputs() -> dict[str, float | Values]:
    short = replace(PG19, name="16K-128", context=16_384, decode=128)
    long = replace(short, name="16K-8K", decode=8_192)
    cases = {
        "long-input": (short, BASELINE),
        "long-output": (long, BASELINE),
        "long-output-aerp": (long, "AERP+SRAM"),
    }
    found: dict[str, float | Values] = {}
    for name, (work, against) in cases.items():
        profile_costs = {one: costs("llama2-7b", work, profile) for one, profile in PROFILES.items()}
        found[name] = {
            f"{work.name}, {one}": (each[against] / each["Kelle+eDRAM"])[ENERGY] for one, each in profile_costs.items()
        }
    return found


def _half_bandwidth() -> dict[str, float | Values]:

    def halved(system: AcceleratorSystem) -> AcceleratorSystem:
        return with_hardware(system, kv_bytes_per_s=128 * GB) if system.hardware.edram else system

    found: dict[str, float | Values] = {}
    for task in ("PG19", "TQ"):
        profile_costs = {name: costs("llama2-7b", WORKLOADS[task], p, change=halved) for name, p in PROFILES.items()}
        for against in ("AERP+SRAM", BASELINE):
            ours = {name: (each[against] / each["Kelle+eDRAM"])[ENERGY] for name, each in profile_costs.items()}
            found[f"half-{task}-{against}"] = ours
    full, half = (gains("llama2-7b", PG19, change=change)["Kelle+eDRAM"][ENERGY] for change in (same, halved))
    return found | {"half-loss": half / full}


def facts() -> dict[str, Any]:
    apart, together = step_lifetimes_ns()
    macs = 2 * LLAMA.channels * LLAMA.kv_heads * LLAMA.head_dim
    platform = platform_mm2()
    return {
        "word_w": SRAM_4MB.access_j * CHIP.sram_bytes_per_s / 8,
        "edram_45us_w": PAPER.refresh_w(4 * MIB, RETENTION_NS),
        "platform_mm2": platform,
        "with_dram": SRAM_4MB.area_mm2 / (platform + CHIP.dram_area_mm2),
        "one_mac_tops": EDRAM_HARDWARE.int8_ops_per_s / 1e12 / EDRAM_HARDWARE.macs_per_pe,
        "sigma": paper_curve().sigma,
        "kelle_ms": together / 1e6,
        "baseline_ms": apart / 1e6,
        "longest_each": (16 * GIB - WEIGHTS_8_4) // LLAMA.kv_bytes / 16,
        "recomputed": joules(PASSES_16_BY_8 * macs / KELLE_HARDWARE.macs_per_pe * PAPER.pe_cycle_j),
        "loaded": joules(PAPER.dram_j_per_byte * (LLAMA.kv_layer_bytes - LLAMA.x_layer_bytes)),
    }


# The reproduction


def reproduce(quick: bool, progress: Progress) -> Reproduction:
    progress("modelling the accelerator")
    paper = read_paper("kelle")
    claims, found = tables(paper)
    paper = replace(paper, claims=[*claims, *paper.claims])
    ours = {"chip": chip(), "algorithm": algorithm(), "averages": averages(), **found, "experiments": experiments()}
    judged = judge(paper, ours, facts())
    contents = {
        "kind": "modelled",
        "averaged_over": {"models": list(AVERAGED), "tasks": list(TASKS)},
        "profiles": {name: dataclasses.asdict(profile) for name, profile in PROFILES.items()},
        "systems": {name: dataclasses.asdict(system) for name, system in SYSTEMS.items()},
        "not_recomputed": [{"where": a, "what": b, "why": c} for a, b, c in paper.data["not_recomputed"]],
    }
    return Reproduction("kelle", paper, judged, contents, lambda: _blocks(judged, paper))


def _blocks(judged: Mapping[str, Sequence[Judged]], paper: Paper) -> Blocks:
    titles = {about: section["title"] for section in paper.sections for about in section.get("about", ())}
    blocks: dict[str, list[HtmlBlock]] = {}
    for about, along in (
        ("table 7", "N' (tokens)"),
        ("table 8", "mean refresh interval (µs)"),
        ("table 9", "batch (sequences)"),
    ):
        named = {one.claim.name: one for one in judged[about]}
        printed = "; ".join(f"{name} printed {number(one.claim.paper or 0)}" for name, one in named.items())
        blocks[titles[about]] = [picture(paper, about, _curves(paper, about, along, named), values=printed)]
    example = "LLaMA2-7B on PG19, by component (as in figures 13, 15b and 16a)"
    columns = ["where", "what", "reason"]
    facts = paper.facts
    source = ("paper", f"{facts['authors']}: {facts['title']}. {facts['published']}, doi:{facts['doi']}")
    return blocks | {
        example: list(_example(paper)),
        "Not recomputed": [Table("Parts of the paper that are not recomputed", columns, paper.data["not_recomputed"])],
        "Conditions": [
            Facts([source, *paper.data["conditions"].items()]),
            _constants("Energy profiles", PROFILES),
            _constants("Accelerators", {name: system.hardware for name, system in SYSTEMS.items()}),
            _constants("Policies", {name: system.policy for name, system in SYSTEMS.items()}),
            _constants("Models", MODELS),
        ],
    }


PRINTED = Look(INK, "-", "s", 1.8, 6)
LOOKS: dict[str, tuple[str, Look]] = {  # by profile: label and look
    "paper": ("modelled, profile paper", Look("#0072b2", "-", "o", 2.0)),
    "public": ("modelled, profile public", Look("#d55e00", (0, (5, 1.5)), "^")),
    "silicon": ("modelled, profile silicon", Look("#009e73", (0, (3, 1, 1, 1)), "D")),
}


def _curves(paper: Paper, about: str, along: str, named: Mapping[str, Judged]) -> Figure:
    data: dict[str, dict[str, float]] = paper.data[about.replace(" ", "")]
    short = about.replace("table ", "t")
    if about == "table 9":
        names = {system: {batch: f"t9-{batch}-{system}" for batch in data} for system in next(iter(data.values()))}
    else:
        names = {key: {at: f"{short}-{key}-{at}" for at in row} for key, row in data.items()}
    panels: dict[str, dict[str, Curve]] = {}
    for title, claim_names in names.items():
        claims = {float(at): named[name] for at, name in claim_names.items()}
        panels[title] = {"printed in the paper": (PRINTED, {at: one.claim.paper or 0.0 for at, one in claims.items()})}
        for profile, (label, look) in LOOKS.items():
            panels[title][label] = (look, {at: one.findings[profile].values["ours"] for at, one in claims.items()})
    return curves_figure(panels, along, "efficiency, relative to Original+SRAM")


def _example(paper: Paper) -> Iterator[HtmlBlock]:
    found = saved(json.loads(json.dumps(document(compare()))))
    energies = "; ".join(f"{row.system}, {row.profile}: {joules(row.energy_j)}" for row in found.results)
    shares = "; ".join(f"{row.system}, {row.profile}: {row.refresh_share:.1%}" for row in found.results)
    rates = ((system, point) for system, roof in found.rooflines.items() for point in roof.points)
    points = "; ".join(f"{system}: {point.name} {point.ops_per_s / 1e9:.0f} G/s" for system, point in rates)
    yield picture(paper, "example", energy_figure(found.results), values=energies)
    yield picture(paper, "example", refresh_figure(found.results), values=shares)
    rows: list[list[Cell]] = [[name, *map(joules, strategy_j(p).values())] for name, p in PROFILES.items()]
    yield Table("Energy by refresh strategy (section 8.3.3, modelled)", ["profile", *STRATEGIES], rows)
    yield picture(paper, "roofline", roofline_figure(found.rooflines), values=points)


def _constants(caption: str, parts: Mapping[str, Any]) -> Table:
    names = [name for name in vars(next(iter(parts.values()))) if name not in ("name", "title")]
    rows: list[list[Cell]] = []
    for name in names:
        values = [getattr(one, name) for one in parts.values()]
        plain = [value.mean_ns if isinstance(value, RefreshIntervals) else value for value in values]
        rows.append([name, *(str(one) if isinstance(one, str | bool) else number(one) for one in plain)])
    return Table(caption, ["base units", *parts], rows)
