"""Measure SpillCache on real models: loss and answers at several budgets; time, bytes and memory of a token.

The models are SmolLM2-135M-Instruct and Gemma 3 270M in float32, run by transformers on texts from the documentation on
this machine and on tasks like those of RULER. --kvpress adds the loss of kvpress' methods at the same number of tokens, with
the version of transformers that kvpress needs. On a GPU, if there is one, only time and memory are measured: of SmolLM2, and
of a model with the shape of Llama 3 8B and random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from llmcache.cgroup import Cgroup
from llmcache.errors import DataError, MissingRequirement, UsageError
from llmcache.kv.bench.options import TASK_MODELS, model_of
from llmcache.kv.bench.results import MOST, STOCK, mean_of
from llmcache.kv.bench.task import Candidate, CollectedAnswers, TaskSetup, answered, probes, take_turns
from llmcache.kv.tasks.english import Document, documents

from .harness import common_options, measured_apart, workplace
from .results import markdown, part_targets, targets_table

SCHEMA = "llmcache-bench-kvmodels/1"
OWN, ORACLE, RIVALS = "mass", "oracle-layer", ("icecache", "hillinfer", "quest", "window")
BUDGETS = (64, 128, 256)
RIVALS_BUDGET = 128
"""The other policies are measured at this budget only, at the shortest context of a task."""
PRESSES, PRESS_FULL = ("kvpress-snapkv", "kvpress-expected", "kvpress-knorm", "kvpress-streaming"), "kvpress-full"
"""Methods of kvpress, and the full cache with the version of transformers that kvpress needs."""
PRESS_BUDGETS = (64, 128)
KVPRESS, KVPRESS_COMMAND = Path(sys.prefix) / "kvpress", "bash -c '. tools/_setup.sh; setup_kvpress'"
"""Directory of the packages of kvpress, and the command that installs them."""
CONTEXTS = (1024, 2048, 4096, 8000)
"""SmolLM2 has 8,192 positions, some of which are for the tokens that follow a text."""
LONG = CONTEXTS[2:]
CASES = {"passkey": 1, "needle": 5, "recall": 1, "variables": 1, "common": 5, "frequent": 5}
"""Contexts of each task at each length (for a passkey, per depth): at least 50 questions over all tasks at each length."""
DOCUMENTS = 8
WORST = 1.1
"""Limit for the loss above the full cache, relative to that of the best oracle."""
HALF = 0.5
"""The same, relative to that of the best method of kvpress."""
POOL_PAGES, POOL_BUDGET = 8, 128
"""Pages in memory in the runs that limit them to the budget, and that budget."""
DISK_BPS = 500_000_000
FAR = 32768
SAID, AFTER = 8, 16
"""Tokens generated before a kill and after it."""
GPU_CONTEXTS, GPU_BUDGET = {"smollm2": 8000, "llama-8b": 131_072}, 2048
LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
}  # fmt: skip
TARGETS = {
    **{f"loss.{budget}": ("<=", 0.0) for budget in BUDGETS},
    **{f"rivals.{budget}": ("<=", 0.0) for budget in PRESS_BUDGETS},
    **{f"tasks.{budget}": (">=", share) for budget, share in zip(BUDGETS, (0.97, 0.98, 0.99), strict=True)},
    "time": ("<=", 1.05), "time.long": ("<", 1.0), "file": ("<=", 1.5), "bytes": ("<=", 1.5), "memory.small": ("<=", 0.05),
    "memory": ("<=", 1.0), "exact": (">=", 1.0), "restored": (">=", 1.0), "gpu": ("<=", 1.05),
}  # fmt: skip


@dataclass(frozen=True)
class BenchScope:
    """Directory, threads and size of the measurements."""

    directory: Path
    threads: int
    quick: bool
    kvpress: bool = False
    contexts: Sequence[int] = CONTEXTS

    @property
    def models(self) -> list[str]:
        return list(TASK_MODELS)[:1] if self.quick else list(TASK_MODELS)

    def lengths(self, contexts: Sequence[int]) -> Sequence[int]:
        return (512,) if self.quick else contexts

    def chosen(self, contexts: Sequence[int]) -> Sequence[int]:
        """Return those of `contexts` that --context selects; UsageError if there are none."""
        found = [context for context in contexts if context in self.contexts]
        if not found:
            raise UsageError(
                "--context: this part does not measure that length", f"it measures {', '.join(map(str, contexts))}"
            )
        return self.lengths(found)

    def setup(self, task: str, model: str, context: int, cases: int) -> TaskSetup:
        cases = 1 if self.quick else cases
        return TaskSetup(task, model_of(model), (context,), (), BUDGETS, self.directory, cases=cases, threads=self.threads)


# Loss and answers


def above(outcomes: Mapping[Candidate, CollectedAnswers], one: Candidate) -> list[float]:
    """Return the loss of each text above that of the full cache with the same version of transformers."""
    full = Candidate(PRESS_FULL if one.policy.startswith("kvpress-") else STOCK, None)
    return [loss - least for loss, least in zip(outcomes[one].losses, outcomes[full].losses, strict=True)]


def excess(
    outcomes: Mapping[Candidate, CollectedAnswers], budget: int, others: Sequence[str] = (ORACLE,), share: float = WORST
) -> float:
    """Return how far the loss above the full cache exceeds `share` of that of the best of `others`, minus its standard
    error.

    If the best of `others` is below the full cache, a share above 1 would tighten the limit; the share is then at most 1.
    """
    best = min((above(outcomes, Candidate(policy, budget)) for policy in others), key=statistics.fmean)
    share = min(share, 1.0) if statistics.fmean(best) < 0 else share
    own = above(outcomes, Candidate(OWN, budget))
    mean, error = mean_of([one - share * other for one, other in zip(own, best, strict=True)])
    return mean - (error if len(best) > 1 else 0.0)


def kept(outcomes: Sequence[Mapping[Candidate, CollectedAnswers]], budget: int) -> float:
    """Return the share of the full cache's correct answers that remain, over all tasks that the full cache mostly solves."""
    pairs = [(one.get(Candidate(OWN, budget)), one[Candidate(STOCK, None)].answers()) for one in outcomes]
    answered_most = [(own, full) for own, full in pairs if own is not None and full.share >= MOST]
    if not answered_most:
        raise DataError("tasks: the model solves no task with the full cache", "use another model or other lengths")
    return sum(sum(own.kept) for own, _ in answered_most) / sum(sum(full.right) for _, full in answered_most)


