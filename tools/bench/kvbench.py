"""The KV benchmark's command line: kernels on one core, in turns with plain reading of the same memory; the spill file."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from llmcache.kv.kernels import score, top

from . import machine, results
from .bars import Bar, exit_code, with_bars
from .bars import table as bar_table
from .signals import one_interrupt
from .simulatebench import workplace

SCHEMA = "llmcache-bench-kv/2"
TOKENS, DIM, HEADS = 65536, 128, 8
SPILLED = 1 << 20  # tokens of one layer in the spill file
ROOT = Path(__file__).resolve().parents[2]
ALPHA = 0.2  # hillinfer.txt, section 4.2: the importance rate of its experiments
COMMAND = "tools/bench/kv"
SCORING_BAR = 0.5  # of the bandwidth of reading
TOP_BAR = 0.2  # of the time of scoring
FETCH_BAR = 0.8  # of what the same reads take without a spill file
MEMORY_BAR = 1 << 30
LINK_BAR = 1 / 50  # of the bytes that scoring on the host moves
MIB = 1 << 20

Keys = NDArray[Any]


@numba.njit(nogil=True, cache=True)
def _sum(words):  # type: ignore[no-untyped-def]
    """Reads everything: what no kernel that must see all keys can undercut."""
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


@dataclass
class Case:
    """One measured loop over all heads; `bar`: what its figure must reach, if anything."""

    name: str
    run: Callable[[], object]
    key_bytes: int
    bar: float | None = None
    seconds: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Run it once."""
        start = time.perf_counter()
        self.run()
        self.seconds.append(time.perf_counter() - start)

    @property
    def median_s(self) -> float:
        """Return the median time."""
        return statistics.median(self.seconds)


