"""`llmcache reproduce all`: every paper, and an index of their verdicts. What fails keeps nothing from the others."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from llmcache.errors import EXIT_BUG, EXIT_OK, LlmcacheError, report
from llmcache.report.claims import Verdict
from llmcache.report.html import Badge, Cell, Link, Section, Table, html_page
from llmcache.report.reproduce import REPRODUCTIONS, Reproduction, output, reproduce
from llmcache.report.reproduce.output import COLOURS, Wanted
from llmcache.report.tables import plain_table

ALL = "all"
SCHEMA = "llmcache.reproduce.all/1"
LEAD = (
    "What four papers claim beside what is modelled or measured here. Every verdict is computed from numbers by a rule; "
    "both stand on the page of the paper."
)


@dataclass(frozen=True)
class Paper:
    """One paper: recomputed (`done`), or the error that kept it from being so."""

    name: str
    seconds: float
    done: Reproduction | None = None
    error: LlmcacheError | None = None

    @property
    def verdicts(self) -> Counter[Verdict]:
        """How many findings there are of each verdict."""
        claims = self.done.claims if self.done else {}
        return Counter(
            finding.verdict for judged in claims.values() for claim in judged for finding in claim.findings.values()
        )

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


def run(wanted: Wanted) -> int:
    """Recompute, write and print what is `wanted`, one paper or all; the exit code: of the first paper that failed."""
    if wanted.name != ALL:
        output.run(wanted)
        return EXIT_OK
    each = [replace(wanted, name=name) for name in REPRODUCTIONS]
    for one in (*each, wanted):
        output.prepare(one)
    papers = [_recomputed(one) for one in each]
    text = output.write(wanted, page(papers), document(papers, wanted.quick))
    if wanted.as_json:
        sys.stdout.write(text)
    else:
        show(papers, wanted)
    return next((paper.error.exit_code for paper in papers if paper.error is not None), EXIT_OK)


def _recomputed(wanted: Wanted) -> Paper:
    """One paper, its page and document written before the next begins."""
    output.tell(f"{wanted.name}: {REPRODUCTIONS[wanted.name][1]}")
    begin_s = time.monotonic()
    try:
        done = reproduce(wanted.name, wanted.quick, output.tell)
        output.write(wanted, done.page(), done.document())
    except LlmcacheError as error:
        report(error)
        return Paper(wanted.name, time.monotonic() - begin_s, error=error)
    except Exception as error:  # noqa: BLE001 - shown whole; a bug in one paper does not take away the others
        traceback.print_exc()
        bug = _Bug(f"{type(error).__name__}: {error}", "a bug in llmcache, shown on stderr: please report it")
        return Paper(wanted.name, time.monotonic() - begin_s, error=bug)
    return Paper(wanted.name, time.monotonic() - begin_s, done)


def document(papers: Sequence[Paper], quick: bool) -> dict[str, Any]:
    """Returns everything for programs, ready for JSON."""
    return {"schema": SCHEMA, "quick": quick, "papers": {paper.name: paper.as_json() for paper in papers}}


def page(papers: Sequence[Paper]) -> str:
    """Returns the index: verdicts by paper, then every claim with its verdicts."""
    columns = ["paper", "what of it", *(verdict.value for verdict in Verdict), "seconds"]
    table = Table("Verdicts by paper; a claim has one for each variant it speaks of", columns, list(map(_row, papers)), 0)
    sections = [Section("Verdicts", [table])]
    sections += [Section(paper.name, [_claims(paper.done)]) for paper in papers if paper.done is not None]
    return html_page("Four papers, recomputed", LEAD, sections)


def _row(paper: Paper) -> list[Cell]:
    if paper.done is None:
        assert paper.error is not None
        return [paper.name, f"not recomputed: {paper.error.message}", *("" for _ in Verdict), paper.seconds]
    counts = [paper.verdicts[verdict] for verdict in Verdict]
    return [Link(paper.name, f"{paper.name}.html"), REPRODUCTIONS[paper.name][1], *counts, paper.seconds]


def _claims(done: Reproduction) -> Table:
    rows: list[list[Cell]] = []
    for about, judged in done.claims.items():
        for claim in judged:
            for variant, finding in claim.findings.items():
                verdict = Badge(finding.verdict.value, finding.verdict.kind)
                rows.append([f"{about} ({done.kinds[about]})", f"“{claim.quote}”", variant, verdict, finding.ours])
    return Table("Every claim", ["about", "paper", "variant", "verdict", "here"], rows)


def show(papers: Sequence[Paper], wanted: Wanted) -> None:
    """Print a line for each paper, and where the pages are."""
    console = Console(highlight=False, markup=False)
    table = plain_table("paper", *(verdict.value for verdict in Verdict), "seconds")
    for paper in papers:
        counts = [Text(str(paper.verdicts[verdict]), COLOURS[verdict]) for verdict in Verdict]
        cells = counts if paper.done is not None else [Text("failed"), Text(""), Text("")]
        table.add_row(paper.name, *cells, f"{paper.seconds:.0f}")
    console.print(table)
    for target in wanted.targets:
        console.print(f"written: {target}", soft_wrap=True)
