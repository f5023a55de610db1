"""Minimal counters, heat and layers of a mount for the tests of `llmcache top` and of the metrics."""

from __future__ import annotations

from typing import Any

from llmcache.mount.state.state import WaitHistogram
from llmcache.mount.stats import LayerHeat, MountStats, from_json

MB = 1_000_000


def waits(*waited_ns: int) -> dict[str, Any]:
    """Return the histogram of these waits."""
    found = WaitHistogram()
    for each in waited_ns:
        found.add(each)
    return found.as_dict()


def loop(pinned_mb: int = 60, **more: Any) -> dict[str, Any]:
    """Return a loop of 100 MB with one reader in its middle."""
    facts: dict[str, Any] = {"bytes": 100 * MB, "period_s": 0.5, "pinned_bytes": pinned_mb * MB, "window_bytes": 10 * MB}
    facts |= {"passes": 12, "guessed": False, "readers": [0.5], "unused_bytes": 0}
    return facts | {"left": False, "steered_pass_bytes": None, "lru_pass_bytes": None} | more


def file(path: str, *loops: dict[str, Any], size_mb: int = 100) -> dict[str, Any]:
    """Return the counters of one file."""
    kind = "loop" if loops else "hot"
    return {"path": path, "size_bytes": size_mb * MB, "class": kind, "open": True, "loops": list(loops)}


def stats(uptime_s: float = 100.0, **more: Any) -> dict[str, Any]:
    """Return the reply to {"op": "stats"} after 1000 MB of reads, 400 MB of which came from storage."""
    facts: dict[str, Any] = {
        "schema": "llmcache.stats/1",
        "mode": "steer",
        "uptime_s": uptime_s,
        "budget_bytes": 100 * MB,
        "limit_bytes": 100 * MB,
        "pinned_bytes": 60 * MB,
        "window_bytes": 15 * MB,
        "pages_bytes": 5 * MB,
        "resident_bytes": 75 * MB,
        "daemon_bytes": 22 * MB,
        "read_bytes": 1000 * MB,
        "hit_bytes": 600 * MB,
        "miss_bytes": 400 * MB,
        "requested_bytes": 420 * MB,
        "backing_read_bytes": 400 * MB,
        "backing_write_bytes": 0,
        "client_read_bytes": 0,
        "stored_bytes": 390 * MB,
        "invalidated_bytes": 380 * MB,
        "refault_bytes": 0,
        "cpu_s": 1.5,
        "prefetch": {"useful_bytes": 300 * MB, "late_bytes": 90 * MB, "wasted_bytes": 10 * MB},
        "waits": {"late": waits(2_000_000, 2_500_000, 20_000_000), "demand": waits(5_000_000)},
        "helper_pid": 7,
        "metrics": None,
        "files": [file("/model.gguf", loop()), file("/tokens.json", size_mb=1)],
    }
    return facts | more


def cells(digit: str = "0", **more: str) -> dict[str, str]:
    """Return the strips of 16 cells, each pinned to `digit` ninths."""
    return {"pinned": digit * 16, "window": "0" * 16, "pages": "0" * 16, "cold": "0" * 16} | more


def layer(name: str, size_mb: int = 20, pinned_mb: int = 10, **more: Any) -> dict[str, Any]:
    """Return a layer of the heat map whose first half is pinned."""
    facts = {"name": name, "tensors": 9, "bytes": size_mb * MB, "pinned_bytes": pinned_mb * MB, "window_bytes": 0}
    facts |= {"pages_bytes": 0, "streamed_bytes": (size_mb - pinned_mb) * MB, "cold_bytes": 0, "age_s": 0.2, "experts": None}
    return facts | {"cells": cells(pinned="9" * 8 + "0" * 8)} | more


def heat(*layers: dict[str, Any], path: str = "/model.gguf", left_out_files: int = 0) -> dict[str, Any]:
    """Return the reply to {"op": "heat"} for one file."""
    files = [{"path": path, "size_bytes": 100 * MB, "extent_bytes": 1 << 20, "layers": list(layers), "left_out_layers": 0}]
    return {"schema": "llmcache.heat/1", "mode": "steer", "files": files, "left_out_files": left_out_files}


def as_layer(facts: dict[str, Any]) -> LayerHeat:
    return from_json(LayerHeat, facts)


def as_stats(facts: dict[str, Any]) -> MountStats:
    return from_json(MountStats, facts)
