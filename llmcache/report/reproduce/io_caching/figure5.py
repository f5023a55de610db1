"""The claims about fetch latency: figure 5 of io_caching and the text of section 4.1 that goes with it. All modelled."""

from __future__ import annotations

import numpy as np

from llmcache.report.claims import Claim, Finding, graded
from llmcache.report.reproduce.io_caching.evidence import (
    AWARE,
    CLASSIFICATION,
    EMBEDDER,
    NOTES,
    TRANSLATE,
    App,
    Evidence,
    Values,
)

# Words of the paper as thresholds; the rule of each claim tells them.
TOLERANCE = 0.01  # of the largest latency: a rise that a figure does not show
NEGLIGIBLE = 0.10  # gained by a step of bandwidth
CLEAR = 0.20  # gained by all steps below it
KNEE = 500_000_000  # bytes/s
SECTION = "4.1"
BY_BANDWIDTH = (NOTES, EMBEDDER, CLASSIFICATION)


def latency_falls(evidence: Evidence, aware: str) -> Finding:
    """Whether latency falls, for every application, with more cache and with more bandwidth."""
    rises: dict[str, float] = {}
    for app in evidence.on_device():
        latency = app.latency_s[aware]
        by_size, by_bandwidth = np.diff(latency, axis=1).max(), np.diff(latency, axis=0).max()
        rises[app.title] = max(float(by_size), float(by_bandwidth), 0.0) / float(latency.max())
    falls = [title for title, rise in rises.items() if rise <= TOLERANCE]
    worst = max(rises, key=lambda title: rises[title])
    ours = f"falls in {len(falls)} of {len(rises)}; largest rise from one step to the next {rises[worst]:.1%} ({worst})"
    return Finding(graded(len(falls) == len(rises), bool(falls)), ours, rises)


def knee_of_bandwidth(evidence: Evidence, aware: str) -> Finding:
    """Whether latency gains clearly up to 500 MB/s and hardly beyond: the three applications the paper names."""
    told: list[str] = []
    values: dict[str, float] = {}
    held = partly = 0
    knee = evidence.bandwidths.index(KNEE)
    for app in evidence.on_device(BY_BANDWIDTH):
        mean = app.latency_s[aware].mean(axis=1)
        before, beyond = 1 - float(mean[knee] / mean[0]), 1 - float(mean[-1] / mean[knee])
        held += before >= CLEAR and beyond <= NEGLIGIBLE
        partly += beyond <= min(NEGLIGIBLE, before / 2)
        told.append(f"{app.title} {before:.0%} less, then {beyond:.0%}")
        values |= {f"{app.name}.up_to_500": before, f"{app.name}.beyond_500": beyond}
    slowest, fastest = evidence.bandwidths[0] / 1e6, evidence.bandwidths[-1] / 1e6
    ours = f"from {slowest:g} to 500 MB/s, then to {fastest:g} MB/s: " + ", ".join(told)
    return Finding(graded(held == 3, partly == 3), ours, values)


def size_counts_less(evidence: Evidence, aware: str) -> Finding:
    """Whether more cache gains less than more bandwidth does: the three applications the paper names."""
    told: list[str] = []
    values: dict[str, float] = {}
    for app in evidence.on_device(BY_BANDWIDTH):
        of_bandwidth = gain_of_bandwidth(app.latency_s[aware])
        gains = 1 - (app.latency_s[aware] / app.latency_s[aware][:, :1]).mean(axis=0)
        less = int(np.flatnonzero(np.maximum.accumulate(gains) < of_bandwidth)[-1])
        values[f"{app.name}.share_of_footprint"] = float(app.sizes_bytes[less]) / app.footprint_bytes
        values[f"{app.name}.gain_of_bandwidth"] = of_bandwidth
        values[f"{app.name}.gain_of_size"] = float(gains[-1])
        limit = f"less than bandwidth up to {app.at(less)}"
        told.append(f"{app.title}: bandwidth {of_bandwidth:.0%}, the largest cache {gains[-1]:.0%} ({limit})")
    shares = [value for name, value in values.items() if name.endswith("share_of_footprint")]
    whole = all(values[f"{app}.gain_of_size"] < values[f"{app}.gain_of_bandwidth"] for app in BY_BANDWIDTH)
    return Finding(graded(whole, min(shares) >= 0.5), "latency saved by " + "; ".join(told), values)


def gain_of_bandwidth(latency: Values) -> float:
    """Returns the share of latency (bandwidths x sizes) that the fastest storage saves against the slowest."""
    return float(1 - (latency[-1] / latency[0]).mean())


def gain_of_size(latency: Values) -> float:
    """Returns the share of latency (bandwidths x sizes) that the largest cache saves against the smallest."""
    return float(1 - (latency[:, -1] / latency[:, 0]).mean())


def translate_is_sensitive(evidence: Evidence, aware: str) -> Finding:
    """Whether AI Translate gains more from cache than the others do, and most in seconds where storage is slow."""
    apps = evidence.on_device((TRANSLATE, *BY_BANDWIDTH))
    gains = {app.title: gain_of_size(app.latency_s[aware]) for app in apps}
    translate = apps[0]
    highest = gains[translate.title] > max(gain for title, gain in gains.items() if title != translate.title)
    slow, fast = (_steepest(translate, aware, row) for row in (0, -1))
    ours = "latency saved by the largest cache: " + ", ".join(f"{title} {gain:.0%}" for title, gain in gains.items())
    ours += f"; steepest fall in AI Translate {slow:.2f} s/MB at {evidence.bandwidths[0] / 1e6:g} MB/s, {fast:.2f} s/MB at "
    ours += f"{evidence.bandwidths[-1] / 1e6:g} MB/s"
    verdict = graded(highest and slow > fast, highest or slow > fast)
    return Finding(verdict, ours, gains | {"slow_s_per_mb": slow, "fast_s_per_mb": fast})


def _steepest(app: App, policy: str, row: int) -> float:
    """Returns the largest fall of latency between two sizes, in s per MB of cache, at one bandwidth."""
    falls = -np.diff(app.latency_s[policy][row]) / (np.diff(app.sizes_bytes) / 1e6)
    return float(falls.max())


CLAIMS: tuple[Claim[Evidence], ...] = (
    Claim(
        "latency-falls",
        SECTION,
        "the latency decreases as the cache size and storage bandwidth increase",
        "in none of the four applications does a step up raise latency by more than 1 % of the highest",
        latency_falls,
        AWARE,
    ),
    Claim(
        "knee-of-bandwidth",
        SECTION,
        "clear improvement until the bandwidth reaches about 500 MB/s, beyond which additional gains are negligible",
        "mean over sizes: 20 % or more saved from 100 to 500 MB/s, 10 % or less beyond, in all three; partly: 10 % or less "
        "beyond, and less than half of what came before",
        knee_of_bandwidth,
        AWARE,
    ),
    Claim(
        "size-counts-less",
        SECTION,
        "Increasing the cache size also yields gradual improvement, but its impact is less pronounced than that of "
        "bandwidth",
        "the largest cache saves less against the smallest than 1000 MB/s against 100 MB/s, in all three; partly: so up to "
        "half the footprint",
        size_counts_less,
        AWARE,
    ),
    Claim(
        "translate-sensitive",
        SECTION,
        "AI Translate exhibits high sensitivity of latency to cache size […] latency decreases sharply with cache "
        "enlargement, especially under lower bandwidth conditions",
        "the largest cache saves a larger share than in the other three, and the steepest fall is steeper at 100 than at "
        "1000 MB/s; partly: one of both",
        translate_is_sensitive,
        AWARE,
    ),
)
