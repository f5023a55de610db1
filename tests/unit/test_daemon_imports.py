"""The daemon loads nothing large: its memory is beside the budget, and a mount starts in a moment."""

from __future__ import annotations

import subprocess
import sys

LARGE = {"numpy", "numba", "pyarrow", "matplotlib", "distributed", "scipy", "pandas"}
MODULES = [
    "llmcache.cli.mount",
    "llmcache.fs.client.mount",
    "llmcache.fs.daemon.daemon",
    "llmcache.fs.engine.engine",
    "llmcache.fs.daemon.controlserver",
    "llmcache.fs.engine.warmup",
    "llmcache.fs.daemon.openmetrics",
    "llmcache.fs.engine.report",
    "llmcache.fs.client.settings",
    "llmcache.fs.daemon.logs",
    "llmcache.fs.daemon.accesslog",
    "llmcache.cache.steering",
    "llmcache.cache.loops",
    "llmcache.cache.detector",
]


def test_it_loads_nothing_large() -> None:
    code = f"import sys, {', '.join(MODULES)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not LARGE & set(result.stdout.split())
