"""Compare llmcachefs with the page cache: same total memory, same storage limit, interleaved runs.

Cases: (a) a loop larger than memory, (b) a loop that fits, (c) one cold pass, (d) several readers, (e) loops of several
sizes, (f) unlimited storage, (g) MoE models, (h) the stock llama.cpp server with its default flags, (i) an MoE model of real
size (`--moe-model`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from llmcache.cgroup import Cgroup
from llmcache.model.tensors import Experts
from llmcache.mount.readahead import SMALL_READ_AHEAD_KB
from llmcache.storage import disk_of
from tools.make_model import BYTES_PER_VALUE, TYPES, MoeShape, Shape, choose_shape, make_model

from . import routing
from .clients.server_tokens import SITE
from .experiment import Command, Experiment, Rig, Routed
from .harness import workplace
from .patterns import Reader, Stage, routed_passes
from .results import Document, Target, about_machine, markdown, worst
from .runner import MIB, client, crc_file, loop_bytes, loop_file, run_client
from .sides import MOUNT_OVERHEAD_BYTES, Mounted, Plain, kernels

SCHEMA = "llmcache-bench-mount/2"
RATES = (500_000_000, 200_000_000)
TOKEN_WARMUP = 3  # the first tokens fill the cache, and the mount learns the order
SHORT_TIMES = 3  # factor on the repeats of runs that last only a second or two
FITS = {"llama": (240, 200), "read": (240, 180), "mmap": (2400, 2000)}
"""Steps of loops that fit, and the warm-up steps among them: several seconds, in which the mount moves pinned data to its
final form.
"""
SIZES = (0.6, 0.9, 1.1, 1.5, 3.0)
FRACTIONS = (0.4, 0.6, 0.75, 0.9)
MORE = 1.5  # at least this multiple of the page cache's extra memory does not fit
MOE_SHAPES = ((64, 4, 500_000), (64, 4, 1_500_000), (128, 8, 500_000), (128, 8, 1_500_000))
"""Experts of a layer, how many of them a token uses, and bytes of an expert slice."""
MOE_BYTES = 2_000_000_000  # for a smaller model, the 64 MiB more that the page cache has would matter
MOE_COUNTS = {0.12: (80, 30), 0.2: (80, 30), 0.3: (80, 30), 0.5: (240, 160), 0.8: (400, 320)}
"""Tokens and warm-up tokens among them, by the share of the model that fits.

Where most of the model fits, most misses are first uses of an expert, on all sides, until nearly all experts have been used.
"""
# A model with random weights uses the same quarter of its experts again and again, which fit.
LLAMA_COUNTS = MOE_COUNTS[0.5]
# With read_ahead_kb 8192, a token takes twenty times as long. Measured only for the smallest and the largest share.
READ_AHEAD_SHARES = (0.2, 0.8)

SERVER_BYTES = 1_145_000_000  # for a smaller model, half of the rest would fit into the page cache's extra 64 MiB
SERVER_TURNS, SERVER_PROMPT = 2, 60  # turns, tokens of each prompt
SERVER_ANSWER, SERVER_WARMUP = 80, 10  # tokens of each answer, warm-up tokens
SERVER_SHARES = {"half of the rest": 0.5, "the rest just fits": 1.0}
"""Memory for the loop of the server, relative to the loop; see `stock_server`."""
MOE_SHARE = 0.6  # share of an MoE model of real size that fits in memory
MOE_TOKENS, MOE_WARMUP = 400, 1
MISSES = 0.1
"""If the page cache reads less than this share of a token's bytes from storage, there is little to gain."""
COLD_LIMIT_BPS = 2e9
"""Targets of case (c) do not require a higher bandwidth than this."""

