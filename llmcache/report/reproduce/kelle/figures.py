"""Pictures of Kelle recomputed: the paper's printed numbers beside the model's, by profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmcache.edram.constants import PROFILES
from llmcache.report.reproduce.kelle.rows import Row
from llmcache.report.theme import INK, MUTED, Look, grid_of, legend_below

PAPER_LOOK = Look(INK, "-", "s", 1.8, 6)
PROFILE_LOOKS: dict[str, Look] = {
    "paper": Look("#0072b2", "-", "o", 2.0),
    "public": Look("#d55e00", (0, (5, 1.5)), "^"),
    "silicon": Look("#009e73", (0, (3, 1, 1, 1)), "D"),
    "ours": Look("#0072b2", "-", "o", 2.0),
    "first principles": Look("#0072b2", "-", "o", 2.0),
    "declared recomputation": Look("#56b4e9", (0, (3, 1)), "v"),
    "paper, declared recomputation": Look("#56b4e9", (0, (3, 1)), "v"),
}


def averages_figure(rows: Sequence[Row]) -> Figure:
    """Returns the averages of section 8.1, printed and modelled: speed-ups, then efficiencies. Call it in `style()`."""
    figure, axes = grid_of(2)
    shown = {"speed-up": "-speedup", "energy efficiency": "-efficiency"}
    for panel, (title, ending) in zip(axes, shown.items(), strict=True):
        of = [row for row in rows if row.name.endswith(ending) and row.section.startswith("8.1")]
        _bars(panel, of)
        panel.set_title(title)
    legend_below(figure, axes)
    return figure


_LABELS = {
    "kelle": "Kelle+eDRAM",
    "edram": "Original\n+eDRAM",
    "aep": "AEP+SRAM",
    "aerp": "AERP\n/ AEP",
    "kelle-over-aerp": "Kelle\n/ AERP",
}


def _bars(panel: Axes, rows: Sequence[Row]) -> None:
    variants = list(dict.fromkeys(variant for row in rows for variant in row.ours))
    variants = [variant for variant in variants if variant in PROFILE_LOOKS]
    width = 0.85 / (1 + len(variants))
    for place, name in enumerate(["printed", *variants]):
        values = [row.paper if name == "printed" else row.ours.get(name, np.nan) for row in rows]
        colour = PAPER_LOOK.colour if name == "printed" else PROFILE_LOOKS[name].colour
        spots = np.arange(len(rows)) + (place - len(variants) / 2) * width
        label = "printed in the paper" if name == "printed" else _told(name)
        panel.bar(spots, values, width=0.92 * width, label=label, color=colour)
    labels = [_LABELS[row.name.rpartition("-")[0]] for row in rows]
    panel.set_xticks(range(len(rows)), labels, fontsize=7.5)
    panel.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
    panel.set_ylabel("times as good")


def _told(variant: str) -> str:
    return f"modelled, profile {variant}" if variant.partition(",")[0] in PROFILES else f"modelled, {variant}"


def curve_figure(panels: Mapping[str, Sequence[Row]], places: Mapping[str, Sequence[float]], label: str) -> Figure:
    """Returns printed and modelled efficiencies over `places` (called `label`), a panel per name. Call it in `style()`."""
    figure, axes = grid_of(len(panels))
    for panel, (title, rows) in zip(axes, panels.items(), strict=True):
        along = places[title]
        panel.plot(along, [row.paper for row in rows], label="printed in the paper", **PAPER_LOOK.line())
        for name in PROFILES:
            look = PROFILE_LOOKS[name]
            panel.plot(along, [row.ours[name] for row in rows], label=f"modelled, profile {name}", **look.line())
        panel.set_title(title)
        panel.set_xlabel(label)
        panel.set_ylabel("energy efficiency, times Original+SRAM")
        panel.set_ylim(bottom=0)
    legend_below(figure, axes)
    return figure
