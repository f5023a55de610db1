"""Writes and reads a spill file, and has an emulated device score it; a program, because its memory is measured.

`python -m tools.bench.clients.spill_file DIRECTORY TOKENS ROUNDS` prints what it measured as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmcache.arrays import Int64s
from llmcache.kv.csd import PROFILES, EmulatedCsd
from llmcache.kv.kernels.threads import run_all
from llmcache.kv.spill import KvShape, PageBuffer, SpillFile, SpillReader
from llmcache.kv.spill.layout import aligned
from tools.bench.machine import peak_bytes

SHAPE = KvShape("bench", layers=1, kv_heads=8, head_dim=128)
CHUNK = 4096
FETCH_PAGES = 1024
THREADS = 8


def write(path: Path, tokens: int) -> dict[str, Any]:
    """Spill `tokens` of noise; returns how fast."""
    noise = np.random.default_rng(0).standard_normal((8, CHUNK, 128), dtype=np.float32).astype(np.float16)
    start = time.perf_counter()
    with SpillFile.create(path, SHAPE) as file:
        for first in range(0, tokens, CHUNK):
            ids = np.arange(first, first + CHUNK)
            file.append(0, 0, noise, noise)
            file.append_tokens(0, ids, ids)
        file.flush()
        size, direct = file.size_bytes, file.direct
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "file_bytes": size, "kv_bytes": tokens * SHAPE.token_bytes, "direct": direct}


def restore(path: Path, tokens: int) -> dict[str, Any]:
    """Open the file; returns how long that took."""
    start = time.perf_counter()
    with SpillReader.open(path, SHAPE) as file:
        seconds = time.perf_counter() - start
        if file.length(0) != tokens:
            raise SystemExit(f"{path}: {file.length(0)} tokens restored, {tokens} were written")
    return {"seconds": seconds}


def against_plain(path: Path, direct: bool, pages: Int64s, rounds: int, fetch: Callable[[Int64s], float]) -> dict[str, Any]:
    """Return what that `fetch` says scattered ones of `pages` take, in turns with as many plain reads of their size."""
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
    """Fetch scattered pages, in turns with plain reads."""
    room = PageBuffer(SHAPE, FETCH_PAGES)
    with SpillReader.open(path, SHAPE) as file:

        def fetched_s(pages: Int64s) -> float:
            pages.sort()
            start = time.perf_counter()
            file.read(0, 0, pages, room, threads=THREADS)
            return time.perf_counter() - start

        return against_plain(path, file.direct, np.arange(file.pages(0, 0)), rounds, fetched_s)


def execute(path: Path, rounds: int) -> dict[str, Any]:
    """Score everything in the emulated device; returns what crossed its link, modelled and wall time apart."""
    queries = np.random.default_rng(2).standard_normal((8, 128), dtype=np.float32)
    wall, report = [], None
    with EmulatedCsd(path, SHAPE, PROFILES["smartssd"]) as device:
        index = device.load()
        device.activate(index)
        for _ in range(rounds + 1):
            report = device.execute(index, queries, 0, 0).drain()
            wall.append(report.wall_ns)
    assert report is not None
    moved = report.link_to_host_bytes + report.link_to_device_bytes
    return {
        "emulated": True, "profile": "smartssd", "scored_keys": report.scored_keys, "link_bytes": moved,
        "host_scoring_bytes": report.internal_read_bytes, "modelled_ns": report.modelled_ns, "wall_ns": wall[1:],
        "figure": moved / report.internal_read_bytes,
    }  # fmt: skip


def main() -> int:
    """Do all steps in a directory and print what they took."""
    directory, tokens, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    path = directory / "bench.kv"
    told: dict[str, Any] = {"tokens": tokens, "write": write(path, tokens), "restore": restore(path, tokens)}
    told["fetch"] = fetch(path, rounds)
    told["memory"] = {"peak_bytes": peak_bytes()}  # of this process: the device is another, and has its own
    told["device"] = execute(path, min(rounds, 3))
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
