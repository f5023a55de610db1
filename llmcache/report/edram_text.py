"""Numbers of the accelerator model in words: joules, watts, factors, and what every table says of itself."""

from __future__ import annotations

from llmcache.edram.systems import Workload

MODELLED = "modelled"
WIDTH = 400
"""Of a console: tables are as wide as they are, whatever the terminal."""
_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"), (1e-12, "p"))


def joules(value: float) -> str:
    """Returns `value` (J) with three digits: "1.14 mJ", "65.2 kJ"."""
    return _with_prefix(value, "J")


def watts(value: float) -> str:
    """Returns `value` (W) with three digits: "25.3 W"."""
    return _with_prefix(value, "W")


def _with_prefix(value: float, unit: str) -> str:
    if not value:
        return f"0 {unit}"
    for factor, prefix in _PREFIXES:
        # 999.6 would be written as 1.0e+03: it belongs to the next prefix.
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:#.3g} {prefix}{unit}".replace(". ", " ")
    return f"{value:.2e} {unit}"


def percent(share: float) -> str:
    """Returns a share (0..1) with three digits: "49.2%", "0.0398%"."""
    return f"{100 * share:.3g}%"


def times(value: float) -> str:
    """Returns a factor: "2.08×"."""
    return f"{value:.2f}×"


def workload_text(workload: Workload) -> str:
    """Returns what `workload` asks, in one line."""
    return (
        f"{workload.name}: context {workload.context:,}, decode {workload.decode:,} tokens, batch {workload.batch}, "
        f"budget N' {workload.budget:,}"
    )
