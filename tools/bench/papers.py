"""Measure the figures of `llmcache reproduce` that are measured, and write them to `llmcache/papers/NAME.json`.

The measurements are small cases on this machine, with an emulated accelerator and SSD; the files name machine and date. A
figure that cannot be measured (torch is missing, the disk is full) is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from llmcache.cache.policies import policy_class
from llmcache.errors import LlmcacheError, MissingRequirement
from llmcache.files import replacing
from llmcache.kv.bench import synthetic, task
from llmcache.kv.bench.results import STOCK
from llmcache.kv.bench.synthetic import Setup, fixed, variants_of
from llmcache.kv.bench.task import Candidate, TaskSetup
from llmcache.kv.spill import KvShape, SpillFile
from llmcache.kv.spill.layout import aligned
from llmcache.kv.tasks import RECALL_MODEL, recall
from llmcache.kv.workload import StreamSpec
from llmcache.model.shapes import MODELS
from llmcache.papers.judge import PAPERS
from llmcache.papers.traces import SHAPES
from llmcache.trace.record import BlockSpace, Trace

from . import machine
from .harness import ROOT, in_turns, timed
from .kvtransformers import SMALL, by_length, stock_at

Progress = Callable[[str], None]
MODEL, BATCH, ALPHA, SSD_SHARE = "Qwen-7B", 8, 0.2, 0.2
POLICIES = "full,h2o,prefetch,leoam,hillinfer,hillinfer-no-app"
ALPHAS = (0.05, 0.1, 0.2, 0.4)
PART = 4096  # tokens per append, to bound the memory
REPEATS = 5  # replays of each policy, with a cache of half of the footprint


def save(name: str, quick: bool, progress: Progress, directory: Path = PAPERS) -> dict[str, Any]:
    """Measure the figures of a paper, replace its file, and return its content."""
    found, missing = MEASURES[name](quick, progress)
    host = {key: value for key, value in machine.describe(ROOT).items() if key not in ("device", "commit")}
    head = {"schema": f"llmcache.papers.{name}/1", "machine": host, "date": date.today().isoformat(), "quick": quick}
    document = {**head, **found, "missing": missing}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    with replacing(directory / f"{name}.json", 0o666) as stream:
        stream.write(f"{{\n{lines}\n}}\n".encode())
    return document


def _tried(runs: dict[str, Callable[[], Any]], progress: Progress) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the result of each run, None for failed ones, and the messages of those."""
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, run in runs.items():
        progress(f"{name}: started")
        try:
            found[name] = run()
        except LlmcacheError as error:
            found[name] = None
            missing[name] = f"{error.message}" + (f" ({error.hint})" if error.hint else "")
    return found, missing


def hillinfer(quick: bool, progress: Progress) -> tuple[dict[str, Any], dict[str, str]]:
    """Return smaller versions of figures 3a, 8, 9 to 11a and 11b."""

    def setup(beta: float) -> Setup:
        # The shape of a model with 8 billion parameters, with fewer layers and one sequence.
        context, layers, steps = (2048, 2, 3) if quick else (16384, 4, 8)
        return Setup(
            spec=StreamSpec(layers, 8, 32, 128, context),
            accelerator=fixed(2_000_000),
            directory=Path(tempfile.gettempdir()),
            steps=steps,
            warm_up=1 if quick else 3,
            alpha=ALPHA,
            beta=beta,
        )

    factors = (0.5, 1.0, 2.0) if quick else (0.25, 0.5, 1.0, 2.0, 4.0)
    runs: dict[str, Callable[[], Any]] = {
        "transfers": lambda: transfers(quick),
        "systems": lambda: synthetic.compare(setup((1 - SSD_SHARE) / SSD_SHARE), variants_of(POLICIES), progress).document(),
        "beta": lambda: synthetic.sweep(setup(1.0), variants_of("hillinfer")[0], progress, factors).document(),
        "accuracy": lambda: accuracy(quick),
    }
    return _tried(runs, progress)


def transfers(quick: bool) -> dict[str, Any]:
    """Return figure 3a for one layer of Qwen-7B at a batch of 8, read from a spill file in the temporary directory."""
    contexts, shares = (512, 1024) if quick else (1024, 2048, 4096, 8192), (0.2, 0.3)
    shape = KvShape("tools/bench papers", 1, MODELS[MODEL].kv_heads, MODELS[MODEL].head_dim)
    rows = []
    with tempfile.TemporaryDirectory(prefix="llmcache-papers-") as made:
        try:
            with SpillFile.create(Path(made) / "layer.kv", shape) as file:
                _fill(file, round(max(shares) * max(contexts)) * BATCH)
                file.flush()
                for share in shares:
                    for context in contexts:
                        seconds = _read_s(file, round(share * context) * BATCH)
                        rows.append({"share": share, "context": context, "seconds": seconds})
        except OSError as error:
            raise MissingRequirement(f"{made}: {error.strerror}", "set TMPDIR to a directory with room") from error
    return {"layers": 1, "rows": rows}


def _fill(file: SpillFile, tokens: int) -> None:
    shape, generator = file.shape, np.random.default_rng(0)
    for first in range(0, tokens, PART):
        count = min(PART, tokens - first)
        bits = np.frombuffer(generator.bytes(2 * shape.kv_heads * count * shape.head_dim), np.uint16) & np.uint16(0xBBFF)
        rows = bits.view(np.float16).reshape(shape.kv_heads, count, shape.head_dim)
        file.append(0, 0, rows, rows)


