"""Every bar of every issue in one document, from the JSON of all benchmarks; and the page that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcache.report.html import Badge, Block, Cell, Facts, Section, Table, Text, html_page

from . import results
from .bars import Bar, of_document
from .held import HELD, ISSUES, Held
from .suite import BENCHMARKS, BUSY_SHARE, Benchmark

SCHEMA = "llmcache-bench-all/1"


@dataclass(frozen=True)
class Suite:
    """The JSON of each benchmark that has one, by name; why those failed that did; when all of it began (UTC)."""

    documents: Mapping[str, dict[str, Any]]
    errors: Mapping[str, str] = field(default_factory=dict)
    started: str = ""

    @property
    def bars(self) -> list[tuple[str, Bar]]:
        """Return every bar with the name of its benchmark, by issue."""
        found = [(name, bar) for name, document in self.documents.items() for bar in of_document(document)]
        return sorted(found, key=lambda each: each[1].issue)

    @property
    def missing(self) -> list[Benchmark]:
        """Return the benchmarks without results."""
        return [one for one in BENCHMARKS if one.name not in self.documents]

    def of_issue(self, issue: int) -> list[tuple[str, Bar]]:
        """Return the bars of one issue."""
        return [(name, bar) for name, bar in self.bars if bar.issue == issue]

    def document(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        return {
            "schema": SCHEMA,
            "started": self.started,
            "machines": machines(self.documents.values()),
            "runs": [_run(one, self) for one in BENCHMARKS],
            "bars": [{"benchmark": name, **bar.to_json()} for name, bar in self.bars],
            "held": [{"issue": one.issue, "what": one.what, "by": one.by} for one in HELD],
        }


def read(directory: Path, errors: Mapping[str, str] | None = None, started: str = "") -> Suite:
    """Return what the benchmarks have written into `directory`."""
    paths = {one.name: directory / f"{one.name}.json" for one in BENCHMARKS}
    documents = {name: results.read(path) for name, path in paths.items() if path.exists()}
    return Suite(documents, errors or {}, started)


def write(suite: Suite, directory: Path) -> None:
    """Write all.json and all.html."""
    results.write(directory / "all.json", suite.document())
    part = directory / "all.html.part"
    part.write_text(page(suite))
    part.replace(directory / "all.html")


def machines(documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the machines that the figures are of, without commits: one, unless they are from several."""
    found: list[dict[str, Any]] = []
    for document in documents:
        machine = {key: value for key, value in document["machine"].items() if key not in ("commit", "versions")}
        if machine not in found:
            found.append(machine)
    return found


def _run(one: Benchmark, suite: Suite) -> dict[str, Any]:
    document = suite.documents.get(one.name)
    told: dict[str, Any] = {"benchmark": one.name, "command": one.command(), "error": suite.errors.get(one.name)}
    if document is None:
        return {**told, "recorded": False}
    machine = document["machine"]
    about = {"commit": machine["commit"], "versions": machine["versions"]}
    return {**told, "recorded": True, **about, **document.get("run", {})}


def page(suite: Suite) -> str:
    """Return the page."""
    bars = [bar for _, bar in suite.bars]
    reached = sum(bar.passed for bar in bars)
    lead = (
        "A bar is a limit that the project has set for a figure. "
        f"{reached} of {len(bars)} bars of benchmarks are reached, {len(bars) - reached} are not; "
        f"{sum(1 for one in HELD if one.tests)} more are held by tests."
    )
    if suite.missing:
        lead += f" Without results: {', '.join(one.name for one in suite.missing)}."
    sections = [_overview(suite), *(_issue(suite, issue) for issue in ISSUES), _runs(suite)]
    return html_page("llmcache: what its benchmarks reach", lead, sections)


def _badge(passed: bool) -> Badge:
    return Badge("reached", "good") if passed else Badge("NOT reached", "bad")


def _overview(suite: Suite) -> Section:
    rows: list[list[Cell]] = []
    for issue, title in ISSUES.items():
        bars = [bar for _, bar in suite.of_issue(issue)]
        missed = sum(not bar.passed for bar in bars)
        verdict = Badge("all reached", "good") if bars and not missed else _missed(missed, len(bars))
        held = sum(1 for one in HELD if one.issue == issue and one.tests)
        rows.append([title, len(bars) - missed, missed, held, verdict])
    columns = ["part", "reached", "not reached", "held by tests", ""]
    blocks: list[Block] = [Table("Bars by part of the project", columns, rows)]
    missing = [(name, bar) for name, bar in suite.bars if not bar.passed]
    if missing:
        blocks.append(_bars_table("Not reached", missing))
    blocks += [
        Text("Measured: on the machine below. Emulated: also, with an emulated accelerator or SSD taking part.", True),
        Text("Modelled: computed. A time over a bound is a measured time over a modelled one.", True),
    ]
    return Section("Summary", blocks)