def heads(dtype: str, tokens: int) -> list[Keys]:
    """Return the keys of `HEADS` heads, each [1, 1, tokens, DIM]: together far more than the caches of a core."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(HEADS):
        keys = random.standard_normal((1, 1, tokens, DIM), dtype=np.float32)
        if dtype == "bfloat16":
            found.append((keys.view(np.uint32) >> 16).astype(np.uint16))
        elif dtype == "int8":
            found.append(np.clip(keys * 40, -127, 127).astype(np.int8))
        else:
            found.append(keys.astype(dtype))
    return found


def _reading(keys: list[Keys]) -> Callable[[], object]:
    return lambda: [_sum(head.view(np.uint64).reshape(-1)) for head in keys]


def _scoring(keys: list[Keys], queries: int) -> Callable[[], object]:
    asked = np.random.default_rng(1).standard_normal((1, queries, DIM), dtype=np.float32)
    ones = np.ones(keys[0].shape[:3], np.float32)
    scales = ones if keys[0].dtype == np.int8 else None
    return lambda: [score(asked, head, scales, threads=1) for head in keys]


def _choosing(keys: list[Keys], k: int) -> Callable[[], object]:
    asked = np.random.default_rng(1).standard_normal((1, 1, DIM), dtype=np.float32)
    scores = [score(asked, head, threads=1) for head in keys]
    return lambda: [top(one, k, threads=1) for one in scores]


def cases(tokens: int) -> list[Case]:
    """Return what is measured."""
    found = []
    for dtype in ("float16", "bfloat16", "int8", "float32"):
        keys = heads(dtype, tokens)
        size = sum(head.nbytes for head in keys)
        found.append(Case(f"read {dtype}", _reading(keys), size))
        for queries in (1, 4):
            bar = SCORING_BAR if dtype == "float16" and queries == 1 else None
            found.append(Case(f"score {dtype}, {queries} a head", _scoring(keys, queries), size, bar))
        if dtype == "float16":
            found.append(Case("top 256", _choosing(keys, 256), size, TOP_BAR))
            found.append(Case(f"top {ALPHA:.0%}", _choosing(keys, int(ALPHA * tokens)), size, TOP_BAR))
    return found


def measure(found: list[Case], repeat: int, console: Console) -> None:
    """Run all cases in turns, `repeat` times after one that compiles."""
    for number in range(repeat + 1):
        for case in found:
            case.measure()
            if number == 0:
                case.seconds.clear()
        if number % 5 == 0:
            console.print(f"kernels: run {number} of {repeat}", soft_wrap=True)


def document(found: list[Case], tokens: int, host: dict[str, Any]) -> dict[str, Any]:
    """Return everything as JSON-ready values: each case beside reading the same bytes, the choices beside scoring."""
    times = {case.name: case.median_s for case in found}
    rows = []
    for case in found:
        choosing = case.name.startswith("top")
        dtype = "float16" if choosing else case.name.split()[1].rstrip(",")
        against = times[f"score {dtype}, 1 a head"] if choosing else times[f"read {dtype}"]
        row: dict[str, Any] = {"case": case.name, "key_bytes": case.key_bytes, "seconds": case.seconds}
        row["bytes_per_s"] = None if choosing else case.key_bytes / case.median_s
        row["figure"] = case.median_s / against if choosing else against / case.median_s
        row["means"] = "share of the time of scoring" if choosing else "share of the bandwidth of reading"
        if case.bar is not None:
            row["bar"] = case.bar
        rows.append(row)
    return {"schema": SCHEMA, "machine": host, "tokens": tokens, "dim": DIM, "heads": HEADS, "threads": 1, "cases": rows}


def bars(told: dict[str, Any]) -> list[Bar]:
    """Return the bars of the kernels and of the spill file."""
    found = [
        Bar(
            5, one["case"], f"{one['case']}: {one['means']}", one["figure"],
            "<=" if one["bytes_per_s"] is None else ">=", one["bar"], COMMAND,
        )
        for one in told["cases"] if "bar" in one
    ]  # fmt: skip
    fetch, memory, device = (told["spill"][key] for key in ("fetch", "memory", "device"))
    fetched = f"fetch of scattered pages of {fetch['request_bytes'] >> 10} KiB: of the disk's bandwidth"
    tokens, peak = f"{told['spill']['tokens']:,} tokens in a spill file: memory", memory["peak_bytes"] / MIB
    link = "bytes over the link, of those that scoring on the host moves"
    return [
        *found,
        Bar(5, "fetch", fetched, fetch["figure"], ">=", FETCH_BAR, COMMAND),
        Bar(5, "memory", tokens, peak, "<=", MEMORY_BAR / MIB, COMMAND, unit="MiB"),
        Bar(5, "link", link, device["figure"], "<=", LINK_BAR, COMMAND, kind="emulated"),
    ]


def measure_spill(directory: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Return what `kv_spill` measures, in a process and a scratch directory of its own."""
    with workplace(directory) as scratch:
        command = [sys.executable, "-m", "tools.bench.kv_spill", str(scratch), str(tokens), str(rounds)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def spill_table(told: dict[str, Any]) -> Table:
    """Return the figures of the spill file."""
    made = Table(title=f"spill file: {told['tokens']:,} tokens of one layer, 8 heads of 128 halves")
    for name in ("what", "measured"):
        made.add_column(name, justify="left" if name == "what" else "right")
    written, fetch, memory, device = (told[key] for key in ("write", "fetch", "memory", "device"))
    rows = [
        ("write and flush", f"{written['kv_bytes'] / written['seconds'] / 1e9:.2f} GB/s"),
        ("restore", f"{told['restore']['seconds'] * 1e3:.0f} ms"),
        (f"fetch of {fetch['request_bytes'] >> 10} KiB pages", f"{fetch['figure']:.2f} of the disk"),
        ("memory of the host", f"{memory['peak_bytes'] / 2**20:.0f} MiB"),
        ("link, emulated device", f"1/{1 / device['figure']:.1f} of the keys"),
        ("scoring, emulated device, wall", f"{statistics.median(device['wall_ns']) / 1e6:.0f} ms"),
        ("scoring, emulated device, modelled", f"{device['modelled_ns'] / 1e6:.0f} ms"),
    ]
    for what, measured in rows:
        made.add_row(what, measured)
    return made


def table(told: dict[str, Any]) -> Table:
    """Return the figures."""
    made = Table(title=f"kernels: {told['heads']} heads of {told['tokens']} keys of {told['dim']}, one core (measured)")
    for name in ("case", "ms", "min..max", "GB/s", "figure", "of"):
        made.add_column(name, justify="left" if name in ("case", "of") else "right")
    for row in told["cases"]:
        times = [1e3 * second for second in row["seconds"]]
        made.add_row(
            row["case"],
            f"{statistics.median(times):.2f}",
            f"{min(times):.2f}..{max(times):.2f}",
            "" if row["bytes_per_s"] is None else f"{row['bytes_per_s'] / 1e9:.1f}",
            f"{row['figure']:.2f}",
            row["means"].rsplit(" of ", 1)[1],
        )
    return made


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every bar is reached, 1 if not."""
    parser = argparse.ArgumentParser(prog="tools/bench/kv", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the spill file goes (4.4 GB)")
    parser.add_argument("--repeat", type=int, default=20, help="runs of each case, in turns")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the tokens: for a look, not for the bars")
    parser.add_argument("--json", type=Path, help="write every run here")
    args = parser.parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    tokens = TOKENS // 16 if args.quick else TOKENS
    found = cases(tokens)
    try:
        with one_interrupt():
            measure(found, args.repeat, console)
            spilled = measure_spill(args.dir, SPILLED // 16 if args.quick else SPILLED, args.repeat)
    except KeyboardInterrupt:
        console.print("interrupted: nothing is written")
        return 1
    told = results.rounded({**document(found, tokens, machine.describe(args.dir)), "spill": spilled})
    judged = bars(told)
    console.print(table(told), spill_table(spilled), bar_table(judged))
    if args.json:
        results.write(args.json, with_bars(told, judged))
    return exit_code(judged)