def _read_s(file: SpillFile, tokens: int) -> float:
    """Return the seconds to read `tokens` of the layer page by page into one buffer, the median of three reads."""
    pages = file.shape.pages_of(tokens)
    step = PART // file.shape.page_tokens
    room = [aligned(step * size) for size in file.shape.slot_sizes]
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        for first in range(0, pages, step):
            file.read(0, 0, list(range(first, min(pages, first + step))), room)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def accuracy(quick: bool) -> dict[str, Any]:
    """Return figure 8 with the recall model: shares of correct answers. MissingRequirement: torch or transformers is
    missing.
    """
    from llmcache.kv.transformers import check_versions

    check_versions()
    from llmcache.kv.bench.subject import accuracy as answered
    from llmcache.kv.bench.subject import load_model

    contexts, tokens, per_context = (4, 1024, 8) if quick else (8, 4096, 32)
    questions = recall(np.random.default_rng(8), contexts, tokens, questions=per_context)
    model: Any = load_model(RECALL_MODEL)
    # A budget below sink and window, which all policies keep, leaves nothing to select.
    alphas = [alpha for alpha in ALPHAS if alpha * tokens >= 64]
    systems = ("h2o", "prefetch", "hillinfer")
    by_system = {name: {str(alpha): answered(model, questions, name, alpha=alpha) for alpha in alphas} for name in systems}
    full = answered(model, questions)
    return {"tokens": tokens, "answers": contexts * per_context, "full": full, "by_system": by_system}


def icecache(quick: bool, progress: Progress) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the recall model's answers to four tasks, and times of a model with random weights."""
    budgets, ours, rivals = (64, 128, 256), ("icecache", "icecache-dci", "icecache-pages"), ("quest", "h2o", "window")
    context, tries, contexts = (1024, 2, (1024,)) if quick else (4096, 4, (1024, 4096))
    directory = Path(tempfile.gettempdir())

    def run_task(name: str, at: Sequence[int], policies: Sequence[str], sizes: Sequence[int], cases: int) -> dict[str, Any]:
        setup = TaskSetup(name, RECALL_MODEL, at, policies, sizes, directory, cases=cases, steps=4, threads=1)
        document = task.run(setup, progress).document()
        return {**document, "conditions": {**document["conditions"], "model": "the recall model"}}

    everyone = (*ours, *rivals)
    tasks, missing = _tried(
        {
            "passkey": lambda: run_task("passkey", contexts, ours, budgets, 1),
            "recall": lambda: run_task("recall", (context,), everyone, budgets, tries),
            "chain": lambda: run_task("chain", (context,), everyone, (round(0.1 * context),), tries),
            "needle": lambda: run_task("needle", contexts, ours, budgets[-1:], 8 * tries),
        },
        progress,
    )
    rows, slow = _tried({"lengths": lambda: _lengths(quick, progress)}, progress)
    times = {"shape": SMALL, "synthetic_prompt": True, "rows": rows["lengths"] or []}
    return {"tasks": {name: one for name, one in tasks.items() if one is not None}, "lengths": times}, missing | slow


def _lengths(quick: bool, progress: Progress) -> list[dict[str, Any]]:
    """Return smaller versions of figures 1, 7b, 7c and 8; the largest length is the paper's 36 k."""
    names = ("icecache", "icecache-reuse", "quest", "h2o", "window")
    everyone = [Candidate(STOCK, None), *(Candidate(name, 256) for name in names)]
    at, steps = ((1024, 2048), 4) if quick else ((4096, 9216, 18432, 36864), 12)
    rows = by_length(SMALL, at, everyone, Path(tempfile.gettempdir()), steps, 2, progress)
    return [row.document(stock_at(rows, row.tokens)) for row in rows]


def io_caching(quick: bool, progress: Progress) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the time that each policy takes to replay AI Notes (ns per block)."""
    progress("timing the policies")
    return {"overhead": overhead(SHAPES["ai_notes"](), "AI Notes")}, {}


def overhead(trace: Trace, name: str) -> dict[str, Any]:
    """Return the median time per block of `REPEATS` replays of `trace` by each policy, in turn, on one thread.

    An additional first replay compiles the policies.
    """
    space = BlockSpace.of([trace])
    first, count = space.place(trace), trace.count.astype(np.int64)

    def replay_s(policy: str) -> float:
        cache = policy_class(policy)(max(1, space.footprint // 2), space.blocks)
        return timed(lambda: cache.replay(first, count))()

    policies = ("lru", "lecar", "algorithm1", "llmcache")
    taken = in_turns({policy: partial(replay_s, policy) for policy in policies}, REPEATS, Console(stderr=True))
    medians = {policy: 1e9 * statistics.median(times) / trace.accesses for policy, times in taken.items()}
    return {"repeats": REPEATS, "trace": name, "ns_per_block": medians}


MEASURES: dict[str, Callable[[bool, Progress], tuple[dict[str, Any], dict[str, str]]]] = {
    "io-caching": io_caching,
    "hillinfer": hillinfer,
    "icecache": icecache,
}
"""The measurement for each paper; kelle has none."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the papers that are named, or all of them; return 0."""
    parser = argparse.ArgumentParser(prog="tools/bench papers", description=__doc__)
    parser.add_argument("--measure", nargs="*", choices=list(MEASURES), help="papers to measure [without names: all]")
    parser.add_argument("--quick", action="store_true", help="smaller and shorter measurements")
    args = parser.parse_args(argv)
    for name in args.measure or MEASURES:
        save(name, args.quick, lambda what: print(what, file=sys.stderr))
    return 0
