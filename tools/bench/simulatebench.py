"""The simulator benchmark's command line: speeds from interleaved runs, memory in processes of their own."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmcache.cache.grid import parts_of
from llmcache.cache.plan import Plan
from llmcache.cache.policies import policy_class
from llmcache.cache.simulate import simulate_all
from llmcache.trace.record import BlockSpace, TraceReader
from llmcache.units import BLOCK_BYTES

from . import machine, results
from .bars import Bar, exit_code, of_document, with_bars
from .bars import table as bar_table
from .signals import one_interrupt
from .simulate_traces import LOOP_BLOCKS, RANDOM_BLOCKS, loop, single, write

SCHEMA = "llmcache-bench-simulate/2"
COMMAND = "tools/bench/simulate"
ROOT = Path(__file__).resolve().parents[2]
LARGE = 1_000_000_000
MEMORY_BAR = 1 << 30
MIB = 1 << 20


@dataclass
class Speed:
    """One measured speed: `policy` None stands for the curve of all sizes; a bar of 0 is none (blocks/s)."""

    trace: str
    policy: str | None
    cache_blocks: int
    bar: float
    seconds: list[float] = field(default_factory=list)
    blocks: int = 0

    @property
    def rate(self) -> float:
        """Return the median blocks per second."""
        return self.blocks / statistics.median(self.seconds)

    def run(self, path: Path) -> None:
        """Simulate from the Parquet file to the row, with one thread for the policy."""
        policies = () if self.policy is None else (self.policy,)
        plan = Plan(policies, (self.cache_blocks * BLOCK_BYTES,), curves=self.policy is None)
        start = time.perf_counter()
        done = simulate_all([str(path)], plan, jobs=1)
        self.seconds.append(time.perf_counter() - start)
        self.blocks = done.traces[0].accesses

    @property
    def name(self) -> str:
        """Return what the results call the policy."""
        return "lru, all sizes" if self.policy is None else self.policy

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        values = {"trace": self.trace, "policy": self.name, "cache_blocks": self.cache_blocks, "blocks": self.blocks}
        return {**values, "seconds": self.seconds, "blocks_per_s": self.rate, "bar": self.bar or None}


class Replay(Speed):
    """The policy alone: its runs are in memory, with their ids."""

    def run(self, path: Path) -> None:
        """Replay the whole trace in one call."""
        assert self.policy is not None
        with TraceReader(path) as reader:
            space = BlockSpace.of(reader.batches())
            parts = list(parts_of(reader.batches(), space))
        policy = policy_class(self.policy)(self.cache_blocks, space.blocks)
        start = time.perf_counter()
        for part in parts:
            policy.replay(part.first, part.count)
        self.seconds.append(time.perf_counter() - start)
        self.blocks = sum(int(part.count.sum()) for part in parts)

    @property
    def name(self) -> str:
        """Return what the results call the policy."""
        return f"{self.policy}, replay alone"


def speeds() -> list[Speed]:
    """Return what is measured; caches hold half of the blocks."""
    return [
        Speed("loop in runs", "lru", LOOP_BLOCKS // 2, 100e6),
        Speed("loop in runs", "llmcache", LOOP_BLOCKS // 2, 10e6),  # by the mount's own code, which is plain Python
        Speed("loop in runs", None, 1, 0),
        Speed("random blocks", "lru", RANDOM_BLOCKS // 2, 10e6),
        Speed("random blocks", "llmcache", RANDOM_BLOCKS // 2, 0.2e6),
        Speed("random blocks", None, 1, 5e6),
        Replay("random blocks", "lru", RANDOM_BLOCKS // 2, 0),
        Replay("random blocks", "llmcache", RANDOM_BLOCKS // 2, 0),
    ]


def measure_speeds(scratch: Path, quick: bool, repeat: int, console: Console) -> list[Speed]:
    """Run all speeds in turns, `repeat` times after one that compiles."""
    passes, references = (20, 500_000) if quick else (400, 10_000_000)
    paths = {name: scratch / f"{name.replace(' ', '-')}.parquet" for name in ("loop in runs", "random blocks")}
    write(paths["loop in runs"], loop(passes))
    write(paths["random blocks"], single(references))
    found = speeds()
    for number in range(repeat + 1):
        for one in found:
            one.run(paths[one.trace])
            if number == 0:
                one.seconds.clear()
        console.print(f"speeds: {'warm' if number == 0 else f'run {number} of {repeat}'}", soft_wrap=True)
    return found


def measure_memory(scratch: Path, blocks: int, console: Console) -> list[dict[str, Any]]:
    """Write and simulate a trace of `blocks`, each in a process of its own; returns time and peak memory of both."""
    path = scratch / "large.parquet"
    found = []
    for step in ("write", "simulate"):
        command = [sys.executable, "-m", "tools.bench.simulate_traces", step, str(path), str(blocks)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        told = json.loads(done.stdout)
        found.append({"step": step, "blocks": blocks, **told, "bar": MEMORY_BAR})
        console.print(f"{step} {blocks:,} blocks: {told['seconds']:.1f} s, {told['peak_bytes'] / 1e6:.0f} MB at most")
    return found


def document(host: dict[str, Any], found: list[Speed], memory: list[dict[str, Any]]) -> dict[str, Any]:
    """Return everything as JSON-ready values: blocks, seconds, bytes."""
    packages = ("numpy", "numba", "pyarrow", "llmcache-toolkit")
    host = {**host, "versions": {name: metadata.version(name) for name in packages}}
    told = {"schema": SCHEMA, "machine": host, "speeds": [one.to_json() for one in found], "memory": memory}
    return with_bars(results.rounded(told), bars(told))


def bars(told: dict[str, Any]) -> list[Bar]:
    """Return the bars of speeds that have one, and of memory."""
    found = [
        Bar(
            3, f"{one['trace']}, {one['policy']}", f"{one['trace']}, {one['policy']}: simulated from a file",
            one["blocks_per_s"] / 1e6, ">=", one["bar"] / 1e6, COMMAND, unit="M blocks/s",
        )
        for one in told["speeds"] if one["bar"]
    ]  # fmt: skip
    for one in told["memory"]:
        what = f"{one['step']} a trace of {one['blocks'] / 1e9:.2g} G blocks: memory"
        peak = one["peak_bytes"] / MIB
        found.append(Bar(3, f"memory, {one['step']}", what, peak, "<", one["bar"] / MIB, COMMAND, unit="MiB"))
    return found


def speed_table(speeds: list[dict[str, Any]]) -> Table:
    """Return the speeds and their bars."""
    made = Table(title="simulator: from a Parquet file to the row, one thread for the policy (measured)")
    for name in ("trace", "policy", "M blocks/s", "min..max"):
        made.add_column(name, justify="left" if name in ("trace", "policy") else "right")
    for one in speeds:
        rates = [one["blocks"] / seconds / 1e6 for seconds in one["seconds"]]
        made.add_row(
            one["trace"],
            one["policy"],
            f"{one['blocks_per_s'] / 1e6:.1f}",
            f"{min(rates):.1f}..{max(rates):.1f}",
        )
    return made


@contextmanager
def workplace(directory: Path) -> Iterator[Path]:
    """Yield a fresh directory, removed at the end."""
    scratch = directory / f".llmcache-bench-{os.getpid()}"
    try:
        scratch.mkdir(parents=True)
        yield scratch
    finally:
        shutil.rmtree(scratch)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="tools/bench/simulate", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the traces go (1 GB at most)")
    parser.add_argument("--quick", action="store_true", help="short traces: for a look, not for the bars")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each speed, in turns")
    parser.add_argument("--json", type=Path, help="write every run here")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every bar is reached, 1 if not."""
    args = arguments(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        with one_interrupt(), workplace(args.dir) as scratch:
            found = measure_speeds(scratch, args.quick, args.repeat, console)
            memory = measure_memory(scratch, LARGE // 50 if args.quick else LARGE, console)
    except KeyboardInterrupt:
        console.print("interrupted: nothing is written")
        return 1
    host = machine.describe(args.dir)
    told = document(host, found, memory)
    console.print(speed_table(told["speeds"]))
    judged = of_document(told)
    console.print(bar_table(judged))
    if args.json:
        results.write(args.json, told)
    return exit_code(judged)
