"""Prompts on disk: blocks of a sequence's state, named by the model and all tokens up to their end, and shared by prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray


def common_length(first: NDArray[Any], second: NDArray[Any] | Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    length = min(len(first), len(second))
    if not length or first[0] != second[0]:
        return 0
    differ = np.flatnonzero(first[:length] != np.asarray(second[:length]))
    return int(differ[0]) if len(differ) else length


def openmetrics(rows: Iterable[tuple[str, str, float, str]]) -> str:
    """Return the counters `llmcache_prefix_NAME` as text; a row has a name, a unit, a value and a description."""
    from prometheus_client.metrics_core import CounterMetricFamily  # imported here: it loads an HTTP server
    from prometheus_client.openmetrics.exposition import generate_latest

    found = [
        CounterMetricFamily(f"llmcache_prefix_{name}", f"{text}.", value, unit=unit) for name, unit, value, text in rows
    ]
    return bytes(generate_latest(SimpleNamespace(collect=lambda: found))).decode()  # type: ignore[no-untyped-call]
