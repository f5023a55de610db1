"""`llmcache reproduce`: papers recomputed, each as a page and a JSON document; for `all`, an index of their verdicts.

Nothing is measured here: `tools/bench papers --measure` saves measurements in `llmcache/papers/NAME.json`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Lines
from rich.text import Text as Words

from llmcache import __version__
from llmcache.errors import EXIT_BUG, EXIT_OK, DataError, LlmcacheError, UsageError, report
from llmcache.papers import REPRODUCTIONS
from llmcache.papers.judge import OURS, PAPERS, Judged, Paper, Verdict
from llmcache.report.html import Badge, Cell, Fold, HtmlBlock, Link, Picture, Section, Table, Text, html_page
from llmcache.report.output import check_target, plain_table, progress_line, write_target
from llmcache.report.theme import embedded, style

ALL = "all"
ALL_SCHEMA = "llmcache.reproduce.all/1"
COLOURS = {Verdict.CONFIRMED: "green", Verdict.PARTLY: "yellow", Verdict.NOT_CONFIRMED: "red"}
BADGES = {verdict: Badge(verdict.value, kind) for verdict, kind in zip(Verdict, ("good", "fair", "bad"), strict=True)}
WORDS = [verdict.value for verdict in Verdict]
LEAD = (
    "The claims of four papers, compared with modelled and measured results. Every verdict is computed from numbers by a "
    "rule; the page of the paper shows both."
)
Progress = Callable[[str], None]
"""Called with a description of the step that begins."""
Blocks = Mapping[str, Sequence[HtmlBlock]]
"""Contents of a page besides the claims, by title of section."""


@dataclass(frozen=True)
class Reproduction:
    """A recomputed paper: its claims, other contents of its document, and the blocks of its page."""

    name: str
    paper: Paper
    claims: Mapping[str, Sequence[Judged]]
    contents: Mapping[str, Any]
    blocks: Callable[[], Blocks] = field(repr=False)

    def document(self) -> dict[str, Any]:
        kinds = self.paper.kinds
        return {
            "schema": f"llmcache.reproduce.{self.name}/1",
            "llmcache_version": __version__,
            "paper": dict(self.paper.facts),
            **self.contents,
            "claims": [one.as_json(kinds[about]) for about, judged in self.claims.items() for one in judged],
        }

    def page(self) -> str:
        with style():
            shown = self.blocks()
        unknown = set(shown) - {section["title"] for section in self.paper.sections}
        if unknown:
            raise ValueError(f"sections: {', '.join(sorted(unknown))} are not in the paper's file")
        sections = [self._section(section, shown.get(section["title"], ())) for section in self.paper.sections]
        return html_page(f"Recomputed: {self.paper.facts['title']}", self.paper.lead, sections)

    def _section(self, section: Mapping[str, Any], shown: Sequence[HtmlBlock]) -> Section:
        blocks: list[HtmlBlock] = [self._verdicts()] if section["title"] == "Verdicts" else []
        blocks += [*map(Text, section.get("text", ())), *shown]
        for about in section.get("about", ()):
            if judged := self.claims.get(about):
                rules: list[list[Cell]] = [[one.claim.name, one.claim.rule] for one in judged]
                table = Table("Rules of the verdicts", ["claim", "rule"], rows=rules)
                blocks += [self._claims(about, judged), Fold(table.caption, [table])]
        return Section(section["title"], blocks)

    def _verdicts(self) -> Table:
        rows: list[list[Cell]] = []
        for about, judged in self.claims.items():
            found = [(self.paper.variants.get(name, ""), one) for each in judged for name, one in each.findings.items()]
            for title in dict.fromkeys(title for title, _ in found):
                counts = Counter(one.verdict for named, one in found if named == title)
                rows.append([about, title, *(counts[verdict] for verdict in Verdict)])
        return Table("Number of findings by verdict", ["claims about", "variant", *WORDS], rows)

    def _claims(self, about: str, judged: Sequence[Judged]) -> Table:
        rows: list[list[Cell]] = []
        for one in judged:
            paper: list[Cell] = [f"“{one.claim.quote}”", one.claim.section]
            for name, found in one.findings.items():
                variant = "" if name == OURS else self.paper.variants.get(name, name)
                rows.append([*paper, variant, BADGES[found.verdict], found.words])
                paper = ["", ""]
        columns = ["paper", "section", "variant", "verdict", f"ours ({self.paper.kinds[about]})"]
        return Table(f"Claims about {about}", columns, rows)


def reproduce(name: str, quick: bool, progress: Progress) -> Reproduction:
    module = importlib.import_module(f"llmcache.papers.{name.replace('-', '_')}")
    found: Reproduction = module.reproduce(quick, progress)
    return found


def measurements(name: str) -> dict[str, Any]:
    """Return the stored measurements of a paper; DataError if they are missing or of another schema."""
    path = PAPERS / f"{name}.json"
    hint = f"measure with: tools/bench papers --measure {name}"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot read the measurements: {error}", hint) from error
    if found.get("schema") != f"llmcache.papers.{name}/1":
        raise DataError(f"{path}: schema: '{found.get('schema')}' is not 'llmcache.papers.{name}/1'", hint)
    return found


def machine_words(measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine, missing = measured["machine"], measured.get("missing", {})
    size = "short run on a shared machine" if measured["quick"] else "full run"
    hardware = f"{machine['cpu']}, {machine['cpus']} processors, Linux {machine['kernel']}, Python {machine['python']}"
    return [
        ("measured on", hardware),
        ("measured", f"{measured['date']}, {size}, with tools/bench papers"),
        ("not measured", ", ".join(missing) or "none"),
    ]


def picture(paper: Paper, name: str, figure: Figure, **values: str) -> Picture:
    """Return `figure` with the texts for `name` in the paper's file."""
    words = paper.data["picture"][name]
    return embedded(figure, words["alt"].format(**values), words["caption"].format(**values))


