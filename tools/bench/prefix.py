"""Measure stored prompts: time to the first token from disk and evaluated, bytes on disk, and the cost of storing.

Each answer comes from a new process with llama.cpp, as after a restart. The stored prompts that it reads are not in memory,
and its storage is limited (--rate, needs root). The tokens are random, as times do not depend on them. The disk cache that
this is compared with is the one of llama-cpp-python.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from llmcache.cgroup import Cgroup
from llmcache.errors import MissingRequirement
from llmcache.units import parse_rate

from .harness import MODELS, common_options, turns, workplace
from .results import Document
from .runner import client, forget
from .sides import environment

SCHEMA = "llmcache-bench-prefix/1"
HEAD = "measured, llama.cpp"
SERVERS = ("valkey-server", "redis-server", "redis-check-rdb")  # redis-check-rdb of Debian's redis-tools is the server too
TARGETS = {
    "restored": ("<=", 0.03), "question": ("<=", 0.06), "conversations": ("<=", 0.2), "generating": ("<=", 0.03),
    "disk_time": ("<", 1.0), "disk_bytes": ("<", 1.0), "shared": ("<=", 0.2),
}  # fmt: skip


@dataclass(frozen=True)
class PromptClient:
    """Runs the client with a model, a number of threads and a storage limit (`rate_bps` 0: no limit)."""

    model: Path
    threads: int
    scratch: Path
    rate_bps: int

    def __call__(self, **options: Any) -> dict[str, Any]:
        words = [str(word) for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        command = client("prefix_prompts", self.model, "--threads", self.threads, *words)
        limited = Cgroup("prefix", directory=self.scratch, read_bps=self.rate_bps) if self.rate_bps else nullcontext()
        with limited as group:
            wrapped = group.wrap(command) if group else command
            result = subprocess.run(wrapped, capture_output=True, text=True, check=False, env=environment())
        if result.returncode:
            raise MissingRequirement(
                f"the client failed: {result.stderr[-1000:]}", "run it alone: tools/bench/clients/prefix_prompts.py"
            )
        said = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
        found: dict[str, Any] = {"answers": [one for one in said if one["event"] == "answer"]}
        return found | {one["event"]: one for one in said if one["event"] in ("load", "cache")}


def first_s(outcome: dict[str, Any]) -> float:
    return float(outcome["answers"][0]["first_s"])


def size_of(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def restored(ask: PromptClient, tokens: int, repeat: int) -> dict[str, Any]:
    """Compare a stored prompt, the same with another question, and llama-cpp-python's disk cache with evaluating the
    prompt.
    """
    kinds, question = {"ours": "", "theirs": "disk:"}, {"own": tokens, "question": 50}
    evaluated = [first_s(ask(**question)) for _ in range(repeat)]
    for kept, kind in kinds.items():
        ask(**question, cache=f"{kind}{ask.scratch / kept}")
    runs: dict[str, list[float]] = {"same": [], "other": [], "theirs": []}
    sizes = {kept: size_of(ask.scratch / kept) for kept in kinds}
    for turn in range(repeat):
        for name, kept, later in (("same", "ours", 0), ("other", "ours", 1 + turn), ("theirs", "theirs", 0)):
            copy = ask.scratch / "copy"
            shutil.copytree(ask.scratch / kept, copy, symlinks=True)
            forget(copy)
            runs[name].append(first_s(ask(**question, turn=later, cache=f"{kinds[kept]}{copy}")))
            shutil.rmtree(copy)
    base = statistics.median(evaluated)
    times = {name: statistics.median(one) for name, one in runs.items()}
    each = f"{tokens:,} tokens, evaluated in {base:.1f} s"
    same, theirs = f"time to first token: stored / evaluated ({each})", "llama-cpp-python's disk cache"
    return {
        "restored": {"what": same, "figure": times["same"] / base},
        "question": {"what": "the same with 50 other tokens at the end of the prompt", "figure": times["other"] / base},
        "disk_time": {
            "what": f"time to first token / {theirs} ({times['theirs']:.2f} s)", "figure": times["same"] / times["theirs"],
        },
        "disk_bytes": {
            "what": f"bytes on disk / {theirs} ({sizes['theirs'] / 1e6:.0f} MB)", "figure": sizes["ours"] / sizes["theirs"],
        },
        "runs": {"evaluated": evaluated, **runs, "bytes": sizes},
    }  # fmt: skip


def conversations(ask: PromptClient, shared: int, count: int) -> dict[str, Any]:
    """Compare the size of `count` stored conversations with a common prompt of `shared` tokens with that of their full
    states.
    """
    kept = ask.scratch / "conversations"
    outcome = ask(shared=shared, own=200, count=count, cache=kept, tokens=16)
    whole = sum(answer["prompt_tokens"] + 16 for answer in outcome["answers"]) * outcome["load"]["token_bytes"]
    what = f"bytes on disk / complete states ({whole / 1e6:,.0f} MB): {count} conversations with {shared:,} tokens in common"
    return {"conversations": {"what": what, "figure": size_of(kept) / whole}}


def generating(ask: PromptClient, tokens: int, length: int, repeat: int) -> dict[str, Any]:
    """Return the share of tokens per second that is lost while prompt and answer are stored in the background."""
    runs: dict[str, list[float]] = {"plain": [], "stored": []}
    kept = ask.scratch / "generating"
    for turn, name in turns(("plain", "stored"), repeat):
        # The blocks of the first answer are written while the second is generated.
        options = {"cache": kept} if name == "stored" else {}
        outcome = ask(own=tokens, tokens=length, count=2, turn=turn, **options)
        runs[name].append(sum(one["whole_s"] - one["first_s"] for one in outcome["answers"]))
        shutil.rmtree(kept, ignore_errors=True)
    lost = 1 - statistics.median(runs["plain"]) / statistics.median(runs["stored"])
    what = f"share of tokens per second lost while prompts of {tokens:,} tokens are stored in the background"
    return {"generating": {"what": what, "figure": lost, "runs": runs}}


def shared(ask: PromptClient, tokens: int, repeat: int) -> dict[str, Any]:
    """Compare fetching a prompt from a server on loopback, in a new process with an empty directory, with evaluating it."""
    program = next((found for name in SERVERS if (found := shutil.which(name))), None)
    if program is None or importlib.util.find_spec("redis") is None:
        return {}  # then there is no such target
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(ask.scratch)]
    server = subprocess.Popen(words, executable=program, stdout=subprocess.DEVNULL)
    try:
        address = f"redis://127.0.0.1:{port}/0"
        evaluated = first_s(ask(own=tokens, cache=ask.scratch / "pushed", shared_tier=address))
        caches = [ask.scratch / f"fetched-{turn}" for turn in range(repeat)]
        runs = [first_s(ask(own=tokens, cache=cache, shared_tier=address)) for cache in caches]
    finally:
        server.kill()
        server.wait()
    what = f"time to first token: from another process over loopback / evaluated ({tokens:,} tokens)"
    outcome = {"evaluated": evaluated, "own": runs}
    return {"shared": {"what": what, "figure": statistics.median(runs) / evaluated, "runs": outcome}}


def options(parser: argparse.ArgumentParser) -> None:
    smollm2 = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    parser.add_argument("--model", type=Path, default=smollm2, help="GGUF file [SmolLM2, which tools/test downloads]")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the long prompt [%(default)s]")
    common_options(parser, "stored prompts, on a real disk", "shorter prompts, fewer runs", repeat=3)
    parser.add_argument("--rate", default="500M", help="storage limit in bytes per second; 0: none [%(default)s]")
    parser.add_argument("--threads", type=int, default=2, help="threads of llama.cpp [%(default)s]")


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    if not args.model.exists():
        raise MissingRequirement(f"{args.model} does not exist", "tools/test downloads SmolLM2; --model takes another file")
    tokens, repeat = (1024, 1) if args.quick else (args.tokens, args.repeat)
    parts: dict[str, Any] = {}
    with workplace(args.dir) as scratch:
        ask = PromptClient(args.model, args.threads, scratch, parse_rate(args.rate) if args.rate != "0" else 0)
        measured: dict[str, Callable[[], dict[str, Any]]] = {
            "restored": lambda: restored(ask, tokens, repeat),
            "conversations": lambda: conversations(ask, tokens // 2, 10 if args.quick else 50),
            "generating": lambda: generating(ask, tokens, 32 if args.quick else 256, 1 if args.quick else 2 * repeat + 1),
            "shared": lambda: shared(ask, tokens, repeat),
        }
        for name, part in measured.items():
            begin = time.monotonic()
            parts |= part()
            console.print(f"{name}: {time.monotonic() - begin:.0f} s", soft_wrap=True)
    about = {"quick": args.quick, "model": args.model.name, "tokens": tokens, "threads": args.threads}
    yield {**about, "rate_bps": args.rate, "repeat": repeat, "parts": parts}
