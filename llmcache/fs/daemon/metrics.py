"""What a mount tells in OpenMetrics, made from its counters as `llmcache stats --json` has them.

Names of files are told only where they are asked for: whoever can reach the endpoint can read it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from llmcache.fs.daemon.openmetrics import Family, labels_of, render

_CLASSES = ("loop", "hot", "sequential", "paged")

# (name without llmcache_ and unit, key of the counters, what it is)
_LEVELS = (
    ("budget", "budget_bytes", "Budget of the mount."),
    ("limit", "limit_bytes", "What memory pressure leaves of the budget."),
    ("pinned", "pinned_bytes", "Kept: locked in the page cache (steer) or held by the daemon (arena)."),
    ("window", "window_bytes", "Resident but not kept: streamed, hot pages, and what is not dropped yet."),
    ("resident", "resident_bytes", "All that counts against the budget."),
    ("daemon", "daemon_bytes", "The daemon's own memory and its helper's."),
)
_COUNTERS = (
    ("requested", "requested_bytes", "Asked for by requests that reached the daemon."),
    ("storage_read", "backing_read_bytes", "Read from storage."),
    ("storage_written", "backing_write_bytes", "Written to storage."),
    ("fetched", "stored_bytes", "Fetched extents, put into the page cache."),
    ("dropped", "invalidated_bytes", "Dropped from the page cache."),
    ("refault", "refault_bytes", "Asked for again because the kernel had dropped it."),
)


def exposition(stats: dict[str, Any], mount: str, *, paths: bool) -> str:
    """Returns the text for the counters of the mount on a path; `paths`: with the loops by name of their file."""
    (mount,) = labels_of([mount])
    return render([*_levels(stats, mount), *_counters(stats, mount), *_files(stats, mount, paths)])


def _levels(stats: dict[str, Any], mount: str) -> list[Family]:
    about = Family("llmcache_mount", "info", "The mount.").add(1, mount=mount, mode=stats["mode"])
    found = [about, Family("llmcache_uptime_seconds", "gauge", "Since the mount began.", "seconds")]
    found[-1].add(float(stats["uptime_s"]), mount=mount)
    for name, key, text in _LEVELS:
        found.append(Family(f"llmcache_{name}_bytes", "gauge", text, "bytes").add(stats[key], mount=mount))
    if stats["read_bytes"]:
        ratio = Family("llmcache_byte_hit_ratio", "gauge", "Share of read bytes that came from memory.", "ratio")
        found.append(ratio.add(stats["hit_bytes"] / stats["read_bytes"], mount=mount))
    return found


def _counters(stats: dict[str, Any], mount: str) -> list[Family]:
    read = Family("llmcache_read_bytes", "counter", "Got by readers. In steer a pinned loop counts once a pass.", "bytes")
    read.add(stats["hit_bytes"], mount=mount, source="memory").add(stats["miss_bytes"], mount=mount, source="storage")
    found = [read]
    cpu = Family("llmcache_cpu_seconds", "counter", "Processor time of the daemon and its helper.", "seconds")
    found.append(cpu.add(float(stats["cpu_s"]), mount=mount))
    for name, key, text in _COUNTERS:
        found.append(Family(f"llmcache_{name}_bytes", "counter", text, "bytes").add(stats[key], mount=mount))
    ahead = Family("llmcache_prefetch_bytes", "counter", "Prefetched: in time, late, or dropped unread.", "bytes")
    waits = Family("llmcache_wait_seconds", "histogram", "How long readers waited for extents.", "seconds")
    for outcome in ("useful", "late", "wasted"):
        ahead.add(stats["prefetch"][f"{outcome}_bytes"], mount=mount, outcome=outcome)
    for reason in ("late", "demand"):
        waits.add_histogram(stats["waits"][reason], mount=mount, reason=reason)
    return [*found, ahead, waits]


def _files(stats: dict[str, Any], mount: str, paths: bool) -> list[Family]:
    classes = Counter(file["class"] for file in stats["files"])
    files = Family("llmcache_files", "gauge", "Files that the mount knows, by class.")
    for name in _CLASSES:
        files.add(classes[name], mount=mount, **{"class": name})
    return [files, *_loops(stats, mount)] if paths else [files]


def _loops(stats: dict[str, Any], mount: str) -> list[Family]:
    """One value for each file that loops; shards of a model count for its first file."""
    size = Family("llmcache_loop_bytes", "gauge", "Size of the loop.", "bytes")
    pinned = Family("llmcache_loop_pinned_bytes", "gauge", "Kept of the loop.", "bytes")
    period = Family("llmcache_loop_period_seconds", "gauge", "Usual time of a pass.", "seconds")
    passes = Family("llmcache_loop_passes", "counter", "Passes that were seen.")
    looping = [file for file in stats["files"] if file["loops"]]
    for file, label in zip(looping, labels_of([file["path"] for file in looping]), strict=True):
        for loop in file["loops"]:
            labels = {"mount": mount, "file": label}
            size.add(loop["bytes"], **labels)
            pinned.add(loop["pinned_bytes"], **labels)
            passes.add(loop["passes"], **labels)
            if loop["period_s"] is not None:
                period.add(loop["period_s"], **labels)
    return [size, pinned, period, passes]
