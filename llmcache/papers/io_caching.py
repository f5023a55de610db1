"""Rethinking I/O Caching for Large Language Model Inference on Resource-Constrained Mobile Platforms, recomputed.

H. Kim, J. Lee, H. Bahn, Mathematics 13(22), 3689, 2025. The paper's traces are not public; ours are synthetic, modeled on
its text. Figures 4 and 5 print no numbers, so its words are judged (`io-caching.toml`). The detector gets no information
about the construction of the traces.
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

from llmcache.arrays import Doubles
from llmcache.cache.classify import READ_OP, WRITE_OP, TraceClasses, classify
from llmcache.cache.detector import HOT, LOOP, SEQ
from llmcache.cache.plan import FootprintShare
from llmcache.cache.policies import policy_class
from llmcache.cache.results import Result
from llmcache.cache.simulate import simulate
from llmcache.cache.sizing import (
    PAPER,
    PHONE,
    SECOND_NS,
    WATCH,
    FetchModel,
    SizingParameters,
    blocks_needed,
    largest_loop,
    need,
)
from llmcache.papers.judge import Ours, Paper, Values, alone, judge, read_paper
from llmcache.papers.reproduce import Progress, Reproduction, machine_words, measurements, picture
from llmcache.papers.traces import GROUPS, SHAPES
from llmcache.report.html import Cell, Facts, HtmlBlock, Table
from llmcache.report.lines import Panel, bandwidth_lines, latency_figure, policy_line, ratio_figure
from llmcache.report.plot import access_figure, alt_text, caption, picture_of, shades_of
from llmcache.report.theme import embedded
from llmcache.trace.record import Trace
from llmcache.units import BLOCK_BYTES, format_size

MB = 10**6
AWARE = ("algorithm1", "llmcache")
"""The two policies compared with the paper's "LLM-aware" one: its pseudocode as printed, and ours."""
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
"""Number of cache sizes, evenly spaced from one step to the whole footprint."""
VISIBLE = 0.005  # half a percentage point: smaller differences are invisible in a printed figure
KNEE = 500 * MB  # bytes/s
FORMULA, DETECTED = "formula (1)", "llmcache classify"


@dataclass(frozen=True)
class App:
    """An application's results by cache size (`sizes_bytes`, ascending).

    `hit_ratio`: policy -> (sizes). `latency_s`: policy -> (bandwidths x sizes), modelled for the whole trace. `remote`:
    inference runs on a server.
    """

    name: str
    title: str
    remote: bool
    footprint_bytes: int
    accesses: int
    sizes_bytes: Doubles
    hit_ratio: Mapping[str, Doubles]
    latency_s: Mapping[str, Doubles]


Apps = Mapping[str, App]


def on_device(apps: Apps, names: Sequence[str] = ON_DEVICE) -> list[App]:
    return [apps[name] for name in names]


# Hit ratios: figure 4


def higher_than_lru(apps: Apps, aware: str) -> Values:
    gains = [app.hit_ratio[aware] - app.hit_ratio["lru"] for app in on_device(apps)]
    every = np.concatenate(gains)
    share, least = float((every >= -VISIBLE).mean()), min(float(gain.mean()) for gain in gains)
    means = {"mean_gain": float(every.mean()), "worst": float(every.min()), "least_mean": least}
    return {"share_of_points": share, **means}


def lru_stands_still(apps: Apps, aware: str) -> Values:
    """Return in how many applications LRU has a long flat range, and `aware` a shorter one."""
    flat = {f"{policy}.{app.title}": flat_share(app, policy) for policy in ("lru", aware) for app in on_device(apps)}
    pairs = [(flat[f"lru.{app.title}"], flat[f"{aware}.{app.title}"]) for app in on_device(apps)]
    both = sum(lru >= 0.2 and own <= lru / 2 for lru, own in pairs)
    return flat | {"share_of_apps": both / len(pairs)}


