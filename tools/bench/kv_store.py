"""The KV store's benchmark: a million tokens of one layer on disk, the memory that takes, and how fast pages are fetched.

Fetching is measured in turns with plain reads of as many blocks of the same size. One process, as its memory is measured.
"""

from __future__ import annotations

import argparse
import json
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

from llmcache.kv.kernels.threads import run_all
from llmcache.kv.spill import KvShape
from llmcache.kv.spill.shape import Bytes, aligned
from llmcache.kv.tiers import KvStore, Selection, StoreConfig

from . import machine
from .signals import one_interrupt
from .simulate_traces import peak_bytes
from .simulatebench import workplace

SHAPE = KvShape("bench", layers=1, kv_heads=8, head_dim=128)
SCHEMA = "llmcache-bench-kvstore/1"
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
        "plain_seconds": read[1:], "figure": ratio, "bar": FETCH_BAR, "passed": ratio >= FETCH_BAR,
    }  # fmt: skip


def measure(directory: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Do all steps in a directory; returns what they took."""
    config = StoreConfig(SHAPE, cpu_pages=POOL_PAGES, path=directory / "store.kv")
    told: dict[str, Any] = {"schema": SCHEMA, "tokens": tokens, "pool_pages": POOL_PAGES}
    with KvStore(config) as store:
        told["prefill"] = {"seconds": prefill(store, tokens), "kv_bytes": tokens * SHAPE.token_bytes}
    start = time.perf_counter()
    with KvStore.restore(directory / "store.kv", config) as store:
        told["restore"] = {"seconds": time.perf_counter() - start}
        if store.length != tokens:
            raise SystemExit(f"{tokens} tokens were saved, {store.length} restored")
        told["fetch"] = fetch(store, rounds)
        peak = peak_bytes()
        told["memory"] = {"peak_bytes": peak, "bar": MEMORY_BAR, "passed": peak <= MEMORY_BAR}
        store.discard()
    return told


def table(told: dict[str, Any]) -> Table:
    """Return the figures and their bars."""
    made = Table(title=f"KV store: {told['tokens']:,} tokens of one layer, 8 heads of 128 halves (measured)")
    for name in ("what", "measured", "bar", ""):
        made.add_column(name, justify="left" if name in ("what", "") else "right")
    written, found, memory = (told[key] for key in ("prefill", "fetch", "memory"))
    speed = found["bytes"] / statistics.median(found["seconds"]) / 1e9
    rows = [
        ("prefill, written through and saved", f"{written['kv_bytes'] / written['seconds'] / 1e9:.2f} GB/s", "", None),
        ("restore", f"{told['restore']['seconds'] * 1e3:.0f} ms", "", None),
        (f"gather of {found['request_bytes'] >> 10} KiB pages", f"{speed:.2f} GB/s", "", None),
        ("", f"{found['figure']:.2f} of the disk", f"{found['bar']:g}", found),
        ("memory of the process", f"{memory['peak_bytes'] / 2**20:.0f} MiB", f"{memory['bar'] >> 20} MiB", memory),
    ]
    for what, measured, bar, one in rows:
        verdict = "" if one is None else "[green]pass[/green]" if one["passed"] else "[red]FAIL[/red]"
        made.add_row(what, measured, bar, verdict)
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
        told = {"machine": machine.describe(args.dir), **measure(scratch, tokens, args.rounds)}
    console.print(table(told))
    if args.json:
        part = args.json.with_name(args.json.name + ".part")
        part.write_text(json.dumps(told, indent=1) + "\n")
        part.replace(args.json)
    return 0 if told["fetch"]["passed"] and told["memory"]["passed"] else 1
