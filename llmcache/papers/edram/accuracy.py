"""The effect of eviction and lost bits on a model's answers: the paper's experiments with other models.

Source: kelle.txt, sections 4.2, 7.1 and 7.2: table 3 (budgets), figure 8 (losses), table 4 (intervals). Model and task
differ from the paper's, so only directions can be compared. Table 4 is run in two readings, `iso-power` and `iso-failure`,
because its uniform intervals have the power of 2DRP while its text claims equal failure rates.

Answers are measured, losses modelled. All variants get the same questions and seeds, so differences are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from llmcache import __version__
from llmcache.arrays import Doubles, Flags
from llmcache.errors import UsageError
from llmcache.kv.tasks import RECALL_MODEL, Questions, recall
from llmcache.papers.edram.aerp import AerpSettings
from llmcache.papers.edram.constants import TABLE4_INTERVALS
from llmcache.papers.edram.decoder import Decoder
from llmcache.papers.edram.flips import CellSettings, FlipRates, Format, iso_failure, iso_power, one_sided, parse_flips
from llmcache.papers.edram.refresh import EdramRun, RunRecorder
from llmcache.papers.edram.retention import RetentionCurve, parse_curve
from llmcache.report import output
from llmcache.report.output import check_target, plain_table
from llmcache.units import format_duration


@dataclass(frozen=True)
class CacheVariant:
    """One cache to compare."""

    name: str
    settings: AerpSettings
    cells: CellSettings


@dataclass(frozen=True)
class VariantAnswers:
    """Whether answers [sequences, questions] are right, and their loss in nats.

    `stored_bytes` and `lost_bits` [sequences] are counted at the end.
    """

    right: Flags
    loss: Doubles
    stored_bytes: Doubles
    lost_bits: Doubles


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences, and its standard error (NaN for a single sequence)."""

    mean: float
    error: float

    @classmethod
    def of(cls, by_sequence: Doubles) -> Estimate:
        count = len(by_sequence)
        error = float(by_sequence.std(ddof=1) / np.sqrt(count)) if count > 1 else float("nan")
        return cls(float(by_sequence.mean()), error)


def accuracy(outcome: VariantAnswers) -> Estimate:
    return Estimate.of(outcome.right.mean(axis=1))


def harm(outcome: VariantAnswers, baseline: VariantAnswers) -> Estimate:
    """Return the increase of the loss over `baseline`, in nats, paired by sequence."""
    return Estimate.of((outcome.loss - baseline.loss).mean(axis=1))


def evaluate(
    decoder: Decoder, asked: Questions, variants: Sequence[CacheVariant], progress: Callable[[str], None] = lambda _: None
) -> dict[str, VariantAnswers]:
    """Return the answers of each variant. After each question, the model gets the right answer."""
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
        progress(f"{sequence + 1} of {len(asked.ids)} sequences")
    return found


def _loss(logits: Doubles, answer: int) -> float:
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
    """The common settings of all variants."""

    tokens: int
    format: Format
    curve: RetentionCurve

    @property
    def everything(self) -> AerpSettings:
        return AerpSettings(self.tokens, SINKS, WINDOW)

    def baseline(self) -> CacheVariant:
        return CacheVariant(BASELINE, self.everything, CellSettings(self.format))

    def losing(self, name: str, rates: FlipRates, how: Format | None = None, sticky: bool = True) -> CacheVariant:
        return CacheVariant(name, self.everything, CellSettings(how or self.format, rates, sticky=sticky))


def budgets(setup: AccuracySetup) -> list[CacheVariant]:
    """Return AEP at each budget N', and StreamingLLM with the same budgets (table 3)."""
    cells = CellSettings(setup.format)
    found = []
    for size in BUDGETS:
        found.append(CacheVariant(f"N'={size}", AerpSettings(size, SINKS, WINDOW), cells))
        found.append(CacheVariant(f"N'={size}, recent only", AerpSettings(size, SINKS, size), cells))
    return found


def uniform_losses(setup: AccuracySetup) -> list[CacheVariant]:
    formats: tuple[Format, ...] = ("int16", "fp16")
    return [setup.losing(f"{how} uniform {rate:g}", FlipRates.uniform(rate), how) for rate in RATES for how in formats]


def sided_losses(setup: AccuracySetup) -> list[CacheVariant]:
    """Return losses in one half of the bits (figure 8c), and in one group of tokens (figure 8b).

    A token that changes its group gets the losses of its current group.
    """
    sides = {side: one_sided(side, SIDED_RATE) for side in ("msb", "lsb", "hst", "lst")}
    return [setup.losing(f"{side} {SIDED_RATE:g}", rates, sticky=False) for side, rates in sides.items()]


def intervals(setup: AccuracySetup) -> list[CacheVariant]:
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
    return [setup.losing(text, parse_flips(text, setup.curve)) for text in flips]


@dataclass(frozen=True)
class VariantAccuracy:
    """Measured accuracy, loss relative to the baseline (nats, paired), and modelled rates."""

    experiment: str
    variant: str
    accuracy: Estimate
    harm: Estimate
    rates: FlipRates
    stored_bytes: float
    lost_bits: float


