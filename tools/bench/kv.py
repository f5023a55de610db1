"""Kernels and spill file of the KV manager: kernels on one core, in turns with plain reading of the same memory."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from llmcache.kv.kernels import score, top

from .harness import measured_apart, workplace
from .results import Bar, Document

SCHEMA = "llmcache-bench-kv/2"
TOKENS, DIM, HEADS = 65536, 128, 8
SPILLED = 1 << 20  # tokens of one layer in the spill file
ALPHA = 0.2  # hillinfer.txt, section 4.2: the importance rate of its experiments
SCORING_BAR = 0.5  # of the bandwidth of reading
TOP_BAR = 0.2  # of the time of scoring
FETCH_BAR = 0.8  # of what the same reads take without a spill file
MEMORY_BAR = 1 << 30
LINK_BAR = 1 / 50  # of the bytes that scoring on the host moves
MIB = 1 << 20

Keys = NDArray[Any]


@numba.njit(nogil=True, cache=True)
def _sum(words):  # type: ignore[no-untyped-def]
    """Reads everything: what no kernel that must see all keys can undercut."""
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


@dataclass
class Timing:
    """One measured loop over all heads; `bar`: what its figure must reach, if anything."""

    name: str
    run: Callable[[], object]
    key_bytes: int
    bar: float | None = None
    seconds: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Run it once."""
        start = time.perf_counter()
        self.run()
        self.seconds.append(time.perf_counter() - start)

    @property
    def median_s(self) -> float:
        """Return the median time."""
        return statistics.median(self.seconds)


def heads(dtype: str, tokens: int) -> list[Keys]:
    """Return the keys of `HEADS` heads, each [1, 1, tokens, DIM]: together far more than the caches of a core."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(HEADS):
        keys = random.standard_normal((1, 1, tokens, DIM), dtype=np.float32)
        if dtype == "bfloat16":
            found.append((keys.view(np.uint32) >> 16).astype(np.uint16))
        elif dtype == "int8":
            found.append(np.clip(keys * 40, -127, 127).astype(np.int8))
        else:
            found.append(keys.astype(dtype))
    return found


def _reading(keys: list[Keys]) -> Callable[[], object]:
    return lambda: [_sum(head.view(np.uint64).reshape(-1)) for head in keys]


def _scoring(keys: list[Keys], queries: int) -> Callable[[], object]:
    asked = np.random.default_rng(1).standard_normal((1, queries, DIM), dtype=np.float32)
    ones = np.ones(keys[0].shape[:3], np.float32)
    scales = ones if keys[0].dtype == np.int8 else None
    return lambda: [score(asked, head, scales, threads=1) for head in keys]


def _choosing(keys: list[Keys], k: int) -> Callable[[], object]:
    asked = np.random.default_rng(1).standard_normal((1, 1, DIM), dtype=np.float32)
    scores = [score(asked, head, threads=1) for head in keys]
    return lambda: [top(one, k, threads=1) for one in scores]


def cases(tokens: int) -> list[Timing]:
    """Return what is measured."""
    found = []
    for dtype in ("float16", "bfloat16", "int8", "float32"):
        keys = heads(dtype, tokens)
        size = sum(head.nbytes for head in keys)
        found.append(Timing(f"read {dtype}", _reading(keys), size))
        for queries in (1, 4):
            bar = SCORING_BAR if dtype == "float16" and queries == 1 else None
            found.append(Timing(f"score {dtype}, {queries} a head", _scoring(keys, queries), size, bar))
        if dtype == "float16":
            found.append(Timing("top 256", _choosing(keys, 256), size, TOP_BAR))
            found.append(Timing(f"top {ALPHA:.0%}", _choosing(keys, int(ALPHA * tokens)), size, TOP_BAR))
    return found


def document(found: list[Timing], tokens: int) -> Document:
    """Return everything as JSON-ready values: each case beside reading the same bytes, the choices beside scoring."""
    times = {case.name: case.median_s for case in found}
    rows = []
    for case in found:
        choosing = case.name.startswith("top")
        dtype = "float16" if choosing else case.name.split()[1].rstrip(",")
        against = times[f"score {dtype}, 1 a head"] if choosing else times[f"read {dtype}"]
        row: dict[str, Any] = {"case": case.name, "key_bytes": case.key_bytes, "seconds": case.seconds}
        row["bytes_per_s"] = None if choosing else case.key_bytes / case.median_s
        row["figure"] = case.median_s / against if choosing else against / case.median_s
        row["means"] = "share of the time of scoring" if choosing else "share of the bandwidth of reading"
        if case.bar is not None:
            row["bar"] = case.bar
        rows.append(row)
    return {"tokens": tokens, "dim": DIM, "heads": HEADS, "threads": 1, "cases": rows}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the spill file goes (4.4 GB)")
    parser.add_argument("--repeat", type=int, default=20, help="runs of each case, in turns")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the tokens: for a look, not for the bars")


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    """Yield all cases, run in turns `repeat` times after one that compiles; then the spill file."""
    tokens, spilled = (TOKENS // 16, SPILLED // 16) if args.quick else (TOKENS, SPILLED)
    found = cases(tokens)
    for number in range(args.repeat + 1):
        for case in found:
            case.measure()
            if number == 0:
                case.seconds.clear()
        if number % 5 == 0:
            console.print(f"kernels: run {number} of {args.repeat}", soft_wrap=True)
    with workplace(args.dir) as scratch:
        yield {**document(found, tokens), "spill": measured_apart("spill_file", scratch, spilled, args.repeat)}


def bars(told: Document) -> list[Bar]:
    found = []
    for one in told["cases"]:
        if "bar" in one:
            what, sense = f"{one['case']}: {one['means']}", "<=" if one["bytes_per_s"] is None else ">="
            found.append(Bar(one["case"], what, one["figure"], sense, one["bar"]))
    fetch, memory, device = (told["spill"][key] for key in ("fetch", "memory", "device"))
    fetched = f"fetch of scattered pages of {fetch['request_bytes'] >> 10} KiB: of the disk's bandwidth"
    tokens, peak = f"{told['spill']['tokens']:,} tokens in a spill file: memory", memory["peak_bytes"] / MIB
    link = "bytes over the link, of those that scoring on the host moves"
    return [
        *found,
        Bar("fetch", fetched, fetch["figure"], ">=", FETCH_BAR),
        Bar("memory", tokens, peak, "<=", MEMORY_BAR / MIB, unit="MiB"),
        Bar("link", link, device["figure"], "<=", LINK_BAR, "emulated"),
    ]
