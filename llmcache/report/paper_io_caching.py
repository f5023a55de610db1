"""Rethinking I/O Caching for Large Language Model Inference on Resource-Constrained Mobile Platforms, recomputed.

H. Kim, J. Lee, H. Bahn, Mathematics 13(22), 3689, 2025. The paper's traces are not public: ours are synthetic, shaped
after its text. It prints figures 4 and 5 without numbers: its words are quoted and judged (`llmcache/papers/io-caching.toml`
has them and the thresholds that words have to become). That the traces have the patterns that they are shaped after
confirms nothing: judged is whether our detector, which knows nothing of how they were made, finds them.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.cache.classify import READ_OP, WRITE_OP, TraceClasses, classify
from llmcache.cache.detector import HOT, LOOP, SEQ
from llmcache.cache.latency import FetchModel
from llmcache.cache.plan import FootprintShare
from llmcache.cache.policies import policy_class
from llmcache.cache.results import Result
from llmcache.cache.simulate import simulate
from llmcache.cache.sizing import (
    PAPER,
    PHONE,
    SECOND_NS,
    WATCH,
    DeviceClass,
    SizingParameters,
    blocks_needed,
    largest_loop,
    need,
)
from llmcache.report.html import Cell, Facts, Fold, HtmlBlock, Table
from llmcache.report.judge import Measure, Measures, Paper, judge, read_paper
from llmcache.report.lines import Panel, bandwidth_lines, latency_figure, policy_line, ratio_figure
from llmcache.report.plot import access_figure, alt_text, caption, picture_of, shades_of
from llmcache.report.reproduce import Reproduction, Tell, machine_words, measurements, picture
from llmcache.report.theme import embedded
from llmcache.trace.record import Trace
from llmcache.trace.shapes import GROUPS, SHAPES
from llmcache.units import BLOCK_BYTES, format_size

Values = NDArray[np.float64]
MB = 10**6
AWARE = ("algorithm1", "llmcache")
"""The two policies that stand for the paper's "LLM-aware": its pseudocode as printed, and ours."""
BELADY = "belady"
POLICIES = ("lru", "lecar", *AWARE, BELADY)
NOTES, TRANSLATE, EMBEDDER, CLASSIFICATION = "ai_notes", "ai_translate", "text_embedder", "text_classification"
ON_DEVICE = (NOTES, TRANSLATE, EMBEDDER, CLASSIFICATION)
TITLES = {
    NOTES: "AI Notes",
    TRANSLATE: "AI Translate",
    EMBEDDER: "Text Embedder",
    CLASSIFICATION: "Text Classification",
    "copilot": "Copilot",
    "perplexity": "Perplexity",
    "claude": "Claude",
    "gemini": "Gemini",
}
STEPS, QUICK_STEPS = 100, 10
"""Cache sizes, evenly from one step to the whole footprint."""
VISIBLE = 0.005  # half a percentage point: less cannot be told in a printed figure
KNEE = 500 * MB  # bytes/s
FORMULA, DETECTED = "formula (1)", "llmcache classify"


@dataclass(frozen=True)
class App:
    """An application's results. All arrays go by cache size (`sizes_bytes`, ascending).

    `hit_ratio`: policy -> (sizes), 0..1. `latency_s`: policy -> (bandwidths x sizes), modelled seconds for the whole
    trace. `remote`: inference happens on a server.
    """

    name: str
    title: str
    remote: bool
    footprint_bytes: int
    accesses: int
    sizes_bytes: Values
    hit_ratio: Mapping[str, Values]
    latency_s: Mapping[str, Values]

    def at(self, index: int) -> str:
        """Returns the size at `index` in words: bytes, and its share of the footprint."""
        size = float(self.sizes_bytes[index])
        return f"{size / 1e6:.3g} MB ({size / self.footprint_bytes:.0%} of the footprint)"


Apps = Mapping[str, App]


def on_device(apps: Apps, names: Sequence[str] = ON_DEVICE) -> list[App]:
    """Returns the applications called `names`, in this order."""
    return [apps[name] for name in names]


# Hit ratios: figure 4


def higher_than_lru(apps: Apps, aware: str) -> Measure:
    """Measures by how much the policy `aware` hits more often than LRU, at every application and size."""
    gains = {app.title: app.hit_ratio[aware] - app.hit_ratio["lru"] for app in on_device(apps)}
    every = np.concatenate(list(gains.values()))
    means = {title: float(gain.mean()) for title, gain in gains.items()}
    least = min(means, key=lambda title: means[title])
    share = float((every >= -VISIBLE).mean())
    words = (
        f"as high or higher at {share:.0%} of {len(every)} points; mean gain {every.mean():+.3f}, "
        f"least {means[least]:+.3f} ({least}), worst point {every.min():+.3f}"
    )
    values = {"share_of_points": share, "mean_gain": float(every.mean()), "worst": float(every.min())}
    return Measure(words, {**values, "least_mean": means[least]})


