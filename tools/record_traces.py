#!/usr/bin/env python3
"""Records the real traces of traces/ on this machine.

    tools/record_traces.py                     # traces/, all of them (as root)
    tools/record_traces.py OUT llama-mmap      # one of them, into OUT

The models are generated (tools/make_model.py); the accesses are real. llama-arena is the access log of an arena mount that
llama.cpp reads through. `llmcache trace` records the others, of programs that use the page cache of a disk. For traces of
loops, a memory cgroup keeps about a third of the loop in memory. The provenance has two measurements of the client:
`step_s`, the median time from one token or pass to the next, and `loop_bytes`, the bytes that one reads. Recordings differ
in timing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llmcache.errors import MissingRequirement, UsageError, run_cli  # noqa: E402 - found through the line above
from llmcache.trace.record import Trace  # noqa: E402
from tools.bench.machine import describe  # noqa: E402
from tools.bench.runner import MIB, cap_bytes, client, loop_bytes, loop_file  # noqa: E402
from tools.bench.runner import record as trace_of  # noqa: E402
from tools.bench.sides import environment  # noqa: E402

KEPT = 0.3  # share of the loop; pages that stay mapped cause no faults and are not seen, so it is small
THREADS = 2  # llama.cpp's threads spin while they wait; with one on each core, a mount would starve
ARENA, ARENA_CACHE, ARENA_TOKENS = "llama-arena", "80Mi", 24


@dataclass(frozen=True)
class TraceSubject:
    """A program to record: its file, its command line, and the bytes that one step reads.

    `loop_bytes` 0: nothing is read again, and memory is not limited.
    """

    file: str
    make: Callable[[Path], None]
    command: Callable[[Path], list[str]]
    loop_bytes: Callable[[Path], int]
    note: str
    tier: str = "auto"


def _model(*options: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        command = [sys.executable, str(ROOT / "tools" / "make_model.py"), str(path), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    return make


def _random_bytes(path: Path) -> None:
    loop_file(path, 64 * MIB)


SUBJECTS = {
    "llama-mmap": TraceSubject(
        "model.gguf",
        _model("--size", "160M"),
        lambda path: client("llama_tokens", path, 12, "--threads", THREADS, "--pause", 0.5),
        loop_bytes,
        "llama.cpp decodes 12 tokens, 0.5 s apart, with a generated, mapped model that does not fit into memory",
    ),
    "llama-no-mmap": TraceSubject(
        "model.gguf",
        _model("--size", "160M"),
        lambda path: client("llama_tokens", path, 10, "--threads", THREADS, "--no-mmap"),
        lambda path: 0,
        "llama.cpp reads a generated model into its own memory (--no-mmap) and decodes 10 tokens",
        tier="syscalls",  # its rows are whole requests
    ),
    "safetensors": TraceSubject(
        "model.safetensors",
        _model("--format", "safetensors", "--size", "120M", "--layers", "6"),
        lambda path: client("tensor_reader", path, 10, "--load", "--pause", 0.3),
        loop_bytes,
        "a generated model, mapped as the safetensors library does; loaded, then 10 tokens, 0.3 s apart; it does not fit",
    ),
    "read-loop": TraceSubject(
        "loop.bin",
        _random_bytes,
        lambda path: client("loop_reader", path, "--how", "read", "--passes", 12),
        lambda path: path.stat().st_size,
        "12 passes of pread() over a file that does not fit into memory",
    ),
}


def record(target: Path, base: Path, force: bool) -> Path:
    subject = SUBJECTS[target.stem]
    with tempfile.TemporaryDirectory(prefix="llmcache-", dir=base) as directory:
        file = Path(directory) / subject.file
        subject.make(file)
        loop, command = subject.loop_bytes(file), subject.command(file)
        cap = cap_bytes(file, command, int(KEPT * loop)) if loop else None
        made = trace_of(file, command, Path(directory) / "trace.parquet", cap, tier=subject.tier)
        trace = Trace.load(made.trace)
        machine = describe(file)
    facts = {"loop_bytes": str(loop), "step_s": f"{made.step_s:.6f}", "machine": json.dumps(machine)}
    facts |= {"memory_bytes": str(cap)} if cap else {}
    said = shlex.join([Path(command[1]).name, *(word.replace(directory, "DIR") for word in command[2:])])
    note = f"{subject.note}; recorded by tools/record_traces.py. {trace.provenance.note}"
    accessed = [each for each in trace.files if each.id in trace.file]
    return _saved(Trace(trace.columns, accessed, trace.provenance), target, force, said, note, facts)


def _saved(trace: Trace, target: Path, force: bool, command: str, note: str, facts: dict[str, str]) -> Path:
    origin = trace.provenance
    provenance = dataclasses.replace(origin, command=command, note=note, extra={**origin.extra, **facts})
    Trace(trace.columns, trace.files, provenance).save(target, force=force)
    return target


def record_arena(target: Path, base: Path, force: bool) -> Path:
    """Record llama.cpp on an arena mount with --access-log: a prompt of 4 tokens, then single tokens."""
    llmcache = [sys.executable, "-m", "llmcache"]
    with tempfile.TemporaryDirectory(prefix="llmcache-", dir=base) as scratch:
        model, point, log = (Path(scratch) / name for name in ("models/model.gguf", "mnt", "log.parquet"))
        point.mkdir()
        _model("--size", "160M")(model)
        options = ["--cache", ARENA_CACHE, "--mode", "arena", "--access-log", str(log)]
        subprocess.run([*llmcache, "mount", str(model.parent), str(point), *options], check=True, env=environment())
        try:
            decode = client("llama_tokens", point / model.name, ARENA_TOKENS, "--threads", THREADS)
            subprocess.run(decode, check=True, stdout=subprocess.DEVNULL)
        finally:
            subprocess.run([*llmcache, "umount", str(point)], check=True, env=environment())
        trace, machine = Trace.load(log), describe(model.parent)
    said = f"record_traces.py {ARENA}: 160M, --cache {ARENA_CACHE}, {ARENA_TOKENS} tokens"
    note = "real accesses of llama.cpp to a generated model; one row for each extent that the mount fetched"
    return _saved(trace, target, force, said, note, {"machine": json.dumps(machine)})


def main() -> int:
    names = [*SUBJECTS, ARENA]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "out", type=Path, nargs="?", default=ROOT / "traces", metavar="OUT", help="directory (default: traces/)"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"traces (default: all): {', '.join(names)}")
    parser.add_argument(
        "--dir", type=Path, default=Path("/var/tmp"), help="directory for the models, on a real disk (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="replace traces that exist")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        raise UsageError(f"NAME: there is no trace {min(unknown)!r}", f"one of: {', '.join(names)}")
    if os.geteuid() != 0:
        raise MissingRequirement("recording and limiting memory need root", "sudo tools/record_traces.py …")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or names:
        target = args.out / f"{name}.parquet"
        if target.exists() and not args.force:
            raise UsageError(f"OUT: {target} exists", "replace it with --force")
        make = record_arena if name == ARENA else record
        print(make(target, args.dir, args.force), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
