"""Compare trees of keys with a scan of all keys: the key heads of one layer, on one core, interleaved.

Keys are clustered, where a tree helps, or random, where it finds little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from llmcache.kv.index.dci import DciIndex, DciSettings
from llmcache.kv.index.scorers import AutoScorer, DciScorer, ExactScorer, QuestScorer, ScorerSettings, as_pages, recall_of
from llmcache.kv.kernels import score_pages, top
from llmcache.kv.spill.layout import KvShape

from .harness import common_options
from .results import Document, Target, markdown, worst

SCHEMA = "llmcache-bench-kvindex/2"
K, PAGE = 64, 16
HEADS, QUERIES, PAGES = 4, 48, 128
SIZES = (16384, 65536, 262144)
RECALL, TOUCHED = 0.9, 0.05
FASTER, INSERT_MS, AUTO = 20.0, 1.0, 1.2
DIM = 128
CLUSTERS, SPREAD, ASTRAY = 256, 0.35, 1.0
Floats = NDArray[np.float32]
Search = Callable[[Floats], NDArray[np.int64]]


class Keys(NamedTuple):
    """`keys` [n, DIM] float32, `more` keys of the same distribution for insertion, and `queries` [q, DIM]."""

    keys: Floats
    more: Floats
    queries: Floats


def clustered(count: int, more: int, queries: int, seed: int = 0) -> Keys:
    """Return keys around `CLUSTERS` centres of very different popularity, and queries near centres drawn by popularity."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((CLUSTERS, DIM), dtype=np.float32)
    popularity = random.dirichlet(np.ones(CLUSTERS) / 2)

    def around(size: int, spread: float) -> Floats:
        noise = random.standard_normal((size, DIM), dtype=np.float32)
        found: Floats = centres[random.choice(CLUSTERS, size, p=popularity)] + np.float32(spread) * noise
        return found

    return Keys(around(count, SPREAD), around(more, SPREAD), around(queries, ASTRAY))


def gaussian(count: int, more: int, queries: int, seed: int = 0) -> Keys:
    random = np.random.default_rng(seed)
    sizes = (count, more, queries)
    return Keys(*(random.standard_normal((size, DIM), dtype=np.float32) for size in sizes))


KINDS = {"clustered": clustered, "gaussian": gaussian}


