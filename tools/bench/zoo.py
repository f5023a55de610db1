"""Compare mounts with the page cache on many access patterns: bytes read from storage, and time.

A mount must never read much more than the page cache would, whatever a program does with a model file. Every side runs in a
cgroup with the same memory limit, which includes the mount's daemon: the clients' own memory, 16 MiB for page tables, and a
share of the bytes that the pattern uses. All sides have `read_ahead_kb` 128. Each pattern uses 700 MB or more, so that at
110 % the 64 MiB of a daemon fit as well.

By default, mounts get no --cache: they choose their budget when they start, and shrink when clients allocate memory. With
--budget given, --cache is the limit minus the clients' own memory and 64 MiB.

Targets apply to the passes after the fifth: to the bytes, to the time with --repeat 3 or more, and to the pages per row.
Model files are generated once and kept in --dir.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from llmcache.cgroup import Cgroup
from llmcache.errors import MissingRequirement, UsageError
from tools.make_model import BYTES_PER_VALUE, MoeShape, choose_shape, make_model

from . import patterns
from .harness import MODELS, turns, workplace
from .patterns import MB, PAGE, WARMUP, Pattern, Space
from .results import Document, Target, markdown, worst
from .routing import layout_of
from .runner import MIB, ROOM_BYTES, ClientRun, client, loop_file, problems_of, ready, run_clients
from .sides import MOUNT_OVERHEAD_BYTES, Mounted, Plain, read_ahead

SCHEMA = "llmcache-bench-zoo/1"
MODES = ("inplace", "steer", "arena")
SHARES = (0.3, 0.6, 0.9, 1.1)
QUICK_SHARES = (0.6, 1.1)
READ_AHEAD_KB = 128
PAGE_CACHE = Plain("page-cache")
STAGE_TIMEOUT_S = 240.0

BYTES_OVER_PAGE_CACHE = 1.05
ALLOWED_SHARE = 0.01
"""The share of the loop that a mount may additionally read in a pass."""
TIMED_REPEATS = 3
PAGES_PER_ROW = 1.2

Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """The files of a pattern, and the function that makes it from their paths."""

    files: tuple[str, ...]
    make: Callable[..., Pattern]
    quick: bool = False


def space_of(path: Path) -> Space:
    """Return the range of a model that tokens read, without the embedding; for other files, the whole file."""
    if path.suffix != ".gguf":
        return Space(path.name, 0, path.stat().st_size)
    loop = [region for region in layout_of(path).regions() if region.role == "loop"]
    first = min(region.first_byte for region in loop)
    return Space(path.name, first, max(region.end for region in loop) - first)


def over_spaces(make: Callable[..., Pattern], **options: Any) -> Callable[..., Pattern]:
    """Return a function that makes the pattern from paths instead of spaces."""
    return lambda *paths: make(*map(space_of, paths), **options)


def dense(size_bytes: int, seed: int = 0) -> Callable[[Path], object]:
    return lambda path: make_model(path, choose_shape(size_bytes, BYTES_PER_VALUE["gguf"], None, False), "gguf", 1, seed)


def moe(size_bytes: int) -> Callable[[Path], object]:
    shape = choose_shape(size_bytes, BYTES_PER_VALUE["gguf"], None, False, MoeShape(64, 4, 500_000))
    return lambda path: make_model(path, shape, "gguf", 1, 0)


FILES: dict[str, Callable[[Path], object]] = {
    "model.gguf": dense(800 * MB),
    "large.gguf": dense(2000 * MB),
    "first.gguf": dense(430 * MB, 1),
    "second.gguf": dense(430 * MB, 2),
    "draft.gguf": dense(120 * MB),
    "target.gguf": dense(690 * MB),
    "moe.gguf": moe(800 * MB),
    "table.bin": lambda path: loop_file(path, 1 << 30),
}
CASES = {
    "full loop": Case(("model.gguf",), over_spaces(patterns.full_loop), quick=True),
    "last 40 %": Case(("large.gguf",), over_spaces(patterns.tail_loop), quick=True),
    "8 of every 20 MB": Case(("large.gguf",), over_spaces(patterns.strided_loop)),
    "set moves at pass 20": Case(("large.gguf",), over_spaces(patterns.moving_loop)),
    "two models in turn": Case(
        ("first.gguf", "second.gguf"), lambda *paths: patterns.alternating_loops([*map(space_of, paths)])
    ),
    "load once, read": Case(("model.gguf",), over_spaces(patterns.load_once, how="read")),
    "load once, mmap": Case(("model.gguf",), over_spaces(patterns.load_once, how="mmap"), quick=True),
    "load once, O_DIRECT": Case(("model.gguf",), over_spaces(patterns.load_once, how="direct")),
    "30 % beside 70 %": Case(("model.gguf",), over_spaces(patterns.divided_loop)),
    "rows, plain mapping": Case(("model.gguf", "table.bin"), over_spaces(patterns.rows_beside_loop)),
    "rows, MADV_RANDOM": Case(("model.gguf", "table.bin"), over_spaces(patterns.rows_beside_loop, advised=True)),
    "prefill and decode": Case(("moe.gguf",), lambda path: patterns.prefill_and_decode(path.name, layout_of(path)), True),
    "draft and target": Case(("draft.gguf", "target.gguf"), over_spaces(patterns.draft_and_target)),
    "four forks, one descriptor": Case(("model.gguf",), over_spaces(patterns.forked_readers)),
    "restart": Case(("model.gguf",), over_spaces(patterns.restarted_loop)),
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir", type=Path, default=MODELS / "zoo", help="directory where the model files are kept [%(default)s]"
    )
    parser.add_argument("--match", default="", help="run only patterns whose name contains this text")
    parser.add_argument(
        "--mode", choices=MODES, action="append", default=[], help="mode of llmcachefs; repeatable [all three]"
    )
    shares = "memory, as a share of the bytes that the pattern uses; repeatable [0.3, 0.6, 0.9, 1.1]"
    parser.add_argument("--share", type=float, action="append", default=[], help=shares)
    budgets = "settled: mounts choose their budget; given: --cache sets it [%(default)s]"
    parser.add_argument("--budget", choices=("settled", "given"), default="settled", help=budgets)
    parser.add_argument("--quick", action="store_true", help="run four patterns with shares 0.6 and 1.1")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each side, interleaved [%(default)s]")


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    names = [name for name, case in CASES.items() if args.match in name and (case.quick or not args.quick)]
    if not names:
        raise UsageError(f"--match: no pattern name contains {args.match!r}", f"the patterns are {', '.join(CASES)}")
    sides: list[Plain | Mounted] = [
        PAGE_CACHE,
        *(Mounted(options=("--mode", mode), name=mode) for mode in args.mode or MODES),
    ]
    shares = args.share or (QUICK_SHARES if args.quick else SHARES)
    args.dir.mkdir(parents=True, exist_ok=True)
    measured: list[Result] = []
    with alone_in(args.dir):
        for name in names:
            case = CASES[name]
            for file in case.files:
                FILES[file](args.dir / file)
            with workplace(args.dir) as place:
                zoo = Zoo(place, [args.dir / file for file in case.files], case.make, console.print)
                for share in shares:
                    console.print(f"{name}, {share:.0%}")
                    measured.append({"name": name, **zoo.measure(share, sides, args.repeat, args.budget)})
                    yield {"complete": False, "quick": args.quick, "results": measured}
    yield {"complete": True, "quick": args.quick, "results": measured}


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Lock the directory of the files. A second run would charge their pages to its own cgroup."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"another tools/bench zoo uses the files in {directory}"
            raise MissingRequirement(message, "wait until it ends, or choose another --dir") from error
        yield
    finally:
        os.close(fd)


class Zoo:
    """One pattern, with its files alone in a directory to mount."""

    def __init__(self, place: Path, files: Sequence[Path], make: Callable[..., Pattern], say: Callable[[str], None]) -> None:
        self.source, self.scratch, self.say = place / "source", place / "scratch", say
        self.source.mkdir()
        self.scratch.mkdir()
        for file in files:
            os.link(file, self.source / file.name)
        self.pattern = make(*(self.source / file.name for file in files))
        for number, stage in enumerate(self.pattern.stages):
            self._plan(number).write_text(json.dumps(stage.to_json()))
        self.anon_bytes = self._calibrate()

    def _plan(self, stage: int) -> Path:
        return self.scratch / f"stage-{stage}.json"

    def _calibrate(self) -> int:
        with read_ahead(self.source, READ_AHEAD_KB), Cgroup("anon", directory=self.source) as group:
            return max(one.anon_bytes for one in self._clients(group, self.source))

    def _clients(self, group: Cgroup, root: Path) -> list[ClientRun]:
        paths = [root / name for name in self.pattern.files]
        commands = [client("zoo_reader", self._plan(stage), *paths) for stage in range(len(self.pattern.stages))]
        return [run_clients(group, [command], STAGE_TIMEOUT_S)[0] for command in commands]

    def measure(self, share: float, sides: Sequence[Plain | Mounted], repeat: int, budget: str) -> Result:
        """Return the runs of all sides with memory for `share` of the used bytes."""
        pattern = self.pattern
        cap = -(-(self.anon_bytes + ROOM_BYTES + int(share * pattern.used_bytes)) // MIB) * MIB
        cache = cap - self.anon_bytes - MOUNT_OVERHEAD_BYTES if budget == "given" else None
        runs = []
        for number, side in turns(sides, repeat):
            runs.append(self._run(side, number, cap, cache))
            self.say(_progress(runs[-1]))
        return {
            "share": share,
            "files": pattern.files,
            "passes": pattern.passes(),
            "used_bytes": pattern.used_bytes,
            "loop_bytes": pattern.loop_bytes,
            "rows": None if pattern.rows is None else {"first": pattern.rows.first, "count": pattern.rows.count},
            "anon_bytes": self.anon_bytes,
            "cap_bytes": cap,
            "cache_bytes": cache,
            "runs": runs,
        }

    def _run(self, side: Plain | Mounted, number: int, cap: int, cache: int | None) -> Document:
        with read_ahead(self.source, READ_AHEAD_KB), ready(side, self.source, self.scratch, cache, cap) as (group, opened):
            clients = self._clients(group, opened.root)
            stats, usage = opened.stats(), group.usage()
        steps = [step for one in clients for step in one.steps]
        is_silent = isinstance(side, Mounted) and stats is None
        return {
            "side": side.name,
            "repeat": number,
            "seconds": [step.seconds for step in steps],
            "storage_bytes": [step.storage_bytes for step in steps],
            "problems": problems_of(clients, usage.oom_kills) + ["the mount did not respond"] * is_silent,
            "stats": stats,
        }


def _progress(run: Document) -> str:
    read = " ".join(f"{one / MB:.0f}" for one in run["storage_bytes"][:24])
    return f"  {run['side']:10s} {sum(run['seconds']):6.1f} s | MB per pass {read} {'; '.join(run['problems'])}"


# The figures of a result, and its targets


def modes_of(result: Result) -> list[str]:
    return list(dict.fromkeys(run["side"] for run in result["runs"] if run["side"] != PAGE_CACHE.name))


def per_pass(result: Result, side: str, what: str) -> float:
    """Return the mean of a figure over the judged passes, the median of the repeats; nan if a run is incomplete.

    `what`: "seconds" or "storage_bytes".
    """
    return _median(statistics.fmean(run[what][WARMUP:]) for run in _runs(result, side))


def pages_per_row(result: Result, side: str) -> float:
    """Return the pages read from storage per row of one page, see `patterns.rows_beside_loop`."""
    first, count = result["rows"]["first"], result["rows"]["count"]
    read = [run["storage_bytes"] for run in _runs(result, side)]
    return _median((statistics.fmean(one[first:]) - statistics.fmean(one[WARMUP:first])) / count / PAGE for one in read)


def _runs(result: Result, side: str) -> list[Document]:
    runs = [run for run in result["runs"] if run["side"] == side]
    return [] if any(len(run["seconds"]) < result["passes"] for run in runs) else runs


def _median(values: Iterator[float]) -> float:
    return statistics.median([*values] or [math.nan])


def allowed_bytes(result: Result) -> float:
    """Return the bytes from storage per pass that a mount may read."""
    own = per_pass(result, PAGE_CACHE.name, "storage_bytes")
    return BYTES_OVER_PAGE_CACHE * own + ALLOWED_SHARE * float(result["loop_bytes"])


def targets(document: Document) -> list[Target]:
    """Return the targets: no client failed on a mount, then the worst pattern of each mode."""
    results: list[Result] = document["results"]
    wrong = sum(len(run["problems"]) for result in results for run in result["runs"] if run["side"] in modes_of(result))
    found = [Target("problems", f"hangs, failures and OOM kills with a mount, in {len(results)} cases", wrong, "<=", 0)]
    for mode in dict.fromkeys(mode for result in results for mode in modes_of(result)):
        command = f"tools/bench zoo --mode {mode}"
        cases = [(f"{one['name']}, {one['share']:.0%}", one) for one in results if mode in modes_of(one)]
        read = ((name, per_pass(one, mode, "storage_bytes") / allowed_bytes(one)) for name, one in cases)
        what = f"{mode}: bytes read / (1.05 x page cache's bytes + 1 % of the loop)"
        found += worst(f"bytes.{mode}", what, read, "<=", 1, command=command)
        rows = (
            (name, pages_per_row(one, mode))
            for name, one in cases
            if one["rows"] is not None and one["share"] > 1  # elsewhere, the reads of the loop vary by more
        )
        found += worst(f"rows.{mode}", f"{mode}: pages read per row of one page", rows, "<=", PAGES_PER_ROW, command=command)
        repeats = [len({run["repeat"] for run in one["runs"]}) for _, one in cases]
        if mode == "inplace" and min(repeats) >= TIMED_REPEATS:
            ratios = (
                (name, per_pass(one, mode, "seconds") / per_pass(one, PAGE_CACHE.name, "seconds")) for name, one in cases
            )
            found += worst("time.inplace", "inplace: time / page cache's time", ratios, "<=", 1.05)
    return found


def table(document: Document) -> str:
    head = ["pattern", "memory", "mode", "page cache MB", "mount MB", "bytes / limit", "page cache s"]
    head += ["mount s", "time ratio", "page cache pages per row", "mount pages per row", "problems"]
    rows = [_row(result, mode) for result in document["results"] for mode in modes_of(result)]
    about = (
        "Means per pass after the fifth. Bytes / limit: the mount's bytes / (1.05 x page cache's bytes + 1 % of the loop); "
        "the target is at most 1, and larger values are bold. Time ratio: the mount's time / page cache's time.\n\n"
    )
    return about + markdown(head, rows, texts=(0, 2, 11))


def _row(result: Result, mode: str) -> list[str]:
    sides = (PAGE_CACHE.name, mode)
    read, seconds = ([per_pass(result, side, what) for side in sides] for what in ("storage_bytes", "seconds"))
    ratio = read[1] / allowed_bytes(result)
    rows = ["", ""] if result["rows"] is None else [_shown(pages_per_row(result, side), 2) for side in sides]
    return [
        result["name"],
        f"{result['share']:.0%}",
        mode,
        *(_shown(one / MB, 1) for one in read),
        _shown(ratio, 2) if ratio <= 1 else f"**{_shown(ratio, 2)}**",
        *(_shown(one, 3) for one in seconds),
        _shown(seconds[1] / seconds[0], 2),
        *rows,
        "; ".join(problem for run in result["runs"] if run["side"] == mode for problem in run["problems"]),
    ]


def _shown(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "-"
