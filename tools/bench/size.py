"""Compare formula (1) with a mount: the cache size below which a client stalls.

A reader computes for a fixed time per pass while storage is throttled. The inputs of the formula are measured
in the same way: the bandwidth by `llmcache size --measure` under the throttle, and T, the time of a pass, by the same reader
without a throttle. T has two values. With the whole loop in memory, T is computing and copying alone. With S of the formula
in memory, the rest passes through the daemon of the mount, which takes time even on fast storage. The formula uses this
second value, because stalls are the time that throttled storage adds to it; the first one is recorded too.

The paper's smartwatch (a loop of 70 MB, of which 60 MB are pinned and 10 MB streamed) cannot be measured on a mount: the
mount's window allowance of 12 MiB holds everything that would be streamed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from llmcache.cache.sizing import SizingParameters, need, passes
from llmcache.cgroup import Cgroup
from llmcache.errors import MissingRequirement
from llmcache.mount.client.advice import mount_cache_bytes

from .harness import common_options, workplace
from .results import Document, Target, markdown, worst
from .runner import MIB, client, loop_file, ready, run_client
from .sides import Mounted, environment

SCHEMA = "llmcache-bench-size/3"
AGREE = 0.05
FACTORS = (0.70, 0.80, 0.88, 0.94, 1.0, 1.06, 1.12, 1.25)
"""Budgets that are tried on the mount, as shares of the formula's S."""

Points = Sequence[tuple[float, float]]


def options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "loop files and mount points", "a smaller loop, fewer passes", repeat=2)
    parser.add_argument("--modes", default="steer,arena", help="comma-separated modes of the mount [%(default)s]")


def sweeps_of(args: argparse.Namespace) -> Iterator[Sweep]:
    """Yield the sweeps of each mode. About two thirds of the loop have to be kept."""
    for mode in args.modes.split(","):
        if args.quick:
            yield Sweep("quick", 96 * MIB, 100 * 10**6, 0.25, mode, 6, 3, 1, (0.7, 0.8, 0.9, 1.15, 1.3))
            continue
        yield Sweep("100 MB/s", 256 * MIB, 100 * 10**6, 0.9, mode, steps=8, warmup=3, repeat=args.repeat)
        yield Sweep("200 MB/s", 256 * MIB, 200 * 10**6, 0.45, mode, steps=9, warmup=3, repeat=args.repeat)


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    swept: list[Document] = []
    with workplace(args.dir) as place:
        source, scratch = place / "source", place / "scratch"
        source.mkdir()
        scratch.mkdir()
        for sweep in sweeps_of(args):
            swept.append(Sweeper(source, scratch, lambda line: console.print(line, soft_wrap=True)).run(sweep))
            yield {"complete": False, "mount": swept}
    yield {"complete": True, "mount": swept}


def targets(document: Document) -> list[Target]:
    """Return the target: the largest deviation of the mount from formula (1), as a share of its S."""
    cases = ((f"{one['sweep']['mode']}, {one['sweep']['name']}", abs(one["difference"])) for one in document["mount"])
    what = "mount: deviation from formula (1) of the cache size at which stalls begin"
    return list(worst("mount", what, cases, "<=", AGREE))


def figures(document: Document) -> dict[str, str]:
    """Return the largest difference between mount and formula by mode, with the T of a loop kept in memory as a whole."""
    found: dict[str, list[float]] = {}
    for one in document["mount"]:
        ratio = one["measured"]["stalls_begin_bytes"] / one["modelled"]["stalls_begin_all_kept_bytes"]
        found.setdefault(one["sweep"]["mode"], []).append(ratio - 1)
    return {mode: f"{max(each, key=abs):+.0%}".replace("%", " %") for mode, each in found.items()}


def formula_bytes(loop_bytes: int, bandwidth: int, period_ns: int) -> int:
    """Return S of formula (1) (modelled), for a loop without a hot set."""
    return need(loop_bytes, SizingParameters(bandwidth, period_ns, 0)).loop_cache_bytes


