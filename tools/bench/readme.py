"""The README's result table from the JSON of `tools/bench/mount`: `python -m tools.bench.readme RESULTS.json`."""

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


def render(document: dict[str, Any]) -> str:
    """The table in Markdown, with the machine it was measured on."""
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
    """Print the table of the file named on the command line."""
    print(render(json.loads(Path(sys.argv[1]).read_text())), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
