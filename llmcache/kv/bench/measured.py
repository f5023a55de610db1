"""The benchmark on this machine: policies in turns, step by step, so that what disturbs one disturbs all.

*Measured*, with a *synthetic* stream; the accelerator and the computational SSD are *emulated*.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.kv.bench.results import MEASURED, Bench, Marks, Row
from llmcache.kv.bench.session import Session, Setup
from llmcache.kv.bench.variants import Variant
from llmcache.units import format_size

Progress = Callable[[str], None]

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
"""Betas of a sweep, as multiples of the one that is expected to be best."""
SPARE_SHARE = 0.5
"""Of the memory that is free, what pools of policies that take turns may take together."""
SPEED_RUNS = 15


def compare(setup: Setup, variants: Sequence[Variant], progress: Progress = lambda _: None) -> Bench:
    """Returns a row for each of `variants`, which take turns if their pools fit in memory together."""
    with workplace(setup.directory) as directory:
        rows, notes = _rows([(replace(setup, directory=directory), variant) for variant in variants], progress)
    return Bench(MEASURED, setup.conditions(), tuple(rows), notes=notes)


def sweep(setup: Setup, variant: Variant, progress: Progress = lambda _: None, factors: Sequence[float] = FACTORS) -> Bench:
    """Returns a row for each beta around the one that rule and memory expect, all of one policy.

    Betas at which sink and window alone would fill the pool are left out.
    """
    with workplace(setup.directory) as directory:
        here = replace(setup, directory=directory)
        marks = marks_of(here, variant, progress)
        betas = sorted({marks.expected * factor for factor in factors if marks.m0 is None or factor <= 1})
        todo = [replace(here, beta=beta) for beta in betas]
        rows, notes = _rows([(one, variant) for one in todo if _has_room(one)], progress)
    return Bench(MEASURED, setup.conditions(), tuple(rows), marks, notes)


def _has_room(setup: Setup) -> bool:
    """Whether the pool holds more than sink and window, which are in it in any case."""
    pinned = setup.spec.shape.pages_of(setup.sink_tokens) + setup.spec.shape.pages_of(setup.window_tokens)
    return setup.cpu_pages is None or setup.cpu_pages > pinned


def marks_of(setup: Setup, variant: Variant, progress: Progress = lambda _: None) -> Marks:
    """Returns where beta should be best: f_c and f_s *measured* by the engine's own scoring, with half the pages each."""
    progress("measuring how fast processor and device score")
    with Session(replace(setup, beta=1.0, memory_bytes=None, steps=1, warm_up=0), variant) as session:
        session.prefill()
        f_c, f_s = speeds(session)
    shape, spec = setup.spec.shape, setup.spec
    kv_bytes = shape.token_bytes * shape.layers * spec.batch * spec.context
    m0 = setup.memory_bytes
    return Marks(f_c, f_s, None if m0 is None or m0 >= kv_bytes else m0 / (kv_bytes - m0))


def speeds(session: Session) -> tuple[float, float]:
    """Returns the bytes/s of keys that processor and device score, each alone; medians."""
    spec, store = session.setup.spec, session.store
    asked = session.stream.queries(0, 0)[0]
    key_bytes = spec.head_dim * spec.shape.numpy_dtype.itemsize
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(SPEED_RUNS + 1):
        begin = time.perf_counter()
        scored = store.score_cpu(0, 0, asked)[1].size
        middle = time.perf_counter()
        device = sum(len(block.positions) for block in store.score_ssd(0, 0, asked, None, "max", session.setup.block_tokens))
        rates[0].append(scored * key_bytes / (middle - begin))
        rates[1].append(device * key_bytes / (time.perf_counter() - middle))
    f_c, f_s = (statistics.median(rate[1:]) for rate in rates)  # the first ones compile
    return f_c, f_s


def _rows(todo: Sequence[tuple[Setup, Variant]], progress: Progress) -> tuple[list[Row], tuple[str, ...]]:
    """Rows in the order of `todo`: all in turns, or one after the other where memory is too small."""
    if sum(map(_pool_bytes, (setup for setup, _ in todo))) <= SPARE_SHARE * _free_bytes():
        return _in_turns(todo, progress), ()
    rows = [row for one in todo for row in _in_turns([one], progress)]
    return rows, ("policies ran one after the other: their pools together would not fit in memory",)


def _in_turns(todo: Sequence[tuple[Setup, Variant]], progress: Progress) -> list[Row]:
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(Session(setup, variant)) for setup, variant in todo]
        for session in sessions:
            progress(f"{session.variant.name}: storing the prompt")
            session.prefill()
        setup = todo[0][0]
        for step in range(setup.warm_up + setup.steps):
            progress(f"decode step {step + 1} of {setup.warm_up + setup.steps}")
            # Not always the same one after the same one.
            for place in np.random.default_rng(step).permutation(len(sessions)):
                sessions[place].decode(step)
        return [session.row() for session in sessions]


def _pool_bytes(setup: Setup) -> int:
    shape, pages = setup.spec.shape, setup.cpu_pages
    if pages is None:
        pages = shape.pages_of(setup.spec.context + setup.warm_up + setup.steps)
    return pages * shape.page_tokens * shape.token_bytes * shape.layers * setup.spec.batch


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise EnvironmentProblem("/proc/meminfo: it does not say how much memory is available", "is this Linux?")


@contextlib.contextmanager
def workplace(directory: Path) -> Iterator[Path]:
    """Yields a fresh directory below `directory`, which is removed at the end; UsageError if that is none."""
    if not directory.is_dir():
        raise UsageError(f"--path: {directory} is not a directory", "give one on the storage that is to be measured")
    try:
        made = Path(tempfile.mkdtemp(prefix="llmcache-bench-", dir=directory))
    except OSError as error:
        hint = "give a directory that can be written to"
        raise EnvironmentProblem(f"--path: {directory}: {error.strerror}", hint) from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def check_space(setup: Setup, files: int) -> None:
    """EnvironmentProblem if the spill files of `files` policies will not fit below the setup's directory."""
    shape, spec = setup.spec.shape, setup.spec
    page_bytes = shape.key_slot_bytes + shape.value_slot_bytes
    needed = files * spec.batch * shape.layers * shape.pages_of(spec.context) * page_bytes
    free = shutil.disk_usage(setup.directory).free
    if needed > free:
        hint = "a shorter context, fewer layers or fewer policies need less"
        lacks = f"{format_size(needed)} are needed for spill files, {format_size(free)} are free"
        raise EnvironmentProblem(f"--path: {setup.directory}: {lacks}", hint)