def flat_share(app: App, policy: str) -> float:
    """Return the longest range of sizes without a visible gain, relative to the largest size.

    Sizes at which a policy has already reached its final hit ratio do not count.
    """
    ratios = app.hit_ratio[policy]
    below = int(np.count_nonzero(ratios < ratios[-1] - VISIBLE))
    longest = 0.0
    for start in range(below):
        flat = np.flatnonzero(np.maximum.accumulate(ratios[start:below]) - ratios[start] > VISIBLE)
        end = start + int(flat[0]) - 1 if len(flat) else below - 1
        longest = max(longest, float(app.sizes_bytes[end] - app.sizes_bytes[start]))
    return longest / float(app.sizes_bytes[-1])


def near_baseline(apps: Apps, aware: str) -> Values:
    """Return in how many of two applications LRU stays near its baseline while `aware` hits."""
    values: dict[str, float] = {}
    near = 0
    for app in on_device(apps, (EMBEDDER, CLASSIFICATION)):
        lru_ratios, aware_ratios = normalized(app.hit_ratio["lru"]), normalized(app.hit_ratio[aware])
        last = int(np.flatnonzero(np.maximum.accumulate(lru_ratios) <= 0.1)[-1])
        share = float(app.sizes_bytes[last]) / app.footprint_bytes
        near += share >= 0.5 and float(aware_ratios[last]) >= 0.5
        values |= {f"{app.name}.share_of_footprint": share, f"{app.name}.hit_ratio": float(app.hit_ratio[aware][last])}
    return values | {"apps": near}


def normalized(ratios: Doubles) -> Doubles:
    """Scale hit ratios from that of the smallest cache (0) to that of the largest (1); all 0 if these are equal."""
    way = float(ratios[-1] - ratios[0])
    return (ratios - ratios[0]) / way if way > 0 else np.zeros_like(ratios)


def lecar_sometimes(apps: Apps, aware: str, name: str) -> Values:
    ahead = apps[name].hit_ratio["lecar"] - apps[name].hit_ratio[aware]
    return {"share_of_sizes": float((ahead > VISIBLE).mean()), "most": float(ahead.max())}


def outperforms_lecar(apps: Apps, aware: str) -> Values:
    gain = apps[TRANSLATE].hit_ratio[aware] - apps[TRANSLATE].hit_ratio["lecar"]
    return {"mean_gain": float(gain.mean()), "share_of_sizes": float((gain >= -VISIBLE).mean())}


def higher_overall(apps: Apps, aware: str) -> Values:
    gains = {
        app.title: float((app.hit_ratio[aware] - app.hit_ratio["lecar"]).mean())
        for app in on_device(apps, (EMBEDDER, CLASSIFICATION))
    }
    return gains | {"apps": sum(gain > VISIBLE for gain in gains.values())}


def lecar_fluctuates(apps: Apps, aware: str) -> Values:
    """Return the largest drop in hit ratio between adjacent sizes, of both policies."""
    lecar, own = (
        max(0.0, *(float(-np.diff(app.hit_ratio[policy]).min()) for app in on_device(apps))) for policy in ("lecar", aware)
    )
    return {"lecar": lecar, aware: own, "loss": own, "loss_of_lecars": own / lecar if lecar else 1.0}


