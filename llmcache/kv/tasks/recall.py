"""Questions about a long context with known answers, in a language of symbols for the recall model.

The language has 641 tokens: a beginning, 512 keys, 64 values, 64 words of noise. Pairs of a key and a value are
scattered in noise; the answer to a key is the value that followed it. In a chain every answer determines the next
question, so that one wrong answer leads astray. Source: icecache.txt, sections 4.1 (passkey retrieval, LongBench) and
4.2 (long generation, chains of thought).

Questions and answers are decoded token by token, so that the policy selects tokens at every step. Differs from
icecache.txt, section 5.2, where the question ends the prompt, which has exact attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmcache.arrays import Int64s
from llmcache.errors import UsageError

KEYS, VALUES, NOISE = 512, 64, 64
BEGINNING = 0
FIRST_KEY, FIRST_VALUE = 1, 1 + KEYS
FIRST_NOISE = FIRST_VALUE + VALUES
VOCABULARY = FIRST_NOISE + NOISE
RECALL_MODEL = Path(__file__).with_name("models") / "recall"
"""Directory of a model trained for these questions; see PROVENANCE.md in it."""
TASKS = ("passkey", "recall", "needle", "variables", "common", "frequent", "loss", "chain")
"""Variables, common and frequent words, and the loss on texts of this machine, need a model that knows English."""
DEPTHS = tuple(round(0.05 * step, 2) for step in range(20))
"""Depths of passkeys, as shares of the context. Source: icecache.txt, section 5.2: from 0 % to 95 % in steps of 5 %."""
BINS = 10  # number of classes of needles by depth


@dataclass(frozen=True)
class Questions:
    """Contexts `ids` [batch, tokens], the keys `asked` in order [batch, n], and their values [batch, n]."""

    ids: Int64s
    asked: Int64s
    answers: Int64s

    def with_answers(self) -> Int64s:
        tail = np.stack([self.asked, self.answers], 2).reshape(len(self.ids), -1)
        return np.concatenate([self.ids, tail], 1)


def recall(rng: np.random.Generator, batch: int, tokens: int, *, pairs: int = 64, questions: int = 32) -> Questions:
    """Return contexts of `tokens` with `pairs` at random positions, and `questions` about random pairs."""
    keys, values = _pairs(rng, batch, pairs)
    ids = _contexts(rng, keys, values, tokens)
    order = np.stack([rng.choice(pairs, questions, replace=questions > pairs) for _ in range(batch)])
    return Questions(ids, np.take_along_axis(keys, order, 1), np.take_along_axis(values, order, 1))


def passkey(rng: np.random.Generator, batch: int, tokens: int, *, depth: float) -> Questions:
    """Return contexts of noise and one pair, after the share `depth` (0..1) of tokens. UsageError if it does not fit."""
    if tokens < 3:
        raise UsageError(f"tokens: must be at least 3 for a passkey, not {tokens}")
    keys, values = _pairs(rng, batch, 1)
    ids = rng.integers(FIRST_NOISE, VOCABULARY, (batch, tokens))
    ids[:, 0] = BEGINNING
    at = 1 + round(depth * (tokens - 3))
    ids[:, at : at + 2] = np.concatenate([keys, values], 1)
    return Questions(ids, keys, values)


def _pairs(rng: np.random.Generator, batch: int, pairs: int) -> tuple[Int64s, Int64s]:
    """Return keys, unique within a context, and values [batch, pairs]."""
    keys = np.stack([rng.choice(KEYS, pairs, replace=False) for _ in range(batch)])
    return FIRST_KEY + keys, FIRST_VALUE + rng.integers(0, VALUES, (batch, pairs))


def _contexts(rng: np.random.Generator, keys: Int64s, values: Int64s, tokens: int) -> Int64s:
    batch, pairs = keys.shape
    places = tokens - 1 - pairs  # a pair has two tokens, but takes one place
    if places < pairs:
        raise UsageError(f"tokens: must be at least {1 + 2 * pairs} for {pairs} pairs, not {tokens}")
    ids = rng.integers(FIRST_NOISE, VOCABULARY, (batch, tokens))
    ids[:, 0] = BEGINNING
    for row in range(batch):
        at = 1 + np.sort(rng.choice(places, pairs, replace=False)) + np.arange(pairs)
        ids[row, at], ids[row, at + 1] = keys[row], values[row]
    return ids


@dataclass(frozen=True)
class Chain:
    """Contexts `ids` [batch, tokens]; first keys [batch]; the key after each value [batch, values]; all answers."""

    ids: Int64s
    first: Int64s
    following: Int64s
    answers: Int64s

    def part(self, rows: slice) -> Chain:
        return Chain(self.ids[rows], self.first[rows], self.following[rows], self.answers[rows])

    def next_keys(self, answers: Int64s) -> Int64s:
        """Return the keys [batch] that follow `answers` [batch]; the first key follows anything but a value."""
        values = answers - FIRST_VALUE
        known = (values >= 0) & (values < VALUES)
        following_keys = np.take_along_axis(self.following, np.where(known, values, 0)[:, None], 1)[:, 0]
        found: Int64s = np.where(known, following_keys, self.first)
        return found


def chain(rng: np.random.Generator, batch: int, tokens: int, *, steps: int) -> Chain:
    """Return contexts with a pair for each value; each pair leads to the next, in one ring of all."""
    pairs = VALUES
    keys, _ = _pairs(rng, batch, pairs)
    values = FIRST_VALUE + np.stack([rng.permutation(VALUES) for _ in range(batch)])
    ids = _contexts(rng, keys, values, tokens)
    ring = np.stack([rng.permutation(pairs) for _ in range(batch)])
    ringed_keys, ringed_values = np.take_along_axis(keys, ring, 1), np.take_along_axis(values, ring, 1)
    following = np.repeat(ringed_keys[:, :1], VALUES, 1)
    np.put_along_axis(following, ringed_values - FIRST_VALUE, np.roll(ringed_keys, -1, 1), 1)
    answers = np.take_along_axis(ringed_values, np.broadcast_to(np.arange(steps) % pairs, (batch, steps)), 1)
    return Chain(ids, ringed_keys[:, 0], following, answers)


# Probes


@dataclass(frozen=True)
class Probe:
    """Contexts `ids` [batch, tokens]; each question with its answer, as tokens [batch, n]; depths [batch], or None."""

    ids: Int64s
    asked: Sequence[Int64s]
    answers: Sequence[Int64s]
    depths: Sequence[float] | None = None

    def part(self, rows: slice) -> Probe:
        depths = None if self.depths is None else self.depths[rows]
        return Probe(self.ids[rows], [one[rows] for one in self.asked], [one[rows] for one in self.answers], depths)


def symbols(task: str, rng: np.random.Generator, tokens: int, cases: int) -> Probe:
    """Return a probe in the language of the recall model with `cases` contexts; for passkeys, `cases` per depth."""
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
    raise UsageError(f"--task: the recall model has no '{task}'", "name a model with a tokenizer with --model")


def probe_of(found: Questions, depths: Sequence[float] | None = None) -> Probe:
    """Return a probe with questions of one symbol each."""
    columns = range(found.asked.shape[1])
    asked, answers = ([side[:, n : n + 1] for n in columns] for side in (found.asked, found.answers))
    return Probe(found.ids, asked, answers, depths)
