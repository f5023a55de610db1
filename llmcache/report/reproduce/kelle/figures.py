"""Pictures of Kelle recomputed: the paper's printed numbers beside the model's, by profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    """Draw a group of bars for each row: the printed number, then ours by variant."""
    labelled: set[str] = set()
    for spot, row in enumerate(rows):
        bars = [("printed", PAPER_LOOK.colour, row.paper)]
        bars += [(_BAR_LABELS[name], PROFILE_LOOKS[name].colour, value) for name, value in row.ours.items()]
        width = min(0.85 / len(bars), 0.22)
        for place, (label, colour, value) in enumerate(bars):
            at = spot + (place - (len(bars) - 1) / 2) * width
            # A label only once: the legend takes the first of each, and this one is asked for its bars.
            panel.bar([at], [value], width=0.92 * width, color=colour, label=label if label not in labelled else None)
            labelled.add(label)
    labels = [_LABELS[row.name.rpartition("-")[0]] for row in rows]
    panel.set_xticks(range(len(rows)), labels, fontsize=7.5)
    panel.grid(axis="x", visible=False)
    panel.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
    panel.set_ylabel("times as good")


_BAR_LABELS = {
    "ours": "modelled",
    "first principles": "modelled",
    "declared recomputation": "recomputing as declared",
    "paper": "energies as printed",
    "public": "public energies",
    "silicon": "silicon's refresh",
    "paper, declared recomputation": "recomputing as declared",
}


def curve_figure(panels: Mapping[str, Sequence[Row]], places: Mapping[str, Sequence[float]], label: str) -> Figure:
    """Returns printed and modelled efficiencies over `places` (called `label`), a panel per name. Call it in `style()`."""
    figure, axes = grid_of(len(panels))
    for panel, (title, rows) in zip(axes, panels.items(), strict=True):
        along = places[title]
        panel.plot(along, [row.paper for row in rows], label="printed", **PAPER_LOOK.line())
        for name in PROFILES:
            look = PROFILE_LOOKS[name]
            panel.plot(along, [row.ours[name] for row in rows], label=_BAR_LABELS[name], **look.line())
        panel.set_title(title)
        panel.set_xlabel(label)
        panel.set_ylabel("efficiency, × Original+SRAM")
        panel.set_ylim(bottom=0)
    legend_below(figure, axes)
    return figure
