#!/usr/bin/env python3
"""Records llama.cpp reading a model through a mount: traces/llama-arena.parquet, made again on this machine.

    tools/record_llama.py OUT.parquet [--size 160M] [--cache 80Mi] [--tokens 24]

The model is generated (tools/make_model.py), the accesses are real: llama-cpp-python loads it by mmap through an arena
mount with --access-log, evaluates a prompt of 4 tokens and then single tokens. Needs FUSE and the [llama] extra.
"""

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

THREADS = 2  # llama.cpp's threads spin while they wait: with one on each core the mount would starve
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmcache.trace.record import Trace  # noqa: E402 - found through the line above
from tools.bench.machine import describe  # noqa: E402
from tools.bench.runner import client  # noqa: E402
from tools.bench.sides import environment  # noqa: E402


def record(model: Path, point: Path, log: Path, cache: str, tokens: int) -> None:
    """Mount the directory of `model` on `point`, decode, unmount; the log is then complete."""
    llmcache = [sys.executable, "-m", "llmcache"]
    options = ["--cache", cache, "--mode", "arena", "--access-log", str(log)]
    subprocess.run([*llmcache, "mount", str(model.parent), str(point), *options], check=True, env=environment())
    try:
        decode = client("llama_tokens", point / model.name, tokens, "--threads", THREADS)
        subprocess.run(decode, check=True, stdout=subprocess.DEVNULL)
    finally:
        subprocess.run([*llmcache, "umount", str(point)], check=True, env=environment())


def main() -> None:
    """Make the model, record, and add to the provenance what the daemon cannot know."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.parquet")
    parser.add_argument("--size", default="160M", help="of the model (default: %(default)s)")
    parser.add_argument("--cache", default="80Mi", help="budget of the mount (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="decoded after the prompt (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace OUT.parquet")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmcache-") as scratch:
        model, point, log = (Path(scratch) / name for name in ("models/model.gguf", "mnt", "log.parquet"))
        model.parent.mkdir()
        point.mkdir()
        make = [sys.executable, str(ROOT / "tools" / "make_model.py"), str(model), "--size", args.size]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        record(model, point, log, args.cache, args.tokens)
        trace = Trace.load(log)
        machine = describe(model.parent)
    words = [Path(sys.argv[0]).name, args.out.name, "--size", args.size, "--cache", args.cache]
    trace.provenance = dataclasses.replace(
        trace.provenance,
        command=shlex.join([*words, "--tokens", str(args.tokens)]),
        note="real accesses of llama.cpp to a generated model; one row for each extent that the mount fetched",
        extra={**trace.provenance.extra, "machine": json.dumps(machine)},
    )
    trace.save(args.out, force=args.force)


if __name__ == "__main__":
    main()
