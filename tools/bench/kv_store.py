"""The KV store's benchmark: a million tokens of one layer on disk, the memory that takes, and how fast pages are fetched.

Fetching is measured in turns with plain reads of as many blocks of the same size. One process, as its memory is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from llmcache.arrays import Bytes
from llmcache.kv.kernels.threads import run_all
from llmcache.kv.spill import KvShape
from llmcache.kv.spill.layout import aligned
from llmcache.kv.tiers import KvStore, Selection, StoreConfig

from . import machine, results
from .bars import Bar, exit_code, with_bars
from .bars import table as bar_table
from .signals import one_interrupt
from .simulate_traces import peak_bytes
from .simulatebench import workplace

SHAPE = KvShape("bench", layers=1, kv_heads=8, head_dim=128)
SCHEMA = "llmcache-bench-kvstore/2"
COMMAND = "tools/bench/kvstore"
MIB = 1 << 20
TOKENS = 1 << 20
CHUNK = 4096
FETCH_PAGES = 1024
THREADS = 8
POOL_PAGES = 64
FETCH_BAR = 0.8  # of what the same reads take without a store
MEMORY_BAR = 1 << 30


def prefill(store: KvStore, tokens: int) -> float:
    """Append `tokens` of noise; returns the seconds."""
    noise = np.random.default_rng(0).standard_normal((1, 8, CHUNK, 128), dtype=np.float32).astype(np.float16)
    start = time.perf_counter()
    for first in range(0, tokens, CHUNK):
        ids = np.arange(first, first + CHUNK)[None]
        store.append(0, noise, noise)
        store.commit(ids, ids)
    store.save()
    return time.perf_counter() - start


def plain(fd: int, offsets: NDArray[np.int64], buffers: Bytes) -> float:
    """Seconds of reading a slot at each offset with as many threads, without anything else."""

    def read(index: int) -> None:
        os.preadv(fd, [buffers[index].data], int(offsets[index]))

    start = time.perf_counter()
    run_all([partial(read, index) for index in range(len(offsets))], THREADS)
    return time.perf_counter() - start


def fetch(store: KvStore, rounds: int) -> dict[str, Any]:
    """Gather scattered pages that are not in memory, and read as many slots plainly, in turns."""
    random = np.random.default_rng(1)
    size, middle = SHAPE.key_slot_bytes, store.middle
    buffers = aligned(2 * FETCH_PAGES * size).reshape(-1, size)
    cold = np.flatnonzero(~store.in_cpu(0, 0)[middle.start : middle.stop]) + middle.start
    assert store.config.path is not None
    fd = os.open(store.config.path, os.O_RDONLY | os.O_DIRECT)
    fetched, read = [], []
    for _ in range(rounds + 1):
        pages = random.choice(cold, min(len(cold), FETCH_PAGES), replace=False)
        selection = Selection.of_pages(np.tile(pages, (1, SHAPE.kv_heads, 1)), SHAPE.page_tokens)
        start = time.perf_counter()
        store.gather(0, selection).release()
        fetched.append(time.perf_counter() - start)
        offsets = np.sort(random.choice(store.config.path.stat().st_size // size - 1, 2 * len(pages), replace=False)) * size
        read.append(plain(fd, offsets, buffers))
    os.close(fd)
    ratio = statistics.median(b / a for a, b in zip(fetched[1:], read[1:], strict=True))
    return {
        "request_bytes": size, "bytes": 2 * len(pages) * size, "threads": THREADS, "seconds": fetched[1:],
        "plain_seconds": read[1:], "figure": ratio,
    }  # fmt: skip


def measure(directory: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Do all steps in a directory; returns what they took."""
    config = StoreConfig(SHAPE, cpu_pages=POOL_PAGES, path=directory / "store.kv")
    told: dict[str, Any] = {"tokens": tokens, "pool_pages": POOL_PAGES}
    with KvStore(config) as store:
        told["prefill"] = {"seconds": prefill(store, tokens), "kv_bytes": tokens * SHAPE.token_bytes}
    start = time.perf_counter()
    with KvStore.restore(directory / "store.kv", config) as store:
        told["restore"] = {"seconds": time.perf_counter() - start}
        if store.length != tokens:
            raise SystemExit(f"{tokens} tokens were saved, {store.length} restored")
        told["fetch"] = fetch(store, rounds)
        told["memory"] = {"peak_bytes": peak_bytes()}
        store.discard()
    return told


def bars(told: dict[str, Any]) -> list[Bar]:
    """Return the bars of the store: how fast pages are gathered, and the memory of a million tokens."""
    gathered = f"KvStore.gather of scattered pages of {told['fetch']['request_bytes'] >> 10} KiB: of the disk's bandwidth"
    memory = f"{told['tokens']:,} tokens in a KV store on disk: memory"
    peak = told["memory"]["peak_bytes"] / MIB
    return [
        Bar(5, "gather", gathered, told["fetch"]["figure"], ">=", FETCH_BAR, COMMAND),
        Bar(5, "memory", memory, peak, "<=", MEMORY_BAR / MIB, COMMAND, unit="MiB"),
    ]


def table(told: dict[str, Any]) -> Table:
    """Return the figures."""
    made = Table(title=f"KV store: {told['tokens']:,} tokens of one layer, 8 heads of 128 halves (measured)")
    for name in ("what", "measured"):
        made.add_column(name, justify="left" if name == "what" else "right")
    written, found = (told[key] for key in ("prefill", "fetch"))
    speed = found["bytes"] / statistics.median(found["seconds"]) / 1e9
    rows = [
        ("prefill, written through and saved", f"{written['kv_bytes'] / written['seconds'] / 1e9:.2f} GB/s"),
        ("restore", f"{told['restore']['seconds'] * 1e3:.0f} ms"),
        (f"gather of {found['request_bytes'] >> 10} KiB pages", f"{speed:.2f} GB/s"),
    ]
    for what, measured in rows:
        made.add_row(what, measured)
    return made


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every bar is reached, 1 if not."""
    parser = argparse.ArgumentParser(prog="tools/bench/kvstore", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the spill file goes (4.4 GB)")
    parser.add_argument("--rounds", type=int, default=20, help="fetches, each with plain reads")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the tokens: for a look, not for the bars")
    parser.add_argument("--json", type=Path, help="write every run here")
    args = parser.parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    tokens = TOKENS // 16 if args.quick else TOKENS
    with one_interrupt(), workplace(args.dir) as scratch:
        about = {"schema": SCHEMA, "machine": machine.describe(args.dir)}
        told = results.rounded({**about, **measure(scratch, tokens, args.rounds)})
    judged = bars(told)
    console.print(table(told), bar_table(judged))
    if args.json:
        results.write(args.json, with_bars(told, judged))
    return exit_code(judged)
