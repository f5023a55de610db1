"""Measure how much tracers slow down a process that reads cached blocks, and how many events are lost.

Runs are interleaved, so that other load on the machine affects all tracers alike. A ratio is the median over the rounds of
the time with a tracer / the time without one in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from llmcache.errors import MissingRequirement
from llmcache.procfs import status_of
from llmcache.trace.record import Trace

from .harness import common_options, turns, workplace
from .results import Document, Target, markdown
from .runner import CLIENTS
from .sides import environment

SCHEMA = "llmcache-bench-trace/2"
FILE_BYTES = 64 << 20
SIZES = (4096, 1 << 20)
MOST_OVERHEAD = 1.35
LEAST_CHEAPER = 20.0
PAIR_S = 0.5
RATE = 550_000  # of single events per second that must not be lost
MOST_START_S = 0.5
ATTACH_S = 20.0


@dataclass(frozen=True)
class Tracer:
    """A tracer; an empty `command` traces nothing. PID and OUT in `command` stand for the process and the output.

    It has started when `said` appears on its stderr, and, if `ptraces`, a debugger is attached to the process; `settle_s` is
    a delay before that for tracers that print nothing.
    """

    name: str
    command: Sequence[str] = ()
    said: str = ""
    ptraces: bool = False
    settle_s: float = 0.0

    @contextmanager
    def on(self, pid: int, out: Path) -> Iterator[None]:
        """Trace `pid` during the with block, then interrupt the tracer and wait for its end."""
        if not self.command:
            yield
            return
        words = [word.replace("PID", str(pid)).replace("OUT", str(out)) for word in self.command]
        log = out.with_suffix(".log")
        with log.open("w") as stderr:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment())
        try:
            self._wait(process, pid, log)
            yield
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def _wait(self, process: subprocess.Popen[str], pid: int, log: Path) -> None:
        time.sleep(self.settle_s)
        deadline = time.monotonic() + ATTACH_S
        while process.poll() is None and time.monotonic() < deadline:
            if self.said in log.read_text() and not (self.ptraces and status_of(pid)["TracerPid"] == "0"):
                return
            time.sleep(0.01)
        raise MissingRequirement(f"{self.name} does not attach: {log.read_text().strip()[-300:]}")


def llmcache(name: str, *options: str) -> Tracer:
    """Return a tracer that runs `llmcache trace` with some options."""
    command = [sys.executable, "-m", "llmcache", "trace", "PID", "-o", "OUT.parquet", "--force", *options]
    return Tracer(name, command, said="recording")


def tracers() -> list[Tracer]:
    """Return the tracers that are installed, the process without a tracer first."""
    found = [
        Tracer("none"),
        llmcache("llmcache"),
        llmcache("llmcache --no-writes", "--no-writes"),
        llmcache("llmcache --no-coalesce", "--no-coalesce"),
    ]
    if shutil.which("strace"):
        command = ["strace", "-f", "-q", "-ttt", "-e", "trace=desc", "-o", "OUT.strace", "-p", "PID"]
        found.append(Tracer("strace", command, ptraces=True))
    if shutil.which("perf"):
        command = ["perf", "trace", "-e", "pread64", "-o", "OUT.perf", "-p", "PID"]
        found.append(Tracer("perf trace", command, settle_s=2.0))  # it prints nothing
    return found


def run_client(client: Path, file: Path, seconds: float, size: int, tracer: Tracer, out: Path, rate: int = 0) -> float:
    """Return the nanoseconds per read of `size` bytes (at most `rate` per second) while `tracer` is attached."""
    command = [str(client), str(file), str(seconds), str(size), str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        try:
            with tracer.on(process.pid, out):
                process.stdin.write("\n")
                process.stdin.close()
                printed = json.loads(process.stdout.readline())
        finally:
            process.kill()
    return float(printed["seconds"]) / int(printed["ops"]) * 1e9


def overheads(client: Path, scratch: Path, seconds: float, rounds: int, console: Console) -> list[dict[str, Any]]:
    """Return a row with all runs for each tracer and read size; tracers that do not work here are left out."""
    file, chosen = scratch / "data", tracers()
    found: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds):
        for size in SIZES:
            for tracer in list(chosen):
                try:
                    took = run_client(client, file, seconds, size, tracer, scratch / "out")
                except MissingRequirement as error:
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
    """Return short runs with and without the recorder in alternating order, for differences smaller than the noise."""
    without, recorded = Tracer("none"), llmcache("llmcache")
    found: dict[str, list[float]] = {"none": [], "llmcache": []}
    for _, tracer in turns((recorded, without), pairs):
        found[tracer.name].append(run_client(client, scratch / "data", PAIR_S, size, tracer, scratch / "out"))
        _clear(scratch)
    return {"read_bytes": size, **found, "ratio": ratio(found["llmcache"], found["none"])}


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the median ratio of runs in the same round."""
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


