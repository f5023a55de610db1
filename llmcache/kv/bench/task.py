"""Tasks for a transformers model with its own cache and with spilled ones: answers, attention, time, bytes, memory.

Each cache has three *measured* runs: one answers all questions; one compares the selection with exact attention for a
few contexts; and one generates a sequence, alternating with all other caches, for times and bytes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from llmcache.arrays import Flags, Floats, Int64s
from llmcache.errors import UsageError
from llmcache.kv.bench.results import STOCK, Answers, Attention, TaskBench, TaskRow
from llmcache.kv.bench.synthetic import Progress, per_step, workplace
from llmcache.kv.pipeline import Timeline
from llmcache.kv.policies import POLICIES, policy_class
from llmcache.kv.tasks.english import Document, documents, texts
from llmcache.kv.tasks.recall import TASKS, Chain, Probe, chain, symbols

if TYPE_CHECKING:
    from llmcache.kv.bench.subject import Run, Subject

Result = TypeVar("Result")
Asked = Probe | Chain | Document

VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "oracle-layer": ("oracle", "Oracle, heads share", {"by": "layer"}),
    "oracle-product": ("oracle", "Oracle, largest product", {"by": "product"}),
    "icecache-dci": ("icecache", "IceCache, always the tree", {"scorer": "dci"}),
    "icecache-exact": ("icecache", "IceCache, always exact", {"scorer": "exact"}),
    "icecache-packed": ("icecache", "IceCache, two bits a number", {"scorer": "packed"}),
    "icecache-pages": ("icecache", "IceCache, whole pages", {"scorer": "dci", "whole_pages": True}),
    "icecache-reuse": ("icecache", "IceCache (reuse)", {"full_layers": 2, "anchor_every": 3}),
}
"""Policies with nondefault settings: policy, title, settings. Reuse: icecache.txt, appendix B. Oracle by the largest
product of a group of heads: the papers' rule; or by mass, with one budget for all heads of a layer.
"""
STOCK_TITLE = "DynamicCache"
WARM_UP = 3
AT_ONCE_TOKENS = 1 << 16  # tokens read in one batch, so that their keys and queries fit in memory
WATCHED = 4  # contexts whose questions are repeated to compare the selection with exact attention


@dataclass(frozen=True)
class TaskSetup:
    """The settings of a task. `cases`: number of contexts, for passkeys at each depth. `directory`: for spill files."""

    task: str
    model: Path
    contexts: Sequence[int]
    policies: Sequence[str]
    budgets: Sequence[int]
    directory: Path
    cases: int = 2
    steps: int = 16
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UsageError(f"--task: there is no task '{self.task}'", f"one of: {', '.join(TASKS)}")
        for policy in self.policies:
            if policy not in POLICIES and policy not in VARIANTS:
                raise UsageError(
                    f"--policy: there is no policy '{policy}'", f"one or more of: {','.join([*POLICIES, *VARIANTS])}"
                )


@dataclass(frozen=True)
class Candidate:
    """A cache to measure: a policy with a budget, or one that attends to everything; `policy` STOCK: transformers'."""

    policy: str
    budget: int | None

    @property
    def title(self) -> str:
        if self.policy == STOCK:
            return STOCK_TITLE
        return VARIANTS[self.policy][1] if self.policy in VARIANTS else policy_class(self.policy).title

    def cache(self, model: Any, threads: int | None, directory: Path | None, timeline: Timeline | None = None) -> Any:
        """Return a new cache, a context manager, with a spill file in `directory`, or all in memory for None.

        The oracle is always in memory, because it reads every key at every step.
        """
        from llmcache.kv.bench.subject import stock
        from llmcache.kv.transformers import SpillCache

        if self.policy == STOCK:
            return contextlib.nullcontext(stock(model))
        policy, _, options = VARIANTS.get(self.policy, (self.policy, "", {}))
        if timeline is not None:
            options = {**options, "timeline": timeline}
        if policy != "oracle" and directory is not None:
            pages = None if self.budget is None else policy_class(policy).least_pages(self.budget)
            options = {**options, "path": directory, "cpu_pages": pages}
        return SpillCache(model.config, policy, token_budget=self.budget, threads=threads, full_tokens=0, **options)


