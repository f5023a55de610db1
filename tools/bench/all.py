"""Run all benchmarks in sequence, and write every target and its figure to all.json and all.html.

If a benchmark fails, the others still run. All output goes to stderr. Exit codes: 0 all targets are met, 1 a target is
missed, 2 usage error, 3 a benchmark failed or has no results.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markdown import Markdown

from llmcache.errors import LlmcacheError, UsageError
from llmcache.report.html import Badge, Cell, Facts, HtmlBlock, Section, Table, Text, html_page

from . import results
from .demo import make_model
from .harness import MODELS, ROOT, one_interrupt, report
from .results import Document, Target, exit_code, markdown, of_json, targets_of

SCHEMA = "llmcache-bench-all/2"
MODEL_SIZE = "700M"
FAILED = 3
MODEL = "MODEL"
"""Placeholder for the path of the demo's model in a command."""
BUSY_SHARE = 0.1
"""A machine counts as busy if other processes use more than this share of the CPU time."""


@dataclass(frozen=True)
class SuiteEntry:
    """One benchmark, with its options for a full run and for a quick run.

    `quick` None: there is no quick run. `on_request`: the benchmark takes so long that it is run only if it is named.
    """

    name: str
    about: str
    words: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = ("--quick",)
    on_request: bool = False

    def command(self, quick: bool = False) -> str:
        """Return the command line of a full or quick run, for display."""
        return " ".join((f"tools/bench {self.name}", *((self.quick or ()) if quick else self.words)))


BENCHMARKS = (
    SuiteEntry(
        "mount",
        "llmcachefs and the page cache: same memory, same storage",
        ("--model", MODEL, "--repeat", "2", "--mode", "inplace", "--mode", "steer"),
        ("--model", MODEL, "--quick", "--repeat", "1", "--mode", "inplace", "--mode", "steer"),
    ),
    SuiteEntry("zoo", "mounts and the page cache: bytes read, for many access patterns", on_request=True),
    SuiteEntry("demotime", "run time of a second tools/demo", quick=None),
    SuiteEntry("startup", "start-up time of every command"),
    SuiteEntry(
        "trace",
        "overhead of tracing, and lost events",
        ("--rounds", "3", "--pairs", "15", "--seconds", "1"),
        ("--rounds", "1", "--pairs", "3", "--seconds", "0.3"),
    ),
    SuiteEntry("simulate", "speed and memory of the simulator", ("--repeat", "3")),
    SuiteEntry("policies", "hit ratios on generated traces (not timed)", quick=("--policy", "lru,belady,llmcache")),
    SuiteEntry("kv", "kernels and spill file of the KV manager"),
    SuiteEntry("kvstore", "a million tokens in the KV store"),
    SuiteEntry("kvpipeline", "lookahead, pools and near-data scoring"),
    SuiteEntry("papers", "measurements for the papers, and claims with a target", ("--measure",), quick=()),
    SuiteEntry("kvindex", "trees of keys and a scan of all keys", ("--rounds", "2")),
    SuiteEntry("kvtransformers", "SpillCache and DynamicCache: memory and time"),
    SuiteEntry("prefix", "prompts of llama.cpp restored from disk"),
    SuiteEntry("kvanswers", "answers of a model at several KV budgets (not timed)"),
    SuiteEntry("edram", "speed of the accelerator model", ("--repeat", "5"), quick=("--repeat", "1")),
    SuiteEntry(
        "size",
        "formula (1), simulator and mount: the cache size at which stalls begin",
        ("--repeat", "1"),
        quick=("--quick", "--repeat", "1", "--modes", "steer"),
    ),
    SuiteEntry("kvmodels", "SpillCache with real models: loss, answers, time, memory", on_request=True),
    SuiteEntry("testtime", "ten runs of tools/test", quick=None, on_request=True),
)
NAMES = tuple(one.name for one in BENCHMARKS)


