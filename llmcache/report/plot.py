"""What `llmcache plot` does: the picture of a trace as PNG, SVG or a page, with classes and names where they are known."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from llmcache.cache.classes import Classification
from llmcache.cache.classify import classify
from llmcache.cache.models import Models
from llmcache.cache.plan import Progress
from llmcache.cache.routing import MixtureUses
from llmcache.errors import UsageError
from llmcache.report.access import AccessPicture, access_figure
from llmcache.report.classes import classes_table, landmarks_of, shades_of
from llmcache.report.experts import expert_blocks
from llmcache.report.files import Written, check_target, write_target
from llmcache.report.html import Block, Facts, Fold, Section, html_page
from llmcache.report.picture import alt_text, caption, chosen_files, conditions, picture_of
from llmcache.report.theme import MUTED, embedded, figure_bytes, style
from llmcache.trace.formats import open_trace
from llmcache.trace.record import Trace, TraceFile, TraceReader

OPTION = "-o"
FORMS = ("png", "svg", "html")
LETTERS_PER_INCH = 17  # of a caption inside a picture
LEAD = "Which blocks were accessed when, counted from the recorded accesses."


@dataclass(frozen=True)
class Wanted:
    """What is asked for. `files`: a glob, None for all; `classes`: whether to shade them."""

    trace: str
    output: str
    files: str | None = None
    classes: bool = True
    force: bool = False


def plot(wanted: Wanted, names: Callable[[Sequence[TraceFile]], Models], progress: Progress) -> Written:
    """Draw what is `wanted`, and return the file.

    `names` gives what is known of models for a file table, `progress` is told how far the classes are.

    UsageError for an ending that is no form, or an output that exists; DataError for the trace.
    """
    form = form_of(wanted.output)
    check_target(OPTION, wanted.output, wanted.force)
    with open_trace(wanted.trace) as reader:
        data = _drawn(wanted, form, reader, names(reader.files), progress)
    return write_target(OPTION, wanted.output, data, wanted.force)


def form_of(output: str, option: str = OPTION) -> str:
    """Returns "png", "svg" or "html" by the ending of `output`; UsageError, naming `option`, for another."""
    form = Path(output).suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UsageError(f"{option}: '{output}' must end in .png, .svg or .html", "the ending says what is written")
    return form


def _drawn(wanted: Wanted, form: str, reader: TraceReader, names: Models, progress: Progress) -> bytes:
    only = chosen_files(reader.files, wanted.files)
    files = [file for file in reader.files if only is None or file.id in only]
    found: Sequence[Classification] = ()
    mixtures: Sequence[MixtureUses] = ()
    if wanted.classes:
        classes = classify(_told(reader, wanted.trace, progress), names)
        found = [row for row in classes.rows if only is None or row.file in only]
        mixtures = [each for each in classes.mixtures if only is None or only & {*each.files}]
    title = f"{Path(wanted.trace).name} ({reader.provenance.tier})"
    picture = picture_of(reader, title, only, shades=shades_of(found), landmarks=landmarks_of(files, names))
    with style():
        figure = access_figure(picture)
        if form == "html":
            drawn = embedded(figure, alt_text(picture), caption(picture, reader))
            return _page(picture, reader, drawn, found, mixtures).encode()
        _write_caption(figure, caption(picture, reader))
        return figure_bytes(figure, form)


def _told(reader: TraceReader, trace: str, progress: Progress) -> Iterator[Trace]:
    done = 0
    for batch in reader.batches():
        yield batch
        done += len(batch)
        progress(trace, done, reader.rows)


def _page(
    picture: AccessPicture,
    reader: TraceReader,
    drawn: Block,
    found: Sequence[Classification],
    mixtures: Sequence[MixtureUses],
) -> str:
    sections = [Section("Accesses", [drawn, Fold("Conditions", [Facts(conditions(picture, reader))])])]
    if found:
        sections.append(Section("Classes", [classes_table(found, {band.file for band in picture.bands})]))
    if mixtures:
        sections.append(Section("Experts", [block for mixture in mixtures for block in expert_blocks(mixture)]))
    return html_page(picture.title, LEAD, sections)


def _write_caption(figure: Figure, text: str) -> None:
    lines = textwrap.wrap(text, int(figure.get_figwidth() * LETTERS_PER_INCH))
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7, color=MUTED)
