"""One comparison: the same clients on plain storage and on mounts, with the same total memory, in interleaved runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmcache.cgroup import Cgroup, Usage
from llmcache.mount.readahead import SMALL_READ_AHEAD_KB

from .harness import turns
from .runner import MIB, ClientRun, problems_of, ready, run_clients
from .sides import MOUNT_OVERHEAD_BYTES, Mounted, Plain

Command = Callable[[str, Path], list[str]]
"""The command line of a client, for the name of a side and a file."""


@dataclass(frozen=True)
class Routed:
    """Mean bytes that a token of an MoE model reads with nothing cached, and that it misses in replays in the same memory.

    The replays keep whole experts: exact LRU, eviction of the expert with the lowest known popularity, and Belady; None if
    the routing is not known in advance.
    """

    token_bytes: float
    lru_bytes: float | None = None
    known_bytes: float | None = None
    belady_bytes: float | None = None


@dataclass(frozen=True)
class Experiment:
    """The client, file and limits of one comparison.

    `times`: factor on the number of repeats; short runs vary more. `direct`: run a side with O_DIRECT too. `routed`: set for
    MoE models, whose steps differ; times are then means, and warm-up steps are recorded. `own_read_ahead`: run the page
    cache also with the machine's own `read_ahead_kb`. `read_ahead_kb`: the value for a mount in place, as the documentation
    advises. `mean_reads`: report the mean of the bytes per step; if most steps read nothing, the median is 0.
    """

    case: str
    name: str
    file: Path
    loop_bytes: int
    cache_bytes: int
    command: Command
    steps: int
    warmup: int
    read_bps: int | None = None
    capped: bool = True
    clients: int = 1
    times: int = 1
    direct: bool = False
    routed: Routed | None = None
    own_read_ahead: bool = True
    read_ahead_kb: int = SMALL_READ_AHEAD_KB
    mean_reads: bool = False

    def timeout_s(self) -> float:
        """Return the seconds after which a client counts as hung: four times those of reading everything in every step."""
        slowest = self.loop_bytes / (self.read_bps or 500e6)
        return 60 + 4 * self.steps * self.clients * (slowest + 0.5)


@dataclass
class SideRun:
    """One run of one side. `stats`: of the mount after the warm-up and at the end, with the cgroup's `storage_bytes`."""

    side: str
    repeat: int
    clients: list[ClientRun]
    usage: Usage
    stats: list[dict[str, Any]] = field(default_factory=list)

    def storage_bytes_per_step(self, experiment: Experiment) -> float:
        """Return the bytes read from storage per measured step; per step of any kind for several clients."""
        if len(self.clients) == 1:
            read = [step.storage_bytes for step in self.clients[0].measured(experiment.warmup)]
            return statistics.fmean(read) if experiment.mean_reads else statistics.median(read)
        return self.usage.read_bytes / max(1, sum(len(run.steps) for run in self.clients))

    def mount(self) -> dict[str, Any] | None:
        """Return the mode, the largest memory and the daemon's CPU seconds per GB read from storage; None without a mount.

        The CPU time and the bytes are those between the two entries of `stats`.
        """
        if not self.stats:
            return None
        most = max(self.stats, key=lambda one: one["resident_bytes"] - one["beyond_bytes"] + one["daemon_bytes"])
        first, last = self.stats[0], self.stats[-1]
        read_gb = (last["storage_bytes"] - first["storage_bytes"]) / 1e9
        return {
            "mode": last["mode"],
            **{key: most[key] for key in ("resident_bytes", "beyond_bytes", "daemon_bytes")},
            "cpu_s_per_gb": (last["cpu_s"] - first["cpu_s"]) / read_gb if read_gb else None,
        }

    def to_json(self, experiment: Experiment) -> dict[str, Any]:
        """Return the measured steps as one list per client, the bytes read per step, and the costs of the mount."""
        measured = any(one.steps for one in self.clients)
        warmup = experiment.warmup
        warming = {"first_seconds": [step.seconds for step in self.clients[0].steps[:warmup]]} if experiment.routed else {}
        return {
            "side": self.side,
            "repeat": self.repeat,
            "seconds": [[step.seconds for step in client.measured(warmup)] for client in self.clients],
            **warming,
            "storage_bytes_per_step": self.storage_bytes_per_step(experiment) if measured else None,
            "mount": self.mount(),
        }


