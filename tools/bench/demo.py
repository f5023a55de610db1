#!/usr/bin/env python3
"""The demo: llama.cpp over plain storage and over llmcachefs, same memory cap, same storage limit, in turns.

Then what `llmcache trace`, `classify` and `size` say of the same program.
The model's loop (what each token reads) is larger than the memory that is left for caching. Run through tools/demo,
which installs what is needed; ends by unmounting and removing its cgroups, also on Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from llmcache.errors import LlmcacheError  # noqa: E402
from llmcache.fs.backends.files import SMALL_READ_AHEAD_KB  # noqa: E402
from llmcache.fs.backends.touches import why_not  # noqa: E402
from llmcache.units import format_rate, format_size, parse_rate  # noqa: E402
from tools.bench import machine  # noqa: E402
from tools.bench.blockdev import disk_of  # noqa: E402
from tools.bench.cases import TOKEN_WARMUP, tokens  # noqa: E402
from tools.bench.demo_tools import Demonstration, show_tools  # noqa: E402
from tools.bench.errors import BenchError  # noqa: E402
from tools.bench.experiment import Bench, Experiment, Outcome, Routed  # noqa: E402
from tools.bench.files import loop_bytes  # noqa: E402
from tools.bench.routing import dense_bytes, layout_of  # noqa: E402
from tools.bench.sides import Mounted, Plain, kernels  # noqa: E402
from tools.bench.signals import one_interrupt  # noqa: E402


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmcache" / "models"
    parser = argparse.ArgumentParser(prog="tools/demo", description=__doc__)
    parser.add_argument("--dir", type=Path, default=cache, help="where the model is kept (a real disk)")
    parser.add_argument("--size", default="700M", help="size of the generated model")
    parser.add_argument("--rate", default="500M", help="storage limit in bytes per second")
    parser.add_argument("--fraction", type=float, default=0.75, help="share of the loop that the cache may hold")
    parser.add_argument("--experts", type=int, default=0, help="a mixture of so many experts in each layer")
    parser.add_argument("--used", type=int, default=4, help="of which a token uses so many")
    parser.add_argument("--tokens", type=int, help=f"tokens per run [8, {TOKEN_WARMUP} for warm-up; of a mixture 40, 15]")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each side, in turns")
    parser.add_argument("--threads", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--mode", choices=("auto", "inplace", "steer", "arena"), default="auto")
    return parser.parse_args()


def make_model(directory: Path, size: str, experts: int = 0, used: int = 0) -> Path:
    """Return the generated model; it is kept between runs."""
    model = directory / (f"demo-{size}-{experts}x{used}.gguf" if experts else f"demo-{size}.gguf")
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "tools" / "make_model.py"), str(model), "--size", size]
    command += ["--experts", str(experts), "--used", str(used)] if experts else []
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise BenchError(f"cannot make the model: {result.stderr.strip()[-600:]}")
    return model


def experiment(args: argparse.Namespace, model: Path) -> Experiment:
    """Return what is compared."""
    loop, routed = loop_bytes(model), None
    if args.experts:
        dense = dense_bytes(layout_of(model))
        routed = Routed(dense + (loop - dense) * args.used / args.experts, None)
    steps = args.tokens or (8 if routed is None else 40)
    return Experiment(
        case="a",
        name="llama.cpp",
        file=model,
        loop_bytes=loop,
        cache_bytes=int(args.fraction * loop),
        command=tokens(args.threads, steps),
        steps=steps,
        warmup=TOKEN_WARMUP if routed is None else min(15, steps // 2),
        read_bps=parse_rate(args.rate),
        routed=routed,
    )


def result_table(outcome: Outcome, rate: int) -> Table:
    """Return the comparison as a table; modelled and measured figures stand in different rows."""
    each = outcome.experiment
    asked = each.loop_bytes if each.routed is None else int(each.routed.token_bytes)
    title = (
        f"{format_size(asked)} of {format_size(each.loop_bytes)} read per token, cache {format_size(each.cache_bytes)}, "
        f"storage {format_rate(rate)}, total memory {format_size(outcome.cap_bytes or 0)}"
    )
    made = Table(title=title, title_justify="left")
    for name in ("", "", "s/token", "min..max", "MB read/token", "tokens/s"):
        made.add_column(name, justify="right" if name else "left")
    modes = {str((run.mount() or {}).get("mode")) for run in outcome.of("mount")}
    labels = {"kernel": "plain storage, page cache", "mount": f"llmcachefs, {', '.join(modes)}"}
    for side in outcome.sides:
        label = labels.get(side, f"the same, read_ahead_kb {SMALL_READ_AHEAD_KB}")
        times, median = outcome.seconds(side), outcome.median_s(side)
        spread, read = f"{min(times):.3f}..{max(times):.3f}", f"{outcome.storage_bytes(side) / 1e6:.0f}"
        made.add_row(label, "measured", f"{median:.3f}", spread, read, f"{1 / median:.2f}")
    bound, missing = outcome.bound_s(), max(0, each.loop_bytes - each.cache_bytes)
    rows = [("bound max(compute, (N-S)/BW)", "modelled", bound, missing)] if each.routed is None else []
    rows.append(("all in memory", "measured", outcome.compute_s, 0))
    for label, kind, seconds, read_bytes in rows:
        made.add_row(label, kind, f"{seconds:.3f}", "", f"{read_bytes / 1e6:.0f}", f"{1 / seconds:.2f}")
    return made


def same_answers(outcome: Outcome) -> bool:
    """Return whether every run computed the same logits, token for token, as far as it came."""
    runs = [[step.crc for step in one.steps] for run in outcome.runs for one in run.clients]
    longest = max(runs, key=len)
    return all(run == longest[: len(run)] for run in runs)


def show(outcome: Outcome, rate: int, console: Console) -> bool:
    """Print table and summary; returns whether nothing went wrong."""
    console.print(result_table(outcome, rate))
    mount, kernel = outcome.median_s("mount"), min(map(outcome.median_s, set(outcome.sides) - {"mount"}))
    same = same_answers(outcome)
    bound = "" if outcome.experiment.routed else f", {mount / outcome.bound_s():.2f} x the bound"
    console.print(
        f"llmcachefs: {kernel / mount:.1f} x as fast as the page cache{bound}; "
        f"logits {'identical in all runs' if same else 'DIFFER: a wrong byte was read'}"
    )
    problems = [f"{side}: {text}" for side in outcome.sides for text in outcome.problems(side)]
    for problem in problems:
        console.print(f"problem: {problem}")
    return same and not problems


def demo(args: argparse.Namespace, console: Console, scratch: Path) -> int:
    """Run the whole demo; returns the exit code."""
    began = time.monotonic()
    console.print(f"1. model: about {args.size} of Q8_0 GGUF in {args.dir} (made once, then kept)")
    model = make_model(args.dir.resolve(), args.size, args.experts, args.used)
    plan = experiment(args, model)
    host = machine.describe(model)
    asked, what = plan.loop_bytes, "always in the same order"
    if plan.routed is not None:
        asked, what = int(plan.routed.token_bytes), f"{args.used} of {args.experts} experts in each layer"
    console.print(f"   {model.name}: each token reads {format_size(asked)} of it, {what}")
    console.print(f"   {host['cpu']}, kernel {host['kernel']}, disk {disk_of(model).name}, {args.threads} threads")
    console.print("2. the client alone, with all memory: how long a token takes to compute")
    console.print(
        f"3. {args.repeat} x {plan.steps} tokens each way, in a cgroup that holds client, daemon and page cache, "
        f"storage limited to {format_rate(plan.read_bps or 0)} (s/token as they come, {plan.warmup} for warm-up)"
    )
    options: tuple[str, ...] = () if args.mode == "auto" else ("--mode", args.mode)
    plain: tuple[Plain, ...] = (Plain(),)
    if plan.routed is not None:  # what the kernel reads around a fault decides: the better is the opponent
        plain = kernels(model.parent)
        if args.mode == "inplace" or (args.mode == "auto" and why_not(str(model.parent)) is None):
            options += ("--read-ahead", f"{SMALL_READ_AHEAD_KB}Ki")
    bench = Bench(model.parent, scratch, (*plain, Mounted(options=options)), args.repeat, console.print)
    outcome = bench.measure(plan)
    console.print("4. unmounted, cgroups removed\n")
    good = show(outcome, plan.read_bps or 0, console)
    each = Demonstration(
        model, plan.loop_bytes, asked, args.threads, plan.read_bps or 0, outcome.compute_s, outcome.anon_bytes
    )
    good = show_tools(each, scratch / "llama.parquet", console) and good
    console.print(f"done in {time.monotonic() - began:.0f} s")
    return 0 if good else 1


def main() -> int:
    """Return 0 if all went well (or on Ctrl-C), 1 on wrong results, 3 if the machine cannot run it."""
    args = arguments()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        with one_interrupt(), tempfile.TemporaryDirectory(prefix="llmcache-demo-") as scratch:
            return demo(args, console, Path(scratch))
    except (BenchError, LlmcacheError) as error:
        print(f"tools/demo: error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        with contextlib.suppress(BrokenPipeError):
            print("interrupted: unmounted, cgroups removed", file=sys.stderr)
        return 0


if __name__ == "__main__":
    sys.exit(main())