def lru_stands_still(apps: Apps, aware: str) -> Measure:
    """Measures in how many applications LRU has a long region of sizes without gain where `aware` goes on gaining."""
    lru, ours = ({app.title: flat_share(app, policy) for app in on_device(apps)} for policy in ("lru", aware))
    both = [title for title in lru if lru[title] >= 0.2 and ours[title] <= lru[title] / 2]
    spoken = ", ".join(f"{title} {lru[title]:.0%} against {ours[title]:.0%}" for title in lru)
    values = {f"lru.{title}": share for title, share in lru.items()}
    values |= {f"{aware}.{title}": share for title, share in ours.items()}
    words = f"longest region without gain, share of all sizes, LRU against the policy: {spoken}"
    return Measure(words, values | {"share_of_apps": len(both) / len(lru)})


def flat_share(app: App, policy: str) -> float:
    """Returns the longest range of sizes over which the hit ratio gains nothing visible, as a share of the largest size.

    A policy that has reached what the largest cache gives has nothing left to gain: such sizes do not count.
    """
    ratios = app.hit_ratio[policy]
    below = int(np.count_nonzero(ratios < ratios[-1] - VISIBLE))
    longest = 0.0
    for start in range(below):
        flat = np.flatnonzero(np.maximum.accumulate(ratios[start:below]) - ratios[start] > VISIBLE)
        end = start + int(flat[0]) - 1 if len(flat) else below - 1
        longest = max(longest, float(app.sizes_bytes[end] - app.sizes_bytes[start]))
    return longest / float(app.sizes_bytes[-1])


def near_baseline(apps: Apps, aware: str) -> Measure:
    """Measures in how many of two applications LRU stays near its baseline up to large caches in which `aware` hits."""
    told: list[str] = []
    values: dict[str, float] = {}
    near = 0
    for app in on_device(apps, (EMBEDDER, CLASSIFICATION)):
        lru, ours = progress(app.hit_ratio["lru"]), progress(app.hit_ratio[aware])
        last = int(np.flatnonzero(np.maximum.accumulate(lru) <= 0.1)[-1])
        share = float(app.sizes_bytes[last]) / app.footprint_bytes
        near += share >= 0.5 and float(ours[last]) >= 0.5
        told.append(
            f"{app.title}: LRU near its baseline ({app.hit_ratio['lru'][0]:.3f} to {app.hit_ratio['lru'][last]:.3f}) "
            f"up to {app.at(last)}; there the policy has {app.hit_ratio[aware][last]:.3f}"
        )
        values[f"{app.name}.share_of_footprint"] = share
        values[f"{app.name}.hit_ratio"] = float(app.hit_ratio[aware][last])
    return Measure("; ".join(told), values | {"apps": near})


def progress(ratios: Values) -> Values:
    """Returns how far each size has come from the hit ratio of the smallest cache (0) to that of the largest (1).

    Where the largest is no better, none has come anywhere.
    """
    way = float(ratios[-1] - ratios[0])
    return (ratios - ratios[0]) / way if way > 0 else np.zeros_like(ratios)


def lecar_sometimes(apps: Apps, aware: str, name: str) -> Measure:
    """Measures at how many sizes of one application LeCaR is ahead, and by how much."""
    ahead = apps[name].hit_ratio["lecar"] - apps[name].hit_ratio[aware]
    share = float((ahead > VISIBLE).mean())
    words = f"LeCaR ahead at {share:.0%} of the sizes, by {max(0.0, float(ahead.max())):.3f} at most"
    return Measure(words, {"share_of_sizes": share, "most": float(ahead.max())})


def outperforms_lecar(apps: Apps, aware: str) -> Measure:
    """Measures by how much `aware` hits more often than LeCaR in AI Translate."""
    app = apps[TRANSLATE]
    gain = app.hit_ratio[aware] - app.hit_ratio["lecar"]
    mean, share = float(gain.mean()), float((gain >= -VISIBLE).mean())
    words = f"mean {app.hit_ratio[aware].mean():.3f} against {app.hit_ratio['lecar'].mean():.3f} ({mean:+.3f}), "
    words += f"as high or higher at {share:.0%} of the sizes, {gain.min():+.3f} to {gain.max():+.3f}"
    return Measure(words, {"mean_gain": mean, "share_of_sizes": share})


