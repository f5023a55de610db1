"""What eviction and lost bits do to a model's answers: the paper's experiments, on a model of one's own.

Source: kelle.txt, sections 4.2, 7.1 and 7.2: table 3 (budgets), figure 8 (losses), table 4 (intervals). Differs from the
paper: another model and another task, so only directions can be compared. Table 4 is asked twice, as its uniform intervals
have the power of 2DRP while its text speaks of equal failure rates: `iso-power` and `iso-failure` are different rates.

Answers are measured, on a real model; the losses are modelled. Every variant is asked the same, with the same seeds, and
the draws of a bit are the same in all (they are nested in the rate), so differences between variants are paired: their
standard error is over sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from llmcache.arrays import Doubles, Flags
from llmcache.edram.aerp import AerpSettings
from llmcache.edram.constants import TABLE4_INTERVALS
from llmcache.edram.decoder import Decoder
from llmcache.edram.flips import CellSettings, FlipRates, Format, iso_failure, iso_power, one_sided, parse_flips
from llmcache.edram.refresh import EdramRun, RunRecorder
from llmcache.edram.retention import RetentionCurve
from llmcache.kv.tasks import Questions
from llmcache.units import format_duration


@dataclass(frozen=True)
class CacheVariant:
    """One cache to compare: a name, what it keeps, and how its cells store and lose. Its seed is that of the sequence."""

    name: str
    settings: AerpSettings
    cells: CellSettings


@dataclass(frozen=True)
class VariantAnswers:
    """Answers over one variant, [sequences, questions]: which are right, and the loss of the right one in nats.

    `stored_bytes` [sequences]: what lay in eDRAM at the end; `lost_bits` [sequences]: bits of it that read wrongly.
    """

    right: Flags
    loss: Doubles
    stored_bytes: Doubles
    lost_bits: Doubles


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences and its standard error (nan for a single sequence)."""

    mean: float
    error: float

    @classmethod
    def of(cls, by_sequence: Doubles) -> Estimate:
        """Returns the estimate from one number per sequence."""
        count = len(by_sequence)
        error = float(by_sequence.std(ddof=1) / np.sqrt(count)) if count > 1 else float("nan")
        return cls(float(by_sequence.mean()), error)


def accuracy(outcome: VariantAnswers) -> Estimate:
    """Returns the share of right answers."""
    return Estimate.of(outcome.right.mean(axis=1))


def harm(outcome: VariantAnswers, baseline: VariantAnswers) -> Estimate:
    """Returns by how much the loss of the right answers is higher than over `baseline`, in nats, paired by sequence."""
    return Estimate.of((outcome.loss - baseline.loss).mean(axis=1))


def evaluate(
    decoder: Decoder, asked: Questions, variants: Sequence[CacheVariant], tell: Callable[[str], None] = lambda _: None
) -> dict[str, VariantAnswers]:
    """Returns the outcome of each of `variants` by name. Each prompt is computed once, for all of them.

    After each question the model is told the right answer. `tell` is called with a line for every sequence.
    """
    shape = asked.asked.shape
    found = {
        variant.name: VariantAnswers(np.zeros(shape, np.bool_), np.zeros(shape), np.zeros(shape[0]), np.zeros(shape[0]))
        for variant in variants
    }
    for sequence, ids in enumerate(asked.ids):
        prompt, _ = decoder.prompt(ids)
        pairs = list(zip(asked.asked[sequence].tolist(), asked.answers[sequence].tolist(), strict=True))
        for variant in variants:
            cache = decoder.cache(prompt, variant.settings, replace(variant.cells, seed=sequence))
            outcome = found[variant.name]
            for place, (question, answer) in enumerate(pairs):
                logits = decoder.step(question, cache).astype(np.float64)
                outcome.right[sequence, place] = logits.argmax() == answer
                outcome.loss[sequence, place] = _loss(logits, answer)
                decoder.step(answer, cache)
            outcome.stored_bytes[sequence] = sum(layer.stored_bytes for layer in cache)
            outcome.lost_bits[sequence] = sum(layer.lost_bits for layer in cache)
        tell(f"{sequence + 1} of {len(asked.ids)} sequences")
    return found


