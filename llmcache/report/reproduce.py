"""`llmcache reproduce`: papers recomputed, each as one page and one JSON document; for `all`, an index of their verdicts.

Each paper is a module that has `reproduce(quick, tell)`: it gets its numbers from models, replays and measurements that
`tools/bench papers --measure` has saved in `llmcache/papers/NAME.json`, and lets the judge set them beside the paper's
claims. Nothing is measured here. Each is imported only when it is asked for.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Lines
from rich.text import Text as Words

from llmcache import __version__
from llmcache.errors import EXIT_BUG, EXIT_OK, DataError, LlmcacheError, UsageError, report
from llmcache.report import REPRODUCTIONS
from llmcache.report.html import Cell, Fold, HtmlBlock, Link, Picture, Section, Table, Text, html_page
from llmcache.report.judge import (
    PAPERS,
    Judged,
    Paper,
    Verdict,
    claims_table,
    counted,
    rules_table,
    verdicts_table,
)
from llmcache.report.output import check_target, plain_table, tell, write_target
from llmcache.report.theme import embedded, style

ALL = "all"
ALL_SCHEMA = "llmcache.reproduce.all/1"
COLOURS = {Verdict.CONFIRMED: "green", Verdict.PARTLY: "yellow", Verdict.NOT_CONFIRMED: "red"}
LEAD = (
    "What four papers claim beside what is modelled or measured here. Every verdict is computed from numbers by a rule; "
    "both stand on the page of the paper."
)
Tell = Callable[[str], None]
"""Is told in words what begins."""


@dataclass(frozen=True)
class Reproduction:
    """A paper recomputed: its claims judged, what a document tells besides, and what a page shows, by title of section."""

    name: str
    paper: Paper
    claims: Mapping[str, Sequence[Judged]]
    told: Mapping[str, Any]
    blocks: Callable[[], Mapping[str, Sequence[HtmlBlock]]] = field(repr=False)

    def document(self) -> dict[str, Any]:
        """Returns everything for programs, ready for JSON; what the paper says and what is ours stay apart."""
        kinds = self.paper.kinds
        return {
            "schema": f"llmcache.reproduce.{self.name}/1",
            "llmcache_version": __version__,
            "paper": dict(self.paper.facts),
            **self.told,
            "claims": [one.as_json(kinds[about]) for about, judged in self.claims.items() for one in judged],
        }

    def page(self) -> str:
        """Returns everything for people, as one HTML file: pictures and tables of a section, then what is claimed there."""
        with style():
            blocks = self.blocks()
        unknown = set(blocks) - {section["title"] for section in self.paper.sections}
        if unknown:
            raise ValueError(f"sections: {', '.join(sorted(unknown))} are not in the paper's file")
        sections = [self._section(section, blocks.get(section["title"], ())) for section in self.paper.sections]
        return html_page(f"Recomputed: {self.paper.facts['title']}", self.paper.lead, sections)

    def _section(self, section: Mapping[str, Any], shown: Sequence[HtmlBlock]) -> Section:
        title, titles = section["title"], self.paper.variants
        blocks: list[HtmlBlock] = [verdicts_table(self.claims, titles)] if title == "Verdicts" else []
        blocks += [*map(Text, section.get("text", ())), *shown]
        for about in section.get("about", ()):
            if judged := self.claims.get(about):
                blocks.append(claims_table(f"What the paper says: {about}", judged, titles, self.paper.kinds[about]))
                blocks.append(Fold("When a claim counts as confirmed", [rules_table(judged)]))
        return Section(title, blocks)


def reproduce(name: str, quick: bool, told: Tell) -> Reproduction:
    """Returns the paper called `name`, recomputed. `quick`: with fewer cache sizes."""
    found: Reproduction = importlib.import_module(REPRODUCTIONS[name][0]).reproduce(quick, told)
    return found


def measurements(name: str) -> dict[str, Any]:
    """Returns what `tools/bench papers` has measured for a paper, with its machine; DataError if it has not."""
    path = PAPERS / f"{name}.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: no measurements: {error}", f"measure with: tools/bench papers --measure {name}") from error
    if found.get("schema") != f"llmcache.papers.{name}/1":
        raise DataError(f"{path}: schema: '{found.get('schema')}'", f"measure with: tools/bench papers --measure {name}")
    return found


def machine_words(measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns on which machine, when and how what is measured was measured, as names and values."""
    machine, missing = measured["machine"], measured.get("missing", {})
    size = "small, on a machine that did other things too" if measured["quick"] else "in full"
    told = f"{machine['cpu']}, {machine['cpus']} processors, Linux {machine['kernel']}, Python {machine['python']}"
    return [
        ("measured on", told),
        ("measured", f"{measured['date']}, {size}, by tools/bench papers"),
        ("not measured", ", ".join(missing) or "nothing is missing of what can be measured"),
    ]


