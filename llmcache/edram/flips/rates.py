"""With which probability a stored bit is lost, by refresh group: given directly, or by intervals and a retention curve."""

from __future__ import annotations

from dataclasses import dataclass

from llmcache.edram.constants import GROUPS, KELLE_INTERVALS, TABLE4_INTERVALS, Intervals
from llmcache.edram.retention import RetentionCurve, paper_curve, parse_intervals
from llmcache.errors import UsageError


@dataclass(frozen=True)
class FlipRates:
    """P(a stored bit is lost) of the four groups: high- and low-score tokens, bits 15 to 8 and 7 to 0."""

    hst_msb: float = 0.0
    hst_lsb: float = 0.0
    lst_msb: float = 0.0
    lst_lsb: float = 0.0

    def __post_init__(self) -> None:
        for name, rate in zip(GROUPS, self.in_order(), strict=True):
            if not 0 <= rate <= 1:
                raise ValueError(f"{name}: {rate}, 0 to 1 is needed")

    @classmethod
    def uniform(cls, rate: float) -> FlipRates:
        """Returns one rate for all groups (figure 8a)."""
        return cls(rate, rate, rate, rate)

    @classmethod
    def of_intervals(cls, intervals: Intervals, curve: RetentionCurve | None = None) -> FlipRates:
        """Returns what groups refreshed at `intervals` lose, by `curve` (None: the paper's)."""
        curve = curve or paper_curve()
        return cls(*map(curve.failure, intervals.in_order()))

    def in_order(self) -> tuple[float, float, float, float]:
        """Returns the rates in the order of `GROUPS`."""
        return self.hst_msb, self.hst_lsb, self.lst_msb, self.lst_lsb

    @property
    def mean(self) -> float:
        """Mean over the groups: what is lost if they are of one size."""
        return sum(self.in_order()) / len(GROUPS)

    @property
    def any(self) -> bool:
        """Whether anything can be lost."""
        return any(self.in_order())


NO_FLIPS = FlipRates()


def iso_power(intervals: Intervals, curve: RetentionCurve | None = None) -> FlipRates:
    """Returns the rates of the uniform interval that costs as many refreshes as `intervals`: their harmonic mean.

    Source: kelle.txt, table 4, whose uniform intervals are this mean. Differs from the paper: section 7.2 says they have
    "the same average failure rate"; by the curve here 2DRP then fails several times more bits. `iso_failure` has it.
    """
    return FlipRates.of_intervals(Intervals.uniform(intervals.mean_ns), curve)


def iso_failure(intervals: Intervals, curve: RetentionCurve | None = None) -> FlipRates:
    """Returns the uniform rate that loses as many bits in the mean of the groups as `intervals`: section 7.2, literally."""
    return FlipRates.uniform(FlipRates.of_intervals(intervals, curve).mean)


_HINT = (
    "write a rate by group: uniform=1e-3, msb=1e-2, lsb=1e-2, hst=1e-2 or lst=1e-2; intervals: 2drp, 2drp=540us, "
    "interval=1050us or interval=360us,5.4ms,1.44ms,7.2ms; or none"
)
_ONE_SIDED = {
    "uniform": GROUPS,
    "msb": ("hst_msb", "lst_msb"),
    "lsb": ("hst_lsb", "lst_lsb"),
    "hst": ("hst_msb", "hst_lsb"),
    "lst": ("lst_msb", "lst_lsb"),
}


def one_sided(side: str, rate: float) -> FlipRates:
    """Returns `rate` for the groups of one `side` ("uniform", "msb", "lsb", "hst", "lst"), 0 for the others (figure 8)."""
    return FlipRates(**dict.fromkeys(_ONE_SIDED[side], rate))


def parse_flips(text: str, curve: RetentionCurve | None = None) -> FlipRates:
    """Returns the rates meant by `text`; UsageError names what cannot be understood.

    "none"; "uniform=1e-3", likewise msb, lsb, hst, lst; "2drp" (section 7.1), "2drp=540us" (a column of table 4);
    "interval=1050us" or the four intervals in the order of `GROUPS`.
    """
    kind, _, value = text.strip().partition("=")
    if kind == "none" and not value:
        return NO_FLIPS
    if kind in _ONE_SIDED:
        return one_sided(kind, _rate(value, text))
    if kind == "interval" and value:
        return FlipRates.of_intervals(_intervals(value, text), curve)
    if kind == "2drp":
        return FlipRates.of_intervals(_column(value, text) if value else KELLE_INTERVALS, curve)
    raise UsageError(f"flips: '{text}' is not understood", _HINT)


def _rate(value: str, text: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = -1
    if not 0 <= rate <= 1:
        raise UsageError(f"flips: '{text}' gives no rate from 0 to 1", _HINT)
    return rate


def _intervals(value: str, text: str) -> Intervals:
    try:
        return parse_intervals(value)
    except UsageError as error:
        raise UsageError(f"flips: '{text}': {error.message}", _HINT) from error


def _column(value: str, text: str) -> Intervals:
    wanted = _intervals(value, text).mean_ns
    for printed, intervals in TABLE4_INTERVALS.items():
        if abs(wanted - printed) < 1:
            return intervals
    known = ", ".join(f"{printed // 1000}us" for printed in TABLE4_INTERVALS)
    raise UsageError(f"flips: table 4 has no column '{value}'", f"its columns are {known}")
