"""Mean hit ratios of every policy over ten cache sizes (2 to 100 % of the footprint) on the generated traces.

Nothing here is timed: the figures are the same on every machine. Traces are synthetic (`llmcache.trace.shapes`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llmcache.cache.cachesizes import AUTO
from llmcache.cache.policies import POLICIES, policy_class
from llmcache.cache.simulate import simulate
from llmcache.trace.shapes import GROUPS, SHAPES

SCHEMA = "llmcache-bench-policies/1"
OURS = "llmcache"
# Of the best possible (Belady) on loops and on hard shapes; where nothing loops, no more than this below LRU.
BELADY_SHARE = {"on_device": 0.95, "hard": 0.93}
LRU_MARGIN = {"remote": 0.005}

Ratios = dict[str, dict[str, float]]
"""Mean hit ratio by trace and policy."""


def measure(policies: Sequence[str], shapes: Sequence[str] = tuple(SHAPES)) -> Ratios:
    """Returns the mean hit ratio (0..1) of each policy on each shape over the sizes of `--cache auto`."""
    found: Ratios = {}
    for shape in shapes:
        rows = simulate(SHAPES[shape](), policies, AUTO)
        found[shape] = {name: statistics.fmean(row.hit_ratio for row in rows if row.policy == name) for name in policies}
    return found


def groups(ratios: Ratios) -> Ratios:
    """Returns the means of each group of shapes, by group and policy."""
    means: Ratios = {}
    for group, names in GROUPS.items():
        policies = ratios[names[0]]
        means[group] = {policy: statistics.fmean(ratios[name][policy] for name in names) for policy in policies}
    return means


def bars(means: Mapping[str, Mapping[str, float]]) -> list[dict[str, object]]:
    """Returns what llmcache has to reach in each group, and whether it does."""
    found: list[dict[str, object]] = []
    for group, share in BELADY_SHARE.items():
        value = means[group][OURS] / means[group]["belady"]
        found.append({"group": group, "bar": f">= {share} of Belady", "value": value, "passed": value >= share})
    for group, margin in LRU_MARGIN.items():
        value = means[group][OURS] - means[group]["lru"]
        found.append({"group": group, "bar": f">= LRU - {margin}", "value": value, "passed": value >= -margin})
    return found


def table(ratios: Ratios, means: Ratios) -> Table:
    """Returns the ratios for people."""
    policies = list(next(iter(ratios.values())))
    made = Table(title="mean hit ratio, ten sizes, 2 to 100 % of the footprint (synthetic traces, counted exactly)")
    made.add_column("trace")
    for policy in policies:
        made.add_column(policy_class(policy).title, justify="right")
    for index, (name, row) in enumerate({**ratios, **means}.items()):
        made.add_row(name, *(f"{row[policy]:.3f}" for policy in policies), end_section=index == len(ratios) - 1)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every bar is reached, 1 if not."""
    parser = argparse.ArgumentParser(prog="tools/bench/policies", description=__doc__)
    parser.add_argument("--policy", default=",".join(POLICIES), help="policies, with commas between (default: all)")
    parser.add_argument("--json", type=Path, help="write the ratios here")
    args = parser.parse_args(argv)
    ratios = measure(args.policy.split(","))
    means = groups(ratios)
    console = Console(highlight=False, width=200)
    console.print(table(ratios, means))
    asked = bars(means) if {"lru", "belady", OURS} <= set(args.policy.split(",")) else []
    for bar in asked:
        console.print(f"{bar['group']}: {bar['bar']}: {bar['value']:.4f} {'pass' if bar['passed'] else 'FAIL'}")
    if args.json:
        told = {"schema": SCHEMA, "ratios": ratios, "groups": means, "bars": asked}
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if all(bar["passed"] for bar in asked) else 1