def _row(one: Candidate, outcomes: Mapping[Candidate, CollectedAnswers]) -> dict[str, Any]:
    answers, losses, divergences = outcomes[one].answers(), outcomes[one].losses, outcomes[one].divergences
    row: dict[str, Any] = {"policy": one.policy, "budget": one.budget, "right": answers.right, "asked": answers.asked}
    row["kept"] = answers.kept
    if losses:
        row |= {"losses": losses, "divergences": divergences, "divergence": mean_of(divergences)}
        row["above"] = mean_of(above(outcomes, one))
    return row


def _subjects(scope: BenchScope) -> Iterator[tuple[str, Any]]:
    from llmcache.kv.bench.subject import Subject

    for model in scope.models:
        yield model, Subject(model_of(model))


def _everyone(*policies: str) -> list[Candidate]:
    return [Candidate(STOCK, None), *(Candidate(policy, budget) for policy in policies for budget in BUDGETS)]


def _pressed(
    scope: BenchScope, setup: TaskSetup, subject: Any, context: int, run: dict[str, Any]
) -> dict[Candidate, CollectedAnswers]:
    """Return the outcomes of kvpress' methods on the same texts. Adds their versions to `run`."""
    path = scope.directory / "texts.npz"
    texts = [text for text in probes(setup, subject, context) if isinstance(text, Document)]
    ids, following = (np.concatenate(sides) for sides in zip(*((text.ids, text.following) for text in texts), strict=True))
    np.savez(path, ids=ids, following=following)
    words = (setup.model, path, scope.threads, *PRESS_BUDGETS)
    found = measured_apart("clients.kvpress_losses", *words, packages=KVPRESS)
    run["kvpress"] = found["versions"]
    return {Candidate(one.pop("policy"), one.pop("budget")): CollectedAnswers(**one) for one in found["answers"]}


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _losses(scope: BenchScope) -> Iterator[tuple[dict[Candidate, CollectedAnswers], dict[str, Any]]]:
    """Yield the outcomes of each model and length, by candidate and as plain data."""
    rivals = [Candidate(policy, RIVALS_BUDGET) for policy in RIVALS]
    for model, subject in _subjects(scope):
        for place, context in enumerate(scope.chosen(LONG)):
            setup = scope.setup("loss", model, context, DOCUMENTS)
            everyone = _everyone(OWN, ORACLE) + ([] if place else rivals)
            run: dict[str, Any] = {"model": model, "task": "loss", "context": context, "texts": []}
            pressed = _pressed(scope, setup, subject, context, run) if scope.kvpress else {}
            outcomes = answered(setup, subject, context, scope.directory, everyone, run["texts"], _log) | pressed
            yield outcomes, {**run, "rows": [_row(one, outcomes) for one in outcomes]}