@dataclass
class Comparison:
    """All runs of an experiment.

    `compute_s`: duration of a step with everything in memory. `cap_bytes`: the memory limit, None without one. `anon_bytes`:
    private memory of all clients.
    """

    experiment: Experiment
    compute_s: float
    cap_bytes: int | None
    runs: list[SideRun] = field(default_factory=list)
    anon_bytes: int = 0

    @property
    def sides(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.side for run in self.runs))

    def bound_s(self) -> float:
        """Return the modelled bound max(compute, (N-S)/BW) of a step; clients that run together read the same bytes once."""
        each = self.experiment
        missing = max(0, each.loop_bytes - each.cache_bytes)
        return max(self.compute_s, missing / each.read_bps if each.read_bps else 0.0)

    def problems(self, side: str) -> list[str]:
        """Return the problems of one side's runs: hangs, wrong bytes, failures, OOM kills."""
        runs = (run for run in self.runs if run.side == side)
        return [problem for run in runs for problem in problems_of(run.clients, run.usage.oom_kills)]

    def to_json(self) -> dict[str, Any]:
        """Return all measured steps as plain data, times in seconds."""
        each = self.experiment
        shape = {key: value for key, value in asdict(each).items() if key not in ("command", "direct", "own_read_ahead")}
        return {
            **shape,
            "file": each.file.name,
            "sides": self.sides,
            "compute_s": self.compute_s,
            "bound_s": self.bound_s(),
            "cap_bytes": self.cap_bytes,
            "problems": {side: self.problems(side) for side in self.sides},
            "runs": [run.to_json(each) for run in self.runs],
        }


@dataclass(frozen=True)
class Rig:
    """Runs experiments in the directory of their file. Mount points are created in `scratch`."""

    scratch: Path
    sides: tuple[Plain | Mounted, ...]
    repeat: int
    say: Callable[[str], None]

    def measure(self, experiment: Experiment) -> Comparison:
        """Run the client alone with everything in memory, then all sides, interleaved."""
        command = experiment.command("compute", experiment.file)
        with Cgroup("compute", directory=experiment.file) as group:
            calibration = run_clients(group, [command], experiment.timeout_s())[0]
        anon = calibration.anon_bytes * experiment.clients
        whole = -(-(anon + experiment.cache_bytes + MOUNT_OVERHEAD_BYTES) // MIB) * MIB
        cap = whole if experiment.capped else None
        outcome = Comparison(experiment, calibration.undisturbed_s(), cap, anon_bytes=anon)
        sides = (Plain("direct"), *self.sides) if experiment.direct else self.sides
        if not experiment.own_read_ahead and any(side.name.startswith("kernel-") for side in sides):
            sides = tuple(side for side in sides if side != Plain())
        for number, side in turns(sides, self.repeat * experiment.times):
            outcome.runs.append(self._run(experiment, side, number, cap))
            self.say(_progress(outcome))
        for name in outcome.sides:
            for problem in outcome.problems(name):
                self.say(f"problem: {name}: {problem}")
        return outcome

    def _run(self, experiment: Experiment, side: Plain | Mounted, repeat: int, cap: int | None) -> SideRun:
        limits = (experiment.cache_bytes, cap, experiment.read_bps)
        with ready(side, experiment.file, self.scratch, *limits) as (group, opened):
            path = opened.root / experiment.file.name
            commands = [experiment.command(side.name, path)] * experiment.clients
            stats: list[dict[str, Any]] = []

            def sample() -> None:
                if (answer := opened.stats()) is not None:
                    stats.append({**answer, "storage_bytes": group.read_bytes()})

            clients = run_clients(
                group, commands, experiment.timeout_s(), lambda done: sample() if done == experiment.warmup else None
            )
            sample()
            return SideRun(side.name, repeat, clients, group.usage(), stats)


def _progress(outcome: Comparison) -> str:
    run, warmup = outcome.runs[-1], outcome.experiment.warmup
    times = " ".join(f"{step.seconds:.3f}" for one in run.clients for step in one.steps[:12])
    read = run.storage_bytes_per_step(outcome.experiment) / 1e6 if times else math.nan
    median_s = statistics.median([step.seconds for one in run.clients for step in one.measured(warmup)] or [math.inf])
    return f"  {run.side:10s} {median_s:.4f} s/step, {read:.0f} MB read per step | {times}"