def run(name: str, directory: str | None, quick: bool, as_json: bool, force: bool) -> int:
    """Recompute the paper `name`, or all, write page and JSON into `directory`, and print it.

    Returns the exit code of the first paper that failed. UsageError, before any work, for an unknown name or a file that may
    not be written.
    """
    if name not in (*REPRODUCTIONS, ALL):
        known = f"one of: {', '.join(REPRODUCTIONS)}, {ALL}"
        raise UsageError(f"NAME: there is no reproduction called '{name}'", known)
    if directory is not None:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"-o: cannot make '{directory}': {error.strerror}", "name a directory") from error
    for one in [*REPRODUCTIONS, ALL] if name == ALL else [name]:
        for target in _targets(directory, one):
            check_target("-o", target, force)

    def write(one: str, page: str, document: dict[str, Any]) -> str:
        text = json.dumps(document, indent=1) + "\n"
        for target, data in zip(_targets(directory, one), (page, text), strict=False):
            write_target("-o", target, data.encode(), force)
        return text

    exit_code = EXIT_OK
    if name == ALL:
        entries = [_entry(one, quick, write) for one in REPRODUCTIONS]
        exit_code = next((entry.error.exit_code for entry in entries if entry.error is not None), EXIT_OK)
        papers = {entry.name: entry.as_json() for entry in entries}
        text = write(ALL, _index(entries), {"schema": ALL_SCHEMA, "quick": quick, "papers": papers})
    else:
        done = reproduce(name, quick, progress_line)
        text = write(name, done.page(), done.document())
    if as_json:
        sys.stdout.write(text)
        return exit_code
    console = Console(highlight=False, markup=False)
    if name == ALL:
        _show_index(console, entries)
    else:
        _show(console, done)
    for target in _targets(directory, name):
        console.print(f"written: {target}", soft_wrap=True)
    return exit_code


def _targets(directory: str | None, name: str) -> list[Path]:
    return [] if directory is None else [Path(directory) / f"{name}.{form}" for form in ("html", "json")]