def loss(scope: BenchScope) -> dict[str, dict[str, Any]]:
    """Return the loss above the full cache, relative to the oracle and, with --kvpress, to the methods of kvpress."""
    found = list(_losses(scope))
    parts: dict[str, dict[str, Any]] = {}
    lengths = " and ".join(dict.fromkeys(f"{run['context']:,}" for _, run in found))

    def judge(name: str, budgets: Sequence[int], share: float, best: str, others: Sequence[str]) -> None:
        what = f"loss above full: {OWN} - {share} x {best} - standard error, worst of {lengths} tokens"
        for budget in budgets:
            figure = max(excess(outcomes, budget, others, share) for outcomes, _ in found)
            parts[f"{name}.{budget}"] = {"what": f"{what}, budget {budget}", "figure": figure}

    judge("loss", BUDGETS, WORST, "oracle", (ORACLE,))
    if scope.kvpress:
        judge("rivals", PRESS_BUDGETS, HALF, "best of kvpress", PRESSES)
    parts[f"loss.{BUDGETS[0]}"]["runs"] = [run for _, run in found]
    return parts


def _answers(scope: BenchScope) -> Iterator[tuple[dict[Candidate, CollectedAnswers], dict[str, Any]]]:
    """Yield the outcomes of each task, like `_losses`. If the full cache does not mostly solve a task, only its answers are
    included.

    Everything is in memory, because the place of the data does not affect the selection (see `tests/hf`).
    """
    for model, subject in _subjects(scope):
        for task, cases in CASES.items():
            for context in scope.chosen(CONTEXTS):
                setup = scope.setup(task, model, context, cases)
                outcomes = answered(setup, subject, context, None, _everyone(OWN), [], _log, MOST)
                run = {"model": model, "task": task, "context": context}
                yield outcomes, {**run, "rows": [_row(one, outcomes) for one in outcomes]}


def tasks(scope: BenchScope) -> dict[str, dict[str, Any]]:
    """Return the answers to tasks like those of RULER."""
    found = list(_answers(scope))
    lengths = " and ".join(dict.fromkeys(f"{run['context']:,}" for _, run in found))
    what = f"share of the full cache's correct answers kept, in tasks that it mostly solves, {lengths} tokens"
    outcomes = [outcomes for outcomes, _ in found]
    parts = {f"tasks.{budget}": {"what": f"{what}, budget {budget}", "figure": kept(outcomes, budget)} for budget in BUDGETS}
    parts[f"tasks.{BUDGETS[0]}"]["runs"] = [run for _, run in found]
    return parts


# Time, bytes, memory


def _text(subject: Any, tokens: int) -> Document:
    return next(documents(np.random.default_rng(0), tokens, 1, subject.encode, subject.first))


