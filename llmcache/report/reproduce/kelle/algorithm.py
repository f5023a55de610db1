"""Rows about intervals, lifetimes, recomputation and capacities: arithmetic on numbers that the paper prints."""

from __future__ import annotations

from llmcache.edram.chip import Access, access_of, baseline, kelle
from llmcache.edram.constants import CHIP, FAILURE_RATE, GIB, KELLE_INTERVALS, RETENTION_NS, TABLE4_INTERVALS
from llmcache.edram.latency import DECLARED_SHARE, PASSES_16_BY_8
from llmcache.edram.retention import Points, paper_curve
from llmcache.edram.systems import EDRAM_HARDWARE, KELLE_HARDWARE, MODELS, SYSTEMS, WORKLOADS, Configuration
from llmcache.report.reproduce.kelle.rows import AT_LEAST, AT_MOST, EXACT, PRINTED, Row, single, within

LLAMA = MODELS["llama2-7b"]
WEIGHTS_8_4 = 6.5 * GIB  # "assuming 8-bit weights occupy 6.5 GB out of 16 GB DRAM"


def rows() -> list[Row]:
    """Returns the rows."""
    return [*_intervals(), *_failures(), *_lifetimes(), *_vectors(), *_shares(), *_contexts(), *_on_chip()]


def _intervals() -> list[Row]:
    tabled = [
        Row(
            f"interval-{printed // 1000}",
            "table 4",
            f"{printed // 1000} [Uniform (µs)]",
            " µs",
            printed / 1000,
            single(intervals.mean_ns / 1000),
            within(0.005, 0.05),
            "The harmonic mean of the four 2DRP intervals: table 4 compares at equal refresh power.",
        )
        for printed, intervals in TABLE4_INTERVALS.items()
    ]
    why = "The harmonic mean; the arithmetic one is 3.6 ms."
    mean = single(KELLE_INTERVALS.mean_ns / 1e6)
    told = "with an average retention time of 1.05 ms"
    return [*tabled, Row("average-interval", "7.1", told, " ms", 1.05, mean, within(0.005, 0.05), why)]


def _failures() -> list[Row]:
    curve = paper_curve()
    failures = [curve.failure(interval_ns) for interval_ns in KELLE_INTERVALS.in_order()]
    uniform = curve.failure(KELLE_INTERVALS.mean_ns)
    other = Points(((RETENTION_NS, curve.failure(RETENTION_NS)), (KELLE_INTERVALS.mean_ns, FAILURE_RATE)))
    return [
        Row(
            "failure-rate",
            "7.1",
            "This achieves an averaged retention failure rate at 2e-3",
            "",
            FAILURE_RATE,
            {
                "at 1.05 ms, if it is the groups' mean": uniform,
                "the groups' mean, if it is at 1.05 ms": sum(map(other.failure, KELLE_INTERVALS.in_order())) / 4,
            },
            PRINTED,
            "Interval and rate are averages of two kinds: either reading excludes the other. The first is used here "
            f"(log-normal, 1e-6 at 45 µs, sigma {curve.sigma:.2f}), so it confirms nothing; figure 4, an image, may decide.",
        ),
        Row(
            "same-failure-rate",
            "7.2",
            "maintaining the same average retention failure rate as 2DRP [uniform 1050 µs]",
            "",
            sum(failures) / 4,
            single(uniform),
            within(0.05, 0.25),
            "At the interval of equal refreshes a uniform policy loses fewer bits by this curve: table 4 is at equal power, "
            "not at equal failure rate.",
        ),
    ]


