"""Run all benchmarks in sequence, and write every target and its figure to all.json and all.md.

If a benchmark fails, the others still run. All output goes to stderr. Exit codes: 0 all targets are met, 1 a target is
missed, 2 usage error, 3 a benchmark failed or has no results.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markdown import Markdown

from llmcache.errors import LlmcacheError, UsageError

from . import harness, results
from .demo import make_model
from .harness import MODELS, ROOT, check_commit, one_interrupt, report
from .results import Document, Target, about_machine, exit_code, markdown, targets_table

SCHEMA = "llmcache-bench-all/3"
MODEL_SIZE = "700M"
FAILED = 3
MODEL = "MODEL"
"""Placeholder for the path of the demo's model in a command."""
BUSY_SHARE = 0.1
"""A machine counts as busy if other processes use more than this share of the CPU time."""


@dataclass(frozen=True)
class SuiteEntry:
    """One benchmark, with its options for a full run and for a quick run.

    `on_request`: the benchmark takes so long that it is run only if it is named.
    """

    name: str
    about: str
    words: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)
    on_request: bool = False

    def command(self, quick: bool = False) -> str:
        return " ".join((f"tools/bench {self.name}", *(self.quick if quick else self.words)))


_MODES = ("--mode", "inplace", "--mode", "steer")
BENCHMARKS = (
    SuiteEntry(
        "mount",
        "llmcachefs and the page cache: same memory, same storage",
        ("--model", MODEL, "--repeat", "2", *_MODES),
        ("--model", MODEL, "--repeat", "1", *_MODES, "--quick"),
    ),
    SuiteEntry("zoo", "mounts and the page cache: bytes read, for many access patterns", on_request=True),
    SuiteEntry(
        "trace",
        "overhead of tracing, and lost events",
        ("--rounds", "3", "--pairs", "15", "--seconds", "1"),
        ("--rounds", "1", "--pairs", "3", "--seconds", "0.3"),
    ),
    SuiteEntry("simulate", "speed and memory of the simulator", ("--repeat", "3")),
    SuiteEntry("policies", "hit ratios on generated traces (not timed)", quick=("--policy", "lru,belady,llmcache")),
    SuiteEntry("kv", "kernels, spill file and store of the KV manager"),
    SuiteEntry("kvpipeline", "lookahead, pools and near-data scoring"),
    SuiteEntry("kvindex", "trees of keys and a scan of all keys", ("--rounds", "2")),
    SuiteEntry("kvtransformers", "SpillCache and DynamicCache: memory and time"),
    SuiteEntry("prefix", "prompts of llama.cpp restored from disk"),
    SuiteEntry("kvanswers", "answers of a model at several KV budgets (not timed)"),
    SuiteEntry("edram", "speed of the accelerator model", ("--repeat", "5"), quick=("--repeat", "1")),
    SuiteEntry(
        "size",
        "formula (1) and mount: the cache size at which stalls begin",
        ("--repeat", "1"),
        quick=("--quick", "--repeat", "1", "--modes", "steer"),
    ),
    SuiteEntry("kvmodels", "SpillCache with real models: loss, answers, time, memory", on_request=True),
)
NAMES = tuple(one.name for one in BENCHMARKS)


# One benchmark in its own process; the load of the machine is recorded with its results


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def run(benchmark: SuiteEntry, directory: Path, quick: bool, model: Path | None) -> Document:
    """Run one benchmark and write its JSON into `directory`; return the JSON. LlmcacheError: no complete results.

    `run` is added to the file: command, time and load. The output of the benchmark goes to stderr. After an interrupt, the
    benchmark unmounts before this function raises.
    """
    words = [str(model) if word == MODEL else word for word in (benchmark.quick if quick else benchmark.words)]
    new = directory / f".{benchmark.name}.json.new"
    command = [sys.executable, str(ROOT / "tools" / "bench"), benchmark.name, *words, "--json", str(new), "--force"]
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


def targets_of(name: str, document: Document) -> list[Target]:
    """Return the targets of the benchmark `name`, judged by its results."""
    return harness.targets_of(import_module(f"tools.bench.{name}"), document)


def read(directory: Path) -> dict[str, Document]:
    """Return the JSON of each benchmark that has results in `directory`, by name."""
    paths = {one.name: directory / f"{one.name}.json" for one in BENCHMARKS}
    return {name: results.read(path) for name, path in paths.items() if path.exists()}


def whole(directory: Path, errors: Mapping[str, str] | None = None) -> Document:
    """Return all.json: the machines (several if results are from several), the runs with their commits, and all targets.

    `errors`: the messages of benchmarks that failed.
    """
    documents, errors = read(directory), errors or {}
    machines: list[Document] = []
    runs: list[Document] = []
    for one in BENCHMARKS:
        row: Document = {"benchmark": one.name, "command": one.command(), "error": errors.get(one.name)}
        if document := documents.get(one.name):
            machine = dict(document["machine"])
            commit = machine.pop("commit")
            machines += [] if machine in machines else [machine]
            runs.append({**row, "recorded": True, "commit": commit, **document.get("run", {})})
        else:
            runs.append({**row, "recorded": False})
    targets = [
        {"benchmark": name, **target.to_json()}
        for name, document in documents.items()
        for target in targets_of(name, document)
    ]
    return {"schema": SCHEMA, "machines": machines, "runs": runs, "targets": targets}


