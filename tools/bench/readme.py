"""The README's result tables from the JSON of the benchmarks: `python -m tools.bench.readme RESULTS.json…`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

LABELS = {"a": "larger than memory", "b": "everything fits", "c": "one cold pass", "d": "readers", "e": "loop size"}


def seconds(result: dict[str, Any], side: str) -> float:
    """Median of the measured steps of one side (s), over all repeats and clients."""
    runs = [run for run in result["runs"] if run["side"] == side]
    steps = [step for run in runs for client in run["clients"] for step in client["steps"][result["warmup"] :]]
    return statistics.median(float(step["seconds"]) for step in steps)


def megabytes(result: dict[str, Any], side: str) -> float:
    """Median over the repeats of what one step of one client read from storage (MB)."""
    each: list[float] = []
    for run in (run for run in result["runs"] if run["side"] == side):
        if len(run["clients"]) == 1:
            steps = run["clients"][0]["steps"][result["warmup"] :]
            each.append(statistics.median(step["storage_bytes"] for step in steps))
        else:
            each.append(run["usage"]["read_bytes"] / sum(len(client["steps"]) for client in run["clients"]))
    return statistics.median(each) / 1e6


def row(result: dict[str, Any]) -> str:
    """One line of the table."""
    kernel, mount = seconds(result, "kernel"), seconds(result, "mount")
    bounded = result["case"] in "ade"
    cells = [
        f"{LABELS[result['case']]}: {result['name']}",
        f"{result['loop_bytes'] / 1e6:.0f} / {result['cache_bytes'] / 1e6:.0f}",
        f"{kernel:.3f}",
        f"{mount:.3f}",
        f"{megabytes(result, 'kernel'):.0f}",
        f"{megabytes(result, 'mount'):.0f}",
        f"{result['bound_s']:.3f}" if bounded else "",
        f"{kernel / mount:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def policy_table(document: dict[str, Any]) -> str:
    """The mean hit ratios of `tools/bench/policies`, by group of traces."""
    groups = document["groups"]
    policies = [name for name in groups["on_device"] if name != "llmcachefs"]  # that one works on extents, not on blocks
    lines = ["| traces | " + " | ".join(policies) + " |", "|---|" + "---:|" * len(policies)]
    for group, means in groups.items():
        best = max(means[name] for name in policies if name != "belady")
        cells = [f"**{means[name]:.3f}**" if means[name] == best else f"{means[name]:.3f}" for name in policies]
        lines.append(f"| {group.replace('_', '-')} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def render(document: dict[str, Any]) -> str:
    """The table of one JSON file in Markdown; mount results come with the machine they were measured on."""
    return policy_table(document) if document["schema"].startswith("llmcache-bench-policies/") else mount_table(document)


def mount_table(document: dict[str, Any]) -> str:
    """The results of `tools/bench/mount`."""
    machine = document["machine"]
    head = ["case", "loop / cache MB", "page cache s", "llmcachefs s", "page cache MB", "llmcachefs MB", "bound s", "times"]
    lines = [
        f"Machine: {machine['cpu']}, {machine['cpus']} processors, {machine['memory_bytes'] / 1e9:.0f} GB, "
        f"Linux {machine['kernel']}, device {machine['device']['name']}; "
        f"{', '.join(f'{name} {version}' for name, version in machine['versions'].items() if name != 'llmcache-toolkit')}.",
        "",
        "| " + " | ".join(head) + " |",
        "|---|" + "---:|" * (len(head) - 1),
    ]
    return "\n".join(lines + [row(result) for result in document["results"]]) + "\n"


def main() -> int:
    """Print the tables of the files named on the command line."""
    print("\n".join(render(json.loads(Path(name).read_text())) for name in sys.argv[1:]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
