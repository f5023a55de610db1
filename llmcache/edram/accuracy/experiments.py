"""The paper's experiments on accuracy, on a model of one's own: table 3 (budgets), figure 8 (losses), table 4 (intervals).

Source: kelle.txt, sections 4.2, 7.1 and 7.2. Differs from the paper: another model and another task, so only directions can
be compared. Table 4 is asked twice, as its uniform intervals have the power of 2DRP while its text speaks of equal failure
rates: `iso-power` and `iso-failure` are different rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmcache.edram.accuracy.decoder import Decoder
from llmcache.edram.accuracy.evaluation import Asked, Estimate, Outcome, Tell, Variant, accuracy, evaluate, harm
from llmcache.edram.aerp import AerpSettings
from llmcache.edram.constants import TABLE4_INTERVALS
from llmcache.edram.flips import CellSettings, FlipRates, iso_failure, iso_power, one_sided, parse_flips
from llmcache.edram.flips.formats import Format
from llmcache.edram.retention import RetentionCurve
from llmcache.errors import UsageError

SCHEMA = "llmcache.edram-accuracy/1"
RATES = (1e-4, 1e-3, 1e-2)
SIDED_RATE = 3e-2
BASELINE = "all tokens, no losses"
SINKS, WINDOW = 4, 32


@dataclass(frozen=True)
class Setup:
    """What all variants of a run share: the longest text, sinks and window, the format of vectors, the retention curve."""

    tokens: int
    sinks: int = SINKS
    window: int = WINDOW
    format: Format = "int16"
    curve: RetentionCurve | None = None

    @property
    def everything(self) -> AerpSettings:
        """A budget that evicts nothing."""
        return AerpSettings(self.tokens, self.sinks, self.window)

    def baseline(self) -> Variant:
        """Returns what everything else is compared with: nothing evicted, nothing lost."""
        return Variant(BASELINE, self.everything, CellSettings(self.format))

    def losing(self, name: str, rates: FlipRates, how: Format | None = None, sticky: bool = True) -> Variant:
        """Returns a cache that evicts nothing and loses bits at `rates`."""
        return Variant(name, self.everything, CellSettings(how or self.format, rates, sticky=sticky))


def budgets(setup: Setup, sizes: Sequence[int] = (512, 256, 128, 64)) -> list[Variant]:
    """Returns AEP at each budget N', and beside it the same budget spent on sinks and the last tokens alone (table 3)."""
    cells = CellSettings(setup.format)
    found = []
    for size in sizes:
        if size <= setup.sinks:
            raise UsageError(f"budgets: {size} tokens leave none beside {setup.sinks} sinks")
        found.append(Variant(f"N'={size}", AerpSettings(size, setup.sinks, setup.window), cells))
        found.append(Variant(f"N'={size}, recent only", AerpSettings(size, setup.sinks, size), cells))
    return found


def uniform_losses(setup: Setup, rates: Sequence[float] = RATES) -> list[Variant]:
    """Returns one rate for all bits, as integers and as halves (figure 8a)."""
    formats: tuple[Format, ...] = ("int16", "fp16")
    return [setup.losing(f"{how} uniform {rate:g}", FlipRates.uniform(rate), how) for rate in rates for how in formats]


def sided_losses(setup: Setup, rate: float = SIDED_RATE) -> list[Variant]:
    """Returns losses at `rate` in one half of bits, and in one group of tokens (figures 8c and 8b).

    A token that changes its group reads what its group of the moment loses: what is asked is the harm of reading wrong
    values of such tokens, not what a refresh controller would leave behind.
    """
    return [setup.losing(f"{side} {rate:g}", one_sided(side, rate), sticky=False) for side in ("msb", "lsb", "hst", "lst")]


def intervals(setup: Setup) -> list[Variant]:
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


EXPERIMENTS: dict[str, Callable[[Setup], list[Variant]]] = {
    "budgets": budgets,
    "uniform": uniform_losses,
    "sided": sided_losses,
    "intervals": intervals,
}
"""Experiments by name: table 3, figure 8a, figures 8b and 8c, table 4."""


def custom(setup: Setup, flips: Sequence[str]) -> list[Variant]:
    """Returns a variant for each text of `flips` (see `parse_flips`)."""
    return [setup.losing(text, parse_flips(text, setup.curve)) for text in flips]


@dataclass(frozen=True)
class Row:
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
    rows: tuple[Row, ...]

    def row(self, variant: str) -> Row:
        """Returns the row of a variant by name; KeyError if there is none."""
        return {row.variant: row for row in self.rows}[variant]

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data of `SCHEMA`."""
        rows = [{**vars(row), "accuracy": vars(row.accuracy), "harm_nats": vars(row.harm)} for row in self.rows]
        for row in rows:
            row["rates"] = vars(row["rates"])
            del row["harm"]
        named = {name: getattr(self, name) for name in ("sequences", "questions", "tokens", "format")}
        labels = {"accuracy": "measured", "losses": "modelled"}
        return {"schema": SCHEMA, **labels, **named, "baseline": vars(self.baseline), "rows": rows}


def run(
    decoder: Decoder, asked: Asked, setup: Setup, variants: dict[str, list[Variant]], tell: Tell | None = None
) -> Accuracies:
    """Returns what the `variants` of each experiment and the baseline answer, all in one pass over the sequences."""
    flat = [setup.baseline(), *(variant for group in variants.values() for variant in group)]
    found = evaluate(decoder, asked, flat, tell)
    base = found[BASELINE]
    rows = [_row(name, variant, found[variant.name], base) for name, group in variants.items() for variant in group]
    sequences, questions = asked.asked.shape
    return Accuracies(sequences, questions, setup.tokens, setup.format, accuracy(base), tuple(rows))


def _row(experiment: str, variant: Variant, outcome: Outcome, base: Outcome) -> Row:
    means = float(outcome.stored_bytes.mean()), float(outcome.lost_bits.mean())
    return Row(experiment, variant.name, accuracy(outcome), harm(outcome, base), variant.cells.rates, *means)
