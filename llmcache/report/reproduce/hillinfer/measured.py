"""What of hillinfer's figures can be *measured here*: on this disk and processor, small, with an emulated device.

Whatever cannot be measured (no torch, no room on the disk) is missing with its reason, on the page and in the JSON.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from llmcache.errors import EnvironmentProblem, LlmcacheError
from llmcache.kv.bench import measured as bench
from llmcache.kv.bench.accelerator import fixed
from llmcache.kv.bench.results import Bench
from llmcache.kv.bench.session import Setup
from llmcache.kv.bench.variants import variants_of
from llmcache.kv.planning import MODELS
from llmcache.kv.spill import KvShape, Room, SpillFile
from llmcache.kv.workload import StreamSpec
from llmcache.report.reproduce import Progress
from llmcache.report.reproduce.hillinfer import figure8
from llmcache.report.reproduce.hillinfer.figure3 import MEASURED, QWEN, SHARES, Transfers
from llmcache.report.reproduce.hillinfer.readings import ALPHA, BATCH

TRANSFER_CONTEXTS, QUICK_TRANSFER_CONTEXTS = (1024, 2048, 4096, 8192), (512, 1024)
REPEATS = 3
POLICIES = "full,h2o,prefetch,leoam,hillinfer,hillinfer-no-app"
SSD_SHARE = 0.2
LAYER_NS = 2_000_000
SWEEP_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Measured:
    """What was measured; None where `missing` (by name of the field) says why not."""

    transfers: Transfers | None = None
    systems: Bench | None = None
    sweep: Bench | None = None
    accuracy: figure8.Accuracy | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


def measure(quick: bool, progress: Progress) -> Measured:
    """Returns everything that can be measured here; `quick`: smaller."""
    missing: dict[str, str] = {}

    def tried(name: str, what: str, run: Callable[[], _T]) -> _T | None:
        progress(what)
        try:
            return run()
        except LlmcacheError as error:
            missing[name] = f"{error.message}" + (f" ({error.hint})" if error.hint else "")
            return None

    return Measured(
        transfers=tried("transfers", "reading keys and values from this disk", lambda: transfers(quick)),
        systems=tried("systems", "running the systems on this machine", lambda: systems(quick, progress)),
        sweep=tried("sweep", "running HillInfer at several ratios of its pools", lambda: sweep(quick, progress)),
        accuracy=tried("accuracy", "asking the recall model", lambda: figure8.measured(quick)),
        missing=missing,
    )


def transfers(quick: bool) -> Transfers:
    """Returns figure 3a for one layer of Qwen-7B at a batch of 8, read from a spill file in the temporary directory."""
    contexts = QUICK_TRANSFER_CONTEXTS if quick else TRANSFER_CONTEXTS
    model = MODELS[QWEN]
    shape = KvShape("llmcache reproduce", 1, model.kv_heads, model.head_dim)
    tokens = round(max(SHARES) * max(contexts)) * BATCH
    with tempfile.TemporaryDirectory(prefix="llmcache-reproduce-") as made:
        try:
            with SpillFile.create(Path(made) / "layer.kv", shape) as file:
                _fill(file, tokens)
                file.flush()
                seconds = {
                    share: {context: _read_s(file, round(share * context) * BATCH) for context in contexts}
                    for share in SHARES
                }
        except OSError as error:
            raise EnvironmentProblem(f"{made}: {error.strerror}", "set TMPDIR to a directory with room") from error
    return Transfers(MEASURED, 1, seconds)


_PART = 4096  # tokens at a time: memory stays small


def _fill(file: SpillFile, tokens: int) -> None:
    shape = file.shape
    generator = np.random.default_rng(0)
    for first in range(0, tokens, _PART):
        count = min(_PART, tokens - first)
        bits = np.frombuffer(generator.bytes(2 * shape.kv_heads * count * shape.head_dim), np.uint16) & np.uint16(0xBBFF)
        rows = bits.view(np.float16).reshape(shape.kv_heads, count, shape.head_dim)
        file.append(0, 0, rows, rows)


def _read_s(file: SpillFile, tokens: int) -> float:
    """Seconds to read `tokens` of the layer, page after page into the same room; the median of several times."""
    pages = file.shape.pages_of(tokens)
    step = _PART // file.shape.page_tokens
    room = Room(file.shape, step)
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for first in range(0, pages, step):
            file.read(0, 0, list(range(first, min(pages, first + step))), room)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _setup(quick: bool, beta: float) -> Setup:
    """What runs here: the shape of a model of 8 billion parameters, fewer layers, one sequence."""
    context, layers, steps = (2048, 2, 3) if quick else (16384, 4, 8)
    return Setup(
        spec=StreamSpec(layers, 8, 32, 128, context),
        accelerator=fixed(LAYER_NS),
        directory=Path(tempfile.gettempdir()),
        steps=steps,
        warm_up=1 if quick else 3,
        alpha=ALPHA,
        beta=beta,
    )


def systems(quick: bool, progress: Progress) -> Bench:
    """Returns figures 9 to 11a in small: every system on this machine, with 20 % of the KV cache on the SSD."""
    return bench.compare(_setup(quick, (1 - SSD_SHARE) / SSD_SHARE), variants_of(POLICIES), progress)


def sweep(quick: bool, progress: Progress) -> Bench:
    """Returns figure 11b in small: HillInfer at several ratios of its pools around f_c / f_s as measured here."""
    factors = (0.5, 1.0, 2.0) if quick else SWEEP_FACTORS
    return bench.sweep(_setup(quick, 1.0), variants_of("hillinfer")[0], progress, factors)