@dataclass
class CollectedAnswers:
    """Answers of one candidate, added part by part; `losses` and `divergences` as in a `TaskRow`."""

    right: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    depths: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)

    def add(self, right: Flags, full: Flags, depths: Sequence[float] | None) -> None:
        self.right += right.sum(1).tolist()
        self.asked += [right.shape[1]] * len(right)
        self.kept += (right & full).sum(1).tolist()
        self.depths += [] if depths is None else list(depths)

    def add_text(self, log_p: Floats, full: Floats, true: Int64s) -> None:
        """Add log p [n, vocabulary] of the tokens `true` [n] of a text; `full`: those of the full cache."""
        self.add(log_p.argmax(1)[None] == true, full.argmax(1)[None] == true, None)
        self.losses.append(-float(log_p[np.arange(len(true)), true].mean(dtype=np.float64)))
        self.divergences.append(float((np.exp(full) * (full - log_p)).sum(1, dtype=np.float64).mean()))

    def answers(self) -> Answers:
        return Answers(tuple(self.right), tuple(self.asked), tuple(self.depths) or None, tuple(self.kept))


def candidates(setup: TaskSetup) -> list[Candidate]:
    """Return transformers' cache, and each policy with each budget."""
    found = [Candidate(STOCK, None)]
    for policy in setup.policies:
        found += [Candidate(policy, budget) for budget in ([None] if policy == "full" else setup.budgets)]
    return found


def run(setup: TaskSetup, progress: Progress = lambda _: None) -> TaskBench:
    """Return a row for each cache at each context. MissingRequirement: torch or transformers are missing."""
    from llmcache.kv.transformers import check_versions

    check_versions()
    from llmcache.kv.bench.subject import Subject, torch_threads

    progress(f"loading {setup.model}")
    subject = Subject(setup.model)
    # Products of the recall model are so small that distributing them over threads takes longer than computing them.
    threads = 1 if setup.threads is None and subject.tokenizer is None else setup.threads
    texts: list[str] = []
    with torch_threads(threads), workplace(setup.directory) as directory:
        rows = [row for context in setup.contexts for row in _rows(setup, subject, context, directory, texts, progress)]
    conditions = {
        "model": str(setup.model), "contexts": list(setup.contexts), "budgets": list(setup.budgets), "cases": setup.cases,
        "steps": setup.steps, "seed": setup.seed, "spill files": str(setup.directory), **subject.describe(),
    }  # fmt: skip
    return TaskBench(setup.task, conditions | ({"texts": texts} if texts else {}), tuple(rows))


def _rows(
    setup: TaskSetup, subject: Subject, context: int, directory: Path, texts: list[str], progress: Progress
) -> list[TaskRow]:
    everyone = candidates(setup)
    answers = answered(setup, subject, context, directory, everyone, texts, progress)
    first = next(probes(setup, subject, context))
    attention = _attention(setup, subject, first, directory, everyone)
    progress(f"{context} tokens: generating")

    def row(one: Candidate, run: Run) -> TaskRow:
        speed, moved = run.speed(), run.moved()
        return TaskRow(
            one.policy, one.title, context, one.budget, answers[one].answers(), speed, run.memory(),
            per_step(moved, speed.steps), run.spilled_bytes, moved.hit_ratio, attention.get(one),
            losses=tuple(answers[one].losses) or None, divergences=tuple(answers[one].divergences) or None,
        )  # fmt: skip

    return in_turns(subject.model, everyone, directory, setup.steps, setup.threads, lambda run: run.read(first.ids[:1]), row)


