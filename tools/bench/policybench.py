"""Mean hit ratios of every policy over ten cache sizes (2 to 100 % of the footprint) on the generated traces.

Nothing here is timed: the figures are the same on every machine. Traces are synthetic (`llmcache.trace.shapes`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llmcache.cache.plan import AUTO
from llmcache.cache.policies import POLICIES, policy_class
from llmcache.cache.simulate import simulate
from llmcache.trace.shapes import GROUPS, SHAPES

from . import machine, results
from .bars import Bar, exit_code, with_bars
from .bars import table as bar_table

SCHEMA = "llmcache-bench-policies/2"
COMMAND = "tools/bench/policies"
OURS = "llmcache"
# Of the best possible (Belady), where there are loops; files of the paper's applications are so small that windows take a
# part of the smaller caches.
BELADY_SHARE = {"on_device": 0.84, "hard": 0.91}
LRU_MARGIN = 0.01  # on no trace more than this below LRU

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


def bars(ratios: Ratios) -> list[Bar]:
    """Returns what llmcache has to reach: a share of Belady's in the groups with loops, LRU's on every trace."""
    means = groups(ratios)
    found = []
    for group, share in BELADY_SHARE.items():
        value = means[group][OURS] / means[group]["belady"]
        found.append(_bar(f"{group}.belady", f"{_words(group)} traces: hit ratio, of Belady's", value, share))
    least = min(ratios, key=lambda name: ratios[name][OURS] - ratios[name]["lru"])
    value = ratios[least][OURS] - ratios[least]["lru"]
    found.append(_bar("lru", f"the trace that gains least: {_words(least)}, more than LRU", value, -LRU_MARGIN))
    return found


def _bar(name: str, what: str, value: float, least: float) -> Bar:
    return Bar(3, name, what, value, ">=", least, COMMAND, kind="modelled")


def _words(name: str) -> str:
    return name.replace("_", " ").replace("on device", "on-device")


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
    judged = bars(ratios) if {"lru", "belady", OURS} <= set(args.policy.split(",")) else []
    if judged:
        console.print(bar_table(judged))
    if args.json:
        told = {"schema": SCHEMA, "machine": machine.describe(Path.cwd()), "ratios": ratios, "groups": means}
        results.write(args.json, with_bars(told, judged))
    return exit_code(judged)
