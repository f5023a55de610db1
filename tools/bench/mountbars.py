"""The bars of the mount benchmark, from the JSON of its results: what each case has to reach."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .bars import Bar
from .sides import MOUNT_OVERHEAD_BYTES

ISSUE = 2
COLD_LIMIT_BPS = 2e9
"""A faster disk than this is not asked for."""
NEVER_SLOWER = 1.05
"""What two medians of the same scatter."""
MISSES = 0.1
"""Of what a token reads: where the page cache reads less of it from storage, there is nothing to win."""
CPU_S_PER_GB = {"inplace": 0.25, "steer": 0.8}
"""What the daemon may take, by mode."""

Result = dict[str, Any]
Judged = tuple[str, str, float, str, float]
"""Key, what it is, value, sense, limit."""


def steps(result: Result, side: str) -> list[float]:
    """Return the measured steps of one side (s), of all repeats and clients."""
    runs = [run for run in result["runs"] if run["side"] == side]
    return [step for run in runs for client in run["seconds"] for step in client]


def seconds(result: Result, side: str) -> float:
    """Return the median of the measured steps of one side (s); no number without any."""
    return statistics.median(steps(result, side) or [math.nan])


def mean(result: Result, side: str) -> float:
    """Return the mean of the measured steps of one side (s); no number without any."""
    return statistics.fmean(steps(result, side) or [math.nan])


def fastest(result: Result, sides: Iterable[str]) -> str:
    """Return the side with the least median, or one without any: nothing is better than what was not measured."""
    return min(sides, key=lambda side: (not math.isnan(seconds(result, side)), seconds(result, side)))


def kernel(result: Result) -> str:
    """Return the side of the page cache at its best: with the machine's own read-ahead or the small one."""
    return fastest(result, (side for side in result["sides"] if side.startswith("kernel")))


def mounts(result: Result) -> list[str]:
    """Return the sides that are llmcachefs."""
    return [side for side in result["sides"] if side != "direct" and not side.startswith("kernel")]


def storage_bytes(result: Result, side: str) -> float:
    """Return the median over the repeats of what one step of one client read from storage."""
    return _median(run["storage_bytes_per_step"] for run in result["runs"] if run["side"] == side)


def costs(result: Result, side: str) -> list[dict[str, Any]]:
    """Return what the mount took in each run of one side: see `Run.mount`; nothing where that was not recorded."""
    return [run["mount"] or {} for run in result["runs"] if run["side"] == side and "mount" in run]


def mode_of(result: Result, side: str) -> str:
    """Return the mode that served, as the daemon told; else the name of the side."""
    return next((cost["mode"] for cost in costs(result, side) if "mode" in cost), side)


def cpu_s_per_gb(result: Result, side: str) -> float:
    """Return the median over the repeats of the daemon's processor time per GB from storage."""
    return _median(cost.get("cpu_s_per_gb") for cost in costs(result, side))


def memory(result: Result, side: str) -> dict[str, float]:
    """Return resident, beyond and daemon bytes of the run with the most in all; no numbers where a run has none."""
    keys = ("resident_bytes", "beyond_bytes", "daemon_bytes")
    each = [{key: float(cost.get(key, math.nan)) for key in keys} for cost in costs(result, side)]
    return max(each, key=lambda one: (math.isnan(_kept(one)), _kept(one)), default=dict.fromkeys(keys, math.nan))


def _kept(memory: dict[str, float]) -> float:
    return memory["resident_bytes"] - memory["beyond_bytes"] + memory["daemon_bytes"]


def _median(values: Iterable[float | None]) -> float:
    return statistics.median([one for one in values if one is not None] or [math.nan])


def bars(results: list[Result]) -> list[Bar]:
    """Return the bars of all results; the first is that nothing went wrong over the mount."""
    wrong = sum(len(result["problems"][side]) for result in results for side in mounts(result))
    what = f"hangs, wrong bytes, failures over the mount, in {len(results)} cases"
    nothing = Bar(ISSUE, "problems", what, wrong, "<=", 0, "tools/bench/mount --model MODEL")
    return [nothing, *(bar for result in results for side in mounts(result) for bar in judge(result, side))]


def judge(result: Result, side: str) -> Iterator[Bar]:
    """Yield the bars of one mount of one result."""
    slug = re.sub(r"[^a-z0-9.]+", "-", result["name"].lower()).strip("-")
    name = result["name"]
    command = f"tools/bench/mount --model MODEL --only {result['case']} --match '{name}'"
    if side != "mount":
        slug, name, command = f"{slug}.{side}", f"{name}, {side}", f"{command} --mode {side}"
    mode = mode_of(result, side)
    for key, what, value, sense, limit in (*CASES[result["case"]](result, side, mode), *_costs(result, side, mode)):
        yield Bar(ISSUE, f"{slug}.{key}", f"{name}: {what}", value, sense, limit, command)


def _over_kernel(result: Result, side: str) -> float:
    return seconds(result, side) / seconds(result, kernel(result))


