"""Measure the kernels, the spill file and the store of the KV manager.

Kernels run on one core, interleaved with plain reads of the same memory. The spill file with an emulated device that scores
it, and a store with a million tokens of one layer, are each measured in a separate process, whose memory is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from llmcache.arrays import Int64s
from llmcache.errors import DataError
from llmcache.kv.kernels import score, top
from llmcache.kv.kernels.threads import run_all
from llmcache.kv.spill import KvShape, SpillFile, SpillReader
from llmcache.kv.spill.layout import aligned
from llmcache.kv.tiers import KvStore, Selection, StoreConfig
from llmcache.papers.csd import PROFILES, EmulatedCsd

from .harness import common_options, in_turns, measured_apart, timed, workplace
from .machine import peak_bytes
from .results import Document, Target

SCHEMA = "llmcache-bench-kv/3"
TOKENS, DIM, HEADS = 65536, 128, 8
SPILLED = 1 << 20  # tokens of one layer in the spill file
ALPHA = 0.2  # hillinfer.txt, section 4.2: the share of tokens in its experiments
SCORING_TARGET = 0.5  # share of the bandwidth of plain reads
TOP_TARGET = 0.2  # share of the time of scoring
FETCH_TARGET = 0.8  # share of the bandwidth of the same reads without a spill file
MEMORY_TARGET = 1 << 30
LINK_TARGET = 1 / 50  # share of the bytes that scoring on the host moves
MIB = 1 << 20
SHAPE = KvShape("bench", layers=1, kv_heads=8, head_dim=128)
CHUNK = 4096
FETCH_PAGES = 1024
THREADS = 8
POOL_PAGES = 64

Keys = NDArray[Any]


@numba.njit(nogil=True, cache=True)
def _sum(words):  # type: ignore[no-untyped-def]
    """Read all words: a lower bound for kernels that read all keys."""
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


class Kernel(NamedTuple):
    """One measured loop over all heads; `target`: the limit of its figure, None without one."""

    name: str
    run: Callable[[], object]
    key_bytes: int
    target: float | None = None


def kernels(tokens: int) -> Iterator[Kernel]:
    """Yield scoring and choosing over the keys [1, 1, tokens, DIM] of `HEADS` heads, which exceed the caches of a core."""
    random = np.random.default_rng(0)
    keys = [random.standard_normal((1, 1, tokens, DIM), dtype=np.float32).astype(np.float16) for _ in range(HEADS)]
    query = np.random.default_rng(1).standard_normal((1, 1, DIM), dtype=np.float32)
    words, size = [head.view(np.uint64).reshape(-1) for head in keys], sum(head.nbytes for head in keys)
    yield Kernel("read float16", partial(_each, _sum, words), size)
    scoring = partial(score, query, threads=1)
    yield Kernel("score float16, 1 query per head", partial(_each, scoring, keys), size, SCORING_TARGET)
    scores = [score(query, head, threads=1) for head in keys]
    for name, count in (("256", 256), (f"{ALPHA:.0%}", int(ALPHA * tokens))):
        yield Kernel(f"top {name}", partial(_each, partial(top, k=count, threads=1), scores), size, TOP_TARGET)


def _each(run: Callable[[Keys], object], heads: list[Keys]) -> None:
    for head in heads:
        run(head)


def document(found: list[Kernel], seconds: dict[str, list[float]], tokens: int) -> Document:
    """Return the results, ready for JSON: scoring relative to reading the same bytes, and choosing relative to scoring."""
    times = {name: statistics.median(runs) for name, runs in seconds.items()}
    read_s, score_s = times["read float16"], times["score float16, 1 query per head"]
    rows = []
    for case in found:
        took, choosing = times[case.name], case.name.startswith("top")
        row: dict[str, Any] = {"case": case.name, "key_bytes": case.key_bytes, "seconds": seconds[case.name]}
        row["bytes_per_s"] = None if choosing else case.key_bytes / took
        row["figure"] = took / score_s if choosing else read_s / took
        row["means"] = "time / time of scoring" if choosing else "bandwidth / bandwidth of reading"
        rows.append(row | ({} if case.target is None else {"target": case.target}))
    return {"tokens": tokens, "dim": DIM, "heads": HEADS, "threads": 1, "cases": rows}


# The spill file


def write(path: Path, tokens: int) -> dict[str, Any]:
    """Spill `tokens` random tokens; return duration and sizes."""
    noise = np.random.default_rng(0).standard_normal((8, CHUNK, 128), dtype=np.float32).astype(np.float16)
    start = time.perf_counter()
    with SpillFile.create(path, SHAPE) as file:
        for first in range(0, tokens, CHUNK):
            ids = np.arange(first, first + CHUNK)
            file.append(0, 0, noise, noise)
            file.append_tokens(0, ids, ids)
        file.flush()
        size, direct = path.stat().st_size, file.direct
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "file_bytes": size, "kv_bytes": tokens * SHAPE.token_bytes, "direct": direct}


def restore(path: Path, tokens: int) -> dict[str, Any]:
    start = time.perf_counter()
    with SpillReader.open(path, SHAPE) as file:
        seconds = time.perf_counter() - start
        if file.length(0) != tokens:
            raise SystemExit(f"{path}: {file.length(0)} tokens restored, {tokens} were written")
    return {"seconds": seconds}


def against_plain(path: Path, direct: bool, pages: Int64s, rounds: int, fetch: Callable[[Int64s], float]) -> dict[str, Any]:
    """Return the times of `fetch` for random pages, interleaved with plain reads of the same size and number.

    `fetch` takes page numbers out of `pages` and returns its seconds. `direct`: plain reads use O_DIRECT.
    """
    random, size = np.random.default_rng(1), SHAPE.key_slot_bytes
    buffers = aligned(2 * FETCH_PAGES * size).reshape(-1, size)
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))

    def read(index: int) -> None:
        os.preadv(fd, [buffers[index].data], int(offsets[index]))

    fetched, plain = [], []
    for _ in range(rounds + 1):
        fetched.append(fetch(random.choice(pages, FETCH_PAGES, replace=False)))
        offsets = np.sort(random.choice(path.stat().st_size // size - 1, len(buffers), replace=False)) * size
        start = time.perf_counter()
        run_all([partial(read, index) for index in range(len(buffers))], THREADS)
        plain.append(time.perf_counter() - start)
    os.close(fd)
    ratio = statistics.median(b / a for a, b in zip(fetched[1:], plain[1:], strict=True))
    return {
        "request_bytes": size, "bytes": buffers.nbytes, "threads": THREADS, "seconds": fetched[1:],
        "plain_seconds": plain[1:], "figure": ratio,
    }  # fmt: skip


def fetch(path: Path, rounds: int) -> dict[str, Any]:
    room = [aligned(FETCH_PAGES * size) for size in SHAPE.slot_sizes]
    with SpillReader.open(path, SHAPE) as file:

        def fetched_s(pages: Int64s) -> float:
            pages.sort()
            start = time.perf_counter()
            file.read(0, 0, pages, room, threads=THREADS)
            return time.perf_counter() - start

        return against_plain(path, file.direct, np.arange(file.pages(0, 0)), rounds, fetched_s)


def execute(path: Path, rounds: int) -> dict[str, Any]:
    """Score all keys in the emulated device; return the bytes over its link, and modelled and wall time separately."""
    queries = np.random.default_rng(2).standard_normal((8, 128), dtype=np.float32)
    wall, report = [], None
    with EmulatedCsd(path, SHAPE, PROFILES["smartssd"]) as device:
        for _ in range(rounds + 1):
            for _ in device.execute(queries, 0, 0):
                pass
            report = device.last
            wall.append(report.wall_ns)
    assert report is not None
    moved = report.link_to_host_bytes + report.link_to_device_bytes
    return {
        "emulated": True, "profile": "smartssd", "scored_keys": report.scored_keys, "link_bytes": moved,
        "host_scoring_bytes": report.internal_read_bytes, "modelled_ns": report.modelled_ns, "wall_ns": wall[1:],
        "figure": moved / report.internal_read_bytes,
    }  # fmt: skip


def spill(directory: Path, tokens: int, rounds: int) -> Document:
    """Return the results of all steps on a spill file in `directory`."""
    path = directory / "bench.kv"
    measured = {
        "tokens": tokens,
        "write": write(path, tokens),
        "restore": restore(path, tokens),
        "fetch": fetch(path, rounds),
    }
    measured["memory"] = {"peak_bytes": peak_bytes()}  # of this process; the device is a process of its own
    return {**measured, "device": execute(path, min(rounds, 3))}


# The store


def stored(directory: Path, tokens: int, rounds: int) -> Document:
    """Return the results of a store with `tokens` in `directory`: prefill, restore, and gathering pages not in memory."""
    document: Document = {"tokens": tokens, "pool_pages": POOL_PAGES}
    path = directory / "store.kv"
    config = StoreConfig(SHAPE, cpu_pages=POOL_PAGES, path=path)
    with KvStore(config) as store:
        document["prefill"] = {"seconds": prefill(store, tokens), "kv_bytes": tokens * SHAPE.token_bytes}
    start = time.perf_counter()
    with KvStore.restore(path, config) as store:
        document["restore"] = {"seconds": time.perf_counter() - start}
        if store.length != tokens:
            raise DataError(f"{tokens} tokens were saved, {store.length} restored")
        document["fetch"] = gather(store, path, rounds)
        document["memory"] = {"peak_bytes": peak_bytes()}
        store.discard()
    return document


def prefill(store: KvStore, tokens: int) -> float:
    noise = np.random.default_rng(0).standard_normal((1, 8, CHUNK, 128), dtype=np.float32).astype(np.float16)
    start = time.perf_counter()
    for first in range(0, tokens, CHUNK):
        ids = np.arange(first, first + CHUNK)[None]
        store.append(0, noise, noise)
        store.commit(ids, ids)
    store.save()
    return time.perf_counter() - start


def gather(store: KvStore, path: Path, rounds: int) -> dict[str, Any]:
    def gathered_s(pages: Int64s) -> float:
        selection = Selection.of_pages(np.tile(pages, (1, SHAPE.kv_heads, 1)), SHAPE.page_tokens)
        start = time.perf_counter()
        store.gather(0, selection).release()
        return time.perf_counter() - start

    middle = store.middle
    cold = np.flatnonzero(~store.in_cpu(0, 0)[middle.start : middle.stop]) + middle.start
    return against_plain(path, True, cold, rounds, gathered_s)


# The benchmark


def options(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "the spill file, 4.4 GB", "a sixteenth of the tokens", repeat=20)


def measure(args: argparse.Namespace, console: Console) -> Iterator[Document]:
    tokens, spilled = (TOKENS // 16, SPILLED // 16) if args.quick else (TOKENS, SPILLED)
    found = list(kernels(tokens))
    seconds = in_turns({case.name: timed(case.run) for case in found}, args.repeat, console)
    with workplace(args.dir) as scratch:
        apart = {step: measured_apart("kv", step, scratch, spilled, args.repeat) for step in STEPS}
    yield {**document(found, seconds, tokens), **apart}


def targets(document: Document) -> list[Target]:
    found = []
    for one in document["cases"]:
        if "target" in one:
            what, sense = f"{one['case']}: {one['means']}", "<=" if one["bytes_per_s"] is None else ">="
            found.append(Target(one["case"], what, one["figure"], sense, one["target"]))
    fetch, memory, device = (document["spill"][key] for key in ("fetch", "memory", "device"))
    fetched = f"fetch of scattered {fetch['request_bytes'] >> 10} KiB pages: bandwidth / disk bandwidth"
    store = document["store"]
    gathered = f"KvStore.gather of scattered {store['fetch']['request_bytes'] >> 10} KiB pages: bandwidth / disk bandwidth"
    tokens, peak = f"peak memory with {document['spill']['tokens']:,} tokens in a spill file", memory["peak_bytes"] / MIB
    link = "bytes over the link / bytes that scoring on the host moves"
    return [
        *found,
        Target("fetch", fetched, fetch["figure"], ">=", FETCH_TARGET),
        Target("memory", tokens, peak, "<=", MEMORY_TARGET / MIB, unit="MiB"),
        Target("gather", gathered, store["fetch"]["figure"], ">=", FETCH_TARGET),
        Target(
            "store memory", f"peak memory with {store['tokens']:,} tokens in a KV store on disk",
            store["memory"]["peak_bytes"] / MIB, "<=", MEMORY_TARGET / MIB, unit="MiB",
        ),
        Target("link", link, device["figure"], "<=", LINK_TARGET, "emulated"),
    ]  # fmt: skip


STEPS: dict[str, Callable[[Path, int, int], Document]] = {"spill": spill, "store": stored}

if __name__ == "__main__":  # as harness.measured_apart runs it
    print(json.dumps(STEPS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
