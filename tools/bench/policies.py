"""Mean hit ratios of every policy over ten cache sizes (2 to 100 % of the footprint) on the generated traces.

Nothing here is timed: the figures are the same on every machine. Traces are synthetic (`llmcache.trace.shapes`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from llmcache.cache.plan import AUTO, CacheSize
from llmcache.cache.policies import POLICIES, policy_class
from llmcache.cache.simulate import simulate
from llmcache.trace.shapes import GROUPS, SHAPES

from .results import Bar, Document, table_of

SCHEMA = "llmcache-bench-policies/2"
OURS = "llmcache"
# Of the best possible (Belady), where there are loops; files of the paper's applications are so small that windows take a
# part of the smaller caches.
BELADY_SHARE = {"on_device": 0.84, "hard": 0.91}
LRU_MARGIN = 0.01  # on no trace more than this below LRU

Ratios = dict[str, dict[str, float]]
"""Mean hit ratio by trace and policy."""


def ratios_of(policies: Sequence[str], shapes: Sequence[str] = tuple(SHAPES), sizes: Sequence[CacheSize] = AUTO) -> Ratios:
    """Returns the mean hit ratio (0..1) of each policy on each shape over the sizes, by default those of `--cache auto`."""
    found: Ratios = {}
    for shape in shapes:
        rows = simulate(SHAPES[shape](), policies, sizes)
        found[shape] = {name: statistics.fmean(row.hit_ratio for row in rows if row.policy == name) for name in policies}
    return found


def groups(ratios: Ratios) -> Ratios:
    """Returns the means of each group of shapes, by group and policy."""
    means: Ratios = {}
    for group, names in GROUPS.items():
        policies = ratios[names[0]]
        means[group] = {policy: statistics.fmean(ratios[name][policy] for name in names) for policy in policies}
    return means


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default=",".join(POLICIES), help="policies, with commas between (default: all)")


def measure(args: argparse.Namespace, _console: Console) -> Iterator[Document]:
    """Yields the ratios by trace and by group."""
    ratios = ratios_of(args.policy.split(","))
    yield {"ratios": ratios, "groups": groups(ratios)}


def bars(told: Document) -> list[Bar]:
    """Returns what llmcache has to reach: a share of Belady's in the groups with loops, LRU's on every trace."""
    ratios: Ratios = told["ratios"]
    if not {"lru", "belady", OURS} <= set(next(iter(ratios.values()))):
        return []
    found = []
    for group, share in BELADY_SHARE.items():
        value = told["groups"][group][OURS] / told["groups"][group]["belady"]
        what = f"{_words(group)} traces: hit ratio, of Belady's"
        found.append(Bar(f"{group}.belady", what, value, ">=", share, "modelled"))
    least = min(ratios, key=lambda name: ratios[name][OURS] - ratios[name]["lru"])
    value, what = ratios[least][OURS] - ratios[least]["lru"], f"the trace that gains least: {_words(least)}, more than LRU"
    return [*found, Bar("lru", what, value, ">=", -LRU_MARGIN, "modelled")]


def _words(name: str) -> str:
    return name.replace("_", " ").replace("on device", "on-device")


def tables(told: Document) -> Iterator[Table]:
    rows = {**told["ratios"], **told["groups"]}
    policies = list(rows["on_device"])
    title = "mean hit ratio, ten sizes, 2 to 100 % of the footprint (synthetic traces, counted exactly)"
    head = "|".join(("trace<", *(policy_class(policy).title for policy in policies)))
    yield table_of(title, head, ([name, *(f"{row[policy]:.3f}" for policy in policies)] for name, row in rows.items()))
