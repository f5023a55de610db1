"""`llmcache edram plot`: figures of a saved model or sweep, as a page, or one of them as PNG or SVG.

Functions that return a Figure must be called in `theme.style()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from llmcache.documents import check_schema, from_json, invalid, read_json
from llmcache.errors import UsageError
from llmcache.papers.edram.accelerator import Roofline
from llmcache.papers.edram.energy import KINDS
from llmcache.papers.edram.tables import SCHEMA as MODEL_SCHEMA
from llmcache.papers.edram.tables import SWEEP_SCHEMA, percent
from llmcache.report.html import Section, html_page
from llmcache.report.output import Written, form_of, write_target
from llmcache.report.theme import INK, MUTED, PAPER, Look, embedded, figure_bytes, grid_of, legend_below, logarithmic, style

HINT = "create one with: llmcache edram model --json > FILE"
NAMES = ("model", "workload", "system", "profile")


@dataclass(frozen=True)
class SavedResult:
    """One result; `mean_interval_ns`: None without eDRAM. `energies_j` by component, empty in a sweep."""

    model: str
    workload: str
    system: str
    profile: str
    context: float
    decode: float
    batch: float
    budget: float
    dram_bytes_per_s: float
    kv_capacity_bytes: float
    energy_j: float
    speedup: float
    efficiency: float
    refresh_share: float
    mean_interval_ns: float | None
    energies_j: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """Results, and rooflines by system."""

    schema: str
    results: tuple[SavedResult, ...]
    baseline: str
    rooflines: Mapping[str, Roofline] = field(default_factory=dict)

    @property
    def is_sweep(self) -> bool:
        return self.schema == SWEEP_SCHEMA


def saved(document: Any, source: str = "") -> Saved:
    """Validate `document`; DataError names `source` and the field."""
    with invalid(source, HINT):
        check_schema(document, MODEL_SCHEMA, SWEEP_SCHEMA)
        found: Saved = from_json(Saved, document)
        if not found.results:
            raise ValueError("results: the document has none")
        for system, roof in found.rooflines.items():
            rates = {name: getattr(roof, name) for name in ("peak_ops_per_s", "dram_bytes_per_s")}
            rates |= {f"points.{point.name}": min(point.intensity, point.ops_per_s) for point in roof.points}
            for name, value in rates.items():
                if not 0 < value < 1e100:
                    raise ValueError(f"rooflines.{system}.{name}: must be more than 0, not {value:g}")
    return found


KIND_LOOKS: dict[str, tuple[str, str]] = {  # color and hatch: neighbors in a stack differ in both gray value and pattern
    "DRAM, weights": ("#084c8d", ""),
    "DRAM, KV": ("#56b4e9", ""),
    "DRAM, other": ("#b4bac2", "//"),
    "weight memory": ("#117733", ""),
    "KV memory": ("#9ad1a5", ""),
    "activation memory": ("#dfe8b0", ""),
    "leakage": ("#8b9099", ""),
    "refresh": ("#d55e00", "xx"),
    "array": ("#8e44a0", ""),
    "SFU": ("#cc79a7", ""),
    "evictor": (INK, ""),
}
SYSTEM_LOOKS: dict[str, Look] = {
    "Original+SRAM": Look("#5c636d", "-", "s"),
    "Original+eDRAM": Look("#d55e00", (0, (5, 1.5)), "^"),
    "AEP+SRAM": Look("#e69f00", (0, (3, 1, 1, 1)), "D"),
    "AERP+SRAM": Look("#009e73", (0, (4, 1)), "v"),
    "Kelle+eDRAM": Look("#0072b2", "-", "o", 2.4, 5),
}
OTHER_LOOKS = (Look("#332288", (0, (6, 2)), "P"), Look("#882255", (0, (2, 1)), "X"), Look("#8c6d1f", (0, (8, 2)), "d"))
AXES = {
    "context": "context (tokens)",
    "decode": "decoded tokens",
    "batch": "batch (sequences)",
    "budget": "budget N' (tokens)",
    "mean_interval_ns": "mean refresh interval (µs)",
    "dram_bytes_per_s": "DRAM bandwidth (GB/s)",
    "kv_capacity_bytes": "KV memory (MiB)",
}
_SCALES = {"mean_interval_ns": 1e-3, "dram_bytes_per_s": 1e-9, "kv_capacity_bytes": 2.0**-20}
MOST_LINES = 8
"""Lines per figure: the number of distinct looks."""


def look_of_system(system: str, place: int) -> Look:
    """Return the look of `system`; one that the user defined gets a look by its place."""
    return SYSTEM_LOOKS.get(system) or OTHER_LOOKS[place % len(OTHER_LOOKS)]


def energy_figure(rows: Sequence[SavedResult]) -> Figure:
    profiles = list(dict.fromkeys(row.profile for row in rows))
    figure, axes = grid_of(len(profiles))
    for panel, profile in zip(axes, profiles, strict=True):
        shown = [row for row in rows if row.profile == profile]
        bottom = np.zeros(len(shown))
        for kind, (colour, hatch) in KIND_LOOKS.items():
            heights = np.array([sum(row.energies_j.get(name, 0.0) for name in KINDS[kind]) for row in shown]) / 1e3
            panel.bar(
                range(len(shown)), heights, bottom=bottom, width=0.7, label=kind, color=colour, hatch=hatch, edgecolor=PAPER
            )
            bottom += heights
        _systems(panel, shown)
        panel.set(title=f"Profile {profile}", ylabel="energy (kJ, modelled)", ylim=(0, 1.05 * bottom.max() or None))
    legend_below(figure, axes)
    return figure


def ratio_bars(rows: Sequence[SavedResult], baseline: str) -> Figure:
    profiles = list(dict.fromkeys(row.profile for row in rows))
    figure, axes = grid_of(1 + len(profiles))
    shown = [("Speed-up", "speedup", profiles[0])] + [
        (f"Energy efficiency, profile {profile}", "efficiency", profile) for profile in profiles
    ]
    for panel, (title, name, profile) in zip(axes, shown, strict=True):
        drawn = [row for row in rows if row.profile == profile]
        values = [getattr(row, name) for row in drawn]
        colours = [look_of_system(row.system, place).colour for place, row in enumerate(drawn)]
        bars = panel.bar(range(len(drawn)), values, width=0.7, color=colours)
        panel.bar_label(bars, [f"{value:.2f}×" for value in values], fontsize=8)
        panel.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
        _systems(panel, drawn)
        panel.set(title=title, ylabel=f"relative to {baseline} (modelled)")
        panel.margins(y=0.12)
    return figure


def refresh_figure(rows: Sequence[SavedResult]) -> Figure:
    refreshed = [row for row in rows if row.mean_interval_ns is not None]
    profiles = list(dict.fromkeys(row.profile for row in refreshed))
    systems = list(dict.fromkeys(row.system for row in refreshed))
    figure, (panel,) = grid_of(1)
    width = 0.8 / max(1, len(systems))
    for place, system in enumerate(systems):
        own, shift = [row for row in refreshed if row.system == system], (place - (len(systems) - 1) / 2) * width
        centres, shares = [profiles.index(row.profile) + shift for row in own], [row.refresh_share for row in own]
        bars = panel.bar(centres, shares, width=0.9 * width, label=system, color=look_of_system(system, place).colour)
        panel.bar_label(bars, [percent(share) for share in shares], fontsize=8)
    panel.set_xticks(range(len(profiles)), [f"profile {profile}" for profile in profiles])
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.set_ylabel("share of refresh in the energy (modelled)")
    panel.margins(y=0.12)
    legend_below(figure, [panel])
    return figure


def roofline_figure(roofs: Mapping[str, Roofline]) -> Figure:
    figure, axes = grid_of(len(roofs))
    for panel, (system, roof) in zip(axes, roofs.items(), strict=True):
        places = [roof.ridge, *(point.intensity for point in roof.points)]
        spread = np.geomspace(min(places) / 2, max(places) * 2, 64)
        roofed = np.minimum(roof.peak_ops_per_s, spread * roof.dram_bytes_per_s)
        panel.plot(spread, roofed / 1e9, color=MUTED, linewidth=1.6, label="limit of DRAM, then of the array")
        for point, look in zip(roof.points, _POINT_LOOKS, strict=False):
            mark: dict[str, Any] = {"marker": look.marker, "color": look.colour, "linestyle": "", "markersize": 8}
            panel.plot([point.intensity], [point.ops_per_s / 1e9], label=point.name, **mark)
        logarithmic(panel, "xy")
        panel.set(title=system, xlabel="8-bit operations per byte from DRAM")
        panel.set_ylabel("10⁹ operations/s (modelled)")
    legend_below(figure, axes)
    return figure


_POINT_LOOKS = (Look("#e69f00", "-", "s"), Look("#0072b2", "-", "o"), Look("#d55e00", "-", "X"))


def sweep_figure(rows: Sequence[SavedResult], baseline: str) -> Figure:
    """Draw speed-up and efficiency over the axis that varies most."""
    along = varied_most(rows)
    lines = dict(list(_lines(rows, along).items())[:MOST_LINES])
    by_system = len({row.system for row in rows}) == len(lines)
    figure, axes = grid_of(2)
    for panel, name, title in zip(axes, ("speedup", "efficiency"), ("Speed-up", "Energy efficiency"), strict=True):
        for place, (label, results) in enumerate(lines.items()):
            look = look_of_system(results[0].system, place) if by_system else _CYCLE[place % len(_CYCLE)]
            line = look.line() | ({"linestyle": "none"} if along == SYSTEM else {})
            panel.plot([_place(row, along) for row in results], [getattr(row, name) for row in results], label=label, **line)
        places = [_place(row, along) for row in rows if along != SYSTEM]
        if places and max(places) > 20 * max(min(places), 1e-9):
            logarithmic(panel, "x")
        panel.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
        panel.set(title=title, xlabel=AXES.get(along, ""), ylabel=f"relative to {baseline} (modelled)")
    legend_below(figure, axes, long=True)
    return figure


_CYCLE = (*SYSTEM_LOOKS.values(), *OTHER_LOOKS)
SYSTEM = "system"


def varied_most(rows: Sequence[SavedResult]) -> str:
    """Return the axis (of `AXES`) with the most values, or `SYSTEM`."""
    found = max(AXES, key=lambda name: _values(rows, name))
    return found if _values(rows, found) > 1 else SYSTEM


def _values(rows: Sequence[SavedResult], name: str) -> int:
    found: dict[tuple[str, ...], set[float]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, one) for one in NAMES), set()).add(_place(row, name))
    return max(map(len, found.values()))


def lines_left_out(rows: Sequence[SavedResult]) -> int:
    return max(0, len(_lines(rows, varied_most(rows))) - MOST_LINES)


def _place(row: SavedResult, name: str) -> Any:
    if name == SYSTEM:
        return row.system.replace("+", "\n+")
    return (getattr(row, name) or 0.0) * _SCALES.get(name, 1.0)


def _lines(rows: Sequence[SavedResult], along: str) -> dict[str, list[SavedResult]]:
    names = [name for name in NAMES if name != along and len({getattr(row, name) for row in rows}) > 1]
    numbers = [name for name in AXES if name != along and _values(rows, name) > 1]
    found: dict[str, list[SavedResult]] = {}
    for row in rows:
        parts = [getattr(row, name) for name in names]
        parts += [f"{AXES[name]} {_place(row, name):g}" for name in numbers if _place(row, name)]
        found.setdefault(", ".join(parts) or row.system, []).append(row)
    if along == SYSTEM:
        return found
    return {label: sorted(results, key=lambda row: float(getattr(row, along) or 0.0)) for label, results in found.items()}


def _systems(panel: Axes, rows: Sequence[SavedResult]) -> None:
    panel.set_xticks(range(len(rows)), [row.system.replace("+", "\n+") for row in rows], fontsize=7.5)
    panel.grid(axis="x", visible=False)


LEAD = (
    "Latency and energy of a hypothetical accelerator, modelled with the constants of the Kelle paper and of the named "
    "energy profiles. Nothing is measured, and nothing is fitted to the paper's results."
)


@dataclass(frozen=True)
class Drawing:
    """A figure of a document, and its data as text."""

    title: str
    draw: Callable[[], Figure]
    alt: str


def plot(source: str, output: str, what: str | None = None, force: bool = False) -> Written:
    """Draw the document in the file `source`. `what`: the figure, unless the form is a page.

    UsageError for an unsupported extension, an unknown figure, or an existing file.
    """
    form = form_of("-o", output, force)
    found = saved(read_json(source, HINT), source)
    offered = drawings(found)
    chosen = what or next(iter(offered))
    if chosen not in offered:
        raise UsageError(f"--what: there is no picture '{chosen}' of this document", f"one of: {', '.join(offered)}")
    with style():
        data = page(found, offered).encode() if form == "html" else figure_bytes(offered[chosen].draw(), form)
    if form != "html" and (left_out := lines_left_out(found.results) if found.is_sweep else 0):
        # A page has this in its caption.
        print(f"llmcache: {left_out:,} configurations are not drawn; vary fewer options in one sweep", file=sys.stderr)
    return write_target("-o", output, data, force)


def drawings(found: Saved) -> dict[str, Drawing]:
    rows, baseline = found.results, found.baseline
    if found.is_sweep:
        along = varied_most(rows)
        title = f"Speed-up and energy efficiency over {AXES.get(along, 'systems')}"
        return {"sweep": Drawing(title, lambda: sweep_figure(rows, baseline), _ratios_text(rows[:8]))}
    offered = {
        "energy": Drawing("Energy by component", lambda: energy_figure(rows), _ratios_text(rows)),
        "speedup": Drawing("Speed-up and energy efficiency", lambda: ratio_bars(rows, baseline), _ratios_text(rows)),
    }
    if refreshed := [row for row in rows if row.mean_interval_ns is not None]:
        shares = "; ".join(f"{row.system}, {row.profile} {percent(row.refresh_share)}" for row in refreshed)
        offered["refresh"] = Drawing(
            "Share of refresh in the energy", lambda: refresh_figure(rows), f"Share of refresh in the energy: {shares}."
        )
    if found.rooflines:
        points = "; ".join(
            f"{system}, {point.name}: {point.ops_per_s / 1e9:.0f} G/s at {point.intensity:.3g} operations per byte"
            for system, roof in found.rooflines.items()
            for point in roof.points
        )
        offered["roofline"] = Drawing("Roofline of the last decode step", lambda: roofline_figure(found.rooflines), points)
    return offered


def page(found: Saved, offered: dict[str, Drawing]) -> str:
    first, many = found.results[0], f"{len(found.results):,} configurations"
    work = f"context {first.context:,.0f}, decode {first.decode:,.0f}, batch {first.batch:g}"
    which = many if found.is_sweep else f"{first.model}, {first.workload}: {work}"
    profiles = ", ".join(dict.fromkeys(row.profile for row in found.results))
    caption = f"Modelled. {which}; profiles: {profiles}; relative to {found.baseline}."
    if found.is_sweep and (left_out := lines_left_out(found.results)):
        caption += f" {left_out:,} more lines are not drawn: vary fewer parameters."
    sections = [Section(one.title, [embedded(one.draw(), one.alt, caption)]) for one in offered.values()]
    return html_page("llmcache edram: accelerator model", LEAD, sections)


def _ratios_text(rows: Sequence[SavedResult]) -> str:
    return "; ".join(
        f"{row.system}, {row.profile}: speed-up {row.speedup:.2f}, efficiency {row.efficiency:.2f}" for row in rows
    )
