"""Which tokens each key-value head of a layer keeps: their slots, their scores, and who must go when a slot is needed.

Source: kelle.txt, section 4.1.1. All heads hold equally many tokens at any time, each its own. A slot is used again by the
token that pushes its token out: the order of slots does not matter to attention (equations 1 and 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.aerp.settings import AerpSettings

Ints = NDArray[np.int64]
Scores = NDArray[np.float64]
Flags = NDArray[np.bool_]
NONE = -1


@dataclass(frozen=True)
class Placed:
    """What one new token did: `slots` [heads] it lies in (-1: it was dropped itself), `evicted` positions (-1: none)."""

    slots: Ints
    evicted: Ints


class Slots:
    """Positions and scores of the cached tokens [kv_heads, budget]; the first `count` of each head are in use."""

    def __init__(self, settings: AerpSettings, kv_heads: int) -> None:
        self.settings = settings
        self.positions: Ints = np.full((kv_heads, settings.budget), NONE, np.int64)
        self.scores: Scores = np.zeros((kv_heads, settings.budget))
        self.count = 0
        self.newest = NONE

    def fill(self, sums: Scores) -> Ints:
        """Takes a prompt with the column sums [kv_heads, n] of its tokens; returns the positions kept [kv_heads, count].

        Sinks, the last tokens of the window, and of the rest those with the highest sums; of equal ones the newer.
        """
        if self.newest != NONE:
            raise ValueError("sums: the layer holds tokens already, a prompt comes first")
        tokens = sums.shape[1]
        rank = self._weighed(sums, np.arange(tokens), tokens - 1)
        rank[:, : self.settings.sinks] = np.inf
        rank[:, max(0, tokens - self.settings.recent) :] = np.inf
        self.newest, self.count = tokens - 1, min(tokens, self.settings.budget)
        newer_first = np.argsort(-rank[:, ::-1], axis=1, kind="stable")[:, : self.count]
        kept = np.sort(tokens - 1 - newer_first, axis=1)
        self.positions[:, : self.count] = kept
        self.scores[:, : self.count] = np.take_along_axis(sums, kept, axis=1)
        return kept

    def add(self, gains: Scores) -> Placed:
        """Takes the next token: `gains` [kv_heads, count + 1] are added to the scores, its own last.

        If all slots are in use, the token of the lowest score behind the sinks and before the window goes; of equal ones
        the oldest. There always is one: protected are at most `budget`, and one more is there.
        """
        heads = len(self.positions)
        # What is no number (halves with lost bits, kept) adds nothing: it must not decide who is protected.
        gains = np.where(np.isfinite(gains), gains, 0.0)
        self.newest += 1
        self.scores[:, : self.count] += gains[:, :-1]
        if self.count < self.settings.budget:
            slots, evicted = np.full(heads, self.count), np.full(heads, NONE)
            self.count += 1
        else:
            slots, evicted = self._victims(gains[:, -1])
        taken = np.nonzero(slots != NONE)[0]
        self.positions[taken, slots[taken]] = self.newest
        self.scores[taken, slots[taken]] = gains[taken, -1]
        return Placed(slots, evicted)

    def _victims(self, own: Scores) -> tuple[Ints, Ints]:
        scores = np.column_stack([self.scores, own])
        positions = np.column_stack([self.positions, np.full(len(own), self.newest)])
        scores = self._compared(self._weighed(scores, positions, self.newest))
        scores[_protected(positions, self.newest, self.settings)] = np.inf
        lowest = scores.min(axis=1, keepdims=True)
        oldest = np.where(scores == lowest, positions, np.iinfo(np.int64).max).argmin(axis=1)
        evicted = positions[np.arange(len(own)), oldest]
        slots: Ints = np.where(oldest == self.settings.budget, NONE, oldest)
        return slots, evicted

    def _weighed(self, scores: Scores, positions: Ints, newest: int) -> Scores:
        """Returns a copy of `scores` as tokens are ranked by them."""
        queries = newest + 1 - positions if self.settings.per_query else 1
        weighed: Scores = scores / queries
        return weighed

    def _compared(self, scores: Scores) -> Scores:
        """Returns `scores` in as many bits as they are compared in; below 0 (sums of products) is 0 then."""
        if not self.settings.score_bits:
            return scores
        largest = scores.max(axis=1, keepdims=True)
        steps = 2**self.settings.score_bits - 1
        whole: Scores = np.floor(steps * np.clip(scores / np.where(largest > 0, largest, 1.0), 0, 1))
        return whole

    def protected_at(self, newest: int) -> Flags:
        """Which slots hold a sink or a token of the window if `newest` is the last token [kv_heads, budget]."""
        return _protected(self.positions, newest, self.settings)

    @property
    def used(self) -> Flags:
        """Which slots hold a token [kv_heads, budget]."""
        used: Flags = self.positions != NONE
        return used


def _protected(positions: Ints, newest: int, settings: AerpSettings) -> Flags:
    inside = (positions > newest - settings.recent) | (positions < settings.sinks)
    kept: Flags = inside & (positions != NONE)
    return kept