def _show(console: Console, done: Reproduction) -> None:
    for about, judged in done.claims.items():
        console.rule(f"{about} ({done.paper.kinds[about]})", align="left")
        for one in judged:
            console.print(f"“{one.claim.quote}” ({one.claim.section})")
            lines = Lines.grid(padding=(0, 2, 0, 0))
            for name, finding in one.findings.items():
                lines.add_row(name, Words(finding.verdict.value, COLOURS[finding.verdict]), finding.words)
            console.print(Padding(lines, (0, 0, 1, 2)))


# Index of all papers


@dataclass(frozen=True)
class IndexEntry:
    """A paper in the index, or its `error`."""

    name: str
    seconds: float
    done: Reproduction | None = None
    error: LlmcacheError | None = None

    @property
    def counts(self) -> list[int]:
        claims = [] if self.done is None else [one for judged in self.done.claims.values() for one in judged]
        found = Counter(finding.verdict for one in claims for finding in one.findings.values())
        return [found[verdict] for verdict in Verdict]

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"title": REPRODUCTIONS[self.name], "seconds": self.seconds}
        if self.error is not None:
            values |= {"error": self.error.message, "hint": self.error.hint, "exit_code": self.error.exit_code}
        if self.done is not None:
            values |= {"verdicts": dict(zip(WORDS, self.counts, strict=True)), "document": self.done.document()}
        return values


def _entry(name: str, quick: bool, write: Callable[[str, str, dict[str, Any]], str]) -> IndexEntry:
    progress_line(f"{name}: {REPRODUCTIONS[name]}")
    begin_s = time.monotonic()
    try:
        done = reproduce(name, quick, progress_line)
        write(name, done.page(), done.document())
    except LlmcacheError as error:
        report(error)
        return IndexEntry(name, time.monotonic() - begin_s, error=error)
    except Exception as error:  # noqa: BLE001 - printed in full; a bug in one paper must not stop the others
        traceback.print_exc()
        bug = LlmcacheError(f"{type(error).__name__}: {error}", "a bug in llmcache, shown on stderr: please report it")
        bug.exit_code = EXIT_BUG
        return IndexEntry(name, time.monotonic() - begin_s, error=bug)
    return IndexEntry(name, time.monotonic() - begin_s, done)


def _index(entries: Sequence[IndexEntry]) -> str:
    summary: list[list[Cell]] = []
    sections = []
    for entry in entries:
        if entry.done is None:
            assert entry.error is not None
            summary.append([entry.name, f"not recomputed: {entry.error.message}", *("" for _ in Verdict), entry.seconds])
            continue
        link = Link(entry.name, f"{entry.name}.html")
        summary.append([link, REPRODUCTIONS[entry.name], *entry.counts, entry.seconds])
        rows: list[list[Cell]] = [
            [
                f"{about} ({entry.done.paper.kinds[about]})",
                f"“{one.claim.quote}”",
                variant,
                BADGES[finding.verdict],
                finding.words,
            ]
            for about, judged in entry.done.claims.items()
            for one in judged
            for variant, finding in one.findings.items()
        ]
        table = Table("All claims", ["about", "paper", "variant", "verdict", "ours"], rows)
        sections.append(Section(entry.name, [table]))
    caption = "Number of verdicts by paper; a claim has one for each variant"
    first = Section("Verdicts", [Table(caption, ["paper", "title", *WORDS, "seconds"], summary, 0)])
    return html_page("Four papers, recomputed", LEAD, [first, *sections])


def _show_index(console: Console, entries: Sequence[IndexEntry]) -> None:
    table = plain_table("paper", *WORDS, "seconds")
    for entry in entries:
        counts = [Words(str(count), COLOURS[verdict]) for verdict, count in zip(Verdict, entry.counts, strict=True)]
        cells = counts if entry.done is not None else [Words("failed"), Words(""), Words("")]
        table.add_row(entry.name, *cells, f"{entry.seconds:.0f}")
    console.print(table)