def answered(
    setup: TaskSetup, subject: Subject, context: int, directory: Path | None, everyone: Sequence[Candidate],
    texts: list[str], progress: Progress = lambda _: None, least: float = 0.0,
) -> dict[Candidate, CollectedAnswers]:  # fmt: skip
    """Return the answers of every candidate, transformers' own cache first; append sources to `texts`.

    `least`: required share of right answers of transformers' own cache. When it is out of reach, only that cache continues
    and is returned.
    """
    from llmcache.kv.bench.subject import Prompt, said

    model = subject.model
    answers = {one: CollectedAnswers() for one in everyone}
    parts = list(probes(setup, subject, context))
    questions = sum(len(asked.ids) * len(asked.answers) for asked in parts if isinstance(asked, Probe))
    wrong, most_wrong = 0, (1 - least) * questions if least else math.inf
    for number, asked in enumerate(parts):
        read = Prompt(model, asked.ids)
        texts += [asked.source] if isinstance(asked, Document) else []
        full: Any = None
        for one in everyone:
            if full is not None and wrong > most_wrong:
                break
            progress(f"{context} tokens, part {number + 1}: {one.title} {one.budget or ''}")
            with one.cache(model, setup.threads, directory) as cache:
                read.give(cache)
                own = said(model, cache, asked)
            if full is None:
                full, wrong = own, wrong + int((~own).sum()) if isinstance(asked, Probe) else 0
            if isinstance(asked, Document):
                answers[one].add_text(own, full, asked.following[0, 1:])
            else:
                answers[one].add(own, full, asked.depths if isinstance(asked, Probe) else None)
    return answers if wrong <= most_wrong else {everyone[0]: answers[everyone[0]]}


def _attention(
    setup: TaskSetup, subject: Subject, asked: Asked, directory: Path, everyone: Sequence[Candidate]
) -> dict[Candidate, Attention]:
    from llmcache.kv.bench.subject import Prompt, said, watch

    # From the whole batch; all contexts of a chain are alike.
    few = asked if isinstance(asked, Document) else asked.part(slice(None, None, max(1, len(asked.ids) // WATCHED)))
    read = Prompt(subject.model, few.ids)
    found: dict[Candidate, Attention] = {}
    for one in everyone:
        if one.policy == STOCK:
            continue
        with one.cache(subject.model, setup.threads, directory) as cache:
            read.give(cache)
            watched = watch(cache)
            said(subject.model, cache, few)
        if watched.recalls:
            found[one] = Attention(float(np.mean(watched.recalls)), float(np.mean(watched.masses)))
    return found


def probes(setup: TaskSetup, subject: Subject, context: int) -> Iterator[Asked]:
    """Yield all questions at a context, in parts that fit in memory; the same every time."""
    random = np.random.default_rng([setup.seed, context])
    if subject.tokenizer is not None:
        own = context, setup.cases, subject.encode, subject.first
        yield from documents(random, *own) if setup.task == "loss" else texts(setup.task, random, *own)
        return
    at_once = max(1, AT_ONCE_TOKENS // context)
    if setup.task == "chain":
        for start in range(0, setup.cases, at_once):
            yield chain(random, min(at_once, setup.cases - start), context, steps=32)
        return
    whole = symbols(setup.task, random, context, setup.cases)
    for start in range(0, len(whole.ids), at_once):
        yield whole.part(slice(start, start + at_once))


def in_turns(
    model: Any, everyone: Sequence[Candidate], directory: Path, steps: int, threads: int | None,
    begin: Callable[[Run], None], result_of: Callable[[Candidate, Run], Result],
) -> list[Result]:  # fmt: skip
    """Return the results of `result_of`, for sequences that `begin` starts and that alternate step by step."""
    from llmcache.kv.bench.subject import Run

    with contextlib.ExitStack() as stack:
        runs: list[Run] = []
        for one in everyone:
            timeline = None if one.policy == STOCK else Timeline()
            runs.append(Run(model, stack.enter_context(one.cache(model, threads, directory, timeline)), timeline))
            begin(runs[-1])
        take_turns(runs, steps)
        return [result_of(one, run) for one, run in zip(everyone, runs, strict=True)]


def take_turns(runs: Sequence[Run], steps: int) -> None:
    """Generate `steps` tokens with every run after the warm-up, in a random order at each step."""
    for step in range(WARM_UP + steps):
        for place in np.random.default_rng(step).permutation(len(runs)):
            if step == WARM_UP:
                runs[place].begin()
            runs[place].step()
