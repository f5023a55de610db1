"""The bars of the mount benchmark, from the JSON of its results: what each case has to reach."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from .bars import Bar

ISSUE = 2
COLD_LIMIT_BPS = 2e9
"""A faster disk than this is not asked for."""

Result = dict[str, Any]
Judged = tuple[str, str, float, str, float]
"""Key, what it is, value, sense, limit."""


def seconds(result: Result, side: str) -> float:
    """Return the median of the measured steps of one side (s), over all repeats and clients; no number without any."""
    runs = [run for run in result["runs"] if run["side"] == side]
    steps: list[float] = [step for run in runs for client in run["seconds"] for step in client]
    return statistics.median(steps or [math.nan])


def storage_bytes(result: Result, side: str) -> float:
    """Return the median over the repeats of what one step of one client read from storage."""
    each = [run["storage_bytes_per_step"] for run in result["runs"] if run["side"] == side]
    known: list[float] = [one for one in each if one is not None]
    return statistics.median(known or [math.nan])


def bars(results: list[Result]) -> list[Bar]:
    """Return the bars of all results; the first is that nothing went wrong over the mount."""
    wrong = sum(len(result["problems"]["mount"]) for result in results)
    what = f"hangs, wrong bytes, failures over the mount, in {len(results)} cases"
    nothing = Bar(ISSUE, "problems", what, wrong, "<=", 0, "tools/bench/mount --model MODEL")
    return [nothing, *(bar for result in results for bar in judge(result))]


def judge(result: Result) -> Iterator[Bar]:
    """Yield the bars of one result."""
    slug = re.sub(r"[^a-z0-9.]+", "-", result["name"].lower()).strip("-")
    command = f"tools/bench/mount --model MODEL --only {result['case']} --match '{result['name']}'"
    for key, what, value, sense, limit in CASES[result["case"]](result):
        yield Bar(ISSUE, f"{slug}.{key}", f"{result['name']}: {what}", value, sense, limit, command)


def _over_kernel(result: Result) -> float:
    return seconds(result, "mount") / seconds(result, "kernel")


def _larger(result: Result) -> Iterator[Judged]:
    yield "bound", "time over the modelled bound", seconds(result, "mount") / result["bound_s"], "<=", 1.15
    yield "kernel", "time over the page cache's", _over_kernel(result), "<=", 0.5


def _fits(result: Result) -> Iterator[Judged]:
    limit = 0.95 if result["name"].startswith("llama") else 0.9
    speed = seconds(result, "kernel") / seconds(result, "mount")
    yield "plain", "speed, of the plain file's", speed, ">=", limit


def _cold(result: Result) -> Iterator[Judged]:
    size = result["loop_bytes"]
    measured = size / seconds(result, "direct")
    direct = COLD_LIMIT_BPS if measured > COLD_LIMIT_BPS else measured  # min() would take a limit for what is no number
    yield "direct", "bandwidth, of O_DIRECT's", size / seconds(result, "mount") / direct, ">=", 0.8


def _readers(result: Result) -> Iterator[Judged]:
    # readers at different places of the loop share the pins but not what is streamed
    bound = max(result["compute_s"], result["bound_s"] * result["clients"])
    yield "bound", "time over the modelled bound of readers apart", seconds(result, "mount") / bound, "<=", 1.15
    yield "kernel", "time over the page cache's", _over_kernel(result), "<=", 1.05


def _sizes(result: Result) -> Iterator[Judged]:
    # no cliff: near the bound, with an allowance of a tenth of a full read for loops that nearly fit
    allowed = result["bound_s"] + 0.1 * result["loop_bytes"] / (result["read_bps"] or 1e9)
    yield "bound", "time over (modelled bound + 10 % of a full read)", seconds(result, "mount") / allowed, "<=", 1.15


CASES: dict[str, Callable[[Result], Iterator[Judged]]] = {
    "a": _larger,
    "b": _fits,
    "c": _cold,
    "d": _readers,
    "e": _sizes,
}
