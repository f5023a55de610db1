"""What of icecache can be *measured here*: the recall model's answers, and times of a model with random weights.

Whatever cannot be measured (no torch, no room on the disk) is missing with its reason, on the page and in the JSON.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from llmcache.errors import LlmcacheError
from llmcache.kv.bench import lengths, task
from llmcache.kv.bench.lengths import LengthRow
from llmcache.kv.bench.task import Candidate, TaskSetup
from llmcache.kv.bench.task_results import STOCK, TaskBench
from llmcache.kv.tasks import RECALL_MODEL
from llmcache.report.reproduce import Progress
from llmcache.report.reproduce.icecache.paper import BUDGETS

ICE, TREE, PAGES, REUSE = "icecache", "icecache-dci", "icecache-pages", "icecache-reuse"
OURS = {ICE: "IceCache here (auto)", TREE: "always the tree", PAGES: "whole pages of the tree"}
"""Variants whose answers are judged: `auto` scores exactly at these lengths; the paper's own is the last."""
RIVALS = ("quest", "h2o", "window")
TENTH = 0.1
"""Budget of table 3, as a share of the context."""
THREADS = 2

_T = TypeVar("_T")


@dataclass(frozen=True)
class Measured:
    """What was measured; None where `missing` (by name of the field) says why not."""

    passkey: TaskBench | None = None
    recall: TaskBench | None = None
    chain: TaskBench | None = None
    needle: TaskBench | None = None
    lengths: Sequence[LengthRow] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> dict[str, TaskBench]:
        """The tasks that were run, by name."""
        found = {"passkey": self.passkey, "recall": self.recall, "chain": self.chain, "needle": self.needle}
        return {name: bench for name, bench in found.items() if bench is not None}


def measure(quick: bool, progress: Progress) -> Measured:
    """Returns everything that can be measured here; `quick`: smaller."""
    missing: dict[str, str] = {}

    def tried(name: str, run: Callable[[], _T]) -> _T | None:
        progress(f"{name}: beginning")
        try:
            return run()
        except LlmcacheError as error:
            missing[name] = f"{error.message}" + (f" ({error.hint})" if error.hint else "")
            return None

    context, tries = (1024, 2) if quick else (4096, 4)
    contexts = (1024,) if quick else (1024, 4096)
    tenth = (round(TENTH * context),)
    everyone = (*OURS, *RIVALS)
    return Measured(
        passkey=tried("passkey", lambda: _task("passkey", contexts, tuple(OURS), BUDGETS, 1, progress)),
        recall=tried("recall", lambda: _task("recall", (context,), everyone, BUDGETS, tries, progress)),
        chain=tried("chain", lambda: _task("chain", (context,), everyone, tenth, tries, progress)),
        needle=tried("needle", lambda: _task("needle", contexts, tuple(OURS), BUDGETS[-1:], 8 * tries, progress)),
        lengths=tried("lengths", lambda: _lengths(quick, progress)),
        missing=missing,
    )


def _task(
    name: str, contexts: Sequence[int], policies: Sequence[str], budgets: Sequence[int], cases: int, progress: Progress
) -> TaskBench:
    directory = Path(tempfile.gettempdir())
    setup = TaskSetup(name, RECALL_MODEL, contexts, policies, budgets, directory, cases=cases, steps=4, threads=1)
    return task.run(setup, progress)


def _lengths(quick: bool, progress: Progress) -> list[LengthRow]:
    """Figures 1, 7b, 7c and 8 in small; the largest length is the paper's 36 k."""
    everyone = [Candidate(STOCK, None), *(Candidate(name, BUDGETS[-1]) for name in (ICE, REUSE, "quest", "h2o", "window"))]
    at, steps = ((1024, 2048), 4) if quick else ((4096, 9216, 18432, 36864), 12)
    directory = Path(tempfile.gettempdir())
    return lengths.measure(lengths.SMALL, at, everyone, directory, steps, THREADS, progress)
