"""The tracing benchmark's command line: what tracers cost a process that reads cached blocks, and how much is lost.

Rounds are interleaved, so that what else the machine does falls on all tracers alike; a ratio is the median of those of
the rounds, each to the run without a tracer that came just before or after.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmcache.trace.record import Trace

from . import machine, results
from .bars import Bar, exit_code, with_bars
from .bars import table as bar_table
from .errors import BenchError
from .signals import one_interrupt
from .tracers import Tracer, llmcache, tracers

SCHEMA = "llmcache-bench-trace/2"
SOURCE = Path(__file__).parent / "clients" / "preads.c"
FILE_BYTES = 64 << 20
SIZES = (4096, 1 << 20)
MOST_OVERHEAD = 1.35
LEAST_CHEAPER = 20.0
CHANCE = 0.05  # nothing measurable: were there no difference, as many of the pairs or more would be slower so often
PAIR_S = 0.5
LEAST_RATE = 500_000
MOST_START_S = 0.5


def run_client(client: Path, file: Path, seconds: float, size: int, tracer: Tracer, out: Path, rate: int = 0) -> float:
    """Returns nanoseconds per read of `size` bytes (at most `rate` per second) while `tracer` is attached."""
    command = [str(client), str(file), str(seconds), str(size), str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        try:
            with tracer.on(process.pid, out):
                process.stdin.write("\n")
                process.stdin.close()
                told = json.loads(process.stdout.readline())
        finally:
            process.kill()
    return float(told["seconds"]) / int(told["ops"]) * 1e9


def overheads(client: Path, scratch: Path, seconds: float, rounds: int, console: Console) -> list[dict[str, Any]]:
    """Returns a row for each tracer and size of reads, with every run; a tracer that does not work here is left out."""
    file, chosen = scratch / "data", tracers()
    found: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds):
        for size in SIZES:
            for tracer in list(chosen):
                try:
                    took = run_client(client, file, seconds, size, tracer, scratch / "out")
                except BenchError as error:
                    console.print(f"left out: {error.message}", soft_wrap=True)
                    chosen.remove(tracer)
                    continue
                found.setdefault((tracer.name, size), []).append(took)
                _clear(scratch)
        console.print(f"overhead: round {number + 1} of {rounds}")
    names = [tracer.name for tracer in chosen]
    rows: list[dict[str, Any]] = [
        {"tracer": name, "read_bytes": size, "ns_per_read": found[name, size]} for size in SIZES for name in names
    ]
    for row in rows:
        row["ratio"] = ratio(row["ns_per_read"], found["none", int(row["read_bytes"])])
    return rows


def paired(client: Path, scratch: Path, size: int, pairs: int) -> dict[str, Any]:
    """Returns short runs with and without the recorder in turns, the order changing: for differences less than the noise."""
    without, recorded = Tracer("none"), llmcache("llmcache")
    found: dict[str, list[float]] = {"none": [], "llmcache": []}
    for number in range(pairs):
        for tracer in (without, recorded) if number % 2 else (recorded, without):
            found[tracer.name].append(run_client(client, scratch / "data", PAIR_S, size, tracer, scratch / "out"))
            _clear(scratch)
    return {"read_bytes": size, **found, "ratio": ratio(found["llmcache"], found["none"])}


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """Returns the median of the ratios of runs in the same round."""
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


def chance(some: Sequence[float], others: Sequence[float]) -> float:
    """Returns how probable as many pairs as these, or more, are slower by chance alone (the sign test, one-sided)."""
    pairs = len(some)
    slower = sum(one > other for one, other in zip(some, others, strict=True))
    return sum(math.comb(pairs, number) for number in range(slower, pairs + 1)) / (1 << pairs)


def _median(row: dict[str, Any]) -> float:
    runs: list[float] = row["ns_per_read"]
    return statistics.median(runs)


def rate(client: Path, scratch: Path, seconds: float, limit: int) -> dict[str, Any]:
    """Returns how many single events per second are recorded of a process that reads so often (0: as it can), and lost."""
    tracer = llmcache("rate", "--no-coalesce", "--no-writes")
    run_client(client, scratch / "data", seconds, 4096, tracer, scratch / "out", limit)
    found = Trace.load(scratch / "out.parquet")
    span_s = (int(found.t_ns[-1]) - int(found.t_ns[0])) / 1e9
    _clear(scratch)
    return {
        "seconds": span_s,
        "events": len(found),
        "events_per_s": len(found) / span_s,
        "lost": found.provenance.lost_events,
    }


def start(client: Path, scratch: Path, rounds: int) -> list[float]:
    """Returns seconds from the start of the recorder to the first access in the trace, of a process that always reads."""
    found = []
    command = [str(client), str(scratch / "data"), "60", "4096"]
    for _ in range(rounds):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.close()
            began = time.monotonic_ns()
            try:
                with llmcache("start").on(process.pid, scratch / "out"):
                    time.sleep(0.1)
            finally:
                process.kill()
        found.append((int(Trace.load(scratch / "out.parquet").t_ns[0]) - began) / 1e9)
        _clear(scratch)
    return found


def bars(told: dict[str, Any]) -> list[Bar]:
    """Returns what was wanted, what was measured, and whether it suffices; without strace nothing is compared with it."""
    by_key = {(row["tracer"], row["read_bytes"]): row["ns_per_read"] for row in told["overheads"]}
    small, large = told["pairs"]
    events, seconds = told["rate"][0], statistics.median(told["start_s"])
    unseen = f"cached 1 MiB preads: chance that as many pairs are slower without a cause (ratio {large['ratio']:.2f})"
    found = [
        _bar("small", "cached 4 KiB preads while traced: times as long", small["ratio"], "<=", MOST_OVERHEAD),
        _bar("large", unseen, chance(large["llmcache"], large["none"]), ">=", CHANCE),
        _bar("rate", "single events recorded", events["events_per_s"], ">=", LEAST_RATE, "events/s"),
        _bar("lost", "events lost at that rate", events["lost"], "<=", 0),
        _bar("start", "from the start of the recorder to the first access recorded", seconds, "<", MOST_START_S, "s"),
    ]
    if ("strace", SIZES[0]) in by_key:
        cheaper = ratio(by_key["strace", SIZES[0]], by_key["llmcache", SIZES[0]])
        found.append(_bar("strace", "times as long under strace as under llmcache trace", cheaper, ">=", LEAST_CHEAPER))
    return found


def _bar(name: str, what: str, value: float, sense: str, limit: float, unit: str = "") -> Bar:
    return Bar(4, name, what, value, sense, limit, "tools/bench/trace", unit=unit)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the overheads for people."""
    made = Table(title="what tracing costs a process that reads cached blocks (measured)")
    for name in ("tracer", "read", "ns per read", "min..max", "ratio"):
        made.add_column(name, justify="left" if name == "tracer" else "right")
    for row in rows:
        runs = row["ns_per_read"]
        size = "4 KiB" if row["read_bytes"] == SIZES[0] else "1 MiB"
        made.add_row(row["tracer"], size, f"{_median(row):.0f}", f"{min(runs):.0f}..{max(runs):.0f}", f"{row['ratio']:.2f}x")
    return made


