"""The cases of the mount benchmark: (a) larger than memory, (b) fits, (c) cold, (d) readers, (e) sizes, (f) no limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .experiment import Experiment
from .files import MIB, crc_file, loop_bytes, loop_file
from .runner import client

RATES = (500_000_000, 200_000_000)
TOKEN_WARMUP = 3  # the kernel's and the mount's first tokens fill the cache and learn the order
SHORT_TIMES = 3  # runs that last a second or two are repeated so many times as often
SIZES = (0.6, 0.9, 1.1, 1.5, 3.0)
FRACTIONS = (0.4, 0.6, 0.75, 0.9)


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
    """Yield the experiments of the wanted cases ("abcdef"), making files as they are needed."""
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


CASES = {"a": larger, "b": fits, "c": cold, "d": readers, "e": sizes, "f": unlimited}