@dataclass(frozen=True)
class Accuracies:
    """The results of a run."""

    sequences: int
    questions: int
    tokens: int
    format: str
    baseline: Estimate
    rows: tuple[VariantAccuracy, ...]

    def to_json(self) -> dict[str, Any]:
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
    progress: Callable[[str], None] = lambda _: None,
) -> Accuracies:
    flat = [setup.baseline(), *(variant for group in variants.values() for variant in group)]
    found = evaluate(decoder, asked, flat, progress)
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
    """Record the rows in eDRAM while the questions of all sequences are answered at the same time.

    `step_ns`: duration of a step on the *modelled* accelerator; None: the reader of the run chooses it.
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


# Output of `llmcache edram accuracy`

_TITLES = {
    "budgets": "budgets (table 3)",
    "uniform": "losses in all bits (figure 8a)",
    "sided": "losses in some bits (figures 8b, 8c)",
    "intervals": "refresh intervals (table 4)",
    "flips": "given by --flips",
}


@dataclass(frozen=True)
class AccuracyOptions:
    """The options of `llmcache edram accuracy`."""

    model: str | None = None  # the recall model
    experiment: str | None = None
    flips: tuple[str, ...] = ()
    curve: str = "paper"
    format: Format = "int16"
    sequences: int = 8
    context: int = 1024
    pairs: int = 64
    questions: int = 32
    seed: int = 0
    record: str | None = None
    budget: int = 256
    step_ns: float | None = None
    force: bool = False


def answer(options: AccuracyOptions, progress: Callable[[str], None]) -> Accuracies:
    """Return the results, and write the recorded run if requested; UsageError names an invalid option."""
    if options.record is not None:
        check_target("--record", options.record, options.force)
    if options.context <= 2 * options.pairs:
        raise UsageError(
            f"--context: {options.context} tokens are too few for {options.pairs} pairs", "increase it, or reduce --pairs"
        )
    decoder = Decoder.load(RECALL_MODEL if options.model is None else options.model)
    setup = AccuracySetup(options.context + 2 * options.questions, options.format, parse_curve(options.curve))
    variants = _variants(options, setup)
    random = np.random.default_rng(options.seed)
    questions = recall(random, options.sequences, options.context, pairs=options.pairs, questions=options.questions)
    if options.record is not None:
        _record(options, options.record, decoder, questions)
    return run(decoder, questions, setup, variants, progress)


def _variants(options: AccuracyOptions, setup: AccuracySetup) -> dict[str, list[CacheVariant]]:
    names = list(EXPERIMENTS) if options.experiment is None and not options.flips else []
    if options.experiment is not None:
        names = [name.strip() for name in options.experiment.split(",")]
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        raise UsageError(f"--experiment: there is no experiment '{unknown[0]}'", f"one or more of: {','.join(EXPERIMENTS)}")
    found = {name: EXPERIMENTS[name](setup) for name in names}
    found |= {name: EXPERIMENTS[name](setup) for name in options.flips if name in EXPERIMENTS}
    rates = [text for text in options.flips if text not in EXPERIMENTS]
    return found | ({"flips": custom(setup, rates)} if rates else {})


def _record(options: AccuracyOptions, target: str, decoder: Decoder, questions: Questions) -> None:
    if options.budget <= SINKS:
        raise UsageError(f"--budget: must be more than the {SINKS} sinks, not {options.budget} tokens", "increase it")
    settings = AerpSettings(options.budget, SINKS, WINDOW)
    recorded = record_run(decoder, questions, settings, CellSettings(options.format), step_ns=options.step_ns)
    recorded.save(target, options.force)


def show(found: Accuracies, as_json: bool) -> None:
    output.show(as_json, lambda: {**found.to_json(), "llmcache_version": __version__}, _parts(found))


def _parts(found: Accuracies) -> Iterator[str | Table]:
    yield "Answers (measured) with caches that evict tokens and lose bits (modelled)"
    yield _table(found)
    yield f"without eviction and losses: {_share(found.baseline)} right"
    yield f"{found.sequences} texts of {found.questions} questions, up to {found.tokens} tokens; {found.format} unless named"
    yield "±: standard error over texts; rate: of lost bits, mean of the groups"


def _table(found: Accuracies) -> Table:
    table = plain_table("variant", "right", "harm, nats", "rate")
    before = None
    for row in found.rows:
        if row.experiment != before:
            table.add_row()
            table.add_row(_TITLES.get(row.experiment, row.experiment), style="bold")
        before = row.experiment
        rates = f"{row.rates.mean:.2g}" if row.rates.any else "0"
        table.add_row(f"  {row.variant}", _share(row.accuracy), _signed(row.harm), rates)
    return table


def _share(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:.1f} ± {100 * estimate.error:.1f} %"


def _signed(estimate: Estimate) -> str:
    return f"{estimate.mean:+.4f} ± {estimate.error:.4f}"