def _clear(scratch: Path) -> None:
    for left in scratch.glob("out*"):
        left.unlink()


@contextmanager
def workplace(directory: Path) -> Iterator[tuple[Path, Path]]:
    """Yields the compiled client and a fresh directory with a cached file, removed at the end."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BenchError("there is no C compiler", "install gcc or clang")
    scratch = directory / f".llmcache-bench-{os.getpid()}"
    scratch.mkdir(parents=True)
    try:
        client = scratch / "preads"
        subprocess.run([compiler, "-O2", "-o", str(client), str(SOURCE)], check=True)
        (scratch / "data").write_bytes(os.urandom(FILE_BYTES))
        yield client, scratch
    finally:
        shutil.rmtree(scratch)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(prog="tools/bench/trace", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the file and the traces go")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each tracer, in turns")
    parser.add_argument("--pairs", type=int, default=21, help="short runs without and with llmcache, for the bars")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--json", type=Path, help="write every run here")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if every bar is reached, 1 if not."""
    args = arguments(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        with one_interrupt(), workplace(args.dir) as (client, scratch):
            host = machine.describe(scratch)
            rows = overheads(client, scratch, args.seconds, args.rounds, console)
            pairs = [paired(client, scratch, size, args.pairs) for size in SIZES]
            events = rate(client, scratch, max(10.0, args.seconds), LEAST_RATE * 11 // 10)
            fastest = rate(client, scratch, max(10.0, args.seconds), 0)
            starts = start(client, scratch, args.rounds)
    except BenchError as error:
        console.print(f"tools/bench/trace: {error}", soft_wrap=True)
        return 3
    about = {"schema": SCHEMA, "machine": host}
    measured = {"overheads": rows, "pairs": pairs, "rate": [events, fastest], "start_s": starts}
    told = results.rounded({**about, **measured})
    judged = bars(told)
    console.print(table(rows), bar_table(judged))
    console.print(f"as fast as it can: {fastest['events_per_s']:,.0f} events/s, lost {fastest['lost']:,}")
    if args.json:
        results.write(args.json, with_bars(told, judged))
    return exit_code(judged)
