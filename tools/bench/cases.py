"""The cases of the mount benchmark: (a) larger than memory, (b) fits, (c) cold, (d) readers, (e) sizes, (f) no limit, (g)
mixtures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmcache.fs.layout.tensors import Experts
from tools.make_model import make_model
from tools.modelgen.gguf_file import BYTES_PER_VALUE
from tools.modelgen.shape import MixtureShape, choose_shape

from . import routing
from .experiment import Experiment, Routed
from .files import MIB, crc_file, loop_bytes, loop_file
from .runner import client

RATES = (500_000_000, 200_000_000)
TOKEN_WARMUP = 3  # the kernel's and the mount's first tokens fill the cache and learn the order
SHORT_TIMES = 3  # runs that last a second or two are repeated so many times as often
SIZES = (0.6, 0.9, 1.1, 1.5, 3.0)
FRACTIONS = (0.4, 0.6, 0.75, 0.9)
MIXTURES = ((64, 4, 500_000), (64, 4, 1_500_000), (128, 8, 500_000), (128, 8, 1_500_000))
"""Experts of a layer, how many of them a token uses, bytes of a slice."""
MIXTURE_BYTES = 1_000_000_000
MIXTURE_SHARES = (0.12, 0.2, 0.3, 0.5, 0.8)  # of the model that fit
MIXTURE_TOKENS, MIXTURE_WARMUP = 60, 20


@dataclass(frozen=True)
class Plan:
    """Sizes and counts of a whole benchmark."""

    source: Path
    scratch: Path
    model: Path | None
    threads: int
    fraction: float
    quick: bool

    @property
    def loop_size(self) -> int:
        """Return the bytes of the file that loop readers read.

        What does not fit must be well over the 64 MiB that the kernel's side has more of page cache.
        """
        return (512 if self.quick else 768) * MIB

    @property
    def budget(self) -> int:
        """Return the budget of the cases that vary the file and not the budget."""
        return (128 if self.quick else 256) * MIB

    @property
    def counts(self) -> tuple[int, int]:
        """Return (steps, warm-up steps among them)."""
        return (6, 2) if self.quick else (9, TOKEN_WARMUP)


def experiments(plan: Plan, cases: str) -> Iterator[Experiment]:
    """Yield the experiments of the wanted cases ("abcdefg"), making files as they are needed."""
    for letter, make in CASES.items():
        if letter in cases:
            yield from make(plan)


def tokens(threads: int, steps: int) -> Callable[[str, Path], list[str]]:
    """Return the command of the llama.cpp client."""
    return lambda _side, path: client("llama_tokens", path, steps, "--threads", threads, "--json")


def passes(how: str, steps: int, check: Path | None = None) -> Callable[[str, Path], list[str]]:
    """Return the command of a loop reader."""
    checked = ["--check", check] if check else []
    return lambda _side, path: client("loop_reader", path, "--how", how, "--passes", steps, *checked)


def larger(plan: Plan) -> Iterator[Experiment]:
    """(a) A loop of which `fraction` fits, storage limited: llama.cpp, and one reader by mmap and by read."""
    for rate in RATES:
        steps, warmup = plan.counts
        if rate == min(RATES) and not plan.quick:
            steps -= 2  # what lasts seconds scatters little
        label = f"{rate // 10**6} MB/s"
        if plan.model is not None:
            loop = loop_bytes(plan.model)
            cache = int(plan.fraction * loop)
            make = tokens(plan.threads, steps)
            yield Experiment("a", f"llama.cpp {label}", plan.model, loop, cache, make, steps, warmup, rate)
        file = loop_file(plan.source / "loop.bin", plan.loop_size)
        cache = int(plan.fraction * plan.loop_size)
        for how in ("mmap", "read"):
            make = passes(how, steps)
            yield Experiment("a", f"{how} loop {label}", file, plan.loop_size, cache, make, steps, warmup, rate)


def fits(plan: Plan) -> Iterator[Experiment]:
    """(b) Everything fits, no limit: tokens, and warm 1 MiB reads."""
    steps = 20 if plan.quick else 60
    if plan.model is not None:
        cache = int(1.2 * plan.model.stat().st_size)
        make = tokens(plan.threads, steps)
        loop = loop_bytes(plan.model)
        name = "llama.cpp fits"
        yield Experiment("b", name, plan.model, loop, cache, make, steps, 5, capped=False, times=SHORT_TIMES)
    file = loop_file(plan.source / "loop.bin", plan.loop_size)
    cache = int(1.2 * plan.loop_size)
    for how in ("read", "mmap"):
        make = passes(how, steps)
        name, size = f"warm {how} 1 MiB", plan.loop_size
        yield Experiment("b", name, file, size, cache, make, steps, 5, capped=False, times=SHORT_TIMES)


def cold(plan: Plan) -> Iterator[Experiment]:
    """(c) One cold sequential pass, no limit, against O_DIRECT and the kernel; a budget that fits, and a small one."""
    file = loop_file(plan.source / "loop.bin", plan.loop_size)

    def command(side: str, path: Path) -> list[str]:
        return client("loop_reader", path, "--how", "direct" if side == "direct" else "read")

    for name, cache in (("cold, fits", int(1.2 * plan.loop_size)), ("cold, budget 1/4", plan.loop_size // 4)):
        size = plan.loop_size
        yield Experiment("c", name, file, size, cache, command, 1, 0, capped=False, times=SHORT_TIMES, direct=True)


def readers(plan: Plan) -> Iterator[Experiment]:
    """(d) 1, 2, 4, 8 processes over one file of which `fraction` fits; every byte checked."""
    file = loop_file(plan.source / "readers.bin", plan.loop_size)
    crcs = crc_file(file, plan.scratch)
    cache = int(plan.fraction * plan.loop_size)
    for count in (1, 2, 4, 8):
        steps, warmup = plan.counts
        make = passes("read", steps, crcs)
        name = f"{count} readers"
        yield Experiment(
            "d", name, file, plan.loop_size, cache, make, steps, warmup, RATES[0], clients=count
        )  # fmt: skip


def sizes(plan: Plan) -> Iterator[Experiment]:
    """(e) Loops of 0.6 to 3 budgets, storage limited; every byte checked."""
    steps, warmup = plan.counts
    for factor in SIZES:
        size = int(factor * plan.budget) // MIB * MIB
        file = loop_file(plan.source / f"size-{factor}.bin", size)
        make = passes("read", steps, crc_file(file, plan.scratch))
        yield Experiment("e", f"{factor} x budget", file, size, plan.budget, make, steps, warmup, RATES[0])


def unlimited(plan: Plan) -> Iterator[Experiment]:
    """(f) A loop of which parts fit, no limit on storage: llama.cpp, and one reader by mmap and by read."""
    steps, warmup = plan.counts
    # the tenth that does not fit must be over what the kernel's side has more, see `loop_size`
    size = 2 * plan.loop_size
    for fraction in FRACTIONS:
        if plan.model is not None:
            loop = loop_bytes(plan.model)
            make = tokens(plan.threads, steps)
            yield Experiment("f", f"llama.cpp {fraction} N", plan.model, loop, int(fraction * loop), make, steps, warmup)
        file = loop_file(plan.source / "unlimited.bin", size)
        for how in ("mmap", "read"):
            make = passes(how, steps)
            yield Experiment("f", f"{how} loop {fraction} N", file, size, int(fraction * size), make, steps, warmup)


def mixtures(plan: Plan) -> Iterator[Experiment]:
    """(g) Mixtures of experts read by generated routings, and one by llama.cpp, routed as its random weights have it."""
    for number, (experts, used, slice_bytes) in enumerate(MIXTURES[:1] if plan.quick else MIXTURES):
        mixture = MixtureShape(experts, used, slice_bytes)
        shape = choose_shape(MIXTURE_BYTES, BYTES_PER_VALUE, None, False, mixture)
        name = f"{experts} experts {slice_bytes / 1e6} MB"
        (file,) = make_model(plan.source / f"{name.replace(' ', '-')}.gguf", shape, "gguf", 1, 0)
        for share in MIXTURE_SHARES[1:4:2] if plan.quick else MIXTURE_SHARES:
            for rate in (RATES[0], None):
                label = f"{share:.0%} {'no limit' if rate is None else f'{rate // 10**6} MB/s'}"
                yield _routed(plan, file, f"{name} {label}", (shape.layers, experts, used), share, rate)
                if plan.model is not None and number == 0 and share in (0.2, 0.5):
                    yield _decoded(plan, file, f"llama.cpp {name} {label}", used / experts, share, rate)
        file.unlink()


def _routed(plan: Plan, file: Path, name: str, shape: tuple[int, int, int], share: float, rate: int | None) -> Experiment:
    layout = routing.layout_of(file)
    routed = routing.generate(MIXTURE_TOKENS, *shape)
    ranges = plan.scratch / f"{file.stem}.plan"
    ranges.write_bytes(routing.plan(layout, routed).tobytes())
    size, cache = file.stat().st_size, int(share * file.stat().st_size)
    dense, each = routing.dense_bytes(layout), Experts(layout).bytes_of(0)
    lru = statistics.fmean(routing.lru_bytes(routed, each, cache - dense)[MIXTURE_WARMUP:])
    asked = Routed(dense + shape[0] * shape[2] * each, lru)
    return Experiment(
        "g", name, file, size, cache, lambda _side, path: client("routed_reader", path, ranges),
        MIXTURE_TOKENS, MIXTURE_WARMUP, rate, routed=asked,
    )  # fmt: skip


def _decoded(plan: Plan, file: Path, name: str, used: float, share: float, rate: int | None) -> Experiment:
    layout = routing.layout_of(file)
    size, dense = file.stat().st_size, routing.dense_bytes(layout)
    asked = Routed(dense + sum(Experts(layout).sizes) * used, None)
    make = tokens(plan.threads, MIXTURE_TOKENS)
    cache = int(share * size)
    return Experiment("g", name, file, size, cache, make, MIXTURE_TOKENS, MIXTURE_WARMUP, rate, routed=asked)


CASES = {"a": larger, "b": fits, "c": cold, "d": readers, "e": sizes, "f": unlimited, "g": mixtures}
