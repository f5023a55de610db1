"""Pairs of a key and a value, strewn into noise and asked for afterwards (associative recall, passkey, several keys).

The language has 641 tokens: a beginning, 512 keys, 64 values, 64 words of noise. The answer to a key is the value that
followed it in the context. Source: icecache.txt, section 4.1 asks the same of its models (passkey retrieval, LongBench).
Differs from the paper: symbols instead of English, so that a model of 460 000 parameters can learn it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcache.errors import UsageError

Ids = NDArray[np.int64]

KEYS, VALUES, NOISE = 512, 64, 64
BEGINNING = 0
FIRST_KEY, FIRST_VALUE = 1, 1 + KEYS
FIRST_NOISE = FIRST_VALUE + VALUES
VOCABULARY = FIRST_NOISE + NOISE
RECALL_MODEL = Path(__file__).with_name("models") / "recall"
"""Directory of a model that was trained to answer these; PROVENANCE.md in it says how."""


@dataclass(frozen=True)
class Questions:
    """Contexts `ids` [batch, tokens], the keys asked for one after the other [batch, n], and their values [batch, n]."""

    ids: Ids
    asked: Ids
    answers: Ids

    def with_answers(self) -> Ids:
        """Returns contexts, questions and answers as one text [batch, tokens + 2 n]."""
        tail = np.stack([self.asked, self.answers], 2).reshape(len(self.ids), -1)
        return np.concatenate([self.ids, tail], 1)


def recall(rng: np.random.Generator, batch: int, tokens: int, *, pairs: int = 64, questions: int = 32) -> Questions:
    """Returns contexts of `tokens` with `pairs` anywhere in them; `questions` ask for some, each once while they last."""
    keys, values = _pairs(rng, batch, pairs)
    ids = _contexts(rng, keys, values, tokens)
    order = np.stack([rng.choice(pairs, questions, replace=questions > pairs) for _ in range(batch)])
    return Questions(ids, np.take_along_axis(keys, order, 1), np.take_along_axis(values, order, 1))


def multikey(rng: np.random.Generator, batch: int, tokens: int, *, pairs: int = 16) -> Questions:
    """Returns contexts with `pairs` anywhere in them, all of which are asked for, in another order."""
    return recall(rng, batch, tokens, pairs=pairs, questions=pairs)


def passkey(rng: np.random.Generator, batch: int, tokens: int, *, depth: float, symbols: int = 1) -> Questions:
    """Returns contexts of noise and one passkey, `symbols` pairs side by side, after the share `depth` (0..1) of tokens.

    It counts as found only if every symbol of it is. UsageError if it does not fit.
    """
    if not 0 <= depth <= 1:
        raise UsageError(f"depth: {depth}, a share from 0 to 1 is needed")
    body = tokens - 1 - 2 * symbols
    if body < 0:
        raise UsageError(f"tokens: {tokens}, a passkey of {symbols} symbols needs {1 + 2 * symbols}")
    keys, values = _pairs(rng, batch, symbols)
    ids = rng.integers(FIRST_NOISE, VOCABULARY, (batch, tokens))
    ids[:, 0] = BEGINNING
    at = 1 + round(depth * body)
    ids[:, at : at + 2 * symbols] = np.stack([keys, values], 2).reshape(batch, -1)
    return Questions(ids, keys, values)


def _pairs(rng: np.random.Generator, batch: int, pairs: int) -> tuple[Ids, Ids]:
    """Keys, all different within a context, and values [batch, pairs]."""
    if not 1 <= pairs <= KEYS:
        raise UsageError(f"pairs: {pairs}, the language has {KEYS} keys")
    keys = np.stack([rng.choice(KEYS, pairs, replace=False) for _ in range(batch)])
    return FIRST_KEY + keys, FIRST_VALUE + rng.integers(0, VALUES, (batch, pairs))


def _contexts(rng: np.random.Generator, keys: Ids, values: Ids, tokens: int) -> Ids:
    """Texts of `tokens` with the pairs anywhere in the noise, in their order."""
    batch, pairs = keys.shape
    places = tokens - 1 - pairs  # a pair is two tokens, and takes one place
    if places < pairs:
        raise UsageError(f"tokens: {tokens}, {pairs} pairs need {1 + 2 * pairs}")
    ids = rng.integers(FIRST_NOISE, VOCABULARY, (batch, tokens))
    ids[:, 0] = BEGINNING
    for row in range(batch):
        at = 1 + np.sort(rng.choice(places, pairs, replace=False)) + np.arange(pairs)
        ids[row, at], ids[row, at + 1] = keys[row], values[row]
    return ids