def _lifetimes() -> list[Row]:
    """Returns equations 7 and 8 at T_SRAM = T_eDRAM = 1 ns, and what they come to for a decode step of LLaMA2-7B."""
    unit = Access(weight_bytes=1, kv_bytes=1, sram_bytes_per_s=1e9, edram_bytes_per_s=1e9)
    last = access_of(Configuration(LLAMA, WORKLOADS["PG19"], SYSTEMS["Kelle+eDRAM"]))
    sums = (
        ("lifetime-baseline", "7", "L_bl = L_X + L_Q + L_K + L_V = 6T_SRAM + 4T_eDRAM [both 1]", 10.0, baseline(unit)),
        ("lifetime-kelle", "8", "L_Kelle = L_X + L_Q = 4T_SRAM + T_eDRAM [both 1]", 5.0, kelle(unit)),
    )
    why = "The parts add up; they are for multi-head attention, and times of unlike sizes are added."
    return [
        *(Row(name, f"6, eq. {at}", told, "", paper, single(of.total_ns), EXACT, why) for name, at, told, paper, of in sums),
        Row(
            "lifetime-ratio",
            "6",
            "the Kelle scheduler significantly reduces the data lifetime of transient data in eDRAM",
            "×",
            1.0,
            {"LLaMA2-7B, PG19, batch 16": kelle(last).total_ns / baseline(last).total_ns},
            AT_MOST,
            f"{kelle(last).total_ns / 1e6:.2f} ms where one after the other takes {baseline(last).total_ns / 1e6:.2f} ms; "
            "by the equations it lies between 1/4 and 2/3.",
        ),
    ]


def _vectors() -> list[Row]:
    """Returns what loading and recomputing the keys and values of a token take."""
    macs = 2 * LLAMA.channels * LLAMA.kv_heads * LLAMA.head_dim
    rate = EDRAM_HARDWARE.array_rows**2 * EDRAM_HARDWARE.clock_hz * EDRAM_HARDWARE.macs_per_pe / PASSES_16_BY_8
    load_us = 1e6 * LLAMA.kv_layer_bytes / KELLE_HARDWARE.dram_bytes_per_s
    return [
        Row(
            "recompute-time",
            "8.3.2",
            "recomputing a KV vector using the RSA introduces an additional latency of 3.2 µs",
            " µs",
            CHIP.recompute_vector_ns / 1000,
            {"K and V of a token, one layer": 1e6 * macs / rate, "one of both": 0.5e6 * macs / rate},
            PRINTED,
            "2 x 4096² MACs on 32 x 32 PEs at 1 GHz: ten times as long as printed.",
        ),
        Row(
            "load-time",
            "8.3.2",
            "accessing one KV vector from DRAM takes approximately 1.1 µs",
            " µs",
            CHIP.load_vector_ns / 1000,
            {"K and V of a token, one layer": load_us, "one of both": load_us / 2},
            PRINTED,
            "16 KiB at 64 GB/s; 1.1 µs mean 14.9 GB/s, one channel of LPDDR4-3733.",
        ),
        Row(
            "recompute-example",
            "8.3.2",
            "three vectors are loaded, and one is recomputed in parallel during the load, reducing the total latency to "
            "3.3 µs",
            " µs",
            3.3,
            {
                "declared times": max(3 * CHIP.load_vector_ns, CHIP.recompute_vector_ns) / 1000,
                "first principles": max(3 * load_us, 1e6 * macs / rate),
            },
            PRINTED,
            "With real times the recomputed one would be awaited.",
        ),
    ]


def _shares() -> list[Row]:
    """Returns what recomputation saves, and whether the gains of the parts multiply to that of the whole."""
    shrink = {name: shape.x_layer_bytes / shape.kv_layer_bytes for name, shape in MODELS.items()}
    return [
        Row(
            "recompute-share",
            "8.3.2",
            "improving energy efficiency by an average of 25%",
            "",
            0.25,
            {"1.1 / (1.1 + 3.2)": DECLARED_SHARE},
            within(0.03, 0.1),
            "The share at which loading and recomputing balance, with the declared times and free recomputation.",
        ),
        Row(
            "popularity",
            "4.1.2",
            "retained in at least θ > 50% of the heads",
            "",
            0.5,
            {name: share for name, share in shrink.items() if name in ("llama2-7b", "llama3.2-3b", "llama3-8b", "qwen2-7b")},
            PRINTED,
            "Bytes of x over bytes of all keys and values of a token: above 1, storing x never saves. So with grouped "
            "queries recomputation cannot help, though table 7 shows the largest gain there (LLaMA3.2-3B).",
        ),
        Row(
            "balance",
            "8.1.3",
            "2.41× … 1.27× … 1.45× [energy, beside 4.46×]",
            "×",
            4.46,
            single(2.41 * 1.27 * 1.45),
            PRINTED,
            "",
        ),
        Row(
            "balance-latency",
            "8.1.3",
            "2.39× … 1.19× … 1.29× [latency, beside 3.94×]",
            "×",
            3.94,
            single(2.39 * 1.19 * 1.29),
            PRINTED,
            "Means of ratios do not multiply; the energy chain does nearly.",
        ),
    ]