def _times(scope: BenchScope, contexts: Sequence[int], **options: Any) -> list[dict[str, Any]]:
    """Return, for each context, the time of a token with both caches, and the bytes read from the file per selected row."""
    from llmcache.kv.bench.subject import Prompt, Run, Subject, stock
    from llmcache.kv.pipeline import Timeline
    from llmcache.kv.transformers import SpillCache

    subject, found = Subject(model_of("smollm2")), []
    for context in scope.lengths(contexts):
        given = Prompt(subject.model, _text(subject, context).ids)
        timeline = Timeline()
        with SpillCache(subject.model.config, OWN, threads=scope.threads, timeline=timeline, **options) as cache:
            runs = [Run(subject.model, stock(subject.model)), Run(subject.model, cache, timeline)]
            for run in runs:
                run.take(given)
            take_turns(runs, 4 if scope.quick else 32)
            full, own = (run.speed() for run in runs)
            shape = cache.store.shape
            row = shape.layers * shape.kv_heads * (shape.head_dim + (shape.value_dim or 0)) * shape.numpy_dtype.itemsize
            read = runs[1].moved().bytes_between("ssd", "cpu") / runs[1].steps
            found.append(
                {"context": context, "full_ns": full.tpot_ns, "own_ns": own.tpot_ns, "parts_ns": dict(own.parts_ns)}
                | {"read_bytes": read, "row_bytes": row, "times": own.tpot_ns / full.tpot_ns}
            )
    return found


def time(scope: BenchScope) -> dict[str, dict[str, Any]]:
    """Return the time of a token with default settings."""
    rows = _times(scope, CONTEXTS)
    most = max(row["times"] for row in rows)
    long = max((row["times"] for row in rows if row["context"] >= LONG[0]), default=most)
    what = "time per token / DynamicCache's, default settings, worst of"
    return {
        "time": {"what": f"{what} {CONTEXTS[0]:,} to {CONTEXTS[-1]:,} tokens", "figure": most, "rows": rows},
        "time.long": {"what": f"{what} {LONG[0]:,} tokens and more", "figure": long},
    }


def file(scope: BenchScope) -> dict[str, dict[str, Any]]:
    """Return the time of a token with pages limited to the budget; `measure` limits the disk to DISK_BPS."""
    rows = _times(scope, LONG, token_budget=POOL_BUDGET, cpu_pages=POOL_PAGES, path=scope.directory)
    most = max(row["read_bytes"] / (POOL_BUDGET * row["row_bytes"]) for row in rows)
    what = "time per token / DynamicCache's, pages limited to the budget, disk limited to 500 MB/s"
    bytes_what = f"bytes read from the file / bytes of the selected rows, budget {POOL_BUDGET}, worst context"
    return {
        "file": {"what": what, "figure": max(row["times"] for row in rows), "rows": rows},
        "bytes": {"what": bytes_what, "figure": most},
    }


def _shallow(model: Any, layers: int) -> Any:
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]
    return model


def memory(scope: BenchScope) -> dict[str, dict[str, Any]]:
    """Return the memory of pages and index for a long context, with random keys and with a text.

    Two layers are run, because all layers need the same memory.
    """
    from llmcache.kv.bench.subject import Prompt, Run, Subject, stock
    from llmcache.kv.transformers import SpillCache

    subject, tokens = Subject(model_of("smollm2")), 1024 if scope.quick else FAR
    model = _shallow(subject.model, 2)
    small: dict[str, Any] = {"token_budget": POOL_BUDGET, "cpu_pages": POOL_PAGES, "path": scope.directory}
    shares: dict[str, list[float]] = {"memory.small": [], "memory": []}
    for given in (Prompt.by_chance(model, tokens), Prompt(model, _text(subject, tokens).ids)):
        full = Run(model, stock(model))
        full.take(given)
        full.step()
        for name, options in (("memory.small", {**small, "scorer": "packed"}), ("memory", {})):
            with SpillCache(model.config, OWN, threads=scope.threads, **options) as cache:
                run = Run(model, cache)
                run.take(given)
                run.step()
                taken = run.memory()
            shares[name].append((taken.kv_bytes + taken.index_bytes) / full.memory().kv_bytes)
    what = f"keys, values and index in memory / DynamicCache's, {tokens:,} tokens, worse of random keys and text"
    little = f"{POOL_PAGES} pages, index of 2 bits per number"
    return {
        "memory.small": {"what": f"{what}, {little}", "figure": max(shares["memory.small"])},
        "memory": {"what": f"{what}, default settings", "figure": max(shares["memory"])},
    }


