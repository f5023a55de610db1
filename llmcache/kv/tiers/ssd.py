"""The ssd tier: streams of pages in a spill file, accessed by this process or by the *emulated* device.

Many threads may read a file, and one may write it. A device's lock is held for a whole command, and for an execution
until all score blocks are consumed. All transferred bytes are counted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Bytes, Floats, Int64s
from llmcache.kv.kernels import score_pages
from llmcache.kv.spill import SpillFile
from llmcache.kv.spill.layout import KEYS, aligned, view_slots
from llmcache.kv.spill.reader import TakeRows
from llmcache.kv.tiers.config import Arrays, StoreConfig, Traffic
from llmcache.papers.csd import EmulatedCsd, ScoreBlock

Memory = tuple[Bytes, Bytes]  # memory for keys and for values
KEPT_BUFFERS = 4  # maximum number of free buffers: two each for the layer that computes and the one that is staged
SCORE_BYTES = 1 << 22  # bytes of keys that the host reads before it scores them
MOVED = (
    ("ssd", "cpu", "link_to_host_bytes"),
    ("cpu", "ssd", "link_to_device_bytes"),
    ("ssd", "device", "internal_read_bytes"),
    ("device", "ssd", "internal_written_bytes"),
)
"""Counters of a device report, and the tiers to which `Traffic` assigns them."""


class Buffers:
    """A pool of memory for pages and gathered rows; memory above `most_bytes` is freed when it is given back."""

    def __init__(self) -> None:
        self.most_bytes: int | None = None
        self._lock = threading.Lock()
        self._free: list[Memory] = []

    def take(self, key_bytes: int, value_bytes: int) -> Memory:
        with self._lock:
            for index, (keys, values) in enumerate(self._free):
                if keys.size >= key_bytes and values.size >= value_bytes:
                    return self._free.pop(index)
            del self._free[:1]  # too small, and replaced by the new memory
        # An eighth more, because the next step needs slightly more than this one.
        return aligned(key_bytes + key_bytes // 8), aligned(value_bytes + value_bytes // 8)

    def give_back(self, memory: Memory) -> None:
        if self.most_bytes is not None and sum(side.size for side in memory) > self.most_bytes:
            return
        with self._lock:
            self._free = [*self._free, memory][-KEPT_BUFFERS:]


class FileTier:
    """A spill file that this process reads and writes.

    Pages are numbered within their stream; reasons ("why") are those of `Traffic`.
    """

    def __init__(self, file: SpillFile, traffic: Traffic, threads: int | None) -> None:
        self.file, self._traffic, self._threads = file, traffic, threads
        self.buffers = Buffers()

    def pages(self, stream: int, layer: int) -> int:
        """Return the number of written pages of a layer; layer `shape.layers` stands for the tokens."""
        return self.file.pages_by_layer(stream)[layer]

    def append(self, stream: int, layer: int, arrays: Arrays) -> None:
        """Append keys and values [kv_heads, tokens, dim]; MissingRequirement, without an effect, if the disk is full."""
        self._traffic.add("cpu", "ssd", "spill", self.file.append(stream, layer, *arrays))

    def append_tokens(self, stream: int, ids: Int64s, positions: Int64s) -> None:
        self._traffic.add("cpu", "ssd", "spill", self.file.append_tokens(stream, ids, positions))

    def truncate(self, stream: int, pages: int) -> None:
        self.file.truncate(stream, pages)

    @contextlib.contextmanager
    def read(self, stream: int, layer: int, places: Int64s, why: str) -> Iterator[Arrays]:
        """Read whole pages into reused memory: they are valid within the context."""
        sizes = self.file.shape.slot_sizes
        memory = self.buffers.take(len(places) * sizes[0], len(places) * sizes[1])
        try:
            found = self.file.read(stream, layer, places, memory, self._threads)
            self._traffic.add("ssd", "cpu", why, len(places) * sum(sizes))
            yield found
        finally:
            self.buffers.give_back(memory)

    def read_through(self, stream: int, layer: int, places: Int64s, take: TakeRows, why: str) -> None:
        self.file.read_through(stream, layer, places, take, self._threads)
        self._traffic.add("ssd", "cpu", why, len(places) * sum(self.file.shape.slot_sizes))

    def read_rows(self, stream: int, layer: int, places: Int64s, rows: Int64s, why: str) -> Arrays:
        found, size_bytes = self.file.read_rows(stream, layer, places, rows)
        self._traffic.add("ssd", "cpu", why, size_bytes)
        return found

    def read_side(self, stream: int, layer: int, places: Int64s, side: int, why: str) -> NDArray[Any]:
        slots, sizes = self.file.read_slots(stream, layer, places, side), self.file.shape.slot_sizes
        self._traffic.add("ssd", "cpu", why, len(places) * (sum(sizes) if self.file.interleaved else sizes[side]))
        return view_slots(self.file.shape, slots, side)

    def score(
        self, stream: int, layer: int, places: Int64s, queries: Floats, combine: str, block_tokens: int
    ) -> Iterator[ScoreBlock]:
        """Yield the score blocks of pages; positions count from the start of the stream."""
        shape = self.file.shape
        share = max(1, SCORE_BYTES // shape.key_slot_bytes)
        for some in (places[first : first + share] for first in range(0, len(places), share)):
            keys = self.read_side(stream, layer, some, KEYS, "score")
            scores = score_pages(queries, keys, combine=combine, threads=self._threads)
            positions = (some[:, None] * shape.page_tokens + np.arange(shape.page_tokens)).reshape(-1)
            for start in range(0, len(positions), block_tokens):
                part = slice(start, start + block_tokens)
                for head, of_head in enumerate(scores):
                    yield ScoreBlock(head, positions[part], of_head[part])

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class CsdTier:
    """The *emulated* device, which gathers rows and scores keys itself; otherwise as `FileTier`."""

    def __init__(self, device: EmulatedCsd, traffic: Traffic) -> None:
        self.device, self._traffic = device, traffic
        self._lock = threading.RLock()
        self._busy = False

    @contextlib.contextmanager
    def _command(self, why: str) -> Iterator[EmulatedCsd]:
        with self._lock:
            if self._busy:
                raise ValueError("score_ssd: the device is busy until all score blocks are consumed")
            self._busy = True
            before = replace(self.device.report)
            try:
                yield self.device
            finally:
                self._busy = False
                for source, target, name in MOVED:
                    self._traffic.add(source, target, why, getattr(self.device.report, name) - getattr(before, name))

    def pages(self, stream: int, layer: int) -> int:
        return self.device.pages(stream, layer)

    def append(self, stream: int, layer: int, arrays: Arrays) -> None:
        """Write pages over the link; pages acknowledged before an error are kept."""
        with self._command("spill") as device:
            device.append(stream, layer, *arrays)

    def append_tokens(self, stream: int, ids: Int64s, positions: Int64s) -> None:
        with self._command("spill") as device:
            device.append_tokens(stream, ids, positions)

    def truncate(self, stream: int, pages: int) -> None:
        with self._command("spill") as device:
            device.truncate(stream, pages)

    @contextlib.contextmanager
    def read(self, stream: int, layer: int, places: Int64s, why: str) -> Iterator[Arrays]:
        with self._command(why) as device:
            found = device.read(stream, layer, places)
        yield found

    def read_side(self, stream: int, layer: int, places: Int64s, side: int, why: str) -> NDArray[Any]:
        with self._command(why) as device:
            found: NDArray[Any] = device.read(stream, layer, places, (side,))[0]
            return found

    def gather(self, stream: int, layer: int, positions: list[Int64s], why: str) -> Arrays:
        with self._command(why) as device:
            return device.gather(stream, layer, positions)

    def score(
        self, stream: int, layer: int, places: Int64s, queries: Floats, combine: str, block_tokens: int
    ) -> Iterator[ScoreBlock]:
        with self._command("score") as device:
            yield from device.execute(queries, stream, layer, pages=places, combine=combine, block_tokens=block_tokens)

    def flush(self) -> None:
        with self._command("spill") as device:
            device.flush()

    def restart(self) -> None:
        with self._command("restore") as device:
            device.restart()

    def close(self) -> None:
        with self._lock:
            self.device.close()


SsdTier = FileTier | CsdTier


def open_tier(config: StoreConfig, traffic: Traffic, create: bool) -> SsdTier | None:
    """Return the ssd tier of a store, created or opened, or None if there is no path."""
    if config.path is None:
        return None
    if config.ssd == "csd":
        options: dict[str, Any] = {"direct": config.direct, "threads": config.threads}
        return CsdTier(EmulatedCsd(config.path, config.shape, config.profile, create=create, **options), traffic)
    if create:
        file = SpillFile.create(config.path, config.shape, interleaved=config.interleaved, direct=config.direct)
    else:
        file = SpillFile.open(config.path, config.shape, direct=config.direct)
    return FileTier(file, traffic, config.threads)
