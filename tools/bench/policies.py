"""Simulate every policy on generated traces, with ten cache sizes (2 to 100 % of the footprint), for its mean hit ratio.

Also count the experts that a token of an MoE model misses, for generated routings: with the policy of llmcache, LRU, Belady,
and policies that learn or know the popularity of each expert.

Nothing is timed: the figures are the same on every machine. The traces are synthetic (`llmcache.papers.traces`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence

from rich.console import Console

from llmcache.cache.plan import AUTO, CacheSize
from llmcache.cache.policies import POLICIES
from llmcache.cache.simulate import simulate
from llmcache.papers.traces import GROUPS, SHAPES

from . import routing
from .mount import MOE_SHAPES, moe_shape
from .results import Document, Target, markdown

SCHEMA = "llmcache-bench-policies/3"
OURS = "llmcache"
BELADY_SHARE = {"on_device": 0.93, "hard": 0.92}  # for groups with loops
LRU_MARGIN = 0.01  # largest loss against LRU, on any trace
MOE_PERCENTS = (10, 12, 20, 30, 50, 60)  # share of all experts that fits
MOE_TOKENS, MOE_WARMUP = 200, 50
OF_THE_WAY = 0.5  # share of the gap from LRU to Belady

Ratios = dict[str, dict[str, float]]
"""Mean hit ratio by trace and policy."""


def ratios_of(policies: Sequence[str], shapes: Sequence[str] = tuple(SHAPES), sizes: Sequence[CacheSize] = AUTO) -> Ratios:
    """Return the mean hit ratio (0..1) of each policy on each shape over `sizes`, by default those of `--cache auto`."""
    found: Ratios = {}
    for shape in shapes:
        rows = simulate(SHAPES[shape](), policies, sizes)
        found[shape] = {name: statistics.fmean(row.hit_ratio for row in rows if row.policy == name) for name in policies}
    return found


def groups(ratios: Ratios) -> Ratios:
    means: Ratios = {}
    for group, names in GROUPS.items():
        policies = ratios[names[0]]
        means[group] = {policy: statistics.fmean(ratios[name][policy] for name in names) for policy in policies}
    return means


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default=",".join(POLICIES), help="comma-separated policies [all]")


def measure(args: argparse.Namespace, _console: Console) -> Iterator[Document]:
    ratios = ratios_of(args.policy.split(","))
    yield {"ratios": ratios, "groups": groups(ratios), "mixtures": list(moe_misses())}


def moe_misses() -> Iterator[Document]:
    """Yield the misses of a token for each MoE model and cache size."""
    habits = routing.Habits()
    for experts, used, slice_bytes in MOE_SHAPES:
        layers = moe_shape(experts, used, slice_bytes).layers
        routed, ranks = routing.ranked(MOE_TOKENS, layers, experts, used, habits)
        for percent in MOE_PERCENTS:
            found = routing.misses(routed, ranks, habits, percent * layers * experts // 100, MOE_WARMUP)
            yield {"experts": experts, "used": used, "layers": layers, "percent": percent, "misses": found}


def _way(row: Document, policy: str) -> float:
    """Return the share of the gap from LRU to Belady that a policy closes; 1 if there is no gap."""
    missed = row["misses"]
    gap = missed["lru"] - missed["belady"]
    return (missed["lru"] - missed[policy]) / gap if gap else 1.0


def targets(document: Document) -> list[Target]:
    """Return the targets of llmcache: a share of Belady's hit ratio in groups with loops, and LRU's on every trace."""
    ratios: Ratios = document["ratios"]
    if not {"lru", "belady", OURS} <= set(next(iter(ratios.values()))):
        return []
    found = []
    for group, share in BELADY_SHARE.items():
        value = document["groups"][group][OURS] / document["groups"][group]["belady"]
        what = f"{_words(group)} traces: hit ratio / Belady's"
        found.append(Target(f"{group}.belady", what, value, ">=", share, "modelled"))
    least = min(ratios, key=lambda name: ratios[name][OURS] - ratios[name]["lru"])
    value, what = (
        ratios[least][OURS] - ratios[least]["lru"],
        f"hit ratio minus LRU's, on the trace with the smallest gain ({_words(least)})",
    )
    found.append(Target("lru", what, value, ">=", -LRU_MARGIN, "modelled"))
    if rows := document.get("mixtures"):
        ours, learned, known = ([_way(row, policy) for row in rows] for policy in (OURS, "learned", "known"))
        most = f"learned {min(learned):.2f} to {max(learned):.2f}, known {min(known):.2f} to {max(known):.2f}"
        what = f"MoE experts: smallest share of the gap from LRU to Belady that is closed (popularity {most})"
        found.append(Target("mixtures", what, min(ours), ">=", OF_THE_WAY, "modelled"))
    return found


def _words(name: str) -> str:
    return name.replace("_", " ").replace("on device", "on-device")


def table(document: Document) -> str:
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
    deciders = ("llmcache", "learned", "known", "belady")
    means = {
        percent: [statistics.fmean(missed[name] / missed["lru"] for missed in found) for name in deciders]
        for percent, found in by_room.items()
    }
    head = ["experts that fit: misses / LRU's", "llmcache", "popularity learned", "popularity known", "belady"]
    return f"{table}\n" + markdown(
        head, [[f"{percent} %", *map("{:.2f}".format, found)] for percent, found in means.items()]
    )