def _contexts() -> list[Row]:
    """Returns what fits into DRAM."""
    free = 16 * GIB - WEIGHTS_8_4
    longest = free // LLAMA.kv_bytes
    one_layer = (free - 31 * WORKLOADS["PG19"].budget * LLAMA.kv_layer_bytes) / LLAMA.kv_layer_bytes
    return [
        Row(
            "kv-8192",
            "1",
            "when LLaMA 2-7B processes a sequence with the length of 8192 in FP16, the KV cache consumes 4GB of memory",
            " GiB",
            4.0,
            single(8192 * LLAMA.kv_bytes / GIB),
            EXACT,
            "",
        ),
        Row(
            "weights",
            "8.4.1",
            "assuming 8-bit weights occupy 6.5 GB",
            "",
            6.5,
            {"GB": LLAMA.stored_weights / 1e9, "GiB": LLAMA.stored_weights / GIB},
            PRINTED,
            "6.74 billion weights, a byte each: neither unit gives 6.5. The next row takes it, and 16 GB, as GiB.",
        ),
        Row(
            "longest-context",
            "8.4.1",
            "Kelle can support up to 19,000 input tokens without AERP",
            " tokens",
            19_000,
            single(longest),
            within(0.03, 0.05),
            f"9.5 GiB over 512 KiB a token, for one sequence; at batch 16 it is {longest / 16:,.0f} each.",
        ),
        Row(
            "aerp-context",
            "8.4.1",
            "This allows Kelle to support input sequences of up to around 60K tokens",
            " tokens",
            60_000,
            single(one_layer),
            PRINTED,
            "One whole layer and 31 reduced ones leave room for far more: 60K means 170 kB a token of something "
            "undisclosed.",
        ),
        Row(
            "4-bit-context",
            "8.4.1",
            "quantizing KV vectors to 4-bit enables support for up to 240K tokens",
            "×",
            240 / 60,
            single(16 / 4),
            EXACT,
            "Only the ratio follows, and only if nothing but KV grows.",
        ),
    ]


def _on_chip() -> list[Row]:
    """Returns what fits into eDRAM."""
    pg19 = WORKLOADS["PG19"]
    return [
        Row(
            "largest-budget",
            "8.3.1",
            "Without eviction, the largest possible number of tokens will be N' = 8750 for PG19",
            " tokens",
            8750,
            single(pg19.context + pg19.decode),
            PRINTED,
            "512 tokens of context and 8192 decoded.",
        ),
        Row(
            "resident-layers",
            "5.1",
            "the Kelle accelerator stores the KV vectors from a subset of LLM layers in eDRAM",
            " layers",
            1.0,
            {
                f"{task}, batch {batch}": CHIP.kv_edram_bytes / (batch * WORKLOADS[task].budget * LLAMA.kv_layer_bytes)
                for task, batch in (("LA", 1), ("PG19", 1), ("LA", 16), ("PG19", 16))
            },
            AT_LEAST,
            "4 MB hold less than a layer of LLaMA2-7B, save short tasks at batch 1.",
        ),
        Row(
            "activation-edram",
            "5.1",
            "activations and KV vectors are held in a 256KB activation eDRAM",
            " KiB",
            CHIP.activation_edram_bytes / 1024,
            {"X, Q, K and V, batch 16": 4 * 16 * LLAMA.channels * CHIP.value_bytes / 1024},
            AT_MOST,
            "The activations of the paper's own batch do not fit; the hidden layer of the FFN alone has 344 KiB.",
        ),
    ]