FIGURE4: dict[str, Callable[[Apps, str], Values]] = {
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


def latency_falls(apps: Apps, aware: str) -> Values:
    rises: dict[str, float] = {}
    for app in on_device(apps):
        latency = app.latency_s[aware]
        by_size, by_bandwidth = np.diff(latency, axis=1).max(), np.diff(latency, axis=0).max()
        rises[app.title] = max(float(by_size), float(by_bandwidth), 0.0) / float(latency.max())
    return rises | {"apps": sum(rise <= 0.01 for rise in rises.values())}


def knee_of_bandwidth(apps: Apps, aware: str) -> Values:
    values: dict[str, float] = {}
    clear = flat = 0
    knee = BANDWIDTHS.index(KNEE)
    for app in on_device(apps, BY_BANDWIDTH):
        mean = app.latency_s[aware].mean(axis=1)
        before, beyond = 1 - float(mean[knee] / mean[0]), 1 - float(mean[-1] / mean[knee])
        clear += before >= 0.2 and beyond <= 0.1
        flat += beyond <= min(0.1, before / 2)
        values |= {f"{app.name}.up_to_500": before, f"{app.name}.beyond_500": beyond}
    return values | {"apps": clear, "flat_apps": flat}


def size_counts_less(apps: Apps, aware: str) -> Values:
    """Return the size up to which more cache gains less than more bandwidth."""
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
    return values | {"apps": less, "least_share": min(shares)}


def translate_is_sensitive(apps: Apps, aware: str) -> Values:
    gains = {
        app.title: float(1 - (app.latency_s[aware][:, -1] / app.latency_s[aware][:, 0]).mean())
        for app in on_device(apps, (TRANSLATE, *BY_BANDWIDTH))
    }
    translate = apps[TRANSLATE]
    highest = gains[translate.title] > max(gain for title, gain in gains.items() if title != translate.title)
    steps_mb = np.diff(translate.sizes_bytes) / 1e6
    slow, fast = (float((-np.diff(translate.latency_s[aware][row]) / steps_mb).max()) for row in (0, -1))
    return gains | {"slow_s_per_mb": slow, "fast_s_per_mb": fast, "signs": highest + (slow > fast)}


FIGURE5: dict[str, Callable[[Apps, str], Values]] = {
    "latency-falls": latency_falls,
    "knee-of-bandwidth": knee_of_bandwidth,
    "size-counts-less": size_counts_less,
    "translate-sensitive": translate_is_sensitive,
}


def writes_fetch_too(apps: Apps) -> dict[str, App]:
    """Return `apps` with modelled latencies as if a write fetched its block and went to the GPU too.

    The paper does not specify this, and writes dominate two of its applications, so both readings are judged.
    """
    model = FetchModel()

    def of_all(app: App, ratios: Doubles) -> Doubles:
        missed = [round(app.accesses * (1 - float(ratio))) for ratio in ratios]
        return np.array([[model.latency_s(app.accesses, blocks, bw) for blocks in missed] for bw in BANDWIDTHS])

    return {
        name: replace(app, latency_s={policy: of_all(app, ratios) for policy, ratios in app.hit_ratio.items()})
        for name, app in apps.items()
    }


# Patterns: sections 3.1 to 3.3 (figures 1 and 2), detection in section 4.1

# Blocks of each application's loops, by operation. Section 3.1; for AI Translate section 4.2 (about 2 MB).
LOOP_BLOCKS: Mapping[str, Mapping[str, int]] = {
    NOTES: {READ_OP: 10_000, WRITE_OP: 5_000},
    TRANSLATE: {READ_OP: 2 * MB // BLOCK_BYTES},
    EMBEDDER: {WRITE_OP: 6_500},
    CLASSIFICATION: {WRITE_OP: 6_200},
}


def patterns(classes: Mapping[str, TraceClasses], remote: Sequence[str]) -> dict[str, Values]:
    found = {  # blocks found in loops, relative to those in the paper's text
        f"{name}.{op}": sum(row.size_bytes for row in classes[name].rows if row.kind == LOOP and row.op == op)
        / BLOCK_BYTES
        / blocks
        for name, loops in LOOP_BLOCKS.items()
        for op, blocks in loops.items()
    }
    traits = {name: {row.kind for row in classes[name].rows} for name in ON_DEVICE}
    totals = {name: classes[name].totals for name in remote}
    shares = {f"{name}.once_share": total.once_share for name, total in totals.items()}
    shares |= {f"{name}.loop_share": total.loop_share for name, total in totals.items()}
    shares["most_in_loops"] = max(total.loop_share for total in totals.values())
    shares["least_once"] = min(total.once_share for total in totals.values())
    return {
        "loops-detected": found | {"share_of_loops": sum(0.95 <= one <= 1.1 for one in found.values()) / len(found)},
        "three-traits": {
            **{name: len(kinds) for name, kinds in traits.items()},
            "apps": sum(kinds == {SEQ, LOOP, HOT} for kinds in traits.values()),
        },
        "remote-has-no-loops": shares,
    }


# A loop of N blocks and a cache of S (section 4.1)

BLOCKS = 1000
# only the last passes count: without bypass no policy can hit more than N (S-1)/(N-1) permanently
PASSES, SETTLED = 220, 200
LOOP_SIZES = (100, 250, 500, 750, 900)


def loop_hits(policy: str) -> Values:
    """Return the mean hits per settled pass over an undisturbed loop, by blocks of cache.

    `missing`: the largest shortfall of hits per pass; `share_of_sizes`: share without hits.
    """
    first, count = np.zeros(PASSES, np.int64), np.full(PASSES, BLOCKS, np.int64)
    hits = {size: float(policy_class(policy)(size, BLOCKS).replay(first, count)[-SETTLED:].mean()) for size in LOOP_SIZES}
    values = {f"S={size}": value for size, value in hits.items()}
    values["missing"] = max(size - value for size, value in hits.items())
    return values | {"share_of_sizes": sum(value == 0 for value in hits.values()) / len(hits)}


# Hardware: section 4.2, and formula (1) of section 4.1

# The paper's numbers, in bytes, for every comparison here. Section 4.2 unless noted.
WATCH_LOOP, PHONE_LOOPS = 70 * MB, (356 * MB, 612 * MB)
NOTES_LOOP, TRANSLATE_LOOP, LARGE_WEIGHTS = 60 * MB, 2 * MB, 500 * MB
NOTES_BLOCKS, NOTES_READS = (10_000, 25_000), 15_000  # 3.1: write loop 10,000-15,000, read loop 15,000-25,000
EXAMPLE = 10, Fraction(5, 2)  # a loop and BW x T, in blocks; the latter is not an integer
PARAMETERS = (10**9, 3 * 10**9)
FEWEST_BITS = 2  # per weight: below this, no quantization in use leaves a model of this size usable


def hardware() -> dict[str, Values]:
    # Settings of formula (1), with the paper's T.
    on_watch, on_phone = (SizingParameters(one.bandwidth, PAPER.period_ns, one.hot_bytes) for one in (WATCH, PHONE))
    loop = largest_loop(WATCH.cache_bytes, on_watch)
    loops = [largest_loop(size, on_phone) for size in (PHONE.least_cache_bytes, PHONE.cache_bytes)]
    needs = [need(size, on_watch).cache_bytes for size in (NOTES_LOOP, TRANSLATE_LOOP)]
    first, last = NOTES_BLOCKS
    size, reads = (last - first) * BLOCK_BYTES, (last - NOTES_READS) * BLOCK_BYTES
    bits = [8 * loops[1] / count for count in PARAMETERS]
    changes = {
        "watch": change_of_loop(WATCH.cache_bytes, on_watch),
        "phone, 256 MB": change_of_loop(PHONE.least_cache_bytes, on_phone),
        "phone, 512 MB": change_of_loop(PHONE.cache_bytes, on_phone),
    }
    n, bandwidth = (Fraction(value, BLOCK_BYTES) for value in (WATCH_LOOP, on_watch.bandwidth))
    printed = float(n * bandwidth * Fraction(on_watch.period_ns, SECOND_NS) * BLOCK_BYTES)
    blocks, staged = EXAMPLE
    floor = int(blocks - staged)
    return {
        "watch-loop": {"loop_bytes": loop, **_off(loop, WATCH_LOOP)},
        "phone-loops": {
            "least_bytes": loops[0],
            "most_bytes": loops[1],
            "agreeing": sum(abs(ours - printed) <= MB / 2 for ours, printed in zip(loops, PHONE_LOOPS, strict=True)),
        },
        "apps-fit": {
            "notes_bytes": needs[0],
            "translate_bytes": needs[1],
            "fitting": sum(size <= WATCH.cache_bytes for size in needs),
        },
        "notes-loop-size": {
            "loop_bytes": size,
            "read_loop_bytes": reads,
            "off_share": abs(size - NOTES_LOOP) / NOTES_LOOP,
            "read_off_share": abs(reads - NOTES_LOOP) / NOTES_LOOP,
        },
        "large-does-not-fit": {
            "cache_bytes": need(LARGE_WEIGHTS, on_watch).cache_bytes,
            "watch_bytes": WATCH.cache_bytes,
        },
        "parameters": {"bits_1e9": bits[0], "bits_3e9": bits[1], "fitting": sum(each >= FEWEST_BITS for each in bits)},
        "insensitive-to-t": changes | {"insensitive": sum(change <= 0.05 for change in changes.values())},
        "sign-of-formula": {
            "product_bytes": printed,
            "difference_bytes": float(WATCH_LOOP - on_watch.staged_bytes),
            **_off(printed, WATCH.cache_bytes - WATCH.hot_bytes),
        },
        "floor-of-formula": {
            "floor": floor,
            "needed": blocks_needed(blocks, staged),
            "late": float(blocks - floor - staged),
        },
    }


def _off(ours: float, printed: float) -> dict[str, float]:
    return {"off_bytes": abs(ours - printed), "off_share": abs(ours - printed) / printed}


def change_of_loop(cache_bytes: int, setting: SizingParameters) -> float:
    """Return the largest relative change of the loop size over the paper's variations of T."""
    loop = largest_loop(cache_bytes, setting)
    return max(abs(largest_loop(cache_bytes, setting.scaled(change)) / loop - 1) for change in PAPER.period_changes)


# The reproduction


def reproduce(quick: bool, progress: Progress) -> Reproduction:
    """Recompute the paper; `quick`: at 10 cache sizes instead of 100."""
    paper, measured = read_paper("io-caching"), measurements("io-caching")
    traces: dict[str, Trace] = {}
    apps: dict[str, App] = {}
    steps = QUICK_STEPS if quick else STEPS
    for name, title in TITLES.items():
        progress(f"replaying {title}: {len(POLICIES)} policies at {steps} cache sizes")
        traces[name] = SHAPES[name]()
        sizes = [FootprintShare(Decimal(100 * step) / steps) for step in range(1, steps + 1)]
        apps[name] = app_of(name, title, simulate(traces[name], POLICIES, sizes))
    progress("detecting loops")
    classes = {name: classify([trace]) for name, trace in traces.items()}
    judged = judge(paper, ours(apps, classes, measured["overhead"]["ns_per_block"]))
    contents = {
        "traces": "synthetic, shaped after sections 3.1 and 3.2; those of the paper are not public",
        "latency_model": {"kind": "modelled", "source": "io_caching section 4.1", **dataclasses.asdict(FetchModel())},
        "cache_sizes_per_trace": {name: len(app.sizes_bytes) for name, app in apps.items()},
        "results": [row for app in apps.values() for row in _rows(app)],
        "classes": [{"trace": name, **dict(vars(found.totals))} for name, found in classes.items()],
        "overhead": {"kind": paper.kinds["overhead"], **measured["overhead"], "machine": measured["machine"]},
    }
    return Reproduction("io-caching", paper, judged, contents, lambda: _blocks(paper, traces, apps, classes, measured))


def ours(apps: Apps, classes: Mapping[str, TraceClasses], ns_per_block: Values) -> Ours:
    def of_aware(functions: Mapping[str, Callable[[Apps, str], Values]], data: Apps) -> dict[str, dict[str, Values]]:
        return {name: {aware: function(data, aware) for aware in AWARE} for name, function in functions.items()}

    taken = {f"{policy}_ns": ns for policy, ns in ns_per_block.items()}
    costs = {aware: {**taken, "ratio": ns_per_block["lecar"] / ns_per_block[aware]} for aware in AWARE}
    return {
        "figures 1 and 2": alone(DETECTED, patterns(classes, GROUPS["remote"])),
        "figure 4": of_aware(FIGURE4, apps),
        "figure 5": of_aware(FIGURE5, apps),
        "figure 5, writes fetch too": of_aware(FIGURE5, writes_fetch_too(apps)),
        "loops": {"pinned-loop": {aware: loop_hits(aware) for aware in AWARE}},
        "loops under LRU": {"lru-evicts-loops": {"lru": loop_hits("lru")}},
        "overhead": {"lecar-overhead": costs},
        "hardware": alone(FORMULA, hardware()),
    }


def app_of(name: str, title: str, results: Sequence[Result]) -> App:
    """Return the results of one trace; every policy has the same ascending sizes."""
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
    head = f"Replay of {overhead['trace']} with half its footprint cached, one thread, median of {overhead['repeats']} runs"
    conditions = [
        ("paper", f"{facts['authors']}: {facts['title']}. {facts['published']}, doi:{facts['doi']}"),
        ("traces", "synthetic, from llmcache.papers.traces with its default seeds; the times are invented"),
        *machine_words(measured),
        ("replayed on", f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"),
    ]
    remote = [app for app in apps.values() if app.remote]
    return {
        "Hit ratio over cache size (figure 4)": _ratios(paper, "on-device", on_device(apps)),
        "Fetch latency over cache size (figure 5)": [_latencies(paper, apps, policy) for policy in AWARE],
        "Overhead of the policies": [Table(f"{head} (measured)", ["policy", "ns per block"], took, digits=1)],
        "Remote inference (not in the paper)": _ratios(paper, "remote", remote),
        "Accesses (as in figures 1 and 2)": [_accesses(apps[name], trace, classes[name]) for name, trace in traces.items()],
        "Conditions": [Facts(conditions)],
    }


def _ratios(paper: Paper, name: str, apps: Sequence[App]) -> list[HtmlBlock]:
    titles = {policy: policy_class(policy).title for policy in POLICIES}
    panels = [
        Panel(app.title, [policy_line(p, title, app.sizes_bytes, app.hit_ratio[p]) for p, title in titles.items()])
        for app in apps
    ]
    means = {app.title: {policy: float(app.hit_ratio[policy].mean()) for policy in POLICIES} for app in apps}
    means_text = "; ".join(
        f"{title}: " + ", ".join(f"{p} {mean:.2f}" for p, mean in by_policy.items()) for title, by_policy in means.items()
    )
    rows: list[list[Cell]] = []
    for app in apps:
        by_policy = means[app.title]
        shares = [f"{by_policy[policy] / by_policy[BELADY]:.0%}" for policy in AWARE]
        rows.append([app.title, format_size(app.footprint_bytes), *by_policy.values(), *shares])
    many = len(apps[0].sizes_bytes)
    columns = ["application", "footprint", *titles.values(), *(f"{titles[policy]} / Belady" for policy in AWARE)]
    head = f"Mean hit ratio over {many} sizes from {1 / many:.1%} to 100 % of the footprint (modelled)"
    return [picture(paper, name, ratio_figure(panels, "hit ratio"), values=means_text), Table(head, columns, rows)]


def _latencies(paper: Paper, apps: Apps, policy: str) -> HtmlBlock:
    model, shown = FetchModel(), on_device(apps)
    panels = [Panel(app.title, bandwidth_lines(BANDWIDTHS, app.sizes_bytes, list(app.latency_s[policy]))) for app in shown]
    ends = ((app.title, app.latency_s[policy]) for app in shown)
    ends_text = "; ".join(f"{title} {latency[0, 0]:.2f} to {latency[-1, -1]:.2f} s" for title, latency in ends)
    missed = f"{model.setup_ns / 1000:g} µs and {model.block_bytes} bytes"
    sent = f"{model.gpu_setup_ns / 1000:g} µs and {model.request_bytes} bytes at {model.gpu_bandwidth / 1e9:g} GB/s"
    title = policy_class(policy).title
    return picture(paper, "latency", latency_figure(panels), values=ends_text, policy=title, missed=missed, sent=sent)


def _accesses(app: App, trace: Trace, found: TraceClasses) -> HtmlBlock:
    shown = picture_of(trace, f"{app.title} (synthetic)", by_time=False, shades=shades_of(found.rows))
    return embedded(access_figure(shown, 9.5, 4.2), alt_text(shown), caption(shown, trace))
