"""How well a model answers over caches that evict and lose bits: every variant is asked the same, with the same seeds.

Answers are measured, on a real model; the losses are modelled. The draws of a bit are the same in all variants (they are
nested in the rate), so differences between variants are paired: their standard error is over sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmcache.edram.accuracy.decoder import Decoder, Prompt
from llmcache.edram.aerp import AerpSettings
from llmcache.edram.flips import CellSettings

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Numbers = NDArray[np.float64]
Tell = Callable[[str], None]


class Asked(Protocol):
    """Contexts `ids` [sequences, tokens], what is asked one after the other [sequences, n], the right answers."""

    @property
    def ids(self) -> Ids:
        """Contexts."""
        ...

    @property
    def asked(self) -> Ids:
        """Questions, a token each."""
        ...

    @property
    def answers(self) -> Ids:
        """Answers, a token each."""
        ...


@dataclass(frozen=True)
class Variant:
    """One cache to compare: a name, what it keeps, and how its cells store and lose. Its seed is that of the sequence."""

    name: str
    settings: AerpSettings
    cells: CellSettings


@dataclass(frozen=True)
class Outcome:
    """Answers over one variant, [sequences, questions]: which are right, and the loss of the right one in nats.

    `stored_bytes` [sequences]: what lay in eDRAM at the end; `lost_bits` [sequences]: bits of it that read wrongly.
    """

    right: NDArray[np.bool_]
    loss: Numbers
    stored_bytes: Numbers
    lost_bits: Numbers


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences and its standard error (nan for a single sequence)."""

    mean: float
    error: float

    @classmethod
    def of(cls, by_sequence: Numbers) -> Estimate:
        """Returns the estimate from one number per sequence."""
        count = len(by_sequence)
        error = float(by_sequence.std(ddof=1) / np.sqrt(count)) if count > 1 else float("nan")
        return cls(float(by_sequence.mean()), error)


def accuracy(outcome: Outcome) -> Estimate:
    """Returns the share of right answers."""
    return Estimate.of(outcome.right.mean(axis=1))


def harm(outcome: Outcome, baseline: Outcome) -> Estimate:
    """Returns by how much the loss of the right answers is higher than over `baseline`, in nats, paired by sequence."""
    return Estimate.of((outcome.loss - baseline.loss).mean(axis=1))


def evaluate(decoder: Decoder, asked: Asked, variants: Sequence[Variant], tell: Tell | None = None) -> dict[str, Outcome]:
    """Returns the outcome of each of `variants` by name. Each prompt is computed once, for all of them.

    After each question the model is told the right answer. `tell` is called with a line for every sequence.
    """
    rows: dict[str, list[tuple[list[bool], list[float], int, int]]] = {variant.name: [] for variant in variants}
    for sequence, ids in enumerate(asked.ids):
        prompt, _ = decoder.prompt(ids)
        for variant in variants:
            own = replace(variant, cells=replace(variant.cells, seed=sequence))
            rows[variant.name].append(_answers(decoder, prompt, own, asked.asked[sequence], asked.answers[sequence]))
        if tell is not None:
            tell(f"{sequence + 1} of {len(asked.ids)} sequences")
    return {name: _outcome(found) for name, found in rows.items()}


def _answers(
    decoder: Decoder, prompt: Prompt, variant: Variant, asked: Iterable[int], answers: Iterable[int]
) -> tuple[list[bool], list[float], int, int]:
    cache = decoder.cache(prompt, variant.settings, variant.cells)
    right, loss = [], []
    for question, answer in zip(asked, answers, strict=True):
        logits = decoder.step(int(question), cache).astype(np.float64)
        right.append(int(logits.argmax()) == int(answer))
        loss.append(_loss(logits, int(answer)))
        decoder.step(int(answer), cache)
    return right, loss, sum(layer.stored_bytes for layer in cache), sum(layer.lost_bits for layer in cache)


def _loss(logits: Numbers, answer: int) -> float:
    """Cross entropy in nats; logits that are no number (halves with lost bits, kept) count as a uniform guess."""
    if not np.isfinite(logits).all():
        return float(np.log(len(logits)))
    largest = logits.max()
    return float(np.log(np.exp(logits - largest).sum()) + largest - logits[answer])


def _outcome(rows: list[tuple[list[bool], list[float], int, int]]) -> Outcome:
    right, loss, stored, lost = zip(*rows, strict=True)
    return Outcome(np.array(right), np.array(loss), np.array(stored, np.float64), np.array(lost, np.float64))
