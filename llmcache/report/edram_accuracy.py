"""Output of `llmcache edram accuracy`, as a table and as JSON: measured answers, modelled losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from llmcache import __version__
from llmcache.errors import UsageError
from llmcache.kv.tasks import RECALL_MODEL, Questions, recall
from llmcache.papers.edram.accuracy import (
    EXPERIMENTS,
    SINKS,
    WINDOW,
    Accuracies,
    AccuracySetup,
    CacheVariant,
    Estimate,
    custom,
    record_run,
    run,
)
from llmcache.papers.edram.aerp import AerpSettings
from llmcache.papers.edram.decoder import Decoder
from llmcache.papers.edram.flips import CellSettings, Format
from llmcache.papers.edram.retention import parse_curve
from llmcache.report import output
from llmcache.report.output import check_target, plain_table

_TITLES = {
    "budgets": "budgets (table 3)",
    "uniform": "losses in all bits (figure 8a)",
    "sided": "losses in some bits (figures 8b, 8c)",
    "intervals": "refresh intervals (table 4)",
    "flips": "given by --flips",
}


@dataclass(frozen=True)
class AccuracyOptions:
    """The options of `llmcache edram accuracy`; None if not given. `step_ns`: duration of a step of the recorded run."""

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


def answer(options: AccuracyOptions, tell: Callable[[str], None]) -> Accuracies:
    """Return the results for `options`, and write the recorded run if requested; UsageError names an invalid option."""
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
    return run(decoder, questions, setup, variants, tell)


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
    """Print `found`, as a table or as JSON."""
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