def _missed(missed: int, all_of_them: int) -> Badge:
    if not all_of_them:
        return Badge("no results", "bad")
    return Badge(f"{missed} not reached", "fair" if missed < all_of_them else "bad")


def _bars_table(caption: str, bars: Iterable[tuple[str, Bar]]) -> Table:
    rows: list[list[Cell]] = [
        [bar.what, bar.shown, _limit(bar), _badge(bar.passed), bar.kind, bar.command] for _, bar in bars
    ]  # fmt: skip
    return Table(caption, ["bar", "value", "limit", "", "kind", "command"], rows)


def _limit(bar: Bar) -> str:
    """Return sense and limit without a space between them, where lines would break."""
    sense, _, limit = bar.wanted.partition(" ")
    return {"<=": "≤", ">=": "≥"}.get(sense, sense) + limit


def _issue(suite: Suite, issue: int) -> Section:
    blocks: list[Block] = []
    for one in BENCHMARKS:
        bars = [(name, bar) for name, bar in suite.of_issue(issue) if name == one.name]
        if bars:
            blocks.append(_bars_table(f"{one.about} (tools/bench/{one.name})", bars))
    held = [one for one in HELD if one.issue == issue]
    if held:
        blocks.append(_held_table(held))
    return Section(ISSUES[issue], blocks)


def _held_table(held: Iterable[Held]) -> Table:
    rows: list[list[Cell]] = [
        [one.what, Badge("test", "good") if one.tests else Badge("by hand", "fair"), one.by] for one in held
    ]  # fmt: skip
    return Table("Held by tests, not by a figure", ["bar", "", "by"], rows)


def _runs(suite: Suite) -> Section:
    blocks: list[Block] = [Facts(_facts(machine)) for machine in machines(suite.documents.values())]
    rows: list[list[Cell]] = [_run_row(_run(one, suite)) for one in BENCHMARKS]
    columns = ["benchmark", "", "started, UTC", "s", "load before, after", "busy before", "commit"]
    note = (
        "Load: processes that ran or waited, mean of a minute; the one before is partly of the benchmark before. Busy: "
        f"share of the processors' time used in the three seconds before; from {BUSY_SHARE:.0%} on others worked too."
    )
    return Section("Conditions", [*blocks, Table("Runs", columns, rows, digits=0), Text(note, True), *_versions(suite)])


def _run_row(run: dict[str, Any]) -> list[Cell]:
    if not run["recorded"]:
        return [run["command"], Badge(run["error"] or "not run", "bad"), "", "", "", "", ""]
    state = Badge(run["error"], "bad") if run["error"] else Badge("quick look", "fair") if run.get("quick") else _busy(run)
    load = " ".join(f"{one:.1f}" for one in run.get("load", []))
    busy = f"{run['busy_share']:.0%}" if "busy_share" in run else ""
    started = run.get("started", "")[:16].replace("T", " ")
    return [run["command"], state, started, run.get("seconds", ""), load, busy, run["commit"] or ""]


def _busy(run: dict[str, Any]) -> Badge:
    if "busy_share" not in run:
        return Badge("load not recorded", "fair")
    return Badge("machine was busy", "fair") if run["busy_share"] > BUSY_SHARE else Badge("quiet", "good")


def _facts(machine: dict[str, Any]) -> list[tuple[str, str]]:
    device = machine["device"]
    return [
        ("processors", f"{machine['cpus']} of {machine['cpu']}"),
        ("memory", f"{machine['memory_bytes'] / 1e9:.1f} GB"),
        ("kernel", f"Linux {machine['kernel']}"),
        ("device", f"{device['name']}, read-ahead {device['read_ahead_kb']} KiB, scheduler {device['scheduler']}"),
        ("Python", machine["python"]),
    ]


def _versions(suite: Suite) -> list[Block]:
    found: dict[str, set[str]] = {}
    for document in suite.documents.values():
        for name, version in document["machine"]["versions"].items():
            found.setdefault(name, set()).add(str(version))
    return [Facts([(name, ", ".join(sorted(versions))) for name, versions in sorted(found.items())])]
