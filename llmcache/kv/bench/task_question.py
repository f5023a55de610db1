"""From the options of `llmcache kv bench --task`, as typed, to a task; every error names its option."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmcache.errors import EnvironmentProblem, UsageError
from llmcache.kv.bench import task
from llmcache.kv.bench.question import Options, directory_of, parse_budgets
from llmcache.kv.bench.task import TaskSetup
from llmcache.kv.bench.task_results import TaskBench
from llmcache.kv.planning.plan import parse_context
from llmcache.kv.tasks import RECALL_MODEL

POLICIES = "mass,icecache,quest,h2o,window"
BUDGETS = "64,128,256"
CONTEXTS = "4k"
MODELS = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}
"""Models that `tools/test` fetches, by name; Gemma's use is subject to Google's Gemma Terms of Use."""


@dataclass(frozen=True)
class TaskOptions:
    """The options as typed: those of a task, and `others`, of which it takes some."""

    task: str
    cases: int
    others: Options


def setup_of(options: TaskOptions) -> TaskSetup:
    """Returns what is asked for. UsageError names the option that is wrong."""
    others = options.others
    for name in ("alpha", "beta", "ram", "layers"):
        if getattr(others, name) is not None:
            raise UsageError(f"--{name}: --task does not take it", "leave it out; --budget says what is attended to")
    if others.batch != 1:
        raise UsageError(
            f"--batch: {others.batch}, --task answers as many at a time as fit", "leave it out; --cases says how many"
        )
    if others.sweep_beta or others.without or others.throttle or others.profile != "measured":
        raise UsageError("--task: it runs a real model, on this machine", "leave out what only synthetic streams have")
    policies = [part.strip() for part in (others.policy or POLICIES).split(",") if part.strip()]
    if not policies or len(set(policies)) < len(policies):
        raise UsageError(f"--policy: '{others.policy}' names none, or one twice", f"for instance: --policy {POLICIES}")
    return TaskSetup(
        options.task,
        model_of(others.model),
        [parse_context(part.strip()) for part in (others.context or CONTEXTS).split(",")],
        policies,
        parse_budgets(others.budget or BUDGETS),
        directory_of(others.path),
        cases=options.cases,
        steps=others.steps,
        seed=others.seed,
        threads=others.threads,
    )


def model_of(name: str | None) -> Path:
    """Returns where the model called `name` is: one of `MODELS`, a path, or without a name the recall model."""
    if name is None:
        return RECALL_MODEL
    if name not in MODELS:
        return Path(name)
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmcache" / "models" / MODELS[name]
    if not path.exists():
        raise EnvironmentProblem(f"--model: {path} is not there", "tools/test fetches it, or give a model's path")
    return path


def run(options: TaskOptions, progress: Callable[[str], None]) -> TaskBench:
    """Returns the task that is asked for, after it has run."""
    return task.run(setup_of(options), progress)
