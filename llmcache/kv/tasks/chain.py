"""A long generation in which every answer decides the next question, so that one wrong answer leads astray.

Source: icecache.txt, section 4.2 (long generation, chains of thought): what is generated is long, and depends on itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcache.errors import UsageError
from llmcache.kv.tasks.recall import FIRST_VALUE, VALUES, Ids, _contexts, _pairs


@dataclass(frozen=True)
class Chain:
    """Contexts `ids` [batch, tokens]; the first keys [batch]; the key that follows a value [batch, values]; all answers."""

    ids: Ids
    first: Ids
    following: Ids
    answers: Ids

    def next_keys(self, answers: Ids) -> Ids:
        """Returns the keys [batch] that `answers` [batch] lead to; what is no value leads back to the first key."""
        values = answers - FIRST_VALUE
        known = (values >= 0) & (values < VALUES)
        led = np.take_along_axis(self.following, np.where(known, values, 0)[:, None], 1)[:, 0]
        found: Ids = np.where(known, led, self.first)
        return found


def chain(rng: np.random.Generator, batch: int, tokens: int, *, steps: int, pairs: int = VALUES) -> Chain:
    """Returns contexts with `pairs`, all of different values: each names the next pair, in one ring of them all."""
    if not 2 <= pairs <= VALUES:
        raise UsageError(f"pairs: {pairs}, a chain has from 2 to {VALUES}, one for each value")
    keys, _ = _pairs(rng, batch, pairs)
    values = FIRST_VALUE + np.stack([rng.permutation(VALUES)[:pairs] for _ in range(batch)])
    ids = _contexts(rng, keys, values, tokens)
    ring = np.stack([rng.permutation(pairs) for _ in range(batch)])
    ringed_keys, ringed_values = np.take_along_axis(keys, ring, 1), np.take_along_axis(values, ring, 1)
    following = np.repeat(ringed_keys[:, :1], VALUES, 1)
    np.put_along_axis(following, ringed_values - FIRST_VALUE, np.roll(ringed_keys, -1, 1), 1)
    answers = np.take_along_axis(ringed_values, np.broadcast_to(np.arange(steps) % pairs, (batch, steps)), 1)
    return Chain(ids, ringed_keys[:, 0], following, answers)