# One benchmark in its own process; the load of the machine is recorded with its results


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def run(benchmark: SuiteEntry, directory: Path, quick: bool, model: Path | None) -> Document:
    """Run one benchmark and write its JSON into `directory`; return the JSON. LlmcacheError if there are no complete
    results.

    `run` is added to the file: command, time and load. The output of the benchmark goes to stderr. After an interrupt, the
    benchmark unmounts before this function raises.
    """
    words = [str(model) if word == MODEL else word for word in (benchmark.quick or () if quick else benchmark.words)]
    new = directory / f".{benchmark.name}.json.new"
    command = [sys.executable, str(ROOT / "tools" / "bench"), benchmark.name, *words, "--json", str(new)]
    about: dict[str, Any] = {"command": benchmark.command(quick), "quick": quick, "started": now()}
    about["busy_share"] = psutil.cpu_percent(3.0) / 100
    load, begin = os.getloadavg()[0], time.monotonic()
    try:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if not new.exists():
            raise LlmcacheError(f"{benchmark.name} ended with exit code {code} and without results")
        document = results.read(new)
        if code not in (0, 1) or not document.get("complete", True):
            partial = new.replace(directory / f"{benchmark.name}.partial.json")
            raise LlmcacheError(f"{benchmark.name} ended early with exit code {code}; partial results are in {partial}")
    finally:
        new.unlink(missing_ok=True)
    about |= {"seconds": round(time.monotonic() - begin, 1), "load": [load, os.getloadavg()[0]]}
    document = {**document, "run": about}
    results.write(directory / f"{benchmark.name}.json", document)
    return document


# The combined results, and their page


def read(directory: Path) -> dict[str, Document]:
    """Return the JSON of each benchmark that has results in `directory`, by name."""
    paths = {one.name: directory / f"{one.name}.json" for one in BENCHMARKS}
    return {name: results.read(path) for name, path in paths.items() if path.exists()}


def whole(directory: Path, errors: Mapping[str, str], started: str) -> Document:
    """Return all.json: the machines (without commits; several if results are from several machines), runs, and all targets.

    `errors`: the messages of benchmarks that failed. `started`: when the whole run began (UTC).
    """
    documents = read(directory)
    machines: list[Document] = []
    runs: list[Document] = []
    for one in BENCHMARKS:
        row: Document = {"benchmark": one.name, "command": one.command(), "error": errors.get(one.name)}
        if document := documents.get(one.name):
            machine = dict(document["machine"])
            about = {key: machine.pop(key) for key in ("commit", "versions")}
            machines += [] if machine in machines else [machine]
            runs.append({**row, "recorded": True, **about, **document.get("run", {})})
        else:
            runs.append({**row, "recorded": False})
    targets = [
        {"benchmark": name, **target.to_json()} for name, document in documents.items() for target in targets_of(document)
    ]
    return {"schema": SCHEMA, "started": started, "machines": machines, "runs": runs, "bars": targets}


def write(document: Document, directory: Path) -> None:
    results.write(directory / "all.json", document)
    results.write_text(directory / "all.html", page(document))


def reached(document: Document) -> tuple[int, int]:
    """Return the number of targets that are met, and the number of all targets."""
    targets = targets_of(document)
    return sum(target.passed for target in targets), len(targets)


def table(document: Document) -> str:
    """Return the number of targets that are met, and a table of those that are missed."""
    rows = [[target.what, target.kind, target.shown, target.wanted] for target in targets_of(document) if not target.passed]
    about = "{} of {} targets are met.".format(*reached(document))
    return about + ("\n\n" + markdown(["missed", "kind", "value", "target"], rows, texts=(0, 1)) if rows else "\n")


def page(document: Document) -> str:
    good, count = reached(document)
    lead = (
        "A target is a limit that the project sets for a figure. "
        f"{good} of {count} targets are met, {count - good} are missed."
    )
    if missing := [run["benchmark"] for run in document["runs"] if not run["recorded"]]:
        lead += f" Without results: {', '.join(missing)}."
    return html_page("llmcache: benchmark results and targets", lead, [*_targets(document), _conditions(document)])


