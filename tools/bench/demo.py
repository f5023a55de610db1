"""Compare the stock llama.cpp server over plain storage and over llmcachefs: same memory, same storage limit.

The server runs with its default flags and a Q8_0 model, which llama.cpp maps and reads in place on x86-64. (It would copy
weights of Q4_0 or Q4_K into its own memory, which is called repacking.) The page cache is run with the current read_ahead_kb
and with 128. Afterwards, `llmcache trace`, `classify` and `size` analyze the same server.

Each token reads more of the model than fits in the memory that is left for caching. tools/demo runs this and installs what
it needs. The demo unmounts and removes its cgroups when it ends, also on Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from llmcache.errors import LlmcacheError
from llmcache.mount.backends.touches import why_not
from llmcache.mount.readahead import SMALL_READ_AHEAD_KB
from llmcache.units import format_rate, format_size, parse_rate, parse_size
from tools.make_model import BYTES_PER_VALUE, MoeShape, choose_shape
from tools.make_model import make_model as generate

from . import machine, mount, routing
from .experiment import Comparison, Experiment, Rig, Routed
from .harness import MODELS, one_interrupt, report
from .results import markdown
from .runner import ROOM_BYTES, loop_bytes, record
from .sides import Mounted, environment, kernels

KEPT = 0.2  # share of the loop; reads of pages that stay mapped cause no faults, so no trace of faults shows them
PROMPT, TOKENS = 4, 5  # tokens of the prompt, and of the answer that is traced
COPIED = 0.5  # share of the loop; a server that copies the weights has more private memory than this, others about 0.1
_SUGGESTED = re.compile(r"llmcache size (--loop \S+ --hot \S+)")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/demo", description=__doc__)
    parser.add_argument(
        "--dir", type=Path, default=MODELS, help="directory on a real disk where the model is kept [%(default)s]"
    )
    parser.add_argument("--size", default="700M", help="size of the generated model [%(default)s]")
    parser.add_argument("--rate", default="500M", help="storage limit in bytes per second [%(default)s]")
    parser.add_argument(
        "--fraction", type=float, default=0.75, help="share of the loop that the cache may hold [%(default)s]"
    )
    parser.add_argument(
        "--experts", type=int, default=0, help="generate an MoE model with this number of experts per layer [dense]"
    )
    parser.add_argument("--used", type=int, default=4, help="experts per layer that a token uses [%(default)s]")
    per_run = f"tokens per run [8, of which {mount.TOKEN_WARMUP} warm up; MoE model: 40, 15]"
    parser.add_argument("--tokens", type=int, help=per_run)
    parser.add_argument("--repeat", type=int, default=2, help="runs of each side, interleaved [%(default)s]")
    modes = ("auto", "inplace", "steer", "arena")
    parser.add_argument("--mode", choices=modes, default="auto", help="mode of llmcachefs [%(default)s]")
    return parser.parse_args(argv)


def make_model(directory: Path, size: str, experts: int = 0, used: int = 0) -> Path:
    """Return the path of the generated model; a model of an earlier run is reused."""
    moe = MoeShape(experts, used, 500_000) if experts else None
    shape = choose_shape(parse_size(size), BYTES_PER_VALUE["gguf"], None, False, moe)
    (model,) = generate(directory / f"demo-{size}{f'-{experts}x{used}' if experts else ''}.gguf", shape, "gguf", 1, 0)
    return model


def experiment(args: argparse.Namespace, model: Path) -> Experiment:
    loop, routed = loop_bytes(model), None
    if args.experts:
        dense = routing.dense_bytes(routing.layout_of(model))
        routed = Routed(dense + (loop - dense) * args.used / args.experts, None)
    steps = args.tokens or (8 if routed is None else 40)
    return Experiment(
        case="a",
        name="llama.cpp",
        file=model,
        loop_bytes=loop,
        cache_bytes=int(args.fraction * loop),
        command=mount.answers(1, PROMPT, steps),
        steps=steps,
        warmup=mount.TOKEN_WARMUP if routed is None else min(15, steps // 2),
        read_bps=parse_rate(args.rate),
        routed=routed,
    )


def result_table(outcome: Comparison, document: mount.Result) -> tuple[str, str]:
    """Return the conditions of the comparison, and its results in Markdown. Each row is either measured or modelled."""
    each = outcome.experiment
    token_bytes = each.loop_bytes if each.routed is None else int(each.routed.token_bytes)
    title = (
        f"{format_size(token_bytes)} of {format_size(each.loop_bytes)} read per token, "
        f"cache {format_size(each.cache_bytes)}, storage {format_rate(each.read_bps or 0)}, "
        f"total memory {format_size(outcome.cap_bytes or 0)}"
    )
    rows = []
    labels = {"kernel": "page cache", "mount": f"llmcachefs, {mount.mode_of(document, 'mount')}"}
    for side in outcome.sides:
        label = labels.get(side, f"page cache, read_ahead_kb {SMALL_READ_AHEAD_KB}")
        times, median = mount.steps(document, side), mount.seconds(document, side)
        spread, read = f"{min(times):.3f}..{max(times):.3f}", f"{mount.storage_bytes(document, side) / 1e6:.0f}"
        rows.append((label, "measured", f"{median:.3f}", spread, read, f"{1 / median:.2f}"))
    bound, missing = outcome.bound_s(), max(0, each.loop_bytes - each.cache_bytes)
    others = [("bound max(compute, (N-S)/BW)", "modelled", bound, missing)] if each.routed is None else []
    for label, kind, seconds, read_bytes in (*others, ("all in memory", "measured", outcome.compute_s, 0)):
        rows.append((label, kind, f"{seconds:.3f}", "", f"{read_bytes / 1e6:.0f}", f"{1 / seconds:.2f}"))
    return title, markdown(["", "", "s/token", "min..max", "MB read/token", "tokens/s"], rows, texts=(0, 1))


def same_answers(outcome: Comparison) -> bool:
    """Return whether all runs gave the same tokens with the same log-probabilities, over the length of the shorter run."""
    runs = [[step.crc for step in one.steps] for run in outcome.runs for one in run.clients]
    longest = max(runs, key=len)
    return all(run == longest[: len(run)] for run in runs)


def show(outcome: Comparison, console: Console) -> bool:
    """Print the results and a summary; return whether every run succeeded with identical tokens."""
    document = outcome.to_json()
    title, made = result_table(outcome, document)
    console.print(title, Markdown(made))
    median, kernel = mount.seconds(document, "mount"), mount.seconds(document, mount.kernel(document))
    same = same_answers(outcome)
    bound = "" if outcome.experiment.routed else f", {median / outcome.bound_s():.2f} x the bound"
    console.print(
        f"llmcachefs: {kernel / median:.1f} x as fast as the page cache{bound}; "
        f"tokens and their probabilities {'are identical in all runs' if same else 'DIFFER: a wrong byte was read'}"
    )
    own = f"The server's own memory is {format_size(outcome.anon_bytes)}"
    if outcome.anon_bytes < COPIED * outcome.experiment.loop_bytes:
        console.print(f"{own}: it reads the weights from the page cache or from llmcachefs, and does not copy them.")
    else:
        console.print(f"{own}: here it copies the weights, so no file cache can help. llama-server has --no-repack.")
    return same and not any(outcome.problems(side) for side in outcome.sides)


def demo(args: argparse.Namespace, console: Console, scratch: Path) -> int:
    began = time.monotonic()
    console.print(f"1. model: about {args.size} of Q8_0 GGUF in {args.dir} (generated once, then kept)")
    console.print("   the stock llama.cpp server maps Q8_0 on x86-64; it copies Q4_0 and Q4_K by default, see docs/index.md")
    model = make_model(args.dir.resolve(), args.size, args.experts, args.used)
    plan = experiment(args, model)
    host = machine.describe(model)
    token_bytes, order = plan.loop_bytes, "always in the same order"
    if plan.routed is not None:
        token_bytes, order = int(plan.routed.token_bytes), f"{args.used} of {args.experts} experts in each layer"
    console.print(f"   {model.name}: each token reads {format_size(token_bytes)} of it, {order}")
    console.print(f"   {host['cpu']}, kernel {host['kernel']}, disk {host['device']['name']}")
    console.print("2. the server alone, default flags, no memory limit: the time to compute a token")
    console.print(
        f"3. {args.repeat} runs of {plan.steps} tokens for each side, in a cgroup with server, daemon and page cache, "
        f"storage limited to {format_rate(plan.read_bps or 0)} (s per token; the first {plan.warmup} are warm-up)",
        soft_wrap=True,
    )
    options: tuple[str, ...] = () if args.mode == "auto" else ("--mode", args.mode)
    is_in_place = args.mode == "inplace" or (args.mode == "auto" and why_not(str(model.parent)) is None)
    if plan.routed is not None and is_in_place:  # the expert slices decide how much the kernel should read around a fault
        options += ("--read-ahead", f"{routing.read_ahead_kb(routing.layout_of(model))}Ki")
    bench = Rig(scratch, (*kernels(model.parent), Mounted(options=options)), args.repeat, console.print)
    outcome = bench.measure(plan)
    console.print("4. unmounted, cgroups removed\n")
    good = show(outcome, console)
    good = show_tools(outcome, token_bytes, scratch / "llama.parquet", console) and good
    console.print(f"done in {time.monotonic() - began:.0f} s")
    return 0 if good else 1


def show_tools(outcome: Comparison, token_bytes: int, trace: Path, console: Console) -> bool:
    """Run trace, classify and size on the same server and print their output; return whether none of them failed.

    `token_bytes`: bytes of the model that a token reads. If tracing is not possible, print why and skip classify.
    """
    model, loop_size = outcome.experiment.file, outcome.experiment.loop_bytes
    header = ["--model", str(model)]
    console.print(f"\n5. llmcache trace: {TOKENS} tokens with the page cache, which holds little of the loop")
    try:
        command = mount.answers(1, PROMPT, TOKENS)("trace", model)
        cap = outcome.anon_bytes + ROOM_BYTES + int(KEPT * loop_size)
        made = record(model, command, trace, cap)
    except LlmcacheError as error:
        console.print(f"   cannot record: {error.message}" + (f"\n   hint: {error.hint}" if error.hint else ""))
        console.print("   step 7 uses the model file instead of a trace")
        console.print("6. llmcache classify: skipped, there is no trace")
        return _size(outcome, header, console)
    for line in made.said.splitlines():
        console.print(f"   {line}", soft_wrap=True)
    console.print("6. llmcache classify: data read in loops, once or frequently, by tensor and layer")
    output = _run(["classify", str(trace), "--min-bytes", "1M"], console)
    if output is None:
        return False
    console.print(output, soft_wrap=True)
    console.print(f"   by the model's header, a token reads {format_size(token_bytes)}; a token took {made.step_s:.2f} s")
    if token_bytes < loop_size:  # an MoE model: classify reports most experts as data read once, not as a loop
        return _size(outcome, header, console)
    suggested = _SUGGESTED.search(output)
    if suggested is None:
        console.print("   no loop was found: the tier named above does not record reads of mapped files")
    return _size(outcome, suggested[1].split() if suggested else header, console)


def _size(outcome: Comparison, loop: list[str], console: Console) -> bool:
    console.print("7. llmcache size: the cache size that serves this loop without stalls, at the storage limit of the demo")
    rate, period = f"{(outcome.experiment.read_bps or 0) / 1e6:.10g}MB/s", f"{outcome.compute_s * 1e3:.0f}ms"
    output = _run(["size", *loop, "--bw", rate, "--t", period], console)
    console.print(output or "", soft_wrap=True)
    return output is not None


def _run(words: list[str], console: Console) -> str | None:
    """Print the output of an llmcache command and return it; if it fails, print its error and return None."""
    console.print(f"   $ llmcache {shlex.join(words)}", soft_wrap=True)
    result = subprocess.run(
        [sys.executable, "-m", "llmcache", *words],
        capture_output=True, text=True, timeout=120, check=False, env={**environment(), "COLUMNS": "110"},
    )  # fmt: skip
    if result.returncode == 0:
        return result.stdout.rstrip()
    console.print(f"   {result.stderr.strip()}", soft_wrap=True)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all went well (or on Ctrl-C), 1 on wrong results, 3 if the machine cannot run it."""
    args = arguments(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        with one_interrupt(), tempfile.TemporaryDirectory(prefix="llmcache-demo-") as scratch:
            return demo(args, console, Path(scratch))
    except LlmcacheError as error:
        report("tools/demo", error)
        return 3
    except KeyboardInterrupt:
        with contextlib.suppress(BrokenPipeError):
            print("interrupted: unmounted, cgroups removed", file=sys.stderr)
        return 0
