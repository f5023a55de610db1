"""From a trace to its picture: what is in it, which files are shown, and what the caption must say."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from llmcache.cache.constants import BLOCK_BYTES
from llmcache.errors import UsageError
from llmcache.report.access import AccessPicture, Landmark, Shade
from llmcache.report.grid import BATCH_ROWS, MOST_BANDS, WORTH_A_BAND, AccessGrid, Survey, bands, survey, worth_a_band
from llmcache.report.html import printable
from llmcache.units import format_duration, format_size

if TYPE_CHECKING:
    from llmcache.trace.record import Trace, TraceFile, TraceReader

STRIP_TEXT = "tinted, and at the right edge: narrow for SEQ, medium for LOOP, wide for HOT"


def chosen_files(files: Sequence[TraceFile], pattern: str | None) -> frozenset[int] | None:
    """Returns the ids of the files whose path or name matches the glob `pattern` (None: all); UsageError if none does."""
    if pattern is None:
        return None
    found = frozenset(
        file.id for file in files if fnmatchcase(file.path, pattern) or fnmatchcase(file.path.rsplit("/", 1)[-1], pattern)
    )
    if not found:
        known = ", ".join(file.path for file in files[:5]) + (", …" if len(files) > 5 else "")
        raise UsageError(f"--files: no file of the trace matches '{pattern}'", f"the trace has: {known}")
    return found


def picture_of(
    source: Trace | TraceReader,
    title: str,
    only: frozenset[int] | None = None,
    by_time: bool = True,
    shades: Sequence[Shade] = (),
    landmarks: Sequence[Landmark] = (),
) -> AccessPicture:
    """Returns the picture of `source`, which is read twice, in batches. DataError if it has no rows of the files `only`.

    Where `only` is None, files without a share that is `worth_a_band` are left out.

    A trace without times of its own is drawn by accesses.
    """
    found = survey(source.batches(BATCH_ROWS), only)
    places = bands(worth_a_band(found.spans) if only is None else found.spans)
    grid = AccessGrid(found, places, by_time and _timed(found, source))
    for batch in source.batches(BATCH_ROWS):
        grid.add(batch, only)
    names = {file.id: printable(file.path) for file in source.files}
    shown = {band.file for band in places}
    shades = [shade for shade in shades if shade.file in shown]
    return AccessPicture(printable(title), found, places, grid, names, shades, landmarks)


def _timed(found: Survey, source: Trace | TraceReader) -> bool:
    """Returns whether rows have times that say something; importers give rows without a time the clock "none: …"."""
    return found.timed and not source.provenance.clock.startswith("none")


def conditions(picture: AccessPicture, source: Trace | TraceReader) -> list[tuple[str, str]]:
    """Returns under which conditions the trace was recorded and drawn, as names and values."""
    found, provenance = picture.survey, source.provenance
    facts = [
        ("source", provenance.tier),
        ("rows", f"{found.rows:,}"),
        ("accesses", f"{found.accesses:,} blocks of 4 KiB ({format_size(found.accesses * BLOCK_BYTES)})"),
        ("files", f"{len(found.spans):,}"),
        ("duration", format_duration(found.t1_ns - found.t0_ns) if _timed(found, source) else "the trace has no times"),
        ("clock", provenance.clock),
        ("kernel", provenance.kernel),
        ("lost events", f"{provenance.lost_events:,}" if provenance.lost_events else ""),
        ("command", provenance.command),
        ("note", provenance.note),
        ("one cell", f"{_cell(picture)}; the op that is most frequent in it colours it"),
        ("classes", STRIP_TEXT if picture.shades else ""),
        ("not shown", _left_out(picture)),
    ]
    return [(name, printable(value)) for name, value in facts if value]


def caption(picture: AccessPicture, source: Trace | TraceReader) -> str:
    """Returns in a few lines what is seen, and what to know before believing it; all else is in `conditions`."""
    facts = dict(conditions(picture, source))
    told = f"Source: {facts['source']}; {facts['accesses']}"
    told += f" in {facts['duration']}" if picture.grid.by_time else ""
    told += f"; {facts['lost events']} events lost" if "lost events" in facts else ""
    told += f". A cell: {printable(_cell(picture))}."
    return told + (f" Not shown: {facts['not shown']}." if "not shown" in facts else "")


def alt_text(picture: AccessPicture) -> str:
    """Returns in words what the picture shows, for readers who do not see it."""
    parts = []
    for band in picture.bands:
        span = next(span for span in picture.survey.spans if span.file == band.file)
        kinds = sorted({shade.kind for shade in picture.shades if shade.file == band.file})
        classes = f", {'/'.join(kinds)}" if kinds else ""
        blocks = f"blocks {span.first:,} to {span.end - 1:,}, {span.accesses:,} accesses"
        parts.append(f"{picture.names[band.file]}: {blocks}{classes}")
    return f"{picture.title}: block numbers over {'time' if picture.grid.by_time else 'accesses'}. " + "; ".join(parts) + "."


def _cell(picture: AccessPicture) -> str:
    """Returns what one cell of the picture stands for."""
    found, grid = picture.survey, picture.grid
    if grid.by_time:
        across = format_duration((found.t1_ns - found.t0_ns) / grid.width)
    else:
        across = f"{max(1, found.accesses // grid.width):,} accesses"
    tallest = max(picture.bands, key=lambda band: band.end - band.first)
    blocks = (tallest.end - tallest.first) / max(1.0, (tallest.top - tallest.bottom) * grid.height)
    name = picture.names[tallest.file].rsplit("/", 1)[-1] or picture.names[tallest.file]
    return f"{across} by {max(1, round(blocks)):,} blocks of {name}"


def _left_out(picture: AccessPicture) -> str:
    """Returns which part of the accesses lies in files without a band; "" if none does."""
    shown = {band.file for band in picture.bands}
    rest = [span for span in picture.survey.spans if span.file not in shown]
    if not rest:
        return ""
    share = sum(span.accesses for span in rest) / picture.survey.accesses
    files = f"{len(rest)} further files with {share:.1%} of the accesses"
    if len(shown) == MOST_BANDS:
        return f"{files}; --files GLOB chooses"
    return f"{files}, each below {WORTH_A_BAND:.0%} of accesses and blocks; --files '*' shows {MOST_BANDS} files"