Result = dict[str, Any]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, help="Q8_0 GGUF file (tools/make_model.py); without it, the llama.cpp cases are skipped"
    )
    moe = "GGUF file of tools/make_model.py --like, on the file system of --dir; without it, case (i) is skipped"
    parser.add_argument("--moe-model", type=Path, help=moe)
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("/var/tmp"),
        help="directory for loop files [%(default)s; with --model, its directory]",
    )
    only = "cases to run, for example ac [%(default)s]; (h) needs the server that tools/demo or tools/test sets up"
    parser.add_argument("--only", default="".join(CASES), help=only)
    parser.add_argument("--match", default="", help="run only experiments whose name contains this text")
    parser.add_argument("--quick", action="store_true", help="smaller files, fewer steps; not comparable with the targets")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each side, interleaved [%(default)s]")
    parser.add_argument(
        "--fraction", type=float, default=0.75, help="share of the loop that fits in memory, case a [%(default)s]"
    )
    parser.add_argument(
        "--threads", type=int, default=min(4, os.cpu_count() or 1), help="threads of llama.cpp [%(default)s]"
    )
    kernel = "also run the page cache with this read_ahead_kb, besides 128 and the current setting; repeatable"
    parser.add_argument("--read-ahead", type=int, action="append", default=[], metavar="KB", help=kernel)
    modes = "--mode of llmcachefs; repeatable, each mode is run separately [auto]"
    parser.add_argument("--mode", choices=("auto", "inplace", "steer", "arena"), action="append", default=[], help=modes)


def sides(args: argparse.Namespace, source: Path, experiment: Experiment) -> tuple[Plain | Mounted, ...]:
    """Return the page cache, and llmcachefs in each mode of `args`, mounted as the documentation advises."""
    ahead = ("--read-ahead", f"{experiment.read_ahead_kb}Ki")
    words = {mode: ("--mode", mode, *(ahead if mode == "inplace" else ())) for mode in args.mode}
    modes = [Mounted(options=each, name=mode) for mode, each in words.items()]
    return (*kernels(source, tuple(args.read_ahead)), *(modes or [Mounted()]))


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    if args.model is not None:
        args.dir = args.model.resolve().parent
    with workplace(args.dir) as place:
        source, scratch = place / "source", place / "scratch"
        source.mkdir()
        scratch.mkdir()
        model = None
        if args.model is not None:
            model = source / args.model.name
            os.link(args.model.resolve(), model)
        plan = CasePlan(source, scratch, model, args.threads, args.fraction, args.quick, args.moe_model)
        measured: list[Result] = []
        for experiment in (one for letter, make in CASES.items() if letter in args.only for one in make(plan)):
            if args.match in experiment.name:
                console.print(f"({experiment.case}) {experiment.name}")
                bench = Rig(scratch, sides(args, source, experiment), args.repeat, console.print)
                measured.append(bench.measure(experiment).to_json())
                yield {"complete": False, "results": measured}
        yield {"complete": True, "results": measured}


# The cases


@dataclass(frozen=True)
class CasePlan:
    """Directories, model and sizes of a whole benchmark."""

    source: Path
    scratch: Path
    model: Path | None
    threads: int
    fraction: float
    quick: bool
    moe_model: Path | None = None

    @property
    def loop_size(self) -> int:
        """Return the size of the loop readers' file.

        The part that does not fit must be much larger than the 64 MiB more that the page cache has.
        """
        return (512 if self.quick else 768) * MIB

    @property
    def counts(self) -> tuple[int, int]:
        return (6, 2) if self.quick else (9, TOKEN_WARMUP)

    def llama(self, case: str, label: str, share: float, steps: int, warmup: int, **limits: Any) -> Iterator[Experiment]:
        """Yield llama.cpp with memory for `share` of its loop, if there is a model.

        If the page cache would hold the whole loop in its extra memory, a model of twice the size is used.
        """
        if (model := self.model) is None:
            return
        if share < 1 and (1 - share) * loop_bytes(model) < MORE * MOUNT_OVERHEAD_BYTES:
            shape = choose_shape(2 * model.stat().st_size, BYTES_PER_VALUE["gguf"], None, False)
            (model,) = make_model(self.source / f"twice-{model.name}", shape, "gguf", 1, 0)
        loop = loop_bytes(model)
        command, name = tokens(self.threads, steps), f"llama.cpp {label}"
        yield Experiment(case, name, model, loop, int(share * loop), command, steps, warmup, **limits)


def tokens(threads: int, steps: int) -> Command:
    return lambda _side, path: client("llama_tokens", path, steps, "--threads", threads)