def _gpu_models(scope: BenchScope) -> Iterator[tuple[str, Any]]:
    """Yield SmolLM2, and a random model with the shape of Llama 3 8B in bfloat16."""
    import torch

    from llmcache.kv.bench.subject import Subject, random_model

    yield "smollm2", Subject(model_of("smollm2")).model
    if not scope.quick:
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda"):
                model = random_model(LLAMA_8B)
        finally:
            torch.set_default_dtype(torch.float32)
        yield "llama-8b", model


def _gpu_caches(model: Any, threads: int) -> list[dict[str, Callable[[], Any]]]:
    """Return functions that create the compared caches; the caches of one group take turns."""
    from transformers import DynamicCache

    from llmcache.kv.bench.subject import stock
    from llmcache.kv.transformers import SpillCache

    chosen: dict[str, Any] = {"token_budget": GPU_BUDGET, "full_tokens": 0, "threads": threads}
    return [
        {"DynamicCache": lambda: stock(model), "SpillCache": lambda: SpillCache(model.config)},
        {"DynamicCache, offloaded": lambda: DynamicCache(config=model.config, offloading=True)},
        {f"SpillCache, {GPU_BUDGET:,} chosen": lambda: SpillCache(model.config, **chosen)},
    ]


def _gpu_rows(model: Any, group: dict[str, Callable[[], Any]], context: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield times and memory of some caches.

    Their contexts differ slightly in length, because cuDNN plans each length only once per process.
    """
    import torch

    from llmcache.kv.bench.subject import Run

    allocated, random = torch.cuda.memory_allocated, np.random.default_rng(0)
    torch.cuda.empty_cache()
    runs, kept = [Run(model, make()) for make in group.values()], []
    try:
        for place, run in enumerate(runs):
            before = allocated()
            run.read(random.integers(0, model.config.vocab_size, (1, context + 4 * place * steps)))
            run.step()
            kept.append(allocated() - before)
        take_turns(runs, steps)
        for kind, run, kept_bytes in zip(group, runs, kept, strict=True):
            speed, before = run.speed(), allocated()
            torch.cuda.reset_peak_memory_stats()
            run.step()
            gpu_bytes = kept_bytes + torch.cuda.max_memory_allocated() - before
            yield {"cache": kind, "prompt_ns": speed.prefill_ns, "token_ns": speed.tpot_ns, "gpu_bytes": gpu_bytes}
    finally:
        for run in runs:
            if callable(close := getattr(run.cache, "close", None)):
                close()


def gpu(scope: BenchScope) -> dict[str, dict[str, Any]]:
    """Return the time of a token on a GPU, with the caches of transformers and with SpillCache; MissingRequirement without a
    GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise MissingRequirement("--only gpu: torch finds no GPU", "run it on a machine with a GPU")
    rows: list[dict[str, Any]] = []
    for name, model in _gpu_models(scope):
        context = scope.lengths((GPU_CONTEXTS[name],))[0]
        for group in _gpu_caches(model, scope.threads):
            for row in _gpu_rows(model, group, context, 4 if scope.quick else 48):
                rows.append({"model": name, "context": context, **row})
    full, own = ([row["token_ns"] for row in rows if row["cache"] == kind] for kind in ("DynamicCache", "SpillCache"))
    lengths = " and ".join(f"{context:,}" for context in dict.fromkeys(row["context"] for row in rows))
    what = f"time per token on a GPU / DynamicCache's, default settings, worst of {lengths} tokens"
    device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "processors": os.cpu_count()}
    figure = max(one / other for one, other in zip(own, full, strict=True))
    return {"gpu": {"what": what, "figure": figure, "rows": rows, "device": device}}


