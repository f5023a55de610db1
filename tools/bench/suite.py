"""All benchmarks, and how one of them is run: in a process of its own, with the machine's load beside its results."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import results
from .errors import BenchError

ROOT = Path(__file__).resolve().parents[2]
MODEL = "MODEL"
"""Stands for the path of the demo's model among the words of a command."""
BUSY_SHARE = 0.1
"""Of the processors' time, by others, from which on a machine counts as busy."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: the words after its name, for a whole run and for a quick look.

    `quick` None: there is no quick look. `asked`: it is run only if it is named, because it takes so long.
    """

    name: str
    about: str
    words: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = ("--quick",)
    asked: bool = False

    def command(self, quick: bool = False) -> str:
        """Return the command of a whole run or of a quick look, for people."""
        return " ".join((f"tools/bench/{self.name}", *((self.quick or ()) if quick else self.words)))


BENCHMARKS = (
    Benchmark(
        "mount",
        "llmcachefs and the kernel's page cache: same memory, same storage",
        ("--model", MODEL, "--repeat", "2", "--mode", "inplace", "--mode", "steer"),
        ("--model", MODEL, "--quick", "--repeat", "1", "--mode", "inplace", "--mode", "steer"),
    ),
    Benchmark("demotime", "a second tools/demo", quick=None),
    Benchmark("startup", "start of every command"),
    Benchmark(
        "trace",
        "what tracing costs, and what it loses",
        ("--rounds", "3", "--pairs", "15", "--seconds", "1"),
        ("--rounds", "1", "--pairs", "3", "--seconds", "0.3"),
    ),
    Benchmark("simulate", "speed and memory of the simulator", ("--repeat", "3")),
    Benchmark("policies", "hit ratios on generated traces (not timed)", quick=("--policy", "lru,belady,llmcache")),
    Benchmark("kv", "kernels and spill file of the KV manager"),
    Benchmark("kvstore", "a million tokens in the KV store"),
    Benchmark("kvpipeline", "looking ahead, pools and near-data scoring"),
    Benchmark("kvindex", "trees of keys and the scan of all", ("--rounds", "2")),
    Benchmark("kvtransformers", "SpillCache and DynamicCache: memory and time"),
    Benchmark("prefix", "prompts of llama.cpp restored from disk"),
    Benchmark("kvanswers", "what budgets do to a model's answers (not timed)"),
    Benchmark("papers", "what is measured for the papers, and claims with a bar", ("--measure",), quick=()),
    Benchmark("edram", "speed of the accelerator model", ("--repeat", "5"), quick=("--repeat", "1")),
    Benchmark(
        "size",
        "formula (1), simulator and mount: where stalls begin",
        ("--repeat", "1"),
        quick=("--quick", "--repeat", "1", "--modes", "steer"),
    ),
    Benchmark("kvmodels", "contexts on real models: loss, answers, time, memory", asked=True),
    Benchmark("testtime", "tools/test, ten times", quick=None, asked=True),
)
NAMES = tuple(one.name for one in BENCHMARKS)


def now() -> str:
    """Return the time of the day, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def busy_share(seconds: float = 3.0) -> float:
    """Return the share (0..1) of all processors' time that is used within the next `seconds`."""
    idle, total = _ticks()
    time.sleep(seconds)
    later_idle, later_total = _ticks()
    return 1 - (later_idle - idle) / max(1, later_total - total)


def _ticks() -> tuple[int, int]:
    """Return the ticks that all processors were idle or waited for storage, and all of them, since the start."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def run(benchmark: Benchmark, directory: Path, quick: bool, model: Path | None) -> dict[str, Any]:
    """Run one benchmark and write its JSON into `directory`; returns the JSON; BenchError if it leaves none.

    The file gets `run`: command, time and load. What the benchmark prints goes to stderr.
    """
    words = [str(model) if word == MODEL else word for word in (benchmark.quick or () if quick else benchmark.words)]
    new = directory / f".{benchmark.name}.json.new"
    command = [sys.executable, str(ROOT / "tools" / "bench" / benchmark.name), *words, "--json", str(new)]
    about: dict[str, Any] = {"command": benchmark.command(quick), "quick": quick, "started": now()}
    about["busy_share"] = busy_share()
    load, begin = os.getloadavg()[0], time.monotonic()
    try:
        code = _ended(command)
        if not new.exists():
            raise BenchError(f"{benchmark.name} ended with exit code {code} and without results")
        document = results.read(new)
        if code not in (0, 1) or not document.get("complete", True):
            partial = new.replace(directory / f"{benchmark.name}.partial.json")
            raise BenchError(f"{benchmark.name} ended with exit code {code} before its end: {partial} has what it got")
    finally:
        new.unlink(missing_ok=True)
        new.with_name(f"{new.name}.part").unlink(missing_ok=True)
    about |= {"seconds": round(time.monotonic() - begin, 1), "load": [load, os.getloadavg()[0]]}
    document = {**document, "run": about}
    results.write(directory / f"{benchmark.name}.json", document)
    return document


def _ended(command: Sequence[str]) -> int:
    """Run a command to its end and return its exit code; an interrupt waits until it has unmounted what it mounts."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def chosen(only: Sequence[str], skip: Sequence[str], quick: bool) -> list[Benchmark]:
    """Return the benchmarks to run; without `only`, all but those that have to be asked for. BenchError: unknown names."""
    for name in (*only, *skip):
        if name not in NAMES:
            raise BenchError(f"there is no benchmark {name!r}", f"there are {', '.join(NAMES)}")
    wanted = [one for one in BENCHMARKS if (one.name in only if only else not one.asked) and one.name not in skip]
    return [one for one in wanted if one.quick is not None or not quick]
