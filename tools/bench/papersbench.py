"""What issues ask of the papers' claims: the figures of `llmcache reproduce` that have a bar. The times are *modelled*.

With --measure, what the report says is measured is measured anew first, and saved in `llmcache/papers`.

The speed-ups are those of the paper's own machine and reading; the page of `llmcache reproduce hillinfer` has the other
readings, and says by how much each is missed and why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from . import machine, results
from .bars import Bar, exit_code, with_bars
from .bars import table as bar_table
from .papermeasures import MEASURES, save
from .signals import one_interrupt

SCHEMA = "llmcache-bench-papers/1"
COMMAND = "llmcache reproduce hillinfer"
ROOT = Path(__file__).resolve().parents[2]
READING = "sizes"
CLAIMS = {"speed-up-range": READING, "order": READING, "comparable-accuracy": "hillinfer"}
"""Claim and the finding of it that is judged."""
ALPHA_LOSS = 0.01


def measure(paper: str) -> dict[str, Any]:
    """Return the claims with a bar as `llmcache reproduce` tells them: verdict, words and values of each finding."""
    command = [sys.executable, "-m", "llmcache", "reproduce", paper, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    claims = {claim["name"]: claim["findings"] for claim in json.loads(done.stdout)["claims"] if claim["name"] in CLAIMS}
    return {name: claims[name] for name in CLAIMS}


def bars(told: dict[str, Any]) -> list[Bar]:
    """Return the bars: speed-ups and order (modelled), answers with a fifth of the tokens (measured)."""
    found = {name: told["claims"][name][finding]["values"] for name, finding in CLAIMS.items()}
    ranged = "speed-ups over four baselines from 4.21 to 8.56, on the paper's machine: share of the points"
    order = "baselines in the paper's order, on the paper's machine: share of the points"
    lost = found["comparable-accuracy"]["full"] - found["comparable-accuracy"]["at_0.2"]
    return [
        Bar(5, "range", ranged, found["speed-up-range"]["share_in_range"], ">=", 1, COMMAND, kind="modelled"),
        Bar(5, "order", order, found["order"]["share"], ">=", 1, COMMAND, kind="modelled"),
        Bar(5, "alpha", "right answers lost at alpha 0.2, recall model", lost, "<=", ALPHA_LOSS, COMMAND),
    ]


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every bar is reached, 1 if not."""
    parser = argparse.ArgumentParser(prog="tools/bench/papers", description=__doc__)
    parser.add_argument("--measure", nargs="*", choices=list(MEASURES), help="measure first: these papers, or all")
    parser.add_argument("--quick", action="store_true", help="measure less")
    parser.add_argument("--json", type=Path, help="write the claims here")
    args = parser.parse_args(argv)
    with one_interrupt():
        if args.measure is not None:
            for name in args.measure or MEASURES:
                save(name, args.quick, lambda what: print(what, file=sys.stderr))
        told = {"schema": SCHEMA, "machine": machine.describe(ROOT), "claims": measure("hillinfer")}
    judged = bars(told)
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(bar_table(judged))
    if args.json:
        results.write(args.json, with_bars(told, judged))
    return exit_code(judged)