# Exactness


def exact(scope: BenchScope) -> dict[str, dict[str, Any]]:
    """Compare the logits with those of DynamicCache, with a budget of the whole context."""
    from llmcache.kv.bench.subject import logits, stock
    from llmcache.kv.transformers import SpillCache

    same: list[bool] = []
    for _, subject in _subjects(scope):
        text, model = _text(subject, scope.lengths(LONG)[0]), subject.model
        full = stock(model)
        with SpillCache(model.config, OWN, token_budget=2 * text.ids.shape[1], path=scope.directory, full_tokens=0) as cache:
            for ids in (text.ids, *(text.following[:, at : at + 1] for at in range(SAID))):
                same.append(bool((logits(model, full, ids) == logits(model, cache, ids)).all()))
    what = "share of steps with the same logits as DynamicCache, bit for bit, budget of the whole context"
    return {"exact": {"what": what, "figure": statistics.fmean(same)}}


def _generated(model: Any, cache: Any, ids: Any, count: int) -> list[int]:
    from llmcache.kv.bench.subject import feed

    said: list[int] = []
    for _ in range(count):
        ids = feed(model, cache, ids)[:, None]
        said.append(int(ids[0, 0]))
    return said


def _talk(scope: BenchScope, name: str, path: Path, say: Connection) -> None:
    """Read a text, continue it, save the cache, and wait to be killed. Runs in its own process."""
    from llmcache.kv.bench.subject import Subject
    from llmcache.kv.transformers import SpillCache

    subject = Subject(model_of(name))
    text = _text(subject, scope.lengths(LONG)[0])
    with SpillCache(subject.model.config, OWN, token_budget=POOL_BUDGET, path=path, full_tokens=0) as cache:
        said = _generated(subject.model, cache, text.ids, SAID)
        cache.save()
        say.send(said)
        say.recv()


def restored(scope: BenchScope) -> dict[str, dict[str, Any]]:
    """Compare conversations that are saved, killed and restored with uninterrupted ones."""
    from llmcache.kv.transformers import SpillCache

    same: list[bool] = []
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    for name, subject in _subjects(scope):
        path = scope.directory / f"{name}.kv"
        say, hear = spawn.Pipe()
        talk = spawn.Process(target=_talk, args=(scope, name, path, say), daemon=True)
        talk.start()
        say.close()
        try:
            said = hear.recv()
        except EOFError as error:
            raise DataError(f"{name}: the conversation process ended early", "see its messages above") from error
        finally:
            talk.kill()
            talk.join()
        model, text = subject.model, _text(subject, scope.lengths(LONG)[0])
        with SpillCache.restore(model, path, OWN, token_budget=POOL_BUDGET, full_tokens=0) as cache:
            rest = _generated(model, cache, np.array([said[-1:]]), AFTER)
        with SpillCache(model.config, OWN, token_budget=POOL_BUDGET, full_tokens=0) as cache:
            expected = _generated(model, cache, text.ids, SAID + AFTER)
        same += [one == other for one, other in zip([*said, *rest], expected, strict=True)]
    what = "share of tokens that are the same after a save, a kill and a restore"
    return {"restored": {"what": what, "figure": statistics.fmean(same)}}


PARTS: dict[str, Callable[[BenchScope], dict[str, dict[str, Any]]]] = {
    "loss": loss, "tasks": tasks, "time": time, "file": file, "memory": memory, "exact": exact, "restored": restored,
    "gpu": gpu,
}  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=PARTS, action="append", help="run only this part; repeatable")
    about = f"also measure the loss of kvpress' methods; set it up first: {KVPRESS_COMMAND}"
    parser.add_argument("--kvpress", action="store_true", help=about)
    about = "measure loss and tasks only at this context length; repeatable"
    parser.add_argument("--context", type=int, choices=CONTEXTS, action="append", help=about)
    common_options(parser, "the spill files, 2 GB", "one model, short contexts")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="threads of torch and of each kernel [%(default)s]"
    )


