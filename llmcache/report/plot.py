"""What `llmcache plot` does: the picture of a trace as PNG, SVG or a page, with classes and names where they are known."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from llmcache.errors import UsageError
from llmcache.report.access import AccessPicture, Landmark, access_figure
from llmcache.report.classes import classes_table, shades_of
from llmcache.report.files import check_target, write_target
from llmcache.report.html import Block, Facts, Section, html_page
from llmcache.report.picture import alt_text, caption, chosen_files, conditions, picture_of
from llmcache.report.theme import MUTED, embedded, figure_bytes, style
from llmcache.trace.record import TraceFile, TraceReader, open_trace

OPTION = "-o"
FORMS = ("png", "svg", "html")
LETTERS_PER_INCH = 17  # of a caption inside a picture
Namer = Callable[[TraceFile], Sequence[Landmark]]
"""Gives the names of what a file holds (tensors, layers) where it is a model; nothing where that is unknown."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for. `files`: a glob, None for all; `by_time`: over time, else over accesses."""

    trace: str
    output: str
    files: str | None = None
    classes: bool = True
    by_time: bool = True
    force: bool = False


def plot(wanted: Wanted, namer: Namer) -> None:
    """Draw what is `wanted`. UsageError for an ending that is no form, or an output that exists; DataError for the trace."""
    form = form_of(wanted.output)
    check_target(OPTION, wanted.output, wanted.force)
    with open_trace(wanted.trace) as reader:
        data = _drawn(wanted, form, reader, namer)
    write_target(OPTION, wanted.output, data, wanted.force)


def form_of(output: str) -> str:
    """Returns "png", "svg" or "html" by the ending of `output`; UsageError for another."""
    form = Path(output).suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UsageError(f"{OPTION}: '{output}' must end in .png, .svg or .html", "the ending says what is written")
    return form


def _drawn(wanted: Wanted, form: str, reader: TraceReader, namer: Namer) -> bytes:
    only = chosen_files(reader.files, wanted.files)
    found = classified(reader, only) if wanted.classes else []
    marks = [mark for file in reader.files if only is None or file.id in only for mark in namer(file)]
    title = Path(wanted.trace).name
    picture = picture_of(reader, title, only, wanted.by_time, shades_of(found), marks)
    with style():
        figure = access_figure(picture)
        if form != "html":
            _write_caption(figure, caption(picture, reader))
            return figure_bytes(figure, form)
        blocks: list[Block] = [embedded(figure, alt_text(picture), caption(picture, reader))]
    if found:
        blocks.append(classes_table(found, picture.names))
    return _page(picture, reader, blocks).encode()


def _page(picture: AccessPicture, reader: TraceReader, blocks: Sequence[Block]) -> str:
    lead = "Which blocks were accessed when, counted per cell from the recorded trace."
    conditioned = Section("Conditions", [Facts(conditions(picture, reader))])
    return html_page(picture.title, lead, [Section("Accesses", blocks), conditioned])


def _write_caption(figure: Figure, text: str) -> None:
    lines = textwrap.wrap(text, int(figure.get_figwidth() * LETTERS_PER_INCH))
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color=MUTED)