def of_json(data: Document) -> Target:
    """Return the target in the data of `Target.to_json`; other keys are ignored."""
    values = {key: data[key] for key in Target.__dataclass_fields__ if key in data}
    return Target(**{**values, "value": float("nan") if data["value"] is None else data["value"]})


def write(document: Document, directory: Path) -> None:
    results.write(directory / "all.json", document)
    results.write_text(directory / "all.md", page(document))


def reached(document: Document) -> str:
    """Return how many of the targets are met, in words."""
    met = [target["passed"] for target in document["targets"]]
    return f"{sum(met)} of {len(met)} targets are met."


def table(document: Document) -> str:
    """Return the number of targets that are met, and a table of those that are missed."""
    missed = [of_json(one) for one in document["targets"] if not one["passed"]]
    rows = [[target.what, target.kind, target.shown, target.wanted] for target in missed]
    return reached(document) + ("\n\n" + markdown(["missed", "kind", "value", "target"], rows, (0, 1)) if rows else "\n")


def page(document: Document) -> str:
    """Return all targets, by benchmark, and the conditions of the runs."""
    parts = ["# llmcache: benchmark results and targets", table(document)]
    if missing := [run["benchmark"] for run in document["runs"] if not run["recorded"]]:
        parts.append(f"Without results: {', '.join(missing)}.")
    for one in BENCHMARKS:
        if targets := [of_json(target) for target in document["targets"] if target["benchmark"] == one.name]:
            parts += [f"## {one.about} (`tools/bench {one.name}`)", targets_table(targets)]
    parts += [
        "## Conditions",
        *map(about_machine, document["machines"]),
        markdown(
            ["benchmark", "", "started, UTC", "s", "load before, after", "commit"], map(_run_row, document["runs"]), (0, 1)
        ),
        "Load: one-minute load average before and after the run. Busy: other processes used more than "
        f"{BUSY_SHARE:.0%} of the CPU time in the three seconds before the run.",
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _run_row(run: Document) -> list[str]:
    state = run["error"] or ("" if run["recorded"] else "not run")
    if not state:
        states = {"quick run": run.get("quick"), "busy": run.get("busy_share", 0) > BUSY_SHARE}
        quiet = "quiet" if "busy_share" in run else "load not recorded"
        state = ", ".join(name for name, holds in states.items() if holds) or quiet
    load = " ".join(f"{one:.1f}" for one in run.get("load", []))
    took = f"{run['seconds']:.0f}" if "seconds" in run else ""
    started = run.get("started", "")[:16].replace("T", " ")
    return [f"`{run['command']}`", state, started, took, load, run.get("commit") or ""]


# The command


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line; UsageError for options that cannot be combined. `out`: the directory to write to."""
    parser = argparse.ArgumentParser(prog="tools/bench all", description=__doc__)
    named = ", ".join(one.name for one in BENCHMARKS if one.on_request)
    every = f"benchmarks to run: {', '.join(NAMES)} [all except {named}]"
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAME,…", help=every)
    parser.add_argument("--quick", action="store_true", help="smaller and shorter runs, not comparable with the targets")
    parser.add_argument("-o", dest="out", type=Path, help="directory for the JSON and the page [build/bench]")
    force = "replace existing results; record results of a tree that differs from its commit"
    parser.add_argument("--force", action="store_true", help=force)
    again = "run nothing; make the page from the JSON in DIR"
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help=again)
    args = parser.parse_args(argv)
    args.out = args.out or ROOT / "build" / "bench"
    for name in args.only:
        if name not in NAMES:
            raise UsageError(f"--only: unknown benchmark {name!r}", f"the benchmarks are {', '.join(NAMES)}")
    if args.source and (args.only or args.quick):
        raise UsageError("--from cannot be combined with --only or --quick", "--from runs no benchmark")
    if args.quick and args.out.resolve() == results.DIRECTORY:
        raise UsageError("-o: results of --quick are not recorded", "leave --quick out, or choose another directory")
    return args


def run_all(args: argparse.Namespace, say: Console) -> tuple[Document, bool]:
    """Run the selected benchmarks, writing all.json and all.md after each; return all results, and whether any failed."""
    out = args.out
    benchmarks = [one for one in BENCHMARKS if (one.name in args.only if args.only else not one.on_request)]
    existing = [one.name for one in benchmarks if (out / f"{one.name}.json").exists()]
    if existing and not args.force:
        hint = "--force replaces them, -o DIR writes elsewhere, --only NAME,… runs others"
        raise UsageError(f"{out} already has results of {', '.join(existing)}", hint)
    check_commit(out, args.force)
    out.mkdir(parents=True, exist_ok=True)
    errors: dict[str, str] = {}
    model = None
    if any(MODEL in one.words for one in benchmarks):  # the demo's model, generated once
        say.print(f"model: {MODELS}", soft_wrap=True)
        model = make_model(MODELS, MODEL_SIZE)
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
        write(whole(out, errors), out)
    return whole(out, errors), bool(errors)


def recorded(source: Path) -> tuple[Document, bool]:
    """Return the results in `source`, and whether a benchmark that is not `on_request` has none."""
    document = whole(source)
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
        print("tools/bench all: interrupted; --only NAME,… runs the others", file=sys.stderr)
        return FAILED
    args.out.mkdir(parents=True, exist_ok=True)
    write(document, args.out)
    say.print(Markdown(table(document)))
    say.print(f"{args.out / 'all.md'}", soft_wrap=True)
    return FAILED if failed else exit_code(map(of_json, document["targets"]))