def measure(args: argparse.Namespace, _console: Console) -> Iterator[dict[str, Any]]:
    import torch

    if args.kvpress and "loss" not in (args.only or PARTS):
        raise UsageError("--kvpress applies only to the part loss", "add --only loss")
    if args.kvpress and not KVPRESS.is_dir():
        raise MissingRequirement(f"--kvpress: {KVPRESS} does not exist", f"set it up: {KVPRESS_COMMAND}")
    torch.set_num_threads(args.threads)
    parts: dict[str, Any] = {}
    with workplace(args.dir) as scratch:
        for part in args.only or [part for part in PARTS if part != "gpu" or torch.cuda.is_available()]:
            limited = Cgroup("kvmodels", directory=args.dir, read_bps=DISK_BPS)
            with limited if part == "file" else contextlib.nullcontext() as group:
                if group is not None:
                    group.add(os.getpid())  # it leaves when the group is removed
                contexts = args.context or CONTEXTS
                parts |= PARTS[part](BenchScope(scratch, args.threads, args.quick, args.kvpress, contexts))
    yield {"quick": args.quick, "threads": args.threads, "torch": torch.__version__, "parts": parts}


def table(document: dict[str, Any]) -> str:
    """Return the targets, and what each budget costs in loss and in answers."""
    parts = document["parts"]
    runs = {part: parts[f"{part}.{BUDGETS[0]}"]["runs"] for part in ("loss", "tasks") if f"{part}.{BUDGETS[0]}" in parts}
    rows = []
    for run in runs.get("loss", ()):
        above: dict[str, dict[int, tuple[float, float]]] = {}
        for one in run["rows"]:
            if one["budget"] is not None:
                above.setdefault(one["policy"], {})[one["budget"]] = one["above"]
        for policy, by_budget in above.items():
            cells = ["{:.3f} ± {:.3f}".format(*by_budget[budget]) if budget in by_budget else "" for budget in BUDGETS]
            rows.append([f"{run['model']}, {run['context']:,}", policy, *cells])
    head = [
        f"loss above the full cache, {len(runs['loss'][0]['texts'])} texts" if rows else "",
        "policy",
        *map(str, BUDGETS),
    ]
    tables = [
        targets_table(part_targets(document, TARGETS), "measured, real models"),
        *([markdown(head, rows, texts=(0, 1))] if rows else []),
    ]
    if "gpu" in parts:
        found = parts["gpu"]
        head = [found["device"]["gpu"], "cache", "prompt s", "token ms", "GPU memory of the cache GB"]
        lines: list[list[str]] = []
        for one in found["rows"]:
            figures = one["prompt_ns"] / 1e9, one["token_ns"] / 1e6, one["gpu_bytes"] / 1e9
            forms = "{:.1f}", "{:.0f}", "{:.2f}"
            lines.append([f"{one['model']}, {one['context']:,}", one["cache"], *map(str.format, forms, figures)])
        tables.append(markdown(head, lines, texts=(0, 1)))
    answers: dict[tuple[str, str], list[list[int]]] = {}
    for run in runs.get("tasks", ()):
        full, *others = run["rows"]
        if sum(full["right"]) < MOST * sum(full["asked"]):
            continue  # a task that the full cache does not solve is no evidence
        kept = {one["budget"]: sum(one["kept"]) for one in others if one["policy"] == OWN}
        found = [sum(full["asked"]), sum(full["right"]), *(kept[budget] for budget in BUDGETS)]
        answers.setdefault((run["model"], run["task"]), []).append(found)
    if answers:
        head = ["model, task", "questions", "correct with the full cache", *(f"of these, at {budget}" for budget in BUDGETS)]
        totals = [
            [f"{model}, {task}", *map(str, map(sum, zip(*each, strict=True)))] for (model, task), each in answers.items()
        ]
        tables.append(markdown(head, totals))
    return "\n".join(tables)