def answers(turns: int, prompt: int, answer: int) -> Command:
    """Return the command of the stock llama.cpp server with its client; `prompt`, `answer`: tokens per turn."""
    words = ("--turns", turns, "--prompt", prompt, "--answer", answer)
    return lambda _side, path: client("server_tokens", path, *words)


def passes(how: str, steps: int, check: Path | None = None) -> Command:
    """Return the command of a loop reader; `check`: file of the expected CRCs."""
    checked = ["--check", check] if check else []
    return lambda _side, path: client("loop_reader", path, "--how", how, "--passes", steps, *checked)


def larger(plan: CasePlan) -> Iterator[Experiment]:
    """Yield case (a): a loop of which `fraction` fits, with limited storage, for llama.cpp and readers by mmap and read."""
    for rate in RATES:
        steps, warmup = plan.counts
        if rate == min(RATES) and not plan.quick:
            steps -= 2  # long runs vary little
        label, size = f"{rate // 10**6} MB/s", plan.loop_size
        yield from plan.llama("a", label, plan.fraction, steps, warmup, read_bps=rate)
        file, cache = loop_file(plan.source / "loop.bin", size), int(plan.fraction * size)
        for how in ("mmap", "read"):
            yield Experiment("a", f"{how} loop {label}", file, size, cache, passes(how, steps), steps, warmup, rate)


def fits(plan: CasePlan) -> Iterator[Experiment]:
    """Yield case (b): everything fits, unlimited storage; tokens, and warm 1 MiB reads after some seconds.

    The loop has its own directory: if all of SOURCE fits, the mount does not replace the kernel's readahead.
    """
    size, alone = plan.loop_size, plan.source / "alone"
    alone.mkdir()
    limits: dict[str, Any] = {"capped": False, "times": SHORT_TIMES}
    share = 1.2 * plan.model.stat().st_size / loop_bytes(plan.model) if plan.model else 0.0
    counts = dict.fromkeys(FITS, (20, 5)) if plan.quick else FITS
    yield from plan.llama("b", "fits", share, *counts["llama"], **limits)
    file, cache = loop_file(alone / "loop.bin", size), int(1.2 * size)
    for how in ("read", "mmap"):
        steps, warmup = counts[how]
        yield Experiment("b", f"warm {how} 1 MiB", file, size, cache, passes(how, steps), steps, warmup, **limits)