def in_turns(
    searches: dict[str, Search], queries: Floats, truth: NDArray[np.int64], rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds per query and the mean recall of each search.

    The searches run in random order for each query, because a search after a scan finds the CPU caches replaced.
    """
    random = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in searches}
    hits: dict[str, list[float]] = {name: [] for name in searches}
    for search in searches.values():  # the first call compiles; `auto` needs some queries for its trial
        for query in queries[:32]:
            search(query)
    for _ in range(rounds):
        for query, best in zip(queries, truth, strict=True):
            for name in map(str, random.permutation(list(searches))):
                begin = time.perf_counter()
                found = searches[name](query)
                seconds[name].append(time.perf_counter() - begin)
                hits[name].append(recall_of(found, best))
    return seconds, {name: statistics.mean(shares) for name, shares in hits.items()}


def scorers(fp16_keys: NDArray[np.float16]) -> dict[str, Any]:
    """Return every scorer, filled with all keys."""
    shape = KvShape("bench", 1, HEADS, DIM, "float16", PAGE)
    made = {
        kind.name: kind(shape, 0, ScorerSettings(threads=1)) for kind in (ExactScorer, AutoScorer, DciScorer, QuestScorer)
    }
    for scorer in made.values():
        scorer.add(fp16_keys)
    return made


def built(keys: Floats) -> tuple[list[DciIndex], list[float]]:
    """Return an index for each head, and the CPU seconds of building it. CPU time is less affected by other load than wall
    time.
    """
    indexes = [DciIndex(DIM, DciSettings(seed=head)) for head in range(len(keys))]
    seconds = []
    for index, own in zip(indexes, keys, strict=True):
        begin = time.thread_time()
        index.insert(own, np.arange(len(own)))
        seconds.append(time.thread_time() - begin)
    return indexes, seconds


def insertion(index: DciIndex, more: Floats) -> list[float]:
    """Return the seconds of inserting each page of 16 tokens."""
    seconds = []
    for first in range(0, len(more), PAGE):
        at = len(index)
        begin = time.perf_counter()
        index.insert(more[first : first + PAGE], np.arange(at, at + PAGE))
        seconds.append(time.perf_counter() - begin)
    return seconds


def best_of(keys: Floats, queries: Floats) -> NDArray[np.int64]:
    """Return the best tokens [queries, heads, K] of keys [heads, n, DIM] for queries [queries, heads, DIM]."""
    found = [top(queries[:, head] @ own.T, K) for head, own in enumerate(keys)]
    return np.stack(found, axis=1)


def figures(kind: str, count: int, rounds: int) -> dict[str, Any]:
    """Return all figures for one kind and number of keys.

    `scan` reads pages in the layout of the store and its file: all heads in each page.
    """
    made = [KINDS[kind](count, PAGE * PAGES, QUERIES, head) for head in range(HEADS)]
    keys, queries = np.stack([one.keys for one in made]), np.stack([one.queries for one in made], axis=1)
    fp16_keys = keys.astype(np.float16)
    indexes, build_s = built(keys)
    pages = np.ascontiguousarray(as_pages(fp16_keys, PAGE))
    used = scorers(fp16_keys)
    searches: dict[str, Search] = {
        "scan": lambda query: top(score_pages(query, pages, threads=1), K, threads=1),
        "tree": lambda query: np.stack([one.query(query[at : at + 1], K)[0].tokens for at, one in enumerate(indexes)]),
    }
    searches |= {name: partial(scorer.top, k=K) for name, scorer in used.items()}
    seconds, recall = in_turns(searches, queries, best_of(fp16_keys.astype(np.float32), queries), rounds)
    touched = [one.query(query[at : at + 1], K)[0].touched for query in queries for at, one in enumerate(indexes)]
    levels = [int(points) for points in indexes[0].tree.population[1:] if points]
    size = indexes[0].size_bytes
    return {
        "kind": kind, "keys": count, "levels": levels, "touched": statistics.mean(touched) / count,
        "bytes_per_key": size / count, "build_cpu_s": build_s, "insert": spread(insertion(indexes[0], made[0].more)),
        "times": {name: spread(times) for name, times in seconds.items()}, "recall": recall,
        "auto": {"uses": used["auto"].used.name, "why": used["auto"].why},
    }  # fmt: skip


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the summary of many short runs: median, quartiles and number."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"median_s": middle, "low_quartile_s": low, "high_quartile_s": high, "runs": len(seconds)}


def targets(document: Document) -> list[Target]:
    """Return the targets, each by its worst row. Keys without clusters have one only for `auto`."""
    rows: list[dict[str, Any]] = document["rows"]
    clustered, largest = [row for row in rows if row["kind"] == "clustered"], rows[-1]["keys"]

    def median_s(row: dict[str, Any], search: str) -> float:
        return float(row["times"][search]["median_s"])

    def auto(row: dict[str, Any]) -> float:
        enough = [median_s(row, name) for name in ("exact", "dci") if row["recall"][name] >= RECALL]
        return median_s(row, "auto") / min(enough)

    def faster(row: dict[str, Any]) -> float:
        return median_s(row, "scan") / median_s(row, "tree")

    def insert_ms(row: dict[str, Any]) -> float:
        return 1e3 * float(row["insert"]["median_s"])

    def of(some: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> Iterator[tuple[str, float]]:
        return ((f"{row['kind']}, {row['keys']:,} keys", value(row)) for row in some)

    large = [row for row in clustered if row["keys"] == largest]
    recall = of(clustered, lambda row: float(row["recall"]["tree"]))
    touched = of(clustered, lambda row: float(row["touched"]))
    return [
        *worst("auto", "time of auto / time of the better of exact and dci", of(rows, auto), "<=", AUTO),
        *worst("recall", "recall@64", recall, ">=", RECALL),
        *worst("touched", "share of keys touched", touched, "<=", TOUCHED),
        *worst("faster", "speedup over the scan", of(large, faster), ">=", FASTER),
        *worst("insert", "insertion of a page of 16 keys", of(large, insert_ms), "<=", INSERT_MS, unit="ms"),
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="how often each query is run [%(default)s]")
    common_options(parser, quick="an eighth of the keys")


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    rows, sizes = [], [size // 8 if args.quick else size for size in SIZES]
    for kind in KINDS:
        for size in sizes:
            console.print(f"{kind}: {size:,} keys", soft_wrap=True)
            rows.append(figures(kind, size, args.rounds))
    about = {"dim": DIM, "heads": HEADS, "k": K, "threads": 1, "settings": asdict(DciSettings())}
    yield {**about, "rows": rows}


def table(document: Document) -> str:
    head = ["keys", "recall@64", "keys touched", "scan µs", "tree µs", "speedup", "`auto` uses"]
    rows = []
    for one in document["rows"]:
        scan, tree = (1e6 * one["times"][side]["median_s"] for side in ("scan", "tree"))
        found = [f"{one['recall']['tree']:.3f}", f"{one['touched']:.1%}", f"{scan:.0f}", f"{tree:.0f}", f"{scan / tree:.1f}"]
        rows.append([f"{one['kind']}, {one['keys'] // 1024} Ki", *found, one["auto"]["uses"]])
    return markdown(head, rows, texts=(0, 6))