def _loss(logits: Doubles, answer: int) -> float:
    """Cross entropy in nats."""
    largest = logits.max()
    return float(np.log(np.exp(logits - largest).sum()) + largest - logits[answer])


SCHEMA = "llmcache.edram-accuracy/1"
BUDGETS = (512, 256, 128, 64)
RATES = (1e-4, 1e-3, 1e-2)
SIDED_RATE = 3e-2
BASELINE = "all tokens, no losses"
SINKS, WINDOW = 4, 32


@dataclass(frozen=True)
class AccuracySetup:
    """What all variants of a run share: the longest text, the format of vectors, the retention curve."""

    tokens: int
    format: Format
    curve: RetentionCurve

    @property
    def everything(self) -> AerpSettings:
        """A budget that evicts nothing."""
        return AerpSettings(self.tokens, SINKS, WINDOW)

    def baseline(self) -> CacheVariant:
        """Returns what everything else is compared with: nothing evicted, nothing lost."""
        return CacheVariant(BASELINE, self.everything, CellSettings(self.format))

    def losing(self, name: str, rates: FlipRates, how: Format | None = None, sticky: bool = True) -> CacheVariant:
        """Returns a cache that evicts nothing and loses bits at `rates`."""
        return CacheVariant(name, self.everything, CellSettings(how or self.format, rates, sticky=sticky))


def budgets(setup: AccuracySetup) -> list[CacheVariant]:
    """Returns AEP at each budget N', and beside it the same budget spent on sinks and the last tokens alone (table 3)."""
    cells = CellSettings(setup.format)
    found = []
    for size in BUDGETS:
        found.append(CacheVariant(f"N'={size}", AerpSettings(size, SINKS, WINDOW), cells))
        found.append(CacheVariant(f"N'={size}, recent only", AerpSettings(size, SINKS, size), cells))
    return found


def uniform_losses(setup: AccuracySetup) -> list[CacheVariant]:
    """Returns one rate for all bits, as integers and as halves (figure 8a)."""
    formats: tuple[Format, ...] = ("int16", "fp16")
    return [setup.losing(f"{how} uniform {rate:g}", FlipRates.uniform(rate), how) for rate in RATES for how in formats]


def sided_losses(setup: AccuracySetup) -> list[CacheVariant]:
    """Returns losses in one half of bits, and in one group of tokens (figures 8c and 8b).

    A token that changes its group reads what its group of the moment loses: what is asked is the harm of reading wrong
    values of such tokens, not what a refresh controller would leave behind.
    """
    sides = {side: one_sided(side, SIDED_RATE) for side in ("msb", "lsb", "hst", "lst")}
    return [setup.losing(f"{side} {SIDED_RATE:g}", rates, sticky=False) for side, rates in sides.items()]


def intervals(setup: AccuracySetup) -> list[CacheVariant]:
    """Returns the columns of table 4: 2DRP, the uniform interval of equal power, the uniform rate of equal failures."""
    found = []
    for printed, groups in TABLE4_INTERVALS.items():
        name = f"{printed // 1000} us"
        found += [
            setup.losing(f"{name}: 2DRP", FlipRates.of_intervals(groups, setup.curve)),
            setup.losing(f"{name}: uniform, iso-power", iso_power(groups, setup.curve)),
            setup.losing(f"{name}: uniform, iso-failure", iso_failure(groups, setup.curve)),
        ]
    return found


EXPERIMENTS: dict[str, Callable[[AccuracySetup], list[CacheVariant]]] = {
    "budgets": budgets,
    "uniform": uniform_losses,
    "sided": sided_losses,
    "intervals": intervals,
}
"""Experiments by name: table 3, figure 8a, figures 8b and 8c, table 4."""