def picture(paper: Paper, name: str, figure: Figure, **told: str) -> Picture:
    """Returns `figure` for a page with the words that the paper's file has for the picture `name`, `told` put in."""
    words = paper.data["picture"][name]
    return embedded(figure, words["alt"].format(**told), words["caption"].format(**told))


@dataclass(frozen=True)
class ReproduceRequest:
    """What is asked for. `directory`: where page and JSON go; None: nowhere."""

    name: str
    directory: str | None
    quick: bool = False
    as_json: bool = False
    force: bool = False

    @property
    def targets(self) -> list[Path]:
        """Returns the files to write: page, then JSON."""
        return [] if self.directory is None else [Path(self.directory) / f"{self.name}.{form}" for form in ("html", "json")]

    def prepare(self) -> None:
        """Make the directory and ask for every file, before there is any work to lose; UsageError if one may not be."""
        if self.directory is None:
            return
        try:
            Path(self.directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"-o: cannot make '{self.directory}': {error.strerror}", "name a directory") from error
        for target in self.targets:
            check_target("-o", target, self.force)

    def write(self, page: str, document: dict[str, Any]) -> str:
        """Write page and JSON where they are wanted; returns the JSON."""
        text = json.dumps(document, indent=1) + "\n"
        for target, data in zip(self.targets, (page, text), strict=bool(self.targets)):
            write_target("-o", target, data.encode(), self.force)
        return text


def run(wanted: ReproduceRequest) -> int:
    """Recompute, write and print what is `wanted`, one paper or all; the exit code: of the first paper that failed."""
    if wanted.name == ALL:
        return _run_all(wanted)
    if wanted.name not in REPRODUCTIONS:
        known = f"one of: {', '.join(REPRODUCTIONS)}, {ALL}"
        raise UsageError(f"NAME: there is no reproduction called '{wanted.name}'", known)
    wanted.prepare()
    done = reproduce(wanted.name, wanted.quick, tell)
    text = wanted.write(done.page(), done.document())
    if wanted.as_json:
        sys.stdout.write(text)
    else:
        show(done, wanted.targets)
    return EXIT_OK


def show(done: Reproduction, written: Sequence[Path]) -> None:
    """Print every claim with its verdicts and numbers, and which files were `written`."""
    console = Console(highlight=False, markup=False)
    for about, judged in done.claims.items():
        console.rule(f"{about} ({done.paper.kinds[about]})", align="left")
        for one in judged:
            console.print(f"“{one.claim.quote}” ({one.claim.section})")
            lines = Lines.grid(padding=(0, 2, 0, 0))
            for name, finding in one.findings.items():
                lines.add_row(name, Words(finding.verdict.value, COLOURS[finding.verdict]), finding.words)
            console.print(Padding(lines, (0, 0, 1, 2)))
    for target in written:
        console.print(f"written: {target}", soft_wrap=True)


# All of them


@dataclass(frozen=True)
class IndexEntry:
    """A paper in the index: recomputed (`done`), or the error that kept it from being so."""

    name: str
    seconds: float
    done: Reproduction | None = None
    error: LlmcacheError | None = None

    @property
    def verdicts(self) -> Counter[Verdict]:
        """How many findings there are of each verdict."""
        return counted(self.done.claims) if self.done else Counter()

    def as_json(self) -> dict[str, Any]:
        """Returns the paper for a JSON document."""
        told: dict[str, Any] = {"title": REPRODUCTIONS[self.name][1], "seconds": self.seconds}
        if self.error is not None:
            told |= {"error": self.error.message, "hint": self.error.hint, "exit_code": self.error.exit_code}
        if self.done is not None:
            counts = {verdict.value: self.verdicts[verdict] for verdict in Verdict}
            told |= {"verdicts": counts, "document": self.done.document()}
        return told