def cold(plan: CasePlan) -> Iterator[Experiment]:
    """Yield case (c): one cold sequential pass without a limit, against O_DIRECT and the page cache, with a large and a
    small budget.
    """
    file, size = loop_file(plan.source / "loop.bin", plan.loop_size), plan.loop_size

    def command(side: str, path: Path) -> list[str]:
        return client("loop_reader", path, "--how", "direct" if side == "direct" else "read")

    for name, cache in (("cold, fits", int(1.2 * size)), ("cold, budget 1/4", size // 4)):
        yield Experiment("c", name, file, size, cache, command, 1, 0, capped=False, times=SHORT_TIMES, direct=True)


def readers(plan: CasePlan) -> Iterator[Experiment]:
    """Yield case (d): 1, 2, 4 and 8 processes that read one file of which `fraction` fits; every byte is checked."""
    (steps, warmup), size = plan.counts, plan.loop_size
    file, cache = loop_file(plan.source / "readers.bin", size), int(plan.fraction * size)
    command = passes("read", steps, crc_file(file, plan.scratch))
    for count in (1, 2, 4, 8):
        yield Experiment("d", f"{count} readers", file, size, cache, command, steps, warmup, RATES[0], clients=count)


def sizes(plan: CasePlan) -> Iterator[Experiment]:
    """Yield case (e): loops of 0.6 to 3 budgets with limited storage; every byte is checked."""
    (steps, warmup), budget = plan.counts, (128 if plan.quick else 256) * MIB
    for factor in SIZES:
        size = int(factor * budget) // MIB * MIB
        file = loop_file(plan.source / f"size-{factor}.bin", size)
        command, times = passes("read", steps, crc_file(file, plan.scratch)), SHORT_TIMES if factor < 1.5 else 1
        yield Experiment("e", f"{factor} x budget", file, size, budget, command, steps, warmup, RATES[0], times=times)


def unlimited(plan: CasePlan) -> Iterator[Experiment]:
    """Yield case (f): a loop of which parts fit, with unlimited storage, for llama.cpp and readers by mmap and read."""
    steps, warmup = plan.counts
    size = 2 * plan.loop_size  # the tenth that does not fit must exceed the page cache's extra memory, see `loop_size`
    for share in FRACTIONS:
        yield from plan.llama("f", f"{share} N", share, steps, warmup)
        file = loop_file(plan.source / "unlimited.bin", size)
        for how in ("mmap", "read"):
            name, command = f"{how} loop {share} N", passes(how, steps)
            yield Experiment("f", name, file, size, int(share * size), command, steps, warmup)


def moe_shape(experts: int, used: int, slice_bytes: int) -> Shape:
    """Return the shape of the model for one entry of `MOE_SHAPES`."""
    return choose_shape(MOE_BYTES, BYTES_PER_VALUE["gguf"], None, False, MoeShape(experts, used, slice_bytes))


def moe(plan: CasePlan) -> Iterator[Experiment]:
    """Yield case (g): MoE models read by generated routings, and one by llama.cpp, whose random weights determine the
    routing.
    """
    for number, (experts, used, slice_bytes) in enumerate(MOE_SHAPES[:1] if plan.quick else MOE_SHAPES):
        shape = moe_shape(experts, used, slice_bytes)
        name = f"{experts} experts {slice_bytes / 1e6} MB"
        (file,) = make_model(plan.source / f"{name.replace(' ', '-')}.gguf", shape, "gguf", 1, 0)
        size, layout = file.stat().st_size, routing.layout_of(file)
        dense, slices, ahead_kb = routing.dense_bytes(layout), Experts(layout), routing.read_ahead_kb(layout)
        shares = list(MOE_COUNTS)[1:4:2] if plan.quick else list(MOE_COUNTS)
        routings, ranks_of = routing.ranked(max(MOE_COUNTS[share][0] for share in shares), shape.layers, experts, used)
        for share in shares:
            counts = tokens_read, warmup = MOE_COUNTS[share]
            chosen, ranks = routings[:tokens_read], ranks_of[:tokens_read]
            stage = plan.scratch / f"{file.stem}-{tokens_read}.json"
            if not stage.exists():
                stage.write_text(json.dumps(Stage((Reader(routed_passes(layout, chosen.tolist())),)).to_json()))

            def reader(_side: str, path: Path, stage: Path = stage) -> list[str]:
                return client("zoo_reader", stage, path)

            cache, each = int(share * size), slices.bytes_of(0)
            missed = routing.misses(chosen, ranks, routing.Habits(), (cache - dense) // each, warmup)
            replayed = (missed[policy] * each for policy in ("lru", "known", "belady"))
            routed = Routed(dense + shape.layers * used * each, *replayed)
            for rate in (RATES[0], None):
                label = f"{name} {share:.0%} {storage(rate)}"
                own = number == 0 and share in READ_AHEAD_SHARES
                limits: dict[str, Any] = {"read_bps": rate, "read_ahead_kb": ahead_kb, "mean_reads": True}
                yield Experiment("g", label, file, size, cache, reader, *counts, routed=routed, own_read_ahead=own, **limits)
                if plan.model is not None and number == 0 and share in (0.2, 0.5):
                    decoded = Routed(dense + sum(slices.sizes) * used / experts)
                    decode = tokens(plan.threads, LLAMA_COUNTS[0])
                    title = f"llama.cpp {label}"  # no run with 8192; the reader shows its cost
                    limits |= {"routed": decoded, "own_read_ahead": False}
                    yield Experiment("g", title, file, size, cache, decode, *LLAMA_COUNTS, **limits)
        file.unlink()


def stock_server(plan: CasePlan) -> Iterator[Experiment]:
    """Yield case (h): the stock llama.cpp server with its default flags and a Q4_K_M model.

    On x86 the server repacks the Q4_K tensors (three quarters of the file) into private memory while it loads, and later
    reads only single rows of the embedding. The loop is the rest: each token reads the Q6_K tensors and the norms. The limit
    of the cgroup is the private memory of the server (copies and KV cache, measured first), `cache_bytes` and 64 MiB. For a
    file of 1,145 MB these are 976, 252 (for "the rest just fits") and 67 MB, together 1,296 MB.

    `cache_bytes` is half of the rest, the rest (which the page cache keeps in its extra 64 MiB), or more than the file. The
    mount in place is run with the small read-ahead, which the documentation advises, and with the machine's own.
    """
    if not SITE.is_dir():
        return
    kind = TYPES["q4_k_m"]
    shape = choose_shape(SERVER_BYTES, kind.mean_value_bytes, None, False, None, kind.block.values)
    (file,) = make_model(plan.source / "q4_k_m.gguf", shape, "gguf", 1, 0, file_type="q4_k_m")
    rest = sum(tensor.size_bytes for tensor in routing.layout_of(file).tensors if tensor.dtype != "Q4_K")
    answer = SERVER_ANSWER // 4 if plan.quick else SERVER_ANSWER
    command = answers(SERVER_TURNS, SERVER_PROMPT, answer)
    rooms = {label: int(share * rest) for label, share in SERVER_SHARES.items()}
    rooms["all fits"] = int(1.1 * file.stat().st_size)
    own_kb = int(disk_of(file).read_ahead_file.read_text())
    for label, room in rooms.items():
        for ahead_kb in dict.fromkeys((SMALL_READ_AHEAD_KB, own_kb)):
            name, counts = f"stock server {label}, read_ahead_kb {ahead_kb}", (SERVER_TURNS * answer, SERVER_WARMUP)
            yield Experiment("h", name, file, rest, room, command, *counts, read_ahead_kb=ahead_kb, mean_reads=True)
    file.unlink()


def real_size(plan: CasePlan) -> Iterator[Experiment]:
    """Yield case (i): an MoE model of real size with llama.cpp and a generated text, with and without a storage limit.

    The model is alone in its directory. A run without a memory limit comes first, which records the experts that llama.cpp
    chooses; the misses of the policies are computed from these. Their caches begin with the experts that are used first.
    """
    if plan.moe_model is None:
        return
    alone = plan.source / "moe"
    alone.mkdir()
    file = alone / plan.moe_model.name
    os.link(plan.moe_model.resolve(), file)
    steps, warmup = (9 if plan.quick else MOE_TOKENS + MOE_WARMUP), MOE_WARMUP
    recorded = plan.scratch / "routing.npy"
    words = ("--threads", plan.threads, "--topics", 1)
    with Cgroup("routing", directory=file) as group:
        run_client(group, client("llama_tokens", file, steps, *words, "--routing", recorded), 3600)
    chosen = np.load(recorded)
    size, layout = file.stat().st_size, routing.layout_of(file)
    dense, each, cache = routing.dense_bytes(layout), Experts(layout).bytes_of(0), int(MOE_SHARE * size)
    missed = routing.replay(chosen, (cache - dense) // each, is_loaded=True)
    lru, belady = (each * float(missed[policy][warmup:].mean()) for policy in ("lru", "belady"))
    routed = Routed(dense + each * chosen.shape[1] * chosen.shape[2], lru, None, belady)
    command: Command = lambda _side, path: client("llama_tokens", path, steps, *words)  # noqa: E731
    limits: dict[str, Any] = {"read_ahead_kb": routing.read_ahead_kb(layout), "own_read_ahead": False, "mean_reads": True}
    for rate in (None, RATES[0]):
        name = f"{file.stem} {MOE_SHARE:.0%} {storage(rate)}"
        yield Experiment("i", name, file, loop_bytes(file), cache, command, steps, warmup, rate, routed=routed, **limits)


def storage(rate: int | None) -> str:
    """Return the words for a storage limit (bytes/s) in the name of a case."""
    return "no limit" if rate is None else f"{rate // 10**6} MB/s"


CASES = {
    "a": larger,
    "b": fits,
    "c": cold,
    "d": readers,
    "e": sizes,
    "f": unlimited,
    "g": moe,
    "h": stock_server,
    "i": real_size,
}


# The figures of a result, and its targets


def steps(result: Result, side: str) -> list[float]:
    """Return the durations (s) of the measured steps of one side, over all repeats and clients."""
    runs = [run for run in result["runs"] if run["side"] == side]
    return [step for run in runs for client in run["seconds"] for step in client]


def seconds(result: Result, side: str) -> float:
    """Return the median duration (s) of the measured steps of one side; nan if there are none."""
    return statistics.median(steps(result, side) or [math.nan])


def mean(result: Result, side: str) -> float:
    """Return the mean duration (s) of the measured steps of one side; nan if there are none."""
    return statistics.fmean(steps(result, side) or [math.nan])


def fastest(result: Result, sides: Iterable[str], time_of: Callable[[Result, str], float] = seconds) -> str:
    """Return the side with the smallest time. A side without a time wins, so that no side beats a failed one."""
    return min(sides, key=lambda side: (not math.isnan(time_of(result, side)), time_of(result, side)))


def kernel(result: Result, time_of: Callable[[Result, str], float] = seconds) -> str:
    """Return the faster side of the page cache: with the machine's own read-ahead or the small one."""
    return fastest(result, (side for side in result["sides"] if side.startswith("kernel")), time_of)


def mounts(result: Result) -> list[str]:
    return [side for side in result["sides"] if side != "direct" and not side.startswith("kernel")]


def storage_bytes(result: Result, side: str) -> float:
    """Return the bytes that a step of one client read from storage, the median over the repeats."""
    return _median(run["storage_bytes_per_step"] for run in result["runs"] if run["side"] == side)


def costs(result: Result, side: str) -> list[dict[str, Any]]:
    """Return the costs of the mount in each run of one side (`SideRun.mount`); older results have none."""
    return [run["mount"] or {} for run in result["runs"] if run["side"] == side and "mount" in run]


def mode_of(result: Result, side: str) -> str:
    """Return the mode that the daemon reported; if none is recorded, the name of the side."""
    return next((cost["mode"] for cost in costs(result, side) if "mode" in cost), side)


def cpu_s_per_gb(result: Result, side: str) -> float:
    """Return the daemon's CPU seconds per GB from storage, the median over the repeats."""
    return _median(cost.get("cpu_s_per_gb") for cost in costs(result, side))


def memory(result: Result, side: str) -> float:
    """Return the largest memory of mount and daemon, without bytes beyond the budget; nan if a run has none recorded."""
    each = [
        cost["resident_bytes"] - cost["beyond_bytes"] + cost["daemon_bytes"] if "daemon_bytes" in cost else math.nan
        for cost in costs(result, side)
    ]
    return max(each, key=lambda one: (math.isnan(one), one), default=math.nan)


def _median(values: Iterable[float | None]) -> float:
    return statistics.median([one for one in values if one is not None] or [math.nan])


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def figures_of(result: Result, side: str) -> dict[str, float]:
    """Return the figures of one mount, by key: times and bytes relative to the page cache, and the costs of the mount."""
    time_of = mean if result["case"] in "gi" else seconds
    best, own_s = kernel(result, time_of), time_of(result, side)
    kernel_s, read, kernel_read = time_of(result, best), storage_bytes(result, side), storage_bytes(result, best)
    found = {"kernel": own_s / kernel_s}
    if result["case"] == "b":
        found = {"plain": kernel_s / own_s}
    elif result["case"] == "c":
        direct_s = seconds(result, "direct")
        found = {"best": seconds(result, fastest(result, ("direct", best))) / own_s}
        # not min(), which would replace nan by the limit
        direct_bps = COLD_LIMIT_BPS if (bps := result["loop_bytes"] / direct_s) > COLD_LIMIT_BPS else bps
        found["direct"] = result["loop_bytes"] / own_s / direct_bps
    elif result["case"] == "h":
        found["bytes"] = read / (1.05 * kernel_read + 0.01 * result["loop_bytes"])
    elif result["case"] in "gi":
        found["bytes"] = read / kernel_read if kernel_read else math.nan
        if times := sorted(steps(result, side)):
            found["p99"] = times[math.ceil(0.99 * len(times)) - 1] / statistics.median(times)
    if costs(result, side):
        found["memory"] = memory(result, side) / (result["cache_bytes"] + MOUNT_OVERHEAD_BYTES)
        found["cpu"] = cpu_s_per_gb(result, side)
    return found


def figures(document: Document) -> dict[str, float]:
    """Return the figures of all results: `NAME.SIDE.KEY`."""
    return {
        f"{slug(result['name'])}.{side}.{key}": value
        for result in document["results"]
        for side in mounts(result)
        for key, value in figures_of(result, side).items()
    }


def misses_much(result: Result) -> bool:
    """Return whether the page cache reads a substantial part of a token's bytes from storage (MoE models)."""
    return storage_bytes(result, kernel(result, mean)) > MISSES * float(result["routed"]["token_bytes"])


def _misses_much(limited: bool) -> Callable[[Result], bool]:
    return lambda result: misses_much(result) and (result["read_bps"] is not None) == limited


def _every(_result: Result) -> bool:
    return True


def _readers(result: Result) -> bool:
    return not result["name"].startswith("llama")


TIME, IN_PLACE, FUSE = "time / page cache's time", "in place", "FUSE"
TARGETS: tuple[tuple[str, str, str, Callable[[Result], bool], str, str, float, str], ...] = (
    # name, modes, cases, which of them, figure, sense, limit, words
    ("larger.inplace", IN_PLACE, "a", _every, "kernel", "<=", 0.4, f"larger than memory, in place: {TIME}"),
    ("larger.fuse", FUSE, "a", _every, "kernel", "<=", 0.5, f"larger than memory, FUSE: {TIME}"),
    ("fits.inplace", IN_PLACE, "b", _every, "plain", ">=", 0.98, "everything fits, in place: speed / plain file's speed"),
    ("fits.fuse", FUSE, "b", _every, "plain", ">=", 0.9, "everything fits, FUSE: speed / plain file's speed"),
    ("cold.inplace", IN_PLACE, "c", _every, "best", ">=", 0.95, "cold, in place: bandwidth / best of O_DIRECT, page cache"),
    ("cold.fuse", FUSE, "c", _every, "direct", ">=", 0.8, "cold, FUSE: bandwidth / bandwidth of O_DIRECT"),
    ("readers.inplace", IN_PLACE, "d", _every, "kernel", "<=", 1.05, f"several readers, in place: {TIME}"),
    ("readers.fuse", FUSE, "d", _every, "kernel", "<=", 1.05, f"several readers, FUSE: {TIME}"),
    ("sizes.inplace", IN_PLACE, "e", _every, "kernel", "<=", 1.05, f"0.6 to 3 times the budget, in place: {TIME}"),
    ("unlimited.inplace", IN_PLACE, "f", _every, "kernel", "<=", 1.05, f"unlimited storage, in place: {TIME}"),
    ("moe.inplace", IN_PLACE, "g", _misses_much(True), "kernel", "<=", 0.65, f"MoE, 500 MB/s, in place: {TIME}"),
    ("moe.fuse", FUSE, "g", _misses_much(True), "kernel", "<=", 0.8, f"MoE, 500 MB/s, FUSE: {TIME}"),
    ("moe.unlimited", IN_PLACE, "g", _misses_much(False), "kernel", "<=", 0.5, f"MoE, unlimited, in place: {TIME}"),
    ("moe.bytes", IN_PLACE, "g", misses_much, "bytes", "<=", 0.65, "MoE, in place: bytes read / page cache's bytes"),
    ("moe.p99", "", "g", _every, "p99", "<=", 3.0, "MoE: 99th percentile of token times / median"),
    ("server.inplace", IN_PLACE, "h", _every, "kernel", "<=", 1.05, f"default flags, in place: {TIME}"),
    ("server.bytes", IN_PLACE, "h", _every, "bytes", "<=", 1.0, "default flags: bytes / (1.05 x page cache's + 1 %)"),
    ("real.inplace", IN_PLACE, "i", _every, "kernel", "<=", 0.75, f"MoE of real size, in place: {TIME}"),
    ("real.p99", IN_PLACE, "i", _every, "p99", "<=", 2.5, "MoE of real size: 99th percentile of token times / median"),
    ("memory", "", "abcdefghi", _every, "memory", "<=", 1.0, "memory of mount and daemon / (budget + 64 MiB)"),
    ("cpu.inplace", IN_PLACE, "af", _readers, "cpu", "<=", 0.25, "in place: CPU seconds of the daemon per GB read"),
    ("cpu.fuse", FUSE, "af", _readers, "cpu", "<=", 0.8, "FUSE: CPU seconds of the daemon per GB read"),
)


def targets(document: Document) -> list[Target]:
    """Return the targets: no client failed on a mount, then each of `TARGETS` by its worst case."""
    results: list[Result] = document["results"]
    wrong = sum(len(result["problems"][side]) for result in results for side in mounts(result))
    what = f"hangs, wrong bytes and failures with a mount, in {len(results)} cases"
    found = [Target("problems", what, wrong, "<=", 0, command="tools/bench mount --model MODEL")]
    for name, modes, cases, applies, key, sense, limit, words in TARGETS:
        judged = (
            (f"{result['name']}, {side}", values[key])
            for result in results
            if result["case"] in cases and applies(result)
            for side in mounts(result)
            if not modes or (mode_of(result, side) == "inplace") == (modes == IN_PLACE)
            if key in (values := figures_of(result, side))
        )
        found += worst(name, words, judged, sense, limit)
    return found


LABELS = {
    "a": "larger than memory",
    "b": "everything fits",
    "c": "one cold pass",
    "d": "readers",
    "e": "loop size",
    "f": "unlimited storage",
    "h": "default flags",
}


def table(document: Document) -> str:
    results = [result for result in document["results"] if result["case"] not in "gi"]
    sides = list(dict.fromkeys(side for result in results for side in mounts(result)))
    named = ["page cache", *("llmcachefs" if side == "mount" else side for side in sides)]
    columns = [f"{name} {unit}" for unit in ("s", "MB") for name in named]
    head = ["case", "loop / cache MB", *columns, "bound s", "speedup"]
    rows = [_row(result, sides) for result in results]
    mixed = [result for result in document["results"] if result["case"] in "gi"]
    about = f"{about_machine(document['machine'])}\n\n"
    return about + (markdown(head, rows) if rows else "") + (f"\n{_moe_table(mixed)}" if mixed else "")


def _row(result: Document, sides: Sequence[str]) -> list[str]:
    """Return one row of the table: the page cache at its best, `sides`, and the speedup of the first of them."""
    all_sides = [kernel(result), *sides]
    times = [seconds(result, side) for side in all_sides]
    return [
        f"{LABELS[result['case']]}: {result['name']}",
        f"{result['loop_bytes'] / 1e6:.0f} / {result['cache_bytes'] / 1e6:.0f}",
        *(f"{one:.3f}" for one in times),
        *(f"{storage_bytes(result, side) / 1e6:.0f}" for side in all_sides),
        f"{result['bound_s']:.3f}" if result["case"] in "ade" else "",
        f"{times[0] / times[1]:.2f}",
    ]


def _moe_table(results: list[Result]) -> str:
    """Return the table of the MoE models: means per token, and the misses of three policies that keep whole experts."""
    head = ["MoE model, share in memory, storage", "page cache ms", "inplace ms", "steer ms"]
    head += ["page cache MB", "inplace MB", "steer MB", "exact LRU MB", "known popularity MB", "Belady MB"]
    rows = []
    for result in results:
        sides = [side if side in result["sides"] else None for side in (kernel(result, mean), "inplace", "steer")]
        times = ["" if side is None else f"{1e3 * mean(result, side):.0f}" for side in sides]
        read = ["" if side is None else f"{storage_bytes(result, side) / 1e6:.0f}" for side in sides]
        replayed = (result["routed"].get(f"{policy}_bytes") for policy in ("lru", "known", "belady"))
        rows.append([result["name"], *times, *read, *("" if each is None else f"{each / 1e6:.0f}" for each in replayed)])
    about = (
        "Mean time of a token and bytes that it read from storage (measured). The last three columns are modelled: the "
        "bytes that three policies would read in a replay of the same routing."
    )
    return f"{about}\n\n{markdown(head, rows)}"