def _larger(result: Result, side: str, mode: str) -> Iterator[Judged]:
    bound, limit = (1.05, 0.4) if mode == "inplace" else (1.15, 0.5)
    yield "bound", "time over the modelled bound", seconds(result, side) / result["bound_s"], "<=", bound
    yield "kernel", "time over the page cache's", _over_kernel(result, side), "<=", limit


def _fits(result: Result, side: str, mode: str) -> Iterator[Judged]:
    limit = 0.95 if result["name"].startswith("llama") else 0.9
    limit = 0.98 if mode == "inplace" else limit
    yield "plain", "speed, of the plain file's", seconds(result, kernel(result)) / seconds(result, side), ">=", limit


def _cold(result: Result, side: str, mode: str) -> Iterator[Judged]:
    size = result["loop_bytes"]
    if mode == "inplace":
        best_s = seconds(result, fastest(result, ("direct", kernel(result))))
        yield "best", "bandwidth, of O_DIRECT's or the page cache's", best_s / seconds(result, side), ">=", 0.95
        return
    measured = size / seconds(result, "direct")
    direct = COLD_LIMIT_BPS if measured > COLD_LIMIT_BPS else measured  # min() would take a limit for what is no number
    yield "direct", "bandwidth, of O_DIRECT's", size / seconds(result, side) / direct, ">=", 0.8


def _readers(result: Result, side: str, _mode: str) -> Iterator[Judged]:
    # readers at different places of the loop share the pins but not what is streamed
    bound = max(result["compute_s"], result["bound_s"] * result["clients"])
    yield "bound", "time over the modelled bound of readers apart", seconds(result, side) / bound, "<=", 1.15
    yield "kernel", "time over the page cache's", _over_kernel(result, side), "<=", NEVER_SLOWER


def _sizes(result: Result, side: str, mode: str) -> Iterator[Judged]:
    # no cliff: near the bound, with an allowance of a tenth of a full read for loops that nearly fit
    allowed = result["bound_s"] + 0.1 * result["loop_bytes"] / (result["read_bps"] or 1e9)
    yield "bound", "time over (modelled bound + 10 % of a full read)", seconds(result, side) / allowed, "<=", 1.15
    if mode == "inplace":
        yield "kernel", "time over the page cache's", _over_kernel(result, side), "<=", NEVER_SLOWER


def _unlimited(result: Result, side: str, mode: str) -> Iterator[Judged]:
    if mode != "inplace":  # through FUSE nothing is promised where storage is as fast as memory
        return
    limit = 0.67 if round(result["cache_bytes"] / result["loop_bytes"], 2) == 0.75 else NEVER_SLOWER
    yield "kernel", "time over the page cache's", _over_kernel(result, side), "<=", limit


def _mixtures(result: Result, side: str, mode: str) -> Iterator[Judged]:
    plain = [one for one in result["sides"] if one.startswith("kernel")]
    best, limited = min(plain, key=lambda one: mean(result, one)), result["read_bps"] is not None
    times, ratio = steps(result, side), mean(result, side) / mean(result, best)
    read, asked = storage_bytes(result, best), result["routed"]["token_bytes"]
    misses = read > MISSES * asked
    if mode == "inplace":
        limit = (0.65 if limited else 0.5) if misses else NEVER_SLOWER
        yield "kernel", "mean time over the page cache's", ratio, "<=", limit
    elif limited:
        yield "kernel", "mean time over the page cache's", ratio, "<=", 0.8 if misses else NEVER_SLOWER
    if misses:
        yield "bytes", "bytes from storage over the page cache's", storage_bytes(result, side) / read, "<=", 0.65
    if result["routed"]["lru_bytes"]:
        share = storage_bytes(result, side) / result["routed"]["lru_bytes"]
        yield "lru", "bytes from storage over exact LRU's, of whole experts", share, "<=", 1
    if times:
        late = sorted(times)[math.ceil(0.99 * len(times)) - 1] / statistics.median(times)
        yield "p99", "the 99th of a hundred tokens over the median", late, "<=", 3


def _costs(result: Result, side: str, mode: str) -> Iterator[Judged]:
    if not costs(result, side):
        return
    room = result["cache_bytes"] + MOUNT_OVERHEAD_BYTES
    yield "memory", "memory of mount and daemon, of budget + 64 MiB", _kept(memory(result, side)) / room, "<=", 1
    if result["case"] in "af" and not result["name"].startswith("llama") and mode in CPU_S_PER_GB:
        yield "cpu", "daemon's processor seconds per GB from storage", cpu_s_per_gb(result, side), "<=", CPU_S_PER_GB[mode]


CASES: dict[str, Callable[[Result, str, str], Iterator[Judged]]] = {
    "a": _larger,
    "b": _fits,
    "c": _cold,
    "d": _readers,
    "e": _sizes,
    "f": _unlimited,
    "g": _mixtures,
}