class _Bug(LlmcacheError):
    """Something unexpected, shown whole on stderr when it happened."""

    exit_code = EXIT_BUG


def _run_all(wanted: ReproduceRequest) -> int:
    each = [replace(wanted, name=name) for name in REPRODUCTIONS]
    for one in (*each, wanted):
        one.prepare()
    entries = [_entry(one) for one in each]
    papers = {entry.name: entry.as_json() for entry in entries}
    text = wanted.write(_index(entries), {"schema": ALL_SCHEMA, "quick": wanted.quick, "papers": papers})
    if wanted.as_json:
        sys.stdout.write(text)
    else:
        _show_all(entries, wanted.targets)
    return next((entry.error.exit_code for entry in entries if entry.error is not None), EXIT_OK)


def _entry(wanted: ReproduceRequest) -> IndexEntry:
    """One paper, its page and document written before the next begins; what fails keeps nothing from the others."""
    tell(f"{wanted.name}: {REPRODUCTIONS[wanted.name][1]}")
    begin_s = time.monotonic()
    try:
        done = reproduce(wanted.name, wanted.quick, tell)
        wanted.write(done.page(), done.document())
    except LlmcacheError as error:
        report(error)
        return IndexEntry(wanted.name, time.monotonic() - begin_s, error=error)
    except Exception as error:  # noqa: BLE001 - shown whole; a bug in one paper does not take away the others
        traceback.print_exc()
        bug = _Bug(f"{type(error).__name__}: {error}", "a bug in llmcache, shown on stderr: please report it")
        return IndexEntry(wanted.name, time.monotonic() - begin_s, error=bug)
    return IndexEntry(wanted.name, time.monotonic() - begin_s, done)


def _index(entries: Sequence[IndexEntry]) -> str:
    """Returns the index: verdicts by paper, then every claim with its verdicts."""
    columns = ["paper", "what of it", *(verdict.value for verdict in Verdict), "seconds"]
    caption = "Verdicts by paper; a claim has one for each variant it speaks of"
    sections = [Section("Verdicts", [Table(caption, columns, list(map(_row, entries)), 0)])]
    for entry in entries:
        if entry.done is not None:
            rows: list[list[Cell]] = [
                [f"{about} ({entry.done.paper.kinds[about]})", f"“{one.claim.quote}”", variant, finding.verdict.badge,
                 finding.words]
                for about, judged in entry.done.claims.items() for one in judged
                for variant, finding in one.findings.items()
            ]  # fmt: skip
            table = Table("Every claim", ["about", "paper", "variant", "verdict", "here"], rows)
            sections.append(Section(entry.name, [table]))
    return html_page("Four papers, recomputed", LEAD, sections)


def _row(entry: IndexEntry) -> list[Cell]:
    if entry.done is None:
        assert entry.error is not None
        return [entry.name, f"not recomputed: {entry.error.message}", *("" for _ in Verdict), entry.seconds]
    counts = [entry.verdicts[verdict] for verdict in Verdict]
    return [Link(entry.name, f"{entry.name}.html"), REPRODUCTIONS[entry.name][1], *counts, entry.seconds]


def _show_all(entries: Sequence[IndexEntry], written: Sequence[Path]) -> None:
    console = Console(highlight=False, markup=False)
    table = plain_table("paper", *(verdict.value for verdict in Verdict), "seconds")
    for entry in entries:
        counts = [Words(str(entry.verdicts[verdict]), COLOURS[verdict]) for verdict in Verdict]
        cells = counts if entry.done is not None else [Words("failed"), Words(""), Words("")]
        table.add_row(entry.name, *cells, f"{entry.seconds:.0f}")
    console.print(table)
    for target in written:
        console.print(f"written: {target}", soft_wrap=True)
