"""Rows of section 8.1: what each part of Kelle gains, averaged over models and tasks; and why the averages differ."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from llmcache.edram.constants import CHIP, PAPER, PROFILES
from llmcache.edram.systems import MODELS, SYSTEMS, WORKLOADS, System, Workload
from llmcache.report.reproduce.kelle.evidence import Change, Evidence
from llmcache.report.reproduce.kelle.paper import AVERAGED, TASKS
from llmcache.report.reproduce.kelle.rows import AT_MOST, EVERY, GAIN, Row, bounded, single, within

DECLARED = "declared"
ROUNDED = within(0.015, 0.05)
MODES = {"first principles": "first-principles", "declared recomputation": DECLARED}


class _Averages:
    """Gains over the baseline by system, averaged over models and tasks, by variant of our numbers."""

    def __init__(self, evidence: Evidence) -> None:
        self._energy = {name: evidence.averages(profile) for name, profile in PROFILES.items()}
        self._energy |= {"paper, declared recomputation": evidence.averages(PAPER, DECLARED)}
        self._latency = {name: evidence.averages(PAPER, mode) for name, mode in MODES.items()}

    def speedups(self, name: str, modes: bool) -> dict[str, float]:
        """Returns the gain in latency of a system; `modes`: by mode of recomputation."""
        found = {variant: gains[name].latency for variant, gains in self._latency.items()}
        return found if modes else single(found["first principles"])

    def efficiencies(self, name: str, modes: bool) -> dict[str, float]:
        """Returns the gain in energy of a system by profile; `modes`: with declared recomputation as well."""
        return {variant: gains[name].energy for variant, gains in self._energy.items() if modes or variant in PROFILES}


def rows(evidence: Evidence) -> list[Row]:
    """Returns the rows."""
    averages = _Averages(evidence)
    return [
        *_whole(averages),
        *_memory(averages, evidence),
        *_eviction(averages),
        *_recomputation(averages),
        *_refreshing(averages),
        *_bounds(),
        _longer(evidence),
        *_fits(),
        Row("abstract-speedup", "abstract", "a 3.9× speedup", "×", 3.9, single(3.94), ROUNDED, "Of its own 3.94×."),
        Row("abstract-energy", "abstract", "4.5× energy savings", "×", 4.5, single(4.46), ROUNDED, "Of its own 4.46×."),
    ]


def _whole(averages: _Averages) -> list[Row]:
    return [
        Row(
            "kelle-speedup",
            "8.1.2",
            "Kelle+eDRAM achieves a 3.94× … improvement in latency",
            "×",
            3.94,
            averages.speedups("Kelle+eDRAM", True),
            GAIN,
            "The gains of eviction and recomputation that it contains do not follow either: see below.",
        ),
        Row(
            "kelle-efficiency",
            "8.1.2",
            "4.46× improvement in … energy efficiency compared to the Original+SRAM",
            "×",
            4.46,
            averages.efficiencies("Kelle+eDRAM", True),
            GAIN,
            "Batch 16 reads weights once for 16 sequences, yet they remain a large part of what eviction cannot reduce.",
        ),
    ]


def _memory(averages: _Averages, evidence: Evidence) -> list[Row]:
    return [
        Row(
            "edram-speedup",
            "8.1.3",
            "Original+eDRAM improves the speedup by 32%",
            "×",
            1.32,
            averages.speedups("Original+eDRAM", False),
            GAIN,
            "It comes from the larger array (32 x 32 against 24 x 24), not from eDRAM: with equal arrays there is none.",
        ),
        _array_matched(evidence),
        Row(
            "edram-efficiency",
            "8.1.3",
            "but degrades the energy efficiency by 39%",
            "×",
            0.61,
            averages.efficiencies("Original+eDRAM", False),
            GAIN,
            "1 - 0.39; if 39 % more energy is meant it is 0.72. Refresh as printed decides it: with silicon's, eDRAM saves.",
        ),
    ]


def _eviction(averages: _Averages) -> list[Row]:
    return [
        Row(
            "aep-speedup",
            "8.1.3",
            "reduces the latency by 2.39×",
            "×",
            2.39,
            averages.speedups("AEP+SRAM", False),
            GAIN,
            "Even with free weights it could be no more than the mean bound below.",
        ),
        Row(
            "aep-efficiency",
            "8.1.3",
            "improves the energy efficiency by 2.41×, when comparing the AEP+SRAM system with the Original+SRAM system",
            "×",
            2.41,
            averages.efficiencies("AEP+SRAM", False),
            GAIN,
            "As for latency.",
        ),
    ]


def _recomputation(averages: _Averages) -> list[Row]:
    return [
        Row(
            "aerp-speedup",
            "8.1.3",
            "AERP+SRAM system improves the speedup and energy efficiency by 1.19× … to the AEP+SRAM system",
            "×",
            1.19,
            averages.speedups("AERP/AEP", True),
            GAIN,
            "From first principles the array can hide a few hundred tokens of 32,768 a layer; none under grouped queries.",
        ),
        Row(
            "aerp-efficiency",
            "8.1.3",
            "AERP+SRAM system improves the speedup and energy efficiency by … 1.27× to the AEP+SRAM system",
            "×",
            1.27,
            averages.efficiencies("AERP/AEP", True),
            GAIN,
            "As for latency.",
        ),
    ]


def _refreshing(averages: _Averages) -> list[Row]:
    return [
        Row(
            "kelle-over-aerp-speedup",
            "8.1.3",
            "2DRP and Kelle scheduler provides a 1.29× improvement in speedup",
            "×",
            1.29,
            averages.speedups("Kelle/AERP", False),
            GAIN,
            "Here, too, the array is larger: with equal arrays the speed-up is gone.",
        ),
        Row(
            "kelle-over-aerp-efficiency",
            "8.1.3",
            "a 1.45× improvement in energy efficiency when comparing Kelle+eDRAM to AERP+SRAM system",
            "×",
            1.45,
            averages.efficiencies("Kelle/AERP", False),
            GAIN,
            "Holds with the energies as printed; with those of public tools memory is a small part of all.",
        ),
    ]


def _array_matched(evidence: Evidence) -> Row:
    found = {}
    for title, rows in (("24 x 24 PEs in all", CHIP.baseline_rows), ("32 x 32 in all but the baseline", CHIP.array_rows)):
        found[title] = evidence.averages(PAPER, change=_with_array(rows))["Original+eDRAM"].latency
    return Row(
        "edram-speedup-equal-arrays",
        "8.1.3",
        "The eDRAM enhances speedup due to its larger capacity and faster access speeds compared to SRAM",
        "×",
        1.32,
        found,
        GAIN,
        "The same experiment with the baseline's array: what capacity and access speed alone give.",
    )


def _with_array(rows: int) -> Change:
    def change(system: System) -> System:
        return replace(system, hardware=replace(system.hardware, array_rows=rows))

    return change


def _bounds() -> list[Row]:
    """Returns what eviction can gain at most, beside what it is said to gain."""
    mean = sum(WORKLOADS[task].eviction_bound for task in TASKS) / len(TASKS)
    return [
        Row(
            "aep-bound",
            "8.1.3",
            "reduces the latency by 2.39×",
            "×",
            2.39,
            single(mean),
            bounded("mean(n) / mean(min(n, N')), averaged over the tasks, if nothing but the KV cache cost anything"),
            "The average is below it, but only with free weights could it come near.",
        ),
        Row(
            "aep-bound-pg19",
            "table 9",
            "3.16× [batch size 16, AEP+SRAM]",
            "×",
            3.16,
            single(WORKLOADS["PG19"].eviction_bound),
            bounded("mean(n) / mean(min(n, N')): no cost that is linear in cached tokens shrinks more"),
            "Above the bound: it needs a cost that grows faster than the cache, such as paging beyond 16 GB, of which the "
            "paper says nothing.",
        ),
    ]


def _longer(evidence: Evidence) -> Row:
    """Returns whether the gain grows with the decoded length: from task to task, and of PG19 alone."""
    by_length = [WORKLOADS[task] for task in sorted(TASKS, key=lambda task: WORKLOADS[task].decode)]
    one_task = [replace(WORKLOADS["PG19"], decode=workload.decode) for workload in by_length]

    def share(system: str, workloads: list[Workload]) -> float:
        gains = [evidence.gains("llama2-7b", workload)[system].latency for workload in workloads]
        return sum(later >= earlier for earlier, later in pairwise(gains)) / (len(gains) - 1)

    return Row(
        "longer-is-better",
        "8.1.2",
        "performance gap gets larger as the decoding sequence gets longer",
        "",
        1.0,
        {
            "LA, TQ, QP, PG19": share("Kelle+eDRAM", by_length),
            "PG19 with their lengths": share("Kelle+eDRAM", one_task),
            "PG19 with their lengths, eviction alone": share("AEP+SRAM", one_task),
        },
        EVERY,
        "It holds for what eviction gains. The tasks differ in N' too, and at short lengths the larger array gains most.",
    )


def _fits() -> list[Row]:
    """Returns the peak of memory of the paper's experiments at batch 16, as GiB."""
    found = []
    for name in ("Original+SRAM", "Kelle+eDRAM"):
        ours = {}
        for model in AVERAGED:
            shape = MODELS[model]
            for task in TASKS:
                workload = WORKLOADS[task]
                tokens = workload.context + workload.decode
                if SYSTEMS[name].policy.evict:
                    tokens = min(tokens, workload.budget)
                ours[f"{model}, {task}"] = (shape.stored_weights + workload.batch * tokens * shape.kv_bytes) / 2**30
        found.append(
            Row(
                f"fits-{name.partition('+')[0].lower()}",
                "8",
                f"16GB LPDDR4 DRAM … The batch size is set to 16 [{name}]",
                " GiB",
                CHIP.dram_bytes / 2**30,
                ours,
                AT_MOST,
                "Weights and KV cache after the last token, without recomputation. What does not fit cannot have run as "
                "described.",
            )
        )
    return found