def rate(client: Path, scratch: Path, seconds: float, limit: int) -> dict[str, Any]:
    """Return the rates of recorded and lost single events, for a process that reads `limit` times a second."""
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
    """Return the seconds from the start of the recorder to the first recorded access of a process that reads all the
    time.
    """
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


def targets(document: Document) -> list[Target]:
    """Return the targets; without strace there is no comparison with it."""
    by_key = {(row["tracer"], row["read_bytes"]): row["ns_per_read"] for row in document["overheads"]}
    small, seconds = document["pairs"][0], statistics.median(document["start_s"])
    what = "time from the start of the recorder to the first recorded access"
    events = f"events lost of {document['rate'][0]['events_per_s']:,.0f} events per second"
    found = [
        Target("small", "cached 4 KiB preads: time while traced / untraced", small["ratio"], "<=", MOST_OVERHEAD),
        Target("lost", events, document["rate"][0]["lost"], "<=", 0),
        Target("start", what, seconds, "<", MOST_START_S, unit="s"),
    ]
    if ("strace", SIZES[0]) in by_key:
        cheaper = ratio(by_key["strace", SIZES[0]], by_key["llmcache", SIZES[0]])
        what = "cached 4 KiB preads: time under strace / time under llmcache trace"
        found.append(Target("strace", what, cheaper, ">=", LEAST_CHEAPER))
    return found


def _clear(scratch: Path) -> None:
    for left in scratch.glob("out*"):
        left.unlink()


def options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "the file and the traces")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each tracer, interleaved [%(default)s]")
    pairs = "pairs of short runs without and with llmcache trace, for the targets [%(default)s]"
    parser.add_argument("--pairs", type=int, default=21, help=pairs)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each run [%(default)s]")


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise MissingRequirement("no C compiler is installed", "apt-get install gcc")
    with workplace(args.dir) as scratch:
        client = scratch / "preads"
        subprocess.run([compiler, "-O2", "-o", str(client), str(CLIENTS / "preads.c")], check=True)
        (scratch / "data").write_bytes(os.urandom(FILE_BYTES))
        rows = overheads(client, scratch, args.seconds, args.rounds, console)
        pairs = [paired(client, scratch, SIZES[0], args.pairs)]
        rates = [rate(client, scratch, max(10.0, args.seconds), RATE)]
        yield {"overheads": rows, "pairs": pairs, "rate": rates, "start_s": start(client, scratch, args.rounds)}


def table(document: Document) -> str:
    sizes = sorted({one["read_bytes"] for one in document["overheads"]})
    tracers = dict.fromkeys(one["tracer"] for one in document["overheads"] if one["tracer"] != "none")
    ratios = {(one["tracer"], one["read_bytes"]): one["ratio"] for one in document["overheads"]}
    head = [
        "tracer",
        *(f"preads of {size >> 10} KiB" if size < 1 << 20 else f"preads of {size >> 20} MiB" for size in sizes),
    ]
    return markdown(head, [[tracer, *(f"{ratios[tracer, size]:.2f}" for size in sizes)] for tracer in tracers])
