"""Where stalls begin on a real mount: a reader with a fixed time of computing per pass, over throttled storage.

Everything the formula needs is measured in the same way: the bandwidth by `llmcache size --measure` under the throttle,
T by the same reader without a throttle. T has two values. With all of the loop kept it is pure computing and copying;
with the formula's S kept the rest passes through the mount's daemon, which costs time however fast storage is. Stalls
are what throttled storage adds to the second one, so that is the formula's T here; the first one is recorded too.

The paper's smartwatch (a loop of 70 MB, 60 MB kept, 10 MB streamed) cannot be swept: the mount's window allowance of
12 MiB holds all that would be streamed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmcache.cache.sizing import Setting, need, passes
from llmcache.fs.client.advice import mount_cache_bytes

from .cgroup import Group
from .errors import BenchError
from .files import forget, loop_file
from .knee import Knee, find_knee
from .runner import client, run_client
from .sides import Mounted, environment

FACTORS = (0.70, 0.80, 0.88, 0.94, 1.0, 1.06, 1.12, 1.25)


@dataclass(frozen=True)
class Sweep:
    """A loop, the throttle of its storage, the computing per pass, and which shares of the formula's S are tried."""

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
    """All measured passes of one budget, a list per repeat: seconds, and bytes from storage."""

    cache_bytes: int
    seconds: list[list[float]] = field(default_factory=list)
    storage_bytes: list[list[int]] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Return the median pass of the quietest repeat: other work on the machine only ever adds time."""
        return min(statistics.median(times) for times in self.seconds)

    @property
    def median_storage_bytes(self) -> float:
        """Return the median of what a pass read from storage, over all repeats."""
        return statistics.median(size for sizes in self.storage_bytes for size in sizes)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "median_s": self.median_s}


@dataclass
class Swept:
    """A sweep's results: measured bandwidth and passes, throttled ones by budget; the formula's (modelled) S for them.

    `kept` and `passing` are measured without a throttle: with all of the loop kept, and with about S kept.
    """

    sweep: Sweep
    bandwidth: int
    kept: Point
    passing: Point = field(default_factory=lambda: Point(0))
    points: list[Point] = field(default_factory=list)

    @property
    def period_s(self) -> float:
        """Return T as the formula takes it: see above."""
        return self.passing.median_s

    @property
    def setting(self) -> Setting:
        """Return what the formula is given; a loop file that is no model has no hot set."""
        return Setting(self.bandwidth, round(self.period_s * 1e9), 0)

    @property
    def formula_bytes(self) -> int:
        """Return S of formula (1) (modelled)."""
        return need(self.sweep.loop_bytes, self.setting).loop_cache_bytes

    @property
    def kept_formula_bytes(self) -> int:
        """Return S of formula (1) with the T of a loop that is kept whole (modelled)."""
        setting = Setting(self.bandwidth, round(self.kept.median_s * 1e9), 0)
        return need(self.sweep.loop_bytes, setting).loop_cache_bytes

    @property
    def advised_bytes(self) -> int:
        """Return the --cache that `llmcache size` advises for llmcachefs (modelled)."""
        return mount_cache_bytes(self.sweep.loop_bytes, self.formula_bytes, 0)

    @property
    def knee(self) -> Knee:
        """Return where stalls begin (measured): the budget below which passes get longer."""
        return find_knee([(point.cache_bytes, point.median_s) for point in self.points])

    @property
    def difference(self) -> float:
        """Return how far the mount is from the formula, as a share of the formula's S."""
        return self.knee.cache_bytes / self.formula_bytes - 1

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, measured and modelled values apart."""
        rows = []
        for point in self.points:
            model = passes(self.sweep.loop_bytes, point.cache_bytes, self.setting)
            modelled = {"pass_s": model.pass_ns / 1e9, "missing_bytes": model.missing_bytes}
            rows.append({"measured": point.to_json(), "modelled": modelled})
        return {
            "sweep": asdict(self.sweep),
            "measured": {
                "bandwidth_bytes_per_s": self.bandwidth,
                "period_s": self.period_s,
                "period_all_kept_s": self.kept.median_s,
                "passing": self.passing.to_json(),
                "kept": self.kept.to_json(),
                "stalls_begin_bytes": self.knee.cache_bytes,
                "plateau_s": self.knee.plateau_s,
                "stalled_bytes_per_s": -1 / self.knee.slope,
            },
            "modelled": {
                "stalls_begin_bytes": self.formula_bytes,
                "stalls_begin_all_kept_bytes": self.kept_formula_bytes,
                "llmcachefs_cache_bytes": self.advised_bytes,
            },
            "difference": self.difference,
            "points": rows,
        }


@dataclass(frozen=True)
class Sweeper:
    """Where sweeps are run: files in `source`, mount points in `scratch`, progress to `say`."""

    source: Path
    scratch: Path
    say: Callable[[str], None]

    def run(self, sweep: Sweep) -> Swept:
        """Measure bandwidth and T, then every budget in turns."""
        file = loop_file(self.source / f"loop-{sweep.loop_bytes}.bin", sweep.loop_bytes)
        found = Swept(sweep, self._bandwidth(sweep), Point(round(1.3 * sweep.loop_bytes)))
        self._measure(sweep, file, found.kept, None)
        near = found.kept_formula_bytes
        if not 0 < near < sweep.loop_bytes:
            raise BenchError("the whole loop can be streamed: nothing to sweep", "take a longer loop or less computing")
        found.passing.cache_bytes = near
        found.points.extend(Point(round(factor * near)) for factor in sweep.factors)
        for repeat in range(sweep.repeat):
            self._measure(sweep, file, found.passing, None)
            for point in found.points if repeat % 2 == 0 else found.points[::-1]:
                self._measure(sweep, file, point, sweep.read_bps)
            self._measure(sweep, file, found.kept, None)
            self._measure(sweep, file, found.passing, None)
        self._tell(found)
        file.unlink()
        return found

    def _tell(self, found: Swept) -> None:
        sweep = found.sweep
        self.say(f"{sweep.name}, {sweep.mode}: {found.bandwidth / 1e6:.1f} MB/s (measured)")
        self.say(f"  T {found.period_s:.4f} s, {found.kept.median_s:.4f} s with all kept (measured, no throttle)")
        for point in found.points:
            passed = f"{point.median_storage_bytes / 1e6:6.1f} MB in {point.median_s:.4f} s per pass"
            self.say(f"  --cache {point.cache_bytes / 1e6:6.1f} MB: {passed}")

    def _bandwidth(self, sweep: Sweep) -> int:
        """Return what `llmcache size --measure` says in the throttled group."""
        command = [sys.executable, "-m", "llmcache", "size", "--measure", str(self.source), "--loop", "1M", "--json"]
        with Group("bandwidth", directory=self.source, read_bps=sweep.read_bps) as group:
            result = subprocess.run(
                group.wrap(command), capture_output=True, text=True, timeout=120, env=environment(), check=False
            )
        if result.returncode != 0:
            raise BenchError(f"llmcache size --measure failed: {result.stderr.strip()}")
        return int(json.loads(result.stdout)["bandwidth_bytes_per_s"])

    def _measure(self, sweep: Sweep, file: Path, point: Point, read_bps: int | None) -> None:
        """Add the passes of one mount with the point's budget."""
        forget(file)
        mounted = Mounted(options=("--mode", sweep.mode))
        with (
            Group("size", directory=self.source, read_bps=read_bps) as group,
            mounted.open(group, self.source, point.cache_bytes, self.scratch) as opened,
        ):
            path = opened.root / file.name
            command = client("loop_reader", path, "--compute", sweep.compute_s, "--passes", sweep.steps)
            done = run_client(group, command, timeout_s=120 + 8 * sweep.steps * sweep.loop_bytes / sweep.read_bps)
            if not done.ok:
                raise BenchError(f"the reader failed over the mount: {done.error[-400:]}")
            steps = done.measured(sweep.warmup)
            point.seconds.append([step.seconds for step in steps])
            point.storage_bytes.append([step.storage_bytes for step in steps])