def _targets(document: Document) -> list[Section]:
    every = [(one["benchmark"], of_json(one)) for one in document["bars"]]
    rows: list[list[Cell]] = []
    each: list[HtmlBlock] = []
    for one in BENCHMARKS:
        targets = [(name, target) for name, target in every if name == one.name]
        missed = sum(not target.passed for _, target in targets)
        verdict = Badge("all met", "good") if targets and not missed else Badge(f"{missed} missed", "fair")
        rows.append([one.about, len(targets) - missed, missed, verdict if targets else Badge("no results", "bad")])
        if targets:
            each.append(_targets_table(f"{one.about} (tools/bench {one.name})", targets))
    missing = [(name, target) for name, target in every if not target.passed]
    summary: list[HtmlBlock] = [
        Table("Targets by benchmark", ["benchmark", "met", "missed", ""], rows),
        *([_targets_table("Missed targets", missing)] if missing else []),
        Text("Measured: on the machine below. Emulated: measured there with an emulated accelerator or SSD.", True),
        Text("Modelled: computed. A figure 'time / modelled bound' divides a measured time by a modelled one.", True),
    ]
    return [Section("Summary", summary), Section("Targets", each)]


def _targets_table(caption: str, targets: Iterable[tuple[str, Target]]) -> Table:
    rows: list[list[Cell]] = []
    for name, target in targets:
        sense, _, number = target.wanted.partition(" ")
        limit = {"<=": "≤", ">=": "≥"}.get(sense, sense) + number  # no space, so that the line does not break here
        badge = Badge("met", "good") if target.passed else Badge("MISSED", "bad")
        rows.append([target.what, target.shown, limit, badge, target.kind, target.command or f"tools/bench {name}"])
    return Table(caption, ["figure", "value", "target", "", "kind", "command"], rows)


def _conditions(document: Document) -> Section:
    versions: dict[str, set[str]] = {}
    for run in document["runs"]:
        for name, version in run.get("versions", {}).items():
            versions.setdefault(name, set()).add(str(version))
    columns = ["benchmark", "", "started, UTC", "s", "load before, after", "busy before", "commit"]
    note = (
        "Load: one-minute load average before and after the run; the first one includes part of the previous benchmark. "
        f"Busy: share of CPU time in use in the three seconds before the run; above {BUSY_SHARE:.0%}, the machine was busy."
    )
    blocks: list[HtmlBlock] = [
        *(Facts(_facts(machine)) for machine in document["machines"]),
        Table("Runs", columns, [_run_row(run) for run in document["runs"]], digits=0),
        Text(note, True),
        Facts([(name, ", ".join(sorted(each))) for name, each in sorted(versions.items())]),
    ]
    return Section("Conditions", blocks)


def _run_row(run: Document) -> list[Cell]:
    if not run["recorded"]:
        return [run["command"], Badge(run["error"] or "not run", "bad"), "", "", "", "", ""]
    if run["error"]:
        state = Badge(run["error"], "bad")
    elif run.get("quick"):
        state = Badge("quick run", "fair")
    elif "busy_share" not in run:
        state = Badge("load not recorded", "fair")
    else:
        state = Badge("machine was busy", "fair") if run["busy_share"] > BUSY_SHARE else Badge("quiet", "good")
    load = " ".join(f"{one:.1f}" for one in run.get("load", []))
    busy = f"{run['busy_share']:.0%}" if "busy_share" in run else ""
    started = run.get("started", "")[:16].replace("T", " ")
    return [run["command"], state, started, run.get("seconds", ""), load, busy, run["commit"] or ""]


def _facts(machine: Document) -> list[tuple[str, str]]:
    device = machine["device"]
    return [
        ("CPUs", f"{machine['cpus']}, {machine['cpu']}"),
        ("memory", f"{machine['memory_bytes'] / 1e9:.1f} GB"),
        ("kernel", f"Linux {machine['kernel']}"),
        ("device", f"{device['name']}, read-ahead {device['read_ahead_kb']} KiB, scheduler {device['scheduler']}"),
        ("Python", machine["python"]),
    ]


