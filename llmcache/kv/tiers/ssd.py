"""The ssd tier: streams of pages in a spill file, read and written by this process or through the *emulated* device.

A file may be read by many threads, and written by one. A device does one command at a time: its lock is held from the
beginning of each to its end, for an execution as long as its score blocks are taken. Every byte is counted where it moves.
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
from llmcache.kv.csd import EmulatedCsd, ScoreBlock
from llmcache.kv.kernels import score_pages
from llmcache.kv.spill import SpillFile
from llmcache.kv.spill.layout import KEYS, aligned, view_slots
from llmcache.kv.spill.reader import TakeRows
from llmcache.kv.tiers.config import Arrays, StoreConfig, Traffic

Memory = tuple[Bytes, Bytes]
"""For keys and for values."""
KEPT_BUFFERS = 4
"""Free buffers that are kept: of one layer that computes and one that is staged, twice."""
SCORE_BYTES = 1 << 22
"""Keys that the host reads before it scores them."""
MOVED = (
    ("ssd", "cpu", "link_to_host_bytes"),
    ("cpu", "ssd", "link_to_device_bytes"),
    ("ssd", "device", "internal_read_bytes"),
    ("device", "ssd", "internal_written_bytes"),
)
"""What a device reports, as `Traffic` counts it."""


class Buffers:
    """Memory for pages that are read and rows that are gathered, used again once released: fresh memory is slow to get."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Memory] = []

    def take(self, key_bytes: int, value_bytes: int) -> Memory:
        """Returns aligned memory for at least so many bytes of keys and of values."""
        with self._lock:
            for index, (keys, values) in enumerate(self._free):
                if keys.size >= key_bytes and values.size >= value_bytes:
                    return self._free.pop(index)
        # An eighth more: the next step needs a little more than this one.
        return aligned(key_bytes + key_bytes // 8), aligned(value_bytes + value_bytes // 8)

    def give_back(self, memory: Memory) -> None:
        """Takes memory that nobody uses any more."""
        with self._lock:
            self._free = [memory, *self._free][:KEPT_BUFFERS]


class FileTier:
    """A spill file that this process reads and writes: whole pages come to the host, or blocks of them with chosen rows.

    Pages are numbered within their stream; reasons ("why") are those of `Traffic`.
    """

    def __init__(self, file: SpillFile, traffic: Traffic, threads: int | None) -> None:
        self.file, self._traffic, self._threads = file, traffic, threads
        self._buffers = Buffers()

    def pages(self, stream: int, layer: int) -> int:
        """Returns how many pages of a layer are written; layer `shape.layers` stands for the tokens."""
        return self.file.pages_by_layer(stream)[layer]

    def append(self, stream: int, layer: int, arrays: Arrays) -> None:
        """Writes keys and values [kv_heads, tokens, dim] behind the last page.

        EnvironmentProblem if there is no space, and then none of them is there.
        """
        self._traffic.add("cpu", "ssd", "spill", self.file.append(stream, layer, *arrays))

    def append_tokens(self, stream: int, ids: Int64s, positions: Int64s) -> None:
        """Writes ids and positions of tokens behind the last page of tokens; errors as `append`."""
        self._traffic.add("cpu", "ssd", "spill", self.file.append_tokens(stream, ids, positions))

    def truncate(self, stream: int, pages: int) -> None:
        """Takes away all pages of a stream from number `pages` on."""
        self.file.truncate(stream, pages)

    @contextlib.contextmanager
    def read(self, stream: int, layer: int, places: Int64s, why: str) -> Iterator[Arrays]:
        """Reads whole pages into memory that is used again: they are valid while the context lasts."""
        sizes = self.file.shape.slot_sizes
        memory = self._buffers.take(len(places) * sizes[0], len(places) * sizes[1])
        try:
            found = self.file.read(stream, layer, places, memory, self._threads)
            self._traffic.add("ssd", "cpu", why, len(places) * sum(sizes))
            yield found
        finally:
            self._buffers.give_back(memory)

    def read_through(self, stream: int, layer: int, places: Int64s, take: TakeRows, why: str) -> None:
        """Reads whole pages and hands them to `take`, some at a time, by many threads."""
        self.file.read_through(stream, layer, places, take, self._threads)
        self._traffic.add("ssd", "cpu", why, len(places) * sum(self.file.shape.slot_sizes))

    def read_rows(self, stream: int, layer: int, places: Int64s, rows: Int64s, why: str) -> Arrays:
        """Returns rows of the pages at `places` and no more of these than that takes; `SpillReader.read_rows`."""
        found, size_bytes = self.file.read_rows(stream, layer, places, rows)
        self._traffic.add("ssd", "cpu", why, size_bytes)
        return found

    def read_side(self, stream: int, layer: int, places: Int64s, side: int, why: str) -> NDArray[Any]:
        """Returns the keys (`side` 0) or values (1) of pages."""
        slots, sizes = self.file.read_slots(stream, layer, places, side), self.file.shape.slot_sizes
        self._traffic.add("ssd", "cpu", why, len(places) * (sum(sizes) if self.file.interleaved else sizes[side]))
        return view_slots(self.file.shape, slots, side)

    def score(
        self, stream: int, layer: int, places: Int64s, queries: Floats, combine: str, block_tokens: int
    ) -> Iterator[ScoreBlock]:
        """Reads keys to the host and yields their score blocks; positions count from the beginning of the stream."""
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
        """Returns when all that was written will survive the machine."""
        self.file.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self.file.close()


class CsdTier:
    """The *emulated* device: rows are gathered and keys scored where they lie; otherwise as `FileTier`."""

    def __init__(self, device: EmulatedCsd, traffic: Traffic) -> None:
        self.device, self._traffic = device, traffic
        self._lock = threading.RLock()
        self._busy = False

    @contextlib.contextmanager
    def _command(self, why: str) -> Iterator[EmulatedCsd]:
        """Holds the device, and counts what its commands move."""
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
        """Returns how many pages of a layer the device has acknowledged."""
        return self.device.pages(stream, layer)

    def append(self, stream: int, layer: int, arrays: Arrays) -> None:
        """Writes pages over the link; what was acknowledged before an error stays."""
        with self._command("spill") as device:
            device.append(stream, layer, *arrays)

    def append_tokens(self, stream: int, ids: Int64s, positions: Int64s) -> None:
        """Writes tokens over the link."""
        with self._command("spill") as device:
            device.append_tokens(stream, ids, positions)

    def truncate(self, stream: int, pages: int) -> None:
        """Takes away pages."""
        with self._command("spill") as device:
            device.truncate(stream, pages)

    @contextlib.contextmanager
    def read(self, stream: int, layer: int, places: Int64s, why: str) -> Iterator[Arrays]:
        """Reads whole pages over the link."""
        with self._command(why) as device:
            found = device.read(stream, layer, places)
        yield found

    def read_side(self, stream: int, layer: int, places: Int64s, side: int, why: str) -> NDArray[Any]:
        """Returns the keys or values of pages over the link."""
        with self._command(why) as device:
            found: NDArray[Any] = device.read(stream, layer, places, (side,))[0]
            return found

    def gather(self, stream: int, layer: int, positions: list[Int64s], why: str) -> Arrays:
        """Returns single rows, by ascending token numbers of each head; nothing else crosses the link."""
        with self._command(why) as device:
            return device.gather(stream, layer, positions)

    def score(
        self, stream: int, layer: int, places: Int64s, queries: Floats, combine: str, block_tokens: int
    ) -> Iterator[ScoreBlock]:
        """Yields what the device scores near its data, as halves."""
        with self._command("score") as device:
            yield from device.execute(queries, stream, layer, pages=places, combine=combine, block_tokens=block_tokens)

    def flush(self) -> None:
        """Returns when all is on the disk."""
        with self._command("spill") as device:
            device.flush()

    def restart(self) -> None:
        """Starts the device anew over its file; DataError if pages are missing that it had acknowledged."""
        with self._command("restore") as device:
            device.restart()

    def close(self) -> None:
        """Ends the device once its file is flushed."""
        with self._lock:
            self.device.close()


SsdTier = FileTier | CsdTier


def open_tier(config: StoreConfig, traffic: Traffic, create: bool) -> SsdTier | None:
    """Returns the ssd tier of a store, if it has one, made anew or opened."""
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