def higher_overall(apps: Apps, aware: str) -> Measure:
    """Measures in how many of two applications `aware` hits more often than LeCaR on the mean over sizes."""
    gains = {
        app.title: float((app.hit_ratio[aware] - app.hit_ratio["lecar"]).mean())
        for app in on_device(apps, (EMBEDDER, CLASSIFICATION))
    }
    words = "mean over sizes against LeCaR: " + ", ".join(f"{title} {gain:+.3f}" for title, gain in gains.items())
    return Measure(words, gains | {"apps": sum(gain > VISIBLE for gain in gains.values())})


def lecar_fluctuates(apps: Apps, aware: str) -> Measure:
    """Measures the largest loss of hits from one size to the next larger one, of LeCaR and of `aware`."""

    def worst_drop(policy: str) -> tuple[float, str]:
        drops = ((float(-np.diff(app.hit_ratio[policy]).min()), app.title) for app in on_device(apps))
        worst, title = max(drops)
        return max(0.0, worst), title

    lecar, ours = worst_drop("lecar"), worst_drop(aware)
    words = f"largest loss at a next larger size: LeCaR {lecar[0]:.3f} ({lecar[1]}), the policy {ours[0]:.3f} ({ours[1]})"
    share = ours[0] / lecar[0] if lecar[0] else 1.0
    return Measure(words, {"lecar": lecar[0], aware: ours[0], "loss": ours[0], "loss_of_lecars": share})


FIGURE4: dict[str, Callable[[Apps, str], Measure]] = {
    "higher-than-lru": higher_than_lru,
    "lru-stands-still": lru_stands_still,
    "lru-near-baseline": near_baseline,
    f"lecar-sometimes-{NOTES}": partial(lecar_sometimes, name=NOTES),
    "outperforms-lecar": outperforms_lecar,
    f"lecar-sometimes-{CLASSIFICATION}": partial(lecar_sometimes, name=CLASSIFICATION),
    "higher-overall": higher_overall,
    "lecar-fluctuates": lecar_fluctuates,
}

# Fetch latency: figure 5, all modelled

BY_BANDWIDTH = (NOTES, EMBEDDER, CLASSIFICATION)
BANDWIDTHS = tuple(FetchModel().storage_bandwidths)
"""Bytes/s, ascending: rows of latencies."""


def latency_falls(apps: Apps, aware: str) -> Measure:
    """Measures in how many applications latency falls with more cache and with more bandwidth."""
    rises: dict[str, float] = {}
    for app in on_device(apps):
        latency = app.latency_s[aware]
        by_size, by_bandwidth = np.diff(latency, axis=1).max(), np.diff(latency, axis=0).max()
        rises[app.title] = max(float(by_size), float(by_bandwidth), 0.0) / float(latency.max())
    falls = sum(rise <= 0.01 for rise in rises.values())
    worst = max(rises, key=lambda title: rises[title])
    words = f"falls in {falls} of {len(rises)}; largest rise from one step to the next {rises[worst]:.1%} ({worst})"
    return Measure(words, rises | {"apps": falls})


def knee_of_bandwidth(apps: Apps, aware: str) -> Measure:
    """Measures how much latency gains up to 500 MB/s and beyond, in the three applications that the paper names."""
    told: list[str] = []
    values: dict[str, float] = {}
    clear = flat = 0
    knee = BANDWIDTHS.index(KNEE)
    for app in on_device(apps, BY_BANDWIDTH):
        mean = app.latency_s[aware].mean(axis=1)
        before, beyond = 1 - float(mean[knee] / mean[0]), 1 - float(mean[-1] / mean[knee])
        clear += before >= 0.2 and beyond <= 0.1
        flat += beyond <= min(0.1, before / 2)
        told.append(f"{app.title} {before:.0%} less, then {beyond:.0%}")
        values |= {f"{app.name}.up_to_500": before, f"{app.name}.beyond_500": beyond}
    words = f"from {BANDWIDTHS[0] / 1e6:g} to 500 MB/s, then to {BANDWIDTHS[-1] / 1e6:g} MB/s: " + ", ".join(told)
    return Measure(words, values | {"apps": clear, "flat_apps": flat})


