"""Counters of stored prompts in OpenMetrics text."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace


def openmetrics(rows: Iterable[tuple[str, str, float, str]]) -> str:
    """Return counters `llmcache_prefix_NAME`, each a name, a unit, a value and its description."""
    from prometheus_client.metrics_core import CounterMetricFamily  # loads an HTTP server: only where it is needed
    from prometheus_client.openmetrics.exposition import generate_latest

    found = [
        CounterMetricFamily(f"llmcache_prefix_{name}", f"{text}.", value, unit=unit) for name, unit, value, text in rows
    ]
    return bytes(generate_latest(SimpleNamespace(collect=lambda: found))).decode()  # type: ignore[no-untyped-call]
