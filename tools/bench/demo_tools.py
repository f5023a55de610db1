"""The demo's second half: what trace, classify and size say of the same program."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from llmcache.errors import LlmcacheError
from llmcache.units import format_size
from tools.bench import tracing
from tools.bench.errors import BenchError
from tools.bench.runner import client
from tools.bench.sides import environment

KEPT = 0.2  # of the loop: pages that stay mapped are read without a fault, and no trace of faults shows them
TOKENS = 5
_SUGGESTED = re.compile(r"llmcache size (--loop \S+ --hot \S+)")


@dataclass(frozen=True)
class Demonstration:
    """The model of the demo and what was measured with it: bytes per second of the storage limit, seconds per token.

    `token_bytes`: less than `loop_bytes` where it is a mixture.
    """

    model: Path
    loop_bytes: int
    token_bytes: int
    threads: int
    read_bps: int
    compute_s: float
    anon_bytes: int


def show_tools(each: Demonstration, trace: Path, console: Console) -> bool:
    """Run the three steps; returns whether nothing went wrong. Where tracing cannot work, says why and goes on."""
    console.print(f"\n5. llmcache trace: {TOKENS} tokens over the page cache, which holds little of the loop")
    try:
        command = client("llama_tokens", each.model, TOKENS, "--threads", each.threads)
        cap = each.anon_bytes + tracing.ROOM_BYTES + int(KEPT * each.loop_bytes)
        made = tracing.record(each.model, command, trace, cap)
    except (BenchError, LlmcacheError) as error:
        console.print(f"   cannot record here: {error.message}" + (f"\n   hint: {error.hint}" if error.hint else ""))
        console.print("   steps 6 and 7 go on with the model file alone")
        console.print("6. llmcache classify: left out, there is no trace")
        return _size(each, ["--model", str(each.model)], console)
    for line in made.said.splitlines():
        console.print(f"   {line}", soft_wrap=True)
    console.print("6. llmcache classify: what was read in loops, once, or again and again, by tensor and layer")
    output = _run(["classify", str(trace), "--min-bytes", "1M"], console)
    if output is None:
        return False
    console.print(output, soft_wrap=True)
    console.print(f"   the model's header says {format_size(each.token_bytes)} per token; one took {made.step_s:.2f} s")
    if each.token_bytes < each.loop_bytes:  # what was read once, or now and then, are experts
        return _size(each, ["--model", str(each.model)], console)
    suggested = _SUGGESTED.search(output)
    if suggested is None:
        console.print("   no loop was found: the tier named above does not see what mapped files are read")
    loop = suggested[1].split() if suggested else ["--model", str(each.model)]
    return _size(each, loop, console)


def _size(each: Demonstration, loop: list[str], console: Console) -> bool:
    console.print("7. llmcache size: how large a cache serves that loop without stalls, at the storage limit of this demo")
    rate, period = f"{each.read_bps / 1e6:.10g}MB/s", f"{each.compute_s * 1e3:.0f}ms"
    output = _run(["size", *loop, "--bw", rate, "--t", period], console)
    console.print(output or "", soft_wrap=True)
    return output is not None


def _run(words: list[str], console: Console) -> str | None:
    """What an llmcache command prints; None, with its error shown, if it fails."""
    console.print(f"   $ llmcache {shlex.join(words)}", soft_wrap=True)
    result = subprocess.run(
        [sys.executable, "-m", "llmcache", *words],
        capture_output=True, text=True, timeout=120, check=False, env={**environment(), "COLUMNS": "110"},
    )  # fmt: skip
    if result.returncode == 0:
        return result.stdout.rstrip()
    console.print(f"   {result.stderr.strip()}", soft_wrap=True)
    return None
