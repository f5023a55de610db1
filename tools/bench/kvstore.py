"""Measure a KV store with a million tokens of one layer: its memory, and how fast it fetches pages.

The benchmark is one process, because its memory is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from llmcache.arrays import Int64s
from llmcache.errors import DataError
from llmcache.kv.tiers import KvStore, Selection, StoreConfig

from .harness import workplace
from .kv import CHUNK, SHAPE, against_plain
from .machine import peak_bytes
from .results import Document, Target

SCHEMA = "llmcache-bench-kvstore/2"
MIB = 1 << 20
TOKENS = 1 << 20
POOL_PAGES = 64
FETCH_TARGET = 0.8  # share of the bandwidth of the same reads without a store
MEMORY_TARGET = 1 << 30


def prefill(store: KvStore, tokens: int) -> float:
    noise = np.random.default_rng(0).standard_normal((1, 8, CHUNK, 128), dtype=np.float32).astype(np.float16)
    start = time.perf_counter()
    for first in range(0, tokens, CHUNK):
        ids = np.arange(first, first + CHUNK)[None]
        store.append(0, noise, noise)
        store.commit(ids, ids)
    store.save()
    return time.perf_counter() - start


def fetch(store: KvStore, path: Path, rounds: int) -> dict[str, Any]:
    """Measure how fast pages that are not in memory are gathered, against plain reads."""

    def gathered_s(pages: Int64s) -> float:
        selection = Selection.of_pages(np.tile(pages, (1, SHAPE.kv_heads, 1)), SHAPE.page_tokens)
        start = time.perf_counter()
        store.gather(0, selection).release()
        return time.perf_counter() - start

    middle = store.middle
    cold = np.flatnonzero(~store.in_cpu(0, 0)[middle.start : middle.stop]) + middle.start
    return against_plain(path, True, cold, rounds, gathered_s)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir", type=Path, default=Path("/var/tmp"), help="directory for the spill file, 4.4 GB [%(default)s]"
    )
    parser.add_argument("--rounds", type=int, default=20, help="fetches, interleaved with plain reads [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the tokens; not comparable with the targets")


def measure(args: argparse.Namespace, _console: Console) -> Iterator[Document]:
    tokens = TOKENS // 16 if args.quick else TOKENS
    document: Document = {"tokens": tokens, "pool_pages": POOL_PAGES}
    with workplace(args.dir) as scratch:
        config = StoreConfig(SHAPE, cpu_pages=POOL_PAGES, path=scratch / "store.kv")
        with KvStore(config) as store:
            document["prefill"] = {"seconds": prefill(store, tokens), "kv_bytes": tokens * SHAPE.token_bytes}
        start = time.perf_counter()
        with KvStore.restore(scratch / "store.kv", config) as store:
            document["restore"] = {"seconds": time.perf_counter() - start}
            if store.length != tokens:
                raise DataError(f"{tokens} tokens were saved, {store.length} restored")
            document["fetch"] = fetch(store, scratch / "store.kv", args.rounds)
            document["memory"] = {"peak_bytes": peak_bytes()}
            store.discard()
    yield document


def targets(document: Document) -> list[Target]:
    gathered = (
        f"KvStore.gather of scattered {document['fetch']['request_bytes'] >> 10} KiB pages: bandwidth / disk bandwidth"
    )
    memory = f"peak memory with {document['tokens']:,} tokens in a KV store on disk"
    peak = document["memory"]["peak_bytes"] / MIB
    return [
        Target("gather", gathered, document["fetch"]["figure"], ">=", FETCH_TARGET),
        Target("memory", memory, peak, "<=", MEMORY_TARGET / MIB, unit="MiB"),
    ]
