"""What a *synthetic* context is about: topics by segment, tokens that matter, and where the queries of a step look.

All of it depends on a token's or a step's number alone, so that any part can be made without the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SEGMENT_TOKENS = 128
"""Tokens that follow each other on one topic."""
DWELL_STEPS = 32
"""Decode steps that a query takes from one topic to the next."""
COMMON = 0.7
"""Exponent of how much more frequent the first topics are: some come back again and again."""
INFORMATIVE = 0.35
"""Share of a segment's tokens that say what it is about."""
HEAVY = 0.005
"""Share of the tokens that every query attends to, whatever it is about."""

_SEGMENT, _TOKEN, _STEP = 1, 2, 3  # separate the random numbers of each kind


class Topics:
    """The course of one *synthetic* sequence over `count` topics."""

    def __init__(self, seed: int, sequence: int, count: int) -> None:
        self._seed = (seed, sequence)
        weights = 1.0 / np.arange(1, count + 1) ** COMMON
        self._bounds = np.cumsum(weights / weights.sum())

    def _random(self, kind: int, number: int) -> np.random.Generator:
        return np.random.default_rng((*self._seed, kind, number))

    def _topic(self, kind: int, number: int) -> int:
        found = int(np.searchsorted(self._bounds, self._random(kind, number).random(), side="right"))
        return min(found, len(self._bounds) - 1)

    def of_segment(self, segment: int) -> int:
        """Returns the topic of the tokens of `segment` of the prompt."""
        return self._topic(_SEGMENT, segment)

    def strengths(self, segment: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns how much each token of `segment` says of its topic, and how much it draws every query (0 or 1)."""
        random = self._random(_TOKEN, segment)
        informative = random.random(SEGMENT_TOKENS) < INFORMATIVE
        strength = np.where(informative, 0.6 + 0.6 * random.random(SEGMENT_TOKENS), 0.1)
        heavy = random.random(SEGMENT_TOKENS) < HEAVY
        return strength.astype(np.float32), heavy.astype(np.float32)

    def of_step(self, step: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """Returns what the queries of a decode step are about: the topic they come from and the one they go to, weighted.

        The last `DWELL_STEPS` tokens of the prompt are steps below 0.
        """
        dwell, part = divmod(step + DWELL_STEPS, DWELL_STEPS)
        share = part / DWELL_STEPS
        to = share * share * (3 - 2 * share)
        return (self._topic(_STEP, dwell), 1 - to), (self._topic(_STEP, dwell + 1), to)