@dataclass(frozen=True)
class Sweep:
    """A loop, the storage limit, the computing time per pass, and the budgets to try as shares of the formula's S."""

    name: str
    loop_bytes: int
    read_bps: int
    compute_s: float
    mode: str
    steps: int
    warmup: int
    repeat: int
    factors: tuple[float, ...] = FACTORS


@dataclass
class Point:
    """The measured passes with one budget, one list per repeat: seconds, and bytes from storage."""

    cache_bytes: int
    seconds: list[list[float]] = field(default_factory=list)
    storage_bytes: list[list[int]] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Return the median pass of the fastest repeat, because other load can only add time."""
        return min(statistics.median(times) for times in self.seconds)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "median_s": self.median_s}

    def __str__(self) -> str:
        read = statistics.median(size for sizes in self.storage_bytes for size in sizes)
        return f"--cache {self.cache_bytes / 1e6:6.1f} MB: {read / 1e6:6.1f} MB in {self.median_s:.4f} s per pass"


def compared(sweep: Sweep, bandwidth: int, kept: Point, passing: Point, points: Sequence[Point]) -> Document:
    """Return the measurements of a sweep with the modelled values, for the measured T.

    `kept` and `passing` were measured without a limit: with the whole loop kept, and with about S kept (T, see the module).
    """
    period_ns, loop = round(passing.median_s * 1e9), sweep.loop_bytes
    knee = find_knee([(point.cache_bytes, point.median_s) for point in points])
    size_bytes = formula_bytes(loop, bandwidth, period_ns)
    rows = []
    for point in points:
        model = passes(loop, point.cache_bytes, SizingParameters(bandwidth, period_ns, 0))
        modelled = {"pass_s": model.pass_ns / 1e9, "missing_bytes": model.missing_bytes}
        rows.append({"measured": point.to_json(), "modelled": modelled})
    return {
        "sweep": asdict(sweep),
        "measured": {
            "bandwidth_bytes_per_s": bandwidth,
            "period_s": passing.median_s,
            "period_all_kept_s": kept.median_s,
            "passing": passing.to_json(),
            "kept": kept.to_json(),
            "stalls_begin_bytes": knee.cache_bytes,
            "plateau_s": knee.plateau_s,
            "stalled_bytes_per_s": -1 / knee.slope,
        },
        "modelled": {
            "stalls_begin_bytes": size_bytes,
            "stalls_begin_all_kept_bytes": formula_bytes(loop, bandwidth, round(kept.median_s * 1e9)),
            "llmcachefs_cache_bytes": mount_cache_bytes(loop, size_bytes, 0),
        },
        "difference": knee.cache_bytes / size_bytes - 1,
        "points": rows,
    }


@dataclass(frozen=True)
class Sweeper:
    """Runs sweeps with files in `source` and mount points in `scratch`; progress goes to `say`."""

    source: Path
    scratch: Path
    say: Callable[[str], None]

    def run(self, sweep: Sweep) -> Document:
        """Measure bandwidth and T, then every budget, interleaved."""
        file = loop_file(self.source / f"loop-{sweep.loop_bytes}.bin", sweep.loop_bytes)
        bandwidth, kept = self._bandwidth(sweep), Point(round(1.3 * sweep.loop_bytes))
        self._measure(sweep, file, kept, None)
        near = formula_bytes(sweep.loop_bytes, bandwidth, round(kept.median_s * 1e9))
        if not 0 < near < sweep.loop_bytes:
            raise MissingRequirement(
                "the whole loop can be streamed, so no cache size causes stalls",
                "use a larger loop or a shorter computing time",
            )
        passing, points = Point(near), [Point(round(factor * near)) for factor in sweep.factors]
        for repeat in range(sweep.repeat):
            self._measure(sweep, file, passing, None)
            for point in points if repeat % 2 == 0 else points[::-1]:
                self._measure(sweep, file, point, sweep.read_bps)
            self._measure(sweep, file, kept, None)
            self._measure(sweep, file, passing, None)
        self.say(f"{sweep.name}, {sweep.mode}: {bandwidth / 1e6:.1f} MB/s (measured)")
        self.say(
            f"  T {passing.median_s:.4f} s, {kept.median_s:.4f} s with the whole loop in memory (measured, no throttle)"
        )
        for point in points:
            self.say(f"  {point}")
        file.unlink()
        return compared(sweep, bandwidth, kept, passing, points)

    def _bandwidth(self, sweep: Sweep) -> int:
        """Return the bandwidth that `llmcache size --measure` finds in the limited cgroup."""
        command = [sys.executable, "-m", "llmcache", "size", "--measure", str(self.source), "--loop", "1M", "--json"]
        with Cgroup("bandwidth", directory=self.source, read_bps=sweep.read_bps) as group:
            result = subprocess.run(
                group.wrap(command), capture_output=True, text=True, timeout=120, env=environment(), check=False
            )
        if result.returncode != 0:
            raise MissingRequirement(f"llmcache size --measure failed: {result.stderr.strip()}")
        return int(json.loads(result.stdout)["bandwidth_bytes_per_s"])

    def _measure(self, sweep: Sweep, file: Path, point: Point, read_bps: int | None) -> None:
        side = Mounted(options=("--mode", sweep.mode))
        with ready(side, file, self.scratch, point.cache_bytes, read_bps=read_bps) as (group, opened):
            path = opened.root / file.name
            command = client("loop_reader", path, "--compute", sweep.compute_s, "--passes", sweep.steps)
            done = run_client(group, command, timeout_s=120 + 8 * sweep.steps * sweep.loop_bytes / sweep.read_bps)
            if not done.ok:
                raise MissingRequirement(f"the reader failed over the mount: {done.error[-400:]}")
            steps = done.measured(sweep.warmup)
            point.seconds.append([step.seconds for step in steps])
            point.storage_bytes.append([step.storage_bytes for step in steps])


# The knee: passes get shorter with a larger cache until storage keeps up


@dataclass(frozen=True)
class Knee:
    """A line (seconds = `at_zero_s` + `slope` * cache bytes) that ends at `cache_bytes` in a plateau of `plateau_s`."""

    cache_bytes: float
    plateau_s: float
    at_zero_s: float
    slope: float

    def seconds(self, cache_bytes: float) -> float:
        return max(self.plateau_s, self.at_zero_s + self.slope * cache_bytes)


def find_knee(points: Points) -> Knee:
    """Return the knee that fits `points` (cache bytes, seconds) with the least absolute error.

    The line is fitted by Theil and Sen (median of all slopes) and the plateau is a median, each over at least two points, so
    that a single disturbed point moves neither. MissingRequirement if no line falls.
    """
    ordered = sorted(points)
    fits = [_fit(ordered[:split], ordered[split:]) for split in range(2, len(ordered) - 1)]
    falling = [fit for fit in fits if fit is not None]
    if not falling:
        raise MissingRequirement(
            "passes do not get shorter with a larger cache", "the machine is too busy, or no budget stalls"
        )
    return min(falling, key=lambda knee: sum(abs(seconds - knee.seconds(size)) for size, seconds in ordered))


def _fit(line: Points, plateau: Points) -> Knee | None:
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(line) for b in line[i + 1 :] if a[0] != b[0]]
    slope = statistics.median(slopes) if slopes else 0.0
    if slope >= 0:
        return None
    at_zero_s = statistics.median(seconds - slope * size for size, seconds in line)
    level_s = statistics.median(seconds for _, seconds in plateau)
    return Knee((level_s - at_zero_s) / slope, level_s, at_zero_s, slope)


def table(document: Document) -> str:
    head = ["mode", "storage MB/s", "T s", "S modelled by formula (1) MB", "S measured MB", "difference"]
    rows = []
    for one in document["mount"]:
        first = [one["sweep"]["mode"], f"{one['sweep']['read_bps'] / 1e6:.0f}"]
        sizes = [f"{one[kind]['stalls_begin_bytes'] / 1e6:.1f}" for kind in ("modelled", "measured")]
        rows.append([*first, f"{one['measured']['period_s']:.3f}", *sizes, f"{one['difference']:+.1%}"])
    return markdown(head, rows)