# The command


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line; UsageError for options that cannot be combined. `out`: the directory to write to."""
    parser = argparse.ArgumentParser(prog="tools/bench all", description=__doc__)
    named = ", ".join(one.name for one in BENCHMARKS if one.on_request)
    every = f"benchmarks to run: {', '.join(NAMES)} [all except {named}]"
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAME,…", help=every)
    parser.add_argument("--quick", action="store_true", help="smaller and shorter runs, not comparable with the targets")
    parser.add_argument(
        "-o", dest="out", type=Path, help="directory for the JSON and the page [build/bench; with --from, its DIR]"
    )
    parser.add_argument("--force", action="store_true", help="replace existing results")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run and keep its results")
    again = "run nothing; make the page from the JSON in DIR"
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help=again)
    args = parser.parse_args(argv)
    args.out = args.out or args.source or ROOT / "build" / "bench"
    for name in args.only:
        if name not in NAMES:
            raise UsageError(f"--only: unknown benchmark {name!r}", f"the benchmarks are {', '.join(NAMES)}")
    if args.source and (args.only or args.resume or args.quick):
        raise UsageError("--from cannot be combined with --only, --quick or --resume", "--from runs no benchmark")
    if args.resume and args.quick:
        raise UsageError("--quick and --resume exclude each other", "repeat the quick run")
    if args.quick and args.out.resolve() == results.DIRECTORY:
        raise UsageError("-o: results of --quick are not recorded", "leave --quick out, or choose another directory")
    return args


def run_all(args: argparse.Namespace, say: Console) -> tuple[Document, bool]:
    """Run the selected benchmarks, writing all.json and all.html after each; return all results, and whether any failed."""
    out, started, done = args.out, now(), set()
    if args.resume:
        if not (out / "all.json").exists():
            raise UsageError(f"--resume: {out} has no interrupted run", "leave --resume out")
        started = str(results.read(out / "all.json")["started"])
        runs = {name: document.get("run", {}) for name, document in read(out).items()}
        done = {name for name, run in runs.items() if run.get("started", "") >= started and not run.get("quick")}
    wanted = [
        one for one in BENCHMARKS if (one.name in args.only if args.only else not one.on_request) and one.name not in done
    ]
    benchmarks = [one for one in wanted if one.quick is not None or not args.quick]
    existing = [one.name for one in benchmarks if (out / f"{one.name}.json").exists()]
    if existing and not (args.force or args.resume):
        raise UsageError(
            f"{out} already has results of {', '.join(existing)}", "--force replaces them, -o DIR writes elsewhere"
        )
    out.mkdir(parents=True, exist_ok=True)
    errors: dict[str, str] = {}
    model = None
    if any(MODEL in one.words for one in benchmarks):  # the demo's model, generated once
        say.print(f"model: {MODELS}", soft_wrap=True)
        model = make_model(MODELS, MODEL_SIZE)
    write(whole(out, errors, started), out)
    for number, one in enumerate(benchmarks, 1):
        say.rule(f"{number} of {len(benchmarks)}: {one.name}", align="left")
        try:
            about = run(one, out, args.quick, model)["run"]
        except (LlmcacheError, OSError, ValueError) as error:
            errors[one.name] = str(error)
            say.print(f"{one.name} FAILED: {error}", soft_wrap=True)
        else:
            busy = ", on a BUSY machine" if about["busy_share"] > BUSY_SHARE else ""
            before, after = about["load"]
            say.print(f"{one.name}: {about['seconds']:.0f} s, load {before:.1f} to {after:.1f}{busy}", soft_wrap=True)
        write(whole(out, errors, started), out)
    return whole(out, errors, started), bool(errors)


def recorded(source: Path) -> tuple[Document, bool]:
    """Return the results in `source`, and whether a benchmark that is not `on_request` has none."""
    before = source / "all.json"
    document = whole(source, {}, results.read(before)["started"] if before.exists() else "")
    found = {run["benchmark"] for run in document["runs"] if run["recorded"]}
    if not found:
        raise UsageError(f"--from: {source} has no results", f"result files are named {NAMES[0]}.json and so on")
    return document, any(not one.on_request and one.name not in found for one in BENCHMARKS)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 1, 2 or 3, as in the module docstring."""
    say = Console(highlight=False, stderr=True, width=None if sys.stderr.isatty() else 120)
    try:
        with one_interrupt():
            args = arguments(argv)
            document, failed = recorded(args.source) if args.source else run_all(args, say)
    except LlmcacheError as error:
        report("tools/bench all", error)
        return error.exit_code
    except KeyboardInterrupt:
        print("tools/bench all: interrupted; --resume continues", file=sys.stderr)
        return FAILED
    args.out.mkdir(parents=True, exist_ok=True)
    write(document, args.out)
    say.print(Markdown(table(document)))
    say.print("{} of {} targets met: {}".format(*reached(document), args.out / "all.html"), soft_wrap=True)
    return FAILED if failed else exit_code(targets_of(document))