def size_counts_less(apps: Apps, aware: str) -> Measure:
    """Measures up to which size more cache gains less than more bandwidth, in the three applications of the paper."""
    told: list[str] = []
    values: dict[str, float] = {}
    shares: list[float] = []
    less = 0
    for app in on_device(apps, BY_BANDWIDTH):
        latency = app.latency_s[aware]
        of_bandwidth = float(1 - (latency[-1] / latency[0]).mean())
        gains = 1 - (latency / latency[:, :1]).mean(axis=0)
        last = int(np.flatnonzero(np.maximum.accumulate(gains) < of_bandwidth)[-1])
        shares.append(float(app.sizes_bytes[last]) / app.footprint_bytes)
        less += float(gains[-1]) < of_bandwidth
        values |= {f"{app.name}.share_of_footprint": shares[-1], f"{app.name}.gain_of_bandwidth": of_bandwidth}
        values[f"{app.name}.gain_of_size"] = float(gains[-1])
        limit = f"less than bandwidth up to {app.at(last)}"
        told.append(f"{app.title}: bandwidth {of_bandwidth:.0%}, the largest cache {gains[-1]:.0%} ({limit})")
    return Measure("latency saved by " + "; ".join(told), values | {"apps": less, "least_share": min(shares)})


def translate_is_sensitive(apps: Apps, aware: str) -> Measure:
    """Measures what AI Translate gains from cache beside the others, and where it gains fastest."""
    gains = {
        app.title: float(1 - (app.latency_s[aware][:, -1] / app.latency_s[aware][:, 0]).mean())
        for app in on_device(apps, (TRANSLATE, *BY_BANDWIDTH))
    }
    translate = apps[TRANSLATE]
    highest = gains[translate.title] > max(gain for title, gain in gains.items() if title != translate.title)
    steps_mb = np.diff(translate.sizes_bytes) / 1e6
    slow, fast = (float((-np.diff(translate.latency_s[aware][row]) / steps_mb).max()) for row in (0, -1))
    words = "latency saved by the largest cache: " + ", ".join(f"{title} {gain:.0%}" for title, gain in gains.items())
    words += f"; steepest fall in AI Translate {slow:.2f} s/MB at {BANDWIDTHS[0] / 1e6:g} MB/s, {fast:.2f} s/MB at "
    words += f"{BANDWIDTHS[-1] / 1e6:g} MB/s"
    values = {"slow_s_per_mb": slow, "fast_s_per_mb": fast, "signs": highest + (slow > fast)}
    return Measure(words, gains | values)


FIGURE5: dict[str, Callable[[Apps, str], Measure]] = {
    "latency-falls": latency_falls,
    "knee-of-bandwidth": knee_of_bandwidth,
    "size-counts-less": size_counts_less,
    "translate-sensitive": translate_is_sensitive,
}


def writes_fetch_too(apps: Apps) -> dict[str, App]:
    """Returns `apps` with latencies (modelled) as if a write fetched what it replaces, and went to the GPU as well.

    The paper does not say which it counts, and writes prevail in two of its applications: both readings are judged.
    """
    model = FetchModel()

    def of_all(app: App, ratios: Values) -> Values:
        missed = [round(app.accesses * (1 - float(ratio))) for ratio in ratios]
        return np.array([[model.latency_s(app.accesses, blocks, bw) for blocks in missed] for bw in BANDWIDTHS])

    return {
        name: replace(app, latency_s={policy: of_all(app, ratios) for policy, ratios in app.hit_ratio.items()})
        for name, app in apps.items()
    }


# Patterns: sections 3.1 to 3.3 (figures 1 and 2), detection in section 4.1

