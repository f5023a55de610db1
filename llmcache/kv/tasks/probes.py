"""Probes: contexts with questions behind them whose answers are known, in the language of whatever model is asked.

A question is asked token by token, as a decode step each, so that the policy is asked for every token of question and
answer. Differs from icecache.txt, section 5.2, where the question ends the prompt, which is attended to exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmcache.errors import UsageError
from llmcache.kv.tasks.recall import Ids, Questions, passkey, recall

TASKS = {
    "passkey": "one passkey in noise, at every depth (figure 6)",
    "recall": "many pairs of key and value, half of which are asked for",
    "needle": "one of many pairs is asked for",
    "variables": "of variables that were assigned one from the other, all with a value are asked for (in English)",
    "common": "the word that a list names most often is asked for (in English)",
    "frequent": "the made-up word that a text has most often is asked for (in English)",
    "loss": "how a text goes on, from the documentation on this machine: loss above the full cache's",
    "chain": "a long generation, in which every answer decides the next question",
}
DEPTHS = tuple(round(0.05 * step, 2) for step in range(20))
"""Where passkeys lie, as shares of the context. Source: icecache.txt, section 5.2: from 0 % to 95 % by 5 %."""
BINS = 10
"""In how many classes needles are told apart by depth."""


@dataclass(frozen=True)
class Probe:
    """Contexts `ids` [batch, tokens]; each question with its answer, as tokens [batch, n]; depths [batch], or none."""

    ids: Ids
    asked: Sequence[Ids]
    answers: Sequence[Ids]
    depths: Sequence[float] | None = None

    def part(self, rows: slice) -> Probe:
        """Returns some of the contexts."""
        depths = None if self.depths is None else self.depths[rows]
        return Probe(self.ids[rows], [one[rows] for one in self.asked], [one[rows] for one in self.answers], depths)


@dataclass(frozen=True)
class Text:
    """A text `ids` [1, tokens], how it goes on, `following` [1, n], and where it is from, `source`."""

    ids: Ids
    following: Ids
    source: str


def symbols(task: str, rng: np.random.Generator, tokens: int, cases: int) -> Probe:
    """Returns a probe in the language of the recall model: `cases` contexts, passkeys: for each depth.

    UsageError: the task is unknown, or `tokens` are too few for it.
    """
    if task == "passkey":
        parts = [passkey(rng, cases, tokens, depth=depth) for depth in DEPTHS]
        joined = [np.concatenate([getattr(one, name) for one in parts]) for name in ("ids", "asked", "answers")]
        return probe_of(Questions(*joined), [depth for depth in DEPTHS for _ in range(cases)])
    if task == "recall":
        return probe_of(recall(rng, cases, tokens, questions=32))
    if task == "needle":
        found = recall(rng, cases, tokens, questions=1)
        places = (found.ids == found.asked[:, :1]).argmax(1)
        return probe_of(found, [int(BINS * place / tokens) / BINS for place in places])
    raise UsageError(f"--task: the recall model has no '{task}'", "give --model one that has a tokenizer")


def probe_of(found: Questions, depths: Sequence[float] | None = None) -> Probe:
    """Returns questions of one symbol as a probe."""
    columns = range(found.asked.shape[1])
    asked, answers = ([side[:, n : n + 1] for n in columns] for side in (found.asked, found.answers))
    return Probe(found.ids, asked, answers, depths)
