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


def speed_table(document: dict[str, Any]) -> str:
    """The speeds and the memory of `tools/bench/simulate`."""
    lines = ["| trace | policy | M blocks/s | bar |", "|---|---|---:|---:|"]
    for one in document["speeds"]:
        bar = f"{one['bar'] / 1e6:.0f}" if one["bar"] else ""
        lines.append(f"| {one['trace']} | {one['policy']} | {one['blocks_per_s'] / 1e6:.1f} | {bar} |")
    for one in document["memory"]:
        what = f"{one['step']} {one['blocks'] / 1e9:.2g} G blocks: {one['peak_bytes'] / 2**20:.0f} MiB at most"
        lines.append(f"| {what} | | {one['blocks'] / one['seconds'] / 1e6:.1f} | |")
    return "\n".join(lines) + "\n"


def size_table(document: dict[str, Any]) -> str:
    """Where stalls begin on a throttled mount, from `tools/bench/size`."""
    head = ["mount", "storage MB/s", "T s", "S by formula (1) MB", "S on the mount MB", "difference"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for one in document["mount"]:
        cells = [
            one["sweep"]["mode"],
            f"{one['sweep']['read_bps'] / 1e6:.0f}",
            f"{one['measured']['period_s']:.3f}",
            f"{one['modelled']['stalls_begin_bytes'] / 1e6:.1f}",
            f"{one['measured']['stalls_begin_bytes'] / 1e6:.1f}",
            f"{one['difference']:+.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def trace_table(document: dict[str, Any]) -> str:
    """What tracers cost, from `tools/bench/trace`: times as long as without one."""
    sizes = sorted({one["read_bytes"] for one in document["overheads"]})
    tracers = dict.fromkeys(one["tracer"] for one in document["overheads"] if one["tracer"] != "none")
    ratios = {(one["tracer"], one["read_bytes"]): one["ratio"] for one in document["overheads"]}
    lines = [
        "| tracer | " + " | ".join(f"preads of {size // 1024} KiB" for size in sizes) + " |",
        "|---|" + "---:|" * len(sizes),
    ]
    for tracer in tracers:
        lines.append(f"| {tracer} | " + " | ".join(f"{ratios[tracer, size]:.2f}" for size in sizes) + " |")
    return "\n".join(lines) + "\n"


def edram_table(document: dict[str, Any]) -> str:
    """How long the accelerator model takes, from `tools/bench/edram`."""
    head = f"| accelerator model, {document['configurations']:,} configurations | s |"
    rows = [f"| {one['case']} | {one['median_s']:.2f} |" for one in document["cases"]]
    return "\n".join([head, "|---|---:|", *rows]) + "\n"


def pipeline_table(document: dict[str, Any]) -> str:
    """What looking ahead, the pools and near-data scoring of the KV manager do, from `tools/bench/kvpipeline`."""
    head = "measured; stream synthetic, accelerator and computational SSD emulated"
    lines = [f"| {head} | figure | bar | without |", "|---|---:|---:|---:|"]
    for one in document["parts"].values():
        without = f"{one['without']:.3g}" if "without" in one else ""
        lines.append(f"| {one['what']} | {one['figure']:.3g} | {one['bar']:g} | {without} |")
    return "\n".join(lines) + "\n"


def transformers_table(document: dict[str, Any]) -> str:
    """What SpillCache does to a model's answers, memory and time, from `tools/bench/kvtransformers`."""
    lines = ["| measured, in transformers | figure | bar |", "|---|---:|---:|"]
    for one in document["parts"].values():
        figure = one["figure"]
        shown = f"{figure:,}" if isinstance(figure, int) else f"{figure:.3g}"
        lines.append(f"| {one['what']} | {shown} | {one['sense']} {one['bar']:g} |")
    return "\n".join(lines) + "\n"


def index_table(document: dict[str, Any]) -> str:
    """Trees of keys against a scan of all, one thread each, from `tools/bench/kvindex`."""
    head = ["keys", "recall@64", "keys touched", "scan us", "tree us", "times", "auto takes"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 2) + "---|"]
    for one in document["rows"]:
        scan, tree = (1e6 * statistics.median(one["seconds"][side]) for side in ("scan", "tree"))
        cells = [
            f"{one['kind']}, {one['keys'] // 1024} Ki",
            f"{one['recall']['tree']:.3f}",
            f"{one['touched']:.1%}",
            f"{scan:.0f}",
            f"{tree:.0f}",
            f"{scan / tree:.1f}",
            one["auto"]["uses"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def kv_table(document: dict[str, Any]) -> str:
    """The kernels and the spill file of the KV spill manager, from `tools/bench/kv`; what has no bar is left out."""
    spill = document["spill"]
    kernels = [(f"{one['case']}: {one['means']}", one) for one in document["cases"] if "bar" in one]
    size = spill["fetch"]["request_bytes"] // 1024
    fetch = f"fetch of scattered {size} KiB: share of the bandwidth that plain reads of that size get"
    lines = ["| part | figure | bar |", "|---|---:|---:|"]
    for what, one in [*kernels, (fetch, spill["fetch"])]:
        lines.append(f"| {what} | {one['figure']:.2f} | {one['bar']:.2f} |")
    memory, tokens = spill["memory"], spill["tokens"] / 2**20
    lines.append(f"| {tokens:.0f} Mi tokens on disk: memory, MiB | {memory['peak_bytes'] >> 20} | {memory['bar'] >> 20} |")
    device = spill["device"]
    lines.append(f"| *emulated* device: share of the keys' bytes over the link | {device['figure']:.3f} | {device['bar']} |")
    return "\n".join(lines) + "\n"


def render(document: dict[str, Any]) -> str:
    """The table of one JSON file in Markdown; mount results come with the machine they were measured on."""
    return TABLES[document["schema"].partition("/")[0]](document)


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


TABLES = {
    "llmcache-bench-edram": edram_table,
    "llmcache-bench-kvpipeline": pipeline_table,
    "llmcache-bench-kv": kv_table,
    "llmcache-bench-kvindex": index_table,
    "llmcache-bench-kvtransformers": transformers_table,
    "llmcache-bench-mount": mount_table,
    "llmcache-bench-policies": policy_table,
    "llmcache-bench-simulate": speed_table,
    "llmcache-bench-size": size_table,
    "llmcache-bench-trace": trace_table,
}


def main() -> int:
    """Print the tables of the files named on the command line."""
    print("\n".join(render(json.loads(Path(name).read_text())) for name in sys.argv[1:]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