def custom(setup: AccuracySetup, flips: Sequence[str]) -> list[CacheVariant]:
    """Returns a variant for each text of `flips` (see `parse_flips`)."""
    return [setup.losing(text, parse_flips(text, setup.curve)) for text in flips]


@dataclass(frozen=True)
class VariantAccuracy:
    """One variant of an experiment: measured accuracy, harm against the baseline (nats, paired), and its modelled rates."""

    experiment: str
    variant: str
    accuracy: Estimate
    harm: Estimate
    rates: FlipRates
    stored_bytes: float
    lost_bits: float


@dataclass(frozen=True)
class Accuracies:
    """What a run found. Accuracy is measured on this model and task; the losses of bits are modelled."""

    sequences: int
    questions: int
    tokens: int
    format: str
    baseline: Estimate
    rows: tuple[VariantAccuracy, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data of `SCHEMA`."""
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            row["harm_nats"] = row.pop("harm")
        named = {name: getattr(self, name) for name in ("sequences", "questions", "tokens", "format")}
        labels = {"accuracy": "measured", "losses": "modelled"}
        return {"schema": SCHEMA, **labels, **named, "baseline": vars(self.baseline), "rows": rows}


def run(
    decoder: Decoder,
    asked: Questions,
    setup: AccuracySetup,
    variants: dict[str, list[CacheVariant]],
    tell: Callable[[str], None] = lambda _: None,
) -> Accuracies:
    """Returns what the `variants` of each experiment and the baseline answer, all in one pass over the sequences."""
    flat = [setup.baseline(), *(variant for group in variants.values() for variant in group)]
    found = evaluate(decoder, asked, flat, tell)
    base = found[BASELINE]
    rows = []
    for experiment, variant in ((name, variant) for name, group in variants.items() for variant in group):
        outcome, rates = found[variant.name], variant.cells.rates
        means = float(outcome.stored_bytes.mean()), float(outcome.lost_bits.mean())
        rows.append(VariantAccuracy(experiment, variant.name, accuracy(outcome), harm(outcome, base), rates, *means))
    sequences, questions = asked.asked.shape
    return Accuracies(sequences, questions, setup.tokens, setup.format, accuracy(base), tuple(rows))


def record_run(
    decoder: Decoder, asked: Questions, settings: AerpSettings, cells: CellSettings, *, step_ns: float | None = None
) -> EdramRun:
    """Returns what lies in eDRAM while `asked` is answered, all sequences at a time, a step per token.

    Rows are recorded in the groups that they are read in, all vectors of 16 bits. `step_ns`: of a step on the *modelled*
    accelerator; None: whoever reads the run says.
    """
    prompts = [decoder.prompt(ids)[0] for ids in asked.ids]
    caches = [decoder.cache(prompt, settings, replace(cells, seed=place)) for place, prompt in enumerate(prompts)]
    recorder = RunRecorder(2 * decoder.shape.head_dim, decoder.shape.channels)
    tokens = np.stack([asked.asked, asked.answers], axis=2).reshape(len(caches), -1)
    for step in tokens.T:
        for sequence, (token, cache) in enumerate(zip(step.tolist(), caches, strict=True)):
            for number, layer in enumerate(cache):
                hst = layer.high_scores()
                recorder.observe((sequence, number), "kv", np.where(layer.in_kv, layer.slots.positions, -1), hst)
                recorder.observe((sequence, number), "x", layer.inputs.positions, layer.x_high_scores(hst))
            decoder.step(token, cache)
        recorder.end_step(step_ns)
    clock = "unknown" if step_ns is None else f"modelled: {format_duration(step_ns)} per step"
    title = f"AERP, {len(caches)} texts of {asked.ids.shape[1]} tokens"
    return recorder.finish(title, clock, {"policy": "aerp", **asdict(settings), "format": cells.format})