# Blocks of each application's loops, by what they do. Section 3.1; for AI Translate section 4.2 (about 2 MB).
LOOP_BLOCKS: Mapping[str, Mapping[str, int]] = {
    NOTES: {READ_OP: 10_000, WRITE_OP: 5_000},
    TRANSLATE: {READ_OP: 2 * MB // BLOCK_BYTES},
    EMBEDDER: {WRITE_OP: 6_500},
    CLASSIFICATION: {WRITE_OP: 6_200},
}


def patterns(classes: Mapping[str, TraceClasses], remote: Sequence[str]) -> dict[str, Measure]:
    """Returns what the detector finds in each trace, by name; `remote`: those without inference on the device."""
    shares = {
        f"{name}.{op}": sum(row.size_bytes for row in classes[name].rows if row.kind == LOOP and row.op == op)
        / BLOCK_BYTES
        / blocks
        for name, loops in LOOP_BLOCKS.items()
        for op, blocks in loops.items()
    }
    whole = sum(0.95 <= share <= 1.1 for share in shares.values()) / len(shares)
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    traits = {name: sorted({row.kind for row in classes[name].rows}) for name in ON_DEVICE}
    have = sum(set(found) == {SEQ, LOOP, HOT} for found in traits.values())
    totals = {name: classes[name].totals for name in remote}
    values = {f"{name}.once_share": total.once_share for name, total in totals.items()}
    values |= {f"{name}.loop_share": total.loop_share for name, total in totals.items()}
    values["most_in_loops"] = max(total.loop_share for total in totals.values())
    values["least_once"] = min(total.once_share for total in totals.values())
    said = ", ".join(f"{name} {total.once_share:.0%} and {total.loop_share:.0%}" for name, total in totals.items())
    return {
        "loops-detected": Measure(
            f"blocks found in loops, against those in the paper's text: {told}", shares | {"share_of_loops": whole}
        ),
        "three-traits": Measure(
            ", ".join(f"{name}: {' '.join(found)}" for name, found in traits.items()),
            {**{name: float(len(found)) for name, found in traits.items()}, "apps": have},
        ),
        "remote-has-no-loops": Measure(f"share of accesses once and in loops: {said}", values),
    }


# A loop of N blocks and a cache of S (section 4.1)

BLOCKS = 1000
PASSES, SETTLED = 220, 200  # the last ones count: without bypass no policy can hit more than N (S-1)/(N-1) for long
LOOP_SIZES = (100, 250, 500, 750, 900)


def hits_of_loops() -> dict[str, dict[int, float]]:
    """Returns the mean hits per settled pass over a loop that nothing else disturbs, by policy and blocks of cache."""
    first, count = np.zeros(PASSES, np.int64), np.full(PASSES, BLOCKS, np.int64)
    return {
        policy: {
            size: float(policy_class(policy)(size, BLOCKS).replay(first, count)[-SETTLED:].mean()) for size in LOOP_SIZES
        }
        for policy in POLICIES
    }


def loop_hits(hits: Mapping[int, float]) -> Measure:
    """Measures how many hits fewer than the cache has blocks a pass has at worst, and at which sizes it has none."""
    words = f"hits per pass, N = {BLOCKS}: " + ", ".join(f"S = {size}: {value:.4g}" for size, value in hits.items())
    values = {f"S={size}": value for size, value in hits.items()}
    values["missing"] = max(size - value for size, value in hits.items())
    values["share_of_sizes"] = sum(value == 0 for value in hits.values()) / len(hits)
    return Measure(words, values)


def lecar_costs_more(ns_per_block: Mapping[str, float], aware: str) -> Measure:
    """Measures how many times as long as `aware` LeCaR takes per block."""
    ratio = ns_per_block["lecar"] / ns_per_block[aware]
    words = f"LeCaR {ns_per_block['lecar']:.0f} ns per block, this policy {ns_per_block[aware]:.0f} ns: {ratio:.1f} times"
    return Measure(words, dict(ns_per_block) | {"ratio": ratio})


# Hardware: section 4.2, and formula (1) of section 4.1

# What the paper says, in bytes: the right-hand side of every comparison here. Section 4.2 unless noted.
WATCH_LOOP, PHONE_LOOPS = 70 * MB, (356 * MB, 612 * MB)
NOTES_LOOP, TRANSLATE_LOOP, LARGE_WEIGHTS = 60 * MB, 2 * MB, 500 * MB
NOTES_READS = 15_000  # 3.1: write loop 10,000-15,000, read loop 15,000-25,000
PARAMETERS = (10**9, 3 * 10**9)
FEWEST_BITS = 2  # per weight: below it no quantisation in use leaves a model of such a size usable


def setting_of(device: DeviceClass) -> SizingParameters:
    """Returns the setting of formula (1) for a device of the paper, with the paper's T."""
    return SizingParameters(device.bandwidth, PAPER.period_ns, device.hot_bytes)


def _off(ours: float, said: float) -> dict[str, float]:
    return {"off_bytes": abs(ours - said), "off_share": abs(ours - said) / said}


def hardware(
    watch: DeviceClass = WATCH,
    phone: DeviceClass = PHONE,
    notes_blocks: tuple[int, int] = (10_000, 25_000),
    example: tuple[int, Fraction] = (10, Fraction(5, 2)),
) -> dict[str, Measure]:
    """Returns what is claimed of device classes, AI Notes' loops (first and last block), a loop and BW x T in blocks."""
    on_watch, on_phone = setting_of(watch), setting_of(phone)
    loop = largest_loop(watch.cache_bytes, on_watch)
    loops = [largest_loop(size, on_phone) for size in (phone.least_cache_bytes, phone.cache_bytes)]
    agreeing = sum(abs(ours - said) <= MB / 2 for ours, said in zip(loops, PHONE_LOOPS, strict=True))
    needs = [need(size, on_watch).cache_bytes for size in (NOTES_LOOP, TRANSLATE_LOOP)]
    first, last = notes_blocks
    size, reads = (last - first) * BLOCK_BYTES, (last - NOTES_READS) * BLOCK_BYTES
    large = need(LARGE_WEIGHTS, on_watch).cache_bytes
    bits = [8 * loops[1] / count for count in PARAMETERS]
    cases = {
        "watch": (on_watch, watch.cache_bytes),
        "phone, 256 MB": (on_phone, phone.least_cache_bytes),
        "phone, 512 MB": (on_phone, phone.cache_bytes),
    }
    changes = {name: change_of_loop(cache, setting) for name, (setting, cache) in cases.items()}
    spread = f"{PAPER.period_changes[0]:+.0%} to {PAPER.period_changes[-1]:+.0%}"
    n, bandwidth = (Fraction(value, BLOCK_BYTES) for value in (WATCH_LOOP, on_watch.bandwidth))
    printed = float(n * bandwidth * Fraction(on_watch.period_ns, SECOND_NS) * BLOCK_BYTES)
    read, said = WATCH_LOOP - on_watch.staged_bytes, watch.cache_bytes - watch.hot_bytes
    blocks, staged = example
    floor, enough = int(blocks - staged), blocks_needed(blocks, staged)
    late = float(blocks - floor - staged)
    return {
        "watch-loop": Measure(f"{loop / MB:g} MB", {"loop_bytes": loop, **_off(loop, WATCH_LOOP)}),
        "phone-loops": Measure(
            " to ".join(f"{one / MB:g} MB" for one in loops),
            {"least_bytes": loops[0], "most_bytes": loops[1], "agreeing": agreeing},
        ),
        "apps-fit": Measure(
            f"they need {needs[0] / MB:g} MB and {needs[1] / MB:g} MB of cache, {watch.cache_bytes / MB:g} MB are there",
            {"notes_bytes": needs[0], "translate_bytes": needs[1], "fitting": sum(x <= watch.cache_bytes for x in needs)},
        ),
        "notes-loop-size": Measure(
            f"blocks {first:,} to {last:,} (section 3.1) are {size / MB:.1f} MB; without the write loop {reads / MB:.1f} MB",
            {
                "loop_bytes": size,
                "read_loop_bytes": reads,
                "off_share": abs(size - NOTES_LOOP) / NOTES_LOOP,
                "read_off_share": abs(reads - NOTES_LOOP) / NOTES_LOOP,
            },
        ),
        "large-does-not-fit": Measure(
            f"500 MB need {large / MB:g} MB of cache, {large / watch.cache_bytes:.1f} times the {watch.title}'s",
            {"cache_bytes": large, "watch_bytes": watch.cache_bytes},
        ),
        "parameters": Measure(
            f"{loops[1] / MB:g} MB leave {bits[0]:.1f} bits per weight at 1 billion, {bits[1]:.1f} at 3 billion",
            {"bits_1e9": bits[0], "bits_3e9": bits[1], "fitting": sum(each >= FEWEST_BITS for each in bits)},
        ),
        "insensitive-to-t": Measure(
            f"largest loop at T {spread}: " + ", ".join(f"{name} ±{change:.1%}" for name, change in changes.items()),
            changes | {"insensitive": sum(change <= 0.05 for change in changes.values())},
        ),
        "sign-of-formula": Measure(
            f"the example's N = 70 MB: N × BW × T is {printed / 10**9:,.0f} GB, N − BW × T is {read / MB:g} MB; "
            f"the example itself has S = {said / MB:g} MB",
            {"product_bytes": printed, "difference_bytes": float(read), **_off(printed, said)},
        ),
        "floor-of-formula": Measure(
            f"N = {blocks}, BW × T = {float(staged):g} blocks: the floor gives S = {floor}, {late:g} blocks late; "
            f"S = {enough} has none late",
            {"floor": floor, "needed": enough, "late": late},
        ),
    }


def change_of_loop(cache_bytes: int, setting: SizingParameters) -> float:
    """Returns the largest relative change of the loop that `cache_bytes` serve, for the paper's variations of T."""
    loop = largest_loop(cache_bytes, setting)
    return max(abs(largest_loop(cache_bytes, setting.scaled(change)) / loop - 1) for change in PAPER.period_changes)


# The reproduction


def reproduce(quick: bool, tell: Tell) -> Reproduction:
    """Returns the paper recomputed. `quick`: at 10 cache sizes in place of 100."""
    paper, measured = read_paper("io-caching"), measurements("io-caching")
    traces: dict[str, Trace] = {}
    apps: dict[str, App] = {}
    steps = QUICK_STEPS if quick else STEPS
    for name, title in TITLES.items():
        tell(f"replaying {title}: {len(POLICIES)} policies at {steps} cache sizes")
        traces[name] = SHAPES[name]()
        sizes = [FootprintShare(Decimal(100 * step) / steps) for step in range(1, steps + 1)]
        apps[name] = app_of(name, title, simulate(traces[name], POLICIES, sizes))
    tell("looking for loops")
    classes = {name: classify([trace]) for name, trace in traces.items()}
    judged = judge(paper, measures(apps, classes, hits_of_loops(), measured["overhead"]["ns_per_block"]))
    told = {
        "traces": "synthetic, shaped after sections 3.1 and 3.2; the paper's own are not public",
        "latency_model": {"kind": "modelled", "source": "io_caching section 4.1", **dataclasses.asdict(FetchModel())},
        "cache_sizes_per_trace": {name: len(app.sizes_bytes) for name, app in apps.items()},
        "results": [row for app in apps.values() for row in _rows(app)],
        "classes": [{"trace": name, **dict(vars(found.totals))} for name, found in classes.items()],
        "overhead": {"kind": paper.kinds["overhead"], **measured["overhead"], "machine": measured["machine"]},
    }
    return Reproduction("io-caching", paper, judged, told, lambda: _blocks(paper, traces, apps, classes, measured))


def measures(
    apps: Apps,
    classes: Mapping[str, TraceClasses],
    hits: Mapping[str, Mapping[int, float]],
    ns_per_block: Mapping[str, float],
) -> Measures:
    """Returns what is measured of every claim, by what it is about, claim and variant."""

    def of_aware(functions: Mapping[str, Callable[[Apps, str], Measure]], data: Apps) -> dict[str, dict[str, Measure]]:
        return {name: {aware: measure(data, aware) for aware in AWARE} for name, measure in functions.items()}

    def alone(found: Mapping[str, Measure], variant: str) -> dict[str, dict[str, Measure]]:
        return {name: {variant: measure} for name, measure in found.items()}

    return {
        "figures 1 and 2": alone(patterns(classes, GROUPS["remote"]), DETECTED),
        "figure 4": of_aware(FIGURE4, apps),
        "figure 5": of_aware(FIGURE5, apps),
        "figure 5, writes fetch too": of_aware(FIGURE5, writes_fetch_too(apps)),
        "loops": {"pinned-loop": {aware: loop_hits(hits[aware]) for aware in AWARE}},
        "loops under LRU": {"lru-evicts-loops": {"lru": loop_hits(hits["lru"])}},
        "overhead": {"lecar-overhead": {aware: lecar_costs_more(ns_per_block, aware) for aware in AWARE}},
        "hardware": alone(hardware(), FORMULA),
    }


def app_of(name: str, title: str, results: Sequence[Result]) -> App:
    """Returns the results of one trace, which has every policy at the same sizes in ascending order, as arrays."""
    by_policy: dict[str, list[Result]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    sizes = np.array([result.cache_bytes for result in next(iter(by_policy.values()))], float)
    return App(
        name=name,
        title=title,
        remote=name in GROUPS["remote"],
        footprint_bytes=int(sizes[-1]),
        accesses=results[0].accesses,
        sizes_bytes=sizes,
        hit_ratio={policy: np.array([row.hit_ratio for row in rows]) for policy, rows in by_policy.items()},
        latency_s={
            policy: np.array([[latency.latency_s for latency in row.latencies] for row in rows]).T
            for policy, rows in by_policy.items()
        },
    )


def _rows(app: App) -> Iterator[dict[str, Any]]:
    for policy, ratios in app.hit_ratio.items():
        for place, (size, ratio) in enumerate(zip(app.sizes_bytes, ratios, strict=True)):
            latencies = [
                {"bw": bandwidth, "latency_s": float(app.latency_s[policy][row, place])}
                for row, bandwidth in enumerate(BANDWIDTHS)
            ]
            yield {
                "trace": app.name,
                "inference": "remote" if app.remote else "on-device",
                "footprint_bytes": app.footprint_bytes,
                "accesses": app.accesses,
                "policy": policy,
                "cache_bytes": int(size),
                "hit_ratio": float(ratio),
                "latencies": latencies,
            }


# The page


def _blocks(
    paper: Paper,
    traces: Mapping[str, Trace],
    apps: Apps,
    classes: Mapping[str, TraceClasses],
    measured: Mapping[str, Any],
) -> dict[str, list[HtmlBlock]]:
    facts, overhead = paper.facts, measured["overhead"]
    took: list[list[Cell]] = [[policy_class(name).title, ns] for name, ns in overhead["ns_per_block"].items()]
    head = f"Replay of {overhead['trace']}, half its footprint cached, one thread, median of {overhead['repeats']}"
    conditions = [
        ("paper", f"{facts['authors']}: {facts['title']}. {facts['published']}, doi:{facts['doi']}"),
        ("traces", "synthetic, from llmcache.trace.shapes with its default seeds; times invented"),
        *machine_words(measured),
        ("replayed on", f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"),
    ]
    remote = [app for app in apps.values() if app.remote]
    return {
        "Hit ratio against cache size (the paper's figure 4)": _ratios(paper, "on-device", on_device(apps)),
        "Fetch latency against cache size (the paper's figure 5)": [_latencies(paper, apps, policy) for policy in AWARE],
        "Overhead of a policy": [Table(f"{head} (measured)", ["policy", "ns per block"], took, digits=1)],
        "Remote inference: no figure of the paper's": _ratios(paper, "remote", remote),
        "Accesses (like the paper's figures 1 and 2)": [
            _accesses(apps[name], trace, classes[name]) for name, trace in traces.items()
        ],
        "Conditions": [Facts(conditions)],
    }


def _ratios(paper: Paper, name: str, apps: Sequence[App]) -> list[HtmlBlock]:
    titles = {policy: policy_class(policy).title for policy in POLICIES}
    panels = [
        Panel(app.title, [policy_line(p, title, app.sizes_bytes, app.hit_ratio[p]) for p, title in titles.items()])
        for app in apps
    ]
    means = {app.title: {policy: float(app.hit_ratio[policy].mean()) for policy in POLICIES} for app in apps}
    told = "; ".join(f"{title}: " + ", ".join(f"{p} {mean:.2f}" for p, mean in of.items()) for title, of in means.items())
    rows: list[list[Cell]] = []
    numbers: list[HtmlBlock] = []
    for app in apps:
        of = means[app.title]
        shares = [f"{of[policy] / of[BELADY]:.0%}" for policy in AWARE]
        rows.append([app.title, format_size(app.footprint_bytes), *of.values(), *shares])
        cells: list[list[Cell]] = [
            [f"{size / 1e6:.2f}", *(float(app.hit_ratio[policy][place]) for policy in POLICIES)]
            for place, size in enumerate(app.sizes_bytes)
        ]
        numbers.append(Table(f"{app.title}: hit ratio (modelled)", ["cache (MB)", *titles.values()], cells))
    many = len(apps[0].sizes_bytes)
    columns = ["application", "footprint", *titles.values(), *(f"{titles[policy]}, of Belady" for policy in AWARE)]
    head = f"Mean hit ratio over {many} sizes, {1 / many:.1%} to 100 % of the footprint (modelled)"
    shown = picture(paper, name, ratio_figure(panels, "hit ratio"), told=told)
    return [shown, Table(head, columns, rows), Fold("The numbers behind the figure", numbers)]


def _latencies(paper: Paper, apps: Apps, policy: str) -> HtmlBlock:
    model, shown = FetchModel(), on_device(apps)
    panels = [Panel(app.title, bandwidth_lines(BANDWIDTHS, app.sizes_bytes, list(app.latency_s[policy]))) for app in shown]
    ends = ((app.title, app.latency_s[policy]) for app in shown)
    told = "; ".join(f"{title} {latency[0, 0]:.2f} to {latency[-1, -1]:.2f} s" for title, latency in ends)
    missed = f"{model.setup_ns / 1000:g} µs and {model.block_bytes} bytes"
    sent = f"{model.gpu_setup_ns / 1000:g} µs and {model.request_bytes} bytes at {model.gpu_bandwidth / 1e9:g} GB/s"
    title = policy_class(policy).title
    return picture(paper, "latency", latency_figure(panels), told=told, policy=title, missed=missed, sent=sent)


def _accesses(app: App, trace: Trace, found: TraceClasses) -> HtmlBlock:
    shown = picture_of(trace, f"{app.title} (synthetic)", by_time=False, shades=shades_of(found.rows))
    return embedded(access_figure(shown, 9.5, 4.2), alt_text(shown), caption(shown, trace))
